"""Expands a matrix product, one call or operation of the final module, to the many instructions that a cube core issues.

The expansion is that of the compilers' library (`mma_tile` of meta_op.aic, and of `AscendNPU-IR`,
bishengir/lib/Template/lib/Cube/LocalMmad.cpp): L0A and L0B are used as two halves in turn, k is split into parts that fit a
half for both operands, and flags between MTE1 and M order the turns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Operation, SSAValue

from ..errors import UnsupportedError
from ..module.mlir import name_of, property_of, symbol_of
from ..module.operations import Pipe
from ..module.shapes import Dimension, itemsize_of, shape_of, space_of
from . import cube_costs
from .instructions import CubeStep, Item, SetFlag, WaitFlag

_CALL = re.compile(r"mma_tile_\w+?_to_(?:float|int32_t)(_ta)?(_tb)?(_hf32)?$")
_NONE = -1
_SIZES, _FLAGS = 3, 7  # scalar operands: whether results are overwritten, then m, k and n, then what concerns flags


@dataclass(frozen=True)
class Product:
    """A matrix product.

    Attributes:
        expand: from numbers, which `arguments` stand for, to all that the scalar unit issues.
        arguments: m of the first operand in L1 and n of the second, m of the result in L0C; m, k and n; the flags of MTE2
            that MTE1 waits for before it takes either operand, those it sets after, the number of the product among those
            of its loop, and the flags by which M frees either half of L0; -1 for none.
    """

    expand: Callable[..., Sequence[Item]]
    arguments: Sequence[Dimension]


def deciding_operands(op: Operation) -> Sequence[SSAValue]:
    """The scalar operands of a matrix product that decide what it issues; empty for other operations."""
    return _numbers(op)[1 : 1 + _SIZES + _FLAGS] if _is_product(op) else ()


def product_of(op: Operation) -> Product | None:
    """A matrix product by its operation or call; None for anything else.

    Raises:
        UnsupportedError: its flags are not what this expands.
    """
    if not _is_product(op):
        return None
    name = symbol_of(op, "callee") or name_of(op).removeprefix("hivm.hir.")
    call = _CALL.match(name)
    if name_of(op) == "func.call" and call is None:
        raise UnsupportedError(f"the time model does not know the operands of {name}")
    flags = call.groups() if call else [property_of(op, each) for each in ("a_transpose", "b_transpose", "enable_HF32")]
    transposed_a, transposed_b, hf32 = (flag is not None for flag in flags)
    memories = [operand for operand in op.operands if space_of(operand.type) is not None]
    numbers = _numbers(op)
    flag_numbers: list[Dimension] = [(value,) for value in numbers[1 + _SIZES : 1 + _SIZES + _FLAGS]]
    if any(not _is_zero(value) for value in numbers[1 + _SIZES + _FLAGS :]) or property_of(op, "unit_flag_mode") is not None:
        raise UnsupportedError(f"the time model does not know {name} with unit flags")
    a, b = (shape_of(memory) for memory in memories[:2])
    c = shape_of(next(memory for memory in memories if space_of(memory.type) == "l0c"))
    # Fractals: k1 m1 m0 k0 and n1 k1 k0 n0, transposed m1 k1 k0 m0 and k1 n1 n0 k0; results n1 m1 m0 n0.
    outer, inner = (0, 3), (1, 2)
    sizes = [
        _size(a, outer if transposed_a else inner),
        _size(b, inner if transposed_b else outer),
        _size(c, inner),
        *((value,) for value in numbers[1 : 1 + _SIZES]),
    ]
    itemsize = int(itemsize_of(memories[0].type))

    def expand(*values: int) -> Sequence[Item]:
        whole = [int(value) for value in values]
        return _expanded(name, itemsize, hf32, whole[:6], _Flags(*whole[6:]))

    return Product(expand, [*sizes, *(flag_numbers or [(_NONE,)] * _FLAGS)])


@dataclass(frozen=True)
class _Flags:
    """The flags of a product, as in `Product.arguments`."""

    filled_a: int
    filled_b: int
    taken_a: int
    taken_b: int
    turn: int
    free_0: int
    free_1: int


def _is_product(op: Operation) -> bool:
    return name_of(op) == "hivm.hir.mmadL1" or symbol_of(op, "callee").startswith("mma_tile_")


def _numbers(op: Operation) -> list[SSAValue]:
    return [operand for operand in op.operands if space_of(operand.type) is None]


def _is_zero(value: SSAValue) -> bool:
    number = property_of(value.owner, "value") if isinstance(value.owner, Operation) else None
    return isinstance(number, IntegerAttr) and number.value.data == 0


def _size(shape: Sequence[Dimension], axes: tuple[int, int]) -> Dimension:
    return (*shape[axes[0]], *shape[axes[1]])


def _expanded(name: str, itemsize: int, hf32: bool, sizes: Sequence[int], flags: _Flags) -> Sequence[Item]:
    a_m, b_n, c_m, m, k, n = sizes
    unit = max(cube_costs.FRACTAL, cube_costs.FRACTAL_BYTES // itemsize)
    widest = -(-max(a_m, b_n) // unit) * unit
    length = cube_costs.L0_BYTES // 2 // itemsize // max(1, widest) // unit * unit
    if length == 0:
        raise UnsupportedError(f"the time model cannot cut {name}: {widest} rows or columns do not fit half of L0")
    parts = tuple(min(length, k - first) for first in range(0, k, length)) if m and n else ()
    first_half = max(0, flags.turn) * len(parts) % 2
    return _items(name, itemsize, hf32, c_m, n, parts, replace(flags, turn=first_half))


def _flag(kind: type[SetFlag] | type[WaitFlag], source: Pipe, target: Pipe, event: int) -> list[Item]:
    return [] if event == _NONE else [kind(source, target, event)]


@lru_cache(maxsize=1024)
def _items(name: str, itemsize: int, hf32: bool, m: int, n: int, parts: tuple[int, ...], flags: _Flags) -> Sequence[Item]:
    """The instructions of a product of m x n results, k cut into `parts`; `flags.turn` is the half of L0 that is first."""
    if not parts:
        waits = _flag(WaitFlag, "MTE2", "MTE1", flags.filled_a) + _flag(WaitFlag, "MTE2", "MTE1", flags.filled_b)
        return waits + _flag(SetFlag, "MTE1", "MTE2", flags.taken_a) + _flag(SetFlag, "MTE1", "MTE2", flags.taken_b)
    given = (flags.free_0, flags.free_1)
    freed = [half if event == _NONE else event for half, event in enumerate(given)]
    own = [half for half, event in enumerate(given) if event == _NONE]  # the call's own flags, which leave nothing behind
    items: list[Item] = [SetFlag("M", "MTE1", half) for half in own]
    rounded_n = -(-n // cube_costs.FRACTAL) * cube_costs.FRACTAL
    for number, k in enumerate(parts):
        event = freed[(flags.turn + number) % 2]
        is_first, is_last = number == 0, number == len(parts) - 1
        rounded_k = -(-k * itemsize // cube_costs.FRACTAL_BYTES) * cube_costs.FRACTAL_BYTES
        a_bytes, b_bytes = m * rounded_k, rounded_n * rounded_k
        items += _flag(WaitFlag, "MTE2", "MTE1", flags.filled_a if is_first else _NONE)
        items.append(WaitFlag("M", "MTE1", event))
        items.append(CubeStep("L1 to L0A", "MTE1", a_bytes, *cube_costs.to_l0a(a_bytes)))
        items += _flag(SetFlag, "MTE1", "MTE2", flags.taken_a if is_last else _NONE)
        items += _flag(WaitFlag, "MTE2", "MTE1", flags.filled_b if is_first else _NONE)
        items.append(CubeStep("L1 to L0B", "MTE1", b_bytes, *cube_costs.to_l0b(b_bytes)))
        items += _flag(SetFlag, "MTE1", "MTE2", flags.taken_b if is_last else _NONE)
        items += [SetFlag("MTE1", "M", event), WaitFlag("MTE1", "M", event)]
        items.append(CubeStep(name, "M", m * n * k, *cube_costs.product(m, n, k, itemsize, hf32)))
        items.append(SetFlag("M", "MTE1", event))
    return items + [WaitFlag("M", "MTE1", half) for half in own]
