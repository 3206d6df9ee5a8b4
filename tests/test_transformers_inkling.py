"""`npu_attn_res.patch` in Inkling 2 of transformers: the same training step, from one read of the block states."""

from __future__ import annotations

import copy
import functools
import importlib.util
import pickle
from contextlib import ExitStack, contextmanager, nullcontext

import causal_lms
import npu_attn_res
import pytest
import torch
from causal_lms import VOCABULARY, batch, reference, step
from torch.utils.flop_counter import FlopCounterMode

from testing.other_paths import OperatorMode, replaced

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "vocab_size": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "hidden_size": causal_lms.WIDTH,
    "num_hidden_layers": 4,
    "n_layers_per_attn_res_block": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 16,
    "sliding_window_size": 4,
    "d_rel": 4,
    "rel_extent": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,  # all of them: a rounding must not choose others
    "pad_token_id": 0,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
LAYERS = ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"]  # one query, three before attention
LOOPED = importlib.util.find_spec("transformers.models.inkling2_loop") is not None
# Twice the roundings of other models' layers: convolutions, clips and two mixes. The looped model visits eight layers.
assert_same = functools.partial(causal_lms.assert_same, layers=2 * 8)
needs_loop = pytest.mark.skipif(not LOOPED, reason="transformers has Inkling 2 with a loop from 5.24 on")


def make(dtype=torch.float32, loop=False):
    """A model whose queries are not zero, in training mode."""
    if loop:
        from transformers.models.inkling2_loop.configuration_inkling2_loop import Inkling2LoopTextConfig as Config
        from transformers.models.inkling2_loop.modeling_inkling2_loop import Inkling2LoopForCausalLM as Model

        kinds = {"layer_types": LAYERS, "loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_gate_rank": 4}
    else:
        from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig as Config
        from transformers.models.inkling2.modeling_inkling2 import Inkling2ForCausalLM as Model

        kinds = {"layer_types": LAYERS}
    torch.manual_seed(0)
    model = Model(Config(**SIZES, **kinds))
    for name, parameter in model.named_parameters():
        if name.endswith("query"):
            torch.nn.init.normal_(parameter)
        elif "message_gate" in name:  # closed at first
            torch.nn.init.normal_(parameter, 0.0, 0.3)
        elif "norm" in name:
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.3)
        if not any(part in name for part in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.to(dtype)
    return model.train()


def queries(found):
    return {name: gradient for name, gradient in found.gradients.items() if name.endswith(".query")}


@pytest.mark.parametrize("loop", [False, pytest.param(True, marks=needs_loop)], ids=["", "loop"])
def test_a_model_in_fp32_trains_as_the_original_does(loop):
    model, inputs = make(loop=loop), batch()
    expected = reference(model, inputs)
    report = npu_attn_res.patch(model)
    assert not report.left and len(report.replaced) >= 8
    found = step(model, inputs)
    assert_same(found, expected, layers=4 * 8 if loop else 2 * 8)  # with open gates, which multiply on every visit
    trained = {name for name, gradient in queries(found).items() if gradient.abs().sum() > 0}
    assert trained == {name for name in queries(expected) if name != "model.message_input.query"}  # 0 before too
    assert not report.fell_back


@pytest.mark.parametrize("loop", [False, pytest.param(True, marks=needs_loop)], ids=["", "loop"])
def test_flops_are_those_of_the_original(loop):
    model, counts = make(loop=loop), []
    for context in (nullcontext, lambda: npu_attn_res.patch(model)):
        with context(), FlopCounterMode(display=False) as counter:
            model(**batch()).loss.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_model_in_bf16_is_as_near_to_fp32_as_the_original():
    """Rounding to bf16 between the modules is the model's own: both are held against the same weights in fp32."""
    model, inputs = make(torch.bfloat16), batch()
    expected, exact = reference(model, inputs), reference(copy.deepcopy(model).float(), inputs)
    npu_attn_res.patch(model)
    found = step(model, inputs)

    def error(of):
        return torch.stack([(of.gradients[name].float() - each).norm() for name, each in exact.gradients.items()]).norm()

    assert found.gradients.keys() == expected.gradients.keys()
    assert error(found) <= 1.1 * error(expected)
    assert_same(found, expected, torch.bfloat16)


def modules(model):
    """One with one query, and one with three."""
    layer = model.model.layers[1]
    return layer.mlp_input, layer.attention_input


@pytest.mark.parametrize("frozen", ["", "blocks", "partial", "query"])
@pytest.mark.parametrize(
    ("blocks", "partial"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_a_module_gives_results_and_gradients_of_its_class(blocks, partial, frozen):
    model = make()
    patched = copy.deepcopy(model)
    npu_attn_res.patch(patched)
    for one, other in zip(modules(model), modules(patched), strict=True):
        results = []
        for module in (one, other):
            torch.manual_seed(1)
            sources = [torch.randn(2, 5, 3, 32).to(blocks), torch.randn(2, 5, 32).to(partial)]
            leaves = [each.requires_grad_(name != frozen) for name, each in zip(("blocks", "partial"), sources, strict=True)]
            module.query.requires_grad_(frozen != "query")
            rows = module(*sources)
            assert isinstance(rows, tuple)
            needed = [each for each in (*leaves, module.query) if each.requires_grad]
            total = sum((i + 1) * row.square().sum() + row[..., 0].sum() for i, row in enumerate(rows))
            results.append((*rows, *torch.autograd.grad(total, needed)))
        assert [each.dtype for each in results[1]] == [each.dtype for each in results[0]]
        for found, expected in zip(results[1], results[0], strict=True):
            unit = 16 * torch.finfo(torch.float32).eps + torch.finfo(found.dtype).eps * (found.dtype != torch.float32)
            assert (found - expected).abs().max() <= unit * expected.abs().max()


def test_autocast_gives_the_dtype_of_the_original():
    model = make()
    patched = copy.deepcopy(model)
    npu_attn_res.patch(patched)
    with torch.autocast("cpu", torch.bfloat16):
        for one, other in zip(modules(model), modules(patched), strict=True):
            sources = torch.randn(2, 5, 3, 32), torch.randn(2, 5, 32)
            for expected, found in zip(one(*sources), other(*sources), strict=True):
                assert found.dtype == expected.dtype
                assert torch.allclose(found.float(), expected.float(), rtol=0.02, atol=0.02)


KNOWN, NORM, TORCH = "Inkling2BlockAttentionResidual", "Inkling2UnweightedRMSNorm", torch.nn.functional


def is_norm(module):
    return type(module).__name__.endswith(NORM)


def hook(module, given, output):
    return output + 1 if is_norm(module) else None


def called(call):
    return lambda self, x, *rest: call(self, x, *rest) + 1 if is_norm(self) else call(self, x, *rest)


def plus_one(forward):
    def one_more(*given, **named):
        found = forward(*given, **named)
        return found + 1 if isinstance(found, torch.Tensor) else tuple(each if each is None else each + 1 for each in found)

    return one_more


@contextmanager
def hooked(place):
    handle = getattr(place, "register_forward_hook", None) or torch.nn.modules.module.register_module_forward_hook
    handle = handle(hook)
    yield
    handle.remove()


@contextmanager
def other_attention(module, page, name):
    """`name`: an attention of somebody's, or transformers' "sdpa" over another function of torch."""
    page.ALL_ATTENTION_FUNCTIONS.register("mine", plus_one(page.eager_attention_forward))
    with replaced(module.config, "_attn_implementation", lambda _: name):
        if name == "mine":
            yield
        else:
            with replaced(TORCH, "scaled_dot_product_attention", plus_one):
                yield


OTHER_PATHS = {
    "class": lambda module, page: replaced(getattr(page, KNOWN), "forward", plus_one),
    "class of the norm": lambda module, page: replaced(getattr(page, NORM), "forward", plus_one),
    "forward of the norm": lambda module, page: replaced(module.norm, "forward", plus_one),
    "hook of the norm": lambda module, page: hooked(module.norm),
    "hook of all modules": lambda module, page: hooked(None),
    "calls of all modules": lambda module, page: replaced(torch.nn.Module, "__call__", called),
    "mode of operators": lambda module, page: OperatorMode(),
    "eager attention": lambda module, page: replaced(page, "eager_attention_forward", plus_one),
    "attention of somebody's": lambda module, page: other_attention(module, page, "mine"),
    "attention of torch": lambda module, page: other_attention(module, page, "sdpa"),
}


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_what_the_class_s_own_path_would_see_or_change_is_left_to_it(path):
    from transformers.models.inkling2 import modeling_inkling2 as page

    plain, patched, left = (make().model.layers[1].mlp_input for _ in range(3))
    sources = torch.randn(2, 5, 3, 32), torch.randn(2, 5, 32)
    report, (usual,) = npu_attn_res.patch(patched), plain(*sources)
    with ExitStack() as stack:
        per_module = path in ("forward of the norm", "hook of the norm") or path.startswith("attention")
        for module in (plain, patched, left) if per_module else (plain,):
            stack.enter_context(OTHER_PATHS[path](module, page))
        (expected,) = plain(*sources)
        assert not torch.allclose(expected, usual)
        with pytest.warns(UserWarning, match="computes without our operators"):
            assert torch.equal(patched(*sources)[0], expected)
        before = npu_attn_res.patch(left)
        assert path.startswith("mode") or before.left[0].text == report.fell_back[0].text
    assert len(report.fell_back) == 1
    assert torch.allclose(patched(*sources)[0], usual, atol=1e-5)


def test_a_frozen_embedding_is_a_block_without_a_gradient():
    model, inputs = make(), batch()
    model.get_input_embeddings().requires_grad_(False)
    expected = reference(model, inputs)
    npu_attn_res.patch(model)
    found = step(model, inputs)
    frozen = [name for name, gradient in expected.gradients.items() if gradient is None]
    assert frozen and [name for name, gradient in found.gradients.items() if gradient is None] == frozen
    for of in (found, expected):
        of.gradients = {name: gradient for name, gradient in of.gradients.items() if gradient is not None}
    assert_same(found, expected)


def test_checkpointed_layers_train_the_same():
    model, inputs = make(), batch()
    npu_attn_res.patch(model)
    expected = step(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(step(model, inputs), expected)


def test_what_is_saved_is_what_the_original_saves(tmp_path):
    model, inputs = make(), batch()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = reference(model, inputs)
    npu_attn_res.patch(model)
    assert model.state_dict().keys() == before.keys()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())
    assert_same(step(loaded, inputs), expected)
    copied = pickle.loads(pickle.dumps(model))
    assert_same(step(copied, inputs), expected)
    assert type(copied.model.final_input) is type(model.model.final_input)


def test_undone_a_model_is_the_original_again():
    model, inputs = make(), batch()
    before, kinds = reference(model, inputs), [type(module) for module in model.modules()]
    with npu_attn_res.patch(model):
        assert [type(module) for module in model.modules()] != kinds
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(step(model, inputs).loss, before.loss)


@pytest.mark.slow
def test_modules_compile_in_one_graph():
    model = make()
    npu_attn_res.patch(model)
    for module in modules(model):
        sources = torch.randn(2, 5, 3, 32, requires_grad=True), torch.randn(2, 5, 32, requires_grad=True)
        results = []
        for call in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
            rows = call(*sources)
            results.append([*rows, *torch.autograd.grad(torch.stack(rows).square().sum(), [*sources, module.query])])
        for found, expected in zip(*results, strict=True):
            assert torch.equal(found, expected)
    torch._dynamo.reset()
