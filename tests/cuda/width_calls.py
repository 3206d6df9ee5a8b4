"""A call of every operator for rows of a width, and the same by PyTorch in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ROWS = 3


class Maker(NamedTuple):
    """Makes the inputs of calls.

    Attributes:
        dtype, device: of the inputs, where a call asks for no other.
        empty: leave them unwritten, for calls whose values nobody reads.
    """

    dtype: torch.dtype
    device: torch.device
    empty: bool = False

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed."""
        if self.empty:
            return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return (torch.randn(shape, device=self.device) * scale).to(dtype or self.dtype)

    def indices(self, end: int, count: int) -> Tensor:
        """From 0 to `end` - 1."""
        return torch.randint(0, end, (count,), device=self.device)


class Call(NamedTuple):
    """An operator of ours, PyTorch's way to the same result, and inputs that take gradients."""

    own: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: Sequence[Tensor]

    def launch(self) -> None:
        """Our operator, forward and backward, for a gradient that nobody has written."""
        leaves = [tensor.requires_grad_() for tensor in self.inputs]
        found = self.own(*leaves)
        results = list(found) if isinstance(found, tuple) else [found]
        torch.autograd.grad(results, leaves, [torch.empty_like(result) for result in results])

    def check(self) -> None:
        """Nothing is off by more than some roundings of the dtype, of the largest element."""
        owns = _with_gradients(self.own, self.inputs)
        plains = _with_gradients(self.plain, [tensor.float() for tensor in self.inputs])
        eps = max(torch.finfo(self.inputs[0].dtype).eps, 1e-6)
        for own, plain in zip(owns, plains, strict=True):
            assert torch.isfinite(own).all()
            limit = 40 * eps * max(1.0, plain.abs().max().item())
            torch.testing.assert_close(own.float(), plain.float(), rtol=0, atol=limit)


def _with_gradients(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results of a function and gradients of its inputs."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    found = function(*leaves)
    results = list(found) if isinstance(found, tuple) else [found]
    generator = torch.Generator(results[0].device).manual_seed(1)
    seeds = [torch.randn(r.shape, device=r.device, generator=generator).to(r.dtype) for r in results]
    return [*results, *torch.autograd.grad(results, leaves, seeds)]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.float()


def rms_norm(width: int, make: Maker) -> Call:
    from npu_rms_norm import rms_norm

    own = lambda x, w: rms_norm(x, w, casting_mode="gemma")  # noqa: E731
    return Call(own, _rms, (make.normal(_ROWS, width), make.normal(width)))


def add_rms_norm(width: int, make: Maker) -> Call:
    from npu_rms_norm import add_rms_norm

    inputs = (make.normal(_ROWS, width), make.normal(_ROWS, width, dtype=torch.float32), make.normal(width))
    own = lambda x, residual, w: add_rms_norm(x, residual, w, casting_mode="gemma")  # noqa: E731
    return Call(own, lambda x, residual, w: (_rms(x + residual, w), x + residual), inputs)


def gated_rms_norm(width: int, make: Maker) -> Call:
    from npu_rms_norm import gated_rms_norm

    inputs = (make.normal(_ROWS, width), make.normal(_ROWS, width), make.normal(width))
    own = lambda x, gate, w: gated_rms_norm(x, gate, w, casting_mode="gemma")  # noqa: E731
    return Call(own, lambda x, gate, w: _rms(x, w) * torch.nn.functional.silu(gate.float()), inputs)


def embedding(width: int, make: Maker) -> Call:
    """Few indices: the gradient is one kernel."""
    return _look_up(width, make, 7)


def embedding_sorted(width: int, make: Maker) -> Call:
    """More indices than one kernel takes: the gradient sorts them."""
    return _look_up(width, make, 2000)


def _look_up(width: int, make: Maker, count: int) -> Call:
    from npu_embedding import embedding

    indices = make.indices(5, count)
    plain = torch.nn.functional.embedding
    return Call(lambda w: embedding(indices, w), lambda w: plain(indices, w), (make.normal(5, width),))


def _attention(query: Tensor, norm: Tensor, *blocks: Tensor) -> Tensor:
    scores = torch.stack([_rms(block, norm) @ query for block in blocks])
    return (torch.softmax(scores, 0).unsqueeze(-1) * torch.stack(blocks)).sum(0)


def _attn_inputs(width: int, make: Maker, blocks: int) -> list[Tensor]:
    rows = [make.normal(_ROWS, width) for _ in range(blocks)]
    return [make.normal(width, scale=width**-0.5), make.normal(width), *rows]


def attn_res_list(width: int, make: Maker) -> Call:
    from npu_attn_res import attn_res

    return Call(lambda q, n, *v: attn_res(list(v), q, n), _attention, _attn_inputs(width, make, 9))


def attn_res_single(width: int, make: Maker) -> Call:
    """One block: the smallest tile there is."""
    from npu_attn_res import attn_res

    return Call(lambda q, n, v: attn_res([v], q, n), _attention, _attn_inputs(width, make, 1))


def attn_res_stacked(width: int, make: Maker) -> Call:
    from npu_attn_res import attn_res

    def plain(query: Tensor, norm: Tensor, weight: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        h = _attention(query, norm, *blocks)
        return h, _rms(h, weight)

    query, norm, *blocks = _attn_inputs(width, make, 2)
    inputs = (query, norm, torch.ones_like(norm), torch.stack(blocks))
    return Call(lambda q, n, w, v: attn_res(v, q, n, w)[:2], plain, inputs)


def attn_res_phases(width: int, make: Maker) -> Call:
    from npu_attn_res import attn_res_merge, attn_res_phase1

    def phases(query: Tensor, norm: Tensor, *blocks: Tensor) -> Any:
        queries = torch.stack([query, query, query])
        o, lse = attn_res_phase1(queries, list(blocks[:-1]), norm)
        return attn_res_merge(o[1], lse[1], blocks[-1], query, norm).output

    return Call(phases, _attention, _attn_inputs(width, make, 3))


def cross_entropy(width: int, make: Maker) -> Call:
    """The width is the vocabulary's: of a row of logits."""
    from npu_fused_linear_cross_entropy import fused_linear_cross_entropy

    target = make.indices(width, _ROWS)
    return Call(
        lambda x, w: fused_linear_cross_entropy(x, w, target, reduction="sum"),
        lambda x, w: torch.nn.functional.cross_entropy(x @ w.t(), target, reduction="sum"),
        (make.normal(_ROWS, 16), make.normal(width, 16, scale=0.25)),
    )


def log_probs(width: int, make: Maker) -> Call:
    from npu_fused_linear_cross_entropy import linear_log_probs

    target = make.indices(width, _ROWS)
    return Call(
        lambda x, w: linear_log_probs(x, w, target),
        lambda x, w: torch.log_softmax(x @ w.t(), 1).gather(1, target.unsqueeze(1)).squeeze(1),
        (make.normal(_ROWS, 16), make.normal(width, 16, scale=0.25)),
    )


def distilled(width: int, make: Maker) -> Call:
    from npu_fused_linear_cross_entropy import linear_distillation_loss

    teacher = make.normal(_ROWS, 16), make.normal(width, 16, scale=0.25)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        t = torch.log_softmax(teacher[0].float() @ teacher[1].float().t(), 1)
        return torch.nn.functional.kl_div(torch.log_softmax(x @ w.t(), 1), t, reduction="batchmean", log_target=True)

    return Call(
        lambda x, w: linear_distillation_loss(x, w, teacher=teacher),
        plain,
        (make.normal(_ROWS, 16), make.normal(width, 16, scale=0.25)),
    )


CALLS: dict[str, Callable[[int, Maker], Call]] = {
    call.__name__: call
    for call in (
        rms_norm, add_rms_norm, gated_rms_norm, embedding, embedding_sorted, attn_res_list, attn_res_single,
        attn_res_stacked, attn_res_phases, cross_entropy, log_probs, distilled,
    )
}  # fmt: skip
