"""The tensors that counted calls are given, and formulas that PyTorch has no function for."""

from __future__ import annotations

import torch
from torch import Tensor


def tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    """New ones, the same each time; those of `dtype` ask for gradients."""
    random = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    angles = torch.arange(16.0)[:, None] / 10000 ** (torch.arange(16.0) / 16)[None]
    numbers = {
        "x": randn(16, 64),
        "y": randn(16, 64),
        "p": randn(16, 64).abs().clamp(0.1, 8.5),
        "u": torch.rand(16, 64, generator=random) * 1.8 - 0.9,
        "i": torch.randint(1, 99, (16, 64), generator=random, dtype=torch.int32),
        "j": torch.randint(1, 99, (16, 64), generator=random, dtype=torch.int32),
        "w": randn(64, 64),
        "v": randn(64),
        "b": randn(2, 32, 32),
        "small": randn(4, 4),
        "four": randn(2, 4, 16, 16),
        "rows": torch.randint(16, (10,), generator=random),
        "distinct": torch.tensor([3, 1, 7, 12]),
        "columns": torch.argsort(torch.rand(16, 64, generator=random), dim=1),
        "c": randn(2, 8, 16, 16),
        "k8": randn(8),
        "n": randn(32),
        "k32": randn(32),
        "chances": randn(16, 64).softmax(1),
        "turns": randn(2, 16),
        "taps": randn(32, 4),
        "key": torch.nn.functional.normalize(randn(1, 128, 2, 32), dim=-1),
        "decay": -randn(1, 128, 2).abs(),
        "decays": -randn(1, 128, 2, 32).abs(),
        "beta": randn(1, 128, 2).sigmoid(),
        "blocks": randn(1, 8, 2, 16, 16).tril(-1).transpose(2, 3).reshape(1, 128, 2, 16) * 0.1,
        "c_weight": randn(8, 8, 3, 3),
        "line": randn(2, 8, 32),
        "line_weight": randn(8, 8, 3),
        "alpha": randn(1),
        "scalar": randn(),
        "three": randn(3),
        "q": randn(1, 2, 16, 32),
        "cosine": torch.cat((angles, angles), 1).cos()[None],
        "sine": torch.cat((angles, angles), 1).sin()[None],
        "seq": randn(1, 64, 32),
        "seq_decay": -randn(1, 64, 32).abs(),
        "gates": randn(1, 128, 2),
        "heads": randn(1, 128, 2, 32),
    }
    return {
        name: tensor.to(dtype).requires_grad_() if tensor.is_floating_point() else tensor for name, tensor in numbers.items()
    }


def numbers(like: Tensor) -> Tensor:
    """The gradient of a loss with respect to a result, the same for the same shape."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1)).to(like.dtype)


def sparsemax(x: Tensor) -> Tensor:
    """The projection of each row to the simplex."""
    ordered = x.sort(-1, descending=True)[0]
    rank = torch.arange(1, x.shape[-1] + 1)
    support = (1 + rank * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
    return (x - (ordered.cumsum(-1).gather(-1, support - 1) - 1) / support).clamp(min=0)


def jsd(x: Tensor, y: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of two tables of logits, by row."""
    p, q = x.softmax(1), y.softmax(1)
    m = (p + q) / 2
    return (p * (p / m).log() + q * (q / m).log()).sum() / 2 / x.shape[0]


def rotated(q: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of heads, [batch, heads, tokens, width]."""
    left, right = q.chunk(2, -1)
    return q * cosine[:, None] + torch.cat((-right, left), -1) * sine[:, None]


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A weighted sum of the normalised cube, square and identity."""
    powers = [x**3, x**2, x]
    return sum((w * p / (p.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() for w, p in zip(weight, powers, strict=True)), bias)


def recurrence(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
    """Linear attention, [batch, tokens, heads, width]: S = exp(gate) S + k (v - k S)^T beta, or + k v^T; o = q S."""
    state = q.new_zeros(q.shape[0], q.shape[2], k.shape[3], v.shape[3])
    outputs = []
    for t in range(q.shape[1]):
        if gate is not None:
            g = gate[:, t].exp()
            state = state * (g[..., None, None] if g.dim() == 2 else g[..., None])
        written = v[:, t]
        if beta is not None:
            written = (written - torch.einsum("bhk,bhkv->bhv", k[:, t], state)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * written[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[3] ** -0.5)
    return torch.stack(outputs, 1)


def retention(q: Tensor) -> Tensor:
    """The logarithm of RetNet's decay, by token and head."""
    return (1 - 2.0 ** (-5 - torch.arange(q.shape[2], dtype=q.dtype))).log().expand(q.shape[:3])


def lightning(q: Tensor) -> Tensor:
    """The logarithm of lightning attention's decay in the first of two layers, by token and head."""
    return (-8 / q.shape[2] * torch.arange(q.shape[2], dtype=q.dtype)).expand(q.shape[:3])


def gated_sum(x: Tensor, gate: Tensor) -> Tensor:
    """h = exp(gate) h + x, [batch, tokens, width]."""
    outputs = [x[:, 0]]
    for t in range(1, x.shape[1]):
        outputs.append(outputs[-1] * gate[:, t].exp() + x[:, t])
    return torch.stack(outputs, 1)


def attention(h: Tensor, gate: Tensor | None = None) -> Tensor:
    """Causal attention of queries, keys and values `h`, [batch, tokens, heads, width], with sums of a gate in the scores."""
    scores = torch.einsum("bqhd,bkhd->bhqk", h, h) * h.shape[3] ** -0.5
    if gate is not None:
        sums = gate.cumsum(1).transpose(1, 2)
        scores = scores + sums[..., :, None] - sums[..., None, :]
    hidden = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), h)


def attention_residual(sources: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    """Sources weighted by the softmax of a query's products with their RMSNorms, [sources, tokens, width]."""
    keys = torch.nn.functional.rms_norm(sources, sources.shape[-1:], weight, 1e-6)
    return ((keys @ query).softmax(0)[..., None] * sources).sum(0)


def cross_entropy_and_variation(x: Tensor, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The cross entropy of x, and the total variation between the distributions of x and y, by row."""
    losses = torch.nn.functional.cross_entropy(x, target, reduction="none")
    return losses, (x.softmax(1) - y.softmax(1)).abs().sum(1) / 2


def kl_of_logits(x: Tensor, y: Tensor) -> Tensor:
    """KL(softmax(y) || softmax(x)), the mean of the rows."""
    return torch.nn.functional.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean")


def multi_token_attention(scores: Tensor, weight: Tensor) -> Tensor:
    """A convolution of causal probabilities, [batch, heads, tokens, tokens]; what lies ahead is zero."""
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    chances = scores.masked_fill(ahead, float("-inf")).softmax(-1)
    return torch.nn.functional.conv2d(chances, weight, padding=1).masked_fill(ahead, 0.0)


def rotated_tokens(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of heads, [batch, tokens, heads, width]."""
    both = torch.cat((angles, angles), -1)[None]
    return rotated(x.transpose(1, 2), both.cos(), both.sin()).transpose(1, 2)


def causal_conv(x: Tensor, taps: Tensor) -> Tensor:
    """A convolution of each channel with tokens before, [batch, tokens, channels]."""
    width = taps.shape[1]
    padded = torch.nn.functional.pad(x.transpose(1, 2), (width - 1, 0))
    return torch.nn.functional.conv1d(padded, taps[:, None], groups=x.shape[2]).transpose(1, 2)


def inverses(blocks: Tensor) -> Tensor:
    """The inverses of I + A for strictly lower triangles A, [batch, tokens, heads, 16]."""
    size = blocks.shape[3]
    squares = blocks.detach().unflatten(1, (-1, size)).transpose(2, 3)
    return (torch.eye(size, dtype=blocks.dtype) + squares).inverse().transpose(2, 3).reshape(blocks.shape)
