"""Strategies for tensors: any shape, zero sizes included, any strides, large and small values, several dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

#: Layouts of a tensor in memory; those with "repeated" have a stride of 0 along one dimension. The memory of "negated" has
#: the numbers with the other sign, as the imaginary part of a conjugated tensor does.
LAYOUTS = (
    "contiguous",
    "unaligned",
    "wider rows",
    "every second row",
    "columns first",
    "columns apart",
    "outer dimensions swapped",
    "repeated rows",
    "repeated columns",
    "one number",
    "negated",
)
VALUES = ("normal", "normal", "large", "small", "zeros", "a few")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = {"normal": 1.0, "large": 100.0, "small": 1e-2, "zeros": 0.0, "a few": 1.0}


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor in memory.

    Attributes:
        name: one of `LAYOUTS`.
        offset: elements of its storage before the first one.
    """

    name: str = "contiguous"
    offset: int = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """A tensor of this shape in this layout, with the values of another (its first ones, where a stride is 0)."""
        shape, last = tensor.shape, tensor.dim() - 1
        if last < 0 or not tensor.numel():
            return _copied(tensor, tensor.stride(), self.offset)
        contiguous = tensor.contiguous().stride()
        rows = [stride // max(1, shape[last]) for stride in contiguous[:last]]
        if self.name == "wider rows":
            return _copied(tensor, [*(row * (shape[last] + 3) for row in rows), 1], self.offset)
        if self.name == "every second row":
            return _copied(tensor, [*(2 * row * shape[last] for row in rows), 1], self.offset)
        if self.name == "columns first":
            return _copied(tensor, [*rows, tensor[..., 0].numel()], self.offset)
        if self.name == "columns apart":
            return _copied(tensor, [2 * stride for stride in contiguous], self.offset)
        if self.name == "outer dimensions swapped" and last >= 2:
            swapped = tensor.transpose(0, last - 1).contiguous().transpose(0, last - 1)
            return _copied(tensor, swapped.stride(), self.offset)
        if self.name == "repeated rows" and last >= 1:
            return _copied(tensor[:1], tensor[:1].contiguous().stride(), self.offset).expand(shape)
        if self.name == "repeated columns":
            return _copied(tensor[..., :1], tensor[..., :1].contiguous().stride(), self.offset).expand(shape)
        if self.name == "one number":
            return tensor.reshape(-1)[:1].clone().view(()).expand(shape)
        if self.name == "negated" and tensor.is_floating_point():
            return torch._neg_view(_copied(-tensor, contiguous, self.offset))
        return _copied(tensor, contiguous, self.offset)


@dataclass(frozen=True)
class Drawn:
    """A description of a tensor, from which `materialise` makes it.

    Attributes:
        kind: one of `VALUES`.
        layout: how the tensor lies in memory.
    """

    kind: str = "normal"
    layout: Layout = Layout()


def floats(place: str) -> st.SearchStrategy[torch.dtype]:
    """The dtypes of activations; fp64 only where plain PyTorch computes."""
    return st.sampled_from([*FLOATS, torch.float64] if place == "cpu" else FLOATS)


def layouts() -> st.SearchStrategy[Layout]:
    """Any of `LAYOUTS`, aligned ones more often."""
    offsets = st.sampled_from([0, 0, 0, 1, 8])
    return st.builds(
        lambda name, offset: Layout(name, 1 if name == "unaligned" else offset), st.sampled_from(LAYOUTS), offsets
    )


def drawn() -> st.SearchStrategy[Drawn]:
    """Any values in any layout."""
    return st.builds(Drawn, st.sampled_from(VALUES), layouts())


def materialise(
    spec: Drawn, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0
) -> Tensor:
    """The tensor, on the CPU."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * (scale * _SCALES[spec.kind])
    if spec.kind == "a few" and values.numel():
        values = torch.where(torch.rand(shape, generator=generator) < 0.2, values, 0.0)
    return spec.layout(values.to(dtype))


def _copied(tensor: Tensor, strides: list[int] | tuple[int, ...], offset: int) -> Tensor:
    """The same values at these strides, after `offset` elements; elements between them are NaN."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True) if size)
    storage = torch.full(
        (offset + max(0, reach),), float("nan") if tensor.is_floating_point() else 2**31 - 1, dtype=tensor.dtype
    )
    return storage.as_strided(tensor.shape, tuple(strides), offset).copy_(tensor) if tensor.numel() else tensor.clone()
