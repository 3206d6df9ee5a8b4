"""Every public function under torch.compile(fullgraph=True): sizes and floats are constants of the graph, or variables.

A float that an operator takes is a constant of the graph even with `dynamic=True`: PyTorch compiles once for each value.
"""

from __future__ import annotations

import inspect

import npu_attn_res
import npu_embedding
import npu_fused_linear_cross_entropy
import npu_rms_norm
import pytest
import torch
import torch._dynamo.testing
from npu_attn_res import attn_res, attn_res_bank, attn_res_keys, attn_res_merge, attn_res_phase1, fused_attnres
from npu_embedding import embedding, embedding_bag, ngram_embedding
from npu_fused_linear_cross_entropy import (
    causal_lm_loss,
    fused_linear_cross_entropy,
    linear_distillation_loss,
    linear_log_probs,
)
from npu_rms_norm import (
    add_rms_norm,
    add_rms_norm_dynamic_quant,
    gated_rms_norm,
    qk_rms_norm,
    rms_norm,
    rms_norm_dynamic_quant,
)
from torch.utils._pytree import tree_leaves

PACKAGES = (npu_attn_res, npu_embedding, npu_fused_linear_cross_entropy, npu_rms_norm)
D, V, BLOCKS = 8, 11, 3
SIZES, NUMBERS = (6, 9, 7), (0.5, 0.25)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def random(*shape):
    return torch.randn(shape, requires_grad=True)


def vectors(count):
    return [random(D) for _ in range(count)]


def head(n):
    return random(n, D), random(V, D), torch.randint(V, (n,))


#: A function, the tensors of a call with n rows, and options with a float c.
CALLS = {
    "rms_norm": lambda n, c: (rms_norm, (random(n, D), random(D)), {"eps": c, "offset": c}),
    "add_rms_norm": lambda n, c: (add_rms_norm, (random(n, D), random(n, D), random(D)), {"eps": c}),
    "gated_rms_norm": lambda n, c: (gated_rms_norm, (random(n, D), random(n, D), random(D)), {"eps": c}),
    "qk_rms_norm": lambda n, c: (qk_rms_norm, (random(n, 4 * D), random(D), random(D), 2, 1), {"eps": c, "offset": c}),
    "rms_norm_dynamic_quant": lambda n, c: (rms_norm_dynamic_quant, (random(n, D), random(D)), {"eps": c}),
    "add_rms_norm_dynamic_quant": lambda n, c: (
        add_rms_norm_dynamic_quant,
        (random(n, D), random(n, D), random(D)),
        {"eps": c},
    ),
    "embedding": lambda n, c: (
        embedding,
        (torch.randint(V, (n,)), random(V, D)),
        {"padding_idx": 2, "max_norm": 9 + c, "norm_type": 2 + c},
    ),
    "embedding_bag": lambda n, c: (embedding_bag, (torch.randint(V, (n, 3)), random(V, D)), {"max_norm": 9 + c}),
    "ngram_embedding": lambda n, c: (
        ngram_embedding,
        (torch.randint(V, (2, n)), random(V, D), *(torch.tensor(each) for each in ([3, 5, 7], [5, 3], [0, 5]))),
        {"eos": 2, "ngram_size": 3},
    ),
    "attn_res": lambda n, c: (attn_res, ([random(n, D) for _ in range(BLOCKS)], *vectors(3)), {"rms_eps": c, "scale": c}),
    "attn_res_bank": lambda n, c: (
        attn_res_bank,
        (random(n, BLOCKS, D).detach(), BLOCKS - 1, random(n, D), *vectors(3)),
        {"rms_eps": c, "scale": c, "output_rms_eps": c, "layer_output": random(n, D)},
    ),
    "attn_res_phase1": lambda n, c: (attn_res_phase1, (random(2, D), random(n, BLOCKS, D), random(D)), {"scale": c}),
    "attn_res_merge": lambda n, c: (
        attn_res_merge,
        (random(n, D), random(n), random(n, D), *vectors(3)),
        {"scale": c, "output_rms_eps": c},
    ),
    "attn_res_keys": lambda n, c: (attn_res_keys, (random(n, BLOCKS, D), random(n, D), random(2, D)), {"scale": c}),
    "fused_attnres": lambda n, c: (fused_attnres, (random(D), random(BLOCKS, n, D), *vectors(2)), {"scale": c}),
    "fused_linear_cross_entropy": lambda n, c: (
        fused_linear_cross_entropy,
        head(n),
        {"logit_scale": 1 / c, "softcap": 9 + c, "label_smoothing": c, "lse_square_scale": c, "counted_tokens": n},
    ),
    "linear_log_probs": lambda n, c: (linear_log_probs, head(n), {"logit_scale": 1 / c, "softcap": 9 + c}),
    "linear_distillation_loss": lambda n, c: (
        linear_distillation_loss,
        head(n),
        {"teacher": (*head(n)[:2], None, 9 + c), "divergence": "jensen_shannon", "temperature": 1 + c, "hard_weight": c},
    ),
    "causal_lm_loss": lambda n, c: (
        causal_lm_loss,
        (random(2, n, D), random(V, D), torch.randint(V, (2, n))),
        {"num_items_in_batch": n, "logit_scale": 1 / c},
    ),
}  # fmt: skip


def bank(n):
    return random(n, BLOCKS, D).detach(), 1, random(n, D), *vectors(2)


#: The same for options with tensors, or with strides, of which a function asks more.
OF_OPTIONS = {
    "kept columns": lambda n, c: (
        lambda *tensors: linear_log_probs(*tensors[:3], kept=tensors[3]),
        (*head(n), torch.randint(V, (n, 3))),
        {},
    ),
    "number of kept columns": lambda n, c: (
        lambda *tensors: linear_log_probs(*tensors[:3], ids=tensors[3], kept=tensors[3]),
        (*head(5), torch.randint(V, (5, n))),
        {},
    ),
    "number of a teacher's columns": lambda n, c: (
        lambda *tensors: linear_distillation_loss(*tensors[:3], teacher_top_k=tensors[3:]),
        (*head(5), torch.randint(V, (5, n)), -torch.rand(5, n)),
        {},
    ),
    "append": lambda n, c: (lambda bank, *more: attn_res_bank(bank.clone(), *more, append=True), bank(n), {}),
    "append to a part": lambda n, c: (
        lambda bank, *more: attn_res_bank(bank.clone()[..., :2, :], *more, append=True),
        (random(2, n, BLOCKS, D).detach(), 1, random(2, n, D), *vectors(2)),
        {},
    ),
    "in place": lambda n, c: (
        lambda bank, count, x, *more: attn_res_bank(
            bank, count, x.clone()[:, D:], *more, layer_output=x[:, :D], in_place=True
        ),
        (random(n, BLOCKS, D).detach(), 1, random(n, 2 * D), *vectors(2)),
        {},
    ),
}


@pytest.fixture(autouse=True)
def _forget_compiled():
    yield
    torch._dynamo.reset()


def call(function, tensors, options):
    return function(*tensors, **options)


def three_norms(x, weight, eps):
    for _ in range(3):
        x = rms_norm(x, weight, eps)
    return x


def compiled(function, **options):
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, backend="aot_eager", **options)


def graphs():
    """How many graphs PyTorch keeps of what was compiled last."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def results(run, name, n, c, device="cpu", *, unknown=False):
    """Results and gradients of one call, the same for equal arguments. `unknown`: sizes n, each by itself, are data."""
    torch.manual_seed(n)
    with torch.device(device):
        function, tensors, options = {**CALLS, **OF_OPTIONS}[name](n, c)
    for tensor in tree_leaves(tensors) if unknown else ():
        for dimension, size in enumerate(getattr(tensor, "shape", ())):
            if size == n:
                torch._dynamo.decorators.mark_unbacked(tensor, dimension)
    outputs = [leaf for leaf in tree_leaves(run(function, tensors, options)) if isinstance(leaf, torch.Tensor)]
    recorded = [output for output in outputs if output.requires_grad]
    if recorded:
        torch.autograd.backward(recorded, [torch.ones_like(output) for output in recorded])
    return outputs, [leaf.grad for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]


OF_NO_TENSORS = {"explain", "patch", "use_kernels"}


# For every change; the suite of each operator compiles all of its functions.
ALWAYS = ("add_rms_norm", "embedding", "attn_res", "fused_linear_cross_entropy")


def test_every_public_function_is_here():
    public = (getattr(package, name) for package in PACKAGES for name in package.__all__)
    assert {function.__name__ for function in public if inspect.isfunction(function)} - OF_NO_TENSORS == set(CALLS)


@pytest.mark.parametrize(
    ("dynamic", "expected"),
    [
        (True, 1),
        pytest.param(None, 2, marks=pytest.mark.nightly),
        pytest.param(False, len(SIZES), marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("name", [pytest.param(each, marks=() if each in ALWAYS else pytest.mark.nightly) for each in CALLS])
def test_sizes_share_a_graph_and_a_float_takes_one_more(name, dynamic, expected):
    run = compiled(call, fullgraph=True, dynamic=dynamic)
    first, second = NUMBERS
    for n in SIZES:
        torch.testing.assert_close(results(run, name, n, first), results(call, name, n, first))
    assert graphs() == expected
    torch.testing.assert_close(results(run, name, n, second), results(call, name, n, second))
    assert graphs() <= expected + 1


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(each, marks=() if each in ALWAYS else pytest.mark.nightly) for each in CALLS),
        *OF_OPTIONS,
    ],
)
def test_sizes_may_depend_on_data(name):
    """PyTorch's own functions, and so ours, do not ask of sizes that a compiler does not know whether they are equal."""
    run = compiled(call, fullgraph=True)
    for n in SIZES:
        torch.testing.assert_close(results(run, name, n, 0.5, unknown=True), results(call, name, n, 0.5))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_data_are_asked_when_the_graph_runs():
    run = compiled(lambda x, these, those: add_rms_norm(x[these], x[those]).y, fullgraph=True)
    x, even, low = random(6, D), torch.arange(6) % 2 == 0, torch.arange(6) < 3
    torch.testing.assert_close(run(x, even, low), add_rms_norm(x[even], x[low]).y)
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        run(x, even, low & even)


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_functions_in_a_row_are_one_graph(dynamic):
    run, x, weight = compiled(three_norms, dynamic=dynamic), random(4, D), random(D)
    torch.testing.assert_close(run(x, weight, 0.5), three_norms(x, weight, 0.5))
    assert graphs() == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_kernels_in_a_graph_follow_sizes_and_floats(npu_place):
    run = compiled(call, fullgraph=True, dynamic=True)
    for n, c in ((6, 0.5), (9, 0.25)):
        actual = results(run, "rms_norm", n, c, npu_place.torch)
        torch.testing.assert_close(actual, results(call, "rms_norm", n, c, npu_place.torch))
    assert graphs() == 2
