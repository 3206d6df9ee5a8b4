"""Every launch that a compiler or a device may refuse, refused: smaller ones give the same values, down to the last."""

import warnings

import depth
import pytest
import torch
from npu_attn_res import attn_res, attn_res_bank, attn_res_merge, attn_res_phase1
from npu_tiling import UnifiedBufferError
from npu_tiling.chips import plain_pytorch

BF16 = torch.bfloat16


def rows(*shape, dtype=BF16):
    return torch.randn(shape).to(dtype).requires_grad_()


def weights(width, dtype=BF16):
    """Of a query that leaves no token to a single block, whose gradients would be what is left of sums that cancel."""
    query, norm, output = (rows(width, dtype=dtype) for _ in range(3))
    return [(query.detach() / width**0.5).requires_grad_(), norm, output]


def mixed(n_blocks, width, listed, normalised=False, dtype=BF16):
    blocks, (query, norm, output) = rows(n_blocks, 5, width, dtype=dtype), weights(width, dtype)

    def call(blocks, *given):
        found = attn_res(list(blocks.unbind()) if listed else blocks, *given)
        return [*found[:2]] if normalised else [found]

    return call, [blocks, query, norm, *([output] if normalised else [])]


def banked(n_blocks, width):
    def call(bank, prefix, x, *given):
        return attn_res_bank(bank, n_blocks, prefix, *given, layer_output=x)[:3]

    return call, [rows(5, n_blocks + 1, width), rows(5, width), rows(5, width), *weights(width)]


def phases(n_layers, width):
    def call(queries, blocks, prefix, x, query, norm, output):
        o, lse = attn_res_phase1(queries, blocks, norm)
        return attn_res_merge(o[0], lse[0], prefix, query, norm, output, layer_output=x)[:3]

    return call, [
        (rows(n_layers, width).detach() / width**0.5).requires_grad_(),
        rows(3, 5, width),
        rows(5, width),
        rows(5, width),
        *weights(width),
    ]


CALLS = {
    "several rows a tile": lambda: mixed(3, 256, False, True),
    "one row a tile, list": lambda: mixed(3, 4096, True),
    "one row a tile, fp32": lambda: mixed(3, 4096, False, dtype=torch.float32),
    "normalised": lambda: mixed(3, 4096, False, True),
    "bank": lambda: banked(3, 4448),
    "bank, several rows": lambda: banked(3, 256),
    "phases of a layer": lambda: phases(1, 2048),
    "phases of layers": lambda: phases(3, 256),
    "columns": lambda: mixed(2, 16400, False),
    "shared token": lambda: mixed(8, 7168, False),
    "shared token, list": lambda: mixed(12, 5120, True),
}


def with_gradients(call, leaves):
    found = call(*leaves)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(one.shape, generator=generator).to(one) for one in found]
    return [one.detach().cpu() for one in (*found, *torch.autograd.grad(found, leaves, upstream))]


@pytest.mark.few(2)
@pytest.mark.uncollected("nothing is launched on a CPU", lambda place: place == "cpu")
@pytest.mark.parametrize("what", CALLS)
def test_values_are_those_of_the_first_launch(device, what, npu_refuse):
    torch.manual_seed(0)
    call, leaves = CALLS[what]()
    with plain_pytorch():
        expected = with_gradients(call, leaves)
    leaves = [leaf.detach().to(device.torch).requires_grad_() for leaf in leaves]
    overflowing, launched = [], []

    def values(kind, count):
        def overflows(kernel, decision):
            if str(getattr(decision.tiling, "shape", None)) == kind and len(overflowing) < count:
                overflowing.append(decision.tiling)
            return decision.tiling in overflowing

        overflowing.clear()
        _, launched[:] = npu_refuse(overflows)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = with_gradients(call, leaves)
        for one, wanted in zip(found, expected, strict=True):
            depth.near(one, wanted.double(), fp32=4e-2 if wanted.dtype == BF16 else 1e-3)
        assert count == 0 or len(said) >= len(overflowing)

    values("", 0)
    for kind in sorted(
        {str(decision.tiling.shape) for _, decision in launched if getattr(decision.tiling, "shape", None) is not None}
    ):
        for count in (1, 2, 3, 100):
            try:
                values(kind, count)
            except UnifiedBufferError as error:
                assert "not even its smallest tile" in str(error)
                break
            if len(overflowing) < count:
                break
