"""Patched models under transformers' Trainer, and models that accelerate has taken."""

from __future__ import annotations

import npu_fused_linear_cross_entropy
import npu_rms_norm
import pytest
import torch
from causal_lms import LAYERS, PATCHES, VOCABULARY, batch, make, patch_all, transformers

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("one_thread")


def trained(patched, folder, **options):
    """The losses of four steps of two batches each, that of the evaluation, and predictions."""
    model = make("Gemma2")
    if patched:
        patch_all(model)
    rows = zip(*batch(rows=12).values(), strict=True)
    data = [{"input_ids": input_ids, "labels": labels} for input_ids, labels in rows]
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return torch.tensor([*losses, trainer.evaluate()["eval_loss"]]), trainer.predict(data[:4]).predictions


@pytest.mark.parametrize(
    "options",
    [{"gradient_checkpointing": True}, *(pytest.param(each, marks=pytest.mark.nightly) for each in ({}, {"bf16": True}))],
    ids=str,
)
@pytest.mark.slow
def test_trainer_gets_the_original_losses(options, tmp_path):
    losses, predictions = trained(True, tmp_path, **options)
    expected, _ = trained(False, tmp_path, **options)
    assert len(losses) == 5
    assert losses[3] < 0.9 * losses[0]  # the steps did something
    # Four steps of Adam on gradients that are off by less than a rounding of their dtype.
    rounding = torch.finfo(torch.bfloat16 if "bf16" in options else torch.float32).eps
    assert torch.allclose(losses, expected, rtol=4 * rounding)
    logits = predictions[0] if isinstance(predictions, tuple) else predictions
    assert logits.shape[-1] == VOCABULARY  # in evaluation there are logits, as before


def test_models_that_accelerate_moves_are_left():
    model = make("Llama").eval()
    accelerate.cpu_offload(model, execution_device="cpu")
    types = [type(module) for module in model.modules()]
    reports = [patch(model) for patch in PATCHES.values()]
    assert [type(module) for module in model.modules()] == types
    assert [len(report.left) for report in reports] == [2 * LAYERS + 1, 1, 1]
    assert {entry.text for report in reports for entry in report.left} == {"accelerate moves its parameters"}


def test_what_accelerate_puts_around_a_model_goes_first():
    accelerate.state.AcceleratorState._reset_state(True)  # of a trainer before, whose precision is another
    model = make("Llama")
    report = npu_fused_linear_cross_entropy.patch(model)
    prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    loss = prepared(**batch()).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="model cannot be restored, its forward was replaced"):
        report.undo()
    unwrapped = accelerate.utils.extract_model_from_parallel(prepared, keep_fp32_wrapper=False)
    report.undo()
    assert type(unwrapped) is transformers.LlamaForCausalLM
    assert npu_rms_norm.patch(unwrapped).replaced
