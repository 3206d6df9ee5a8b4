"""A compact decoder-only transformer over bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .blocks import BYTES, Blocks


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    layers: int = 4
    hidden_size: int = 128
    heads: int = 4
    mlp_size: int = 352
    block_size: int = 4  # of Block AttnRes, in attentions and MLPs

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.heads


class Attention(nn.Module):
    """Causal attention with normalised queries and keys and rotary positions."""

    def __init__(self, config: Config, blocks: Blocks) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.q_norm = blocks.norm(config.head_size)
        self.k_norm = blocks.norm(config.head_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Views of the fused projection, [B, T, heads, D] with gaps between rows: the norms read them where they lie.
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # [B, heads, T, D]
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.mlp_size, bias=False)
        self.down = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        down: Tensor = self.down(functional.silu(gate) * up)
        return down


class Layer(nn.Module):
    """Attention and MLP, each behind a norm; what each of them sees is a mixture of what came before (Block AttnRes)."""

    def __init__(self, config: Config, blocks: Blocks) -> None:
        super().__init__()
        self.attention_norm = blocks.norm(config.hidden_size)
        self.attention = Attention(config, blocks)
        self.mlp_norm = blocks.norm(config.hidden_size)
        self.mlp = MLP(config)

    def forward(self, depth: Any, cos: Tensor, sin: Tensor) -> None:
        """Takes its inputs from the blocks so far, and adds its outputs to the one under way.

        Blocks have one dtype, where autocast makes linear layers return another.
        """
        x = depth.input()
        depth.add(self.attention(self.attention_norm(x), cos, sin).to(x.dtype))
        x = depth.input()
        depth.add(self.mlp(self.mlp_norm(x)).to(x.dtype))


class LanguageModel(nn.Module):
    """Hidden states [B, T, D] for bytes [B, T], and the loss of the next byte; the head is tied to the embedding."""

    def __init__(self, config: Config, blocks: Blocks) -> None:
        super().__init__()
        self.config = config
        self.embedding = blocks.embedding(BYTES, config.hidden_size)
        self.depth = blocks.depth(config.hidden_size, 2 * config.layers + 1, config.block_size)
        self.layers = nn.ModuleList(Layer(config, blocks) for _ in range(config.layers))
        self.final_norm = blocks.norm(config.hidden_size)
        self.loss_function = blocks.loss
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = rotary_table(tokens.shape[1], self.config.head_size, tokens.device)
        depth = self.depth.start(self.embedding(tokens))
        for layer in self.layers:
            layer(depth, cos, sin)
        y: Tensor = self.final_norm(depth.input())
        return y

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, in nats, of bytes [B, T] that follow tokens [B, T]."""
        return self.loss_function(self(tokens), self.embedding.weight, targets)


def rotary_table(length: int, head_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, 1, head_size / 2] of the rotary position embedding."""
    frequency = 10000.0 ** (-torch.arange(0, head_size, 2, device=device) / head_size)
    angle = torch.outer(torch.arange(length, device=device), frequency)[:, None, :]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [B, T, heads, D]."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
