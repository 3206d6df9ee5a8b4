"""ms-swift: the norms of every model that it loads, from a file that `--external_plugins` names.

On npu, ms-swift gives the norms of Qwen 2, 3 and 3.5 other classes, which give `1 + weight` of Qwen 3.5 to the vendor's norm
in bf16; their forward is ours too. Written against ms-swift 4.6.0.
"""

from __future__ import annotations

import sys
from typing import Any

from npu_tiling.models import Hook
from torch import Tensor

from ..patching import GEMMA, LLAMA, Formula, normalise, patch

#: ms-swift's classes for npu, by their names.
CLASSES = {"NpuRMSNorm": LLAMA, "NpuQwen3_5RMSNorm": GEMMA}
_hook = Hook()


def register() -> None:
    """Let ms-swift's models have our norms; before a model is loaded."""
    from swift.model.register import ModelLoader

    load = ModelLoader.load
    if load.__module__ != __name__:

        def with_our_norms(loader: Any) -> tuple[Any, Any]:
            model, processor = load(loader)
            if model is not None:
                print(patch(model))
            return model, processor

        _hook.replace(ModelLoader, "load", with_our_norms)
    for_npu = sys.modules.get("swift.model.npu_patch.model")  # ms-swift has loaded it where there is an npu
    if for_npu is not None:
        for name, formula in CLASSES.items():
            _hook.replace(getattr(for_npu, name), "forward", _forward(formula))


def unregister() -> None:
    """Let ms-swift load models as they are; those that are loaded stay patched."""
    _hook.undo()


def _forward(formula: Formula) -> Any:
    def forward(norm: Any, hidden_states: Tensor) -> Tensor:
        return normalise(formula, hidden_states, norm.weight, getattr(norm, formula.eps))

    return forward
