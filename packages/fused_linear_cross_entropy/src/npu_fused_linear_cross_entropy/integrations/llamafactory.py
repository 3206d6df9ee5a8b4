"""LLaMA-Factory: the loss of supervised fine-tuning and of pre-training, without the logits.

Preference training reads logits and stays as it is, and so do the trainers of LLaMA-Factory's version 1, which compute every
loss from logits. Written against LLaMA-Factory 0.9.5.
"""

from __future__ import annotations

from typing import Any

from npu_tiling.models import Hook

from ..patching import patch

STAGES = ("sft", "pt")
_hook = Hook()


def register() -> None:
    """Let LLaMA-Factory patch a model that it loads to be trained in one of `STAGES`."""
    import llamafactory.model as of_llamafactory

    original = of_llamafactory.load_model
    if original.__module__ == __name__:
        return

    def load_model(
        tokenizer: Any, model_args: Any, finetuning_args: Any, is_trainable: bool = False, *others: Any, **named: Any
    ) -> Any:
        model = original(tokenizer, model_args, finetuning_args, is_trainable, *others, **named)
        if is_trainable and finetuning_args.stage in STAGES:
            print(patch(model))
        return model

    _hook.replace_everywhere("llamafactory", "load_model", original, load_model)


def unregister() -> None:
    """Let LLaMA-Factory load models as they are."""
    _hook.undo()
