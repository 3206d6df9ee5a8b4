"""Operators on DTensors: a call on them is the same call on each rank's own part, where parts need nothing of each other.

A package says which placements that is true of, and refuses the others by name: nothing is gathered that the caller did not
ask for. Importing this imports torch, but not torch.distributed.tensor, which takes as long again: where
nobody has imported that, there are no DTensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from .calls import contiguous_strides

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_MODULE = "torch.distributed.tensor"


def is_distributed(arguments: Iterable[Any]) -> bool:
    """Whether one of the arguments is a DTensor; tensors may stand in lists."""
    if _MODULE not in sys.modules:
        return False
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor or kind is Parameter:  # most are
            continue
        if isinstance(argument, (list, tuple)):
            if is_distributed(argument):
                return True
        elif isinstance(argument, Tensor) and _is_dtensor(argument):
            return True
    return False


def _is_dtensor(tensor: Tensor) -> bool:
    if _MODULE not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


class Shards:
    """The tensors of one call, all of them DTensors on one mesh.

    Args:
        tensors: by the argument's name; those that are None are left out.

    Raises:
        TypeError: one is a plain tensor.
        ValueError: they are not on one mesh.
    """

    def __init__(self, tensors: Mapping[str, Tensor | None]) -> None:
        self._tensors: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        first, found = next((name, tensor) for name, tensor in self._tensors.items() if _is_dtensor(tensor))
        self.mesh = found.device_mesh
        for name, tensor in self._tensors.items():
            if not _is_dtensor(tensor):
                raise TypeError(f"{name} is a plain tensor and must be a DTensor on {first}'s mesh, {self.mesh}.")
            if tensor.device_mesh != self.mesh:
                raise ValueError(f"{name} is on {tensor.device_mesh} and must be on {first}'s mesh, {self.mesh}.")

    def placements(self, name: str) -> tuple[Placement, ...]:
        """Where a tensor is, for each dimension of the mesh."""
        tensor: DTensor = self._tensors[name]
        return tensor.placements

    def check(self, name: str, allowed: Callable[[int, Placement], bool], must: str) -> tuple[Placement, ...]:
        """A tensor's placements.

        Raises:
            ValueError: `allowed` is false of a mesh dimension and the placement there; the error says what it `must` be.
        """
        placements = self.placements(name)
        for dimension, placement in enumerate(placements):
            if not allowed(dimension, placement):
                self.refuse(name, dimension, must)
        return placements

    def refuse(self, name: str, dimension: int, must: str) -> NoReturn:
        """The error of a placement that is not supported."""
        names = self.mesh.mesh_dim_names
        where = repr(names[dimension]) if names else dimension
        raise ValueError(f"{name} is {self.placements(name)[dimension]!r} on mesh dimension {where} and must be {must}.")

    def rows(self, name: str, first: int = 0) -> tuple[Placement, ...]:
        """The placements of a tensor whose rows, along its last dimension, are whole: split in any from `first` to that."""
        end = self._tensors[name].dim() - 1
        dimensions = "dimension 0" if end == first + 1 == 1 else f"a dimension from {first} to {end - 1}"
        must = f"Replicate() or Shard of {dimensions}" if end > first else "Replicate()"
        return self.check(name, lambda _, placement: is_replicated(placement) or first <= shard(placement) < end, must)

    def replicated(self, *names: str) -> None:
        """Each of these tensors, where it is not None, must be whole on every rank."""
        for name in names:
            if name in self._tensors:
                self.check(name, lambda _, placement: is_replicated(placement), "Replicate()")

    def alike(self, name: str, placements: Sequence[Placement], of: str) -> None:
        """A tensor, if there is one, must be placed as `of` is."""
        if name in self._tensors:
            for dimension, (own, expected) in enumerate(zip(self.placements(name), placements, strict=True)):
                if own != expected:
                    self.refuse(name, dimension, f"{expected!r}, as {of} is")

    def part(self, name: str, dimension: int) -> tuple[int, int] | None:
        """First and last + 1 of what this rank has along one dimension of a tensor; None where it has all.

        Raises:
            ValueError: the dimension is split on more than one dimension of the mesh.
        """
        splits = [i for i, placement in enumerate(self.placements(name)) if shard(placement) == dimension]
        if not splits:
            return None
        if len(splits) > 1:
            self.refuse(name, splits[1], "Replicate() there, where another mesh dimension splits the same rows")
        length = self._tensors[name].shape[dimension]
        share = -(-length // self.mesh.size(splits[0]))  # as torch.chunk
        first = min(self.mesh.get_local_rank(splits[0]) * share, length)
        return first, min(first + share, length)

    def local(self, name: str, gradient: Sequence[Placement] | None = None) -> Any:
        """This rank's part of a tensor, None of one there is not; its gradient comes back in these placements."""
        if name not in self._tensors:
            return None
        tensor = self._tensors[name]
        if torch.compiler.is_compiling():
            return tensor.to_local(grad_placements=gradient)
        return _Part.apply(tensor, tuple(tensor.placements if gradient is None else gradient))

    def wrap(self, part: Tensor, placements: Sequence[Placement], shape: Sequence[int]) -> Tensor:
        """The DTensor of this shape that each rank has a part of."""
        from torch.distributed.tensor import DTensor

        whole: dict[str, Any] = {"shape": torch.Size(shape), "stride": contiguous_strides(shape)}
        return DTensor.from_local(part, self.mesh, placements, run_check=False, **whole)


class _Part(torch.autograd.Function):
    """`to_local`, whose own gradient of parts of unequal length some releases of PyTorch gather (2.11 does).

    What `to_local` gives while a collective is pending has the history; what is waited for has none.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, gradient: tuple[Placement, ...]) -> Tensor:
        ctx.mesh, ctx.gradient, ctx.shape, ctx.stride = tensor.device_mesh, gradient, tensor.shape, tensor.stride()
        part = tensor.to_local()
        if hasattr(part, "wait"):  # an AsyncCollectiveTensor
            part = part.wait()
        return part.detach()  # no view: autograd refuses a Function's view that was written to, as `max_norm` writes to it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None]:
        from torch.distributed.tensor import DTensor

        given = {"run_check": False, "shape": ctx.shape, "stride": ctx.stride}
        return DTensor.from_local(gradient, ctx.mesh, ctx.gradient, **given), None


def is_replicated(placement: Placement) -> bool:
    """Whether every rank has the whole of it."""
    return placement.is_replicate()


def shard(placement: Placement) -> int:
    """The dimension of a tensor that a placement splits in equal parts, one for each rank in order; -1 if it does not."""
    from torch.distributed.tensor import Shard

    return placement.dim if type(placement) is Shard else -1


def moved(placements: Sequence[Placement], by: int) -> tuple[Placement, ...]:
    """The same split of a tensor that has `by` more dimensions in front."""
    from torch.distributed.tensor import Shard

    return tuple(Shard(shard(placement) + by) if shard(placement) >= 0 else placement for placement in placements)


def summed(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements of a sum over rows in these placements: where rows are split, each rank has a partial sum."""
    from torch.distributed.tensor import Partial, Replicate

    return tuple(Replicate() if is_replicated(placement) else Partial() for placement in placements)
