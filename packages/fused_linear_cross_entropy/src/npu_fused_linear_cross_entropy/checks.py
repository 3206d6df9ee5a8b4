"""Checks of the public functions' arguments, autocast's casts of their tensors, and the loss of DTensors.

DTensors: a vocabulary split over ranks, or tokens, each on its own dimensions of the mesh.

    x              weight         loss                                     gradient of x    gradient of weight
    Replicate()    Replicate()    Replicate()                              Replicate()      Replicate()
    Replicate()    Shard(0)       Replicate()                              Replicate()      Shard(0)
    Shard(i)       Replicate()    Partial(), or Shard(i) of one a token    Shard(i)         Partial()
    Shard(0)       Shard(0)       Replicate()                              Shard(0)         Shard(0)

The target is placed as x is, bias and class weights as the weight is. In the last row ranks gather x, as `sequence_parallel`
does, and the target is Replicate(). Where the vocabulary is split, ranks send what `process_group` sends. Where tokens are
split and the loss is a mean, each rank sends its count of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from npu_tiling import arguments, device_for
from npu_tiling.calls import statistics_dtype
from npu_tiling.dispatch import are_transforms_active, is_autocast
from npu_tiling.dtensor import Shards, is_distributed, is_replicated, shard, summed
from torch import Tensor
from torch.distributed import ProcessGroup

from .call import (
    DIVERGENCES,
    NAMES,
    REDUCTIONS,
    Distillation,
    DistillationOptions,
    EachOptions,
    Forward,
    LinearCrossEntropyOutput,
    Options,
    replaced,
    whole_shape,
)
from .tokens import are_counted

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


# Options.

_Checked = TypeVar("_Checked", Options, DistillationOptions)
_PLACES = 2**24  # columns up to which fp32 counts
HIGHEST_CAP = 1e4  # kernels make tanh of exponentials: logits are off by 6e-8 times their cap
_MOST_CHECKED = 1024
_checked: dict[Hashable, Any] = {}
# Options that are numbers, with their limits, and those that are one of a few words.
_POSITIVE: dict[str, Any] = {"above": 0}
_NUMBERS: dict[str, dict[str, Any]] = {
    "label_smoothing": {"least": 0, "most": 1},
    "lse_square_scale": {},
    "logit_scale": {},
    "softcap": {**_POSITIVE, "or_none": True},
    "beta": _POSITIVE,
    "temperature": _POSITIVE,
    "soft_weight": {},
    "hard_weight": {},
    "teacher_softcap": {**_POSITIVE, "or_none": True},
    "teacher_logit_scale": {},
}
_WORDS = {"reduction": REDUCTIONS, "divergence": DIVERGENCES}
_FLAGS = {
    kind: [name for name, default in kind._field_defaults.items() if default is False]
    for kind in (Options, DistillationOptions)
}


class Part(NamedTuple):
    """Which part of a vocabulary the weight is; see `fused_linear_cross_entropy`."""

    process_group: ProcessGroup | None = None
    vocab_range: tuple[int, int] | None = None
    vocab_size: int | None = None


def named_options(options: Mapping[str, Any], *, taken: Collection[str] = ()) -> tuple[Part, Options]:
    """`Part` and `Options` by name, the defaults where none are given; their values are not checked yet.

    Args:
        taken: options of `fused_linear_cross_entropy` that this caller sets itself.
    """
    allowed = [name for name in (*NAMES, *Part._fields) if name not in taken]
    for name in options:
        if name not in allowed:
            raise TypeError(f"{name} is no option here: {', '.join(allowed)} are.")
    found = Options(**{name: value for name, value in options.items() if name in NAMES})
    return Part(*(options.get(name) for name in Part._fields)), found


def checked_options(weight: Tensor, part: Part, options: _Checked) -> _Checked:
    """The options with the weight's part of the vocabulary, or an error that names the wrong option.

    Checked options are remembered: every training step passes the same.
    """
    arguments.dense("weight", weight)
    key: Hashable = None
    if not torch.compiler.is_compiling():
        group, vocab_range, size = part
        of_group = None
        if group is not None:
            if not isinstance(group, ProcessGroup):
                kind = type(group).__name__
                raise TypeError(f"process_group is a {kind} and must be a torch.distributed.ProcessGroup or None.")
            chip = None if vocab_range is None else device_for(weight.device)  # whose default budget cuts tokens
            of_group = (group.group_name, group.rank(), group.size(), chip)
        types = tuple(map(type, options))  # 1, 1.0 and True are equal
        key = (options, types, weight.shape, weight.dtype, of_group, vocab_range, size)
        try:
            known: _Checked | None = _checked.get(key)
        except TypeError:  # something without a hash is checked every time
            known = key = None
        if known is not None:
            return known
    checked: _Checked = _check_options(weight, part, options)
    if key is not None:
        if len(_checked) >= _MOST_CHECKED:
            _checked.clear()
        _checked[key] = checked
    return checked


def check_values(options: Any) -> Any:
    """The options with numbers as floats, or an error that names the one that is wrong with any weight."""
    given: dict[str, Any] = {name: getattr(options, name) for name in type(options)._fields}
    arguments.whole("ignore_index", options.ignore_index)
    for name, words in _WORDS.items():
        if name in given:
            arguments.one_of(name, given[name], words)
    changed: dict[str, Any] = {
        name: arguments.number(name.replace("teacher_", "teacher."), given[name], **limits)
        for name, limits in _NUMBERS.items()
        if name in given
    }
    for of in ("", "teacher_"):
        cap, most = changed.get(f"{of}softcap"), HIGHEST_CAP * max(1.0, abs(changed.get(f"{of}logit_scale", 1.0)))
        if cap is not None and cap > most:
            name = f"{of.replace('_', '.')}softcap"
            raise ValueError(f"{name} is {cap} and must be at most {most:g}, above which tanh loses digits; None is no cap.")
    if changed.get("beta", 0) >= 1:
        raise ValueError(f"beta is {given['beta']} and must be above 0 and below 1.")
    if options.accum_dtype is not None and not isinstance(options.accum_dtype, torch.dtype):
        raise TypeError(f"accum_dtype is {options.accum_dtype!r} and must be torch.float32, weight's dtype or None.")
    for name in ("chunk_tokens", "memory_budget"):
        changed[name] = arguments.whole(name, given[name], least=1, or_none=True)
    arguments.flags(**{name: given[name] for name in _FLAGS[type(options)]})
    return replaced(options, **changed)


def _check_options(weight: Tensor, part: Part, options: EachOptions) -> Any:
    if weight.dim() != 2 or not weight.shape[0] or not weight.shape[1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)} and must have shape (V, H), both at least 1.")
    options = check_values(options)
    if options.accum_dtype not in (None, torch.float32, weight.dtype):
        raise TypeError(f"accum_dtype is {options.accum_dtype} and must be torch.float32, weight's dtype or None.")
    group, first, size = _part(weight.shape[0], part)
    if options.sequence_parallel and not group:
        raise ValueError("sequence_parallel is True and must be False where there is no process_group.")
    checked = replaced(options, group=group, vocab_first=first, vocab_size=size)
    if checked.of_head.argmax and size > _PLACES:
        asked = "return_predicted_tokens or return_token_accuracy"
        raise ValueError(f"The vocabulary has {size} columns and must have at most {_PLACES} for {asked}.")
    return checked


def _part(rows: int, part: Part) -> tuple[str, int, int]:
    """Name of the group, the first row, and how many rows all ranks have."""
    group, vocab_range, size = part
    if group is None:
        if vocab_range is not None or size is not None:
            raise ValueError("vocab_range and vocab_size must be left out where process_group is.")
        return "", 0, rows
    if vocab_range is None:
        return group.group_name, group.rank() * rows, group.size() * rows
    first, last = arguments.span("vocab_range", vocab_range)
    if arguments.whole("vocab_size", size, or_none=True) is None:
        raise ValueError("vocab_size is None and must be given with vocab_range.")
    assert size is not None
    if not 0 <= first <= last <= size or last - first != rows:
        raise ValueError(f"vocab_range is {vocab_range} and must be {rows} rows, weight's, within vocab_size, {size}.")
    return group.group_name, first, size


# Tensors.


def check_weight_grad(weight_grad: Tensor | None, weight: Tensor, accum_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype in which the weight's gradient is summed: weight_grad's, if it is given, fp64 where the weight is."""
    arguments.tensor("weight_grad", weight_grad, or_none=True)
    if weight_grad is None:
        return torch.float64 if accum_dtype == torch.float32 and weight.dtype == torch.float64 else accum_dtype
    arguments.tensor("weight", weight)
    arguments.shape("weight_grad", weight_grad, weight.shape)
    arguments.device("weight_grad", weight_grad, weight, "weight's")
    if weight_grad.dtype != weight.dtype:
        arguments.dtype("weight_grad", weight_grad, *dict.fromkeys((weight.dtype, statistics_dtype(weight.dtype))))
    if accum_dtype not in (None, weight_grad.dtype):
        raise TypeError(f"accum_dtype is {accum_dtype} and must be weight_grad's, {weight_grad.dtype}, or None.")
    if weight_grad.requires_grad:
        raise ValueError("weight_grad requires a gradient and must not.")
    if is_distributed((weight_grad, weight)):
        raise ValueError("weight_grad must be left out where there are DTensors.")
    if not torch.compiler.is_compiling() and are_transforms_active():
        raise NotImplementedError("weight_grad must be left out under torch.func, whose functions change no argument.")
    return weight_grad.dtype


def autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a linear layer as autocast casts them; all as they are where x is fp64, which it leaves."""
    arguments.dense("x", x)
    arguments.tensor("bias", bias, or_none=True)
    if not is_autocast(x) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (x, weight))
    if bias is not None and bias.is_floating_point() and bias.dtype != torch.float64:
        bias = bias.to(dtype)
    return x, weight, bias


def check_head(x: Tensor, weight: Tensor, bias: Tensor | None, frozen: Tensor | None) -> None:
    """A linear layer's types, dtypes, shapes and devices: x has the columns of the weight and of the frozen one."""
    arguments.floating("x", x)
    arguments.parameter("weight", weight, (weight.shape,), x, "x's")
    arguments.parameter("bias", bias, (weight.shape[:1],), x, "x's", or_none=True)
    frozen, rank = (weight, 0) if frozen is None else (frozen, weight.shape[1])
    if x.dim() == 0 or x.shape[-1] != frozen.shape[1] + rank:
        shape = (*x.shape[:-1], x.shape[-1] - rank) if x.dim() else ()
        raise ValueError(f"x has shape {shape} and must have weight's last dimension, {frozen.shape[1]}.")
    if rank:
        arguments.parameter_dtype("weight", frozen, x, "x's")
        arguments.device("weight", frozen, x, "x's")


def as_labels(target: Any) -> Any:
    """uint8 targets, which PyTorch's cross_entropy takes, in a dtype that holds any ignore_index; others as they are."""
    return target.int() if isinstance(target, Tensor) and target.dtype == torch.uint8 else target


def check_target(target: Tensor, x: Tensor, options: EachOptions) -> None:
    """Columns of the vocabulary, one for each token of x."""
    arguments.dtype("target", target, torch.int64, torch.int32)
    arguments.shape("target", target, whole_shape(x, options))
    arguments.device("target", target, x, "x's")


def check_loss(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    frozen: Tensor | None,
    options: Options,
) -> None:
    """Types, dtypes, shapes and devices."""
    check_head(x, weight, bias, frozen)
    check_target(target, x, options)
    if class_weight is not None:
        arguments.shape("class_weight", class_weight, weight.shape[:1])
        if not class_weight.is_floating_point():
            raise TypeError(f"class_weight is {class_weight.dtype} and must be floating point.")
        arguments.device("class_weight", class_weight, x, "x's")


def adapted(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter: tuple[Tensor, Tensor] | None,
    weight_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """x, weight and bias as autocast casts them, and a frozen weight: None without an adapter (u [..., R], b [V, R]).

    With one x is [x, u], the weight is b, and the frozen weight is the weight: logits are x frozen^T + u b^T + bias.
    """
    if adapter is None:
        return *autocast(x, weight, bias), None
    u, b = arguments.pair("adapter", adapter, "(u, b)")
    arguments.floating("x", x)
    arguments.floating("adapter[0]", u)
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError("weight requires a gradient and must not where there is an adapter: detach it.")
    if weight_grad is not None:
        raise ValueError("weight_grad must be left out where there is an adapter.")
    if is_distributed((x, weight, u, b)):
        raise ValueError("adapter must be left out where there are DTensors.")
    rank = u.shape[-1] if u.dim() else 1
    arguments.shape("adapter[0]", u, (*x.shape[:-1], rank))
    arguments.device("adapter[0]", u, x, "x's")
    x, weight, bias = autocast(x, weight, bias)
    _, b, _ = autocast(x, b, None)
    arguments.parameter("adapter[1]", b, ((weight.shape[0], rank),), x, "x's")
    return torch.cat((x, u.to(x.dtype)), -1), b, bias, weight


class Teacher(NamedTuple):
    """A teacher's head: logits t = logit_scale (x weight^T + bias), or softcap tanh(t / softcap). It gets no gradients.

    Attributes:
        x: [..., H'], with the leading dimensions of the student's x; H' may differ from H.
        weight: [V, H'], x's dtype or fp32.
        bias: [V], x's dtype or fp32.
        softcap, logit_scale: as the student's.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0


def checked_teacher(teacher: Any, teacher_probs: Any, teacher_top_k: Any) -> Teacher | None:
    """The teacher's head; None where probabilities are given."""
    if sum([each is not None for each in (teacher, teacher_probs, teacher_top_k)]) != 1:
        raise ValueError("teacher, teacher_probs and teacher_top_k: one of them must be given, and no other.")
    if teacher_top_k is not None:
        arguments.pair("teacher_top_k", teacher_top_k, "(ids, log_probs)")
    if teacher is None:
        arguments.tensor("teacher_probs", teacher_probs, or_none=True)
        return None
    if not isinstance(teacher, tuple) or not 2 <= len(teacher) <= len(Teacher._fields):
        raise TypeError(f"teacher is a {type(teacher).__name__} and must be a Teacher, or a tuple (x, weight, bias).")
    made = Teacher(*teacher)
    for name in ("x", "weight"):
        arguments.tensor(f"teacher.{name}", getattr(made, name))
    arguments.tensor("teacher.bias", made.bias, or_none=True)
    return made


def check_distillation(call: Distillation) -> None:
    """Types, dtypes, shapes and devices."""
    x, weight, target, bias, options = call.x, call.weight, call.target, call.bias, call.options
    teacher_x, teacher_weight, teacher_bias = call.teacher_x, call.teacher_weight, call.teacher_bias
    teacher_probs = call.teacher_probs
    if is_distributed((x, weight, target, bias, teacher_x, teacher_weight, teacher_bias, teacher_probs)):
        raise TypeError("x, weight and the teacher's tensors must be plain tensors, not DTensors: gather the weights first.")
    check_head(x, weight, bias, call.frozen)
    if teacher_x is not None and teacher_weight is not None:
        arguments.rows("teacher.x", teacher_x)
        arguments.shape("teacher.x", teacher_x, (*x.shape[:-1], teacher_x.shape[-1]))
        arguments.parameter(
            "teacher.weight", teacher_weight, ((weight.shape[0], teacher_x.shape[-1]),), teacher_x, "teacher.x's"
        )
        arguments.parameter("teacher.bias", teacher_bias, (weight.shape[:1],), teacher_x, "teacher.x's", or_none=True)
        arguments.device("teacher.x", teacher_x, x, "x's")
    if teacher_probs is not None:
        arguments.shape("teacher_probs", teacher_probs, (*whole_shape(x, options), weight.shape[0]))
        arguments.device("teacher_probs", teacher_probs, x, "x's")
        if not teacher_probs.is_floating_point():
            raise TypeError(f"teacher_probs is {teacher_probs.dtype} and must be floating point.")
    check_hard_weight(target, options)
    if target is not None:
        check_target(target, x, options)


def check_hard_weight(target: Tensor | None, options: DistillationOptions) -> None:
    """Raises ValueError where the cross entropy has a weight, and there are no targets."""
    if target is None and options.hard_weight:
        raise ValueError(f"target is None and must be given where hard_weight is not 0: it is {options.hard_weight}.")


_BY_TOKEN = ("predicted_tokens", "lse", "entropy")


def loss_of_parts(run: Callable[[Forward], LinearCrossEntropyOutput], call: Forward) -> LinearCrossEntropyOutput:
    """`run(call)` on each rank's part."""
    options = call.options
    if options.group:
        raise ValueError("process_group must be left out where weight is a DTensor, whose mesh says who has what.")
    x, target, class_weight, divisor = call.x, call.target, call.class_weight, call.divisor
    names = ("x", "weight", "target", "bias", "class_weight")
    shards = Shards({name: getattr(call, name) for name in names})
    of_x = shards.rows("x")
    of_weight = shards.check("weight", lambda _, p: is_replicated(p) or shard(p) == 0, "Replicate() or Shard(0)")
    shards.check(
        "weight", lambda i, p: is_replicated(p) or is_replicated(of_x[i]) or shard(of_x[i]) == 0,
        "Replicate() where x is split along another dimension than its first"
    )  # fmt: skip
    of_target, is_gathered = _placements_of_target(shards, x.shape[0], of_x, of_weight)
    shards.alike("target", of_target, "x")
    for name in ("bias", "class_weight"):
        shards.alike(name, of_weight, "weight")
    options = _part_of_vocabulary(shards, replaced(options, sequence_parallel=is_gathered))
    if not all(map(is_replicated, of_target)):
        divisor = _count(target, class_weight, divisor, options)
    if divisor is not None and is_distributed((divisor,)):
        divisor = divisor.full_tensor()  # type: ignore[attr-defined]
    of_dweight = [w if shard(w) == 0 else s for w, s in zip(of_weight, summed(of_target), strict=True)]
    of_gradients = {"x": of_x, "weight": of_dweight, "bias": of_dweight}
    local: dict[str, Any] = {name: shards.local(name, of_gradients.get(name)) for name in names}
    outputs = run(replaced(call, **local, divisor=divisor, options=options))

    def wrap(name: str, part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        by_token = name in _BY_TOKEN or options.reduction == "none" and name != "token_accuracy"
        return shards.wrap(part, of_target if by_token else summed(of_target), target.shape if by_token else ())

    wrapped: dict[str, Any] = {name: wrap(name, part) for name, part in zip(outputs._fields, outputs, strict=True)}
    return LinearCrossEntropyOutput(**wrapped)


def _placements_of_target(
    shards: Shards, rows: int, of_x: Sequence[Placement], of_weight: Sequence[Placement]
) -> tuple[tuple[Placement, ...], bool]:
    """The placements of the target, and whether ranks that have parts of the vocabulary gather x."""
    from torch.distributed.tensor import Replicate

    gathers = [shard(p) == 0 and not is_replicated(w) for p, w in zip(of_x, of_weight, strict=True)]
    for dimension, gathered in enumerate(gathers):
        ranks = shards.mesh.size(dimension)
        if gathered and rows % ranks:
            shards.refuse("x", dimension, f"Replicate(), or have a multiple of {ranks} rows along dimension 0, not {rows}")
    return tuple(Replicate() if gathered else p for p, gathered in zip(of_x, gathers, strict=True)), any(gathers)


def _part_of_vocabulary(shards: Shards, options: Options) -> Options:
    """The options with the rows of the weight that this rank has, and whom it shares the vocabulary with."""
    place = shards.part("weight", 0)
    if place is None:
        return options
    (dimension,) = (i for i, placement in enumerate(shards.placements("weight")) if shard(placement) == 0)
    ranks, size = shards.mesh.size(dimension), options.vocab_size
    if (ranks - 1) * -(-size // ranks) >= size:
        raise ValueError(f"weight has {size} rows and must have some on each of the {ranks} ranks that it is split over.")
    return replaced(options, group=shards.mesh.get_group(dimension).group_name, vocab_first=place[0])


def _count(target: Any, class_weight: Tensor | None, divisor: Tensor | None, options: Options) -> Tensor | None:
    """The divisor of "mean" where the tokens are split over ranks."""
    if options.return_token_accuracy:
        raise ValueError("return_token_accuracy is True and must be False where x is split.")
    if options.reduction != "mean" or divisor is not None:
        return divisor
    if class_weight is not None:
        raise ValueError("reduction is 'mean' and must be 'sum' or 'none' where x is split and there are class weights.")
    counted: Any = are_counted(target, options.ignore_index)
    count: Tensor = counted.sum().full_tensor()
    return count.clamp_min(1)
