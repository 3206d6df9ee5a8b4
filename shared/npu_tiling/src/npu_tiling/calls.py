"""The record of an operator's call, and what follows from its fields: the schema, the fake function and the key.

A record is a NamedTuple: first its tensors (`Tensor`, `Tensor | None`, `Sequence[Tensor]`), then its options (float, int,
`Size`, bool, `Sequence[bool]`, str, dtype, or a NamedTuple of these that several records share). Its method `results` maps
the name of each result to an `Empty`, to a list of them, or to None where the call does not ask for it. `results` reads
nothing but shapes and dtypes, and the chip where it has a parameter `chip`. So the fields of a record may be tensors,
tensors without data, or the slots of a plan.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, or_
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, get_type_hints

import torch
from torch import Tensor

from .chips import device_for, dry_runs
from .direct import ALIGNMENT
from .dispatch import PLAIN

Size: TypeAlias = Annotated[int, "a compiler may keep it as a symbol: a number of rows, or the place of one"]
Record = TypeVar("Record")

_TYPES: dict[Any, str] = {  # as PyTorch's schemas spell them
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[Tensor]: "Tensor[]",
    float: "float",
    float | None: "float?",
    int: "int",
    int | None: "int?",
    Size: "SymInt",
    bool: "bool",
    Sequence[bool]: "bool[]",
    str: "str",
    torch.dtype: "ScalarType",
    torch.dtype | None: "ScalarType?",
}
_TENSORS = (Tensor, Tensor | None, Sequence[Tensor])
# Options are cast to their fields' types. 0.0 equals -0.0, so their keys are equal too: adding 0.0 turns -0.0 into 0.0.
_CASTS: dict[Any, Callable[[Any], Any]] = {float: lambda value: float(value) + 0.0, bool: bool}
_CASTS[float | None] = lambda value: None if value is None else float(value) + 0.0
_CASTS[Sequence[bool]] = tuple
_shape, _dtype, _is_meta = map(attrgetter, ("shape", "dtype", "is_meta"))
# Places in a key, from its end: which addresses are not aligned (0: all are); whether all are; whether all tensors are
# plain, so that PyTorch's dispatcher has nothing to do for them.
UNALIGNED, IS_ALIGNED, IS_PLAIN = -3, -2, -1
LIST_ALIGNMENT = 16  # elements: kernels may be told that distances between a list's tensors are multiples of this


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and arithmetic for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
        tensors, options: names of the operator's arguments: the other fields. A field with options of its own stands for
            those.
        results: names of the operator's results.
        arguments: a function of a record: the operator's arguments, which are the fields that are not fixed.
        key: a function of the operator's arguments. Calls with equal keys have the same plan on a chip; see `_key`.
    """

    def __init__(
        self,
        name: str,
        record: Any,
        results: Sequence[str],
        *,
        lists: Sequence[str] = (),
        writes: Sequence[str] = (),
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        """Derives it.

        Args:
            name, fixed: as the attributes.
            record: the type of the records.
            results: names of the results.
            lists: those of the results that are lists, some of whose tensors may be None.
            writes: names of the tensors that are written to.
        """
        self.name, self.fixed, self._record = name, dict(fixed or {}), record
        hints = get_type_hints(record, include_extras=True)
        self._shared = {field: kind for field, kind in hints.items() if isinstance(kind, type) and hasattr(kind, "_fields")}
        kinds: dict[str, Any] = {}
        places = []
        for field, kind in hints.items():
            own = get_type_hints(kind, include_extras=True) if field in self._shared else {field: kind}
            kinds |= {name: each for name, each in own.items() if name not in self.fixed}
            places += [name if name == field else f"{field}.{name}" for name in own if name not in self.fixed]
        self.tensors = [field for field, kind in kinds.items() if kind in _TENSORS]
        self.options = [field for field in kinds if field not in self.tensors]
        assert [*kinds] == [*self.tensors, *self.options], "tensors come first"
        self._casts = {field: _CASTS[kinds[field]] for field in self.options if kinds[field] in _CASTS}
        self.results = tuple(results)
        types = {field: _TYPES[kind] for field, kind in kinds.items()}
        for alias, field in zip("abcd", writes, strict=False):
            types[field] = f"Tensor({alias}!){'[]' * (kinds[field] == Sequence[Tensor])}"
        given = ", ".join(f"{kind} {field}" for field, kind in types.items())
        returned = ", ".join(f"Tensor{'?[]' * (each in lists)} {each}" for each in self.results)
        self.schema = f"{name}({given}) -> ({returned})"
        self.key = _key(kinds)
        # Of text: it is one function, and torch.compile knows no attrgetter.
        given = ", ".join(f"call.{each}" for each in places)
        self.arguments: Callable[[Any], tuple[Any, ...]] = eval(f"lambda call: ({given},)")
        self._asks_chip = "chip" in inspect.signature(record.results).parameters

    def call(self, arguments: Sequence[Any]) -> Any:
        """The record made of the operator's arguments and the fixed fields."""
        values = dict(zip((*self.tensors, *self.options), arguments, strict=True)) | self.fixed
        for field, cast in self._casts.items():
            values[field] = cast(values[field])
        for field, kind in self._shared.items():
            values[field] = kind(*[values.pop(option) for option in kind._fields])
        return self._record(**values)

    def returned(self, results: Sequence[Any]) -> Any:
        """What the operator returns: a tuple of several results, one result by itself, or None where there are none."""
        return tuple(results) if len(self.results) > 1 else results[0] if results else None

    def fake(self, *arguments: Any) -> Any:
        """The results without data, for compilers and the meta device."""
        call = self.call(arguments)
        device, chip = device_of(call), {}
        if self._asks_chip:
            chip["chip"] = None if device.type == "meta" and not dry_runs else device_for(device)
        wanted = call.results(**chip)
        return self.returned([_without_data(wanted[name], device) for name in self.results])


def derive(kind: type[Record], call: Any, **fields: Any) -> Record:
    """A record with these fields, whose others are those of `call`. PyTorch 2.7 and 2.8 trace no `_replace`."""
    names: Sequence[str] = kind._fields  # type: ignore[attr-defined]
    return kind(**{name: getattr(call, name) for name in names if name not in fields}, **fields)


def flat(values: Iterable[Any]) -> list[Any]:
    """Values one after another, those of lists and tuples too."""
    found: list[Any] = []
    for each in values:
        if isinstance(each, (list, tuple)):
            found += flat(each)
        else:
            found.append(each)
    return found


def device_of(call: Any) -> torch.device:
    """The device of the first tensor of a record, or of a sequence that begins with tensors."""
    for each in call:
        first = each[0] if isinstance(each, (list, tuple)) and each else each
        if isinstance(first, Tensor):
            return first.device
    raise ValueError("a call has at least one tensor")


def facts_of(tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], int, bool]:
    """What a key has of a list: facts, the bitwise or of the addresses, and whether all tensors are plain.

    Most lists have tensors that are alike. To loop over tensors in Python takes twice as long.
    """
    if not tensors:
        return (), 0, True
    bits = functools.reduce(or_, map(Tensor.data_ptr, tensors), 0)
    plain = PLAIN.issuperset(map(type, tensors)) and not any(map(Tensor.is_neg, tensors)) and not any(map(_is_meta, tensors))
    aligned = not bits % (LIST_ALIGNMENT * tensors[0].itemsize)
    shapes, dtypes, devices = {*map(_shape, tensors)}, {*map(_dtype, tensors)}, {*map(Tensor.get_device, tensors)}
    if len(shapes) == len(dtypes) == len(devices) == 1 and all(map(Tensor.is_contiguous, tensors)):
        return (len(tensors), *shapes, *dtypes, *devices, aligned), bits, plain
    facts = [(each.shape, each.is_contiguous() or each.stride(), each.dtype, each.get_device()) for each in tensors]
    return (*facts, aligned), bits, plain


def are_aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors of a list, of one dtype, begin at multiples of `LIST_ALIGNMENT` elements."""
    try:
        return not tensors or bool(facts_of(tensors)[0][-1])
    except RuntimeError:  # inside a transform of torch.func they have no addresses
        return False


def _without_data(result: Any, device: torch.device) -> Any:
    if result is None:
        return None
    if isinstance(result, list):
        return [_without_data(each, device) for each in result]
    return torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device=device)


def _key(kinds: Mapping[str, Any]) -> Callable[..., tuple[Any, ...] | None]:
    """Makes the function `key` from text, a line for each field: a loop over the fields takes twice as long.

    A key has the device of the first tensor, then of each tensor shape, strides (True where it is contiguous), dtype and
    device index, of a list whether it is aligned (`are_aligned`) too, and of each option value and type. Its last three
    entries have names: `UNALIGNED`, `IS_ALIGNED` and `IS_PLAIN`. The function returns None where a tensor has no address, as
    inside a transform of torch.func.
    """
    first = next(field for field, kind in kinds.items() if kind is Tensor)
    alone = [field for field, kind in kinds.items() if kind in (Tensor, Tensor | None)]  # in no list
    lines, entries, plain = ["bits = 0"], [f"{first}.device"], list[str]()
    for field, kind in kinds.items():
        if kind == Sequence[bool]:
            entries.append(f"tuple({field})")
            continue
        if kind == Sequence[Tensor]:
            lines += [f"{field}, more, {field}_plain = facts_of({field})", "bits |= more"]
            entries.append(field)
            plain.append(f"{field}_plain")
            continue
        if kind not in _TENSORS:
            entries += [field, f"type({field})"]
            continue
        facts = f"{field}.shape, {field}.is_contiguous() or {field}.stride(), {field}.dtype, {field}.get_device()"
        is_plain = f"type({field}) in PLAIN and not {field}.is_neg() and not {field}.is_meta"
        if kind is Tensor:
            lines.append(f"bits |= {field}.data_ptr()")
            entries.append(facts)
            plain.append(is_plain)
        else:
            lines.append(f"if {field} is not None: bits |= {field}.data_ptr()")
            entries.append(f"None if {field} is None else ({facts})")
            plain.append(f"({field} is None or {is_plain})")
    off = "".join([f"{each} is not None and {each}.data_ptr() % {ALIGNMENT}, " for each in alone])
    entries += [f"bits % {ALIGNMENT} and ({off})", f"not bits % {ALIGNMENT}", " and ".join(plain)]
    lines.append(f"return ({', '.join(entries)})")
    text = "\n".join(
        [f"def key({', '.join(kinds)}):", " try:", *(f"  {line}" for line in lines), " except RuntimeError: pass"]
    )
    scope: dict[str, Any] = {"PLAIN": PLAIN, "facts_of": facts_of}
    exec(text, scope)
    key: Callable[..., tuple[Any, ...] | None] = scope["key"]
    return key
