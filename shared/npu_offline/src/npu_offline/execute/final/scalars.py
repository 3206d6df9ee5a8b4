"""The scalar unit's arithmetic in C. Integers wrap at their width; narrow numbers are rounded after each step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from xdsl.dialects.builtin import Float64Type, FloatAttr, IndexType, IntegerAttr, IntegerType, MemRefType
from xdsl.ir import Attribute, Operation

from ...errors import UnsupportedError
from ...module.arithmetic import COMPARISONS, arithmetic_of
from ...module.mlir import name_of, property_of

_RANK = 12  # of machine.h
_BINARY = {
    **dict.fromkeys(("addi", "addf"), "{0} + {1}"),
    **dict.fromkeys(("subi", "subf"), "{0} - {1}"),
    **dict.fromkeys(("muli", "mulf"), "{0} * {1}"),
    "divf": "{0} / {1}",
    "divsi": "quotient({0}, {1})",
    "remsi": "remainder_of({0}, {1})",
    "floordivsi": "floor_quotient({0}, {1})",
    "ceildivsi": "-floor_quotient(-(int64_t){0}, {1})",
    "minsi": "{0} < {1} ? {0} : {1}",
    "maxsi": "{0} > {1} ? {0} : {1}",
    "andi": "{0} & {1}",
    "ori": "{0} | {1}",
    "xori": "{0} ^ {1}",
    "shli": "(int64_t)((uint64_t){0} << {1})",
    "shrsi": "{0} >> {1}",
    "maximumf": "{0} != {0} ? {0} : {1} != {1} ? {1} : {0} > {1} ? {0} : {1}",
    "minimumf": "{0} != {0} ? {0} : {1} != {1} ? {1} : {0} < {1} ? {0} : {1}",
    "maxnumf": "fmaxf({0}, {1})",
    "minnumf": "fminf({0}, {1})",
    "remf": "fmodf({0}, {1})",
    "negf": "-{0}",
}
_UNSIGNED = {
    "divui": "{1} ? {0} / {1} : 0",
    "remui": "{1} ? {0} % {1} : 0",
    "minui": "{0} < {1} ? {0} : {1}",
    "maxui": "{0} > {1} ? {0} : {1}",
    "shrui": "{0} >> {1}",
}
_FLOAT_COMPARISONS = {  # by the value of arith.cmpf's predicate
    1: "==",
    2: ">",
    3: ">=",
    4: "<",
    5: "<=",
    8: "==",
    9: ">",
    10: ">=",
    11: "<",
    12: "<=",
    13: "!=",
}
_FUNCTIONS = {
    **{
        name: f"{name}f"
        for name in ("sqrt", "exp", "log", "log2", "exp2", "sin", "cos", "tanh", "floor", "ceil", "erf", "round", "trunc")
    },
    "absf": "fabsf",
    "powf": "powf",
    "rsqrt": "1.0f / sqrtf",
    "roundeven": "rintf",
    "fma": "fmaf",
}


def _wide_product(op: Operation) -> str:
    """Both halves of a product, in twice the bits."""
    kind = op.results[0].type
    signed = name_of(op) == "arith.mulsi_extended"
    bits, target = re.sub(r"\D", "", c_type(kind)), c_type(kind)
    wide = "__int128" if signed else "unsigned __int128"
    cast = "" if signed else f"({_unsigned(kind)})"
    product = f"({wide}){cast}{{0}} * ({wide}){cast}{{1}}"
    halves = f"{{low}} = ({target})product; {{high}} = ({target})(product >> {bits});"
    return f"{{{{ const {wide} product = {product}; {halves} }}}}"


PAIRS: dict[str, Callable[[Operation], str]] = dict.fromkeys(("arith.mulsi_extended", "arith.mului_extended"), _wide_product)
"""Scalar operations of two results, as C with fields for operands and results."""


def c_type(kind: Attribute) -> str:
    """The C type of a value."""
    if isinstance(kind, MemRefType):
        if len(kind.get_shape()) > _RANK:
            raise UnsupportedError(f"execution does not know memory of more than {_RANK} axes, as {kind}")
        return "view"
    if isinstance(kind, IndexType):
        return "int64_t"
    if isinstance(kind, IntegerType) and kind.width.data in (1, 8, 16, 32, 64):
        return f"int{kind.width.data}_t" if kind.width.data > 1 else "uint8_t"
    if isinstance(kind, Float64Type):
        return "double"
    if str(kind) not in ("f32", "f16", "bf16"):
        raise UnsupportedError(f"execution does not know numbers of type {kind}")
    return "float"


def element_type(kind: Attribute) -> str:
    """The machine's name for a type of elements."""
    names = {
        "f32": "F32",
        "f16": "F16",
        "bf16": "BF16",
        "f64": "F64",
        "i64": "I64",
        "i32": "I32",
        "i16": "I16",
        "i8": "I8",
        "i1": "I1",
    }
    text = "i64" if isinstance(kind, IndexType) else str(kind).removeprefix("s") if str(kind).startswith("si") else str(kind)
    if text not in names:
        raise UnsupportedError(f"execution does not know numbers of type {kind}")
    return text.upper()


def bits_of(kind: Attribute, value: str) -> str:
    """A C expression for the bits of a number, as an integer."""
    return {"f32": f"float_bits({value})", "f16": f"float_to_half({value})", "bf16": f"float_to_bfloat({value})"}.get(
        str(kind), f"(int64_t)({value})"
    )


def from_bits(kind: Attribute, bits: str) -> str:
    """A C expression for the number that has these bits."""
    return {
        "f32": f"bits_float({bits})",
        "f16": f"half_to_float({bits})",
        "bf16": f"bfloat_to_float({bits})",
        "i1": f"({bits}) & 1",
    }.get(str(kind), f"({c_type(kind)})({bits})")


def formula(op: Operation, operands: list[str]) -> str | None:
    """A C expression for the result of a scalar operation; None for any other operation.

    Raises:
        UnsupportedError: the scalar operation is not known.
    """
    dialect, name = arithmetic_of(op)
    if dialect == "builtin" and operands and not isinstance(op.results[0].type, MemRefType):
        return operands[0]
    if dialect not in ("arith", "math") or len(op.results) != 1:
        return None
    kind = op.results[0].type
    if dialect == "math":
        if name not in _FUNCTIONS:
            raise UnsupportedError(f"execution does not know math.{name}")
        return _rounded(kind, f"{_FUNCTIONS[name]}({', '.join(operands)})")
    if name == "constant":
        return _constant(op)
    if name in ("cmpi", "cmpf"):
        return _comparison(op, name, operands)
    if name == "select":
        return f"{operands[0]} ? {operands[1]} : {operands[2]}"
    if name in _BINARY:
        return _rounded(kind, _BINARY[name].format(*operands))
    if name in _UNSIGNED:
        width = _unsigned(kind)
        return f"({c_type(kind)})({_UNSIGNED[name].format(*(f'({width}){operand}' for operand in operands))})"
    return _cast(op, name, operands[0])


def _rounded(kind: Attribute, text: str) -> str:
    if str(kind) == "f16":
        return f"half_to_float(float_to_half({text}))"
    if str(kind) == "bf16":
        return f"bfloat_to_float(float_to_bfloat({text}))"
    return f"({text}) & 1" if str(kind) == "i1" else f"({c_type(kind)})({text})"


def _constant(op: Operation) -> str:
    value, kind = property_of(op, "value"), op.results[0].type
    if isinstance(value, IntegerAttr):
        number = value.value.data
        return str(number & 1) if str(kind) == "i1" else f"({c_type(kind)}){number}LL" if number != -(2**63) else "INT64_MIN"
    if not isinstance(value, FloatAttr):
        raise UnsupportedError(f"execution does not know the constant {value}")
    real = value.value.data
    if math.isnan(real):
        return "NAN"
    if math.isinf(real):
        return "INFINITY" if real > 0 else "-INFINITY"
    return real.hex() + ("" if isinstance(kind, Float64Type) else "f")


def _comparison(op: Operation, name: str, operands: list[str]) -> str:
    predicate = property_of(op, "predicate")
    if not isinstance(predicate, IntegerAttr):
        raise UnsupportedError(f"execution does not know the comparison {predicate}")
    number = predicate.value.data
    a, b = operands
    if name == "cmpi":
        if number >= 6:
            width = _unsigned(op.operands[0].type)
            a, b = f"({width}){a}", f"({width}){b}"
        elif str(op.operands[0].type) == "i1" and number >= 2:
            a, b = f"-{a}", f"-{b}"
        return f"{a} {COMPARISONS[number]} {b}"
    if number in (0, 15):
        return str(number // 15)
    if number in (7, 14):
        return f"{'!' if number == 14 else ''}({a} == {a} && {b} == {b})"
    if number == 6:  # not equal, and both are numbers
        return f"{a} < {b} || {a} > {b}"
    unordered = f"{a} != {a} || {b} != {b} || " if 8 <= number <= 12 else ""
    return f"{unordered}{a} {_FLOAT_COMPARISONS[number]} {b}"


def _unsigned(kind: Attribute) -> str:
    return "uint64_t" if isinstance(kind, IndexType) else "uint8_t" if str(kind) == "i1" else f"u{c_type(kind)}"


def _cast(op: Operation, name: str, value: str) -> str:
    source, kind = op.operands[0].type, op.results[0].type
    target = c_type(kind)
    if name in ("extsi", "index_cast", "trunci", "sitofp"):
        signed = f"-(int64_t){value}" if str(source) == "i1" else value
        return f"({value}) & 1" if str(kind) == "i1" else _rounded(kind, signed)
    if name in ("extui", "index_castui", "uitofp"):
        return _rounded(kind, f"({_unsigned(source)}){value}")
    if name in ("extf", "truncf"):
        return _rounded(kind, value)
    if name in ("fptosi", "fptoui"):
        return f"({target})saturated({value}, {re.sub(r'[^0-9]', '', target)})"
    if name == "bitcast":
        return from_bits(kind, bits_of(source, value))
    raise UnsupportedError(f"execution does not know {name_of(op)}")
