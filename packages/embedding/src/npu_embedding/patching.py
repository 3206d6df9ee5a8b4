"""`patch(model)`: `embedding` and `ngram_embedding` in place of a model's look-ups, and the classes whose look-up it is."""

from __future__ import annotations

from typing import Any

from npu_tiling import models
from npu_tiling.models import Patch
from torch import Tensor, nn

from .api import Embedding, other_dtype
from .ngram import ngram_rows_of

# Models of transformers whose {name}ScaledWordEmbedding multiplies the result of torch.nn.Embedding's forward: read from the
# source of release 5.23, which a test compares with these names.
_SCALED = (
    "Bart BigBirdPegasus BioGpt Blenderbot Gemma2Text Gemma3Text Gemma3nText Gemma4Text GemmaText M2M100 MBart MiniCPM3 "
    "NllbMoe PLBart SeamlessM4T SeamlessM4Tv2 TrOCR VaultGemmaText XGLM"
)
SCALED = frozenset(f"{model}ScaledWordEmbedding" for model in _SCALED.split())
_NGRAM = "Qwen4ExpTextNGramEmbedding"
_IDS = 2  # which of a layer's states in transformers' cache has the last ids


def patch(model: nn.Module) -> Patch:
    """Let `embedding` look up the rows of a model's embeddings: torch.nn.Embedding, and transformers' scaled embeddings.

    A torch.nn.Embedding becomes an `Embedding`, one of its subclasses a class derived from both, whose own forward is kept;
    parameters, hooks and flags stay. Patch a model before it is sharded or wrapped.

    Known are `torch.nn.Embedding`, subclasses of it that leave its forward alone, the scaled embeddings of transformers'
    Gemma 1 to 4, BART and others, and Qwen4-Exp's n-gram embedding, whose look-up `ngram_embedding` takes unless its table
    has hooks or options. Every other subclass is left alone. So are embeddings whose forward was replaced, as accelerate
    does, or that of their class, those with parametrizations, and weights that are quantised or sharded. What becomes so
    after the patch does what it did, with a warning; so does an embedding under a mode that is not torch's own, or while it
    is traced or exported to ONNX.

    Args:
        model: any module, changed in place.

    Returns:
        What was replaced, what was left, and what computed without our operators when it was called, with the reasons;
        `print` it. `.undo()` gives every module its class again; as a context manager it does so at the end.

    Source: transformers, `models/*/modeling_*.py`.
    """
    return models.swap_classes(model, "npu_embedding", _recognise)


def _recognise(module: nn.Module) -> models.Replacement | str | None:
    known = type(module)
    if known.__name__ == _NGRAM and known.__module__.startswith("transformers."):
        table = module.get_submodule("ngram_embedding")
        reason = models.obstacle(table) or _more_than_rows(table)
        return reason or models.Replacement(_patched_ngram(known), "ngram_embedding")
    if not isinstance(module, nn.Embedding):
        return None
    if issubclass(known, Embedding):
        return "it is one of this package already"
    scaled = known.__name__ in SCALED and known.__module__.startswith("transformers.")
    if not scaled and known.forward is not nn.Embedding.forward:
        return "its forward is not torch.nn.Embedding's"
    if reason := models.obstacle(module) or models.replaced_forward(nn.Embedding) or other_dtype(module):
        return reason
    if known is nn.Embedding:
        return models.Replacement(Embedding, "Embedding")
    return models.Replacement(_patched(known), "embedding, then its own scale" if scaled else "embedding")


def _patched(known: type) -> type[nn.Module]:
    # Where the known class's forward asks its superclass for the rows, Embedding is next.
    return models.derived(f"Npu{known.__name__}", (models.Derived, known, Embedding), {}, _patched, known)


def _patched_ngram(known: Any) -> type[nn.Module]:
    @models.with_signature_of(known)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Tensor:
        given = models.in_order(known.forward, arguments, keywords)
        if len(given) == 2:
            input_ids, past_key_values = given
            table = self.ngram_embedding
            if models.stands_for(self, known, _more_than_rows(table), input_ids=input_ids, weight=table.weight):
                return _ngram_rows(self, input_ids, past_key_values)
        rows: Tensor = known.forward(self, *arguments, **keywords)
        return rows

    return models.derived(f"Npu{known.__name__}", (models.Derived, known), {"forward": forward}, _patched_ngram, known)


def _more_than_rows(table: Any) -> str | None:
    """Why calling a module with a table is not just to look up, or not in what we take; None if it is."""
    if table.max_norm is not None or table.padding_idx is not None or table.scale_grad_by_freq:
        return "its table has other options than sparse"
    return models.called_otherwise(table, "ngram_embedding", nn.Embedding, Embedding) or other_dtype(table)


def _ngram_rows(self: Any, input_ids: Tensor, past_key_values: Any) -> Tensor:
    """The rows of `input_ids` [B, T], after the ids that the cache has; the cache gets these."""
    history = None
    if past_key_values is not None:
        history = past_key_values.get_conv_state(self.layer_idx, state_idx=_IDS)
        if history is not None:  # which the cache is about to overwrite; one that records has all ids
            history = history[:, -self.context_len :].clone()
        kept, missing = input_ids.long(), self.context_len - input_ids.shape[1]
        if history is None and missing > 0:
            kept = nn.functional.pad(kept, (missing, 0), value=self.eos_token_id)
        past_key_values.update_conv_state(kept, self.layer_idx, state_idx=_IDS, conv_kernel_size=self.context_len)
    return ngram_rows_of(self, input_ids.long(), history, self.eos_token_id, self.ngram_embedding.sparse)
