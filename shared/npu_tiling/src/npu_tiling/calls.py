"""The record of an operator's call, and what follows from its fields: the schema, the fake function and the key.

A record is a NamedTuple: first its tensors (`Tensor`, `Tensor | None`), then its options (float, int, `Size`, bool, str,
dtype). Its method `results` maps the name of each result to an `Empty`, or to None where the call does not ask for it.
`results` reads nothing but shapes and dtypes. So the fields of a record may be tensors, tensors without data, or the slots
of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NewType, get_type_hints

import torch
from torch import Tensor
from torch.nn import Parameter

Size = NewType("Size", int)  # an option that a compiler may keep as a symbol: a number of rows, or the place of one
_TYPES: dict[Any, str] = {  # as PyTorch's schemas spell them
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    int: "int",
    Size: "SymInt",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
}
_TENSORS = (Tensor, Tensor | None)
# Options are cast to their fields' types. 0.0 equals -0.0, so their keys are equal too: adding 0.0 turns -0.0 into 0.0.
_CASTS: dict[Any, Callable[[Any], Any]] = {float: lambda value: float(value) + 0.0, bool: bool}
PLAIN = frozenset((Tensor, Parameter))  # types without a `__torch_dispatch__` or `__torch_function__` of their own
ALIGNMENT = 16  # bytes: Triton compiles another kernel for a pointer that is no multiple of this


class Empty(NamedTuple):
    """Shape, strides and dtype of memory to allocate. It is contiguous; `last_outermost`: with its last dimension first."""

    shape: Sequence[int]
    dtype: torch.dtype
    last_outermost: bool = False

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements."""
        sizes = [self.shape[-1], *self.shape[:-1]] if self.last_outermost else [*self.shape]
        strides = contiguous_strides(sizes)
        return (*strides[1:], strides[0]) if self.last_outermost else strides


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as PyTorch has them: a size of 0 counts as 1. Sizes may be torch.compile's symbols."""
    strides = [1] * len(sizes)
    for i in range(len(sizes) - 1, 0, -1):
        strides[i - 1] = strides[i] * (max(1, sizes[i]) if isinstance(sizes[i], int) else sizes[i])
    return tuple(strides)


class Signature:
    """What follows from a record type.

    Attributes:
        name: the operator's name.
        schema: the operator's schema, for PyTorch.
        fixed: fields of the record that are no arguments of the operator, with their values.
        tensors, options: names of the other fields, which are the operator's arguments.
        results: names of the operator's results.
        key: a function of the operator's arguments. Calls with equal keys have the same plan on a chip; see `_key`.
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
        """`results`: names of the results; `writes`: names of the tensors that are written to; `fixed`: as the attribute."""
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
        """The record made of the operator's arguments and the fixed fields."""
        values = dict(zip((*self.tensors, *self.options), arguments, strict=True)) | self.fixed
        for field, cast in self._casts.items():
            values[field] = cast(values[field])
        return self._record(**values)

    def arguments(self, call: Any) -> tuple[Any, ...]:
        """The operator's arguments: the fields of a record that are not fixed."""
        return tuple(value for field, value in zip(call._fields, call, strict=True) if field not in self.fixed)

    def returned(self, results: Sequence[Any]) -> Any:
        """What the operator returns: a tuple of several results, one result by itself, or None where there are none."""
        return tuple(results) if len(self.results) > 1 else results[0] if results else None

    def fake(self, *arguments: Any) -> Any:
        """The results without data, for compilers and the meta device."""
        call = self.call(arguments)
        device, wanted = device_of(call), call.results()
        return self.returned([_without_data(wanted[name], device) for name in self.results])


def device_of(call: Any) -> torch.device:
    """The device of the first tensor of a record, or of a sequence that begins with tensors."""
    return next(each.device for each in call if each is not None)


def _without_data(result: Empty | None, device: torch.device) -> Tensor | None:
    if result is None:
        return None
    return torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device=device)


def _key(kinds: Mapping[str, Any]) -> Callable[..., tuple[Any, ...] | None]:
    """Makes the function `key` from text, a line for each field: a loop over the fields takes twice as long.

    A key has the device of the first tensor, then of each tensor shape, strides (True where it is contiguous), dtype and
    device index, and of each option value and type. Its last two entries say whether all addresses are aligned, and whether
    all tensors are plain: PyTorch's dispatcher has nothing to do for them. The function returns None where a tensor has no
    address, as inside a transform of torch.func.
    """
    first = next(field for field, kind in kinds.items() if kind is Tensor)
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
