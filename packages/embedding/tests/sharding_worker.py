"""One rank of test_shards_are_the_whole, at the place that is its argument."""

import sys

import torch
from npu_embedding import Embedding, embedding

from testing import sharding
from testing.sharding import (
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
    refused,
)

SHAPE, WIDTH = (3, 5), 8
WHOLE = Replicate()
# Placements of indices and weight, then of the result and the gradient of the weight.
SUPPORTED = [
    (WHOLE, WHOLE, WHOLE, WHOLE),
    (Shard(1), WHOLE, Shard(1), Partial()),
    (WHOLE, Shard(0), Partial(), Shard(0)),
    (WHOLE, Shard(1), Shard(2), Shard(1)),
    (Shard(1), Shard(0), Shard(1), Shard(0)),
]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def check(mesh, rows, placements, shape=SHAPE, **options):
    torch.manual_seed(0)
    indices, weight = torch.randint(0, rows, shape), torch.randn(rows, WIDTH)
    of_indices, of_weight, of_result, of_gradient = placements

    def look_up(indices, weight):
        return embedding(indices, weight.clone() if "max_norm" in options else weight, **options)

    if of_indices == WHOLE or of_weight == WHOLE:
        called = []
    elif shape[of_indices.dim] % 2 == 0 and "max_norm" not in options:  # equally many: ranks look up the indices of all
        called = ["all_gather", "reduce_scatter", "all_gather"]
    else:
        called = ["all_to_all"] * 4
    given = (of_indices, of_weight)
    sharding.check(mesh, look_up, (indices, weight), given, of_result, (of_gradient,), called=called)


def check_outside(mesh):
    """An index that no rank has is outside the table, on every rank; a device tells by a row of NaN."""
    weight = distribute_tensor(torch.zeros(13, WIDTH), mesh, [Shard(0)])
    indices = distribute_tensor(torch.tensor([0, 13, 1]), mesh, [WHOLE])
    if mesh.device_type == "cpu":
        refused(IndexError, "indices[1] is 13 and must be from 0 to 12.", embedding, indices, weight)
    else:
        assert embedding(indices, weight).full_tensor().isnan().all(-1).tolist() == [False, True, False]


def check_rowwise_parallel(mesh):
    """The module as PyTorch's own tensor parallelism takes it, its output split along the sequence."""
    torch.manual_seed(0)
    indices, module = torch.randint(0, 13, SHAPE), Embedding(13, WIDTH)
    whole = module(indices)
    whole.square().sum().backward()
    assert module.weight.grad is not None
    gradient, module.weight.grad = module.weight.grad, None
    style = RowwiseParallel(input_layouts=WHOLE, output_layouts=Shard(1), use_local_output=False)
    parallelize_module(module, mesh, style)
    out = module(indices)
    out.square().sum().backward()
    assert out.placements == (Shard(1),)
    assert module.weight.grad.placements == (Shard(0),)
    torch.testing.assert_close(out.full_tensor(), whole, **TOLERANCE)
    torch.testing.assert_close(module.weight.grad.full_tensor(), gradient, **TOLERANCE)


def check_refusals(mesh):
    indices, weight = torch.zeros(4, dtype=torch.int64), torch.zeros(12, WIDTH)

    def place(tensor, *placements):
        return distribute_tensor(tensor, mesh, placements)

    whole, rows, columns = place(indices, WHOLE), place(weight, Shard(0)), place(weight, Shard(1))
    said = "weight is Shard(dim=1) on mesh dimension 0 and must be Replicate() or Shard(0) where indices is split."
    refused(ValueError, said, embedding, place(indices, Shard(0)), columns)
    said = "weight is a plain tensor and must be a DTensor on indices's mesh"
    refused(TypeError, said, embedding, whole, weight)
    refused(TypeError, "indices is a plain tensor and must be a DTensor", embedding, indices, rows)
    partial = DTensor.from_local(weight, mesh, [Partial()])
    said = "weight is Partial(sum) on mesh dimension 0 and must be Replicate(), Shard(0) or Shard(1)."
    refused(ValueError, said, embedding, whole, partial)
    refused(ValueError, "sparse is True and must be False where weight is a DTensor.", embedding, whole, rows, sparse=True)
    refused(ValueError, "max_norm is 1.0 and must be None where", embedding, whole, columns, max_norm=1.0)
    said = "scale_grad_by_freq is True and must be False where indices is split"
    refused(ValueError, said, embedding, place(indices, Shard(0)), place(weight, WHOLE), scale_grad_by_freq=True)
    said = "vocab_range is (0, 12) and must be left out where weight is a DTensor."
    refused(ValueError, said, embedding, whole, rows, vocab_range=(0, 12))
    first = mesh.get_local_rank() == 0
    uneven = DTensor.from_local(indices.new_zeros(5 if first else 3), mesh, [Shard(0)], shape=(8,), stride=(1,))
    said = f"this rank's part of indices has shape ({5 if first else 3},) and must have 1 / 2 of dimension 0 of (8,)."
    refused(ValueError, said, embedding, uneven, rows)


def main() -> None:
    with sharding.joined(sys.argv[1]) as mesh:
        for placements in SUPPORTED:
            check(mesh, 20, placements)
            check(mesh, 13, placements, padding_idx=-2)  # thirteen rows do not divide by two ranks
            check(mesh, 13, placements, (4, 6), scale_grad_by_freq=placements[0] == WHOLE)
            check(mesh, 13, placements, (4, 6), multiplier=2.5)
        check(mesh, 13, SUPPORTED[4], (4, 0))
        check(mesh, 1, SUPPORTED[2])  # the second rank has none
        for placements in (SUPPORTED[0], SUPPORTED[2], SUPPORTED[4]):
            for shape in (SHAPE, (4, 6)):
                check(mesh, 13, placements, shape, max_norm=1.0, scale_grad_by_freq=True)
        check_outside(mesh)
        check_rowwise_parallel(mesh)
        check_refusals(mesh)


if __name__ == "__main__":
    main()
