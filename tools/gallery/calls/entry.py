"""What the calls of every source have in common: a row of the gallery, inputs, formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..measure import Case

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
_Make = Callable[[], Case]


@dataclass(frozen=True)
class Entry:
    """One row.

    Attributes:
        source: a key of `sources.TITLES`.
        name: of the operator.
        sizes: of its tensors.
        make: loads the kernels and makes the inputs.
    """

    source: str
    name: str
    sizes: str
    make: _Make


def collector(source: str, entries: list[Entry]) -> Callable[[str, str], Callable[[_Make], _Make]]:
    """A decorator with a name and sizes: the function that it decorates makes the case of one more of `entries`."""

    def entry(name: str, sizes: str) -> Callable[[_Make], _Make]:
        def add(make: _Make) -> _Make:
            entries.append(Entry(source, name, sizes, make))
            return make

        return add

    return entry


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_of(count: int) -> list[Tensor]:
    """Matrices of 2048 x 4096 in bf16."""
    return [randn(2048, 4096, dtype=BF16, seed=i) for i in range(count)]


def rms_norm(call: Callable[..., object]) -> Case:
    """A call with x and its weight, of 4096 columns, in bf16; eps is 1e-6."""
    return Case([*rows_of(1), randn(4096, dtype=BF16, seed=1)], call, rms_reference)


def layer_norm(call: Callable[..., object], rows: int, width: int, dtype: torch.dtype, eps: float = 1e-5) -> Case:
    """A call with x, its weight and its bias."""
    inputs = [randn(rows, width, dtype=dtype), *(randn(width, dtype=dtype, seed=i) for i in (1, 2))]
    return Case(inputs, call, lambda x, w, b: functional.layer_norm(x, (width,), w, b, eps))


def swiglu(call: Callable[..., object]) -> Case:
    """A call with a and b; it computes silu(a) b."""
    return Case(rows_of(2), call, lambda a, b: functional.silu(a) * b)


def rms_reference(x: Tensor, w: Tensor) -> Tensor:
    """What the RMSNorms compute; eps is 1e-6."""
    return functional.rms_norm(x, x.shape[-1:], w, 1e-6)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The halves of the last dimension of x, turned into each other."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
