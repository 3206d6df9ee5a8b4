"""`patch(model)`: `embedding` in place of a model's look-ups, and the classes whose look-up it is."""

from __future__ import annotations

import torch
from npu_tiling.pytorch.patching import Derived, Patch, Replacement, derived, swap_classes
from torch import nn

from .module import Embedding

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Models of transformers whose {name}ScaledWordEmbedding multiplies the result of torch.nn.Embedding's forward: read from the
# source of release 5.23, which a test compares with these names.
_SCALED = (
    "Bart BigBirdPegasus BioGpt Blenderbot Gemma2Text Gemma3Text Gemma3nText Gemma4Text GemmaText M2M100 MBart MiniCPM3 "
    "NllbMoe PLBart SeamlessM4T SeamlessM4Tv2 TrOCR VaultGemmaText XGLM"
)
SCALED = frozenset(f"{model}ScaledWordEmbedding" for model in _SCALED.split())


def patch(model: nn.Module) -> Patch:
    """Let `embedding` look up the rows of a model's embeddings: torch.nn.Embedding, and transformers' scaled embeddings.

    Modules stay where they are, with their parameters, hooks and flags; a torch.nn.Embedding becomes an `Embedding`, one of
    its subclasses a class derived from both, whose own forward is kept. So weights stay tied, `state_dict` and
    `save_pretrained` are as before, and the model can be copied, pickled and compiled. Patch a model before it is sharded or
    wrapped.

    Known are `torch.nn.Embedding`, subclasses of it that leave its forward alone, and the scaled embeddings of transformers'
    Gemma 1 to 4, BART and others. Every other subclass is left alone, and so are embeddings whose forward was replaced, as
    accelerate does, and weights that are quantised or sharded.

    Args:
        model: any module, changed in place.

    Returns:
        What was replaced and what was left, and why; `print` it. `.undo()` gives every module its class again; as a context
        manager it does so at the end.

    Source: transformers, `models/*/modeling_*.py`.
    """
    return swap_classes(model, "npu_embedding", _recognise)


def _recognise(module: nn.Module) -> Replacement | str | None:
    if not isinstance(module, nn.Embedding):
        return None
    known = type(module)
    if issubclass(known, Embedding):
        return "it is one of this package already"
    scaled = known.__name__ in SCALED and known.__module__.startswith("transformers.")
    if not scaled and known.forward is not nn.Embedding.forward:
        return "its forward is not torch.nn.Embedding's"
    if module.weight.is_floating_point() and module.weight.dtype not in _DTYPES:
        return f"its weight is {module.weight.dtype}, which embedding does not take"
    if known is nn.Embedding:
        return Replacement(Embedding, "Embedding")
    return Replacement(_patched(known), "embedding, then its own scale" if scaled else "embedding")


def _patched(known: type) -> type[nn.Module]:
    # Where the known class's forward asks its superclass for the rows, Embedding is next.
    return derived(f"Npu{known.__name__}", (Derived, known, Embedding), {}, _patched, known)
