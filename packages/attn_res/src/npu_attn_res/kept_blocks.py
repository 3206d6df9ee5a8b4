"""The gradients of blocks that a stage keeps for a later one: from the later stage's graph to the earlier stage's.

The graphs share no tensor that requires a gradient. A backward of inputs alone (`torch.autograd.grad`) runs only nodes on a
path to those inputs. So a node makes the later stage's blocks. It depends on that stage's inputs, and records the blocks'
gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


class KeptBlocks:
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


def enter_graph(kept: KeptBlocks, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The kept blocks in the later stage's graph.

    Args:
        kept: blocks [..., D].
        inputs: what a backward of inputs asks for the gradients of.

    Returns:
        The blocks.
    """
    anchors = [tensor for tensor in inputs if tensor.requires_grad]
    return list(_Enter.apply(kept, *(anchors or [torch.empty(0, requires_grad=True)])))


def leave_graph(kept: KeptBlocks, sent: Sequence[Tensor], blocks: Sequence[Tensor]) -> list[Tensor]:
    """What a stage sends, through a node that adds the kept blocks' gradients.

    Args:
        kept: made of the blocks.
        sent: tensors.
        blocks: of the earlier stage's graph.

    Returns:
        The tensors to send, with the same values.
    """
    return list(_Leave.apply(kept, len(sent), *sent, *blocks))


def hook_blocks(kept: KeptBlocks, blocks: Sequence[Tensor]) -> None:
    """Adds the kept blocks' gradients where the stage's own gradients of the blocks arrive."""
    for i, block in enumerate(blocks):
        if block.requires_grad:
            block.register_hook(functools.partial(_add, kept, i))


def _add(kept: KeptBlocks, i: int, gradient: Tensor) -> Tensor:
    kept_gradient = kept.take_once(i)
    return gradient if kept_gradient is None else gradient + kept_gradient


class _Enter(torch.autograd.Function):
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
