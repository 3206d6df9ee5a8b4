"""What PyTorch itself does in a dry run: its operators, and the memory that it takes. Imports torch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..launching import recording
from ..launching.recording import caller, is_backward, without_memory

_PRODUCTS = {"mm": False, "addmm": True, "bmm": False, "baddbmm": True}  # whether it adds to what the result holds
_NAMES = {
    "clone": "copy",
    "to_copy": "copy",
    "zero": "zeros",
    "zeros_like": "zeros",
    "new_zeros": "zeros",
    "ones_like": "ones",
}
_NO_WORK = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "unsafe_view", "lift_fresh", "squeeze"}
COPY, SUM = "copy", "sum"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One operator of PyTorch's that computes something.

    Attributes:
        direction: "forward" or "backward".
        name: the operator's; a copy is "copy", whether or not the dtype changes.
        called_from: file and line of the code that asked for it.
        after: the number of launches before it.
        read, written: dtypes and shapes in words.
        reads, writes: numbers of memory, of `Argument.memory`.
    """

    direction: str
    name: str
    called_from: str
    after: int
    read: str
    written: str
    reads: frozenset[int] = field(compare=False)
    writes: frozenset[int] = field(compare=False)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for calls that differ in their sizes alone."""
        return self.direction, self.name, self.called_from

    @property
    def sizes(self) -> str:
        """What is read and written, in words."""
        return self.written if self.read in ("", self.written) else f"{self.read} -> {self.written}"

    def __str__(self) -> str:
        return f"PyTorch's {self.name}: {self.sizes}"


@dataclass(frozen=True, kw_only=True)
class Product(Call):
    """One matrix product.

    Attributes:
        dtype, result: names of the dtypes of the operands and of the result.
        left, right: shapes of the operands.
        adds: whether it is added to what the result holds.
    """

    dtype: str
    result: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    adds: bool

    @property
    def kind(self) -> tuple[object, ...]:
        return self.direction, "product", self.called_from

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        count = 2 * self.right[-1]
        for length in self.left:
            count *= length
        return count

    def __str__(self) -> str:
        sign = "+=" if self.adds else "="
        return f"PyTorch's product {self.result} {sign} {self.dtype} {list(self.left)} @ {list(self.right)}"


class Watch(TorchDispatchMode):
    """Lists PyTorch's operators, and counts the bytes of the tensors that are alive.

    Attributes:
        calls: so far.
        peak: the most bytes at a time of tensors that were made in this block.
    """

    def __init__(self, launches: Sequence[object] = (), passed_through: Sequence[str] = ()) -> None:
        """`launches`: the list of a dry run; `passed_through`: modules whose callers are named as callers."""
        super().__init__()
        self.calls: list[Call] = []
        self.peak = 0
        self._launches, self._passed_through = launches, tuple(passed_through)
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function.overloadpacket.__name__.strip("_")
        out = kwargs.get("out")
        # PyTorch 2.11 has no addmm of meta tensors into another dtype.
        skipped = name in _PRODUCTS and out is not None and out.is_meta
        result = out if skipped else function(*args, **kwargs)
        given = _tensors((args, kwargs))
        if function.namespace == "aten" and name not in _NO_WORK and not _is_view(function):
            results = [tensor for tensor in _tensors(result) if tensor.numel()]
            if results:
                self._add(name, given, results, kwargs)
        known = {id(tensor.untyped_storage()) for tensor in given}
        for tensor in _tensors(result):
            if id(tensor.untyped_storage()) not in known:
                self._add_storage(tensor.untyped_storage())
        return result

    def _add(self, name: str, given: Sequence[Tensor], results: Sequence[Tensor], kwargs: dict[str, Any]) -> None:
        written = {id(tensor) for tensor in results}
        place: dict[str, Any] = {
            "direction": "backward" if is_backward() else "forward",
            "name": _NAMES.get(name, name),
            "called_from": (recording.active and recording.active.torch_asked) or caller(self._passed_through)[0],
            "after": len(self._launches),
            "read": _described(tensor for tensor in given if id(tensor) not in written),
            "written": _described(results),
            "reads": _memory(given),
            "writes": _memory(results),
        }
        if name not in _PRODUCTS:
            self.calls.append(Call(**place))
            return
        left, right, result = given[-3:] if "out" in kwargs else [*given[-2:], *results]
        self.calls.append(
            Product(
                **place,
                dtype=short(left.dtype),
                result=short(result.dtype),
                left=tuple(left.shape),
                right=tuple(right.shape),
                adds=_PRODUCTS[name] and kwargs.get("beta", 1) != 0,
            )
        )

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


def _is_view(function: Any) -> bool:
    """Whether results share the memory of arguments, which are not written to."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in function._schema.returns)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_sparse]


def _memory(tensors: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(without_memory(tensor).memory for tensor in tensors)


def _described(tensors: Iterable[Tensor]) -> str:
    return ", ".join(f"{short(tensor.dtype)} {list(tensor.shape)}" for tensor in tensors)
