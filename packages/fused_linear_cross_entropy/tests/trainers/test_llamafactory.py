"""A model that LLaMA-Factory loads and trains, with our loss inside."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("llamafactory", reason="LLaMA-Factory is not installed")

PROGRAM = """
import json, os, sys, types
from pathlib import Path
import torch, transformers
from tokenizers import Tokenizer, models, pre_tokenizers

sys.modules["torchaudio"] = types.ModuleType("torchaudio")  # LLaMA-Factory imports it for sound, which there is none of
folder, stage = Path(sys.argv[1]), sys.argv[2]
words = ["<pad>", "<end>", "<unk>", *(f"w{number}" for number in range(60))]
inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokens = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **tokens).save_pretrained(folder)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
torch.manual_seed(0)
config = transformers.Qwen3Config(**sizes, num_hidden_layers=1, vocab_size=64)
transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
answers = [" ".join(f"w{(7 * row + word) % 60}" for word in range(9)) for row in range(8)]
rows = [{"instruction": "w1 w2", "input": "", "output": answer, "chosen": answer, "rejected": "w3 w4"} for answer in answers]
(folder / "rows.json").write_text(json.dumps(rows))
columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"} if stage == "dpo" else None
known = {"file_name": "rows.json", **({"ranking": True, "columns": columns} if columns else {})}
(folder / "dataset_info.json").write_text(json.dumps({"tiny": known}))

from npu_fused_linear_cross_entropy.integrations import llamafactory as integration
from llamafactory.train.tuner import run_exp

losses = {}
for ours in (False, True):
    if ours:
        integration.register()
    output = folder / f"output{ours}"
    run_exp({
        "model_name_or_path": str(folder), "stage": stage, "do_train": True, "finetuning_type": "full", "dataset": "tiny",
        "dataset_dir": str(folder), "template": "default", "cutoff_len": 64, "output_dir": str(output), "max_steps": 2,
        "logging_steps": 1, "per_device_train_batch_size": 2, "report_to": "none", "save_strategy": "no",
        "use_cpu": not torch.cuda.is_available(),
    })
    lines = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    losses[str(ours)] = [line["loss"] for line in lines if "loss" in line]
(folder / "losses.json").write_text(json.dumps(losses))
"""


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_training_has_the_losses_that_it_had(stage, tmp_path):
    """Fine-tuning without logits; preference training, which reads them, as it was."""
    environment = {**os.environ, "DISABLE_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), stage], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("npu_fused_linear_cross_entropy: 1 module replaced" in done.stdout) == (stage == "sft")
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses["True"]) == 2
    assert losses["True"] == pytest.approx(losses["False"], rel=1e-4)
