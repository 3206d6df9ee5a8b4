"""What decisions about a look-up and its gradient depend on: sizes and the device, and no tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from npu_tiling import Device

NO_ROW = -1  # in place of the padding row where there is none

NO_ID = -(2**63)  # in place of the padding row where none is left out of its bag


class Shape(NamedTuple):
    """A gradient: a tuple, which every call makes and looks up.

    Attributes:
        indices: how many, and so rows of dy.
        rows: of the table, or of the shard at hand.
        width: elements of a row.
        device: whose kernels run.
    """

    indices: int
    rows: int
    width: int
    device: Device


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """Rows that a kernel moves or adds.

    Attributes:
        width: elements of a row.
        itemsize: bytes of an element.
        device: whose kernels run.
    """

    width: int
    itemsize: int
    device: Device = field(repr=False)
