"""Numbers of TTIR as arrays of numpy, and the operations that work element by element.

The first axis of every array is the program: one for all programs where they agree. Numbers in bf16 are kept in fp32, and
rounded after every operation. Integers have no sign of their own: operations say how they read them.

What Triton leaves undefined has two values, by `Numbers.other`: a kernel whose results depend on them has no meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, FloatAttr, IntegerAttr, IntegerType, TensorType
from xdsl.ir import Attribute, Operation

from ...errors import UnsupportedError
from ...module.mlir import name_of, property_of

Array = NDArray[Any]
Computes = Callable[..., Array]

_FLOATS = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": np.float32}
_INTEGERS = {1: np.bool_, 8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_UNSIGNED = {np.dtype(f"i{size}"): np.dtype(f"u{size}") for size in (1, 2, 4, 8)} | {np.dtype(bool): np.dtype("u1")}
_EPSILON = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}


def kind_of(value: Attribute) -> str:
    """The element of a type: "f32", "i1", "i64"; "ptr" for pointers, "block" for block pointers and descriptors.

    Raises:
        UnsupportedError: it is another.
    """
    element = value.get_element_type() if isinstance(value, TensorType) else value
    text = str(element)
    if text.startswith(("!tt.ptr<tensor", "!tt.tensordesc")):
        return "block"
    if text.startswith("!tt.ptr"):
        return "ptr"
    if text == "index":
        return "i64"
    if text in _FLOATS or (isinstance(element, IntegerType) and element.width.data in _INTEGERS):
        return text.lstrip("us")
    raise UnsupportedError(f"numbers of type {text} are not known")


def is_float(kind: str) -> bool:
    """Whether a kind has floating-point numbers."""
    return kind in _FLOATS


def epsilon_of(kind: str) -> float:
    """The distance from 1 to the next number of a floating-point kind."""
    return _EPSILON[kind]


def integer_of(op: Operation, name: str) -> int:
    """An integer attribute."""
    found = property_of(op, name)
    assert isinstance(found, IntegerAttr)
    return int(found.value.data)


def memory_dtype(kind: str) -> np.dtype[Any]:
    """How a kind lies in memory: bf16 as 16 bits."""
    if kind == "ptr":
        return np.dtype(np.int64)
    return np.dtype(np.uint16) if kind == "bf16" else np.dtype(_FLOATS.get(kind) or _INTEGERS[int(kind[1:])])


class Numbers:
    """The arithmetic of one execution."""

    def __init__(self, *, other: bool = False) -> None:
        """
        Args:
            other: compute in fp64 without rounding, but for sums of fp32, and let what is undefined be other numbers: how
                far results move says how much rounding and what is undefined may move them.
        """
        self.other = other

    def dtype(self, kind: str) -> np.dtype[Any]:
        """What arrays of a kind have."""
        if kind == "ptr":
            return np.dtype(np.int64)
        if kind in _FLOATS:
            return np.dtype(np.float64 if self.other else _FLOATS[kind])
        return np.dtype(_INTEGERS[int(kind[1:])])

    def rounded(self, x: Array, kind: str) -> Array:
        """Numbers as a floating-point kind has them."""
        if self.other:
            return np.asarray(x, np.float64)
        return _to_bf16(x) if kind == "bf16" else np.asarray(x, _FLOATS[kind])

    def from_memory(self, raw: Array, kind: str) -> Array:
        """Numbers of what lies in memory."""
        if kind == "bf16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float64) if self.other and kind in _FLOATS else raw

    def to_memory(self, x: Array, kind: str) -> Array:
        """What lies in memory for numbers."""
        if kind == "bf16":
            return (np.ascontiguousarray(_to_bf16(x)).view(np.uint32) >> 16).astype(np.uint16)
        return np.asarray(x, memory_dtype(kind))

    def undefined(self, shape: tuple[int, ...], kind: str) -> Array:
        """What stands where Triton leaves a number undefined."""
        return np.broadcast_to(np.asarray(self.other, self.dtype(kind)), shape)

    def constant(self, op: Operation) -> Array:
        """The value of an `arith.constant`, with an axis of programs."""
        found, kind = property_of(op, "value"), op.results[0].type
        dtype = self.dtype(kind_of(kind))
        shape = tuple(kind.get_shape()) if isinstance(kind, TensorType) else ()
        if not isinstance(found, DenseIntOrFPElementsAttr):
            assert isinstance(found, (IntegerAttr, FloatAttr))
            return np.broadcast_to(np.array(found.value.data, dtype), (1, *shape))
        numbers = found.get_values()
        values = np.array(numbers[:1] if len(set(numbers)) == 1 else numbers)
        whole = values.astype(dtype) if dtype.kind in "bf" else values.astype(np.int64).astype(dtype)
        return np.broadcast_to(whole if whole.size == 1 else whole.reshape(shape), (1, *shape))

    def elementwise(self, op: Operation) -> Computes | None:
        """What computes an operation's result from its operands; None if it does not work element by element."""
        name = name_of(op)
        if not op.results:
            return None
        result = kind_of(op.results[0].type)
        given = kind_of(op.operands[0].type) if op.operands else result
        if name in _FLOAT_OPERATIONS:
            return self._floating(_FLOAT_OPERATIONS[name], result)
        if name == "tt.extern_elementwise":
            return self._extern(op, result)
        if name in _INTEGER_OPERATIONS:
            if given == "i1":
                return _BOOLEAN_OPERATIONS.get(name)
            return _INTEGER_OPERATIONS[name]
        if name in _DIVISIONS:
            return self._division(*_DIVISIONS[name])
        match name:
            case "arith.cmpi":
                compare, unsigned = _INTEGER_PREDICATES[integer_of(op, "predicate")]
                return lambda x, y: compare(*(_signed(each, unsigned=unsigned) for each in (x, y)))
            case "arith.cmpf":
                return _FLOAT_PREDICATES[integer_of(op, "predicate")]
            case "arith.extf" | "arith.truncf" | "tt.fp_to_fp":
                return lambda x: self.rounded(x, result)
            case "arith.extsi" | "arith.index_cast" | "arith.trunci":
                dtype = self.dtype(result)
                return lambda x: (x & 1).astype(bool) if dtype.kind == "b" else _signed(x).astype(dtype)
            case "arith.extui":
                dtype = self.dtype(result)
                return lambda x: _signed(x, unsigned=True).astype(dtype)
            case "arith.sitofp" | "arith.uitofp":
                return lambda x: self.rounded(_signed(x, unsigned=name == "arith.uitofp"), result)
            case "arith.fptosi" | "arith.fptoui":
                return self._to_integer(result, unsigned=name == "arith.fptoui")
            case "arith.bitcast" | "tt.bitcast":
                return lambda x: self._from_bits(self._bits(x, given), result)
            case "tt.clampf":
                nan = integer_of(op, "propagateNan") != 0
                least, most = (np.minimum, np.maximum) if nan else (np.fmin, np.fmax)
                return lambda x, low, high: least(most(x, low), high)
            case "tt.ptr_to_int":
                return lambda x: x
            case "arith.mulsi_extended" | "arith.mului_extended":
                high = _high_half(unsigned=name == "arith.mului_extended")
                return lambda x, y: (_wrapping(np.multiply)(x, y), high(x, y))  # type: ignore[return-value]
        return None

    def _floating(self, compute: Computes, kind: str) -> Computes:
        """Narrow kinds compute in fp32, and round once."""
        if kind in ("f16", "bf16") and not self.other:
            return lambda *operands: self.rounded(compute(*(each.astype(np.float32) for each in operands)), kind)
        dtype = self.dtype(kind)
        return lambda *operands: compute(*operands).astype(dtype, copy=False)

    def _extern(self, op: Operation, kind: str) -> Computes:
        symbol = str(property_of(op, "symbol")).strip('"')
        compute = _LIBRARY.get(symbol)
        if compute is None:
            raise UnsupportedError(f"{symbol} of libdevice is not known")
        return self._floating(compute, kind) if is_float(kind) else compute

    def _division(self, wanted: str, unsigned: bool) -> Computes:
        """By 0, and of the least number by -1, the result is undefined: 0, or the largest number."""
        other = self.other

        def compute(x: Array, y: Array) -> Array:
            dtype = x.dtype
            x, y = _signed(x, unsigned=unsigned), _signed(y, unsigned=unsigned)
            limits = np.iinfo(x.dtype)
            undefined = y == 0 if unsigned else (y == 0) | ((y == -1) & (x == limits.min))
            divisor = np.where(undefined, y.dtype.type(1), y)
            rest = np.fmod(x, divisor)
            quotient = (x - rest) // divisor
            apart = (rest != 0) & ((rest < 0) != (divisor < 0))
            if wanted == "floor":
                quotient = quotient - apart
            elif wanted == "ceil":
                quotient = quotient + ((rest != 0) & ~apart)
            found = rest if wanted == "rest" else quotient
            return np.where(undefined, np.array(limits.max if other else 0, found.dtype), found).astype(dtype)

        return compute

    def _to_integer(self, kind: str, *, unsigned: bool) -> Computes:
        """Beyond the integers the result is undefined: the last bits, or the nearest integer."""
        dtype = self.dtype(kind)
        target = _UNSIGNED[dtype] if unsigned else dtype
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(target).min, np.iinfo(target).max)

        def compute(x: Array) -> Array:
            whole = np.trunc(x.astype(np.float64))
            if self.other:
                inside = np.nan_to_num(whole, nan=1.0, posinf=2.0**63, neginf=-(2.0**63)).clip(float(low), float(high))
                if high > 2**53:
                    inside = np.minimum(inside, np.nextafter(float(high), 0))
                return inside.astype(target).astype(dtype)
            if unsigned and target.itemsize == 8:
                return whole.astype(np.uint64).view(np.int64)
            return whole.astype(np.int64).astype(target).astype(dtype)

        return compute

    def _bits(self, x: Array, kind: str) -> Array:
        if kind in _FLOATS:
            raw = np.ascontiguousarray(self.to_memory(x, kind))
            return raw.view(f"i{raw.dtype.itemsize}")
        return x

    def _from_bits(self, bits: Array, kind: str) -> Array:
        if kind in _FLOATS:
            return self.from_memory(np.ascontiguousarray(bits).view(memory_dtype(kind)), kind)
        return bits


def _to_bf16(x: Array) -> Array:
    """To the nearest, ties to even, kept in fp32."""
    numbers = np.ascontiguousarray(x, np.float32)
    bits = numbers.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(numbers), np.float32(np.nan), nearest.view(np.float32))


def _signed(x: Array, *, unsigned: bool = False) -> Array:
    """Integers with a sign: a boolean is -1 or 0; or without one."""
    if x.dtype == bool:
        return x.view(np.uint8) if unsigned else -x.view(np.int8)
    return x.view(_UNSIGNED[x.dtype]) if unsigned else x


def _wrapping(compute: Computes, *, unsigned: bool = False) -> Computes:
    def run(x: Array, *rest: Array) -> Array:
        return compute(*(_signed(each, unsigned=unsigned) for each in (x, *rest))).astype(x.dtype, copy=False)

    return run


def _shifted(compute: Computes, *, unsigned: bool = False) -> Computes:
    """A shift by more bits than there are is undefined; here it shifts all out."""

    def run(x: Array, count: Array) -> Array:
        value, by = _signed(x, unsigned=unsigned), _signed(count, unsigned=True).astype(np.int64)
        bits = 8 * x.dtype.itemsize
        kept = compute(value, np.minimum(by, bits - 1).astype(value.dtype))
        return np.where(by < bits, kept, 0 if unsigned or compute is np.left_shift else value >> (bits - 1)).astype(x.dtype)

    return run


def _high_half(*, unsigned: bool) -> Computes:
    def run(x: Array, y: Array) -> Array:
        bits = 8 * x.dtype.itemsize
        a, b = _signed(x, unsigned=unsigned), _signed(y, unsigned=unsigned)
        if bits < 64:
            wide = np.uint64 if unsigned else np.int64
            return ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(x.dtype)
        mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
        u, v = x.view(np.uint64), y.view(np.uint64)
        ul, uh, vl, vh = u & mask, u >> half, v & mask, v >> half
        middle = uh * vl + ((ul * vl) >> half)
        high = uh * vh + (middle >> half) + ((ul * vh + (middle & mask)) >> half)
        found = high.view(np.int64)
        return found if unsigned else found - np.where(x < 0, y, 0) - np.where(y < 0, x, 0)

    return run


def _erf(x: Array) -> Array:
    import torch

    return np.asarray(torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy())


def _fma(x: Array, y: Array, z: Array) -> Array:
    return x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)


def _away_from_zero(x: Array) -> Array:
    return np.copysign(np.floor(np.abs(x) + x.dtype.type(0.5)), x)


_FLOAT_OPERATIONS: dict[str, Computes] = {
    "arith.addf": np.add,
    "arith.subf": np.subtract,
    "arith.mulf": np.multiply,
    "arith.divf": np.divide,
    "tt.precise_divf": np.divide,
    "arith.remf": np.fmod,
    "arith.negf": np.negative,
    "arith.maxnumf": np.fmax,
    "arith.minnumf": np.fmin,
    "arith.maximumf": np.maximum,
    "arith.minimumf": np.minimum,
    "math.absf": np.abs,
    "math.exp": np.exp,
    "math.exp2": np.exp2,
    "math.expm1": np.expm1,
    "math.log": np.log,
    "math.log2": np.log2,
    "math.log10": np.log10,
    "math.log1p": np.log1p,
    "math.sqrt": np.sqrt,
    "tt.precise_sqrt": np.sqrt,
    "math.rsqrt": lambda x: 1 / np.sqrt(x),
    "math.cbrt": np.cbrt,
    "math.sin": np.sin,
    "math.cos": np.cos,
    "math.tan": np.tan,
    "math.asin": np.arcsin,
    "math.acos": np.arccos,
    "math.atan": np.arctan,
    "math.sinh": np.sinh,
    "math.cosh": np.cosh,
    "math.tanh": np.tanh,
    "math.asinh": np.arcsinh,
    "math.acosh": np.arccosh,
    "math.atanh": np.arctanh,
    "math.atan2": np.arctan2,
    "math.erf": _erf,
    "math.floor": np.floor,
    "math.ceil": np.ceil,
    "math.trunc": np.trunc,
    "math.round": _away_from_zero,
    "math.roundeven": np.rint,
    "math.copysign": np.copysign,
    "math.powf": np.power,
    "math.fpowi": np.power,
    "math.fma": _fma,
}
_LIBRARY: dict[str, Computes] = {  # of triton.language.extra.ascend.libdevice, without the suffixes of types
    "__hmf_recipf": lambda x: 1 / x,
    "__hmf_recipDh": lambda x: 1 / x,
    "__hmf_log1pf": np.log1p,
    "__hmf_log1pDh": np.log1p,
    "__hmf_reluf": lambda x: np.maximum(x, 0),
    "__hmf_reluDh": lambda x: np.maximum(x, 0),
    "__hmf_isinf": np.isinf,
    "__hmf_isnan": np.isnan,
    "__hmf_tanf": np.tan,
    "__hmf_tanDh": np.tan,
    "__hmf_atanf": np.arctan,
    "__hmf_atanDh": np.arctan,
    "__hmf_tanhf": np.tanh,
    "__hmf_tanhDh": np.tanh,
    "__hmf_powf": np.power,
    "__hmf_roundf": _away_from_zero,
}
_INTEGER_OPERATIONS: dict[str, Computes] = {
    "arith.addi": _wrapping(np.add),
    "arith.subi": _wrapping(np.subtract),
    "arith.muli": _wrapping(np.multiply),
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
    "arith.maxui": _wrapping(np.maximum, unsigned=True),
    "arith.minui": _wrapping(np.minimum, unsigned=True),
    "arith.shli": _shifted(np.left_shift),
    "arith.shrsi": _shifted(np.right_shift),
    "arith.shrui": _shifted(np.right_shift, unsigned=True),
    "math.absi": np.abs,
    "tt.mulhiui": _high_half(unsigned=True),
}
_BOOLEAN_OPERATIONS: dict[str, Computes] = {  # of numbers of one bit
    "arith.addi": np.logical_xor,
    "arith.subi": np.logical_xor,
    "arith.muli": np.logical_and,
    "arith.andi": np.logical_and,
    "arith.ori": np.logical_or,
    "arith.xori": np.logical_xor,
    "arith.maxsi": np.logical_and,
    "arith.minsi": np.logical_or,
    "arith.maxui": np.logical_or,
    "arith.minui": np.logical_and,
}
_DIVISIONS = {  # what is wanted, and whether its operands have no sign
    "arith.divsi": ("quotient", False),
    "arith.divui": ("quotient", True),
    "arith.remsi": ("rest", False),
    "arith.remui": ("rest", True),
    "arith.floordivsi": ("floor", False),
    "arith.ceildivsi": ("ceil", False),
    "arith.ceildivui": ("ceil", True),
}
_INTEGER_PREDICATES: list[tuple[Computes, bool]] = [
    (np.equal, False),
    (np.not_equal, False),
    *((compare, False) for compare in (np.less, np.less_equal, np.greater, np.greater_equal)),
    *((compare, True) for compare in (np.less, np.less_equal, np.greater, np.greater_equal)),
]


def _unordered(x: Array, y: Array) -> Array:
    return np.isnan(x) | np.isnan(y)


def _or_unordered(compare: Computes) -> Computes:
    return lambda x, y: compare(x, y) | _unordered(x, y)


_FLOAT_PREDICATES: list[Computes] = [
    lambda x, y: np.zeros(np.broadcast_shapes(x.shape, y.shape), bool),
    np.equal,
    np.greater,
    np.greater_equal,
    np.less,
    np.less_equal,
    lambda x, y: (x != y) & ~_unordered(x, y),
    lambda x, y: ~_unordered(x, y),
    _or_unordered(np.equal),
    _or_unordered(np.greater),
    _or_unordered(np.greater_equal),
    _or_unordered(np.less),
    _or_unordered(np.less_equal),
    np.not_equal,
    _unordered,
    lambda x, y: np.ones(np.broadcast_shapes(x.shape, y.shape), bool),
]
