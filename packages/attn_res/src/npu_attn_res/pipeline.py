"""Blocks across the stages of a pipeline: each is sent to a rank once and kept there for the rank's later stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from npu_tiling.pytorch import arguments
from torch import Tensor


class PipelineBlocks:
    """The blocks of one rank in a pipeline whose stages are dealt to the ranks in turns.

    Stage s runs on rank s % n_ranks, as `torch.distributed.pipelining`'s interleaved schedules have it. A rank has kept what
    its earlier stages received and made, so that a message carries the blocks of the n_ranks - 1 stages before it at most:

        def forward(self, prefix, *received):  # of a stage
            blocks = self.blocks.enter(self.stage, received)
            ...  # layers read the blocks, and append to them
            return prefix, *self.blocks.leave(self.stage, blocks)

    One object serves all stages of a rank. Each stage must see its microbatches in the same order, each with one forward and
    at most one backward, and a later stage's backward must come first: schedules keep to that. A kept block's gradient from
    later stages is added when an earlier stage's backward reaches it: a stage must read every block, or send it on, as
    layers of Attention Residuals do. Blocks are not copied.

    Args:
        made: how many blocks each stage of the pipeline makes, all stages in order.
        n_ranks: ranks of the pipeline.

    Raises:
        TypeError, ValueError: an argument is no number, or out of range.

    Source: arXiv 2603.15031, cross-stage caching.
    """

    def __init__(self, made: Sequence[int], n_ranks: int) -> None:
        self._made = [arguments.whole(f"made[{i}]", count, least=0) for i, count in enumerate(made)]
        self._n_ranks = arguments.whole("n_ranks", n_ranks, least=1)
        self._kept: dict[int, deque[list[Tensor]]] = {stage: deque() for stage in range(len(self._made))}

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
        return sum(self._made[max(0, stage - self._n_ranks + 1) : stage])

    def enter(self, stage: int, received: Sequence[Tensor]) -> list[Tensor]:
        """All blocks that earlier stages have made.

        Args:
            stage: which one begins a microbatch.
            received: the blocks that came with its input, `arriving(stage)` of them.

        Returns:
            A new list of the blocks [..., D], in order.

        Raises:
            ValueError: there is no such stage, another number of blocks came, or the rank's stage before has not run.
        """
        expected = self.arriving(stage)
        if len(received) != expected:
            raise ValueError(f"received has {len(received)} blocks and must have {expected}.")
        kept: list[Tensor] = []
        if stage >= self._n_ranks:
            if not self._kept[stage]:
                raise ValueError(
                    f"stage is {stage} and must come after stage {stage - self._n_ranks} of the same microbatch."
                )
            kept = self._kept[stage].popleft()
        return [*kept, *received]

    def leave(self, stage: int, blocks: Sequence[Tensor]) -> list[Tensor]:
        """What a stage sends on, after it has run.

        Args:
            stage: which one ends a microbatch.
            blocks: all of them, its own last.

        Returns:
            The blocks for the next stage, `arriving(stage + 1)` of them; none after the last stage.

        Raises:
            ValueError: there is no such stage, or the number of blocks is not that of all stages so far.
        """
        self._check(stage)
        expected = sum(self._made[: stage + 1])
        if len(blocks) != expected:
            raise ValueError(f"blocks has {len(blocks)} blocks and must have {expected}.")
        if stage == len(self._made) - 1:
            return []
        sent = list(blocks)[len(blocks) - self.arriving(stage + 1) :]
        later = stage + self._n_ranks
        if later < len(self._made):
            leaves = [block.detach().requires_grad_(block.requires_grad) for block in blocks]
            self._kept[later].append(leaves)
            for block, leaf in zip(blocks, leaves, strict=True):
                _add_gradient_later(block, leaf)
        return sent

    def _check(self, stage: int) -> None:
        arguments.whole("stage", stage, least=0)
        if stage >= len(self._made):
            raise ValueError(f"stage is {stage} and must be below the number of stages, {len(self._made)}.")


def _add_gradient_later(block: Tensor, leaf: Tensor) -> None:
    """Adds the gradient that the leaf has by then to the one that reaches the block."""
    if block.requires_grad:
        block.register_hook(lambda gradient: gradient if leaf.grad is None else gradient + leaf.grad)
