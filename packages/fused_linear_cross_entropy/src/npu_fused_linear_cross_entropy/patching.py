"""The loss of an existing model: `patch(model)`, and which models compute it as `causal_lm_loss` does."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from npu_tiling import arguments, models
from npu_tiling.dispatch import as_constant, in_forward_mode
from npu_tiling.models import Patch
from torch import Tensor, nn

from .api import causal_lm_loss, fused_linear_cross_entropy
from .call import Options
from .checks import HIGHEST_CAP, check_values

_LOSS = "ForCausalLMLoss"


class _Options(NamedTuple):
    evaluation: bool
    keep_logits: bool
    of_loss: tuple[tuple[str, Any], ...]


def patch(
    model: nn.Module,
    *,
    evaluation: bool = False,
    keep_logits: bool = False,
    accum_dtype: torch.dtype | None = None,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
) -> Patch:
    """Let `causal_lm_loss` compute the training loss of transformers' language models, without their logits.

    Called in training mode and with labels, a patched model returns that loss, and `logits=None`, with a warning the first
    time that says how to keep them. Called otherwise, or where this loss cannot stand for its own, it does what it did.
    Labels that are all ignored give a loss of 0, where the model's mean is NaN.

    The model gets a class derived from its own, of the same name, with another forward; parameters, hooks and flags stay.
    Patch a model before it is sharded or wrapped. Which models are taken, and when they do what they did: README.md.

    Known too are models whose forward calls torch's cross entropy itself, with rows of the head's result or a bias added to
    them (T5, BART, Whisper, NLLB; `fused_linear_cross_entropy` computes it, in the dtype of its result), and models whose
    head is inside another module (BERT). Compiled, those do what they did, with a warning.

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
    of_loss = {"accum_dtype": accum_dtype, "chunk_tokens": chunk_tokens, "memory_budget": memory_budget}
    check_values(Options(**of_loss))  # type: ignore[arg-type]
    options = _Options(evaluation, keep_logits, tuple(of_loss.items()))
    return models.swap_classes(model, "npu_fused_linear_cross_entropy", lambda module: _recognise(module, options))


def _recognise(module: nn.Module, options: _Options) -> models.Replacement | str | None:
    if isinstance(module, _Patched):
        return "it is patched already"
    if not type(module).__name__.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")):
        return None
    own = inspect.getattr_static(module, "loss_function", None)
    if own is None and "loss_function" not in module._modules:  # PEFT's wrapper has that of the model inside
        return None if hasattr(module, "loss_function") else f"{_UNKNOWN}: it has no loss_function"
    if reason := models.obstacle(module):
        return reason
    head = getattr(module, "get_output_embeddings", lambda: getattr(module, "lm_head", None))()
    name = next((name for name, child in module.named_modules() if child is head and name), None)
    if name is None:
        return f"{_UNKNOWN}: it has no output embeddings of its own"
    if reason := _other_head(head, name):
        return reason
    with models.undisturbed():
        made = _logits_of_loss_function(module, name, own, options.evaluation)
        if isinstance(made, str):
            if not _Probe(module, name).calls_cross_entropy():
                return made
            made = _Logits(name, 1.0, None, in_forward=True)
    logits = "" if options.keep_logits else "; logits are None then, with keep_logits=True they are kept"
    ours = "fused_linear_cross_entropy" if made.in_forward else "causal_lm_loss"
    when = "" if options.evaluation else " in training"
    return models.Replacement(_patched(type(module), options, made), f"{ours}, with labels{when}{logits}")


_UNKNOWN = "no language model that is known"


def _logits_of_loss_function(module: Any, name: str, own: Any, evaluation: bool) -> _Logits | str:
    """How a model makes the logits for its loss function, or why `causal_lm_loss` cannot stand for the two."""
    if reason := _other_loss(type(module), module.loss_function):
        return reason
    if not isinstance(own, property):
        return f"{_UNKNOWN}: its loss_function is no property, as transformers has it"
    made = _Probe(module, name).logits()
    if isinstance(made, str):
        return f"{_UNKNOWN}: {made}"
    if evaluation and _Probe(module, name, training=False).logits() != made:
        return f"{_UNKNOWN}: it changes its logits otherwise in evaluation"
    return made._replace(numbers=tuple(_numbers(module)))


def _numbers(model: Any) -> Iterator[tuple[str, str, float | None]]:
    """Numbers whose name says that logits may be multiplied by them, or capped at them."""
    for path in ("", "config", "config.text_config", getattr(model, "base_model_prefix", "")):
        for name, value in getattr(_owner(model, path), "__dict__", {}).items():
            if re.search("logit|cap|scal|multiplier", name) and (value is None or type(value) in (int, float)):
                yield path, name, value


def _owner(model: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        model = getattr(model, name, None)
    return model


def _changed(model: Any) -> str | None:
    """Why the model may make its logits otherwise than when it was patched; None if nothing says so."""
    for path, name, was in model.made.numbers:
        now = getattr(_owner(model, path), name, None)
        if now != was:
            return f"its {path and f'{path}.'}{name} is {now} and was {was} when it was patched"
    return None


class _Logits(NamedTuple):
    """How a model makes its logits: the layer's result, times a factor, under a cap.

    Attributes:
        in_forward: its forward itself calls torch's cross entropy with them, and no loss function.
        numbers: what that may follow from, as it was: of which module or configuration, the name, the value.
    """

    head: str
    logit_scale: float
    softcap: float | None
    in_forward: bool = False
    numbers: tuple[tuple[str, str, float | None], ...] = ()

    @property
    def eager_alone(self) -> bool:
        """Compilers follow neither a head inside another module nor a loss that stands for torch's."""
        return self.in_forward or "." in self.head


class _Probe:
    """A run of a model's own forward on a CPU, with a head, a loss and everything else that stand in for its own.

    Args:
        model: it is not called and not changed.
        name: its head's.
        training: whether it runs as in training, or as in evaluation.
    """

    def __init__(self, model: nn.Module, name: str, *, training: bool = True) -> None:
        self._model, self._name, self._training = model, name, training
        self._vocabulary: int = model.get_submodule(name).weight.shape[0]  # type: ignore[assignment, index]
        self._hidden = torch.linspace(-1, 1, _TOKENS * 8).reshape(1, _TOKENS, 8)
        self._tokens = torch.arange(1, _TOKENS + 1)[None]
        self._weight = torch.empty(1, 8).expand(self._vocabulary, 8)

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
        if softcap is not None and softcap > HIGHEST_CAP * max(1.0, scale):
            return f"its softcap is {softcap:g}, which is above what the loss takes"
        return _Logits(self._name, float(f"{scale:.6g}"), softcap)  # fp32 has rounded it

    def _passed(self, values: Tensor) -> Tensor | str:
        """What the model makes of logits of these values, for its loss function."""
        seen: list[Any] = []

        def called(x: Tensor) -> Tensor:
            seen.append(("head", getattr(x, "last_hidden_state", x).shape == self._hidden.shape))
            return values.expand(1, _TOKENS, len(values)).clone()

        def loss(logits: Tensor, labels: Tensor | None, *arguments: Any, **keywords: Any) -> Tensor:
            seen.append(("loss", torch.equal(keywords["shift_labels"] if labels is None else labels, self._tokens)))
            seen.append(logits)
            return torch.tensor(7.0)

        outputs = self._run(called, loss)
        if [each for each in seen if isinstance(each, tuple)] != [("head", True), ("loss", True)]:
            return "it calls its head and its loss function otherwise than once each, with all tokens and their labels"
        if outputs.loss.item() != 7.0 or "logits" not in outputs:
            return "its loss is not what its loss function returns"
        made: Tensor = seen[-1]
        return made

    def calls_cross_entropy(self) -> bool:
        """Whether its forward gives rows of its logits to torch's cross entropy, and does nothing else with them."""
        seen = []

        def loss(*arguments: Any, **keywords: Any) -> Tensor:
            seen.append(arguments)
            return torch.tensor(7.0)

        def read(hidden: Tensor) -> Tensor:
            raise ValueError("its logits are read")

        def head(x: Any) -> _Rows:
            return _Rows(getattr(x, "last_hidden_state", x), self._vocabulary, loss, read)

        try:
            outputs = self._run(head, None)
        except Exception:
            return False
        return len(seen) == 1 and isinstance(outputs.get("logits"), _Rows) and isinstance(outputs.loss, Tensor)

    def _run(self, head: Any, loss: Any) -> Any:
        known: Any = type(self._model)
        kind = type(known.__name__, (known,), {"loss_function": loss and staticmethod(loss)})
        twin = self._twin(kind, self._model, self._name.split("."), _Head(self._weight, None, head))
        if loss is None:  # rows of logits: a bias among the buffers may have any values, and may have none yet
            buffers = self._model._buffers.items()
            vars(twin)["_buffers"] = {name: None if each is None else torch.zeros(each.shape) for name, each in buffers}
        names, tokens = models.names_of(known.forward), self._tokens
        given = {"input_ids": tokens, "decoder_input_ids": tokens, "labels": tokens, "output_router_logits": False}
        given = {name: each for name, each in given.items() if name in names}
        return known.forward(twin, **given, return_dict=True)

    def _twin(self, kind: type[Any], module: Any, path: list[str], head: _Head) -> Any:
        first, *rest = path
        twin: Any = object.__new__(kind)
        vars(twin).update(vars(module), training=self._training)
        modules = {name: _Anything(self._hidden, each) for name, each in module._modules.items()}
        child = module._modules[first]
        vars(twin)["_modules"] = {**modules, first: self._twin(type(child), child, rest, head) if rest else head}
        return twin


_TOKENS = 3


class _Anything:
    """Stands in for a module: it has its numbers, can be called, and gives hidden states, as does every other attribute.

    Called as a layer is, with one tensor of real numbers, it gives that tensor back; or is itself, if it has no parameters.
    """

    def __init__(self, hidden: Tensor, module: Any) -> None:
        self.last_hidden_state, self._module = hidden, module

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        x = arguments[0] if len(arguments) == 1 and not keywords else None
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return _Results(self.last_hidden_state)
        return x if any(True for _ in self._module.parameters()) else self._module(x)  # a cap of logits has none

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
        self.out_features, self.in_features = weight.shape

    def __call__(self, hidden: Tensor) -> Any:
        return self._called(hidden)


class _Rows:
    """Stands in for logits of which a forward takes rows, adds a bias, and calls torch's cross entropy.

    Whatever else is asked of it is asked of the logits themselves: they are made then.

    Args:
        hidden: [..., H], its rows.
        vocabulary: V.
        loss: called with `hidden`, the bias, and by name the target and options of `torch.nn.functional.cross_entropy`.
        read: makes the logits [..., V] of `hidden`.
        bias: [V], what was added; None for nothing.
    """

    def __init__(self, hidden: Tensor, vocabulary: int, loss: Any, read: Any, bias: Tensor | None = None) -> None:
        self._hidden, self._loss, self._read, self._bias = hidden, loss, read, bias
        self.shape, self.dtype, self.device = torch.Size((*hidden.shape[:-1], vocabulary)), hidden.dtype, hidden.device

    def logits(self) -> Tensor:
        made = self._read(self._hidden)
        return made if self._bias is None else made + self._bias

    def _of(self, hidden: Tensor, bias: Tensor | None = None) -> _Rows:
        return _Rows(hidden, self.shape[-1], self._loss, self._read, self._bias if bias is None else bias)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.logits(), name)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> _Rows:
        return self

    def view(self, *shape: int) -> Any:
        if len(shape) < 2 or shape[-1] != self.shape[-1]:
            return self.logits().view(*shape)
        return self._of(self._hidden.reshape(*shape[:-1], self._hidden.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        whole = parts[-1] == slice(None) if ... in parts else sum(_dimensions(each) for each in parts) < len(self.shape)
        return self._of(self._hidden[index]) if whole else self.logits()[index]

    def __add__(self, other: Any) -> Any:
        is_bias = isinstance(other, Tensor) and other.numel() == self.shape[-1] == other.shape[-1] and self._bias is None
        return self._of(self._hidden, other.flatten()) if is_bias else self.logits() + other

    def __sub__(self, other: Any) -> Tensor:
        return self.logits() - other

    def __mul__(self, other: Any) -> Tensor:
        return self.logits() * other

    def __truediv__(self, other: Any) -> Tensor:
        return self.logits() / other

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if function is nn.functional.cross_entropy:
            names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
            given = {**dict(zip(names, arguments, strict=False)), **keywords}
            of = given.pop("input")
            old = [given.pop(name, None) for name in ("weight", "size_average", "reduce")]
            if old == [None] * 3 and given["target"].dim() == of._hidden.dim() - 1 == 1:
                return of._loss(of._hidden, of._bias, **given)
        return function(*_with_logits(arguments), **{name: _with_logits(each) for name, each in keywords.items()})


def _with_logits(value: Any) -> Any:
    if isinstance(value, _Rows):
        return value.logits()
    return type(value)(map(_with_logits, value)) if type(value) in (list, tuple) else value


def _dimensions(index: Any) -> int:
    """How many dimensions a part of an index takes."""
    return index.dim() if isinstance(index, Tensor) and index.dtype == torch.bool else int(index is not None)


class _Product(NamedTuple):
    """What a head was called with, and its own."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


class _Patched(models.Derived):
    options: _Options
    made: _Logits
    _products: dict[int, _Product | None]  # of the calls that are fused now, by their threads
    _npu_state = {"_products": dict}

    def _instead_of_logits(self, head: Any, hidden: Tensor) -> Any:
        """What its head returns: in a fused call rows or a column of `hidden`, unless logits are kept."""
        if _thread() not in self._products:
            return head(hidden)
        product = _Product(hidden, head.weight, head.bias)
        if self.made.in_forward:
            return _Rows(hidden, head.weight.shape[0], functools.partial(self._loss_of_rows, product), head)
        self._products[_thread()] = product
        with torch.no_grad():
            return head(hidden) if self.options.keep_logits else hidden[..., :1]

    def _loss_of_rows(self, product: _Product, rows: Tensor, added: Tensor | None, target: Tensor, **options: Any) -> Tensor:
        bias = product.bias if added is None else added if product.bias is None else product.bias + added
        loss = fused_linear_cross_entropy(rows, product.weight, target, bias, **options, **dict(self.options.of_loss))
        assert isinstance(loss, Tensor)
        return loss if torch.is_autocast_enabled(rows.device.type) else loss.to(rows.dtype)  # as torch's cross entropy

    def _fused_loss(
        self,
        logits: Any,
        labels: Tensor | None,
        vocab_size: Any = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        labels = shift_labels if labels is None else labels
        product = self._products[_thread()]
        assert product is not None and labels is not None
        hidden, weight, bias = product
        loss = causal_lm_loss(
            hidden,
            weight,
            labels,
            num_items_in_batch,
            True if shift_labels is None else shift_labels.reshape(hidden.shape[:-1]),
            ignore_index,
            bias,
            softcap=self.made.softcap,
            logit_scale=self.made.logit_scale,
            **dict(self.options.of_loss),
        )
        assert isinstance(loss, Tensor)
        return loss.float()  # as transformers' of fp64


def _patched(known: type[Any], options: _Options, made: _Logits) -> type[nn.Module]:
    getter = inspect.getattr_static(known, "loss_function").fget

    def loss_function(self: Any) -> Any:
        if _thread() in self._products:
            return self._fused_loss
        return getter(self) if _is_getter(known, getter) else inspect.getattr_static(known, "loss_function").__get__(self)

    attributes = {
        "options": options,
        "made": made,
        "forward": _with_fused_loss(known),
        "loss_function": property(loss_function, lambda self, value: known.loss_function.fset(self, value)),
        "__module__": known.__module__,  # with its name, what transformers writes into a config and looks up
        "__qualname__": known.__qualname__,
    }
    if "." not in made.head:
        attributes[made.head] = property(_head_of)
    return models.derived(known.__name__, (_Patched, known), attributes, _patched, known, options, made)


@as_constant
def _is_getter(known: type[Any], getter: Any) -> bool:
    """Whether this still gives models of a class their loss function; a compiler traces it, and no descriptor."""
    return getattr(inspect.getattr_static(known, "loss_function"), "fget", None) is getter


def _stand_in(model: Any, head: Any) -> _Head:
    return _Head(head.weight, head.bias, functools.partial(model._instead_of_logits, head))


def _head_of(self: Any) -> Any:
    head = self._modules[self.made.head]
    return _stand_in(self, head) if _thread() in self._products else head


@as_constant
def _thread() -> int:
    return threading.get_ident()


@contextlib.contextmanager
def _with_stand_in(model: Any) -> Iterator[None]:
    """The model with another head in its place, which is inside another module."""
    *path, name = model.made.head.split(".")
    modules = model.get_submodule(".".join(path))._modules
    head = modules[name]
    modules[name] = _stand_in(model, head)
    try:
        yield
    finally:
        modules[name] = head


def _with_fused_loss(known: type[Any]) -> Any:
    @models.with_signature_of(known)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        given = models.by_name(known.forward, arguments, keywords)
        if not _fuses(self, known, given):
            return known.forward(self, *arguments, **keywords)
        as_dict = given.pop("return_dict", None)
        self._products[_thread()] = None
        try:
            if "." in self.made.head:
                with _with_stand_in(self):
                    outputs = known.forward(self, **given, return_dict=True)
            else:
                outputs = known.forward(self, **given, return_dict=True)
        finally:
            del self._products[_thread()]
        with torch.no_grad():
            logits = _with_logits(outputs["logits"]) if self.options.keep_logits else _tell_of_logits(known.__name__)
        outputs = type(outputs)(**{**outputs, "logits": logits})
        return outputs if (self.config.return_dict if as_dict is None else as_dict) else outputs.to_tuple()

    return forward


def _fuses(model: Any, known: type[Any], given: dict[str, Any]) -> bool:
    if given.get("labels") is None or not (model.training or model.options.evaluation):
        return False
    name, reason = model.made.head, None
    *path, last = name.split(".")
    head = model.get_submodule(".".join(path))._modules[last]
    if isinstance(head, _Head):
        reason = f"a call in another thread has its {name}"
    elif in_forward_mode():
        reason = "forward-mode derivatives are computed, which our loss has not"
    elif model.made.eager_alone and torch.compiler.is_compiling():
        reason = "it is compiled, and its head or its loss is where compilers do not follow ours"
    else:
        reason = _other_cross_entropy() if model.made.in_forward else _other_loss(known, model.loss_function)
    reason = reason or _changed(model) or _hooks_above(model, name) or models.called_otherwise(head, name, nn.Linear)
    if reason is not None:  # such a head may have no weight
        return models.stands_for(model, known, reason, labels=given["labels"])
    tensors = {each: given.get(each) for each in ("labels", "input_ids", "inputs_embeds")}
    return models.stands_for(model, known, **{f"{name}.weight": head.weight, f"{name}.bias": head.bias}, **tensors)


def _hooks_above(model: nn.Module, name: str) -> str | None:
    """Why a call of a module between a model and its head is not its forward alone; None if each is."""
    path = name.split(".")[:-1]
    for length in range(1, len(path) + 1):
        above = ".".join(path[:length])
        if other := models.more_than_forward(model.get_submodule(above)):
            return f"the call of its {above} is not its forward alone: {other}"
    return None


def _other_head(head: Any, name: str) -> str | None:
    """Why a call of a head is not the product with its weight that we compute; None if it is."""
    if reason := models.called_otherwise(head, name, nn.Linear):
        return reason
    return models.other_kind(f"{name}.weight", head.weight) or models.other_kind(f"{name}.bias", head.bias)


@as_constant
def _other_loss(known: type[Any], function: Any) -> str | None:
    """Why a model's loss function is not the one of transformers that we compute, None if it is."""
    name = getattr(function, "__name__", type(function).__name__)
    if name != _LOSS:
        return f"its loss function is {name} and not {_LOSS}"
    if not models.is_made_by_hand(known):
        if not models.from_package(function, "transformers"):
            return f"its loss function is not the {_LOSS} of transformers"
        calls = function.__globals__.get("fixed_cross_entropy")
        if calls is not None and not models.from_package(calls, "transformers"):
            return "the fixed_cross_entropy of transformers was replaced"
    return _other_cross_entropy()


@as_constant
def _other_cross_entropy() -> str | None:
    is_of_torch = models.from_package(nn.functional.cross_entropy, "torch")
    return None if is_of_torch else "torch.nn.functional.cross_entropy was replaced"


_without_logits: set[str] = set()


@as_constant
def _tell_of_logits(name: str) -> None:
    """Say once of each class how to keep the logits."""
    if name not in _without_logits:
        _without_logits.add(name)
        warnings.warn(f"{name} returns logits=None with its loss: patch(model, keep_logits=True) keeps them.", stacklevel=3)
