"""What `explain` says of a call is what the call launches, wherever there are kernels."""

import re

import pytest
import torch
from npu_rms_norm import add_rms_norm, explain, gated_rms_norm, qk_rms_norm, rms_norm

from testing.operators import *  # noqa: F403

pytestmark = pytest.mark.few(2)
EXPLAINED = {
    "rows": {"tokens": 96, "width": 512},
    "one row a tile": {"tokens": 8, "width": 8192},
    "columns": {"tokens": 4, "width": 40000},
    "residual, bias": {"tokens": 24, "width": 2048, "residual": True, "bias": True},
    "gate, heads": {"tokens": 96, "width": 128, "gate": True, "heads": 4},
    "sigmoid": {"tokens": 9, "width": 128, "gate": True, "activation": "sigmoid"},
    "q and k": {"tokens": 96, "width": 128, "heads": 4, "kv_heads": 2},
    "heads of a wider tensor": {"tokens": 96, "width": 128, "heads": 4, "pitch": 1024},
}


def run(place, tokens, width, residual=False, gate=False, bias=False, heads=None, pitch=None, kv_heads=None, **more):
    """The call that `explain` has these options for."""
    make = {"dtype": torch.bfloat16, "device": place.torch}
    shape, parameter = ((tokens, width), (width,)) if heads is None else ((tokens // heads, heads, width), (heads, width))
    if kv_heads is not None:
        qkv = torch.ones(tokens // heads, (heads + 2 * kv_heads) * width, **make)
        leaves = [each.requires_grad_() for each in (qkv, torch.ones(width, **make), torch.ones(width, **make))]
        results = qk_rms_norm(*leaves, heads, kv_heads)
    else:
        function = add_rms_norm if residual else gated_rms_norm if gate else rms_norm
        x = torch.ones(tokens // (heads or 1), pitch or width * (heads or 1), **make)[:, : width * (heads or 1)].view(shape)
        others = [torch.ones(shape, **make)] * (residual or gate)
        weight, added = torch.ones(parameter, **make), torch.ones(parameter, **make) if bias else None
        leaves = [each.requires_grad_() for each in (x, *others, weight, *([added] if bias else []))]
        results = function(x, *others, weight, bias=added, **more)
    results = (results,) if isinstance(results, torch.Tensor) else tuple(results)
    torch.autograd.grad(results, leaves, [torch.ones_like(result) for result in results])


BYTES = {  # 2 M D forward and 3 M D backward, and parameters
    "rows": (
        {"tokens": 1000, "width": 512, "dtype": "bf16", "chip": "Ascend910B4", "backward": True},
        {"forward": 2 * (2 * 1000 * 512 + 512), "backward": 2 * (3 * 1000 * 512 + 2 * 512)},
    ),
    "q and k": (
        {"tokens": 4000, "width": 64, "heads": 4, "kv_heads": 2, "dtype": "bf16", "chip": "H200", "backward": True},
        {"forward": 2 * 1000 * 64 * 12 + 4 * 64, "backward": 2 * 1000 * 64 * (6 + 8 + 8) + 8 * 64},
    ),
    "residual": (
        {"tokens": 1000, "width": 512, "dtype": "fp32", "chip": "H200", "residual": True},
        {"forward": 4 * (4 * 1000 * 512 + 512)},
    ),
}


def test_a_call_of_any_size_needs_no_memory():
    found = explain(tokens=2**31, width=2**15, chip="B200", backward=True)
    assert [launch.kernel for launch in found.launches][0].startswith("forward")
    assert f"{found.floor('backward') * 1e6:,.1f} us at 7.7 TB/s" in found.text


@pytest.mark.parametrize("option", ["backward", "return_fp32", "gate"])
def test_what_does_not_go_with_quantised_is_an_error(option):
    with pytest.raises(ValueError, match=r"goes with neither"):
        explain(tokens=8, width=64, chip="H200", quantised="int8", **{option: True})


def test_why_says_what_the_way_before_would_have_needed():
    first, second = explain(tokens=8192, width=6144, chip="Ascend910B4", backward=True).launches[:2]
    for launch, better in ((first, "several rows, no room left"), (second, "several rows, no room left")):
        needed = int(re.search(rf"{better} would need ([\d,]+) of 196,608 bytes", launch.why)[1].replace(",", ""))
        assert needed > 196608
    assert "would need" not in explain(tokens=8192, width=1024, chip="Ascend910B4").launches[0].why
