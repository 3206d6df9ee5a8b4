"""Exponentials in place of the logits, whose factors are known after the row: against fp64 and two sweeps."""

import losses
import npu_tiling
import pytest
import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, matmul
from planned_anew import planned_anew

pytestmark = pytest.mark.usefixtures("npu_poisoned")

WIDE = 9001  # columns: more than a tile has, and a tail


def shaped(rise, dtype=torch.bfloat16, vocabulary=WIDE, tokens=19, **options):
    """A case whose logits have `rise` [vocabulary] added to those of every second token."""
    case = losses.make(tokens, 32, vocabulary, dtype, **options)
    x, weight = case.x.clone(), case.weight.clone()
    x[:, 0] = (torch.arange(tokens) % 2).to(dtype)
    weight[:, 0] = rise.to(dtype)
    return losses.dataclasses.replace(case, x=x, weight=weight)


@pytest.fixture
def names(device, monkeypatch):
    """The kernels that are launched."""
    if device.name == "cpu":
        pytest.skip("kernels")
    seen, real = [], npu_tiling.Kernels.launch

    def launched(self, module, kernel, *others):
        seen.append(kernel)
        return real(self, module, kernel, *others)

    monkeypatch.setattr(npu_tiling.Kernels, "launch", launched)
    return seen


@pytest.mark.parametrize(
    ("options", "is_one"),
    [
        ({}, True),
        ({"lse_square_scale": 0.1, "token_scaling": True, "class_weight": True, "ignored": 0.3}, True),
        ({"logit_scale": 0.5, "reduction": "sum", "chunk_tokens": 8}, True),
        ({"dtype": torch.float32}, True),
        ({"dtype": torch.float16}, False),
        ({"softcap": 30.0}, False),
        ({"label_smoothing": 0.1}, False),
        ({"return_token_accuracy": True}, False),
        ({"bias": torch.bfloat16}, False),
        ({"vocabulary": 123}, False),
    ],
)
@pytest.mark.parametrize("chip", [npu_tiling.soc("Ascend910B4"), npu_tiling.GPUS["A100"]], ids=["ascend", "cuda"])
def test_options_take_one_sweep_or_two(chip, options, is_one):
    case = losses.make(**{"tokens": 19, "width": 32, "vocabulary": WIDE, **options})
    with npu_tiling.dry_run(chip) as calls:
        losses.run(case, "cpu")
    names = [launch.kernel for call in calls for launch in call.launches]
    assert ("cross_entropy_exponentials_kernel" in names) == is_one
    assert ("cross_entropy_kernel" in names) != is_one


@pytest.mark.uncollected("kernels alone sweep", lambda place: place == "cpu")
@pytest.mark.parametrize(
    "options",
    [
        {"lse_square_scale": 0.1, "token_scaling": True, "class_weight": True, "ignored": 0.3},
        {"logit_scale": 0.5, "reduction": "sum", "chunk_tokens": 8},
    ],
)
def test_values_of_one_sweep(device, names, options):
    case = losses.make(19, 32, WIDE, **options)
    losses.check(case, losses.run(case, device.torch), roundings=3)
    assert "cross_entropy_exponentials_kernel" in names


RISES = {
    "up": torch.linspace(0, 200, WIDE),
    "down": torch.linspace(0, -200, WIDE),
    "a step in the first tile that is swept": torch.where(torch.arange(WIDE) >= WIDE - 20, 80.0, -80.0),
    "a step in the last tile": torch.where(torch.arange(WIDE) < 20, 80.0, -80.0),
    "steps of forty": 40.0 * (torch.arange(WIDE) // 2000),
    "just below the limit": torch.where(torch.arange(WIDE) < 3000, 29.0, 0.0),
    "ten thousand": torch.where(torch.arange(WIDE) == 4000, 1e4, -1e4),
    "all equal": torch.full((WIDE,), 80.0),
}


@pytest.mark.uncollected("kernels alone sweep", lambda place: place == "cpu")
@pytest.mark.uncollected(
    "the same sweep over logits in fp32", lambda what, dtype: dtype == torch.float32 and what not in ("up", "ten thousand")
)
@pytest.mark.parametrize("what", RISES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_rise_above_their_first_tile(device, names, what, dtype):
    case = shaped(RISES[what], dtype)
    losses.check(case, losses.run(case, device.torch))


@pytest.mark.uncollected("kernels alone sweep", lambda place: place == "cpu")
@pytest.mark.few(2)
@pytest.mark.parametrize("what", ["up", "down", "a step in the last tile", "ten thousand"])
def test_kept_exponentials_of_chunks_that_rise(device, names, what):
    """Chunks of columns whose references differ are made equal before they are multiplied."""
    case = shaped(RISES[what][:2560] * (WIDE / 2560), vocabulary=2560, tokens=31, memory_budget=31 * 4 * 700)
    losses.check(case, losses.run(case, device.torch))
    assert names.count("cross_entropy_settle_kernel") > 1


def test_a_gradient_that_vanishes_but_for_the_targets(device):
    """The factor of a probability is zero where a z-loss cancels the loss: what is left is the target's."""
    case = losses.make(7, 32, WIDE, torch.float32, scale=1e-6, reduction="sum")
    lse = float(torch.tensor(float(WIDE)).log())
    case = case.with_options(lse_square_scale=-0.5 / lse)
    results = losses.run(case, device.torch)
    losses.check(case, results)


@pytest.mark.uncollected("kernels alone sweep", lambda place: place == "cpu")
@pytest.mark.parametrize(
    ("tokens", "options"),
    [(1, {}), (171, {}), (85, {"lse_square_scale": 0.1, "token_scaling": True, "class_weight": True, "ignored": 0.3})],
)
def test_rows_that_are_one_tile(device, names, tokens, options):
    """One tile a program, and several, the last of one row."""
    case = losses.make(tokens, 32, 4096, torch.bfloat16, **options)
    losses.check(case, losses.run(case, device.torch), roundings=3)
    assert ("cross_entropy_exponentials_kernel" in names) == (device.name != "cuda")  # such rows are two sweeps on CUDA


@pytest.mark.few(2)
@pytest.mark.parametrize(("value", "column"), [(torch.nan, 0), (torch.inf, 5000), (-torch.inf, 0), (torch.nan, WIDE - 1)])
def test_a_row_with_no_number_spoils_no_other(device, value, column):
    case = losses.make(6, 32, WIDE, torch.float32, reduction="sum")
    x, weight = case.x.clone(), case.weight.clone()
    x[:, 0] = 0.0
    x[3, 0], weight[:, 0], weight[column, 0] = 1.0, 0.0, value
    x, weight = x.to(device.torch).requires_grad_(), weight.to(device.torch)
    # Zero times no number is none: the column is that number for the one row only where products skip zeros.
    expected = losses.dataclasses.replace(case, x=case.x.clone(), weight=case.weight.clone())
    expected.x[:, 0], expected.weight[:, 0] = 0.0, 0.0
    logits = torch.zeros(6, WIDE)

    def product(a, b, out):
        out.copy_(
            torch.nan_to_num(a, nan=0.0, posinf=0.0, neginf=0.0) @ torch.nan_to_num(b, nan=0.0, posinf=0.0, neginf=0.0)
        )
        if out.shape == logits.shape:
            out[3, column] = value

    def multiply(p, *slots, **_):
        p.torch(product, *slots, writes=slots[2:])

    with pytest.MonkeyPatch.context() as patch, planned_anew():
        patch.setattr(matmul, "multiply", multiply)
        loss = fused_linear_cross_entropy(x, weight, case.target.to(device.torch), reduction="sum")
        (dx,) = torch.autograd.grad(loss, x)
    if value > 0 or value != value:
        assert torch.isnan(loss)
    else:
        assert torch.isfinite(loss)
    assert torch.isfinite(dx[[0, 1, 2, 4, 5]]).all()


@pytest.mark.uncollected("kernels alone sweep", lambda place: place == "cpu")
@pytest.mark.few(1)
@pytest.mark.parametrize(("tokens", "scale"), [(60, 1.0), (60, 4.0), (64, 4.0)])
def test_errors_of_one_sweep_and_of_two(device, names, tokens, scale):
    """In norm, against fp64. Exponentials and x times the factor are rounded, the targets' part is not.

    Two sweeps round the targets' elements, 1 / N less little: not where N is a power of two.
    """
    case = losses.make(tokens, 64, WIDE, scale=scale)
    case.seeds = {"loss": torch.tensor(1.0)}
    exact = losses.exact(case)
    once = losses.run(case, device.torch)
    assert "cross_entropy_exponentials_kernel" in names
    twice = losses.run(case.with_options(return_token_accuracy=True), device.torch)
    assert "cross_entropy_kernel" in names
    norms = {}
    for name, wanted in exact.gradients.items():
        norms[name] = [float((found.gradients[name].double() - wanted).norm() / wanted.norm()) for found in (once, twice)]
    assert norms["x"][0] <= 0.003
    assert norms["weight"][0] <= 0.0025
    if tokens == 60:
        assert norms["x"][0] <= 0.6 * norms["x"][1]
        assert norms["weight"][0] <= 1.2 * norms["weight"][1]


@pytest.mark.parametrize("memory_budget", [None, 64 * 4 * 700], ids=["rows", "kept"])
def test_each_element_of_the_weights_gradient_where_tokens_of_a_target_cancel(device, memory_budget):
    """By the rule of npu-bench, against the element and the rms of all: few rows of the weight are targets."""
    vocabulary = WIDE if memory_budget is None else 2560
    case = losses.make(64, 64, vocabulary, memory_budget=memory_budget)
    targets = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(1))[:8]
    case = losses.dataclasses.replace(case, target=targets.repeat(8))
    case.seeds = {"loss": torch.tensor(1.0)}
    exact = losses.exact(case).gradients["weight"]
    found = losses.run(case, device.torch).gradients["weight"].double()
    error = (found - exact).abs() / (exact.abs() + exact.square().mean().sqrt())
    assert error.max() <= 2**-5, f"{error.max():.1e}"
