"""Megatron Core: the loss of a GPTModel from its last hidden states, without logits, on one rank and tensor-parallel.

Logits stay where there are no labels, and with `mtp_num_layers`, `defer_embedding_wgrad_compute` or a `config_logger_dir`.
Written against megatron-core 0.16.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from npu_tiling.models import Hook
from torch import Tensor

from ..api import fused_linear_cross_entropy

_hook = Hook()


class Head(NamedTuple):
    """In place of logits: x [S, B, H], where the head is sequence-parallel this rank's part of S, and the weight [V, H]."""

    x: Tensor
    weight: Tensor
    module: Any

    def losses(self, labels: Tensor) -> Tensor:
        """fp32 [B, S], of labels [B, S]. One that is -100 has loss 0, where Megatron's is no loss and its mask hides it."""
        linear, given = self.module, {}
        if linear.tp_group.size() > 1:
            given = {"process_group": linear.tp_group, "sequence_parallel": linear.sequence_parallel}
        bias = None if linear.skip_bias_add else linear.bias
        by_place = labels.transpose(0, 1).contiguous()
        loss = fused_linear_cross_entropy(self.x, self.weight, by_place, bias, reduction="none", **given)
        assert isinstance(loss, Tensor)
        return loss.transpose(0, 1).contiguous()


def register() -> None:
    """Let Megatron's GPT models compute their losses with ours; with MindSpeed after its own patches."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt.gpt_model import GPTModel

    postprocess, of_logits = GPTModel._postprocess, LanguageModule.compute_language_model_loss
    if postprocess.__module__ == __name__:
        return

    def without_logits(
        model: Any, hidden_states: Tensor, input_ids: Any, position_ids: Any, labels: Any, *rest: Any, **named: Any
    ) -> Any:
        config = model.config
        as_it_is = config.mtp_num_layers or config.defer_embedding_wgrad_compute or config.config_logger_dir
        has_logits = labels is None or not model.post_process or as_it_is
        with contextlib.nullcontext() if has_logits else _kept_apart(model.output_layer):
            return postprocess(model, hidden_states, input_ids, position_ids, labels, *rest, **named)

    def loss(model: Any, labels: Tensor, logits: Any) -> Tensor:
        return logits.losses(labels) if isinstance(logits, Head) else of_logits(model, labels, logits)

    _hook.replace(GPTModel, "_postprocess", without_logits)
    _hook.replace(LanguageModule, "compute_language_model_loss", loss)


def unregister() -> None:
    """Let Megatron compute its losses again."""
    _hook.undo()


@contextlib.contextmanager
def _kept_apart(linear: Any) -> Iterator[None]:
    """The head returns its input and its weight in place of their product."""

    def forward(x: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[Head, None]:
        return Head(x, linear.weight if weight is None else weight, linear), None

    linear.forward = forward
    try:
        yield
    finally:
        del linear.forward
