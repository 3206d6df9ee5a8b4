"""The loss of an existing model: `patch(model)`, and which models compute it as `causal_lm_loss` does."""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.patching import Derived, Patch, Replacement, derived, obstacle, swap_classes
from torch import Tensor, nn

from .causal_lm import causal_lm_loss
from .option_checks import check_values
from .options import Options

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

    Called in training mode and with labels, a patched model returns that loss, and `logits=None`. Called otherwise it does
    what it did: evaluation and generation have logits. `ignore_index`, `shift_labels`, `num_items_in_batch`,
    `logits_to_keep` and a config's `final_logit_softcapping` count as before.

    The model keeps its parameters, hooks and flags; it gets a class derived from its own, of the same name, with another
    forward. So `state_dict` and `save_pretrained` are as before, and it can be copied, pickled and compiled. The linear
    layer's weight is read and the layer not called; where it has hooks, is not torch.nn.Linear any more or was replaced in
    its forward (LoRA, ZeRO-3, tensor parallel, accelerate), or the model was given another loss function, the model does
    what it did. Patch a model before it is sharded or wrapped.

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
        What was replaced and what was left, and why; `print` it. `.undo()` gives every model its class again; as a context
        manager it does so at the end.

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
    if not _is_plain(module.lm_head) and not obstacle(module):
        return "its lm_head is not a plain torch.nn.Linear"
    loss = getattr(module.loss_function, "__name__", type(module.loss_function).__name__)
    if loss != _LOSS:
        return f"its loss function is {loss} and not {_LOSS}"
    return Replacement(
        _patched(known, *options), "causal_lm_loss, with labels" + ("" if options.evaluation else " in training")
    )


class _Patched(Derived):
    options: _Options


def _patched(known: type[Any], *options: Any) -> type[nn.Module]:
    attributes = {
        "options": _Options(*options),
        "forward": _with_fused_loss(known.forward),
        "__module__": known.__module__,  # with its name, what transformers writes into a config and looks up
        "__qualname__": known.__qualname__,
    }
    return derived(known.__name__, (_Patched, known), attributes, _patched, known, *options)


def _with_fused_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    names = list(inspect.signature(original).parameters)[1:]
    output_type = _output_type(original)

    @functools.wraps(original)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        given = {**dict(zip(names, arguments, strict=False)), **keywords}
        if not _fuses(self, given):
            return original(self, *arguments, **keywords)
        labels, kept = given.pop("labels"), given.pop("logits_to_keep", 0)
        as_dict = given.pop("return_dict", None)
        has_router = "output_router_logits" in names
        if has_router and given.get("output_router_logits") is None:
            given["output_router_logits"] = self.config.get_text_config().output_router_logits
        outputs = self.model(**given)
        hidden = outputs.last_hidden_state
        if isinstance(kept, Tensor) or kept:
            hidden = hidden[:, kept if isinstance(kept, Tensor) else slice(-kept, None)]
        found: dict[str, Any] = {name: getattr(outputs, name, None) for name in output_type.__dataclass_fields__}
        found["loss"] = _loss(self, hidden, labels, given)
        found["logits"] = _logits(self, hidden) if self.options.keep_logits else None
        if has_router and given["output_router_logits"]:
            found["aux_loss"], share = _router_loss(self, original.__module__, outputs, given.get("attention_mask"))
            found["loss"] = found["loss"] + share
        result = output_type(**found)
        return result if (self.config.return_dict if as_dict is None else as_dict) else result.to_tuple()

    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # trainers read it
    del forward.__wrapped__  # or accelerate, unwrapping a model, would go on to the original
    return forward


def _output_type(forward: Callable[..., Any]) -> Any:
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


def _fuses(model: Any, given: dict[str, Any]) -> bool:
    kept = given.get("logits_to_keep", 0)
    return (
        given.get("labels") is not None
        and (model.training or model.options.evaluation)
        and not hasattr(model, "_loss_function")
        and _is_plain(model.lm_head)
        and (not isinstance(kept, Tensor) or kept.dim() == 1)
    )


def _is_plain(layer: Any) -> bool:
    """Whether calling it is nothing but a product with its weight."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) is nn.Linear and not any(len(kind) for kind in hooks) and "forward" not in layer.__dict__


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
