"""The norms of q and k of a fused projection, wherever they run, against fp64 and against two calls on slices."""

import functools

import formula
import pytest
import torch
import torch._dynamo.testing
from npu_rms_norm import qk_rms_norm, rms_norm
from npu_rms_norm.qk import has_words
from npu_rms_norm.reference import split

pytestmark = pytest.mark.usefixtures("npu_poisoned")

HEADS = (6, 2)  # of q, and of k and v


def on_slices(qkv, q_weight, k_weight, n_heads, n_kv_heads, eps=1e-6, **options):
    q, k, v = split(qkv, n_heads, n_kv_heads)
    return rms_norm(q, q_weight, eps, **options), rms_norm(k, k_weight, eps, **options), v


def make(device, rows=(3, 11), heads=HEADS, width=64, dtype=torch.float32, seed=0):
    """A projection, two weights, and gradients of q, k and v."""
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(shape, generator=generator).to(dtype).to(device.torch)  # noqa: E731
    n_heads, n_kv_heads = heads
    leaves = [random(*rows, (n_heads + 2 * n_kv_heads) * width), random(width), random(width)]
    return [each.requires_grad_() for each in leaves], [random(*rows, n, width) for n in (*heads, n_kv_heads)]


def train(function, leaves, upstream, heads=HEADS, **options):
    """Results and gradients; the leaves that need no gradient, and the results whose gradient is None, are left out."""
    results = function(*leaves, *heads, **options)
    pairs = [(y, dy) for y, dy in zip(results, upstream, strict=True) if dy is not None]
    inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    results_with, gradients = zip(*pairs, strict=True)
    return results, torch.autograd.grad(results_with, inputs, gradients, allow_unused=True)


# On CUDA one launch takes q and k, and its programs add other rows of a weight's gradient than those of two launches.
OTHER_PROGRAMS = {"rtol": 1e-5, "atol": 1e-5}


def assert_equal(found, expected, **tolerance):
    for actual, wanted in zip(found, expected, strict=True):
        assert (actual is None) == (wanted is None)
        if actual is not None:
            torch.testing.assert_close(actual, wanted, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "mode", "offset", "together"),
    [
        (torch.float32, torch.float32, "llama", 0.0, False),
        (torch.bfloat16, torch.bfloat16, "llama", 0.0, False),
        (torch.bfloat16, torch.float32, "gemma", 1.0, True),
        (torch.float16, torch.float16, "none", 1.0, False),
        (torch.bfloat16, None, "llama", 0.0, False),
    ],
)
@pytest.mark.parametrize(("heads", "width"), [((6, 2), 128), ((3, 1), 50)])
def test_results_and_gradients(device, heads, width, dtype, weight_dtype, mode, offset, together):
    leaves, upstream = make(device, heads=heads, width=width, dtype=dtype)
    options = {"eps": 1e-5, "offset": offset, "casting_mode": mode}
    for i, own in enumerate(heads, 1):
        shape = own * width if together else width
        weight = None if weight_dtype is None else (torch.randn(shape) * 0.3 + 1).to(weight_dtype).to(device.torch)
        leaves[i] = None if weight is None else weight.requires_grad_()
    (q, k, v), (dqkv, *dweights) = train(qk_rms_norm, leaves, upstream, heads, **options)
    assert q.is_contiguous()
    assert k.is_contiguous()
    parts, gradients = split(leaves[0].detach(), *heads), split(dqkv, *heads)
    assert v.data_ptr() == parts[2].data_ptr()
    assert torch.equal(v, parts[2])
    assert torch.equal(gradients[2], upstream[2])
    rows = (lambda each: each.flatten(-2).cpu()) if together else (lambda each: each.cpu())
    for i, y in enumerate((q, k)):
        weight = None if leaves[1 + i] is None else leaves[1 + i].detach().cpu()
        case = formula.Case(rows(parts[i]), weight, rows(upstream[i]), **options)
        dweight = dweights[i].cpu() if dweights else None
        formula.check(case, (rows(y.detach()), rows(gradients[i]), dweight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_two_norms_of_slices(device, dtype):
    leaves, upstream = make(device, width=128, dtype=dtype)
    (q, k, v), (dqkv, *dweights) = train(qk_rms_norm, leaves, upstream)
    results, (expected, *of_weights) = train(on_slices, leaves, upstream)
    assert_equal((q, k, v, dqkv), (*results, expected))
    assert_equal(dweights, of_weights, **(OTHER_PROGRAMS if device.name == "cuda" else {}))


@pytest.mark.parametrize("given", ["q", "k", "v", "qk", "qv", "kv"])
def test_what_has_no_gradient_adds_none(device, given):
    leaves, upstream = make(device)
    upstream = [dy if name in given else None for name, dy in zip("qkv", upstream, strict=True)]
    _, found = train(qk_rms_norm, leaves, upstream)
    _, expected = train(on_slices, leaves, upstream)
    assert_equal(found, expected)
    assert (found[1] is None, found[2] is None) == ("q" not in given, "k" not in given)


@pytest.mark.parametrize("training", [(0,), (1,), (2,), (1, 2), (0, 2)])
def test_frozen_inputs(device, training):
    leaves, upstream = make(device)
    _, every = train(qk_rms_norm, leaves, upstream)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i in training)
    if 0 not in training:
        upstream[2] = None  # v is no more than the projection is
    _, found = train(qk_rms_norm, leaves, upstream)
    apart = device.name == "cuda" and 0 not in training  # a launch for each norm
    assert_equal(found, [every[i] for i in training], **(OTHER_PROGRAMS if apart else {}))


LAYOUTS = {
    "part of a wider tensor": lambda shape: torch.randn(*shape[:-1], shape[-1] + 40)[..., 8:-32],
    "every second token": lambda shape: torch.randn(shape[0], 2 * shape[1], *shape[2:])[:, ::2],
    "tokens first": lambda shape: torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1),
    "heads first": lambda shape: torch.randn(shape[0], *shape[:0:-1]).transpose(1, -1),
    "one number": lambda shape: torch.randn(()).expand(shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs_and_gradients(device, layout):
    torch.manual_seed(0)
    leaves, upstream = make(device)
    leaves[0] = LAYOUTS[layout](leaves[0].shape).to(device.torch).requires_grad_()
    upstream = [LAYOUTS[layout](dy.shape).to(device.torch) for dy in upstream]
    found = train(qk_rms_norm, leaves, upstream)
    contiguous = [each.detach().contiguous().requires_grad_() for each in leaves]
    expected = train(qk_rms_norm, contiguous, [dy.contiguous() for dy in upstream])
    for pair in zip(found, expected, strict=True):
        assert_equal(*pair, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "of_a_word"), [(torch.float32, 2), (torch.bfloat16, 4)])
def test_rows_of_64_bit_integers(dtype, of_a_word):
    wide = torch.randn(4, 6, 24).to(dtype)
    for rows in (wide, wide[:, ::2], wide[..., of_a_word : 4 * of_a_word], wide.transpose(0, 1), wide[:0]):
        assert has_words(rows)
        assert torch.equal(rows.view(torch.int64).view(dtype), rows)
    for rows in (wide[..., 1:], wide[..., :-1], wide[..., ::2], wide.transpose(1, 2), wide[..., :1].expand(4, 6, 24)):
        assert not has_words(rows)


@pytest.mark.parametrize("rows", [(), (0,), (0, 7), (1,)])
def test_few_rows(device, rows):
    leaves, upstream = make(device, rows)
    found = train(qk_rms_norm, leaves, upstream)
    expected = train(on_slices, leaves, upstream)
    for pair in zip(found, expected, strict=True):
        assert_equal(*pair, rtol=1e-5, atol=1e-5)


def test_same_bits_every_time(device):
    leaves, upstream = make(device, (2, 200), dtype=torch.bfloat16)
    _, first = train(qk_rms_norm, leaves, upstream)
    for _ in range(2):
        assert_equal(train(qk_rms_norm, leaves, upstream)[1], first)


def test_views_leave_a_compiled_graph(device):
    """v is a view of an input of the graph, and PyTorch makes it again outside."""
    compiled = torch.compile(functools.partial(qk_rms_norm), backend="aot_eager", fullgraph=True)
    leaves, upstream = make(device)
    found = train(compiled, leaves, upstream)
    for pair in zip(found, train(on_slices, leaves, upstream), strict=True):
        assert_equal(*pair, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert compiled(*leaves, *HEADS).v.data_ptr() == split(leaves[0], *HEADS)[2].data_ptr()


def test_tangents_are_those_of_slices(device):
    leaves = [each.detach() for each in make(device)[0]]
    tangents = tuple(torch.cos(leaf) for leaf in leaves)
    normalise = lambda function: lambda *given: tuple(function(*given, *HEADS))  # noqa: E731
    ours, slices = (torch.func.jvp(normalise(function), tuple(leaves), tangents)[1] for function in (qk_rms_norm, on_slices))
    assert_equal(ours, slices, rtol=1e-5, atol=1e-5)
