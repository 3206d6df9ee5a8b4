"""The plans of a loss (ways.py: a function for each way), its kernels with their launches, and its definition.

Here: records of a loss's slots, which are facts of its targets, chunks of logits and gradients at the targets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from npu_tiling.plans import Plan

from ..call import Options
from ..head import part
from ..tiling import ChunkKernel, ChunkShape, chunk_tiling

PLANS_FOR_CALLERS = True  # so that `explain` names the line that calls a function of this module (npu_tiling/plans.py)


class TargetFacts(NamedTuple):
    """Columns, weights and factors of rows, which follow from the targets alone.

    Attributes:
        columns: int32 [tokens], the target's column; NO_COLUMN, IGNORED.
        target_weight: [tokens] or None: the class weight of the target.
        factors: begins with the factor of losses, that of z-losses, the sum of the class weights, how many rows are counted.
        gradient_factors: the same for the gradient.
        unfinished: [3], factors that the gradients of x, weight and bias still lack; None for 1.
    """

    columns: Any
    target_weight: Any
    factors: Any
    gradient_factors: Any
    unfinished: Any

    def part(self, p: Plan, tokens: slice) -> TargetFacts:
        """The facts of a chunk of tokens."""
        return self._replace(columns=part(p, self.columns, tokens), target_weight=part(p, self.target_weight, tokens))


class Chunk(NamedTuple):
    """Logits that are in memory.

    Attributes:
        logits: [rows, columns].
        columns: which of the weight's rows they belong to.
        target: int32 [rows], a column of the whole vocabulary, or negative.
        first: the column of the whole vocabulary that the first one is.
        bias: [columns], which kernels add to raw products; None where there is none.
        class_weight: [columns]; None where there are none.
    """

    logits: Any
    columns: slice
    target: Any
    first: int
    bias: Any = None
    class_weight: Any = None


class TargetGradients(NamedTuple):
    """g of formula.py: the gradient of the raw logit at each token's target, where E has a zero.

    Attributes:
        columns: int32 [tokens], targets in the whole vocabulary; negative: none.
        first: the target that the weight's first row stands for.
        values: fp32 [tokens], g; 0 where another rank has the target's row.
    """

    columns: Any
    first: int
    values: Any

    def part(self, p: Plan, tokens: slice) -> TargetGradients:
        """The same of a chunk of tokens."""
        return self._replace(columns=part(p, self.columns, tokens), values=part(p, self.values, tokens))


def launch_chunk(p: Plan, function: Any, kernel: ChunkKernel, chunk: Chunk, options: Options, **given: Any) -> None:
    """Adds a launch of a kernel of the loss; the other sizes follow from the chunk. `given`: as for `Plan.launch`."""
    written = next((each for name, each in given["writes"].items() if name not in ("p_statistics", "p_reference")), None)
    is_weighted = chunk.class_weight is not None
    is_scaled = options.logit_scale != 1.0 or options.softcap is not None
    shape = ChunkShape(
        kernel=kernel,
        width=chunk.logits.shape[1],
        itemsize=chunk.logits.dtype.itemsize,
        written_itemsize=0 if written is None else written.dtype.itemsize,
        smoothed=options.smoothed,
        weighted=options.smoothed and is_weighted,
        entropy=options.return_entropy,
        argmax=options.argmax and kernel is not ChunkKernel.GRADIENT,
        transformed=chunk.bias is not None or is_scaled,
    )
    first = {"n_rows": chunk.logits.shape[0], "s_logits": chunk.logits.strides[0], "first": chunk.first}
    launch_shape(p, function, shape, **given | {"sizes": first | given["sizes"]})


def scales_of(options: Any) -> dict[str, float | None]:
    """What kernels make z of raw products with; None: that is not done."""
    return {"logit_scale": None if options.logit_scale == 1.0 else options.logit_scale, "softcap": options.softcap}


def launch_shape(p: Plan, function: Any, shape: ChunkShape, **given: Any) -> None:
    """Adds a launch over a chunk of that shape. Later columns are a decision of their own: another kernel for a compiler.

    `given`: as for `Plan.launch`.
    """
    name = function.__name__ + " of later columns" * bool(given["flags"].get("MERGE"))
    p.launch_over(function, chunk_tiling(shape, p.chip), given["sizes"]["n_rows"], decision=name, **given)
