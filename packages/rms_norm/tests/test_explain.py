"""What `explain` says of a call is what the call launches, wherever there are kernels."""

import npu_rms_norm
import npu_tiling
import pytest
import torch
from npu_rms_norm import explain
from npu_tiling.explaining import explained

CALLS = {
    "rows": ({"tokens": 96, "width": 512}, npu_rms_norm.rms_norm),
    "one row a tile": ({"tokens": 8, "width": 8192}, npu_rms_norm.rms_norm),
    "columns": ({"tokens": 4, "width": 40000}, npu_rms_norm.rms_norm),
    "residual, bias": ({"tokens": 24, "width": 2048, "residual": True, "bias": True}, npu_rms_norm.add_rms_norm),
    "gate, heads": ({"tokens": 96, "width": 128, "gate": True, "heads": 4}, npu_rms_norm.gated_rms_norm),
    "sigmoid": ({"tokens": 9, "width": 128, "gate": True, "activation": "sigmoid"}, npu_rms_norm.gated_rms_norm),
    "q and k": ({"tokens": 96, "width": 128, "heads": 4, "kv_heads": 2}, npu_rms_norm.qk_rms_norm),
    "heads of a wider tensor": ({"tokens": 96, "width": 128, "heads": 4, "pitch": 1024}, npu_rms_norm.rms_norm),
}  # fmt: skip


def run(
    place, function, tokens, width, residual=False, gate=False, bias=False, heads=None, pitch=None, kv_heads=None, **more
):
    """The call that `explain` has these options for."""
    make = {"dtype": torch.bfloat16, "device": place.torch}
    if kv_heads is not None:
        qkv = torch.ones(tokens // heads, (heads + 2 * kv_heads) * width, **make)
        leaves = [each.requires_grad_() for each in (qkv, torch.ones(width, **make), torch.ones(width, **make))]
        results = function(*leaves, heads, kv_heads)
        torch.autograd.grad(tuple(results), leaves, [torch.ones_like(result) for result in results])
        return
    shape, parameter = ((tokens, width), (width,)) if heads is None else ((tokens // heads, heads, width), (heads, width))
    x = torch.ones(tokens // (heads or 1), pitch or width * (heads or 1), **make)[:, : width * (heads or 1)].view(shape)
    others = [torch.ones(shape, **make)] * (residual or gate)
    weight, added = torch.ones(parameter, **make), torch.ones(parameter, **make) if bias else None
    leaves = [each.requires_grad_() for each in (x, *others, weight, *([added] if bias else []))]
    results = function(x, *others, weight, bias=added, **more)
    results = (results,) if isinstance(results, torch.Tensor) else tuple(results)
    torch.autograd.grad(results, leaves, [torch.ones_like(result) for result in results])


@pytest.mark.uncollected("plain PyTorch launches none of our kernels", lambda place: place == "cpu")
@pytest.mark.few(2)
@pytest.mark.parametrize("call", CALLS)
def test_explained_steps_are_those_that_are_made(npu_place, call):
    chip = npu_tiling.device_for(npu_place.torch)
    if chip is None:
        pytest.skip("plain PyTorch launches none of our kernels")
    options, function = CALLS[call]
    with npu_tiling.watch_launches() as calls:
        run(npu_place, function, **options)
    found = explain(**options, dtype="bf16", chip=chip, backward=True)
    assert found.steps == explained(calls)
    assert {launch.direction for launch in found.launches} == {"forward", "backward"}


def test_bytes_are_those_of_the_formula():
    """2 M D forward and 3 M D backward, and parameters."""
    found = explain(tokens=1000, width=512, dtype="bf16", chip="Ascend910B4", backward=True).bytes_moved
    assert found == {"forward": 2 * (2 * 1000 * 512 + 512), "backward": 2 * (3 * 1000 * 512 + 2 * 512)}
    found = explain(tokens=4000, width=64, heads=4, kv_heads=2, dtype="bf16", chip="H200", backward=True).bytes_moved
    assert found == {"forward": 2 * 1000 * 64 * 12 + 4 * 64, "backward": 2 * 1000 * 64 * (6 + 8 + 8) + 8 * 64}
    added = explain(tokens=1000, width=512, dtype="fp32", chip="H200", residual=True).bytes_moved
    assert added == {"forward": 4 * (4 * 1000 * 512 + 512)}


def test_a_call_of_any_size_needs_no_memory():
    found = explain(tokens=2**31, width=2**15, chip="B200", backward=True)
    assert [launch.kernel for launch in found.launches][0].startswith("forward")
    assert f"{found.floor('backward') * 1e6:,.1f} us at 7.7 TB/s" in found.text


@pytest.mark.parametrize("option", ["backward", "return_fp32", "gate"])
def test_what_does_not_go_with_quantised_is_an_error(option):
    with pytest.raises(ValueError, match=r"goes with neither"):
        explain(tokens=8, width=64, chip="H200", quantised="int8", **{option: True})
