"""Registers of a core that decide how later instructions work, in C: the mode of the mask, flags between cores, casts.

Sources: the pages SetMaskNorm, SetCtrlSpr and aclrtFloatOverflowMode of CANN's documentation; AscendNPU-IR, InitEntryKernel.
"""

from __future__ import annotations

from collections.abc import Callable

from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Operation as Op

from ...errors import UnsupportedError
from ...module.mlir import property_of
from .writer import Writer

_OVERFLOW, _CAST_BY_INSTRUCTION = 48, 60  # bits of the control register


def _mask(writer: Writer, op: Op) -> None:
    """A bit of the mask is an element of one repeat, not a count of elements."""
    writer.lines.append("set_mask_norm();")


def _flags(writer: Writer, op: Op) -> None:
    """Where in memory the flags between cores are."""
    writer.lines.append("set_ffts_base_addr();")


def _control(writer: Writer, op: Op) -> None:
    """A bit of the control register, where it keeps the machine's numbers: infinity and NaN stay what they are.

    Raises:
        UnsupportedError: it changes them, or what it changes is not known.
    """
    number, value = property_of(op, "idx"), property_of(op, "enable")
    assert isinstance(number, IntegerAttr)
    assert isinstance(value, IntegerAttr)
    bit, is_set = number.value.data, bool(value.value.data)
    if bit != _CAST_BY_INSTRUCTION and (bit, is_set) != (_OVERFLOW, True):
        raise UnsupportedError(f"execution does not know bit {bit} of the control register as {int(is_set)}")


CHIP_STATE: dict[str, Callable[[Writer, Op], None]] = {
    "hivm.hir.set_mask_norm": _mask,
    "hivm.hir.set_ffts_base_addr": _flags,
    "hivm.hir.set_ctrl": _control,
}
"""By operation: the function that writes it."""
