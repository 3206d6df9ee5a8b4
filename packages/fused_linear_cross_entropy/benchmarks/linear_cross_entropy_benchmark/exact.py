"""The loss and its gradients in the inputs' own dtype, fp64 in a benchmark, with few logits in memory at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100
LOGIT_BYTES = 2**31  # of the logits that are in memory at a time


class ExactLoss(torch.autograd.Function):
    """The mean over the counted tokens of logsumexp(W x) - (W x)[target]. Its gradients are computed with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, logit_bytes: int = LOGIT_BYTES) -> Tensor:
        count = (target != IGNORED).sum()
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        loss = torch.zeros((), dtype=x.dtype, device=x.device)
        step = max(1, logit_bytes // (weight.shape[0] * weight.itemsize))
        for first in range(0, x.shape[0], step):
            rows = slice(first, first + step)
            counted, column = target[rows] != IGNORED, target[rows].clamp_min(0).unsqueeze(1)
            logits = x[rows] @ weight.t()
            lse = logits.logsumexp(1, keepdim=True)
            loss += torch.where(counted, (lse - logits.gather(1, column)).squeeze(1), 0).sum()
            gradient = logits.sub_(lse).exp_()
            gradient.scatter_add_(1, column, torch.full_like(lse, -1.0))
            gradient.mul_(counted.to(x.dtype).div(count).unsqueeze(1))
            torch.mm(gradient, weight, out=dx[rows])
            dweight.addmm_(gradient.t(), x[rows])
        ctx.save_for_backward(dx, dweight)
        return loss / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        dx, dweight = ctx.saved_tensors
        return dx * gradient, dweight * gradient, None, None
