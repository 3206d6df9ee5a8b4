"""Sources as kernels find them: pointers and strides. Nothing is stacked or copied where rows lie at one stride.

Kernels for CUDA take a pointer to each of a few blocks. Else a list is reached from its first block through a table of
distances, which launches of the plan fill: what they write follows from addresses, which a run knows (`Distance`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.budget import here, power_of_two
from npu_tiling.calls import Empty
from npu_tiling.doctor import version
from npu_tiling.launch import CountTiling
from npu_tiling.plans import Distance, Given, Plan, Reached, Slot
from npu_tiling.rows import row_stride

from .ascend import tiling as ascend
from .cuda import tiling as cuda
from .kernels import attn_res_table_kernel
from .records import Backward, Forward
from .shape import Shape, TokenTiling

_NO_GRADIENT = -(2**63)  # as in formula.py
_ENTRIES = 16  # entries of a table that one launch writes
_MAX_ARGUMENTS = 32  # pointers in a tuple


class Pointers(NamedTuple):
    """Where a kernel finds several tensors.

    Attributes:
        base: what it is given for the first tensor; None where there is none.
        table: int64, elements from there to each tensor; None where there is one tensor, or `others` are given.
        aligned: every entry of the table is a multiple of 16.
        others: for a kernel for CUDA, the tensors after the first. The first is repeated until there is a power of two of
            them all: a kernel is compiled for each length, and few lengths occur then. None: the table, or a stride, leads
            to them.
        needed: bit i is set where tensor i is given. Where it is not, the first given one stands in its place.
    """

    base: Given
    table: Slot | None
    aligned: bool
    others: tuple[Slot, ...] | None = None
    needed: int = 0


NOWHERE = Pointers(None, None, aligned=True)


class Sources(NamedTuple):
    """N blocks of T rows [D].

    Attributes:
        blocks: one slot [N, ..., D] where `stacked`, or N slots [..., D]; rows at one stride.
        stacked: whether they are one.
        gradients: of the blocks, contiguous; None where not needed.
        pointers, gradient_pointers: to the blocks, and to their gradients; without a table block i lies at i * s_block.
        n_blocks, n_tokens, width: N, T and D.
        s_block, s_token: elements from one block, and from one row, to the next.
    """

    blocks: Sequence[Slot]
    stacked: bool
    gradients: Sequence[Slot | None]
    pointers: Pointers
    gradient_pointers: Pointers
    n_blocks: int
    n_tokens: int
    width: int
    s_block: int
    s_token: int

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].dtype

    @property
    def reads(self) -> dict[str, Any]:
        """What kernels read of them, by their parameter."""
        return {"p_v": self.pointers.base, "p_table": self.pointers.table}

    @property
    def sizes(self) -> dict[str, int]:
        """What kernels ask of all blocks, by their parameter."""
        return {"n_tokens": self.n_tokens, "s_block": self.s_block, "s_token": self.s_token}

    def in_tables(self, p: Plan) -> Sources:
        """The same, found through tables: for kernels that take no tuple of pointers."""
        if self.pointers.others is None:
            return self
        pointers, gradient_pointers = _in_tables(p, self.blocks, self.gradients)
        return self._replace(pointers=pointers, gradient_pointers=gradient_pointers)


def sources_of(
    p: Plan,
    blocks: Sequence[Any],
    gradients: Sequence[Slot | None] = (),
    *,
    stacked: bool,
    in_tables: bool = False,
) -> Sources:
    """One slot [N, ..., D], or N slots [..., D], copied where rows do not lie at one stride, the same for all blocks.

    `in_tables`: the kernels take no tuple of pointers.
    """
    if stacked:
        read = [at_one_stride(p, blocks[0], 1)]
    else:
        strides = {row_stride(block.shape, block.strides) for block in blocks}
        alike = len(strides) == 1 and None not in strides
        read = [block if alike else p.contiguous(block) for block in blocks]
    takes_tuples = p.chip.kind == "cuda" and not in_tables and _has_tuples()
    if takes_tuples and 1 < len(blocks) <= _MAX_ARGUMENTS:
        pointers = _as_arguments(read), _as_arguments(gradients)
    else:
        pointers = _in_tables(p, read, gradients)
    first, of_block = read[0], int(stacked)
    shape = first.shape[of_block:]
    s_token: Any = row_stride(shape, first.strides[of_block:])
    return Sources(
        blocks=read,
        stacked=stacked,
        gradients=gradients,
        pointers=pointers[0],
        gradient_pointers=pointers[1],
        n_blocks=first.shape[0] if stacked else len(blocks),
        n_tokens=prod(shape[:-1]),
        width=shape[-1],
        s_block=first.strides[0] if stacked else 0,
        s_token=s_token,
    )


def sources_with_prefix(
    p: Plan, call: Forward | Backward, gradients: Sequence[Slot | None] = ()
) -> tuple[Sources, Slot | None]:
    """The blocks of a call and its prefix. Where there is no block to read, the prefix is in their place too."""
    prefix: Any = None if call.prefix is None else at_one_stride(p, call.prefix)
    if prefix is not None and not (call.blocks and call.blocks[0].numel()):
        return sources_of(p, [prefix], gradients, stacked=False), prefix
    return sources_of(p, call.blocks, gradients, stacked=call.stacked), prefix


def at_one_stride(p: Plan, rows: Any, from_dimension: int = 0) -> Any:
    """The slot, or a copy where its rows do not lie at one stride; None for None.

    `from_dimension`: rows of the slot's first entry along the dimensions before.
    """
    if rows is None or row_stride(rows.shape[from_dimension:], rows.strides[from_dimension:]) is not None:
        return rows
    return p.contiguous(rows)


def strides_of(**rows: Any) -> dict[str, Any]:
    """`row_stride` of slots, 0 for None, by the kernel's parameter that asks for it: `s_` and the name."""
    found = {}
    for name, each in rows.items():
        found[f"s_{name}"] = 0 if each is None else row_stride(each.shape, each.strides)
    return found


def whole_rows(p: Plan, shape: Shape) -> TokenTiling | None:
    """The tiling of a launch that takes whole rows, decided in the plan under the shape's name; None where none fit."""
    chosen = choose(shape, p.chip)
    tiling = None if chosen is None else p.decide(str(shape), chosen)
    return tiling if tiling is not None and tiling.has_whole_rows else None


def choose(shape: Shape, chip: Device) -> TokenTiling | None:
    """The way and the blocks of a launch; None where it takes whole rows and none fit on chip.

    Raises:
        UnifiedBufferError: it takes blocks of columns, and not even the smallest fits.
    """
    return cuda.choose(shape, chip) if chip.kind == "cuda" else ascend.choose(shape, chip)


def rounded_up_sources(n_sources: int, chip: Device) -> int:
    """`Shape.n_sources`: up to 8 a power of two, above 8 a multiple of an eighth of one, so that few kernels are compiled.

    0 on Ascend, whose tilings do not depend on it.
    """
    if chip.kind != "cuda":
        return 0
    step = max(1, power_of_two(max(1, n_sources)) // 8)
    return ceil(n_sources / step) * step if n_sources > 8 else power_of_two(max(1, n_sources))


def widest(*rows: Any) -> int:
    """Bytes of an element of the slot with the largest elements, which a tile is sized for; None counts as none."""
    return max(each.dtype.itemsize for each in rows if each is not None)


@functools.lru_cache(maxsize=1)
def _has_tuples() -> bool:
    """Whether Triton takes tuples of pointers: from 3.4 on. A Triton installed under another name is assumed to."""
    installed = version("triton")
    return installed is None or tuple(map(int, installed.split(".")[:2])) >= (3, 4)


def _as_arguments(tensors: Sequence[Slot | None]) -> Pointers:
    """Pointers for a kernel that takes a tuple of them."""
    first = next((tensor for tensor in tensors if tensor is not None), None)
    if first is None:
        return NOWHERE
    present = [first if tensor is None else tensor for tensor in tensors]
    padding = [first] * (power_of_two(len(tensors)) - len(tensors))
    needed = sum(1 << i for i, tensor in enumerate(tensors) if tensor is not None)
    return Pointers(present[0], None, aligned=True, others=(*present[1:], *padding), needed=needed)


def _in_tables(p: Plan, sources: Sequence[Slot], gradients: Sequence[Slot | None]) -> tuple[Pointers, Pointers]:
    """Pointers to sources and to their gradients; `NOWHERE` where no gradient is needed.

    Both tables are one tensor, so that those of up to 8 tensors take one launch.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    if len(sources) == 1:
        to = Pointers(present[0], None, aligned=False) if present and present[0].numel() else NOWHERE
        return Pointers(sources[0], None, aligned=False), to
    begin = len(sources) + len(sources) % 2  # of the gradients' table, which Triton takes to be aligned to 16 bytes
    length = begin + len(gradients) if present else len(sources)
    table: Any = p.new(Empty((length + -length % _ENTRIES,), torch.int64))
    entries: list[int | Distance] = [Distance(sources[0], each) for each in sources]
    if present:
        entries += [0] * (begin - len(sources))
        entries += [_NO_GRADIENT if each is None else Distance(present[0], each) for each in gradients]
    _fill(p, table, entries)
    aligned = p.chip.kind == "cuda" and p.aligned_lists  # memory that the plan makes is aligned
    at = Pointers(Reached(sources), table, aligned)
    if not present:
        return at, NOWHERE
    return at, Pointers(Reached(present), p.view(table, (table.shape[0] - begin,), (1,), begin), aligned)


def _fill(p: Plan, table: Slot, entries: Sequence[int | Distance]) -> None:
    """Adds launches that write a table from their arguments.

    For a copy from the host the host would wait, and no graph could capture it.
    """
    name, padded = "table of distances", [*entries, *[0] * (table.shape[0] - len(entries))]
    why = "a table has few entries: one program writes 16 of them"
    p.decide(name, CountTiling(device=p.chip, blocks=(), warps=1, why=why, decided_at=here()))
    for first in range(0, len(padded), _ENTRIES):
        written = padded[first : first + _ENTRIES]
        sizes = {"first": first} | {f"o_{i}": each for i, each in enumerate(written)}
        p.launch(attn_res_table_kernel, name, 1, reads={}, writes={"p_table": table}, sizes=sizes)
