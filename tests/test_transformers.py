"""`patch` in models of Hugging Face transformers: the same results, and everything else as it was."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import warnings

import causal_lms
import npu_embedding
import npu_fused_linear_cross_entropy
import npu_rms_norm
import npu_tiling
import pytest
import torch
from causal_lms import FAMILIES, LAYERS, PATCHES, assert_same, batch, make, patch_all, reference, step
from torch.utils.flop_counter import FlopCounterMode
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama

from testing.other_paths import FunctionMode, OperatorMode, Packed, replaced, tripled

pytestmark = pytest.mark.usefixtures("one_thread")

NORMS = {"Qwen3": 4, "Gemma2": 4, "Gemma3": 6, "Olmo2": 4}  # in a layer; 2 in the others


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("operator", PATCHES)
def test_logits_loss_and_gradients_are_the_original_ones(family, operator):
    model, inputs = make(family), batch()
    expected = reference(model, inputs)
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(**inputs).logits
    patch = PATCHES[operator](model)
    assert len(patch.replaced) == (NORMS.get(family, 2) * LAYERS + 1 if operator == "rms_norm" else 1)
    assert not patch.left
    found = step(model, inputs)
    assert_same(found, expected)
    if operator != "fused_linear_cross_entropy":
        assert torch.equal(found.loss, expected.loss)
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).logits, logits)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Olmo2"])
def test_bfloat16_rounds_as_the_original_does(family):
    model, inputs = make(family, torch.bfloat16), batch()
    expected = reference(model, inputs)
    for operator, patch in PATCHES.items():
        with patch(model):
            found = step(model, inputs)
        assert_same(found, expected, torch.bfloat16)
        if operator != "fused_linear_cross_entropy":
            assert torch.equal(found.loss, expected.loss)
    patch_all(model)
    assert_same(step(model, inputs), expected, torch.bfloat16)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_training_runs_the_kernels(device, family, monkeypatch):
    launched, launch = set(), npu_tiling.Kernels.launch

    def record(kernels, module, kernel, *arguments):
        launched.add(kernel)
        return launch(kernels, module, kernel, *arguments)

    model, inputs = make(family, device=device.torch), batch(device=device.torch)
    expected = reference(model, inputs)
    monkeypatch.setattr(npu_tiling.Kernels, "launch", record)
    for patch in PATCHES.values():
        launched.clear()
        with patch(model):
            assert_same(step(model, inputs), expected)
        assert bool(launched) == (device.name != "cpu")
    patch_all(model)
    assert_same(step(model, inputs), expected)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3"])
def test_autocast_gives_the_original_loss(family):
    model, inputs = make(family), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = reference(model, inputs)
        with npu_rms_norm.patch(model), npu_embedding.patch(model):
            assert torch.equal(step(model, inputs).loss, expected.loss)
        patch_all(model)
        assert_same(step(model, inputs), expected, torch.bfloat16)


@pytest.mark.parametrize("family", FAMILIES)
def test_state_is_untouched(family):
    model = make(family)
    before, tied = dict(model.state_dict(keep_vars=True)), model.lm_head.weight is model.model.embed_tokens.weight
    modules = dict(model.named_modules())
    model.model.embed_tokens.weight.requires_grad_(False)
    patch_all(model)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert dict(model.named_modules()) == modules
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied == bool(model.config.tie_word_embeddings)
    assert not model.model.embed_tokens.weight.requires_grad
    assert model.training


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_saves_and_loads(family, tmp_path):
    model, inputs = make(family).eval(), batch()
    before = type(model)
    with torch.no_grad():
        expected = model(**inputs).logits
    patch_all(model)
    model.save_pretrained(tmp_path)
    loaded = before.from_pretrained(tmp_path)
    assert type(loaded) is before
    assert loaded.config.architectures == [f"{family}ForCausalLM"]
    patch_all(loaded)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**inputs).logits, expected)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_are_patched_models_of_their_own(duplicate):
    model, inputs = make("Gemma3"), batch()
    patch_all(model)
    expected, twin = step(model, inputs), duplicate(model)
    model.zero_grad()
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    assert_same(step(twin, inputs), expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert twin.lm_head.weight is twin.model.embed_tokens.weight


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model, inputs = make("Qwen3"), batch()
    expected = reference(model, inputs)
    patch_all(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(step(model, inputs), expected)


@pytest.mark.parametrize("count", [17, torch.tensor(17), torch.tensor([17])])
def test_divides_by_the_items_of_all_batches(count):
    model, inputs = make("Llama"), {**batch(), "num_items_in_batch": count}
    expected = reference(model, inputs)
    patch_all(model)
    found = step(model, inputs)
    assert found.loss.shape == expected.loss.shape
    assert_same(found, expected)


def test_labels_that_are_shifted_or_ignored_otherwise():
    model, inputs = make("Llama"), batch()
    shifted = inputs["labels"].roll(-1, 1)
    for more in (
        {"shift_labels": shifted},
        {"ignore_index": 0},
        {"shift_labels": shifted[:, -5:].contiguous(), "logits_to_keep": 5},
    ):
        labels = inputs["labels"].clamp_min(0) if "ignore_index" in more else inputs["labels"]
        given = {**inputs, **more, "labels": labels}
        expected = reference(model, given)
        with npu_fused_linear_cross_entropy.patch(model):
            assert_same(step(model, given), expected)


def test_bias_of_the_head_counts():
    model, inputs = make("Llama"), batch()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(causal_lms.VOCABULARY))
    expected = reference(model, inputs)
    assert npu_fused_linear_cross_entropy.patch(model).replaced
    assert_same(step(model, inputs), expected)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_logits_are_left_out_where_the_loss_is_fused(family):
    model, inputs = make(family), batch()
    expected = model(**inputs).logits
    patch = npu_fused_linear_cross_entropy.patch
    with patch(model):
        assert model(**inputs).logits is None
        assert len(model(**inputs, return_dict=False)) == len(model.eval()(**inputs, return_dict=False)) - 1
        assert torch.equal(model(**inputs).logits, expected)
        assert torch.equal(model.train()(inputs["input_ids"]).logits, expected)
    with patch(model, keep_logits=True, chunk_tokens=5, accum_dtype=torch.float32):
        logits = model(**inputs).logits
        assert torch.equal(logits, expected)
        assert not logits.requires_grad
    with patch(model, evaluation=True):
        assert model.eval()(**inputs).logits is None


def test_models_whose_loss_or_head_is_their_own_do_what_they_did():
    inputs = batch()
    model = make("Llama")
    npu_fused_linear_cross_entropy.patch(model)
    expected = model.eval()(**inputs).logits
    seen = []
    handle = model.train().lm_head.register_forward_hook(lambda module, given, output: seen.append(output))
    assert torch.equal(model(**inputs).logits, expected)
    assert len(seen) == 1
    handle.remove()
    assert model(**inputs).logits is None
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    assert torch.equal(model(**inputs).loss, expected.square().mean())

    model = make("Llama")
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    assert "loss function" in npu_fused_linear_cross_entropy.patch(model).left[0].text
    model = make("Llama")
    model.lm_head = torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    assert "lm_head" in npu_fused_linear_cross_entropy.patch(model).left[0].text
    model = causal_lms.transformers.GPT2LMHeadModel(
        causal_lms.transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)
    )
    assert {entry.was for entry in npu_rms_norm.patch(model).left} == {"LayerNorm"}
    assert [entry.name for entry in npu_embedding.patch(model).replaced] == ["transformer.wte", "transformer.wpe"]


SCALED = {
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 3.0},
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


@pytest.mark.parametrize("family", SCALED)
def test_a_model_that_scales_its_logits_and_one_with_other_names_train_the_same(family):
    kind = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    config = getattr(causal_lms.transformers, f"{family}Config")(**causal_lms._SIZES, **SCALED[family])
    torch.manual_seed(0)
    model, inputs = getattr(causal_lms.transformers, f"{family}{kind}")(config).train(), batch()
    expected = reference(model, inputs)
    report = npu_fused_linear_cross_entropy.patch(model)
    assert report.replaced
    assert_same(step(model, inputs), expected)
    assert not report.fell_back


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Phi3"])
def test_generates_the_original_tokens(family):
    model, prompt = make(family).eval(), batch()["input_ids"][:, :5]
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **options)
    patch_all(model)
    assert torch.equal(model.generate(prompt, **options), expected)
    with torch.inference_mode():
        assert model(prompt[:, :1]).logits.shape == (2, 1, causal_lms.VOCABULARY)


@pytest.mark.parametrize("family", ["Gemma2", "Qwen3"])
def test_undo_restores_the_model(family):
    model, inputs = make(family), batch()
    types, content = [type(module) for module in model.modules()], [list(vars(module)) for module in model.modules()]
    expected = step(model, inputs)
    patches = [patch(model) for patch in PATCHES.values()]
    assert [type(module) for module in model.modules()] != types
    assert not any(patch(model).replaced for patch in PATCHES.values())  # the second time
    for patch in patches:
        patch.undo()
        patch.undo()
    assert [type(module) for module in model.modules()] == types
    assert [list(vars(module)) for module in model.modules()] == content
    found = step(model, inputs)
    assert torch.equal(found.loss, expected.loss)
    assert all(torch.equal(found.gradients[name], gradient) for name, gradient in expected.gradients.items())


LLAMA = modeling_llama.LlamaForCausalLM
LOSSES = loss_utils.LOSS_MAPPING


@contextlib.contextmanager
def hooked(model):
    """A hook of all modules that triples the logits."""
    head = (causal_lms.WIDTH, causal_lms.VOCABULARY)

    def triple(module, given, output):
        return 3 * output if (getattr(module, "in_features", None), getattr(module, "out_features", None)) == head else None

    handle = torch.nn.modules.module.register_module_forward_hook(triple)
    yield
    handle.remove()


@contextlib.contextmanager
def other_loss(model):
    before = LOSSES["ForCausalLM"]
    LOSSES["ForCausalLM"] = tripled(before)
    yield
    LOSSES["ForCausalLM"] = before


def tripled_outputs(forward):
    @functools.wraps(forward)
    def three_times(self, *arguments, **keywords):
        outputs = forward(self, *arguments, **keywords)
        outputs.logits = 3 * outputs.logits
        outputs.loss = None if outputs.loss is None else 3 * outputs.loss
        return outputs

    return three_times


def other_mean(logits, labels, **_):
    return logits.square().mean() + labels.numel()


OTHER_MEAN = property(lambda self: other_mean)


def called_three_times(call):
    head = (causal_lms.WIDTH, causal_lms.VOCABULARY)

    def called(self, *arguments, **keywords):
        output = call(self, *arguments, **keywords)
        return 3 * output if (getattr(self, "in_features", None), getattr(self, "out_features", None)) == head else output

    return called


def packed_head(model):
    return replaced(model.lm_head, "weight", lambda weight: torch.nn.Parameter(Packed(weight.detach()), requires_grad=False))


OTHER_PATHS = {
    "class of the model": lambda model: replaced(LLAMA, "forward", tripled_outputs),
    "class of the head": lambda model: replaced(torch.nn.Linear, "forward", tripled),
    "function": lambda model: replaced(torch.nn.functional, "linear", tripled),
    "hook of all modules": hooked,
    "mode of functions": lambda model: FunctionMode(),
    "mode of operators": lambda model: OperatorMode(),
    "loss function": other_loss,
    "loss function of the class": lambda model: replaced(
        LLAMA, "loss_function", lambda _: property(lambda self: other_mean)
    ),
    "what the loss function calls": lambda model: replaced(loss_utils, "fixed_cross_entropy", tripled),
    "what computes the loss": lambda model: replaced(torch.nn.functional, "cross_entropy", tripled),
    "calls of all modules": lambda model: replaced(torch.nn.Module, "__call__", called_three_times),
    "how modules are called": lambda model: replaced(torch.nn.Module, "_call_impl", called_three_times),
    "weight of the head": packed_head,
}


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_what_the_models_own_path_would_see_or_change_is_left_to_it(path):
    plain, patched, left, inputs = make("Llama"), make("Llama"), make("Llama"), batch()
    report = npu_fused_linear_cross_entropy.patch(patched)
    usual = patched(**inputs).loss
    with OTHER_PATHS[path](plain), OTHER_PATHS[path](patched), OTHER_PATHS[path](left):
        expected = plain(**inputs)
        assert not torch.allclose(expected.loss, usual)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                found = patched(**inputs)
                assert torch.equal(found.loss, expected.loss)
                assert torch.equal(found.logits, expected.logits)
        before = npu_fused_linear_cross_entropy.patch(left)
        assert torch.equal(left.eval()(inputs["input_ids"]).logits, plain.eval()(inputs["input_ids"]).logits)
    assert len(report.fell_back) == 1
    (message,) = [str(each.message) for each in told if report.fell_back[0].text in str(each.message)]
    assert report.fell_back[0].text in str(report)
    assert path.startswith("mode") or before.left[0].text == report.fell_back[0].text
    assert torch.equal(patched(**inputs).loss, usual)


def test_derivatives_of_forward_mode_are_the_models_own():
    """Those of the loss, of its gradients (forward over reverse), and of fp64."""
    for dtype in (torch.float32, torch.float64):
        found = []
        for patches in (False, True):
            model = make("Llama", dtype)
            model.set_attn_implementation("eager")
            if patches:
                causal_lms.patch_all(model)
            weights = {name: each.detach() for name, each in model.named_parameters()}
            loss = lambda given, model=model: torch.func.functional_call(model, given, kwargs=batch()).loss  # noqa: E731
            value, tangent = torch.func.jvp(loss, (weights,), (weights,))
            gradients, products = torch.func.jvp(torch.func.grad(loss), (weights,), (weights,))
            found.append((value, tangent, loss(weights), gradients, products))
        torch.testing.assert_close(*found, rtol=2e-4, atol=2e-5)


def test_a_model_patched_later_evaluates_by_the_forward_that_its_class_has_now():
    npu_fused_linear_cross_entropy.patch(make("Llama")).undo()  # the class of patched ones was made
    inputs = batch()
    expected = make("Llama").eval()(**inputs).logits
    with replaced(LLAMA, "forward", tripled_outputs):
        model = make("Llama").eval()
        npu_fused_linear_cross_entropy.patch(model)
        assert torch.equal(model(**inputs).logits, 3 * expected)


def test_a_loss_type_that_changes_counts():
    model, inputs = make("Llama"), batch()
    report = npu_fused_linear_cross_entropy.patch(model)
    model.loss_type = "ForSequenceClassification"
    with pytest.warns(UserWarning, match="ForSequenceClassificationLoss"), pytest.raises(TypeError, match="pooled_logits"):
        model(**inputs)
    assert report.fell_back


def test_the_report_says_how_to_keep_the_logits():
    patch = npu_fused_linear_cross_entropy.patch
    assert "keep_logits=True" in str(patch(make("Llama")))
    assert "keep_logits" not in str(patch(make("Llama"), keep_logits=True))


def test_a_model_without_logits_says_once_how_to_keep_them(monkeypatch):
    monkeypatch.setattr("npu_fused_linear_cross_entropy.patching._without_logits", set())
    model, inputs = make("Llama"), batch()
    with npu_fused_linear_cross_entropy.patch(model), pytest.warns(UserWarning, match="keep_logits=True") as told:
        for _ in range(2):
            assert model(**inputs).logits is None
    assert len(told) == 1
    with npu_fused_linear_cross_entropy.patch(model, keep_logits=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**inputs)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
@pytest.mark.parametrize("training", [True, False])
def test_flops_are_those_of_the_model(family, training):
    counts = []
    for patches in ((), (patch_all,)):
        model = make(family).train(training)
        for patch in patches:
            patch(model)
        with FlopCounterMode(display=False) as counter:
            step(model, batch())
        counts.append(counter.get_total_flops())
        assert (model(**batch()).logits is None) == bool(patches and training)
    assert counts[0] == counts[1]


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids, use_cache=False).logits


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_patched_model_is_traced(tmp_path):
    model, ids = make("Llama").eval(), batch()["input_ids"]
    expected = model(ids).logits
    patch_all(model)
    traced = torch.jit.trace(Logits(model), (ids,))
    torch.jit.save(traced, tmp_path / "traced.pt")
    assert torch.allclose(torch.jit.load(tmp_path / "traced.pt")(ids), expected, atol=1e-5)


@pytest.mark.slow
def test_a_patched_model_is_exported_to_onnx():
    model, ids = make("Llama").eval(), batch()["input_ids"]
    patch_all(model)
    program = torch.onnx.export(Logits(model), (ids,), dynamo=True, verbose=False)
    assert not [node for node in program.model.graph if "npu" in f"{node.domain}{node.op_type}"]


def test_torch_fx_is_refused_by_name():
    model = make("Llama")
    patch_all(model)
    for module in (model, model.model.norm):
        with pytest.raises(TypeError, match=r"undo\(\) first"):
            torch.fx.symbolic_trace(module)


def test_classes_of_patched_models_are_pickled():
    model = make("Llama")
    patch_all(model)
    for module in model.modules():
        assert pickle.loads(pickle.dumps(type(module))) is type(module)
