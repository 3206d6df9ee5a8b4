"""Results of final modules: what the compilers hand to the chip, at their addresses, with every check of npu-offline's."""

import contextlib

import formula
import npu_offline
import npu_tiling
import pytest
import torch
from npu_rms_norm import add_rms_norm, add_rms_norm_dynamic_quant, gated_rms_norm, qk_rms_norm, rms_norm
from npu_tiling.partials import choose_sum, sum_partials_kernel

REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]
CASES = {  # rows, width, dtype of x, of the weight
    "rows that share a tile": (41, 1000, torch.bfloat16, None),
    "a row a tile": (5, 16384, torch.bfloat16, torch.float32),
    "columns": (3, 65536, torch.float32, None),
    "heads": ((9, 3), 128, torch.float16, None),
}


def on(toolchain):
    return npu_offline.emulate("Ascend910B4", toolchain=toolchain, checks=True)


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_formula(name, toolchain):
    case = formula.make(*CASES[name])
    with on(toolchain):
        formula.check(case, formula.run(case, rms_norm, "cpu"))


@pytest.mark.few(1)
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_residual_keeps_its_own_gradient(toolchain):
    case = formula.make(41, 1000, torch.bfloat16)
    residual = torch.randn(41, 1000).bfloat16()
    leaves = [each.clone().requires_grad_() for each in (case.x, residual, case.weight)]
    with on(toolchain):
        y, total = add_rms_norm(*leaves)
        dx, dresidual, dweight = torch.autograd.grad((y, total), leaves, (case.dy, residual))
    assert torch.equal(total, case.x + residual)
    assert torch.equal(dx, dresidual)
    case.x = total.detach()
    formula.check(case, (y.detach(), dx, dweight), dsum=residual)


@pytest.mark.few(1)
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_the_gradient_of_a_projection_is_that_of_its_norms(toolchain):
    torch.manual_seed(0)
    leaves = [each.requires_grad_() for each in (torch.randn(41, 8 * 128), torch.rand(128) + 0.5, torch.rand(128) + 0.5)]
    dq, dk, dv = gradients = [torch.randn(41, heads, 128) for heads in (4, 2, 2)]
    with on(toolchain):
        q, k, v = qk_rms_norm(*leaves, 4, 2)
        dqkv, *dweights = torch.autograd.grad((q, k, v), leaves, gradients)
    heads, dheads = (each.detach().view(41, 8, 128) for each in (leaves[0], dqkv))
    assert torch.equal(dheads[:, 6:], dv)
    for found, weight, dweight, dy, own in (
        (q, leaves[1], dweights[0], dq, slice(0, 4)),
        (k, leaves[2], dweights[1], dk, slice(4, 6)),
    ):
        case = formula.Case(heads[:, own], weight.detach(), dy)
        formula.check(case, (found.detach(), dheads[:, own], dweight))


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
@pytest.mark.parametrize("casting_mode", ["llama", "gemma", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_final_modules_round_where_the_mode_says(dtype, casting_mode, toolchain):
    """To the bit: CANN 8.5's compiler leaves a cast out that is cast back at once."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 10, (50, 1024), generator=generator).to(dtype)  # sums of squares are exact in any order
    weight = torch.randn(1024, generator=generator).to(dtype)
    with npu_offline.emulate("Ascend910B4", toolchain=toolchain, final=True):
        y = rms_norm(x, weight, 0.0, casting_mode=casting_mode)
    rstd = 1.0 / x.float().square().mean(-1, keepdim=True).sqrt()
    if casting_mode == "none":
        rstd = rstd.to(dtype).float()
    normalised = x.float() * rstd
    if casting_mode != "gemma":
        normalised = normalised.to(dtype).float()
    assert torch.equal(y, (normalised * weight.float()).to(dtype))


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
@pytest.mark.parametrize(
    ("norm_before_gate", "rows", "parameter"),
    [(True, 90, (128,)), (False, 90, (128,)), (False, 90, (3, 128)), (True, 5, (4096,)), (False, 5, (4096,))],
)
def test_final_modules_gate(norm_before_gate, rows, parameter, toolchain):
    """To 1 % of the largest element, where the definition rounds to bf16. 4096 columns just fit on chip."""
    torch.manual_seed(0)
    inputs = [torch.randn(rows, *parameter).bfloat16() for _ in range(2)] + [torch.rand(parameter).bfloat16() + 0.5] * 2
    dy = torch.randn(rows, *parameter)
    n_inputs = 4 if rows > 5 else 3  # with a bias, rows of 4096 columns do not fit whole
    results = []
    for place in (npu_offline.emulate("Ascend910B4", toolchain=toolchain, final=True), contextlib.nullcontext()):
        leaves = [each.clone().requires_grad_() for each in inputs[:n_inputs]]
        with place:
            y = gated_rms_norm(*leaves[:3], bias=leaves[3] if n_inputs > 3 else None, norm_before_gate=norm_before_gate)
            results.append((y, *torch.autograd.grad(y, leaves, dy.bfloat16())))
    for found, expected in zip(*results, strict=True):
        assert (found.float() - expected.float()).abs().max() <= 0.01 * expected.float().abs().max()


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
@pytest.mark.parametrize("width", [128, 20000])
def test_final_modules_quantise(width, toolchain):
    torch.manual_seed(0)
    x, residual, weight = torch.randn(41, width), torch.randn(41, width), torch.rand(width) + 0.5
    x[7, 3], x[40, 99] = float("nan"), float("inf")
    with npu_offline.emulate("Ascend910B4", toolchain=toolchain, final=True):
        found = add_rms_norm_dynamic_quant(x, residual, weight)
    expected = add_rms_norm_dynamic_quant(x, residual, weight)
    assert torch.allclose(found.residual, expected.residual, rtol=0, atol=0, equal_nan=True)
    assert torch.allclose(found.scale, expected.scale, rtol=1e-6, equal_nan=True)
    assert (found.y.int() - expected.y.int()).abs().max() <= 1  # a half may fall either way
    assert (found.y != expected.y).float().mean() < 1e-3


@pytest.mark.parametrize("toolchain", ["1.1.0", "1.2.0"])
def test_partial_sums_in_tiles_of_one_row_are_added_in_order(toolchain):
    """An fp32 weight of 70000 elements: CANN 9.0 and 9.1 leave out a barrier where such a sum has two buffers."""
    width, n_partials, soc = 70000, 2, "Ascend910B4"
    tiling = choose_sum(width, npu_tiling.soc(soc))
    assert tiling.constants["BLOCK_M"] == 1
    partials, dw = torch.randn(n_partials, width), torch.full((width,), float("nan"))
    with npu_offline.emulate(soc, toolchain=toolchain, checks=True, distinct=True):
        sum_partials_kernel[(tiling.grid(1),)](partials, dw, n_partials, **tiling.constants, **tiling.options)
    first = slice(0, tiling.constants["BLOCK_N"])  # of the programs that run
    assert torch.allclose(dw[first], partials.sum(0)[first], rtol=1e-6, atol=1e-6)
