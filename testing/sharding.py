"""For workers of tests of DTensors, which import it after the operator's package: that is not to import PyTorch's DTensors.

with sharding.joined(sys.argv[1]) as mesh:
    sharding.check(mesh, function, tensors, placements, of_results, of_gradients)
    sharding.refused(ValueError, "x is ...", function, x)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

if "torch.distributed.tensor" in sys.modules:
    raise ImportError("the package imports torch.distributed.tensor, which takes a second")

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, parallelize_module

from . import ranks

__all__ = [
    "CommDebugMode",
    "DTensor",
    "Partial",
    "Replicate",
    "RowwiseParallel",
    "SequenceParallel",
    "Shard",
    "check",
    "distribute_tensor",
    "init_device_mesh",
    "joined",
    "parallelize_module",
    "refused",
    "trained",
]


@contextlib.contextmanager
def joined(place: str, name: str | None = None) -> Iterator[DeviceMesh]:
    """A mesh of the two ranks; `name`: of its dimension."""
    with ranks.join(place):
        yield init_device_mesh(torch.get_default_device().type, (2,), mesh_dim_names=None if name is None else (name,))


def trained(
    function: Callable[..., Any], tensors: Sequence[Tensor], upstream: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and gradients for tensors of floating point; `upstream`: of each result, None: of the sum of their cubes."""
    inputs = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
    found = function(*inputs)
    results = [result for result in (found if isinstance(found, (tuple, list)) else (found,)) if result is not None]
    torch.autograd.backward(results, [3 * result.detach() ** 2 for result in results] if upstream is None else upstream)
    return results, [tensor.grad for tensor in inputs if tensor.grad is not None]


def check(
    mesh: DeviceMesh,
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    placements: Sequence[Placement],
    of_results: Placement | Sequence[Placement],
    of_gradients: Sequence[Placement],
    *,
    called: Sequence[str] = (),
    within: float = 1e-5,
) -> None:
    """Results and gradients of a function of DTensors are those of whole tensors.

    Args:
        placements: of the tensors.
        of_results: of each result; or the one that all have.
        of_gradients: of each gradient.
        called: names of the collectives that the function and its backward call. Without one PyTorch sends nothing either.
        within: how near they are.
    """
    whole = trained(function, tensors)
    results = [of_results] * len(whole[0]) if isinstance(of_results, Placement) else of_results
    parts = [distribute_tensor(each, mesh, [placement]) for each, placement in zip(tensors, placements, strict=True)]
    upstream = [
        distribute_tensor(3 * each.detach() ** 2, mesh, [Replicate() if placement.is_partial() else placement])
        for each, placement in zip(whole[0], results, strict=True)
    ]
    with ranks.collectives() as heard, CommDebugMode() as communication:
        found = trained(function, parts, upstream)
    assert [name for name, _ in heard] == list(called), heard
    assert called or communication.get_total_counts() == 0, communication.get_comm_counts()
    for some, expected, theirs in zip(found, whole, (results, of_gradients), strict=True):
        for part, tensor, placement in zip(some, expected, theirs, strict=True):
            assert isinstance(part, DTensor)
            assert part.placements == (placement,), (part.placements, placement)
            torch.testing.assert_close(part.full_tensor(), tensor, rtol=within, atol=within)


def refused(error: type[Exception], message: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """The function raises an error that has these words."""
    try:
        function(*arguments, **options)
    except error as caught:
        assert message in str(caught), caught  # noqa: PT017
    else:
        raise AssertionError(f"not refused: {message}")
