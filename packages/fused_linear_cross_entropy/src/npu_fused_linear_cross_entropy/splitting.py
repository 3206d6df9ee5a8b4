"""How many tokens, and how many columns of the vocabulary, have logits in memory at a time.

Each chunk of tokens reads the weight and adds to its gradient, so it must be long enough for matrix products to take longer
than that traffic; longer chunks only take memory. With T tokens a product with the weight does 2 T H V operations, and the
one that adds to the weight's gradient moves 2 H V elements of it:

    T = OVERLAP * (operations per second) / (bytes per second) * (bytes of an element)

but no more than the memory budget allows.

More tokens take chunks of the vocabulary or of tokens. With chunks of the vocabulary the gradient needs all logits a second
time. The first case that holds is taken:

    all logits may be kept (`Demand.kept_bytes`) and fit, in x's dtype, in the memory of the weight's gradient (in equal
    dtypes: tokens <= H): chunks of the vocabulary, whose logits are kept there; no chunk adds to another chunk's result
    the budget allows at least three eighths of T tokens (`_MIN_CHUNK_SHARE`): chunks of tokens
    else: chunks of the vocabulary, whose logits are computed twice
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import ceil

from npu_tiling import Device
from npu_tiling.budget.arithmetic import FP32

from .chunks import Chunks, pitch
from .partition import UNIT, equally, evenly, exactly, joined, rounded

MIB = 2**20
DEFAULT_BUDGET = {"cuda": 800 * MIB, "ascend": 384 * MIB, "cpu": 256 * MIB}
_MAX_FP32_SUMS = 600 * MIB  # fp32 sums beside a default budget
_OVERLAP = 2.75  # at this many times the break-even length, chunking costs no measurable time
# CUDA: an H200, 790 TFLOP/s and 4.28 TB/s. Ascend: a default for chips whose figures are not published.
_OPERATIONS_PER_BYTE = {"cuda": 185.0, "ascend": 295.0, "cpu": 185.0}
_KEPT_BUDGET = 128 * MIB  # for a chunk of columns where logits are kept: more was not faster on an H200
_MIN_CHUNK_SHARE = 0.375  # of T: with fewer tokens, weight traffic costs more than computing all logits twice
_MIN_COLUMNS = 512


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The memory that a loss asks for, in sizes and bytes.

    Attributes:
        tokens, width, vocabulary: N, H and V.
        logit_bytes: bytes of a logit; 0 if none is in memory.
        dweight_bytes: bytes of an element of the sums that become the weight's gradient; 0 if it is not wanted.
        dx: whether the gradient of x is wanted, in a dtype narrower than its sums.
        kept_bytes: bytes of a logit that is kept for the gradient; 0 if none may be.
        scaled_bytes: bytes of a token's row of x times a factor, and of its sums of dx.
        sum_bytes: bytes of a token's partial sums, statistics and coefficients.
        length_factor: chunks have this many times T tokens.
    """

    tokens: int
    width: int
    vocabulary: int
    logit_bytes: int
    dweight_bytes: int
    dx: bool
    kept_bytes: int
    scaled_bytes: int = 0
    sum_bytes: int = 0
    length_factor: int = 1


def wanted_tokens(dweight_bytes: int, device: Device | None) -> int:
    """The shortest chunk of tokens that hides the traffic of the weight behind matrix products."""
    kind = "cpu" if device is None else device.kind
    ratio = _OPERATIONS_PER_BYTE[kind]
    if device is not None and device.kind == "ascend" and device.bandwidth and device.matrix_flops:
        ratio = device.matrix_flops / device.bandwidth
    # A product without a gradient reads each weight once, for 2 T operations; one that adds to the weight's gradient reads
    # and writes an element for them.
    return rounded(_OVERLAP * ratio * (dweight_bytes or 1))


def split(demand: Demand, chunk_tokens: int | None, memory_budget: int | None, device: Device | None) -> Chunks:
    """Chunks for a demand; `memory_budget`: bytes for logits and sums, without inputs and gradients."""
    tokens, vocabulary = demand.tokens, demand.vocabulary
    budget = budget_of(memory_budget, device)
    row = _row_bytes(demand)
    everything = (slice(0, vocabulary),)
    if chunk_tokens is not None:
        if memory_budget is None or min(chunk_tokens, tokens) * row <= budget:
            return Chunks(tokens=exactly(tokens, chunk_tokens), columns=everything, why="chunk_tokens was given")
        return _columns(demand, budget, chunk_tokens, f"of the {chunk_tokens} that were given")
    wanted = wanted_tokens(demand.dweight_bytes, device) * demand.length_factor if demand.logit_bytes else tokens
    affordable = budget // row
    if tokens <= min(affordable, wanted):
        why = f"the logits of all tokens fit in {_mib(budget)}, and {wanted} tokens hide the weight's traffic"
        return Chunks(tokens=exactly(tokens, tokens or 1), columns=everything, why=why)
    kept = _kept(demand, min(budget, _KEPT_BUDGET)) if demand.kept_bytes else None
    if kept is not None:
        return kept
    if affordable >= min(tokens, wanted):
        why = f"chunks of at most {wanted} tokens hide the weight's traffic behind products"
        return Chunks(tokens=evenly(tokens, wanted), columns=everything, why=why)
    if affordable >= wanted * _MIN_CHUNK_SHARE or not demand.logit_bytes:  # chunks of columns would save logits alone
        longest = affordable // UNIT * UNIT or affordable or UNIT
        parts = evenly(tokens, longest)
        why = (
            f"{_mib(budget)} hold {affordable} tokens of the {wanted} that would hide the weight's traffic:"
            f" {len(parts)} chunks of nearly equal length"
        )
        return Chunks(tokens=parts, columns=everything, why=why)
    least = ceil(wanted * _MIN_CHUNK_SHARE)
    return _columns(demand, budget, None, f"and a chunk of whole rows has at least {least}")


def _columns(demand: Demand, budget: int, chunk_tokens: int | None, needed: str) -> Chunks:
    """Chunks of columns, for as many tokens at a time as the budget allows; `needed`: how many rows are too many for it."""
    tokens = demand.tokens if chunk_tokens is None else min(chunk_tokens, demand.tokens)
    columns = pitch(min(_MIN_COLUMNS, demand.vocabulary))
    sums = FP32 * demand.width if demand.dx else 0
    if chunk_tokens is None:
        affordable = max(budget // (sums + columns * demand.logit_bytes), UNIT)
        chunks = evenly(tokens, max(UNIT, affordable // UNIT * UNIT) if affordable < tokens else tokens)
        tokens = min(tokens, max(chunk.stop - chunk.start for chunk in chunks))
    else:
        chunks = exactly(demand.tokens, chunk_tokens)
    longest = max(columns, (budget // tokens - sums) // demand.logit_bytes // UNIT * UNIT)
    columns_at_a_time = equally(demand.vocabulary, longest)
    why = f"{_mib(budget)} hold {budget // _row_bytes(demand)} whole rows of logits, {needed}"
    return Chunks(tokens=chunks, columns=columns_at_a_time, why=why)


def split_and_sum(
    demand: Demand, chunk_tokens: int | None, memory_budget: int | None, device: Device | None
) -> tuple[Chunks, bool]:
    """Chunks as from `split`, and whether the weight's gradient is summed in fp32 although its dtype is narrower.

    It is if several chunks of tokens add to it, and a given budget holds fp32 sums and logits together. The default budget
    is for logits alone: sums that take less than it, and less than 600 MiB, come beside it.
    """
    narrow = split(demand, chunk_tokens, memory_budget, device)
    if len(narrow.tokens) > 1 and 0 < demand.dweight_bytes < FP32:
        sums = demand.vocabulary * demand.width * FP32
        left = None if memory_budget is None else memory_budget - sums
        room = budget_of(memory_budget, device)
        if sums < (min(room, _MAX_FP32_SUMS) if memory_budget is None else room):
            wide = split(dataclasses.replace(demand, dweight_bytes=FP32), chunk_tokens, left, device)
            if len(wide.columns) == 1 or wide.kept:
                return wide, True
    return narrow, False


def _row_bytes(demand: Demand) -> int:
    """Bytes of a whole row of logits, its row of scaled x and its partial sums."""
    return pitch(demand.vocabulary) * demand.logit_bytes + demand.scaled_bytes + demand.sum_bytes


def _mib(count: int) -> str:
    return f"{count / MIB:.4g} MiB"


def budget_of(memory_budget: int | None, device: Device | None) -> int:
    """Bytes for logits and sums: those that were given, or the default."""
    return DEFAULT_BUDGET["cpu" if device is None else device.kind] if memory_budget is None else memory_budget


def _kept(demand: Demand, budget: int) -> Chunks | None:
    """Chunks of columns of all tokens, whose logits are kept; None if they, or the sums of dx, have no memory."""
    tokens, vocabulary = demand.tokens, demand.vocabulary
    budget -= tokens * demand.sum_bytes
    longest = budget // (tokens * demand.logit_bytes) // UNIT * UNIT
    while longest >= UNIT and tokens * (longest * demand.logit_bytes + ceil(vocabulary / longest) * FP32) > budget:
        longest -= UNIT  # room for the row maximum subtracted from each chunk
    if longest < min(_MIN_COLUMNS, vocabulary):
        return None
    together = demand.logit_bytes // demand.kept_bytes  # kept chunks that one chunk of logits has room for
    columns = equally(vocabulary, longest)
    kept = joined(columns, together)
    if not fits(demand, kept[-1]):  # row padding makes the last part too big: keep the unaligned tail separately
        whole = vocabulary // UNIT * UNIT
        rest = (slice(whole, vocabulary),)
        columns = (*equally(whole, longest), *rest)
        kept = (*joined(columns[:-1], together), *rest)
    room = tokens * pitch(columns[0].stop) * demand.logit_bytes
    sums = min(tokens, UNIT) * demand.width * FP32 if demand.dx else 0
    if len(columns) == 1 or sums > room or not all(fits(demand, part) for part in kept[:-1]):
        return None
    return Chunks(
        tokens=(slice(0, tokens),), columns=columns, kept=kept, why="a number for each logit fits in the weight's gradient"
    )


def fits(demand: Demand, part: slice) -> bool:
    """Whether the logits of a part can be kept in its rows of the weight's gradient."""
    width = part.stop - part.start
    return demand.tokens * pitch(width) * demand.kept_bytes <= width * demand.width * demand.dweight_bytes
