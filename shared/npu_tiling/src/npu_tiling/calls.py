"""What one direction of an operator is given and returns: a record, and all that is derived from its fields.

A record is a NamedTuple: first its tensors (`Tensor`, `Tensor | None`), then its options (float, int, bool, str, dtype). Its
method `results` gives an `Empty` for the name of each result, or None for what is not asked for. It reads shapes and dtypes
alone: it serves tensors with and without data, and the slots of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.nn import Parameter

_TYPES = {  # in PyTorch's schemas
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    int: "int",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
}
_TENSORS = (Tensor, Tensor | None)
# 1, 1.0 and True are equal, and so are 0.0 and -0.0: calls with equal keys get equal options.
_CASTS: dict[Any, Callable[[Any], Any]] = {float: lambda value: float(value) + 0.0, bool: bool}
PLAIN = frozenset((Tensor, Parameter))
ALIGNMENT = 16  # bytes: for other addresses Triton compiles other kernels


class Empty(NamedTuple):
    """Memory of a result, without its device: contiguous or, `last_outermost`, contiguous with the last dimension first."""

    shape: Sequence[int]
    dtype: torch.dtype
    last_outermost: bool = False

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        sizes = [self.shape[-1], *self.shape[:-1]] if self.last_outermost else [*self.shape]
        strides = contiguous_strides(sizes)
        return (*strides[1:], strides[0]) if self.last_outermost else strides


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """As PyTorch has them: a dimension without elements counts as one. Sizes may be unknown to a compiler."""
    strides = [1] * len(sizes)
    for i in range(len(sizes) - 1, 0, -1):
        strides[i - 1] = strides[i] * (max(1, sizes[i]) if isinstance(sizes[i], int) else sizes[i])
    return tuple(strides)


class Signature:
    """What is derived from a record.

    Attributes:
        name: the operator's.
        schema: as PyTorch asks for it.
        fixed: options that the operator does not take, and what they are.
        tensors, options: names of the fields that it takes.
        results: names of what is returned.
        key: a function of the operator's arguments. What it returns is equal for calls that do the same; see `_key`.
    """

    def __init__(
        self,
        name: str,
        record: Any,
        results: Sequence[str],
        *,
        writes: Sequence[str] = (),
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        """`results`: names; `writes`: tensors that it writes to; `fixed`: options that it does not take."""
        self.name, self.fixed, self._record = name, dict(fixed or {}), record
        kinds = {field: kind for field, kind in get_type_hints(record).items() if field not in self.fixed}
        self.tensors = [field for field, kind in kinds.items() if kind in _TENSORS]
        self.options = [field for field in kinds if field not in self.tensors]
        assert [*kinds] == [*self.tensors, *self.options], "tensors come first"
        self._casts = {field: _CASTS[kinds[field]] for field in self.options if kinds[field] in _CASTS}
        self.results = tuple(results)
        arguments = [f"{'Tensor(a!)' if field in writes else _TYPES[kind]} {field}" for field, kind in kinds.items()]
        self.schema = f"{name}({', '.join(arguments)}) -> ({', '.join(f'Tensor {each}' for each in self.results)})"
        self.key = _key(kinds)

    def call(self, arguments: Sequence[Any]) -> Any:
        """The record of a call from the operator's arguments."""
        values = dict(zip((*self.tensors, *self.options), arguments, strict=True)) | self.fixed
        for field, cast in self._casts.items():
            values[field] = cast(values[field])
        return self._record(**values)

    def arguments(self, call: Any) -> tuple[Any, ...]:
        """The operator's arguments from the record of a call."""
        return tuple(value for field, value in zip(call._fields, call, strict=True) if field not in self.fixed)

    def fake(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """The results without data, for compilers and the meta device."""
        call = self.call(arguments)
        device, wanted = device_of(call), call.results()
        return tuple(_without_data(wanted[name], device) for name in self.results)


def device_of(call: Any) -> torch.device:
    """That of the first tensor."""
    return next(each.device for each in call if each is not None)


def _without_data(result: Empty | None, device: torch.device) -> Tensor | None:
    if result is None:
        return None
    return torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device=device)


def _key(kinds: Mapping[str, Any]) -> Callable[..., tuple[Any, ...] | None]:
    """The function `key` of a record, written once for its fields: a loop over fields takes twice as long.

    A key has shape, strides (True for contiguous ones), dtype and device of each tensor, and each option with its type. Its
    last two entries: whether all tensors are aligned, and whether they are plain ones, for which PyTorch's dispatcher does
    nothing. None stands for tensors without an address, as transforms have them.
    """
    first = next(field for field, kind in kinds.items() if kind is Tensor)  # its device in full, indices of the others'
    lines, entries, plain = ["bits = 0"], [f"{first}.device"], [f"not {first}.is_meta"]
    for field, kind in kinds.items():
        if kind not in _TENSORS:
            entries += [field, f"type({field})"]
            continue
        facts = f"{field}.shape, {field}.is_contiguous() or {field}.stride(), {field}.dtype, {field}.get_device()"
        is_plain = f"type({field}) in PLAIN and not {field}.is_neg()"
        if kind is Tensor:
            lines.append(f"bits |= {field}.data_ptr()")
            entries.append(facts)
            plain.append(is_plain)
        else:
            lines.append(f"if {field} is not None: bits |= {field}.data_ptr()")
            entries.append(f"None if {field} is None else ({facts})")
            plain.append(f"({field} is None or {is_plain})")
    lines.append(f"return ({', '.join([*entries, f'not bits % {ALIGNMENT}', ' and '.join(plain)])})")
    text = "\n".join(
        [f"def key({', '.join(kinds)}):", " try:", *(f"  {line}" for line in lines), " except RuntimeError: pass"]
    )
    scope: dict[str, Any] = {"PLAIN": PLAIN}
    exec(text, scope)
    key: Callable[..., tuple[Any, ...] | None] = scope["key"]
    return key
