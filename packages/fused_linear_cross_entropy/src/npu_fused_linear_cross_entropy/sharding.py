"""The loss of DTensors: a vocabulary split over ranks, or tokens, each on its own dimensions of the mesh.

    x              weight         loss                                     gradient of x    gradient of weight
    Replicate()    Replicate()    Replicate()                              Replicate()      Replicate()
    Replicate()    Shard(0)       Replicate()                              Replicate()      Shard(0)
    Shard(i)       Replicate()    Partial(), or Shard(i) of one a token    Shard(i)         Partial()
    Shard(0)       Shard(0)       Replicate()                              Shard(0)         Shard(0)

The target is placed as x is, bias and class weights as the weight is. In the last row ranks gather x, as `sequence_parallel`
does, and the target is Replicate(). Where the vocabulary is split, ranks send what `process_group` sends. Where tokens are
split and the loss is a mean, each rank sends its count of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from npu_tiling.dtensor import Shards, is_distributed, is_replicated, shard, summed
from torch import Tensor

from .call import Forward, LinearCrossEntropyOutput, Options, replaced
from .tokens import are_counted

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

_BY_TOKEN = ("predicted_tokens", "lse", "entropy")


def linear_cross_entropy(run: Callable[[Forward], LinearCrossEntropyOutput], call: Forward) -> LinearCrossEntropyOutput:
    """`run(call)` on each rank's part."""
    options = call.options
    if options.group:
        raise ValueError("process_group must be left out where weight is a DTensor, whose mesh says who has what.")
    x, target, class_weight, divisor = call.x, call.target, call.class_weight, call.divisor
    names = ("x", "weight", "target", "bias", "class_weight")
    shards = Shards({name: getattr(call, name) for name in names})
    placed = shards.rows("x")
    table = shards.check("weight", lambda _, p: is_replicated(p) or shard(p) == 0, "Replicate() or Shard(0)")
    shards.check(
        "weight", lambda i, p: is_replicated(p) or is_replicated(placed[i]) or shard(placed[i]) == 0,
        "Replicate() where x is split along another dimension than its first"
    )  # fmt: skip
    tokens, is_gathered = _of_target(shards, x.shape[0], placed, table)
    shards.alike("target", tokens, "x")
    for name in ("bias", "class_weight"):
        shards.alike(name, table, "weight")
    options = _part_of_vocabulary(shards, replaced(options, sequence_parallel=is_gathered))
    if not all(map(is_replicated, tokens)):
        divisor = _count(target, class_weight, divisor, options)
    if divisor is not None and is_distributed((divisor,)):
        divisor = divisor.full_tensor()  # type: ignore[attr-defined]
    gradient = [w if shard(w) == 0 else s for w, s in zip(table, summed(tokens), strict=True)]
    own = {"x": placed, "weight": gradient, "bias": gradient}
    local: dict[str, Any] = {name: shards.local(name, own.get(name)) for name in names}
    outputs = run(replaced(call, **local, divisor=divisor, options=options))

    def wrap(name: str, part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        by_token = name in _BY_TOKEN or options.reduction == "none" and name != "token_accuracy"
        return shards.wrap(part, tokens if by_token else summed(tokens), target.shape if by_token else ())

    wrapped: dict[str, Any] = {name: wrap(name, part) for name, part in zip(outputs._fields, outputs, strict=True)}
    return LinearCrossEntropyOutput(**wrapped)


def _of_target(
    shards: Shards, rows: int, placed: Sequence[Placement], table: Sequence[Placement]
) -> tuple[tuple[Placement, ...], bool]:
    """The placements of the target, and whether ranks that have parts of the vocabulary gather x."""
    from torch.distributed.tensor import Replicate

    gathers = [shard(p) == 0 and not is_replicated(w) for p, w in zip(placed, table, strict=True)]
    for dimension, gathered in enumerate(gathers):
        ranks = shards.mesh.size(dimension)
        if gathered and rows % ranks:
            shards.refuse("x", dimension, f"Replicate(), or have a multiple of {ranks} rows along dimension 0, not {rows}")
    return tuple(Replicate() if gathered else p for p, gathered in zip(placed, gathers, strict=True)), any(gathers)


def _part_of_vocabulary(shards: Shards, options: Options) -> Options:
    """The options with the rows of the weight that this rank has, and whom it shares the vocabulary with."""
    place = shards.part("weight", 0)
    if place is None:
        return options
    (dimension,) = (i for i, placement in enumerate(shards.placements("weight")) if shard(placement) == 0)
    ranks, size = shards.mesh.size(dimension), options.vocab_size
    if (ranks - 1) * -(-size // ranks) >= size:
        raise ValueError(f"weight has {size} rows and must have some on each of the {ranks} ranks that it is split over.")
    return replaced(options, group=shards.mesh.get_group(dimension).group_name, vocab_first=place[0])


def _count(target: Any, class_weight: Tensor | None, divisor: Tensor | None, options: Options) -> Tensor | None:
    """The divisor of "mean" where the tokens are split over ranks."""
    if options.return_token_accuracy:
        raise ValueError("return_token_accuracy is True and must be False where x is split.")
    if options.reduction != "mean" or divisor is not None:
        return divisor
    if class_weight is not None:
        raise ValueError("reduction is 'mean' and must be 'sum' or 'none' where x is split and there are class weights.")
    counted: Any = are_counted(target, options.ignore_index)
    count: Tensor = counted.sum().full_tensor()
    return count.clamp_min(1)
