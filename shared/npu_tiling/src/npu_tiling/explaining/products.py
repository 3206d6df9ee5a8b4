"""What PyTorch itself does in a dry run: its matrix products and sorts, and the memory that it takes. Imports torch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..launching.recording import caller, is_backward

_PRODUCTS = {torch.ops.aten.mm: False, torch.ops.aten.addmm: True, torch.ops.aten.bmm: False, torch.ops.aten.baddbmm: True}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of PyTorch's, which is no launch of ours.

    Attributes:
        direction: "forward" or "backward".
        called_from: file and line of the code that asked for it.
        after: the number of launches before it.
        dtype: name of the dtype of the operands.
    """

    direction: str
    called_from: str
    after: int
    dtype: str

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for calls that differ in their sizes alone."""
        return self.direction, self.called_from, self.dtype


@dataclass(frozen=True, kw_only=True)
class Sort(Call):
    """One sort, of `length` numbers."""

    length: int

    def __str__(self) -> str:
        return f"PyTorch's sort of {self.length} {self.dtype} numbers"


@dataclass(frozen=True, kw_only=True)
class Product(Call):
    """One matrix product.

    Attributes:
        left, right: shapes of the operands.
        result: name of the dtype of the result.
        adds: whether it is added to what the result holds.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    result: str
    adds: bool

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        count = 2 * self.right[-1]
        for length in self.left:
            count *= length
        return count

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for products that differ in their sizes alone."""
        return *super().kind, self.result, self.adds

    def __str__(self) -> str:
        sign = "+=" if self.adds else "="
        return f"PyTorch's product {self.result} {sign} {self.dtype} {list(self.left)} @ {list(self.right)}"


class Watch(TorchDispatchMode):
    """Lists matrix products and sorts, and counts the bytes of the tensors that are alive.

    Attributes:
        products, sorts: so far.
        peak: the most bytes at a time of tensors that were made in this block.
    """

    def __init__(self, launches: Sequence[object], passed_through: Sequence[str] = ()) -> None:
        """`launches`: the list of a dry run; `passed_through`: modules whose callers are named as callers of products."""
        super().__init__()
        self.products: list[Product] = []
        self.sorts: list[Sort] = []
        self.peak = 0
        self._launches, self._passed_through = launches, tuple(passed_through)
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        adds = _PRODUCTS.get(function.overloadpacket)
        # PyTorch 2.11 has no addmm of meta tensors into another dtype.
        result = function(*args, **kwargs) if adds is None or "out" not in kwargs else kwargs["out"]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if adds is not None:
            self._add_product(given[-3:] if "out" in kwargs else [*given[-2:], result], adds and kwargs.get("beta", 1) != 0)
        if function.overloadpacket is torch.ops.aten.sort:
            self.sorts.append(Sort(**self._place(given[0]), length=given[0].numel()))
        known = {id(tensor.untyped_storage()) for tensor in given if not tensor.is_sparse}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_sparse and id(leaf.untyped_storage()) not in known:
                self._add_storage(leaf.untyped_storage())
        return result

    def _add_product(self, tensors: Sequence[Tensor], adds: bool) -> None:
        left, right, result = tensors
        product = Product(
            **self._place(left),
            left=tuple(left.shape),
            right=tuple(right.shape),
            result=short(result.dtype),
            adds=adds,
        )
        self.products.append(product)

    def _place(self, operand: Tensor) -> dict[str, Any]:
        """What a Call has of any kind."""
        return {
            "direction": "backward" if is_backward() else "forward",
            "called_from": caller(self._passed_through)[0],
            "after": len(self._launches),
            "dtype": short(operand.dtype),
        }

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def forget(_: object) -> None:
            del self._alive[key]
            self._bytes -= size

        self._alive[key] = weakref.ref(storage, forget)
        self._bytes += size
        self.peak = max(self.peak, self._bytes)


def short(dtype: torch.dtype) -> str:
    """The name of a dtype as people write it."""
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}.get(
        dtype, str(dtype).removeprefix("torch.")
    )
