"""The loss of an existing model: `patch(model)`, and which models compute it as `causal_lm_loss` does."""

from __future__ import annotations

import importlib
import inspect
import typing
import warnings
from typing import Any, NamedTuple

import torch
from npu_tiling import arguments
from npu_tiling.models import (
    Derived,
    Patch,
    Replacement,
    as_constant,
    by_name,
    called_otherwise,
    derived,
    from_package,
    is_made_by_hand,
    names_of,
    obstacle,
    other_kind,
    stands_for,
    swap_classes,
    with_signature_of,
)
from torch import Tensor, nn

from .api import causal_lm_loss
from .call import Options
from .checks import check_values

# Models of transformers whose {name}ForCausalLM is a base model, a linear layer, perhaps a softcap, and ForCausalLMLoss:
# read from the source of release 5.23, which a test compares with these names.
_DENSE = (
    "Apertus Arcee BitNet Cwm DiffLlama Ernie4_5 Exaone4 Gemma Gemma2 Gemma3 Glm Glm4 Helium HunYuanDenseV1 Lfm2 Llama "
    "Ministral Ministral3 Mistral NanoChat Nemotron Olmo Olmo2 Olmo3 Phi Phi3 Qwen2 Qwen3 Qwen3_5 SeedOss SmolLM3 "
    "Starcoder2 VaultGemma Youtu"
)
CAUSAL_LMS = frozenset(f"{model}ForCausalLM" for model in _DENSE.split())
# The same, plus the load-balancing loss of a router.
_MIXTURES = "FlexOlmo MiniMaxM2 Mixtral Olmoe Qwen2Moe Qwen3Moe Qwen3Next Qwen3_5Moe"
MIXTURES = frozenset(f"{model}ForCausalLM" for model in _MIXTURES.split())
# Models of text and images, whose head is that of their text: dense ones, and mixtures.
_WITH_IMAGES = (
    "FastVlm Glm46V Glm4v InternVL Lfm2Vl Llava LlavaOnevision Mistral3 Qwen2VL Qwen2_5_VL Qwen3VL Qwen3_5 "
    "Glm4vMoe Qwen3VLMoe Qwen3_5Moe"
)
WITH_IMAGES = frozenset(f"{model}ForConditionalGeneration" for model in _WITH_IMAGES.split())

_LOSS = "ForCausalLMLoss"


class _Options(NamedTuple):
    evaluation: bool
    keep_logits: bool
    accum_dtype: torch.dtype | None
    chunk_tokens: int | None
    memory_budget: int | None


def patch(
    model: nn.Module,
    *,
    evaluation: bool = False,
    keep_logits: bool = False,
    accum_dtype: torch.dtype | None = None,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
) -> Patch:
    """Let `causal_lm_loss` compute the training loss of transformers' causal language models, without their logits.

    Called in training mode and with labels, a patched model returns that loss, and `logits=None`, with a warning the first
    time that says how to keep them. Called otherwise it does
    what it did: evaluation and generation have logits. `ignore_index`, `shift_labels`, `num_items_in_batch`,
    `logits_to_keep` and a config's `final_logit_softcapping` count as before.

    The model keeps its parameters, hooks and flags; it gets a class derived from its own, of the same name, with another
    forward. So `state_dict` and `save_pretrained` are as before, and it can be copied, pickled and compiled. Patch a model
    before it is sharded or wrapped.

    The linear layer's weight is read and the layer not called. The model does what it did, with a warning, where that layer
    has hooks, is not torch.nn.Linear any more, was replaced in its forward (LoRA, ZeRO-3, tensor parallel, accelerate) or
    has a tensor subclass for its weight (torchao); where the model's forward or its loss function is another; and where a
    mode that is not torch's own would see the calls. It also does while it is traced or exported to ONNX. Labels that are
    all ignored give a loss of 0, where the model's mean is NaN.

    Known are the dense models of transformers, such as Llama, Mistral, Qwen 2 and 3, Phi-3, Gemma 1 to 3 (text) and OLMo 1
    to 3; mixtures of experts, such as Mixtral, Qwen 2 to 3.5 and OLMoE, to whose loss the router's is added as before; and
    models of text and images, such as Llava, Qwen 2 to 3.5 VL, InternVL and GLM 4V; also as a part of another module. Other
    causal language models are left alone.

    Args:
        model: any module, changed in place.
        evaluation: also where the model is in evaluation mode and labels are given.
        keep_logits: compute the logits too, without a gradient: for metrics that are taken while training.
        accum_dtype, chunk_tokens, memory_budget: see `fused_linear_cross_entropy`.

    Returns:
        What was replaced, what was left, and what computed without our operators when it was called, with the reasons;
        `print` it. `.undo()` gives every model its class again; as a context manager it does so at the end.

    Source: transformers, `models/*/modeling_*.py` and `loss/loss_utils.py`.
    """
    arguments.flags(evaluation=evaluation, keep_logits=keep_logits)
    check_values(Options(accum_dtype=accum_dtype, chunk_tokens=chunk_tokens, memory_budget=memory_budget))
    options = _Options(evaluation, keep_logits, accum_dtype, chunk_tokens, memory_budget)
    return swap_classes(model, "npu_fused_linear_cross_entropy", lambda module: _recognise(module, options))


def _recognise(module: nn.Module, options: _Options) -> Replacement | str | None:
    known = type(module)
    if not known.__name__.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")):
        return None
    if isinstance(module, _Patched):
        return "it is patched already"
    if known.__name__ not in CAUSAL_LMS | MIXTURES | WITH_IMAGES or not known.__module__.startswith("transformers."):
        return "no causal language model that is known"
    if reason := obstacle(module) or _other_head(module.lm_head) or _other_loss(known, module.loss_function):
        return reason
    logits = "" if options.keep_logits else "; logits are None then, with keep_logits=True they are kept"
    return Replacement(
        _patched(known, *options), f"causal_lm_loss, with labels{'' if options.evaluation else ' in training'}{logits}"
    )


class _Patched(Derived):
    options: _Options


def _patched(known: type[Any], *options: Any) -> type[nn.Module]:
    attributes = {
        "options": _Options(*options),
        "forward": _with_fused_loss(known),
        "__module__": known.__module__,  # with its name, what transformers writes into a config and looks up
        "__qualname__": known.__qualname__,
    }
    return derived(known.__name__, (_Patched, known), attributes, _patched, known, *options)


def _with_fused_loss(known: type[Any]) -> Any:
    @with_signature_of(known)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        given = by_name(known.forward, arguments, keywords)
        if not _fuses(self, known, given):
            return known.forward(self, *arguments, **keywords)
        labels, kept = given.pop("labels"), given.pop("logits_to_keep", 0)
        as_dict = given.pop("return_dict", None)
        has_router = "output_router_logits" in names_of(known.forward)
        if has_router and given.get("output_router_logits") is None:
            given["output_router_logits"] = self.config.get_text_config().output_router_logits
        outputs = self.model(**given)
        hidden = outputs.last_hidden_state
        if isinstance(kept, Tensor) or kept:
            hidden = hidden[:, kept if isinstance(kept, Tensor) else slice(-kept, None)]
        output_type = _output_type(known.forward)
        found: dict[str, Any] = {name: getattr(outputs, name, None) for name in output_type.__dataclass_fields__}
        found["loss"] = _loss(self, hidden, labels, given)
        found["logits"] = _logits(self, hidden) if self.options.keep_logits else _tell_of_logits(known.__name__)
        if has_router and given["output_router_logits"]:
            found["aux_loss"], share = _router_loss(self, known.__module__, outputs, given.get("attention_mask"))
            found["loss"] = found["loss"] + share
        result = output_type(**found)
        return result if (self.config.return_dict if as_dict is None else as_dict) else result.to_tuple()

    return forward


@as_constant
def _output_type(forward: Any) -> Any:
    """The class that a model's forward returns, from its annotation."""
    outputs = importlib.import_module("transformers.modeling_outputs")
    annotation = inspect.signature(forward).return_annotation
    for one in typing.get_args(annotation) or (annotation,):
        if isinstance(one, type) and issubclass(one, outputs.ModelOutput):
            return one
    return outputs.CausalLMOutputWithPast


def _router_loss(model: Any, module: str, outputs: Any, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """A mixture's load-balancing loss, and its share of the loss, as the model computes them."""
    config = model.config.get_text_config()
    experts = getattr(model, "num_experts", None) or config.num_experts
    balance = importlib.import_module(module).load_balancing_loss_func
    aux_loss = balance(outputs.router_logits, experts, config.num_experts_per_tok, attention_mask)
    return aux_loss, config.router_aux_loss_coef * aux_loss


def _fuses(model: Any, known: type[Any], given: dict[str, Any]) -> bool:
    if given.get("labels") is None or not (model.training or model.options.evaluation):
        return False
    head, kept, reason = model.lm_head, given.get("logits_to_keep", 0), None
    if isinstance(kept, Tensor) and kept.dim() != 1:
        reason = f"logits_to_keep has {kept.dim()} dimensions"
    reason = reason or _other_loss(known, model.loss_function) or called_otherwise(head, "lm_head", nn.Linear)
    if reason is not None:  # such a head may have no weight
        return stands_for(model, known, reason, labels=given["labels"])
    tensors = {name: given.get(name) for name in ("labels", "input_ids", "inputs_embeds")}
    return stands_for(model, known, **{"lm_head.weight": head.weight, "lm_head.bias": head.bias}, **tensors)


def _other_head(head: Any) -> str | None:
    """Why to call a head is not the product with its weight that we compute, None if it is."""
    if reason := called_otherwise(head, "lm_head", nn.Linear):
        return reason
    return other_kind("lm_head.weight", head.weight) or other_kind("lm_head.bias", head.bias)


@as_constant
def _other_loss(known: type[Any], function: Any) -> str | None:
    """Why a model's loss function is not the one of transformers that we compute, None if it is."""
    name = getattr(function, "__name__", type(function).__name__)
    if name != _LOSS:
        return f"its loss function is {name} and not {_LOSS}"
    if not is_made_by_hand(known) and not from_package(function, "transformers"):
        return f"its loss function is not the {_LOSS} of transformers"
    return None


_without_logits: set[str] = set()


@as_constant
def _tell_of_logits(name: str) -> None:
    """Say once of each class how to keep the logits."""
    if name not in _without_logits:
        _without_logits.add(name)
        warnings.warn(f"{name} returns logits=None with its loss: patch(model, keep_logits=True) keeps them.", stacklevel=3)


def _loss(model: Any, hidden: Tensor, labels: Tensor, given: dict[str, Any]) -> Any:
    shifted = given.get("shift_labels")
    return causal_lm_loss(
        hidden,
        model.lm_head.weight,
        labels,
        given.get("num_items_in_batch"),
        True if shifted is None else shifted.reshape(hidden.shape[:-1]),
        given.get("ignore_index", -100),
        model.lm_head.bias,
        softcap=getattr(model.config, "final_logit_softcapping", None),
        accum_dtype=model.options.accum_dtype,
        chunk_tokens=model.options.chunk_tokens,
        memory_budget=model.options.memory_budget,
    )


def _logits(model: Any, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model.lm_head(hidden)
        softcap = getattr(model.config, "final_logit_softcapping", None)
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap
