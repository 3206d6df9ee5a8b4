"""For tests of tilings: compares the bytes that a tiling declares with the plans of all compilers.

The widest tile that a tiling declares to fit must fit with every toolchain that compiles for the chip.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import npu_tiling
from npu_offline import VERSIONS, LaunchRecord, compile_kernel, supported

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

FAMILIES = ("Ascend910B4", "Ascend950PR_957b")  # a chip of each


def widest(declared: Callable[[int], int], soc: str, *, step: int = 16, first: int = 0, most: int = 2**17) -> int:
    """The largest of first + step, first + 2 * step, ... below `most` whose declared bytes fit on the chip."""
    widths = range(first + step, most, step)
    place = bisect.bisect_right(widths, npu_tiling.soc(soc).ub_bytes, key=declared)
    if not 0 < place < len(widths):
        raise ValueError(f"declared bytes say of no width below {most} that it is the widest that fits")
    return widths[place - 1]


def fits_everywhere(
    record: LaunchRecord,
    constants: Mapping[str, object],
    soc: str,
    *,
    options: Mapping[str, object] | None = None,
    kernel: JITFunction | None = None,
) -> bool:
    """Whether every toolchain for the chip compiles a recorded kernel with other constants.

    Args:
        record: a launch, which has the kernel, the types of its arguments and its constants.
        constants: those that differ.
        soc: a name of `npu_tiling.SOCS`.
        options: compiler options; None: the record's.
        kernel: another kernel with the same arguments; None: the record's.
    """
    return all(
        compile_kernel(
            kernel or record.kernel,
            record.signature,
            {**record.constants, **constants},
            soc=soc,
            toolchain=toolchain,
            options=record.options if options is None else options,
        ).fits
        for toolchain in VERSIONS
        if supported(soc, toolchain)
    )
