"""ms-swift: the loss of supervised fine-tuning, without the logits, from a file that `--external_plugins` names.

Where ms-swift computes the loss from logits itself (a loss scale, `--loss_type`, DFT, channel losses, sequence parallelism),
and in preference training, it stays as it is. Written against ms-swift 4.6.0.
"""

from __future__ import annotations

from typing import Any

from npu_tiling.models import Hook

from ..patching import patch

_hook = Hook()


def register() -> None:
    """Let ms-swift's trainer of causal language models patch its model."""
    from swift.trainers.seq2seq_trainer import Seq2SeqTrainer

    begin = Seq2SeqTrainer.__init__
    if begin.__module__ == __name__:
        return

    def with_our_loss(trainer: Any, *arguments: Any, **named: Any) -> None:
        begin(trainer, *arguments, **named)
        print(patch(trainer.model))

    _hook.replace(Seq2SeqTrainer, "__init__", with_our_loss)


def unregister() -> None:
    """Let ms-swift train models as they are; those of a trainer that there is stay patched."""
    _hook.undo()
