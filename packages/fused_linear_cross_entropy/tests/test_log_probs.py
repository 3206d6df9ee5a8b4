"""`linear_log_probs`: every output and its gradients against fp64, in every way to cut tokens and vocabulary."""

import math

import log_probs
import pytest
import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_log_probs

from testing.memory import Taken

pytestmark = pytest.mark.usefixtures("npu_poisoned")

EVERYTHING = log_probs.EVERYTHING
UNITS = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float64: 1e-12}
CASES = {
    "plain": ({}, {}),
    "bias, temperatures": ({"bias": True, "temperature": True}, {"logit_scale": 0.7}),
    "softcap, temperatures": ({"temperature": True, "vocabulary": 1000}, {"softcap": 3.0, "chunk_tokens": 8}),
    "softcap, a temperature": ({"bias": True}, {"softcap": 3.0, "temperature": 0.6, "logit_scale": 1.3}),
    "columns": ({"vocabulary": 3000, "bias": True, "temperature": True}, {"memory_budget": 2**13}),
    "rows of several tiles": ({"vocabulary": 9001, "temperature": True}, {"softcap": 9.0}),
    "a scale below 0": ({}, {"logit_scale": -0.8}),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("what", CASES)
def test_outputs_and_gradients_are_those_of_whole_logits(device, what):
    making, options = CASES[what]
    tensors = log_probs.make(**making)
    if tensors["temperature"] is None:
        del tensors["temperature"]
    log_probs.check(tensors, device.torch, UNITS[torch.float32], **EVERYTHING, **options)


@pytest.mark.uncollected("fp64 is for CPUs", lambda place, dtype: dtype == torch.float64 and place != "cpu")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(device, dtype):
    tensors = log_probs.make(dtype=dtype, bias=True, temperature=True)
    log_probs.check(tensors, device.torch, UNITS[dtype], **EVERYTHING)


ALONE = {
    "ids": {},
    "ids, no target": {"target": None},
    "temperatures": {"ids": None, "temperature": True},
    "top": {"ids": None, "top_k": 3},
    "entropy": {"ids": None, "target": None, "return_entropy": True},
    "squares": {"ids": None, "return_square_sum": True},
    "mean": {"ids": None, "target": None, "return_mean_logit": True},
    "is top": {"ids": None, "return_is_top": True},
}


@pytest.mark.parametrize("what", ALONE)
def test_each_output_alone(what):
    options = dict(ALONE[what])
    tensors = log_probs.make(temperature=options.pop("temperature", False))
    tensors = {name: tensor for name, tensor in tensors.items() if options.pop(name, tensor) is not None}
    if what == "temperatures":
        log_probs.check(tensors, "cpu", 2e-5, lambda *args, **given: log_probs.LogProbs(linear_log_probs(*args, **given)))
    else:
        log_probs.check(tensors, "cpu", 2e-5, **options)


def test_derivatives_are_exact():
    tensors = log_probs.make((4,), 5, 11, torch.float64, bias=True, temperature=True)
    leaves = [tensors[name].double().requires_grad_() for name in ("x", "weight", "bias", "temperature")]

    def function(x, weight, bias, temperature):
        given = {"ids": tensors["ids"], "temperature": temperature, **EVERYTHING, "softcap": 4.0}
        found = linear_log_probs(x, weight, tensors["target"], bias, **given)
        return tuple(output for output in found if output is not None and output.requires_grad)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


FLAT = {
    "a softcap": {"softcap": 1.0},
    "chunks of columns": {"softcap": 1.0, "memory_budget": 2**13},
    "a scale of 0": {"logit_scale": 0.0},
}


@pytest.mark.uncollected("the same kernels", lambda place, dtype: place == "emulated" and dtype != torch.float32)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", FLAT)
def test_the_top_is_the_token_that_a_loss_predicts(device, what, dtype):
    """Of logits that a softcap makes equal, the first: raw logits are in the hundreds."""
    tensors = log_probs.make((19,), vocabulary=1000, dtype=dtype)
    x, weight, target = (tensors[name].to(device.torch) for name in ("x", "weight", "target"))
    given = {"logit_scale": 300.0, **FLAT[what]}
    predicted = fused_linear_cross_entropy(x, weight, target, return_predicted_tokens=True, **given).predicted_tokens
    chosen = torch.where(target == -100, 5, predicted)
    assert linear_log_probs(x, weight, chosen, return_is_top=True, **given).is_top[target != -100].all()


@pytest.mark.uncollected(
    "the compiler's exponential, whose last bit may be another one than PyTorch's", lambda place: place == "cuda"
)
def test_the_top_has_the_roundings_of_the_loss(device):
    """8.7 and 9.5 of a softcap of 1: the kernels' z are both 1.0, and those of the definition are not."""
    weight = torch.zeros(512, 16)
    weight[3], weight[7] = 8.7 / 16, 9.5 / 16
    x, weight = torch.ones(2, 16, device=device.torch), weight.to(device.torch)
    target = torch.tensor([3, 7], device=device.torch)
    predicted = fused_linear_cross_entropy(x, weight, target, softcap=1.0, return_predicted_tokens=True).predicted_tokens
    found = linear_log_probs(x, weight, target, softcap=1.0, return_is_top=True).is_top
    assert torch.equal(found, predicted == target) and found.sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [None, 2**16])
def test_batch_invariance(device, dtype, budget):
    tensors = log_probs.make((60,), 32, 517, dtype, temperature=True)
    moved = [tensors[name].to(device.torch) for name in ("x", "target", "ids", "temperature")]
    weight = tensors["weight"].to(device.torch)

    def run(x, target, ids, temperature):
        given = {"batch_invariant": True, "chunk_tokens": 32, "memory_budget": budget, **EVERYTHING}
        return linear_log_probs(x, weight, target, ids=ids, temperature=temperature, **given)

    whole = run(*moved)
    for first, last in [(0, 1), (3, 40), (59, 60)]:
        for one, other in zip(run(*(tensor[first:last] for tensor in moved)), whole, strict=True):
            assert torch.equal(one, other[first:last])


def test_chunks_change_nothing_but_the_rounding_of_gradients():
    tensors = log_probs.make((60,), 32, 517, temperature=True)
    leaves = [tensors[name].requires_grad_() for name in ("x", "weight", "temperature")]
    results = []
    for options in ({}, {"chunk_tokens": 7}, {"memory_budget": 2**16}):
        found = linear_log_probs(
            *leaves[:2], tensors["target"], temperature=leaves[2], ids=tensors["ids"], **EVERYTHING, **options
        )
        results.append([*found, *log_probs.gradients_of(found, dict(enumerate(leaves))).values()])
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, same, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
def test_no_tokens_or_one(device, shape):
    x, weight = (torch.randn(*some, 16, device=device.torch).requires_grad_() for some in (shape, (9,)))
    target, ids = (torch.zeros(some, dtype=torch.int64, device=device.torch) for some in (shape, (*shape, 2)))
    found = linear_log_probs(x, weight, target, ids=ids, **EVERYTHING)
    assert found.top_ids.shape == (*shape, 5)
    assert found.mean_logit.shape == shape
    sum(output.sum() for output in found if output.requires_grad).backward()
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


def test_every_column_is_the_largest_first(device):
    """top_k may be the whole vocabulary, in chunks of columns that are shorter."""
    tensors = log_probs.make(vocabulary=1000)
    del tensors["temperature"]
    log_probs.check(tensors, device.torch, 2e-5, top_k=1000, memory_budget=2**13)


@pytest.mark.parametrize("options", [{}, {"return_entropy": True, "top_k": 3}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("bad", [-1.0, 0.0, math.nan])
def test_a_temperature_that_is_not_above_zero_gives_nan_unless_its_token_is_ignored(device, bad, options):
    tensors = log_probs.make((8,), temperature=True)
    del tensors["ids"]
    tensors["target"] = torch.tensor([1, 2, -100, 3, -100, 4, 5, 6])
    given, leaves = log_probs.leaves_of(tensors, device.torch)

    def outputs(temperature):
        found = linear_log_probs(**{**given, "temperature": temperature}, **options)
        return [found] if isinstance(found, torch.Tensor) else [each for each in found[:4] if each is not None]

    x, weight, temperature = (leaves[name] for name in ("x", "weight", "temperature"))
    expected = outputs(temperature)
    ignored = temperature * 1
    with torch.no_grad():
        ignored[tensors["target"] == -100] = bad
    found = outputs(ignored)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    for one in torch.autograd.grad(sum(each.sum() for each in found), (x, weight, temperature)):
        assert one.isfinite().all()
    with torch.no_grad():
        ignored[1] = bad
    for each in outputs(ignored.detach()):
        assert each[1].isnan().all() and each[0].isfinite().all()


def test_a_row_of_minus_infinity_but_for_some(device):
    x, weight = (
        torch.ones(3, 4, device=device.torch).requires_grad_(),
        torch.randn(9, 4, device=device.torch).requires_grad_(),
    )
    bias = torch.zeros(9, device=device.torch)
    bias[3:] = -torch.inf
    options = {name: value for name, value in EVERYTHING.items() if name != "return_mean_logit"}
    temperature = torch.ones(3, device=device.torch).requires_grad_()
    options |= {"top_k": 3, "temperature": temperature}
    found = linear_log_probs(x, weight, torch.zeros(3, dtype=torch.int64, device=device.torch), bias, **options)
    log_p = (x @ weight[:3].t()).log_softmax(-1)
    torch.testing.assert_close(found.entropy, -(log_p.exp() * log_p).sum(-1), rtol=1e-4, atol=1e-5)
    (found.entropy + found.square_sum + found.log_probs).sum().backward()
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    rates = torch.ones(3, device=device.torch).requires_grad_()
    log_p = (x.detach() @ weight[:3].detach().t() / rates.unsqueeze(1)).log_softmax(-1)
    (-(log_p.exp() * log_p).sum(-1) + log_p.exp().square().sum(-1) + log_p[:, 0]).sum().backward()
    torch.testing.assert_close(temperature.grad, rates.grad, rtol=1e-4, atol=1e-5)


def test_the_mean_of_logits_of_minus_infinity_has_the_gradients_that_pytorch_gives(device):
    tensors = log_probs.make((8,), bias=True, temperature=True)
    tensors["bias"][-1] = -torch.inf
    del tensors["target"], tensors["ids"]
    found = []
    for function, where in ((linear_log_probs, device.torch), (log_probs.definition, "cpu")):
        given, leaves = log_probs.leaves_of(tensors, where)
        mean = function(given.pop("x"), given.pop("weight"), None, **given, return_mean_logit=True).mean_logit
        gradients = torch.autograd.grad(mean[:4].sum(), list(leaves.values()))
        found.append([mean.detach(), *gradients[:-1], gradients[-1][:4]])  # of other temperatures PyTorch's are 0 times inf
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
    assert found[0][-1].isinf().all()


def test_a_token_with_a_logit_of_infinity_has_no_numbers(device):
    tensors = log_probs.make((3,), bias=True)
    tensors["bias"][-1] = torch.inf
    given, leaves = log_probs.leaves_of(tensors, device.torch)
    found = linear_log_probs(given.pop("x"), given.pop("weight"), given.pop("target"), **given, **EVERYTHING)
    for name in ("log_probs", "entropy", "square_sum", "mean_logit"):
        assert getattr(found, name)[:2].isnan().all(), name  # the third is ignored
    gradients = torch.autograd.grad(found.mean_logit[:2].sum(), list(leaves.values()))
    assert all(gradient.isnan().any() for gradient in gradients)


@pytest.mark.parametrize("lowest", [400.0, -800.0])
@pytest.mark.parametrize("mean", [False, True])
def test_temperatures_of_large_logits_have_gradients_as_exact_as_pytorchs(device, lowest, mean):
    """Logits are near 400, where their sum with gradients that sum to 0 would lose digits, or far below it too."""
    tensors = log_probs.make((64,), 16, 1001, temperature=True)
    tensors["bias"] = torch.linspace(lowest, 400.0, 1001)

    def gradient(function, dtype, where):
        given, leaves = log_probs.leaves_of(
            {name: tensor for name, tensor in tensors.items() if name != "ids"}, where, dtype
        )
        found = function(given.pop("x"), given.pop("weight"), given.pop("target"), **given, **EVERYTHING)
        found = found if mean else found._replace(mean_logit=None)
        return log_probs.gradients_of(found, leaves)["temperature"].cpu()

    expected = gradient(log_probs.definition, torch.float64, "cpu")
    found, theirs = gradient(linear_log_probs, None, device.torch), gradient(log_probs.definition, None, "cpu")
    assert (found - expected).norm() <= 2.0 * (theirs - expected).norm()


@pytest.mark.uncollected("the same kernels", lambda place, budget: place == "emulated" and budget)
@pytest.mark.parametrize("budget", [None, 2**14])
def test_an_offset_that_logits_share_changes_nothing(device, budget):
    """2^20, with logits that are multiples of 1/4 and temperatures 1/2 and 2: all of them are fp32 numbers."""
    tensors = log_probs.make(vocabulary=517, width=8, bias=True, temperature=True)
    tensors |= {"x": tensors["x"].round(), "weight": (2 * tensors["weight"]).round() / 4}
    tensors["temperature"] = torch.where(tensors["temperature"] < 1.0, 0.5, 2.0)
    found = []
    for offset in (0.0, 2.0**20):
        tensors["bias"].fill_(offset)
        given, leaves = log_probs.leaves_of(tensors, device.torch)
        outputs = linear_log_probs(
            given.pop("x"), given.pop("weight"), given.pop("target"), **given, **EVERYTHING, memory_budget=budget
        )
        outputs = outputs._replace(mean_logit=None, top_ids=None)
        gradients = log_probs.gradients_of(outputs, leaves)
        found.append([*(output for output in outputs if output is not None), *gradients.values()])
    for alone, together in zip(*found, strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=2e-5)


@pytest.mark.uncollected("what is traced is the same", lambda place: place != "cpu")
def test_one_graph(device):
    tensors = log_probs.make(temperature=True)
    compiled = torch.compile(linear_log_probs, fullgraph=True, backend="aot_eager")
    log_probs.check(tensors, "cpu", 2e-5, compiled, **EVERYTHING)


def test_no_logits_of_all_tokens_are_in_memory():
    """4 MiB of fp32: three quarters are more than a few copies of a chunk, 256 KiB each, and gradients."""
    tensors = log_probs.make((256,), 16, 4096, temperature=True)
    with Taken() as memory:
        log_probs.gradients_of(*_of_leaves(tensors, memory_budget=2**18))
    assert memory.peak < 3 * 2**20


def _of_leaves(tensors, **options):
    given, leaves = log_probs.leaves_of(tensors, "cpu")
    return linear_log_probs(
        given.pop("x"), given.pop("weight"), given.pop("target"), **given, **EVERYTHING, **options
    ), leaves


@pytest.mark.parametrize("shape", [(), (7,), (3, 1)])
def test_a_temperature_is_expanded(shape):
    tensors = log_probs.make()
    temperature = torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5
    found, whole = (
        linear_log_probs(tensors["x"], tensors["weight"], tensors["target"], temperature=each, return_entropy=True)
        for each in (temperature, temperature.expand(3, 7).contiguous())
    )
    assert torch.equal(found.log_probs, whole.log_probs)
    assert torch.equal(found.entropy, whole.entropy)


BAD = {
    "top_k": ({"top_k": 124}, ValueError, "top_k is 124 and must be at most 123"),
    "no top_k": ({"top_k": 0}, ValueError, "top_k is 0"),
    "temperature": ({"temperature": 0}, ValueError, "temperature is 0 and must be above 0"),
    "temperatures": ({"temperature": torch.ones(3)}, ValueError, r"temperature has shape \(3,\)"),
    "no ids": ({"ids": torch.zeros(3, 7, 0, dtype=torch.int64)}, ValueError, "ids has shape"),
    "ids": ({"ids": torch.zeros(3, 7, dtype=torch.int64)}, ValueError, "ids has shape"),
    "ids of floating point": ({"ids": torch.zeros(3, 7, 2)}, TypeError, "ids is torch.float32"),
    "nothing": ({"target": None}, ValueError, "target is None"),
    "top of nothing": ({"target": None, "return_is_top": True}, ValueError, "target is None"),
    "a flag": ({"return_mean_logit": 1}, TypeError, "return_mean_logit is 1"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_named(what):
    options, error, message = BAD[what]
    tensors = log_probs.make()
    with pytest.raises(error, match=message):
        linear_log_probs(tensors["x"], tensors["weight"], **{"target": tensors["target"], **options})
