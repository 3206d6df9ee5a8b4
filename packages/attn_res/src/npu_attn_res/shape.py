"""What the tiling of a launch depends on: sizes and options, and no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Task(str, Enum):  # noqa: UP042 (StrEnum is Python 3.11's)
    """What a launch computes."""

    FORWARD = "forward"
    LAYERS = "forward of layers"  # on CUDA
    BACKWARD = "backward"
    MERGE = "merge"
    MERGE_BACKWARD = "merge backward"
    NORM_BACKWARD = "norm backward"
    PRODUCTS = "products"
    WEIGHTED_SUM = "weighted sum"
    GRADIENT = "gradient"


COLUMN_TASKS = (Task.PRODUCTS, Task.WEIGHTED_SUM, Task.GRADIENT)  # their programs take blocks of columns, the others' rows


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One launch.

    Attributes:
        task: what is computed.
        width: elements of a row.
        itemsize: bytes of an element: of the tensor with the widest elements that a tile has rows of.
        layers: rows of one token that are computed at once.
        row_stride: the largest distance, in elements, from one row to the next in the tensors that are given.
        n_sources: rounded up to a multiple of a power of two; 0 on Ascend, and where the tiling does not depend on it.
        prefix: whether a prefix is one more source, of any dtype.
        normalised: forward: whether the RMSNorm of h is stored too.
        fp32_dh: backward: whether the gradient of h is fp32, whatever the sources are; tilings for CUDA depend on it.
        by_token: whether statistics are [tokens, sources] instead of [sources, tokens].
        aligned: on CUDA, whether every entry of a table is a multiple of 16; True too where tensors are arguments.
    """

    task: Task
    width: int
    itemsize: int
    layers: int = 1
    row_stride: int = 0
    n_sources: int = 0
    prefix: bool = False
    normalised: bool = False
    fp32_dh: bool = False
    by_token: bool = False
    aligned: bool = False

    @property
    def takes_columns(self) -> bool:
        return self.task in COLUMN_TASKS

    def __str__(self) -> str:
        """The name that warnings have for it."""
        return f"attn_res {self.task.value}{', with a prefix' if self.prefix else ''}"
