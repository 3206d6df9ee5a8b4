"""What `linear_log_probs` is compared with: every output in fp64, of whole logits, with PyTorch's autograd."""

from __future__ import annotations

import torch
from npu_fused_linear_cross_entropy import LogProbs, linear_log_probs
from npu_tiling.calls import statistics_dtype

EVERYTHING = {
    "top_k": 5,
    "return_entropy": True,
    "return_square_sum": True,
    "return_mean_logit": True,
    "return_is_top": True,
}
TOKENS = (3, 7)


def make(tokens=TOKENS, width=32, vocabulary=123, dtype=torch.float32, *, ids=4, bias=False, temperature=False, seed=0):
    """Tensors by argument name. Some targets and ids are ignored; a row of ids has duplicates."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(vocabulary, (*tokens, ids), generator=generator)
    chosen[..., -1] = chosen[..., 0]
    chosen[0, ..., 1] = -100
    target = torch.randint(vocabulary, tokens, generator=generator)
    target[..., 2] = -100
    return {
        "x": torch.randn(*tokens, width, generator=generator).to(dtype),
        "weight": (torch.randn(vocabulary, width, generator=generator) * 2 / width**0.5).to(dtype),
        "target": target,
        "bias": torch.randn(vocabulary, generator=generator).to(dtype) if bias else None,
        "ids": chosen,
        "temperature": (torch.rand(tokens, generator=generator) + 0.5).to(statistics_dtype(dtype)) if temperature else None,
    }


def definition(x, weight, target, bias=None, *, ids=None, temperature=1.0, softcap=None, logit_scale=1.0, top_k=0, **_):
    """Every output of whole logits."""
    z = x @ weight.t()
    z = logit_scale * (z if bias is None else z + bias)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z / (temperature.unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature)
    log_p = z.log_softmax(-1)
    counted = torch.ones(z.shape[:-1], dtype=torch.bool) if target is None else target != -100

    def of(chosen):
        return torch.where(chosen == -100, 0.0, log_p.gather(-1, chosen.clamp_min(0))) * counted.unsqueeze(-1)

    top = z.topk(top_k or 1).indices
    return LogProbs(
        log_probs=None if target is None else of(target.unsqueeze(-1)).squeeze(-1),
        entropy=-(log_p.exp() * log_p).sum(-1) * counted,
        ids_log_probs=None if ids is None else of(ids),
        top_log_probs=of(top),
        top_ids=torch.where(counted.unsqueeze(-1), top, -1),
        square_sum=log_p.exp().square().sum(-1) * counted,
        mean_logit=z.mean(-1) * counted,
        is_top=None if target is None else z.argmax(-1) == target,
    )


def leaves_of(tensors, device, dtype=None):
    """The tensors on a device, those that floating point has as leaves, and these."""
    moved = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            tensor = tensor.detach().to(device, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
            moved[name] = tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor
    return moved, {name: tensor for name, tensor in moved.items() if tensor.requires_grad}


def gradients_of(outputs, leaves):
    """Of a sum of the differentiable outputs with random factors, the same for equal outputs."""
    generator, total = torch.Generator().manual_seed(1), 0.0
    for output in outputs:
        if output is not None and output.requires_grad:
            factors = torch.randn(output.shape, generator=generator, dtype=torch.float64)
            total = total + (output * factors.to(output.device, output.dtype)).sum()
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def check(tensors, device, unit, function=linear_log_probs, **options):
    """Outputs and gradients against fp64; `unit`: of what is allowed, times the size of what an output or gradient is."""
    given, leaves = leaves_of(tensors, device)
    exact, exact_leaves = leaves_of(tensors, "cpu", torch.float64)
    found, wanted = function(given.pop("x"), given.pop("weight"), given.pop("target", None), **given, **options), None
    exact_given = dict(exact)
    wanted = definition(
        exact_given.pop("x"), exact_given.pop("weight"), exact_given.pop("target", None), **exact_given, **options
    )
    wanted = wanted._replace(**{name: None for name, value in found._asdict().items() if value is None})
    for name, value in found._asdict().items():
        exactly = getattr(wanted, name)
        if value is None:
            continue
        assert value.shape == exactly.shape, name
        if name in ("top_ids", "is_top"):
            assert torch.equal(value.cpu(), exactly), name
        else:
            error = (value.detach().cpu().double() - exactly).abs()
            assert (error <= unit * (4 + exactly.abs())).all(), (name, float(error.max()))
    ours, theirs = gradients_of(found, leaves), gradients_of(wanted, exact_leaves)
    for name, gradient in theirs.items():
        error = (ours[name].cpu().double() - gradient).norm()
        assert error <= 8 * unit * gradient.norm(), (name, float(error / gradient.norm()))
    return found, ours
