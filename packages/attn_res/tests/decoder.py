"""A small decoder shaped like Kimi K3: two mixes a layer, blocks of some layers, a running prefix; ours or plain PyTorch."""

import depth
import torch
from npu_attn_res import AttnResBank
from torch import nn

EPS = 1e-6


class PlainMix(AttnResBank):
    """The same parameters, and the formula."""

    def forward(self, bank, n_blocks, prefix, *, layer_output=None):
        joined = prefix if layer_output is None else prefix + layer_output
        h, _ = depth.formula(torch.stack([*bank, joined]), self.query, self.rms_weight, EPS)
        normalized = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * self.output_rms_weight
        return type("Found", (), {"output": h, "normalized": normalized, "prefix": joined})


class Layer(nn.Module):
    def __init__(self, width, begins_block, mix, dtype):
        super().__init__()
        self.begins_block = begins_block
        self.before_attention, self.before_mlp = (mix(width, EPS, dtype=dtype) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False, dtype=dtype)
        self.up, self.down = nn.Linear(width, 2 * width, dtype=dtype), nn.Linear(2 * width, width, dtype=dtype)

    def attention(self, x):
        query, key, value = self.qkv(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def mlp(self, x):
        return self.down(nn.functional.silu(self.up(x)))

    def forward(self, blocks, prefix, output):
        found = self.before_attention(blocks, None, prefix, layer_output=output)
        if self.begins_block:
            blocks, prefix, output = [*blocks, found.prefix], self.attention(found.normalized), None
        else:
            prefix, output = found.prefix, self.attention(found.normalized)
        found = self.before_mlp(blocks, None, prefix, layer_output=output)
        return blocks, found.prefix, self.mlp(found.normalized)


class Decoder(nn.Module):
    """Embedding, layers, a last mix, and logits over the same table."""

    def __init__(self, mix=AttnResBank, *, width=32, n_layers=4, layers_of_a_block=2, dtype=torch.float64, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(50, width, dtype=dtype)
        begins = [i % layers_of_a_block == 0 for i in range(n_layers)]
        self.layers = nn.ModuleList([Layer(width, begin, mix, dtype) for begin in begins])
        self.last = mix(width, EPS, dtype=dtype)
        for name, parameter in self.named_parameters():
            if name.endswith("query"):
                nn.init.normal_(parameter, std=0.5)

    def forward(self, tokens, around=None):
        blocks, prefix, output = [], self.embedding(tokens), None
        for layer in self.layers:
            given = (blocks, prefix, output)
            blocks, prefix, output = layer(*given) if around is None else around(layer, *given)
        return self.last(blocks, None, prefix, layer_output=output).normalized @ self.embedding.weight.T


def train(model, steps, tokens):
    """The losses of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
