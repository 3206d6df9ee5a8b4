"""What the tests compare with: the loss in fp64, of whole logits and with PyTorch's autograd, and how far one may be off."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from npu_fused_linear_cross_entropy import LinearCrossEntropyOutput, fused_linear_cross_entropy
from torch import Tensor

OUTPUTS = ("loss", "z_loss", "token_accuracy", "predicted_tokens", "lse", "entropy")
UNIT = 2.0**-24  # unit roundoff of fp32


@dataclass
class Case:
    """One problem: inputs in their dtypes, made on the CPU from a seed, and options of the loss."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None
    class_weight: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    seeds: dict[str, Tensor] | None = None  # gradients that outputs receive, by name; None: drawn from the seed

    def with_options(self, **options: Any) -> Case:
        return dataclasses.replace(self, options={**self.options, **options})


@dataclass
class Results:
    """Outputs (None where there is none) and gradients of x, weight and bias, all on the CPU."""

    outputs: dict[str, Tensor | None]
    gradients: dict[str, Tensor]
    # of exact results alone: the largest logit, the gradient of the raw logits [tokens, V], and the size of its terms
    largest: float = 0.0
    dlogits: Tensor | None = None
    terms: Tensor | None = None
    multiplier: float = 0.0  # of a probability, in the gradient of the logits


def make(
    tokens, width, vocabulary, dtype=torch.bfloat16, *, scale=1.0, bias=None, class_weight=False, ignored=0.0,
    weight_dtype=None, seed=0, **options
) -> Case:  # fmt: skip
    """Logits of about N(0, 4 scale^2); `tokens` a number or a shape; `bias` its dtype; `ignored` a share of the targets."""
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    x = torch.randn(*shape, width, generator=generator).to(dtype)
    weight = (torch.randn(vocabulary, width, generator=generator) * (2 * scale / width**0.5)).to(weight_dtype or dtype)
    target = torch.randint(0, vocabulary, shape, generator=generator)
    ignore_index = options.get("ignore_index", -100)
    target = torch.where(torch.rand(shape, generator=generator) < ignored, ignore_index, target)
    added = torch.randn(vocabulary, generator=generator).to(bias) if bias is not None else None
    weights = torch.rand(vocabulary, generator=generator) * 2 if class_weight else None
    return Case(x, weight, target, added, weights, options, seed)


def upstream(case: Case, outputs: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Gradients that the differentiable outputs receive, the same for equal cases."""
    if case.seeds is not None:
        return {name: seed.double() for name, seed in case.seeds.items()}
    generator = torch.Generator().manual_seed(case.seed + 1)
    seeds = {}
    for name in ("loss", "entropy"):
        output = outputs[name]
        if output is not None:
            seeds[name] = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return seeds


def exact(case: Case) -> Results:
    """Everything in fp64."""
    o = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "lse_square_scale": 0.0, "softcap": None}
    o |= {"logit_scale": 1.0, "token_scaling": False, **case.options}
    x, weight = case.x.double().requires_grad_(), case.weight.to(case.x.dtype).double().requires_grad_()
    bias = None if case.bias is None else case.bias.double().requires_grad_()
    raw = x.reshape(-1, x.shape[-1]) @ weight.t()
    raw.retain_grad()
    z = (raw if bias is None else raw + bias) * o["logit_scale"]
    if o["softcap"] is not None:
        z = o["softcap"] * torch.tanh(z / o["softcap"])
    target = case.target.reshape(-1)
    counted, vocabulary = target != o["ignore_index"], z.shape[1]
    n = counted.sum()
    safe = torch.where(counted, target, 0)
    lse = z.logsumexp(1)
    nll = lse - z.gather(1, safe.unsqueeze(1)).squeeze(1)
    e = o["label_smoothing"]
    if case.class_weight is None:
        row = (1 - e) * nll + e * (lse - z.mean(1))
        divisor = n
    else:
        w = case.class_weight.double()
        row = (1 - e) * nll * w[safe] + e / vocabulary * (lse * w.sum() - z @ w)
        divisor = (w[safe] * counted).sum()
    row.retain_grad()
    before, z_loss = row, o["lse_square_scale"] * lse.square()
    if o["reduction"] == "mean":
        row = row / (divisor if n else 1)
        z_loss = z_loss / n.clamp_min(1)
    factor = counted * (torch.exp(-nll).detach() if o["token_scaling"] else 1.0)
    row, z_loss = (row + z_loss) * factor, z_loss * factor
    log_p = z - lse.unsqueeze(1)
    entropy = -(log_p.exp() * log_p).sum(1) * counted
    place = z.argmax(1) if vocabulary else None
    shape = case.target.shape
    reduce = (lambda v: v.view(shape)) if o["reduction"] == "none" else torch.sum  # noqa: E731
    every = {
        "loss": reduce(row),
        "z_loss": reduce(z_loss),
        "token_accuracy": ((place == target) & counted).sum() / n.clamp_min(1),
        "predicted_tokens": torch.where(counted, place, -1).view(shape),
        "lse": (lse * counted).view(shape),
        "entropy": entropy.view(shape),
    }
    outputs = {name: every[name] if name == "loss" or case.options.get(f"return_{name}") else None for name in OUTPUTS}
    leaves = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    seeds = upstream(case, outputs)
    torch.autograd.backward([outputs[name] for name in seeds], list(seeds.values()))
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    kept = {name: None if value is None else value.detach() for name, value in outputs.items()}
    largest = float(raw.detach().abs().max()) if raw.numel() else 0.0
    # What probabilities, the target's one and the smoothing's share of it are multiplied by before they are subtracted.
    weight_scale = 1.0 if case.class_weight is None else float(case.class_weight.max())
    target_hot = torch.nn.functional.one_hot(safe, vocabulary)
    terms = (log_p.exp() + 1 / vocabulary + target_hot) * (before.grad.abs() * weight_scale).unsqueeze(1)
    if "entropy" in seeds:  # whose terms cancel where probabilities are equal
        terms = terms + log_p.exp() * (log_p.abs() + entropy.unsqueeze(1)) * seeds["entropy"].reshape(-1, 1).abs()
    multiplier = float(seeds["loss"].abs().max() if before.numel() else 0.0) * weight_scale
    if o["reduction"] == "mean":
        multiplier /= max(float(divisor), 1.0)
    return Results(kept, gradients, largest, raw.grad, raw.grad.abs() + terms.detach(), multiplier)


def run(case: Case, device, function=fused_linear_cross_entropy) -> Results:
    """Outputs and gradients of `function` on a device."""
    leaves = {"x": leaf(case.x, device), "weight": leaf(case.weight, device)}
    if case.bias is not None:
        leaves["bias"] = leaf(case.bias, device)
    weights = None if case.class_weight is None else case.class_weight.to(device)
    found = function(
        leaves["x"], leaves["weight"], case.target.to(device), leaves.get("bias"), class_weight=weights, **case.options
    )
    outputs = found._asdict() if isinstance(found, LinearCrossEntropyOutput) else {**dict.fromkeys(OUTPUTS), "loss": found}
    seeds = upstream(case, outputs)
    given = [seed.to(device, outputs[name].dtype) for name, seed in seeds.items()]
    gradients = torch.autograd.grad([outputs[name] for name in seeds], list(leaves.values()), given)
    kept = {name: None if value is None else value.detach().cpu() for name, value in outputs.items()}
    return Results(kept, {name: g.cpu() for name, g in zip(leaves, gradients, strict=True)})


def leaf(tensor: Tensor, device) -> Tensor:
    return tensor.detach().clone().to(device).requires_grad_()


def check(
    case: Case, results: Results, *, roundings: int = 1, logits: torch.dtype = torch.float32, kept: torch.dtype | None = None
) -> None:
    """Results of a case against fp64.

    An fp32 logit is off by a few units of the largest one, which is the relative error of a probability and the absolute
    one of a loss. A gradient is a sum whose terms were rounded to x's dtype once, at random, and which was rounded itself,
    `roundings` times. `kept`: the dtype in which the gradient, but not the loss, was given the logits.
    """
    expected = exact(case)
    # softcaps and scales above one, and sums over the vocabulary, enlarge a logit's error
    unit = torch.finfo(logits).eps / 2
    amplified = 1 + abs(case.options.get("logit_scale", 1.0))
    off = 4 * amplified * unit * (expected.largest + 4) + 32 * UNIT
    for name in OUTPUTS:
        actual, wanted = results.outputs[name], expected.outputs[name]
        assert (actual is None) == (wanted is None), name
        if actual is None or wanted is None:
            continue
        assert actual.shape == wanted.shape, name
        if name == "predicted_tokens":
            assert torch.equal(actual, wanted)
            continue
        scale = 1.0 + (case.target.numel() if case.options.get("reduction") == "sum" else 0)
        scale *= 1 + 4 * abs(case.options.get("lse_square_scale", 0.0)) * (1 + expected.largest)
        if case.class_weight is not None:
            scale *= 4
        allowed = off * (scale + 8 * wanted.abs())
        error = (actual.double() - wanted).abs()
        assert (error <= allowed).all(), f"{name} is off by {error.max():.3g}, {allowed.max():.3g} is allowed"
    if kept is not None:
        off += 4 * torch.finfo(kept).eps / 2 * (expected.largest + 4)
    dlogits, x = expected.dlogits, case.x.double().reshape(-1, case.x.shape[-1])
    assert dlogits is not None
    assert expected.terms is not None
    weight = case.weight.double()
    terms, ones = expected.terms, torch.ones(x.shape[0], 1).double()
    parts = {"x": (dlogits, terms, weight), "weight": (dlogits.t(), terms.t(), x), "bias": (dlogits.t(), terms.t(), ones)}
    for name, actual in results.gradients.items():
        left, added, right = parts[name]
        wanted = expected.gradients[name]
        narrow = torch.finfo(case.x.dtype).eps / 2
        spread = (left.square() @ right.square()).sqrt().view(wanted.shape)
        size = (added @ right.abs()).view(wanted.shape)
        allowed = narrow * (6 * spread + (roundings + 1) * (wanted.abs() + spread)) + 8 * off * size
        if case.x.dtype == torch.float16:
            # Half of the smallest fp16: of the result, and of what is rounded on the way, which is of the size of a
            # probability, and of the gradient's where that is given at once.
            at_once = case.options.get("reduction") == "none" or case.options.get("return_entropy", False)
            unit = 1.0 if at_once else expected.multiplier
            allowed += 2.0**-25 * (1.0 + unit * (1.0 + right.abs().sum(0)))
        allowed += torch.finfo(torch.float32).tiny  # below it fp32 loses its bits, or flushes them
        error = (actual.double() - wanted).abs()
        assert torch.isfinite(actual).all(), f"gradient of {name} was not written everywhere, or overflowed"
        worst = (error - allowed).argmax() if error.numel() else 0
        assert (error <= allowed).all(), (
            f"gradient of {name} is off by {error.view(-1)[worst]:.3g}, {allowed.view(-1)[worst]:.3g} is allowed"
        )
