"""The schema of a registered operator, from the records of its arguments. Imports torch; `npu_tiling` itself does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_type_hints

import torch
from torch import Tensor

_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[Tensor]: "Tensor[]",
    Sequence[bool]: "bool[]",
    bool: "bool",
    int: "int",
    int | None: "int?",
    float: "float",
    float | None: "float?",
    str: "str",
    torch.dtype | None: "ScalarType?",
}


def schema(*records: type[tuple[object, ...]], symbolic: bool = False) -> str:
    """The arguments of an operator: the fields of NamedTuples, in their order.

    Args:
        records: what the operator's arguments are, record after record.
        symbolic: whether a compiler may keep an int unknown, as it keeps sizes.
    """
    fields = {name: kind for record in records for name, kind in get_type_hints(record).items()}
    types = {**_TYPES, int: "SymInt"} if symbolic else _TYPES
    return ", ".join(f"{types[kind]} {name}" for name, kind in fields.items())
