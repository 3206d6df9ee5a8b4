"""`patch(model)`: `embedding` and `ngram_embedding` in place of a model's look-ups, and the classes whose look-up it is."""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling.pytorch.patching import Derived, Patch, Replacement, derived, obstacle, swap_classes
from torch import Tensor, nn

from .module import Embedding
from .ngram_module import ngram_rows_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

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

    Modules stay where they are, with their parameters, hooks and flags; a torch.nn.Embedding becomes an `Embedding`, one of
    its subclasses a class derived from both, whose own forward is kept. So weights stay tied, `state_dict` and
    `save_pretrained` are as before, and the model can be copied, pickled and compiled. Patch a model before it is sharded or
    wrapped.

    Known are `torch.nn.Embedding`, subclasses of it that leave its forward alone, the scaled embeddings of transformers'
    Gemma 1 to 4, BART and others, and Qwen4-Exp's n-gram embedding, whose look-up `ngram_embedding` takes unless its table
    has hooks or options. Every other subclass is left alone. So are embeddings whose forward was replaced, as accelerate
    does, those with parametrizations, and weights that are quantised or sharded.

    Args:
        model: any module, changed in place.

    Returns:
        What was replaced and what was left, and why; `print` it. `.undo()` gives every module its class again; as a context
        manager it does so at the end.

    Source: transformers, `models/*/modeling_*.py`.
    """
    return swap_classes(model, "npu_embedding", _recognise)


def _recognise(module: nn.Module) -> Replacement | str | None:
    known = type(module)
    if known.__name__ == _NGRAM and known.__module__.startswith("transformers."):
        table = module.get_submodule("ngram_embedding")
        return obstacle(table) or _other_dtype(table) or Replacement(_patched_ngram(known), "ngram_embedding")
    if not isinstance(module, nn.Embedding):
        return None
    if issubclass(known, Embedding):
        return "it is one of this package already"
    scaled = known.__name__ in SCALED and known.__module__.startswith("transformers.")
    if not scaled and known.forward is not nn.Embedding.forward:
        return "its forward is not torch.nn.Embedding's"
    if reason := obstacle(module) or _other_dtype(module):
        return reason
    if known is nn.Embedding:
        return Replacement(Embedding, "Embedding")
    return Replacement(_patched(known), "embedding, then its own scale" if scaled else "embedding")


def _other_dtype(table: Any) -> str | None:
    dtype = table.weight.dtype
    is_known = dtype in _DTYPES or not dtype.is_floating_point  # `obstacle` names integers
    return None if is_known else f"its weight is {dtype}, which embedding does not take"


def _patched(known: type) -> type[nn.Module]:
    # Where the known class's forward asks its superclass for the rows, Embedding is next.
    return derived(f"Npu{known.__name__}", (Derived, known, Embedding), {}, _patched, known)


def _patched_ngram(known: Any) -> type[nn.Module]:
    def forward(self: Any, input_ids: Tensor, past_key_values: Any) -> Tensor:
        look_up = _ngram_rows if _gives_rows_alone(self.ngram_embedding) else known.forward
        rows: Tensor = look_up(self, input_ids, past_key_values)
        return rows

    return derived(f"Npu{known.__name__}", (Derived, known), {"forward": forward}, _patched_ngram, known)


def _gives_rows_alone(table: Any) -> bool:
    """Whether calling a module with a table does nothing but look up: it has no hook, and no option but `sparse`."""
    hooks = (table._forward_hooks, table._forward_pre_hooks, table._backward_hooks, table._backward_pre_hooks)
    is_known = type(table) in (nn.Embedding, Embedding) and not any(hooks)
    return is_known and table.max_norm is None and table.padding_idx is None and not table.scale_grad_by_freq


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
