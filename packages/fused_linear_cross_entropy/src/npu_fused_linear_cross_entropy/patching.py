"""The loss of an existing model: `patch(model)`, and which models compute it as `causal_lm_loss` does."""

from __future__ import annotations

import inspect
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

    A model is known by what its forward does: it runs on a CPU with a head, a loss function and a base model that stand in
    for its own. It has to call a linear layer once, and its `loss_function` once, with the labels and
    that layer's result, at most times a factor and under a softcap (Gemma, Cohere, Granite). What else a model adds to its
    loss, as a router's, it adds as before: in training its own forward runs, with `causal_lm_loss` in the place of its loss.
    So are most causal language models of transformers known, and models of text and images, also as a part of another
    module. Others are left alone, with the reason.

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
    known: Any = type(module)
    is_called_so = known.__name__.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))
    if isinstance(module, _Patched):
        return "it is patched already"
    if not is_called_so or not hasattr(module, "loss_function"):
        return f"{_UNKNOWN}: it has no loss_function" if is_called_so else None
    if reason := obstacle(module):
        return reason
    head = getattr(module, "get_output_embeddings", lambda: getattr(module, "lm_head", None))()
    name = next((name for name, child in module.named_children() if child is head), None)
    if name is None:
        return f"{_UNKNOWN}: it has no output embeddings of its own"
    if reason := _other_head(head, name) or _other_loss(known, module.loss_function):
        return reason
    if not isinstance(inspect.getattr_static(known, "loss_function"), property):
        return f"{_UNKNOWN}: its loss_function is no property, as transformers has it"
    made = _Probe(module, name).logits()
    if isinstance(made, str):
        return f"{_UNKNOWN}: {made}"
    logits = "" if options.keep_logits else "; logits are None then, with keep_logits=True they are kept"
    return Replacement(
        _patched(known, *options, made), f"causal_lm_loss, with labels{'' if options.evaluation else ' in training'}{logits}"
    )


_UNKNOWN = "no causal language model that is known"


class _Logits(NamedTuple):
    """How a model makes its logits: the layer's result, times a factor, under a cap."""

    head: str
    logit_scale: float
    softcap: float | None


class _Probe:
    """A run of a model's own forward on a CPU, with a head, a loss and everything else that stand in for its own.

    Args:
        model: it is not called and not changed.
        name: its head's.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model, self._name = model, name
        self._vocabulary: int = model.get_submodule(name).weight.shape[0]  # type: ignore[assignment, index]

    def logits(self) -> _Logits | str:
        """What it does with the head's result, or why that is not what `causal_lm_loss` does."""
        points = torch.cat((torch.tensor([-1e8, -1e-3, 1e-3, 1e8]), torch.linspace(-200, 200, 60)))
        points = points.repeat(self._vocabulary // 64 + 1)[: self._vocabulary]
        if len(points) < 4:
            return "its head has fewer than four columns"
        try:
            passed = self._passed(points)
            narrow = self._passed(points[:1])
        except Exception as error:
            return f"its forward does not run by itself ({type(error).__name__}: {error})"
        if isinstance(passed, str):
            return passed
        if isinstance(narrow, str) or passed.shape != (1, _TOKENS, self._vocabulary):
            return "it changes the shape of its logits"
        scale = passed[0, 0, 2].item() / 1e-3
        top = passed[0, 0, 3].item()
        softcap = top if top < 0.5e8 * scale else None
        scaled = points * scale
        expected = scaled if softcap is None else softcap * torch.tanh(scaled / softcap)
        if scale <= 0 or not torch.allclose(passed[0].float(), expected.expand(_TOKENS, -1), rtol=1e-5, atol=1e-6 * scale):
            return "it changes its logits by more than a factor and a softcap"
        return _Logits(self._name, float(f"{scale:.6g}"), softcap)  # fp32 has rounded it

    def _passed(self, values: Tensor) -> Tensor | str:
        """What the model makes of logits of these values, for its loss function."""
        known: Any = type(self._model)
        hidden = torch.linspace(-1, 1, _TOKENS * 8).reshape(1, _TOKENS, 8)
        tokens = torch.arange(1, _TOKENS + 1)[None]
        seen: list[Any] = []

        def called(x: Tensor) -> Tensor:
            seen.append(("head", x.shape == hidden.shape))
            return values.expand(1, _TOKENS, len(values)).clone()

        def loss(logits: Tensor, labels: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            seen.append(("loss", torch.equal(labels, tokens)))
            seen.append(logits)
            return torch.tensor(7.0)

        twin: Any = object.__new__(type(known.__name__, (known,), {"loss_function": staticmethod(loss)}))
        vars(twin).update(vars(self._model), training=True)
        rest = {name: _Anything(hidden, module) for name, module in self._model._modules.items()}
        vars(twin)["_modules"] = {**rest, self._name: _Head(hidden, None, called)}
        names = names_of(known.forward)
        given = {"input_ids": tokens, "labels": tokens, "return_dict": True, "output_router_logits": False}
        outputs = known.forward(twin, **{name: each for name, each in given.items() if name in (*names, "return_dict")})
        if [each for each in seen if isinstance(each, tuple)] != [("head", True), ("loss", True)]:
            return "it calls its head and its loss function otherwise than once each, with all tokens and their labels"
        if outputs.loss.item() != 7.0 or "logits" not in outputs:
            return "its loss is not what its loss function returns"
        made: Tensor = seen[-1]
        return made


_TOKENS = 3


class _Anything:
    """Stands in for a module: it has its numbers, can be called, and gives hidden states, as does every other attribute."""

    def __init__(self, hidden: Tensor, module: Any) -> None:
        self.last_hidden_state, self._module = hidden, module

    def __call__(self, *arguments: Any, **keywords: Any) -> _Results:
        return _Results(self.last_hidden_state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._module, name, None)
        return value if isinstance(value, (int, float, str)) else self


class _Results:
    """What a base model returns: its hidden states, and None for everything else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: Any) -> Any:
        return self.last_hidden_state if place == 0 else () if isinstance(place, slice) else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Head:
    """Stands in for the head of a model while its forward runs."""

    def __init__(self, weight: Any, bias: Any, called: Any) -> None:
        self.weight, self.bias, self._called = weight, bias, called

    def __call__(self, hidden: Tensor) -> Any:
        return self._called(hidden)


class _Patched(Derived):
    options: _Options
    made: _Logits
    _fuses_now: bool
    _hidden: Tensor | None
    _npu_state = {"_fuses_now": False, "_hidden": None}

    def _keep_hidden(self, hidden: Tensor) -> Tensor:
        """Stands in for the head in a fused call: a column in place of the logits, unless they are kept."""
        self._hidden = hidden
        with torch.no_grad():
            return self._modules[self.made.head](hidden) if self.options.keep_logits else hidden[..., :1]  # type: ignore[misc]

    def _fused_loss(
        self,
        logits: Any,
        labels: Tensor,
        vocab_size: Any = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        head: Any = self._modules[self.made.head]
        assert self._hidden is not None
        return causal_lm_loss(
            self._hidden,
            head.weight,
            labels,
            num_items_in_batch,
            True if shift_labels is None else shift_labels.reshape(self._hidden.shape[:-1]),
            ignore_index,
            head.bias,
            softcap=self.made.softcap,
            logit_scale=self.made.logit_scale,
            accum_dtype=self.options.accum_dtype,
            chunk_tokens=self.options.chunk_tokens,
            memory_budget=self.options.memory_budget,
        )


def _patched(known: type[Any], *options: Any) -> type[nn.Module]:
    *own, made = options
    of_class = inspect.getattr_static(known, "loss_function")
    loss_function = of_class.fget

    attributes = {
        "options": _Options(*own),
        "made": made,
        "forward": _with_fused_loss(known),
        made.head: property(_head_of),
        "loss_function": property(lambda self: self._fused_loss if self._fuses_now else loss_function(self), of_class.fset),
        "__module__": known.__module__,  # with its name, what transformers writes into a config and looks up
        "__qualname__": known.__qualname__,
    }
    return derived(known.__name__, (_Patched, known), attributes, _patched, known, *options)


def _head_of(self: Any) -> Any:
    head = self._modules[self.made.head]
    return _Head(head.weight, head.bias, self._keep_hidden) if self._fuses_now else head


def _with_fused_loss(known: type[Any]) -> Any:
    @with_signature_of(known)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        given = by_name(known.forward, arguments, keywords)
        if not _fuses(self, known, given):
            return known.forward(self, *arguments, **keywords)
        as_dict = given.pop("return_dict", None)
        self._fuses_now = True
        try:
            outputs = known.forward(self, **given, return_dict=True)
        finally:
            self._fuses_now, self._hidden = False, None
        if not self.options.keep_logits:
            outputs = type(outputs)(**{**outputs, "logits": _tell_of_logits(known.__name__)})
        return outputs if (self.config.return_dict if as_dict is None else as_dict) else outputs.to_tuple()

    return forward


def _fuses(model: Any, known: type[Any], given: dict[str, Any]) -> bool:
    if given.get("labels") is None or not (model.training or model.options.evaluation):
        return False
    name = model.made.head
    head = model._modules[name]
    reason = _other_loss(known, model.loss_function) or called_otherwise(head, name, nn.Linear)
    if reason is not None:  # such a head may have no weight
        return stands_for(model, known, reason, labels=given["labels"])
    tensors = {each: given.get(each) for each in ("labels", "input_ids", "inputs_embeds")}
    return stands_for(model, known, **{f"{name}.weight": head.weight, f"{name}.bias": head.bias}, **tensors)


def _other_head(head: Any, name: str) -> str | None:
    """Why to call a head is not the product with its weight that we compute, None if it is."""
    if reason := called_otherwise(head, name, nn.Linear):
        return reason
    return other_kind(f"{name}.weight", head.weight) or other_kind(f"{name}.bias", head.bias)


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
