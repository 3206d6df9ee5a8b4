"""The operators registered with PyTorch, in its namespace `npu_fused_linear_cross_entropy`, and their autograd.

`forward` computes the outputs, the gradients of a loss that is one number if they are needed, and statistics of rows if they
are to be saved. `backward` computes the gradients of anything else from those statistics. `scale` multiplies gradients by
the upstream one, and by factors that were left for later. A result that is not asked for is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from npu_tiling.pytorch.autograd import Function, OperatorLibrary, apply, can_bypass_dispatcher, needs_gradient
from npu_tiling.pytorch.schemas import schema
from npu_tiling.pytorch.tensors import nothing, statistics_dtype
from torch import Tensor

from .compute import backward, count_saved, forward, is_unfinished, scale, scale_
from .options import GRADIENTS, NEEDS, Needs, Options, split
from .rows import Losses
from .ways import Inputs

OPERATORS = OperatorLibrary("npu_fused_linear_cross_entropy")
_ARGUMENTS = schema(Inputs, Options)
_OUTPUTS = "Tensor loss, Tensor z_loss, Tensor token_accuracy, Tensor predicted_tokens, Tensor lse, Tensor entropy"
_NOTHING_NEEDED = Needs(False, False, False)


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options, (save_statistics, *needed) = split(arguments, Inputs, Options)
    x, target, dtype = inputs.x, inputs.target, statistics_dtype(inputs.x.dtype)
    reduced = target.shape if options.reduction == "none" else ()
    unfinished = any(needed) and is_unfinished(x, inputs.class_weight, options)
    wanted: list[tuple[bool, Any, torch.dtype]] = [
        (True, reduced, dtype),
        (options.return_z_loss, reduced, dtype),
        (options.return_token_accuracy, (), dtype),
        (options.return_predicted_tokens, target.shape, torch.int64),
        (options.return_lse, target.shape, dtype),
        (options.return_entropy, target.shape, dtype),
        (save_statistics, (count_saved(options), target.numel()), dtype),
    ]
    outputs = [x.new_empty(shape, dtype=dtype) if asked else nothing(x) for asked, shape, dtype in wanted]
    return *outputs, *fake_gradients(inputs, needed), x.new_empty(3, dtype=dtype) if unfinished else nothing(x)


def fake_gradients(inputs: Any, needed: Sequence[bool], *others: Tensor | None) -> tuple[Tensor, ...]:
    """Shapes of the gradients of x, weight and bias, and of other inputs: the same for every operator that has them."""
    x = inputs.x
    tensors = (x, inputs.weight if inputs.weight_grad is None else None, inputs.bias, *others)
    return tuple(
        x.new_empty(tensor.shape, dtype=tensor.dtype) if need and tensor is not None else nothing(x)
        for tensor, need in zip(tensors, needed, strict=True)
    )


def _fake_backward(dloss: Tensor | None, dentropy: Tensor | None, statistics: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    inputs, _, needed = split(arguments, Inputs, Options)
    return fake_gradients(inputs, needed)


def _fake_scale(gradients: list[Tensor], factors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(gradient) for gradient in gradients]


def define_gradient(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Registers a gradient twice: under its name, and with `_added` where the weight's is added to the `weight_grad` given.

    They are two, since torch.func.vmap takes no operator that may change an argument.
    """
    name = schema.partition("(")[0]
    OPERATORS.define(schema, implementation, fake)
    changing = schema.replace(f"{name}(", f"{name}_added(", 1).replace("Tensor? weight_grad", "Tensor(a!) weight_grad")
    OPERATORS.define(changing, implementation, fake)
    OPERATORS.gradient(name)
    OPERATORS.gradient(f"{name}_added")


def gradient_of(name: str, weight_grad: Tensor | None) -> str:
    """The name of a gradient's operator."""
    return name if weight_grad is None else f"{name}_added"


OPERATORS.define(
    f"forward({_ARGUMENTS}, bool save_statistics, {NEEDS})"
    f" -> ({_OUTPUTS}, Tensor statistics, {GRADIENTS}, Tensor unfinished)",
    forward,
    _fake_forward,
)
define_gradient(
    f"backward(Tensor? dloss, Tensor? dentropy, Tensor statistics, {_ARGUMENTS}, {NEEDS}) -> ({GRADIENTS})",
    backward,
    _fake_backward,
)
OPERATORS.define(
    "scale(Tensor[] gradients, Tensor[] factors) -> Tensor[]",
    scale,
    _fake_scale,
    batched=lambda gradients, factors: [gradient * factor for gradient, factor in zip(gradients, factors, strict=True)],
)


class _LinearCrossEntropy(Function):
    """Of the results of `forward` the loss and the entropy have gradients."""

    @staticmethod
    def forward(ctx, run, x, weight, target, bias, class_weight, divisor, frozen, weight_grad, options):  # type: ignore[no-untyped-def]
        tensors = (x, weight, target, bias, class_weight, divisor, frozen)
        ctx.options, ctx.weight_grad = options, weight_grad
        ctx.set_materialize_grads(False)
        ctx.has_gradients = options.reduction != "none" and not options.return_entropy and weight_grad is None
        needs = _needs(ctx) if ctx.has_gradients else _NOTHING_NEEDED
        found = run(*tensors, weight_grad, *options, not ctx.has_gradients, *needs)
        *outputs, statistics, dx, dweight, dbias, unfinished = found
        if ctx.has_gradients:
            gradients = [gradient if need else None for gradient, need in zip((dx, dweight, dbias), needs, strict=True)]
            ctx.save_for_backward(*gradients, unfinished if is_unfinished(x, class_weight, options) else None)
        else:
            ctx.save_for_backward(statistics, *tensors)
        _, *extras, entropy = outputs
        constant = extras if options.return_entropy else (*extras, entropy)
        ctx.mark_non_differentiable(*(output for output in constant if output is not None))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, dloss, dz_loss, daccuracy, dpredicted, dlse, dentropy):  # type: ignore[no-untyped-def]
        needs = _needs(ctx)
        if dloss is None and dentropy is None:
            found: Sequence[Tensor | None] = (None, None, None)
        elif ctx.has_gradients:
            *gradients, unfinished = ctx.saved_tensors
            found = scaled(gradients, dloss, None if unfinished is None else unfinished.unbind())
        else:
            arguments = (*ctx.saved_tensors, ctx.weight_grad, *ctx.options, *needs)
            found = OPERATORS(gradient_of("backward", ctx.weight_grad), dloss, dentropy, *arguments)
        dx, dweight, dbias = (gradient if needed else None for gradient, needed in zip(found, needs, strict=True))
        return None, dx, dweight if ctx.weight_grad is None else None, None, dbias, None, None, None, None, None


def _needs(ctx) -> Needs:  # type: ignore[no-untyped-def]
    dx, dweight, _, dbias = ctx.needs_input_grad[1:5]
    return Needs(dx, dweight, dbias)


def scaled(gradients: Sequence[Tensor | None], dloss: Tensor, factors: Sequence[Tensor] | None) -> list[Tensor | None]:
    """Gradients times the upstream gradient and a factor each: in place unless the graph is kept for another backward."""
    present = [gradient for gradient in gradients if gradient is not None]
    each: Sequence[Tensor | None] = factors or [None] * len(gradients)
    numbers = [
        dloss if factor is None else dloss * factor
        for gradient, factor in zip(gradients, each, strict=True)
        if gradient is not None
    ]
    once = not torch._C._autograd._get_current_graph_task_keep_graph()
    if once and not torch.is_grad_enabled() and can_bypass_dispatcher((*present, *numbers)):
        scale_(present, numbers)
        return list(gradients)
    if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        # A second derivative must be an error: the operator refuses arguments that require a gradient. Under torch.func the
        # outer level knows that these gradients come from x and weight.
        present = [gradient.detach().requires_grad_() for gradient in present]
    found = iter(OPERATORS("scale", present, numbers))
    return [None if gradient is None else next(found) for gradient in gradients]


def linear_cross_entropy(*tensors: Tensor | None, options: Options) -> tuple[Tensor, ...]:
    """The six outputs, recorded by autograd."""
    return OPERATORS("forward", *tensors, *options, False, *_NOTHING_NEEDED)[: len(Losses._fields)]


def _recorded(run, x, weight, target, bias, class_weight, divisor, frozen, weight_grad, *others):  # type: ignore[no-untyped-def]
    """`forward` where autograd may record it: a call that asks for gradients itself is no function of x and weight."""
    tensors, end = (x, weight, target, bias, class_weight, divisor, frozen, weight_grad), len(Options._fields)
    save_statistics, *needed = others[end:]
    if needs_gradient((x, weight, bias)) and not save_statistics and not any(needed):
        outputs = apply(_LinearCrossEntropy, run, *tensors, Options(*others[:end]))
        return *outputs, None, None, None, None, None
    return run(*tensors, *others)


OPERATORS.autograd("forward", _recorded)
OPERATORS.gradient("scale")
