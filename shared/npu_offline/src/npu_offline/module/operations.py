"""What an operation of a final module does: the table that timing, lint and execution read.

Toolchain 1.0.0 leaves operations of its dialect ("hivm.hir.vadd"); later ones call functions of the compiler's library
("vadd_1d_float"). Both become an `Operation`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from xdsl.dialects.builtin import DenseArrayBase, IntegerAttr, MemRefType
from xdsl.ir import Attribute, SSAValue
from xdsl.ir import Operation as Op

from .mlir import name_of, property_of, symbol_of

Pipe = Literal["S", "V", "MTE2", "MTE3", "MTE1", "M", "FIX"]
PIPES: tuple[Pipe, ...] = ("S", "V", "MTE2", "MTE3", "MTE1", "M", "FIX")
"""Scalar unit, vector unit, DMA in and out; of a cube core also L1 to L0, matrix unit and fixpipe (L0C to memory)."""

NOTHING = frozenset(
    f"hivm.hir.{name}"
    for name in (
        "set_mask_norm",
        "get_block_idx",
        "pointer_cast",
        "get_sub_block_idx",
        "set_ffts_base_addr",
        "set_ctrl",
        "debug",
    )
)
"""Operations of the dialect that issue nothing."""

BINARY = ("add", "sub", "mul", "div", "max", "min", "and", "or", "xor", "shl", "shr", "mod", "pow")
UNARY = ("exp", "ln", "sqrt", "rsqrt", "abs", "rec", "relu", "not", "tanh", "sin", "cos", "erf")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
ROUNDINGS = ("rint", "round", "floor", "ceil", "trunc", "odd", "truncwithoverflow")
REDUCTIONS = ("sum", "prod", "max", "min", "any", "all", "xori", "ori", "andi")
ATOMICS = ("none", "add", "max", "min", "and", "or", "xor")
_TYPE = r"(?:float|half|bfloat16_t|u?int\d+_t|bool)"
_AXES = r"(?:a\d?)*r(?:[ar]\d?)*"  # in a library reduction's name: r is reduced, a stays


@dataclass(frozen=True)
class Operation:
    """An instruction, or library call, and the roles of its operands.

    Attributes:
        name: as in the module.
        action: what it does: "add", "compare", "reduce", "load".
        pipe: which pipe performs it.
        reads, writes, temporaries: operands; numbers count as read.
        detail: a comparison, a kind of reduction, a rounding mode.
        axes: those that are reduced, accumulated, broadcast or permuted.
    """

    name: str
    action: str
    pipe: Pipe
    reads: Sequence[SSAValue]
    writes: Sequence[SSAValue]
    temporaries: Sequence[SSAValue] = ()
    detail: str = ""
    axes: tuple[int, ...] = ()


def operation_of(op: Op) -> Operation | None:
    """What an operation of a final module is; None for one that this table does not have."""
    if name_of(op) == "func.call":
        return _library(symbol_of(op, "callee"), list(op.operands))
    if name_of(op).startswith("hivm.hir."):
        return _dialect(op, name_of(op).removeprefix("hivm.hir."))
    return None


def _letters(axes: str) -> tuple[int, ...]:
    return tuple(axis for axis, letter in enumerate(re.findall("[ar]", axes)) if letter == "r")


def is_memory(kind: Attribute) -> bool:
    """True for memory, false for numbers."""
    return isinstance(kind, MemRefType)


# Library calls: a pattern, the pipe, roles of operands (r read, w written, t temporary, - ignored; the last one repeats),
# and what makes action, detail and axes of the pattern's groups.
_Made = tuple[str, str, tuple[int, ...]]
_CALLS: tuple[tuple[str, Pipe, str, Callable[[re.Match[str]], _Made]], ...] = (
    (rf"load_gm_to_ubuf_\dd_{_TYPE}", "MTE2", "rwrrr-", lambda m: ("load", "", ())),
    (rf"store_ubuf_to_gm_\dd_{_TYPE}", "MTE3", "rwr-", lambda m: ("store", "", ())),
    (rf"copy_ubuf_to_ubuf_\dd_{_TYPE}", "V", "rw-", lambda m: ("copy", "", ())),
    (rf"v({'|'.join(BINARY)})s?_(?:(?:vs|sv|vv)_)?\dd_{_TYPE}", "V", "rrwt", lambda m: (m[1], "", ())),
    (rf"v({'|'.join(UNARY)})_\dd_{_TYPE}", "V", "rwt", lambda m: (m[1], "", ())),
    (rf"vcast_{_TYPE}_to_{_TYPE}_\dd_with_mode", "V", "rwrt", lambda m: ("cast", "", ())),
    (rf"vcast_{_TYPE}_to_{_TYPE}_\dd_with_temp", "V", "rwtr", lambda m: ("cast", "", ())),
    (rf"vcast_{_TYPE}_to_{_TYPE}_\dd_with_overflow", "V", "rwtr", lambda m: ("cast", "wrap", ())),
    (rf"vcmps?_({'|'.join(COMPARISONS)})_(?:(?:vs|vv)_)?\dd_{_TYPE}", "V", "rrwt", lambda m: ("compare", m[1], ())),
    (rf"vsel_[vs][vs]_\dd_(?:{_TYPE}_)?{_TYPE}", "V", "rrrwt", lambda m: ("select", "", ())),
    (
        rf"(?:enablevc_)?reduce_(max|min)_with_index_(left|right)_({_AXES})_{_TYPE}",
        "V",
        "rwwt-",
        lambda m: ("arg", f"{m[1]} {m[2]}", _letters(m[3])),
    ),
    (
        rf"(?:enablevc_)?reduce_({'|'.join(REDUCTIONS)})_({_AXES})_{_TYPE}",
        "V",
        "rwt-",
        lambda m: ("reduce", m[1], _letters(m[2])),
    ),
    (rf"broadcast_scalar_{_TYPE}_to_\dd", "V", "rwt", lambda m: ("broadcast", "", ())),
    (rf"broadcast_(?:(?:first|middle|last)_axis\w*_)?\dd_{_TYPE}", "V", "rwt", lambda m: ("broadcast", "", ())),
    (rf"arange_\dd_{_TYPE}", "V", "wr", lambda m: ("arange", "", ())),
    (
        rf"cum(sum|prod)_({_AXES})(_reverse)?_{_TYPE}",
        "V",
        "rwt",
        lambda m: ("accumulate", m[1] + (m[3] or "").replace("_", " "), _letters(m[2])),
    ),
    (rf"flip_\dd_{_TYPE}", "V", "rwt", lambda m: ("flip", "", ())),
    (rf"gather_[12]d_{_TYPE}", "V", "rrwt", lambda m: ("gather", "", ())),
    (rf"sort_1d_{_TYPE}", "V", "rwtr", lambda m: ("sort", "", ())),
    (rf"interleave_1d_{_TYPE}", "V", "rrwt", lambda m: ("interleave", "", ())),
    (rf"deinterleave_channel_(\d)_from_\w+_channels_[12]d_{_TYPE}", "V", "rwt", lambda m: ("deinterleave", m[1], ())),
    (rf"transpose_2d_with_last_axis_{_TYPE}", "V", "rwt", lambda m: ("transpose", "", (1, 0))),
    (rf"transpose_3d_with_last_axis_{_TYPE}", "V", "rw", lambda m: ("transpose", "", (2, 1, 0))),
    (rf"transpose_3d_without_last_axis_{_TYPE}", "V", "rw", lambda m: ("transpose", "", (1, 0, 2))),
    (rf"nd2nz_{_TYPE}", "MTE2", "rw-", lambda m: ("nd2nz", "", ())),
    (
        rf"mma_tile_{_TYPE}_to_(?:float|int32_t)((?:_ta)?(?:_tb)?)(?:_hf32)?",
        "M",
        "rrrrrrwr",
        lambda m: ("product", m[1], ()),
    ),
    (rf"fixpipe_nz2nd_{_TYPE}_to_{_TYPE}_4d_to_2d", "FIX", "rwrrrr", lambda m: ("fixpipe", "", ())),
    (r"(?:set_l1_2d|vbrc_l1)\w*", "MTE2", "rw", lambda m: ("fill", "", ())),
    (r"sync_block_lock", "S", "r", lambda m: ("lock", "", ())),
    (r"sync_block_unlock", "S", "r", lambda m: ("unlock", "", ())),
    (r"free_lock_var", "S", "r", lambda m: ("free_lock", "", ())),
)
_PATTERNS = tuple((re.compile(pattern), pipe, roles, describe) for pattern, pipe, roles, describe in _CALLS)


def _library(name: str, operands: list[SSAValue]) -> Operation | None:
    for pattern, pipe, roles, describe in _PATTERNS:
        found = pattern.fullmatch(name)
        if found is None:
            continue
        parts: dict[str, list[SSAValue]] = {"r": [], "w": [], "t": [], "-": []}
        for position, operand in enumerate(operands):
            parts[roles[min(position, len(roles) - 1)]].append(operand)
        action, detail, axes = describe(found)
        return Operation(name, action, pipe, parts["r"], parts["w"], parts["t"], detail, axes)
    return None


# Operations of the dialect: their action, pipe, and how many operands are read and written, where no attribute says it.
_DIALECT: dict[str, tuple[str, Pipe, int, int]] = {
    **{f"v{name}": (name, "V", 2, 1) for name in BINARY},
    **{f"v{name}": (name, "V", 1, 1) for name in UNARY},
    "load": ("load", "MTE2", 1, 1),
    "store": ("store", "MTE3", 1, 1),
    "copy": ("copy", "V", 1, 1),
    "vcast": ("cast", "V", 1, 1),
    "vcmp": ("compare", "V", 2, 1),
    "vsel": ("select", "V", 3, 1),
    "vreduce": ("reduce", "V", 1, 1),
    "vbrc": ("broadcast", "V", 1, 1),
    "varange": ("arange", "V", 0, 1),
    "vcumsum": ("accumulate", "V", 1, 1),
    "vcumprod": ("accumulate", "V", 1, 1),
    "vflip": ("flip", "V", 1, 1),
    "vinterleave": ("interleave", "V", 2, 1),
    "vdeinterleave": ("deinterleave", "V", 1, 1),
    "vgather": ("gather", "V", 2, 1),
    "vsort": ("sort", "V", 1, 1),
    "vtranspose": ("transpose", "V", 1, 1),
    "nd2nz": ("nd2nz", "MTE2", 1, 1),
    "mmadL1": ("product", "M", 6, 1),
    "fixpipe": ("fixpipe", "FIX", 1, 1),
    "sync_block_lock": ("lock", "S", 1, 0),
    "sync_block_unlock": ("unlock", "S", 1, 0),
}
_DIMENSIONS = ("reduce_dims", "cum_dims", "permutation", "broadcast_dims")


def _dialect(op: Op, short: str) -> Operation | None:
    if short not in _DIALECT:
        return None
    action, pipe, reads, writes = _DIALECT[short]
    operands = list(op.operands)
    segments = property_of(op, "operandSegmentSizes")
    counts = [int(count) for count in segments.get_values()] if isinstance(segments, DenseArrayBase) else []
    axes = next((value for name in _DIMENSIONS if (value := property_of(op, name)) is not None), None)
    numbers = tuple(int(axis) for axis in axes.get_values()) if isinstance(axes, DenseArrayBase) else ()
    if short == "load":
        padding = {"PadValue": "2", "PadFirstElem": "1"}.get(_word(op, "pad_mode"), "0")
        given = counts[2:4] if len(counts) >= 4 else [0, 0]
        return Operation(
            short,
            action,
            pipe,
            operands[:1] + operands[2 : 2 + sum(given)],
            operands[1:2],
            (),
            f"{padding} {given[0]} {given[1]}",
        )
    if short == "nd2nz":
        return Operation(short, action, pipe, operands[:1], operands[1:2])
    if short == "vbrc" and "cbuf" in str(operands[1].type):
        return Operation(short, "fill", "MTE2", operands[:1], operands[1:2])
    if short == "varange":
        return Operation(short, action, pipe, operands[1:], operands[:1])
    if short == "mmadL1":
        if "xf16" in str(operands[6].type):  # how sums of fp16 are rounded is in the compilers' library
            return None
        transposed = ("_ta" if property_of(op, "a_transpose") is not None else "") + (
            "_tb" if property_of(op, "b_transpose") is not None else ""
        )
        return Operation(short, action, pipe, operands[:6] + operands[7:], operands[6:7], (), transposed)
    if short == "vreduce":
        detail = _word(op, "arith")
        if "_with_index_" in detail:
            action, detail = "arg", detail.replace("_with_index_", " ")
        return Operation(
            short, action, pipe, operands[:1], operands[1 : 1 + counts[1]], operands[1 + counts[1] :], detail, numbers
        )
    if len(counts) >= 2:
        reads, writes = counts[0], counts[1]
    rest = operands[reads + writes :]
    return Operation(
        short, action, pipe, operands[:reads], operands[reads : reads + writes], rest, _detail(op, short), numbers
    )


def _detail(op: Op, short: str) -> str:
    if short == "vcmp":
        return _word(op, "compare_mode") or "eq"
    if short == "vcast":
        return _word(op, "round_mode") + (" unsigned" if "unsigned" in str(property_of(op, "cast")) else "")
    if short == "store":
        return _word(op, "atomic_kind") or "none"
    if short == "vflip":
        return str(_number(op, "flip_axis"))
    if short == "vdeinterleave":
        return re.sub(r"\D", "", _word(op, "index_mode"))
    if short == "vsort":
        return "descending" if _number(op, "descending") else ""
    if short in ("vcumsum", "vcumprod"):
        return short.removeprefix("vcum") + (" reverse" if _number(op, "reverse") else "")
    return ""


def _word(op: Op, name: str) -> str:
    """The word in an attribute's angle brackets: "eq" of `#hivm.compare_mode<eq>`."""
    found = re.search(r"<(\w+)>", str(property_of(op, name)))
    return found[1] if found else ""


def _number(op: Op, name: str) -> int:
    value = property_of(op, name)
    return value.value.data if isinstance(value, IntegerAttr) else 0
