"""What one would write with torch.compile: gradients computed ahead, chunk by chunk, what is between products fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from npu_bench import Case
from torch import Tensor

CHUNK = 1024  # tokens


def compiled_chunks(case: Case, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    torch._dynamo.reset()

    @torch.compile
    def chunk_gradient(logits: Tensor, target: Tensor, count: int) -> tuple[Tensor, Tensor]:
        wide = logits.float()
        lse = wide.logsumexp(1)
        nll = lse - wide.gather(1, target.unsqueeze(1)).squeeze(1)
        gradient = torch.exp(wide - lse.unsqueeze(1))
        columns = torch.arange(wide.shape[1], device=wide.device)
        gradient = torch.where(columns == target.unsqueeze(1), gradient - 1, gradient) / count
        return nll.sum() / count, gradient.to(logits.dtype)

    class Chunked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
            loss = torch.zeros((), device=x.device)
            for first in range(0, x.shape[0], CHUNK):
                part, labels = x[first : first + CHUNK], target[first : first + CHUNK]
                found, gradient = chunk_gradient(part @ weight.t(), labels, x.shape[0])
                loss += found
                torch.mm(gradient, weight, out=dx[first : first + CHUNK])
                torch.addmm(dweight, gradient.t(), part, out=dweight)
            ctx.save_for_backward(dx, dweight)
            return loss

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
            dx, dweight = ctx.saved_tensors
            return dx * gradient.to(dx.dtype), dweight * gradient.to(dx.dtype), None

    return Chunked.apply
