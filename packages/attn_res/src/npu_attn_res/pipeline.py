"""Blocks across the stages of a pipeline: each is sent to a rank once and kept there for the rank's later stages.

The graphs of two stages share no tensor that requires a gradient. A backward of inputs alone (`torch.autograd.grad`) runs
only nodes on a path to those inputs. So a node makes the later stage's blocks. It depends on that stage's inputs, and
records the blocks' gradients; they go from the later stage's graph to the earlier stage's.

Experimental: no trainer that we know has such a pipeline.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from npu_tiling import arguments
from npu_tiling.dispatch import is_backward
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

STYLES = ("loop", "v")


class PipelineBlocks:
    """The blocks of one rank in a pipeline whose ranks have several stages each.

    A message carries only the blocks of the stages since the rank's last one. A stage's forward begins with `enter` and
    returns what `leave` gives.

    One object serves all stages of a rank, under every schedule of `torch.distributed.pipelining`. Each stage must see its
    microbatches in the same order, each with one forward and at most one backward, and a later stage's backward must come
    first: schedules keep to that. The backward may be split into one of inputs and one of weights. A stage may be wrapped
    whole in `torch.utils.checkpoint.checkpoint` with `use_reentrant=False`.

    The gradient of a kept block passes through what `leave` returns. Without the prefix, a later stage that receives no
    block needs a backward that is not split. A gradient that is lost raises an error.

    Args:
        made: how many blocks each stage of the pipeline makes, all stages in order.
        n_ranks: ranks of the pipeline.
        style: "loop": stage s runs on rank s % n_ranks, as interleaved schedules have it. "v": every second round of
            n_ranks stages runs in descending order of ranks, as ScheduleZBVZeroBubble and ScheduleDualPipeV have it.

    Raises:
        TypeError, ValueError: an argument is no number, or out of range.

    Source: arXiv 2603.15031, cross-stage caching.
    """

    def __init__(self, made: Sequence[int], n_ranks: int, style: str = "loop") -> None:
        self._made = [arguments.whole(f"made[{i}]", count, least=0) for i, count in enumerate(made)]
        self._n_ranks = arguments.whole("n_ranks", n_ranks, least=1)
        if style not in STYLES:
            raise ValueError(f"style is {style!r} and must be one of {STYLES}.")
        self._style = style
        self.reset()

    def reset(self) -> None:
        """Forget all kept blocks: for a step that an error has ended."""
        self._kept: dict[int, deque[_KeptBlocks]] = {stage: deque() for stage in range(len(self._made))}
        self._entered: list[WeakTensorKeyDictionary] = [WeakTensorKeyDictionary() for _ in self._made]
        self._recorded = [False] * len(self._made)  # whether gradients were enabled when the stage ran last
        self._lost: list[str] = []

    def arriving(self, stage: int) -> int:
        """How many blocks a stage's input carries.

        Args:
            stage: from 0.

        Returns:
            The blocks of the stages since the last one of the same rank.

        Raises:
            ValueError: there is no such stage.
        """
        self._check(stage)
        return sum(self._made[max(0, self._previous(stage) + 1) : stage])

    def enter(self, stage: int, received: Sequence[Tensor], prefix: Tensor | None = None) -> list[Tensor]:
        """All blocks that earlier stages have made.

        Args:
            stage: which one begins a microbatch.
            received: the blocks that came with its input, `arriving(stage)` of them.
            prefix: the rest of its input; a stage that receives no block needs it where a schedule splits the backward.

        Returns:
            A new list of the blocks [..., D], in order.

        Raises:
            ValueError: there is no such stage, another number of blocks came, the rank's stage before has not run, or a
                gradient was lost.
        """
        expected = self.arriving(stage)
        if len(received) != expected:
            raise ValueError(f"received has {len(received)} blocks and must have {expected}.")
        inputs = [*received, *([] if prefix is None else [prefix])]
        kept = self._recall(stage, inputs) if is_backward() else self._take(stage, inputs)
        if kept is None:
            return [*received]
        # What a backward of inputs asks for the gradients of; the node has to depend on it.
        anchors = [tensor for tensor in inputs if tensor.requires_grad] or [torch.empty(0, requires_grad=True)]
        return [*_Enter.apply(kept, *anchors), *received]

    def leave(self, stage: int, blocks: Sequence[Tensor], prefix: Tensor | None = None) -> list[Tensor]:
        """What a stage sends on, after it has run.

        Args:
            stage: which one ends a microbatch.
            blocks: all of them, its own last.
            prefix: the rest of what it sends.

        Returns:
            The blocks for the next stage, `arriving(stage + 1)` of them; none after the last stage. The prefix comes first
            where it was given.

        Raises:
            ValueError: there is no such stage, or the number of blocks is not that of all stages so far.
        """
        self._check(stage)
        expected = sum(self._made[: stage + 1])
        if len(blocks) != expected:
            raise ValueError(f"blocks has {len(blocks)} blocks and must have {expected}.")
        sent = [] if prefix is None else [prefix]
        if stage == len(self._made) - 1:
            return sent
        sent += list(blocks)[len(blocks) - self.arriving(stage + 1) :]
        later = self._next(stage)
        if later >= len(self._made):
            return sent
        kept = _KeptBlocks(blocks, stage, later, self._lost)
        if not is_backward():
            self._kept[later].append(kept)
        if any(tensor.requires_grad for tensor in sent):
            return list(_Leave.apply(kept, len(sent), *sent, *blocks))
        for i, block in enumerate(blocks):  # the kept blocks' gradients are added where the stage's own arrive
            if block.requires_grad:
                block.register_hook(functools.partial(_add, kept, i))
        return sent

    def _take(self, stage: int, inputs: list[Tensor]) -> _KeptBlocks | None:
        """The blocks of the next microbatch, out of the queue."""
        if self._lost:
            raise ValueError(self._lost[0])
        self._recorded[stage] = torch.is_grad_enabled()
        previous = self._previous(stage)
        if previous < 0:
            return None
        if not self._kept[stage]:
            raise ValueError(f"stage is {stage} and must come after stage {previous} of the same microbatch.")
        kept = self._kept[stage].popleft()
        kept.is_anchored = any(tensor.requires_grad for tensor in inputs)
        if inputs and torch.is_grad_enabled():
            # The graph holds blocks that need a gradient, for as long as they can be asked for.
            self._entered[stage][inputs[0]] = weakref.ref(kept) if any(kept.needs) else lambda: kept
        return kept

    def _recall(self, stage: int, inputs: list[Tensor]) -> _KeptBlocks | None:
        """The blocks that `_take` gave for the same input: a checkpoint runs the stage again in its backward."""
        if not self._recorded[stage]:
            raise ValueError(f"stage {stage} is checkpointed and must be so with use_reentrant=False.")
        if self._previous(stage) < 0:
            return None
        recall = self._entered[stage].get(inputs[0]) if inputs else None
        kept = recall() if recall is not None else None
        if kept is None:
            raise ValueError(f"stage {stage} is run again by a checkpoint and must be given the same tensors, or a prefix.")
        return kept

    def _previous(self, stage: int) -> int:
        """The rank's stage before; negative where there is none."""
        return stage - (self._n_ranks if self._style == "loop" else 2 * (stage % self._n_ranks) + 1)

    def _next(self, stage: int) -> int:
        """The rank's next stage, or a number past the last stage."""
        return stage + (self._n_ranks if self._style == "loop" else 2 * (self._n_ranks - stage % self._n_ranks) - 1)

    def _check(self, stage: int) -> None:
        arguments.whole("stage", stage, least=0)
        if stage >= len(self._made):
            raise ValueError(f"stage is {stage} and must be below the number of stages, {len(self._made)}.")


class _KeptBlocks:
    """The blocks of one microbatch, from one stage of a rank to its next.

    Attributes:
        values: the blocks, cut from the earlier stage's graph.
        needs: which of them need a gradient.
        is_anchored: the later stage's inputs need gradients.
    """

    def __init__(self, blocks: Sequence[Tensor], earlier: int, later: int, lost: list[str]) -> None:
        self._gradients: list[Tensor | None] | None = None  # once the later stage's backward has reached the blocks
        self.values = [block.detach() for block in blocks]
        self.needs = [block.requires_grad for block in blocks]
        self.is_anchored = False
        self._is_taken = [not needs for needs in self.needs]
        self._earlier, self._later, self._lost = earlier, later, lost

    def give(self, gradients: Sequence[Tensor | None]) -> None:
        """Records the gradients of all blocks, from the later stage's backward."""
        if self._gradients is None and any(
            is_taken for is_taken, needs in zip(self._is_taken, self.needs, strict=True) if needs
        ):
            raise ValueError(f"the backward of stage {self._later} must come before that of stage {self._earlier}.")
        self._gradients = list(gradients)

    def take(self, i: int) -> Tensor | None:
        """The gradient of a block, for the earlier stage's backward. None: no layer of later stages has read it."""
        self._is_taken[i] = True
        if self._gradients is not None:
            return self._gradients[i]
        if self.is_anchored:
            return None
        raise ValueError(
            f"the gradients of the blocks that stage {self._earlier} has kept for stage {self._later} are missing: "
            f"prefix must be given to enter({self._later}, ...), which receives no block that requires a gradient."
        )

    def take_once(self, i: int) -> Tensor | None:
        """As `take`, but None after the first time: a backward of weights starts with gradients that have these added."""
        return None if self._is_taken[i] else self.take(i)

    def __del__(self) -> None:
        given = enumerate(self._gradients or [])
        missed = [i for i, gradient in given if gradient is not None and not self._is_taken[i]]
        if missed:
            self._lost.append(
                f"the gradients of blocks {missed} of stage {self._earlier}, which it has kept for stage {self._later}, "
                f"were lost: the stage must send what leave() returns, and give it the prefix where it sends no block."
            )


def _add(kept: _KeptBlocks, i: int, gradient: Tensor) -> Tensor:
    kept_gradient = kept.take_once(i)
    return gradient if kept_gradient is None else gradient + kept_gradient


class _Enter(torch.autograd.Function):
    """The kept blocks in the later stage's graph, which depend on its inputs."""

    @staticmethod
    def forward(ctx, kept, *anchors):  # type: ignore[no-untyped-def]
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        blocks = tuple(value.detach() for value in kept.values)
        ctx.mark_non_differentiable(*(block for block, needs in zip(blocks, kept.needs, strict=True) if not needs))
        return blocks

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        ctx.kept.give(gradients)
        return (None,) * len(ctx.needs_input_grad)


class _Leave(torch.autograd.Function):
    """What a stage sends, with the same values; the backward adds the kept blocks' gradients to those of the blocks."""

    @staticmethod
    def forward(ctx, kept, n_sent, *tensors):  # type: ignore[no-untyped-def]
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        # A schedule calls detach_() on what a stage returns, which an input or a view of one refuses.
        sent = tuple(tensor.detach() for tensor in tensors[:n_sent])
        ctx.mark_non_differentiable(*(out for out, tensor in zip(sent, tensors, strict=False) if not tensor.requires_grad))
        return sent

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        kept = ctx.kept
        of_blocks = (kept.take(i) if needs else None for i, needs in enumerate(kept.needs))
        return None, None, *gradients, *of_blocks
