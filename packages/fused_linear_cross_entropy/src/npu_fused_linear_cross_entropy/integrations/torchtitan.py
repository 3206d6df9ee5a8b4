"""torchtitan: `--override.imports npu_fused_linear_cross_entropy.integrations.torchtitan.loss` makes the chunked loss ours.

The head is called once a batch and not once a chunk. torchtitan's own loop stays where the loss is no cross entropy, where
tensor parallelism splits the head, and where everything is a DTensor. Written against torchtitan 0.3.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import spmd_types
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import derive, override
from torchtitan.distributed.spmd_types import spmd_mesh_size

from ..api import fused_linear_cross_entropy


class FusedLinearLoss(ChunkedLossWrapper):
    """torchtitan's chunked loss, computed by `fused_linear_cross_entropy`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """As torchtitan's; the number of chunks counts where torchtitan's loop runs."""

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the tokens' losses, divided by the number of tokens of all ranks where that is given.

        Args:
            pred: hidden states [B, T, H].
            labels: [B, T].
            global_valid_tokens: the divisor.
            loss_inputs: of other losses; the cross entropy reads none.
        """
        if not self._is_ours(pred, labels):
            return super().__call__(pred, labels, global_valid_tokens, **loss_inputs)
        loss = _inside(self.lm_head, pred, labels)
        return loss if global_valid_tokens is None else loss / global_valid_tokens, {}

    def _is_ours(self, pred: Tensor, labels: Tensor) -> bool:
        head = self.lm_head
        if type(self.loss_fn) is not CrossEntropyLoss or not isinstance(head, nn.Linear):
            return False
        if isinstance(pred, DTensor) or isinstance(labels, DTensor) or spmd_types.is_type_checking():
            return False
        mesh = getattr(head.weight, "device_mesh", None)  # FSDP's, outside of the forward
        sizes = {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        return sizes.get("tp", 1) == 1 == spmd_mesh_size("tp")


def _inside(head: Any, x: Tensor, labels: Tensor) -> Tensor:
    """The loss, computed in place of the head's forward: FSDP's hooks around it gather the weight."""
    options = {"ignore_index": IGNORE_INDEX, "reduction": "sum"}
    before = vars(head).get("forward")
    head.forward = lambda x: fused_linear_cross_entropy(x, head.weight, labels, head.bias, **options)
    try:
        loss: Tensor = head(x)
    finally:
        del head.forward
        if before is not None:
            head.forward = before
    return loss


@override(target=ChunkedLossWrapper.Config, exact=True, description="npu_fused_linear_cross_entropy")
def loss(config: ChunkedLossWrapper.Config) -> FusedLinearLoss.Config:
    """The function that torchtitan calls for a chunked loss in its configuration."""
    replacement: FusedLinearLoss.Config = derive(config, FusedLinearLoss.Config)
    return replacement
