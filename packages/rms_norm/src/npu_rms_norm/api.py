"""The public functions. Each checks its arguments and calls an operator; of DTensors with this rank's part.

A call with a key that has passed the same check before is not checked again (`Operator.if_checked`).

DTensors: x may be split along any dimension but the last. Weight and bias are whole on every rank. Ranks exchange nothing.
Each rank sums the gradient of the weight over its own tokens: it is `Partial`, as from torch's norms. Where x [..., H, D] is
split along its heads, a weight [H, D] is split in the same way, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch
from npu_tiling import arguments, device_for
from npu_tiling.chips import dry_runs
from npu_tiling.dispatch import exported
from npu_tiling.dtensor import Shards, is_distributed, shard, summed
from torch import Tensor

from . import operator
from .call import CASTING_MODES, Forward
from .reference import ACTIVATIONS

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement
    from typing_extensions import Unpack

FP8 = torch.float8_e4m3fn


@exported
class WithFP32(NamedTuple):
    """What `rms_norm` and `gated_rms_norm` return with return_fp32.

    Attributes:
        y: the result.
        fp32: the same in fp32.
    """

    y: Tensor
    fp32: Tensor


@exported
class AddedRMSNorm(NamedTuple):
    """What `add_rms_norm` returns.

    Attributes:
        y: the normalised sum.
        residual: the sum, in the residual's dtype.
    """

    y: Tensor
    residual: Tensor


@exported
class AddedWithFP32(NamedTuple):
    """What `add_rms_norm` returns with return_fp32.

    Attributes:
        y: the normalised sum.
        residual: the sum, in the residual's dtype.
        fp32: y in fp32.
    """

    y: Tensor
    residual: Tensor
    fp32: Tensor


@exported
class DynamicQuant(NamedTuple):
    """What `rms_norm_dynamic_quant` returns.

    Attributes:
        y: the result as multiples of its row's scale.
        scale: one number for each row.
    """

    y: Tensor
    scale: Tensor


@exported
class AddedDynamicQuant(NamedTuple):
    """What `add_rms_norm_dynamic_quant` returns.

    Attributes:
        y: the normalised sum as multiples of its row's scale.
        residual: the sum, in the residual's dtype.
        scale: one number for each row.
    """

    y: Tensor
    residual: Tensor
    scale: Tensor


@exported
class QKV(NamedTuple):
    """What `qk_rms_norm` returns.

    Attributes:
        q: normalised queries.
        k: normalised keys.
        v: values, a view of the projection.
    """

    q: Tensor
    k: Tensor
    v: Tensor


class Options(TypedDict, total=False):
    """Options that every function has which can return fp32 too."""

    bias: Tensor | None
    offset: float
    casting_mode: str
    dtype: torch.dtype | None


class _PlainOptions(Options, total=False):
    in_place: bool


class _GatedOptions(Options, total=False):
    activation: str
    norm_before_gate: bool


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    return_fp32: Literal[False] = False,
    **options: Unpack[_PlainOptions],
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    return_fp32: Literal[True],
    **options: Unpack[_PlainOptions],
) -> WithFP32: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
    dtype: torch.dtype | None = None,
    return_fp32: bool = False,
) -> Tensor | WithFP32:
    """Root mean square normalisation over the last dimension.

        y = x / sqrt(mean(x^2) + eps) * (offset + weight) + bias

    Statistics and arithmetic are fp32. Under autocast nothing is cast: x, weight and y keep their dtypes. Of DTensors
    each rank computes its own rows.

    The bits of a row of y depend on the row and on the layout of x, and not on other rows, their number or the row's place.
    All contiguous tensors have one layout; where rows lie in separate groups, the number of rows of a group is part of it.

    Args:
        x: [..., D], fp32, bf16 or fp16 (fp64 too on a CPU). Rows may lie at any stride that takes two levels (a slice of a
            wider tensor, heads of a fused projection); others are copied first.
        weight: [D], or [H, D] for x [..., H, D], a weight for each head; x's dtype or fp32; None leaves it out.
        eps: added to the mean square.
        bias: the weight's shape (without a weight [D] or [H, D]), x's dtype or fp32; None: none is added.
        offset: added to the weight: 1.0 for Gemma's zero-centred weights.
        casting_mode: what is rounded to x's dtype on the way (nothing, where x is fp32). "llama": x / rms, before it is
            multiplied by the weight. "gemma": nothing but the result. "none": 1 / rms, offset + weight, bias and x / rms.
            Before a bias is added to the product with the weight, "llama" rounds it to the weight's dtype, "none" to x's.
        in_place: the backward writes the gradient of x into the memory of the gradient of y, unless that is expanded. Saves
            one tensor of x's size. Wrong where something else still reads that gradient: another consumer's backward, a
            hook that keeps it, `retain_grad` on y. No effect where y and x differ in dtype.
        dtype: of y, torch.float32, torch.bfloat16 or torch.float16; None: x's. It does not change what a casting mode rounds
            on the way, nor to which dtype.
        return_fp32: return y in fp32 too (fp64 for fp64 x), before it is rounded to its dtype: for routers.

    Returns:
        y [..., D], contiguous; with return_fp32 a tuple with names, y and fp32 [..., D].

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    call = Forward(
        x=x,
        weight=weight,
        bias=bias,
        eps=eps,
        offset=offset,
        casting_mode=casting_mode,
        in_place=in_place,
        dtype=getattr(x, "dtype", None) if dtype is None else dtype,  # type: ignore[arg-type]
        return_fp32=return_fp32,
    )
    y, _, fp32, *_ = _results(_check, call)
    return WithFP32(y, fp32) if return_fp32 else y


@overload
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    return_fp32: Literal[False] = False,
    **options: Unpack[_PlainOptions],
) -> AddedRMSNorm: ...


@overload
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    return_fp32: Literal[True],
    **options: Unpack[_PlainOptions],
) -> AddedWithFP32: ...


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
    dtype: torch.dtype | None = None,
    return_fp32: bool = False,
) -> AddedRMSNorm | AddedWithFP32:
    """Adds a layer's output to the residual stream and normalises the sum, in one pass.

        new_residual = residual + x        y = rms_norm(new_residual, weight)

    The sum is rounded to the residual's dtype before it is normalised, as two separate steps would do. As with `rms_norm`,
    the bits of a row do not depend on other rows.

    Args:
        x: [..., D], the layer's output; fp32, bf16 or fp16 (fp64 too on a CPU).
        residual: [..., D], fp32 or x's dtype.
        weight, eps, bias, offset, casting_mode: as for `rms_norm`.
        in_place: as for `rms_norm`, where y and the residual have one dtype; no effect where they differ.
        dtype, return_fp32: as for `rms_norm`; fp64 where the residual is fp64.

    Returns:
        A tuple with names: y [..., D]; residual, the new one, [..., D] in its dtype; with return_fp32 fp32 [..., D].

    Raises:
        TypeError, ValueError: as for `rms_norm`.

    Source: arXiv 1910.07467.
    """
    call = Forward(
        x=x,
        residual=residual,
        weight=weight,
        bias=bias,
        eps=eps,
        offset=offset,
        casting_mode=casting_mode,
        in_place=in_place,
        dtype=getattr(x, "dtype", None) if dtype is None else dtype,  # type: ignore[arg-type]
        return_fp32=return_fp32,
    )
    y, total, fp32, *_ = _results(_check_added, call)
    return AddedWithFP32(y, total, fp32) if return_fp32 else AddedRMSNorm(y, total)


@overload
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    return_fp32: Literal[False] = False,
    **options: Unpack[_GatedOptions],
) -> Tensor: ...


@overload
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    return_fp32: Literal[True],
    **options: Unpack[_GatedOptions],
) -> WithFP32: ...


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting_mode: str = "llama",
    activation: str = "silu",
    norm_before_gate: bool = True,
    dtype: torch.dtype | None = None,
    return_fp32: bool = False,
) -> Tensor | WithFP32:
    """RMSNorm over the last dimension with a gate, in one pass.

        y = (x / sqrt(mean(x^2) + eps) * (offset + weight) + bias) * act(gate)

    or, norm_before_gate=False, x * act(gate) takes the place of x and y is not gated again:

        y = u / sqrt(mean(u^2) + eps) * (offset + weight) + bias        u = x * act(gate)

    act(gate) is fp32 and not rounded; bits of a row and autocast are as with `rms_norm`.

    Args:
        x: as for `rms_norm`.
        gate: [..., D], x's dtype or fp32, with strides of its own.
        weight, eps, bias, offset: as for `rms_norm`.
        casting_mode: as for `rms_norm`. Where the result is gated, the weighted norm is rounded before act(gate) multiplies
            it: by "llama" to the weight's dtype, by "none" to x's.
        activation: "silu", gate * sigmoid(gate), or "sigmoid".
        norm_before_gate: whether the weighted norm is gated (Qwen3-Next, Kimi Linear) or x is (Mamba 2).
        dtype, return_fp32: as for `rms_norm`.

    Returns:
        As `rms_norm`.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.

    Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060; mamba_ssm's RMSNormGated.
    """
    call = Forward(
        x=x,
        gate=gate,
        weight=weight,
        bias=bias,
        eps=eps,
        offset=offset,
        casting_mode=casting_mode,
        activation=activation,
        norm_before_gate=norm_before_gate,
        dtype=getattr(x, "dtype", None) if dtype is None else dtype,  # type: ignore[arg-type]
        return_fp32=return_fp32,
    )
    y, _, fp32, *_ = _results(_check_gated, call)
    return WithFP32(y, fp32) if return_fp32 else y


def rms_norm_dynamic_quant(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting_mode: str = "llama",
    dtype: torch.dtype = torch.int8,
) -> DynamicQuant:
    """`rms_norm` with a quantised result, in the same pass; each row is scaled by its largest absolute value.

        n = rms_norm(x, weight) in fp32        scale = max(abs(n)) / 127        y = round(n * (127 / max(abs(n))))

    y * scale differs from n by half a scale at most. The product is rounded to the nearest whole number, half to even;
    nothing is clipped. For fp8, 448 takes the place of 127, and y is the product in fp8 e4m3: y * scale differs from n by a
    sixteenth of n at most, where y is a normal number. A row of zeros counts as one whose max(abs(n)) is 1e-30.

    There is no gradient: y and scale are constants to autograd. Experimental: no trainer that we know calls it.

    Args:
        x, weight, eps, bias, offset, casting_mode: as for `rms_norm`.
        dtype: of y, torch.int8 or, on CUDA of compute capability 8.9 or later and on a CPU, torch.float8_e4m3fn.

    Returns:
        A tuple with names: y [..., D], contiguous; scale [...] fp32.

    Raises:
        TypeError, ValueError: as for `rms_norm`; TypeError too where the device does not have this dtype.

    Source: vLLM, rms_norm_dynamic_per_token_quant; torch_npu, npu_add_rms_norm_dynamic_quant.
    """
    call = Forward(
        x=x,
        weight=weight,
        bias=bias,
        eps=eps,
        offset=offset,
        casting_mode=casting_mode,
        dtype=dtype,
    )
    y, _, _, _, scale = _results(_check_quantised, call)
    return DynamicQuant(y, scale)


def add_rms_norm_dynamic_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting_mode: str = "llama",
    dtype: torch.dtype = torch.int8,
) -> AddedDynamicQuant:
    """`add_rms_norm` whose result is quantised as that of `rms_norm_dynamic_quant`, in one pass.

    The new residual has the gradient of a sum, to x and to the residual; y and scale have none.

    Args:
        x, residual: as for `add_rms_norm`.
        weight, eps, bias, offset, casting_mode, dtype: as for `rms_norm_dynamic_quant`.

    Returns:
        A tuple with names: y [..., D]; residual, the new one, [..., D] in its dtype; scale [...] fp32.

    Raises:
        TypeError, ValueError: as for `rms_norm_dynamic_quant`.

    Source: torch_npu, npu_add_rms_norm_dynamic_quant.
    """
    call = Forward(
        x=x,
        residual=residual,
        weight=weight,
        bias=bias,
        eps=eps,
        offset=offset,
        casting_mode=casting_mode,
        dtype=dtype,
    )
    y, total, _, _, scale = _results(_check_added_quantised, call)
    return AddedDynamicQuant(y, total, scale)


def qk_rms_norm(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    n_heads: int,
    n_kv_heads: int | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> QKV:
    """`rms_norm` of the queries and of the keys of a fused projection, whose gradient is written once, into one tensor.

        q, k, v = split(qkv)        q = rms_norm(q, q_weight)        k = rms_norm(k, k_weight)

    Two calls of `rms_norm` on slices give the same q and k, with a gradient of the projection's size for each slice.

    Args:
        qkv: [..., (n_heads + 2 n_kv_heads) D], what one linear layer computes: the heads of q, those of k, those of v. fp32,
            bf16 or fp16 (fp64 too on a CPU).
        q_weight: [D], each head normalised by itself (Qwen3), or [n_heads D], all of a token together (OLMo 2); qkv's dtype
            or fp32; None leaves it out, and each head is normalised by itself.
        k_weight: [D] or [n_kv_heads D], as q_weight.
        n_heads: of q.
        n_kv_heads: of k, and of v; None: n_heads.
        eps, offset, casting_mode: as for `rms_norm`, of both.

    Returns:
        A tuple with names: q [..., n_heads, D] and k [..., n_kv_heads, D], contiguous, and v [..., n_kv_heads, D], a view of
        qkv. Attention takes them with `transpose(-3, -2)`.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.

    Source: Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters", arXiv 2302.05442; arXiv 1910.07467.
    """
    arguments.rows("qkv", qkv)
    n_heads = arguments.whole("n_heads", n_heads, least=1)
    n_kv_heads = arguments.whole("n_kv_heads", n_kv_heads, least=1, or_none=True) or n_heads
    heads = n_heads + 2 * n_kv_heads
    width = qkv.shape[-1] // heads
    if width * heads != qkv.shape[-1]:
        raise ValueError(
            f"qkv has a last dimension of {qkv.shape[-1]} and must have a multiple of {heads}, "
            "the heads of q, k and v: n_heads + 2 * n_kv_heads."
        )
    for name, weight, own in (("q_weight", q_weight, n_heads), ("k_weight", k_weight, n_kv_heads)):
        arguments.parameter(name, weight, ((width,), (own * width,)), qkv, "qkv's", or_none=True)
    arguments.one_of("casting_mode", casting_mode, CASTING_MODES)
    eps, offset = arguments.number("eps", eps, least=0, finite=False), arguments.number("offset", offset)
    options = (n_heads, n_kv_heads, eps, offset, casting_mode)
    if is_distributed((qkv, q_weight, k_weight)):
        run = lambda qkv, **weights: operator.qkv(qkv, *weights.values(), *options)  # noqa: E731
        return QKV(*_on_own_rows(run, {"qkv": qkv}, {"q_weight": q_weight, "k_weight": k_weight}))
    return QKV(*operator.qkv(qkv, q_weight, k_weight, *options))


Check = Callable[[Forward], tuple[float, float]]


def _results(check: Check, call: Forward) -> Any:
    """The forward operator's results: y, the sum, y in fp32, rstd and scale; None for what the call does not ask for.

    `check` raises an error for wrong arguments, and returns eps and offset as floats.
    """
    results = operator.FORWARD.if_checked(check, call)
    if results is not None:
        return results
    eps, offset = check(call)
    call = call._replace(eps=eps, offset=offset)
    if not is_distributed(call[:5]):  # its tensors
        return operator.FORWARD(call, check)
    tensors = call._asdict()
    rows = {name: tensors[name] for name in ("x", "residual", "gate") if tensors[name] is not None}
    return _on_own_rows(
        lambda **own: operator.FORWARD(call._replace(**own)), rows, {"weight": call.weight, "bias": call.bias}
    )


def _check(call: Forward, *, added: bool = False, gated: bool = False, quantised: bool = False) -> tuple[float, float]:
    """Checks the arguments of a function that has a residual, a gate or a quantised result. Returns eps and offset."""
    arguments.rows("x", call.x)
    shapes = (call.x.shape[-1:],) if call.x.dim() == 1 else (call.x.shape[-1:], call.x.shape[-2:])
    arguments.parameter("weight", call.weight, shapes, call.x, "x's", or_none=True)
    if call.bias is not None:
        alike = shapes if call.weight is None else (call.weight.shape,)
        arguments.parameter("bias", call.bias, alike, call.x, "x's", or_none=True)
    arguments.one_of("casting_mode", call.casting_mode, CASTING_MODES)
    if call.in_place is not False:
        arguments.flags(in_place=call.in_place)
    numbers = arguments.number("eps", call.eps, least=0, finite=False), arguments.number("offset", call.offset)
    if added:
        arguments.parameter("residual", call.residual, (call.x.shape,), call.x, "x's")
    if gated:
        arguments.parameter("gate", call.gate, (call.x.shape,), call.x, "x's")
        arguments.one_of("activation", call.activation, ACTIVATIONS)
        arguments.flags(norm_before_gate=call.norm_before_gate)
    if quantised:
        _check_eight_bits(call)
        return numbers
    if call.return_fp32 is not False:
        arguments.flags(return_fp32=call.return_fp32)
    if call.dtype is not call.x.dtype and call.dtype not in arguments.DTYPES:
        expected = "torch.float32, torch.bfloat16, torch.float16, x's dtype or None"
        raise TypeError(f"dtype is {call.dtype!r} and must be {expected}.")
    return numbers


_check_added, _check_gated = partial(_check, added=True), partial(_check, gated=True)
_check_quantised, _check_added_quantised = partial(_check, quantised=True), partial(_check, added=True, quantised=True)


def _check_eight_bits(call: Forward) -> None:
    if call.dtype == torch.int8:
        return
    if call.dtype != FP8:
        raise TypeError(f"dtype is {call.dtype!r} and must be torch.int8 or {FP8}.")
    device = None if call.x.is_meta and not dry_runs else device_for(call.x.device)
    if device is not None and (device.kind != "cuda" or int(device.arch.removeprefix("sm_")) < 89):
        raise TypeError(f"dtype is {FP8}, which {device.name} does not have, and must be torch.int8 there.")


def _on_own_rows(
    run: Callable[..., Any], rows: Mapping[str, Tensor], parameters: Mapping[str, Tensor | None]
) -> tuple[Any, ...]:
    """`run(**rows, **parameters)` with this rank's parts; each result is a DTensor split as the first of `rows`, or None."""
    first, x = next(iter(rows.items()))
    shards = Shards({**rows, **parameters})
    placements = shards.rows(first)
    for name in rows:
        shards.alike(name, placements, first)
    own = {name: _parameter(shards, name, tensor, placements, x) for name, tensor in parameters.items()}
    parts = run(**{name: shards.local(name, placements) for name in rows}, **own)
    return tuple(
        None if part is None else shards.wrap(part, placements, (*x.shape[:-1], *part.shape[x.dim() - 1 :]))
        for part in parts
    )


def _parameter(shards: Shards, name: str, tensor: Tensor | None, rows: Sequence[Placement], x: Tensor) -> Any:
    """This rank's part of a parameter. Its gradient is declared as a sum over this rank's rows alone."""
    if tensor is None:
        return None
    from torch.distributed.tensor import Replicate, Shard

    gradient = list(summed(rows))
    for dimension, own in enumerate(shards.placements(name)):
        by_head = tensor.dim() == 2 and shard(rows[dimension]) == x.dim() - 2
        if by_head:
            gradient[dimension] = Shard(0)
        if own != (Shard(0) if by_head else Replicate()):
            shards.refuse(name, dimension, "Shard(dim=0), as x's heads are" if by_head else "Replicate()")
    return shards.local(name, gradient)
