"""One rank of test_shards_are_the_whole, at the place that is its argument."""

import sys

import npu_rms_norm
import torch

from testing import sharding
from testing.sharding import (
    Partial,
    Replicate,
    SequenceParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    refused,
)

SHAPE = (2, 5, 24)  # five tokens do not divide by two ranks
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def norm(x, weight):
    return (npu_rms_norm.rms_norm(x, weight, bias=weight),)


def add(x, weight):
    return npu_rms_norm.add_rms_norm(x, 0.5 * x, weight)


def two(x, weight):
    return tuple(npu_rms_norm.gated_rms_norm(x, 0.5 * x, weight, return_fp32=True))


def gated(x, weight):
    return (npu_rms_norm.gated_rms_norm(x, 0.5 * x, weight),)


def qkv(x, q_weight, k_weight):
    return npu_rms_norm.qk_rms_norm(x, q_weight, k_weight, 2, 1)


def check(function, mesh, placement, per_head=False):
    torch.manual_seed(0)
    shapes = [(SHAPE[-1] // 4,)] * 2 if function is qkv else [SHAPE[-2:] if per_head else SHAPE[-1:]]
    x, weights = torch.randn(SHAPE), [torch.randn(shape) for shape in shapes]
    own = Shard(0) if per_head and placement == Shard(1) else Replicate()
    of_weight = own if own == Shard(0) or placement.is_replicate() else Partial()
    given, found = (placement, *[own] * len(weights)), (placement, *[of_weight] * len(weights))
    sharding.check(mesh, function, (x, *weights), given, placement, found)


def check_compiled(mesh):
    """Of parts of unequal length, PyTorch 2.11 gathers the gradient there."""
    torch.manual_seed(0)
    x, weight = torch.randn(SHAPE), torch.randn(SHAPE[-1])
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    parts = [distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(weight, mesh, [Replicate()])]
    found, whole = sharding.trained(compiled, parts), sharding.trained(norm, (x, weight))
    for part, expected in zip((*found[0], *found[1]), (*whole[0], *whole[1]), strict=True):
        torch.testing.assert_close(part.full_tensor(), expected, **TOLERANCE)


def check_quantised(mesh):
    """Scales have a dimension less, and the gradient of the sum alone."""
    torch.manual_seed(0)
    x, weight = torch.randn(SHAPE).requires_grad_(), torch.randn(SHAPE[-1])
    whole = npu_rms_norm.add_rms_norm_dynamic_quant(x, x.detach(), weight)
    for placement in (Shard(0), Shard(1), Replicate()):
        place = lambda tensor, own: distribute_tensor(tensor.detach(), mesh, [own])  # noqa: E731
        sharded = place(x, placement).requires_grad_()
        parts = npu_rms_norm.add_rms_norm_dynamic_quant(sharded, place(x, placement), place(weight, Replicate()))
        for part, expected in zip(parts, whole, strict=True):
            assert part.placements == (placement,)
            torch.testing.assert_close(part.full_tensor(), expected)
        parts.residual.sum().backward()
        torch.testing.assert_close(sharded.grad.full_tensor(), torch.ones(SHAPE))


def check_refusals(mesh):
    x, weight = torch.randn(SHAPE), torch.ones(SHAPE[-1])
    place = lambda tensor, placement: distribute_tensor(tensor, mesh, [placement])  # noqa: E731
    rows, whole = place(x, Shard(1)), place(weight, Replicate())
    split = "x is Shard(dim=2) on mesh dimension 'ranks' and must be Replicate() or Shard of a dimension from 0 to 1."
    refused(ValueError, split, npu_rms_norm.rms_norm, place(x, Shard(2)), whole)
    split = "weight is Shard(dim=0) on mesh dimension 'ranks' and must be Replicate()."
    refused(ValueError, split, npu_rms_norm.rms_norm, rows, place(weight, Shard(0)))
    split = "weight is Replicate() on mesh dimension 'ranks' and must be Shard(dim=0), as x's heads are."
    refused(ValueError, split, npu_rms_norm.rms_norm, rows, place(torch.ones(SHAPE[-2:]), Replicate()))
    split = "residual is Shard(dim=0) on mesh dimension 'ranks' and must be Shard(dim=1), as x is."
    refused(ValueError, split, npu_rms_norm.add_rms_norm, rows, place(x, Shard(0)), whole)
    split = "gate is Shard(dim=0) on mesh dimension 'ranks' and must be Shard(dim=1), as x is."
    refused(ValueError, split, npu_rms_norm.gated_rms_norm, rows, place(x, Shard(0)), whole)
    split = "qkv is Shard(dim=2) on mesh dimension 'ranks' and must be Replicate() or Shard of a dimension from 0 to 1."
    refused(ValueError, split, npu_rms_norm.qk_rms_norm, place(x, Shard(2)), None, None, 2, 1)
    refused(TypeError, "weight is a plain tensor and must be a DTensor on x's mesh", npu_rms_norm.rms_norm, rows, weight)
    refused(TypeError, "x is a plain tensor and must be a DTensor on weight's mesh", npu_rms_norm.rms_norm, x, whole)
    other = init_device_mesh(torch.get_default_device().type, (2,), mesh_dim_names=("others",))
    refused(ValueError, "weight is on ", npu_rms_norm.rms_norm, rows, distribute_tensor(weight, other, [Replicate()]))


def check_sequence_parallel(mesh):
    """The module as PyTorch's own tensor parallelism takes it."""
    torch.manual_seed(0)
    x, module = torch.randn(2, 6, 24), npu_rms_norm.RMSNorm(24)
    expected = module(x)
    expected.square().sum().backward()
    gradient, module.weight.grad = module.weight.grad, None
    parallelize_module(module, mesh, SequenceParallel())
    y = module(distribute_tensor(x, mesh, [Shard(1)]))
    y.square().sum().backward()
    torch.testing.assert_close(y.full_tensor(), expected, **TOLERANCE)
    torch.testing.assert_close(module.weight.grad.full_tensor(), gradient, **TOLERANCE)


def main() -> None:
    with sharding.joined(sys.argv[1], "ranks") as mesh:
        for function in (norm, add, two, gated):
            for placement in (Shard(0), Shard(1), Replicate()):
                check(function, mesh, placement)
                check(function, mesh, placement, per_head=True)
        for placement in (Shard(0), Shard(1), Replicate()):
            check(qkv, mesh, placement)
        check_compiled(mesh)
        check_quantised(mesh)
        check_sequence_parallel(mesh)
        check_refusals(mesh)


if __name__ == "__main__":
    main()
