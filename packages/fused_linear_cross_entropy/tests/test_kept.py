"""Exponentials kept in the memory of the weight's gradient, where the budget is small: three products, and as exact."""

import losses
import npu_tiling
import pytest
import torch
from npu_fused_linear_cross_entropy.call import Options
from npu_fused_linear_cross_entropy.decide import MIB, Demand, pitch, split
from npu_fused_linear_cross_entropy.operator import FORWARD
from npu_tiling.explaining import Product, explained

TOKENS, WIDTH, VOCABULARY = 96, 96, 2560
BUDGET = TOKENS * 4 * 700  # logits of five chunks of columns
SMALL = {"memory_budget": BUDGET}


def demand(tokens, width, vocabulary, logit_bytes, dweight_bytes, dx, kept_bytes):
    return Demand(
        tokens=tokens,
        width=width,
        vocabulary=vocabulary,
        logit_bytes=logit_bytes,
        dweight_bytes=dweight_bytes,
        dx=dx,
        kept_bytes=kept_bytes,
    )


def products(tokens=TOKENS, width=WIDTH, dtype=torch.bfloat16, bias=False, needs=(True, True, False), **options):
    """Matrix products of a forward with gradients, as multiples of one of [tokens, width] and [width, vocabulary]."""
    case = losses.make(tokens, width, VOCABULARY, dtype)
    given = Options(**{**SMALL, **options}, vocab_size=VOCABULARY)
    added = torch.zeros(VOCABULARY) if bias else None
    with npu_tiling.dry_run(npu_tiling.soc("Ascend910B4")) as calls, torch.no_grad():
        FORWARD.forward.run(case.x, case.weight, case.target, added, None, None, None, None, *given, False, *needs)
    steps = explained(calls)
    return sum(step.flops for step in steps if isinstance(step, Product)) / (2 * tokens * width * VOCABULARY)


def test_three_products_where_exponentials_are_kept_and_four_elsewhere():
    assert products() == 3
    assert products(dtype=torch.float32) == 3
    assert products(needs=(False, True, False)) == 2
    assert products(accum_dtype=torch.float32) == 3
    assert products(tokens=2 * TOKENS, memory_budget=2 * BUDGET, accum_dtype=torch.float32) == 3
    assert products(tokens=2 * TOKENS, memory_budget=2 * BUDGET) == 4  # no place
    assert products(needs=(True, False, False)) == 3  # logits twice, no weight's gradient
    assert products(softcap=30.0) == products(logit_scale=0.5) == products(bias=True) == 4
    assert products(label_smoothing=0.1) == products(return_token_accuracy=True) == products(dtype=torch.float16) == 4


OPTIONS = {
    "plain": {},
    "few tokens": {"tokens": 5, "memory_budget": 5 * 4 * 700},
    "fp32": {"dtype": torch.float32},
    "fp32 sums": {"accum_dtype": torch.float32},
    "more tokens than width": {"tokens": 150, "memory_budget": 150 * 4 * 700, "accum_dtype": torch.float32},
    "sum": {"reduction": "sum", "ignored": 0.3},
    "options": {"class_weight": True, "lse_square_scale": 0.1, "token_scaling": True},
    "all ignored": {"ignored": 1.0},
    "a ragged vocabulary": {"tokens": 90, "vocabulary": 2501},
    "a ragged vocabulary, no place for its end": {"vocabulary": 2501},
}


EMULATED = ("plain", "fp32", "options", "a ragged vocabulary, no place for its end")


@pytest.mark.few(2)
@pytest.mark.uncollected("a CPU keeps none", lambda place: place == "cpu")
@pytest.mark.uncollected("the same kernels", lambda place, what: place == "emulated" and what not in EMULATED)
@pytest.mark.parametrize("what", OPTIONS)
def test_gradients_of_kept_exponentials(device, what, npu_poisoned):
    case = {"tokens": TOKENS, "width": WIDTH, "vocabulary": VOCABULARY, **SMALL, **OPTIONS[what]}
    dtype = case.get("dtype", torch.bfloat16)
    sums = case.get("accum_dtype", dtype)
    wanted = demand(case["tokens"], WIDTH, case["vocabulary"], 4, sums.itemsize, dtype.itemsize < 4, dtype.itemsize)
    assert split(wanted, None, case["memory_budget"], None).kept
    made = losses.make(**case)
    losses.check(made, losses.run(made, device.torch), kept=dtype)


@pytest.mark.uncollected("between the other two", lambda place, scale: place == "emulated" and scale == 30.0)
@pytest.mark.parametrize("scale", [1.0, 30.0, 2500.0])
def test_no_less_exact_than_products_in_the_dtype_of_x(device, scale):
    """PyTorch's own loss of bf16 logits, with logits of a few units up to ten thousand."""
    case = losses.make(TOKENS, WIDTH, VOCABULARY, scale=scale, **SMALL)
    exact = losses.exact(case)
    seed = losses.upstream(case, exact.outputs)["loss"].float()
    x, weight = losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)
    loss = torch.nn.functional.cross_entropy(x @ weight.t(), case.target.to(device.torch))
    theirs = torch.autograd.grad(loss, (x, weight), seed.to(loss))
    ours = losses.run(case, device.torch)
    for name, their in zip(("x", "weight"), theirs, strict=True):
        size = exact.gradients[name].norm()
        error, limit = ((g.cpu().double() - exact.gradients[name]).norm() / size for g in (ours.gradients[name], their))
        assert error <= 1.05 * limit + 2**-9  # and the rounding of the result
    assert torch.allclose(ours.outputs["loss"].double(), exact.outputs["loss"], rtol=2**-20)


@pytest.mark.uncollected("test_ascend.py runs programs in several orders", lambda place: place == "emulated")
def test_equal_inputs_give_equal_bits(device):
    case = losses.make(TOKENS, WIDTH, VOCABULARY, **SMALL)
    first, again = losses.run(case, device.torch), losses.run(case, device.torch)
    assert all(torch.equal(again.gradients[name], first.gradients[name]) for name in first.gradients)


def test_what_a_llama_takes():
    """31 MiB for 4096 tokens: logits of a chunk, and a number for each token and chunk; sums of dx after the logits."""
    found = split(demand(4096, 4096, 128256, 4, 2, True, 2), None, 31 * MIB, None)
    tokens, columns = found.longest
    assert found.kept
    assert tokens == 4096
    assert columns >= 1536
    assert tokens * (4 * pitch(columns) + 4 * len(found.columns)) <= 31 * MIB
    widths = {part.stop - part.start for part in found.kept}
    assert max(widths) == 2 * columns  # a copy in bf16 takes what logits in fp32 took
    assert all(4096 * pitch(width) <= width * 4096 for width in widths)


def test_the_end_of_a_ragged_vocabulary_is_kept_elsewhere():
    found = split(demand(4096, 4096, 50257, 4, 2, True, 2), None, None, None)
    assert found.kept[-1] == found.columns[-1] == slice(50257 // 128 * 128, 50257)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tokens": 4097}, "logits of more tokens than the weight is wide do not fit"),
        ({"kept_bytes": 0}, "options whose gradient is more than a factor of the row times exponentials"),
        ({"dweight_bytes": 0}, "no memory of a gradient"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_when_exponentials_are_not_kept(changes, why):
    sizes = {"tokens": 4096, "width": 4096, "vocabulary": 128256, "logit_bytes": 4, "dweight_bytes": 2, "dx": True}
    assert not split(Demand(**{**sizes, "kept_bytes": 2, **changes}), None, 31 * MIB, None).kept
