"""RMSNorm in a model that is there already: `patch(model)`, and what a class computes in terms of our functions.

A class is known by its results, not by its name: its forward runs on a CPU, in a twin of the module with weights of ours.
`rms_norm` or `gated_rms_norm` has to give the same, for each pair of dtypes.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from npu_tiling import models
from npu_tiling.calls import statistics_dtype
from npu_tiling.dispatch import as_constant, is_autocast, is_cast_by_autocast, is_shape
from npu_tiling.models import Patch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .api import gated_rms_norm, rms_norm
from .call import CASTING_MODES
from .reference import ACTIVATIONS


class Variant(NamedTuple):
    """A variant of RMSNorm: what one of our functions is called with.

    Attributes:
        casting_mode, offset, dtype: see `rms_norm`.
        weight: "whole": the function has it; "summed": the function has 1 + weight, in the weight's dtype; "after": it
            multiplies what the function returns; "none": there is none.
        columns: each group of so many is normalised by itself; None for the whole row.
        activation, norm_before_gate: see `gated_rms_norm`.
    """

    casting_mode: str
    offset: float = 0.0
    weight: str = "whole"
    dtype: torch.dtype | None = None
    columns: int | None = None
    activation: str | None = None
    norm_before_gate: bool = True

    def __str__(self) -> str:
        options = f'casting_mode="{self.casting_mode}"'
        if self.activation is None:
            return f"rms_norm({options}, offset={self.offset})"
        return f'gated_rms_norm({options}, norm_before_gate={self.norm_before_gate}, activation="{self.activation}")'


Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]  # of x, the weight and the gate


@dataclass(frozen=True)
class Formula:
    """How a class computes RMSNorm.

    Attributes:
        variants: for the dtypes with which it does what our functions do.
        eps, weight: the attributes that it reads; of a weight None for no one.
        settings: its other attributes, with which it does so; WIDTH stands for a row's number of columns.
        under_autocast: the variants where autocast runs torch's rms_norm in fp32; None: it does not call that.
    """

    variants: tuple[tuple[Dtypes, Variant], ...]
    eps: str
    weight: str | None = "weight"
    settings: tuple[tuple[str, Any], ...] = ()
    under_autocast: tuple[tuple[Dtypes, Variant], ...] | None = None
    tables: tuple[dict[Dtypes, Variant], ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        under_autocast = self.variants if self.under_autocast is None else self.under_autocast
        object.__setattr__(self, "tables", (dict(self.variants), dict(under_autocast)))

    def table_of(self, x: Tensor) -> dict[Dtypes, Variant]:
        """The variants for rows where these are. PyTorch has the rule on CUDA from 2.12 on, and not for fp64."""
        is_wide = self.under_autocast is not None and is_autocast(x) and x.dtype != torch.float64
        plain, cast = self.tables
        return cast if is_wide and is_cast_by_autocast("aten::rms_norm", x.device.type) else plain


WIDTH = "the number of columns"
_MANY = 1024  # tokens of the longest sequence and of the largest batch that a class is tried with
FLOATS = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


def _variants(variant: Variant, mixed: Variant | None = None) -> tuple[tuple[Dtypes, Variant], ...]:
    pairs = [(x, weight, None) for x, weight in itertools.product(FLOATS, (*FLOATS, None))]
    return tuple((pair, mixed if mixed and pair[1] not in (pair[0], None) else variant) for pair in pairs)


LLAMA = Formula(_variants(Variant("llama"), Variant("llama", weight="after")), "variance_epsilon")
GEMMA = Formula(_variants(Variant("gemma", 1.0)), "eps")
TORCH = Formula(_variants(Variant("gemma")), "eps", under_autocast=_variants(Variant("gemma", dtype=torch.float32)))


def patch(model: nn.Module) -> Patch:
    """Let `rms_norm` and `gated_rms_norm` compute the RMSNorms of a model, whatever their classes are called.

    Each module gets a class derived from its own, whose forward calls `rms_norm` with that class's roundings and eps;
    parameters, hooks and flags stay. Patch a model before it is sharded or wrapped.

    A class is known by what it computes: its forward runs on a CPU with some thousand random numbers, for each dtype of
    rows and of weight, in training and in evaluation, with gradients and without, and of one, of many and of no tokens.
    Modules are tried that have Norm in their class's name, and others with one vector of parameters and no modules of their
    own.

    Every other module with Norm in its class's name is left alone. So are norms whose forward was replaced, as accelerate
    and kernelize do, or that of their class, and weights that are quantised or sharded. What becomes so after the patch
    computes what it did, with a warning. So does a norm whose settings change, or in dtypes with which its class rounds
    otherwise, or under a mode that is not torch's own; and while it is traced or exported to ONNX.

    Args:
        model: any module, changed in place.

    Returns:
        What was replaced, what was left, and what computed without our operators when it was called, with the reasons;
        `print` it. `.undo()` gives every module its class again; as a context manager it does so at the end.

    Source: transformers, `models/*/modeling_*.py`.
    """
    return models.swap_classes(model, "npu_rms_norm", _recognise)


def _recognise(module: nn.Module) -> models.Replacement | str | None:
    known = type(module)
    if isinstance(module, _Patched):
        return "it is patched already"
    if known.__module__.partition(".")[0] == __package__:
        return "it is one of this package already"
    is_called_norm = "norm" in known.__name__.lower()
    if not is_called_norm and not _may_be_a_norm(module):
        return None
    found = models.obstacle(module) or recognised(module)
    if isinstance(found, str):
        return found if is_called_norm else None
    return models.Replacement(_patched(known, found), str(found.variants[0][1]))


def _may_be_a_norm(module: nn.Module) -> bool:
    own, is_of_torch = list(module.parameters(recurse=False)), type(module).__module__.startswith("torch.")
    return len(own) == 1 and own[0].dim() == 1 and not is_of_torch and next(module.children(), None) is None


def normalise(formula: Formula, x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    """The result of a class with one of the formulas above, in the dtype that it has there."""
    y = _computed(formula.table_of(x), x, weight, eps, None)
    assert y is not None
    return y


def applied(formula: Formula, norm: Any, x: Tensor, gate: Tensor | None = None) -> Tensor | None:
    """The result of a module with this formula; None where settings or shapes are others, or it lacks the dtypes."""
    for name, value in formula.settings:
        if getattr(norm, name, None) != (x.shape[-1] if value == WIDTH else value):
            return None
    weight, eps = None if formula.weight is None else getattr(norm, formula.weight), getattr(norm, formula.eps)
    is_number = eps is None or (isinstance(eps, (float, int)) and 0 <= eps < torch.inf)
    if not (is_number and x.dim() and x.shape[-1] and (weight is None or is_shape(weight.shape, x.shape[-1:]))):
        return None  # the class adds a tensor, multiplies by one number, or by a weight for each token
    if gate is not None and not is_shape(gate.shape, x.shape):
        return None
    return _computed(formula.table_of(x), x, weight, eps, gate)


def _computed(
    variants: dict[Dtypes, Variant], x: Tensor, weight: Tensor | None, eps: float | None, gate: Tensor | None
) -> Tensor | None:
    variant = variants.get((x.dtype, None if weight is None else weight.dtype, None if gate is None else gate.dtype))
    if variant is None:
        return None
    if eps is None:
        eps = torch.finfo(statistics_dtype(x.dtype)).eps  # as in torch.nn.functional.rms_norm
    return _by_variant(variant, x, weight, eps, gate)


def _by_variant(variant: Variant, x: Tensor, weight: Tensor | None, eps: float, gate: Tensor | None) -> Tensor:
    factor = None if variant.weight in ("after", "none") or weight is None else weight
    if variant.weight == "summed" and factor is not None:
        factor = 1.0 + factor
    factor, gate = _taken(factor, x), _taken(gate, x)
    if variant.columns is not None:
        groups = (-1, variant.columns)
        x, factor, gate = x.unflatten(-1, groups), _in_groups(factor, groups), _in_groups(gate, groups)
    options: dict[str, Any] = {"offset": variant.offset, "casting_mode": variant.casting_mode, "dtype": variant.dtype}
    if gate is None:
        y = rms_norm(x, factor, eps, **options)
    else:
        options |= {"activation": variant.activation, "norm_before_gate": variant.norm_before_gate}
        y = gated_rms_norm(x, gate, factor, eps, **options)
    y = y if variant.columns is None else y.flatten(-2)
    return weight * y if variant.weight == "after" else y


def _taken(tensor: Tensor | None, x: Tensor) -> Tensor | None:
    """A parameter or a gate in a dtype that the norm of x takes: x's or fp32."""
    return tensor if tensor is None or tensor.dtype in (x.dtype, torch.float32) else tensor.float()


def _in_groups(tensor: Tensor | None, groups: tuple[int, int]) -> Tensor | None:
    return None if tensor is None else tensor.unflatten(-1, groups)


class _Patched(models.Derived):
    pass


def _patched(known: Any, formula: Formula) -> type[nn.Module]:
    @models.with_signature_of(known)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Tensor:
        given = models.in_order(known.forward, arguments, keywords)
        if len(given) in (1, 2):
            x, gate = given if len(given) == 2 else (*given, None)
            weight = None if formula.weight is None else getattr(self, formula.weight)
            if models.stands_for(self, known, input=x, gate=gate, weight=weight):
                y = applied(formula, self, x, gate)
                if y is not None:
                    return y
                models.stands_for(self, known, f"its settings have changed, or shapes, or it rounds {x.dtype} otherwise")
        original: Tensor = known.forward(self, *arguments, **keywords)
        return original

    return models.derived(f"Npu{known.__name__}", (_Patched, known), {"forward": forward}, _patched, known, formula)


def formula_of(known: Any) -> Formula | None:
    """What modules of a class compute that were made as by default, None if that is not known."""
    _find_formula(known)
    return _of_class[known]


@as_constant
def _find_formula(known: Any) -> None:
    if known in _of_class:
        return
    required = [
        each
        for each in inspect.signature(known).parameters.values()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    try:
        with torch.device("cpu"):
            found: Formula | str = recognised(known(*[64] * len(required)))
    except Exception as error:
        found = f"{error}"
    _of_class[known] = None if isinstance(found, str) else found


_of_class: dict[Any, Formula | None] = {}
_recognised: dict[Any, Formula | str] = {}  # by class, its forward, attributes and parameters


def recognised(norm: nn.Module) -> Formula | str:
    """What a module computes in terms of our functions, or why it is left alone."""
    known = type(norm)
    if isinstance(norm, nn.RMSNorm) and len(norm.normalized_shape) != 1:
        return f"it normalises over {len(norm.normalized_shape)} dimensions, and rms_norm over one"
    if next(norm.children(), None) is not None:
        return "no RMSNorm that is known: it has modules of its own"
    if reason := models.replaced_forward(known):
        return reason
    tensors = {name: each for own in (norm._parameters, norm._buffers) for name, each in own.items() if each is not None}
    if len(tensors) > 1 or any(each.dim() != 1 for each in tensors.values()):
        return f"no RMSNorm that is known: it has {', '.join(tensors)}, and not one vector of weights"
    settings = {name: value for name, value in vars(norm).items() if not name.startswith("_") and name != "training"}
    widths = [each.shape[0] or 64 for each in tensors.values()] or [64]  # ZeRO-3's weights are empty
    try:
        key = (known, known.forward, tuple(settings.items()), tuple(tensors), *widths)
        hash(key)
    except TypeError:
        return "no RMSNorm that is known: its attributes are more than numbers and names"
    if key not in _recognised:
        with models.undisturbed():
            _recognised[key] = _Probe(norm, next(iter(tensors), None), widths[0], settings).formula()
    return _recognised[key]


class _Probe:
    """A comparison of what a module computes with what our functions do.

    Args:
        norm: the module; its tensors are not read.
        weight: the name of its one tensor, None if it has none.
        width: D.
        settings: its attributes.
    """

    def __init__(self, norm: nn.Module, weight: str | None, width: int, settings: dict[str, Any]) -> None:
        self._norm, self._weight, self._width, self._settings = norm, weight, width, settings
        self._torch = _OfTorch()
        self._generator = torch.Generator().manual_seed(0)
        parameters = list(inspect.signature(type(norm).forward).parameters.values())[1:]
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        taken = [each for each in parameters if each.kind not in kinds]
        required = [each for each in taken if each.default is each.empty]
        self._gates = [gated for gated in (True, False) if len(required) <= 1 + gated <= len(taken)]
        self._shape = (3, 2 * -(-512 // width), width)  # as many numbers as tell modes apart

    def formula(self) -> Formula | str:
        """What it computes."""
        eps_names = [name for name, value in self._settings.items() if isinstance(value, float) or name == "eps"]
        if not eps_names:
            return "no RMSNorm that is known: it has no attribute with eps"
        for eps in eps_names:
            for weight in {self._weight: None, None: None}:
                if variants := dict(self._variants(eps, weight)):
                    if not self._reads_eps(variants, eps, weight):
                        continue
                    if not self._has_gradients(variants, eps, weight):
                        return "no RMSNorm that is known: its gradients are others"
                    rest = [(name, value) for name, value in self._settings.items() if name != eps]
                    pinned = tuple(
                        (name, WIDTH if type(value) is int and value == self._width else value) for name, value in rest
                    )
                    found = Formula(tuple(variants.items()), eps, weight, pinned)
                    if not self._torch.is_called:
                        return found
                    self._torch.in_fp32 = True
                    return replace(found, under_autocast=tuple(self._variants(eps, weight)))
        return "no RMSNorm that is known: rms_norm and gated_rms_norm give other values with each of their casting modes"

    def _variants(self, eps: str, weight: str | None) -> Iterator[tuple[Dtypes, Variant]]:
        """The dtypes of x, weight and gate with the variant that gives the same; none unless bf16 and fp32 have one."""
        for gated in self._gates:
            found: dict[Dtypes, Variant] = {}
            for dtypes in self._dtypes(weight, gated):
                x, factor, gate = self._numbers(dtypes)
                theirs = self._in_every_mode(x, factor, gate)
                candidates = dict.fromkeys(
                    (*found.values(), *self._candidates(weight, gated, next(iter(found.values()), None)))
                )
                given = (x, factor if weight else None, self._eps_of(eps, x), gate)
                variant = next((each for each in candidates if _is_same(theirs, _by_variant(each, *given))), None)
                if variant is not None:
                    found[dtypes] = variant
                elif len(found) < 2:
                    break
            else:
                if all(
                    self._is_by_rows(variant, dtypes, eps, weight) for dtypes, variant in itertools.islice(found.items(), 1)
                ):
                    yield from found.items()

    def _dtypes(self, weight: str | None, gated: bool) -> list[Dtypes]:
        alike = [(each, each) for each in FLOATS]
        half = (torch.bfloat16, torch.float16)
        mixed = [(each, torch.float32) for each in half] + [(torch.float32, each) for each in half]
        pairs = alike + mixed if self._weight is not None else alike
        return list(
            dict.fromkeys(
                (x, None if weight is None else own, gate)
                for gate_of in ((lambda x: x), (lambda x: torch.float32), (lambda x: torch.bfloat16))
                for x, own in pairs
                for gate in [gate_of(x) if gated else None]
            )
        )

    def _candidates(self, weight: str | None, gated: bool, found: Variant | None) -> Iterator[Variant]:
        """Ways to try; once one is found, those with its columns and gate."""
        numbers = [value for value in self._settings.values() if type(value) is int and 0 < value < self._width]
        sizes = [size for each in numbers if self._width % each == 0 for size in (each, self._width // each)]
        weights = [(0.0, "whole"), (1.0, "whole"), (0.0, "after"), (0.0, "summed")] if weight else [(0.0, "none")]
        gatings: Any = itertools.product(ACTIVATIONS, (True, False)) if gated else [(None, True)]
        of_rows = itertools.product((None, *sizes), gatings) if found is None else [(found.columns, found[5:])]
        for (columns, gating), dtype, (offset, own), mode in itertools.product(
            of_rows, (None, torch.float32), weights, CASTING_MODES
        ):
            yield Variant(mode, offset, own, dtype, columns, *gating)

    def _in_every_mode(self, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> Tensor | None:
        """What the module returns, with gradients and without, in training and in evaluation; None where that differs."""
        autocast = partial(torch.autocast, "cpu", torch.bfloat16)
        modes: tuple[Any, ...] = (contextlib.nullcontext, torch.no_grad, torch.inference_mode, autocast)
        theirs = self._original(x, weight, gate)
        for training, mode in itertools.product((True, False), modes):
            with mode():
                again = self._original(x.detach().requires_grad_(training), weight, gate, training=training)
            if not isinstance(again, Tensor) or not _is_same(theirs, again.detach()):
                return None
        return theirs

    def _is_by_rows(self, variant: Variant, dtypes: Dtypes, eps: str, weight: str | None) -> bool:
        """Whether the same is computed of tensors of other shapes and lengths, where the module takes them."""
        x, factor, gate = self._numbers(dtypes)
        rows, gates = x.reshape(-1, self._width), None if gate is None else gate.reshape(-1, self._width)
        for leading in ((-1,), (3, 2, -1), (1, 1), (1, -1), (-1, 1), (1, _MANY), (_MANY, 1), (0,), (1, 0)):
            few, shape = prod(leading), (*leading, self._width)
            taken = torch.arange(len(rows) if few < 0 else few) % len(rows)
            given = rows[taken].view(shape), None if gates is None else gates[taken].view(shape)
            theirs = self._original(given[0], factor, given[1])
            ours = _by_variant(variant, given[0], factor if weight else None, self._eps_of(eps, x), given[1])
            if theirs is not None and not _is_same(theirs, ours):
                return False
        return True

    def _eps_of(self, eps: str, x: Tensor) -> float:
        value: float | None = self._settings[eps]
        return torch.finfo(statistics_dtype(x.dtype)).eps if value is None else value

    def _reads_eps(self, variants: dict[Dtypes, Variant], eps: str, weight: str | None) -> bool:
        """Whether the module reads eps from its attribute of this name."""
        dtypes, variant = next((dtypes, variant) for dtypes, variant in variants.items() if dtypes[0] is torch.float32)
        x, factor, gate = self._numbers(dtypes)
        theirs = self._original(x, factor, gate, **{eps: 0.25})
        return _is_same(theirs, _by_variant(variant, x, factor if weight else None, 0.25, gate))

    def _has_gradients(self, variants: dict[Dtypes, Variant], eps: str, weight: str | None) -> bool:
        """Whether gradients are the same; roundings are not seen in them."""
        dtypes, variant = next((dtypes, variant) for dtypes, variant in variants.items() if dtypes[0] is torch.float32)
        results = []
        for ours in (True, False):
            x, factor, gate = self._numbers(dtypes, finite=True)
            wanted = [each.requires_grad_() for each in (x, factor if weight else None, gate) if each is not None]
            if ours:
                y = _by_variant(variant, x, factor if weight else None, 0.25, gate)
            else:
                y = self._original(x, factor, gate, **{eps: 0.25})
            if not y.requires_grad:
                return False
            results.append(torch.autograd.grad(y.square().sum(), wanted, allow_unused=True))
        return all(
            theirs is not None and torch.allclose(mine, theirs, rtol=1e-3, atol=1e-4 * mine.abs().max().item())
            for mine, theirs in zip(*results, strict=True)
        )

    def _numbers(self, dtypes: Dtypes, *, finite: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x, a weight and a gate, the same every time; rows from 1e-3, where eps counts, to 30, one past fp16's range.

        Unless they are to be finite, one row has infinity and another has NaN.
        """
        self._generator.manual_seed(0)
        options: dict[str, Any] = {"generator": self._generator, "dtype": torch.float32}
        x, gate = (torch.randn(self._shape, **options) for _ in range(2))
        x *= 10 ** (4.5 * torch.rand((*self._shape[:-1], 1), **options) - 3)
        x[-1, -1] *= 100 if dtypes[0] == torch.float16 else 1e9
        if not finite:
            x[0, 0, 0], x[1, 0, 0] = torch.inf, torch.nan
        weight = torch.randn(self._width, **options)
        own = dtypes[1] or dtypes[0]
        return (
            x.to(dtypes[0]),
            None if self._weight is None else weight.to(own),
            None if dtypes[2] is None else gate.to(dtypes[2]),
        )

    def _original(self, x: Tensor, weight: Tensor | None, gate: Tensor | None, **changed: Any) -> Any:
        """What a twin of the module with this weight returns; None where it raises."""
        twin = object.__new__(type(self._norm))
        vars(twin).update(vars(self._norm))
        own = {} if self._weight is None else {self._weight: weight}
        is_buffer = self._weight in self._norm._buffers
        vars(twin).update(_buffers=dict(self._norm._buffers), _parameters=dict(self._norm._parameters), **changed)
        vars(twin)["_buffers" if is_buffer else "_parameters"].update(own)
        try:
            with self._torch:
                return type(self._norm).forward(twin, x, *([] if gate is None else [gate]))
        except Exception:
            return None


class _OfTorch(TorchFunctionMode):
    """Sees whether torch's rms_norm is called, and may run it in fp32, as autocast does on some devices."""

    is_called = in_fp32 = False

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        given, named = list(arguments), keywords or {}
        if function in (nn.functional.rms_norm, torch.rms_norm):
            self.is_called = True
            wide = lambda each: each.float() if self.in_fp32 and isinstance(each, Tensor) else each  # noqa: E731
            given, named = list(map(wide, given)), {name: wide(each) for name, each in named.items()}
        return function(*given, **named)


def _is_same(theirs: Any, ours: Tensor) -> bool:
    """Whether two results differ in nothing but the order of sums."""
    if not isinstance(theirs, Tensor) or theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        return False
    steps = 8 if ours.dtype.itemsize >= 4 else 2
    rarely = 1.0 if ours.dtype.itemsize >= 4 else 0.004  # modes differ from each other in .157 at least
    unit, least = torch.finfo(ours.dtype).eps, torch.finfo(ours.dtype).tiny
    is_near = torch.allclose(theirs, ours, rtol=steps * unit, atol=least, equal_nan=True)
    differ = (theirs != ours) & ~(theirs.isnan() & ours.isnan())
    return is_near and (not differ.numel() or differ.double().mean().item() <= rarely)
