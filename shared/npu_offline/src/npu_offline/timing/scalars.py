"""The scalar unit's arithmetic, as Python expressions over Python's integers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from xdsl.dialects.builtin import FloatAttr, IndexType, IntegerAttr, IntegerType
from xdsl.ir import Operation

from ..errors import UnsupportedError
from ..module.arithmetic import COMPARISONS, arithmetic_of
from ..module.mlir import property_of


class Unknown:
    """A value that the model does not compute. Arithmetic with it is unknown; control flow that needs it is an error."""

    def _same(self, *_: object) -> Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _same
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rshift__ = __truediv__ = __rtruediv__ = _same
    __neg__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _same  # type: ignore[assignment]
    __hash__ = object.__hash__

    def _needed(self) -> NoReturn:
        raise UnsupportedError("how often the kernel does something depends on a value that the kernel itself computes")

    __bool__ = __index__ = __int__ = __float__ = _needed


UNKNOWN = Unknown()


def _quotient(a: int, b: int) -> int:
    return a // b if (a >= 0) == (b > 0) else -(-a // b)


def _remainder(a: int, b: int) -> int:
    return a - b * _quotient(a, b)


def _known(function: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*values: Any) -> Any:
        return UNKNOWN if any(value is UNKNOWN for value in values) else function(*values)

    return guarded


#: Names that the expressions use.
HELPERS: dict[str, Any] = {
    "UNKNOWN": UNKNOWN,
    "quotient": _known(_quotient),
    "remainder": _known(_remainder),
    "least": _known(min),
    "most": _known(max),
    "choose": lambda condition, a, b: UNKNOWN if condition is UNKNOWN else a if condition else b,
    "unless_rare": lambda condition: False if condition is UNKNOWN else condition,
    "affine": _known(lambda function, *values: function(*values)),
}

_FORMULAS = {
    "addi": "{0} + {1}",
    "addf": "{0} + {1}",
    "subi": "{0} - {1}",
    "subf": "{0} - {1}",
    "muli": "{0} * {1}",
    "mulf": "{0} * {1}",
    "divf": "{0} / {1}",
    "divsi": "quotient({0}, {1})",
    "divui": "{0} // {1}",
    "floordivsi": "{0} // {1}",
    "ceildivsi": "-(-{0} // {1})",
    "remsi": "remainder({0}, {1})",
    "remui": "{0} % {1}",
    "minsi": "least({0}, {1})",
    "minui": "least({0}, {1})",
    "maxsi": "most({0}, {1})",
    "maxui": "most({0}, {1})",
    "andi": "{0} & {1}",
    "ori": "{0} | {1}",
    "xori": "{0} ^ {1}",
    "shli": "{0} << {1}",
    "shrsi": "{0} >> {1}",
    "shrui": "{0} >> {1}",
    "select": "choose({0}, {1}, {2})",
}
_CASTS = {"extsi", "extui", "trunci", "index_cast", "index_castui"}
_MAP = re.compile(r"affine_map<\(([^)]*)\)(?:\[([^\]]*)\])? -> \((.*)\)>")


def formula(op: Operation, operands: Sequence[str]) -> str:
    """A Python expression for the result of a scalar operation, which is unknown for anything but integer arithmetic."""
    dialect, name = arithmetic_of(op)
    if dialect == "affine" and name in ("apply", "min", "max"):
        values = _affine(str(property_of(op, "map")), operands)
        return values if name == "apply" else f"{'least' if name == 'min' else 'most'}({values})"
    if dialect == "builtin" and operands and is_number(op.results[0].type):  # between an index and an integer
        return operands[0]
    if dialect != "arith":
        return "UNKNOWN"
    if name == "constant":
        value = property_of(op, "value")
        if isinstance(value, IntegerAttr):
            number = value.value.data
            return str(number & 1 if _is_bit(op.results[0].type) else number)
        return repr(value.value.data) if isinstance(value, FloatAttr) else "UNKNOWN"
    if name == "cmpi":
        predicate = property_of(op, "predicate")
        assert isinstance(predicate, IntegerAttr)
        return f"{operands[0]} {COMPARISONS[predicate.value.data]} {operands[1]}"
    if name in _CASTS:
        return f"{operands[0]} & 1" if _is_bit(op.results[0].type) else f"{operands[0]} + 0"
    return _FORMULAS[name].format(*operands) if name in _FORMULAS else "UNKNOWN"


def _is_bit(kind: object) -> bool:
    return isinstance(kind, IntegerType) and kind.width.data == 1


def is_number(kind: object) -> bool:
    """True for the types of scalars that an expression may have."""
    return isinstance(kind, (IntegerType, IndexType))


def _affine(text: str, operands: Sequence[str]) -> str:
    """The results of an affine map, separated by commas. A map that xDSL cannot represent is a string, in quotes."""
    found = _MAP.fullmatch(text.strip('"'))
    if found is None:
        raise UnsupportedError(f"the time model cannot evaluate {text}")
    names = [name.strip() for name in f"{found[1]},{found[2] or ''}".split(",") if name.strip()]
    values = dict(zip(names, operands, strict=True))
    return re.sub(
        r"\b(floordiv|mod|[ds]\d+)\b",
        lambda word: {"floordiv": "//", "mod": "%"}.get(word[0]) or values[word[0]],
        _without_ceildiv(found[3]),
    )


def _without_ceildiv(text: str) -> str:
    """Python has no operator for it: `a ceildiv b` becomes `-(-a floordiv b)`."""
    while " ceildiv " in text:
        before, _, after = text.partition(" ceildiv ")
        depth = 0
        for start in reversed(range(len(before))):  # back to where the dividend begins: a name, or in parentheses
            depth += {")": 1, "(": -1}.get(before[start], 0)
            if depth < 0 or (depth == 0 and before[start] in " ,"):
                start += 1
                break
        divisor = re.match(r"\w+", after)
        if divisor is None:
            raise UnsupportedError(f"the time model cannot evaluate {text}")
        text = f"{before[:start]}-(-{before[start:]} floordiv {divisor[0]}){after[divisor.end() :]}"
    return text
