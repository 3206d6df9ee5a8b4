"""`patch(model)`: `attn_res_keys` in place of a model's attention over depth, and the classes that compute it."""

from __future__ import annotations

import sys
from inspect import isbuiltin
from typing import Any

import torch
from npu_tiling import models
from npu_tiling.dispatch import as_constant, is_autocast
from npu_tiling.dtensor import is_distributed
from npu_tiling.models import Patch
from torch import Tensor, nn

from .keys import attn_res_keys

#: The classes that are known, and their norms': read from the source of releases 5.23 and 5.24.
KNOWN = {
    "Inkling2BlockAttentionResidual": "Inkling2UnweightedRMSNorm",
    "Inkling2LoopBlockAttentionResidual": "Inkling2LoopUnweightedRMSNorm",
    "Inkling2LoopMessageAttentionResidual": "Inkling2LoopUnweightedRMSNorm",
}


def patch(model: nn.Module) -> Patch:
    """Let `attn_res_keys` compute the attention residuals of transformers' Inkling 2 and its looped variant.

    Each module gets a class derived from its own, whose forward reads the block states and the partial one where they lie;
    parameters, hooks and flags stay. Results are fp32 as the class's are, under autocast in its dtype. Patch a model before
    it is sharded or wrapped.

    Every other module whose class's name ends in AttentionResidual is left alone, and so are modules whose forward was
    replaced, as accelerate does, or that of their class or their norm's, whose norm has hooks, or whose attention is none of
    transformers'. What becomes so after the patch computes what it did, with a warning; so does a module under a mode that
    is not torch's own, with fp64 or DTensors, or while it is traced or exported to ONNX.

    Args:
        model: any module, changed in place.

    Returns:
        What was replaced, what was left, and what computed without our operators when it was called, with the reasons;
        `print` it. `.undo()` gives every module its class again; as a context manager it does so at the end.

    Source: transformers, `models/inkling2/modeling_inkling2.py`, `models/inkling2_loop/modeling_inkling2_loop.py`.
    """
    return models.swap_classes(model, "npu_attn_res", _recognise)


def _recognise(module: nn.Module) -> models.Replacement | str | None:
    known = type(module)
    if not known.__name__.endswith("AttentionResidual"):
        return None
    if isinstance(module, _Patched):
        return "it is patched already"
    if known.__name__ not in KNOWN or not known.__module__.startswith("transformers."):
        return "no attention residual that is known"
    return _other_parts(module, known) or models.Replacement(_patched(known), "attn_res_keys")


def _other_parts(module: Any, known: type) -> str | None:
    """Why a module's norm or attention is not what its class was written with, None if both are; one that we patched is."""
    norm = module.norm
    if type(norm).__name__.removeprefix("Npu") != KNOWN[known.__name__]:
        return f"its norm is a {type(norm).__name__}"
    if other := models.more_than_forward(norm):
        return f"its norm is more than its class's forward: {other}"
    return models.replaced_forward(type(norm)) or _other_attention(known, module.config._attn_implementation)


@as_constant
def _other_attention(known: type, name: str) -> str | None:
    """Why an attention of this name does not compute the one that we know, None if it does: transformers' all do."""
    page = sys.modules[known.__module__]
    attention = page.ALL_ATTENTION_FUNCTIONS.get_interface(name, page.eager_attention_forward)
    if not models.from_package(attention, "transformers"):
        return f"its attention {name} is not one of transformers"
    product = nn.functional.scaled_dot_product_attention
    return None if isbuiltin(product) else "torch.nn.functional.scaled_dot_product_attention was replaced"


class _Patched(models.Derived):
    query: nn.Parameter
    norm: Any


def _patched(known: Any) -> type[nn.Module]:
    # Blocks, the prefix and the number of a layer, whose queries are taken.
    has_messages = len(models.names_of(known.forward)) > 2

    @models.with_signature_of(known)
    def forward(self: _Patched, *arguments: Any, **keywords: Any) -> Any:
        given = models.in_order(known.forward, arguments, keywords)
        if len(given) == 2 + has_messages:
            blocks, partial = given[:2]
            unless = _other_parts(self, known) or _other_sources(blocks, partial)
            if models.stands_for(self, known, unless, block_states=blocks, partial_block_states=partial, query=self.query):
                if has_messages:
                    return _attend(blocks, partial, self.query[given[2]], self.norm.eps).movedim(0, -2)
                h = _attend(blocks, partial, self.query, self.norm.eps)
                return h.unbind() if self.query.dim() > 1 else (h,)
        return known.forward(self, *arguments, **keywords)

    return models.derived(f"Npu{known.__name__}", (_Patched, known), {"forward": forward}, _patched, known)


def _other_sources(*sources: Any) -> str | None:
    if is_distributed(sources):
        return "its block states are DTensors"
    if any(getattr(source, "dtype", None) == torch.float64 for source in sources):
        return "its block states are fp64, which the class rounds"
    return None


def _attend(blocks: Tensor, partial: Tensor, query: Tensor, eps: float) -> Tensor:
    device = partial.device.type
    dtype = torch.get_autocast_dtype(device) if is_autocast(partial) else torch.float32  # of PyTorch's attention
    return attn_res_keys(blocks, partial, query.float(), eps, query.shape[-1] ** -0.5, output_dtype=dtype)
