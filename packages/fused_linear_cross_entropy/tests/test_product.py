"""Exponentials that the product itself makes (CUDA): against fp64, and which calls take it."""

import contextlib

import losses
import pytest
import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_log_probs, tiling
from npu_fused_linear_cross_entropy.call import Needs, Options
from npu_fused_linear_cross_entropy.decide import Shape, Task, choose
from npu_fused_linear_cross_entropy.tiling import ProductTiling
from npu_tiling import Device, Kernels
from npu_tiling.plans import Plan
from planned_anew import planned_anew

pytestmark = pytest.mark.usefixtures("npu_poisoned")

H200 = Device("NVIDIA H200", "cuda", "sm_90", 132, 132, 232448, ub_align=16, max_grid=2**31 - 1)
ALL = Needs(True, True, False)
PRODUCTS = ("cross_entropy_product_kernel", "cross_entropy_product_again_kernel")
WIDE = 809  # columns: tiles of 256 or 128, and a tail


def chosen(tokens=8192, width=2048, vocabulary=151936, dtype=torch.bfloat16, bias=None, needs=ALL, device=H200, **options):
    """The tiling for tensors that TMA can read."""
    shape = Shape(
        task=Task.LOSS_AND_GRADIENTS if any(needs) else Task.LOSS,
        tokens=tokens,
        width=width,
        vocabulary=vocabulary,
        x_dtype=dtype,
        weight_dtype=dtype,
        bias_dtype=bias,
        options=Options(**options, vocab_size=vocabulary),
        needs=needs,
        unfinished=False,
        writes_fp32=True,
        is_readable=True,
        device=device,
    )
    return choose(shape)


@pytest.mark.parametrize(
    ("what", "fused"),
    [
        ({}, True),
        ({"needs": Needs(False, False, False)}, True),
        ({"reduction": "none", "lse_square_scale": 0.1, "logit_scale": 2.0}, True),
        ({"tokens": 32, "width": 512}, False),
        ({"chunk_tokens": 16, "width": 512}, False),
        ({"width": 2044}, False),
        ({"dtype": torch.float32}, False),
        ({"bias": torch.bfloat16}, False),
        ({"softcap": 30.0}, False),
        ({"label_smoothing": 0.1}, False),
        ({"return_entropy": True}, False),
        ({"return_predicted_tokens": True}, False),
        ({"memory_budget": 2**20}, False),
        ({"device": Device("A100", "cuda", "sm_80", 108, 108, 166912, ub_align=16, max_grid=2**31 - 1)}, False),
    ],
)
def test_which_calls_take_it(what, fused):
    assert chosen(**what).way.multiplies == fused


@pytest.mark.parametrize("name", ["x", "weight", "weight_grad"])
def test_what_is_transposed_is_not_taken(name, monkeypatch):
    """TMA reads rows of x and the weight, and what targets add goes to rows of weight_grad: their columns are adjacent."""
    monkeypatch.setattr(tiling, "descriptor_type", lambda: object)
    given = {"x": torch.empty(64, 32), "weight": torch.empty(48, 32), "weight_grad": torch.empty(48, 32)}
    plan = Plan(H200)

    def is_possible(**given):
        return tiling.is_possible(plan, *map(plan.argument, given.values()))

    assert is_possible(**given)
    assert is_possible(**{**given, "weight_grad": None})
    given[name] = given[name].t().contiguous().t()
    assert not is_possible(**given)


def test_no_more_memory_than_the_budget():
    """Exponentials, a sum for each tile of columns, and rows of x and dx."""
    for tokens, width, vocabulary in ((16384, 2880, 201088), (32768, 1024, 151936), (65536, 768, 50257)):
        found = chosen(tokens, width, vocabulary, memory_budget=700 * 2**20, accum_dtype=torch.bfloat16)
        longest, _ = found.chunks.longest
        assert found.way.multiplies
        used = 2 * found.buffer + longest * (
            4 * ProductTiling(width=width, device=H200).column_tiles(vocabulary) + 6 * width
        )
        assert used <= 700 * 2**20


@pytest.mark.parametrize("budget", [None, 2**20, 1])
def test_no_exponentials_in_memory_for_the_loss_alone(budget):
    """A budget for sums alone cuts tokens, and no columns."""
    found = chosen(needs=Needs(False, False, False), memory_budget=budget)
    assert found.buffer == 0 and len(found.chunks.columns) == 1
    assert found.chunks.longest[0] == {None: 8192, 2**20: 384, 1: 128}[budget]


@pytest.fixture
def fused(device, monkeypatch):
    """Takes it for problems of any size; the kernels that are launched."""
    if device.name != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of sm_90, whose TMA and wgmma the kernel is for")
    if tiling.descriptor_type() is None:
        pytest.skip("Triton before 3.4 takes no descriptors")
    monkeypatch.setattr(tiling, "_MIN_OPERATIONS", 0.0)
    choose.cache_clear()
    launched, real = [], Kernels.launch

    def launch(self, module, kernel, *others):
        if kernel in PRODUCTS:
            launched.append(kernel)
        return real(self, module, kernel, *others)

    monkeypatch.setattr(Kernels, "launch", launch)
    with planned_anew():
        yield launched
    choose.cache_clear()


@pytest.mark.uncollected("needs a GPU of sm_90", lambda place: place != "cuda")
@pytest.mark.parametrize("vocabulary", [7, 256, WIDE])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum", "tokens": 1},
        {"lse_square_scale": 0.1, "token_scaling": True, "class_weight": True, "ignored": 0.3},
        {"logit_scale": 0.5, "chunk_tokens": 128},
        {"reduction": "none", "return_z_loss": True, "lse_square_scale": 0.1, "return_lse": True, "ignored": 0.5},
    ],
)
def test_options(device, fused, vocabulary, options):
    case = losses.make(**{"tokens": 300, "width": 200, "vocabulary": vocabulary, **options})
    losses.check(case, losses.run(case, device.torch), roundings=3)
    assert fused


RISES = {
    "up": torch.linspace(0, 200, WIDE),
    "down": torch.linspace(0, -200, WIDE),
    "a step": torch.where(torch.arange(WIDE) >= WIDE - 20, 80.0, -80.0),
    "just below the limit": torch.where(torch.arange(WIDE) < 300, 58.0, 0.0),
    "ten thousand": torch.where(torch.arange(WIDE) == 400, 1e4, -1e4),
    "all equal": torch.full((WIDE,), 80.0),
}


KEPT = {"memory_budget": 150 * 2 * 600}  # exponentials of 512 columns at a time, which lie in the weight's gradient


@pytest.mark.uncollected("needs a GPU of sm_90", lambda place: place != "cuda")
@pytest.mark.parametrize("what", RISES)
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, KEPT], ids=["mean", "none", "kept"])
def test_rows_that_rise_above_their_target(device, fused, what, options):
    case = losses.make(150, 160, WIDE, **options)
    x, weight = case.x.clone(), case.weight.clone()
    x[:, 0] = (torch.arange(150) % 2).to(x.dtype)
    weight[:, 0] = RISES[what].to(x.dtype)
    case = losses.dataclasses.replace(case, x=x, weight=weight)
    losses.check(case, losses.run(case, device.torch))
    products = fused.count("cross_entropy_product_kernel")
    assert products == (2 if options else 1)  # forward and backward, or two chunks


@pytest.mark.uncollected("needs a GPU of sm_90", lambda place: place != "cuda")
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, KEPT], ids=["mean", "none", "kept"])
def test_calls_again_give_the_same_bits(device, fused, options):
    """From the third launch on a kernel is called without Triton's JIT, and descriptors are those of other memory."""
    case = losses.make(150, 160, WIDE, **options)
    first = losses.run(case, device.torch)
    losses.check(case, first)
    for _ in range(4):
        again = losses.run(case, device.torch)
        for name, gradient in first.gradients.items():
            assert torch.equal(again.gradients[name], gradient)
        assert torch.equal(again.outputs["loss"], first.outputs["loss"])


@pytest.mark.uncollected("needs a GPU of sm_90", lambda place: place != "cuda")
def test_a_row_with_no_number_spoils_no_other(device, fused):
    case = losses.make(150, 32, WIDE, reduction="none")
    x = case.x.clone()
    x[17] = torch.nan
    x, weight = x.to(device.torch).requires_grad_(), case.weight.to(device.torch)
    loss = fused_linear_cross_entropy(x, weight, case.target.to(device.torch), reduction="none")
    (dx,) = torch.autograd.grad(loss.sum(), x)
    others = torch.arange(150) != 17
    assert torch.isnan(loss[17])
    assert torch.isfinite(loss[others]).all()
    assert torch.isfinite(dx[others]).all()


@pytest.mark.uncollected("needs a GPU of sm_90", lambda place: place != "cuda")
def test_targets_outside_of_the_vocabulary(device, fused):
    """NaN for such a token, 0 for an ignored one; neither has a gradient."""
    case = losses.make(150, 32, WIDE, reduction="none")
    target = case.target.clone()
    target[3], target[4] = WIDE, -100
    x, weight = case.x.to(device.torch).requires_grad_(), case.weight.to(device.torch)
    loss = fused_linear_cross_entropy(x, weight, target.to(device.torch), reduction="none")
    (dx,) = torch.autograd.grad(loss.sum(), x)
    assert torch.isnan(loss[3])
    assert loss[4] == 0
    assert (dx[3:5] == 0).all()


@pytest.mark.uncollected("needs a GPU of sm_90", lambda place: place != "cuda")
def test_equal_calls_give_equal_bits_and_a_token_the_same_ones_among_others(device, fused):
    case = losses.make(700, 256, WIDE)
    x, weight, target = (one.to(device.torch) for one in (case.x, case.weight, case.target))
    first, again = (linear_log_probs(x, weight, target) for _ in range(2))
    assert torch.equal(first, again)
    some = linear_log_probs(x[133:300], weight, target[133:300])
    assert torch.equal(some, first[133:300])
    assert "cross_entropy_product_kernel" in fused


@pytest.mark.uncollected("needs a GPU of sm_90", lambda place: place != "cuda")
def test_strided_rows_and_those_that_tma_cannot_read(device, fused):
    """Views of wider memory; rows that begin at addresses which are no multiple of 16 bytes take PyTorch's product."""
    case = losses.make(140, 64, WIDE)
    wide = torch.full((140, 83), torch.nan, dtype=torch.bfloat16)
    weight, target = losses.leaf(case.weight, device.torch), case.target.to(device.torch)
    for pitch, expected in ((80, True), (83, False), (0, False)):
        if pitch:
            x = wide[:, :pitch].to(device.torch).contiguous()[:, :64]
            x.copy_(case.x)
        else:
            x = case.x[:1].to(device.torch).expand(140, 64)
        fused.clear()
        loss = fused_linear_cross_entropy(x, weight, target)
        loss.backward()
        assert bool(fused) == expected
        exact = losses.exact(losses.dataclasses.replace(case, x=x.cpu()))
        assert abs(float(loss.detach()) - float(exact.outputs["loss"])) < 1e-5


@pytest.mark.uncollected("needs a GPU of sm_90", lambda place: place != "cuda")
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, KEPT])
def test_graph_capture(device, fused, npu_capture, options):
    case = losses.make(150, 160, WIDE)
    x, weight, target = (one.to(device.torch) for one in (case.x, case.weight, case.target))
    leaves = [x.requires_grad_(), weight.requires_grad_()]

    def step():
        loss = fused_linear_cross_entropy(*leaves, target, **options)
        return loss, *torch.autograd.grad(loss.sum() * 3, leaves)

    captured, replay = npu_capture(step)
    with torch.no_grad():
        x.normal_()
    replay()
    for replayed, eager in zip(captured, step(), strict=True):
        assert torch.equal(replayed, eager)


@pytest.mark.uncollected("needs a GPU of sm_90", lambda place: place != "cuda")
def test_nothing_waits_for_the_device(device, fused, npu_no_waits):
    case = losses.make(150, 160, WIDE)
    leaves = [losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)]
    target = case.target.to(device.torch)
    for context in (contextlib.nullcontext, npu_no_waits):  # the first round compiles
        with context():
            for options in ({}, {"reduction": "none"}, KEPT):
                loss = fused_linear_cross_entropy(*leaves, target, **options)
                torch.autograd.grad(loss.sum() * 3, leaves)
