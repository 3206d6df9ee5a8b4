"""A Llama of a 1B model's widths under FSDP2, with our operators, with Liger's and with neither."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import npu_embedding
import npu_fused_linear_cross_entropy
import npu_rms_norm
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

_WARM_UP, _STEPS = 4, 12
_WIDTHS = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 6, "vocab_size": 128256,
}  # fmt: skip
_TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 101,
}  # fmt: skip


def measure(rank: int, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Tokens a second of all ranks, the peak of a rank's memory, and the last loss, for each set of operators."""
    names = ["plain PyTorch", "ours"]
    if torch.get_default_device().type == "cuda":
        names.append("liger (norms and loss)")  # the last: it changes the model's classes for good
    for name in names:
        yield {"name": name, **_train(rank, name, tiny)}
        gc.collect()


def _train(rank: int, name: str, tiny: bool) -> dict[str, float]:
    if name.startswith("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(rope=False, swiglu=False, rms_norm=True, fused_linear_cross_entropy=True)
    device = torch.get_default_device()
    config = LlamaConfig(**(_TINY if tiny else _WIDTHS), use_cache=False, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.float32 if tiny else torch.bfloat16)
    if name == "ours":
        for package in (npu_embedding, npu_rms_norm, npu_fused_linear_cross_entropy):
            package.patch(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    batch = (2, 16 if tiny else 4096)
    generator = torch.Generator(device).manual_seed(rank)
    start, last = 0.0, torch.zeros(())
    for step in range(_WARM_UP + _STEPS):
        if step == _WARM_UP:
            _wait(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
        tokens = torch.randint(0, config.vocab_size, batch, generator=generator)
        last = model(input_ids=tokens, labels=tokens).loss
        last.backward()
        optimizer.step()
        optimizer.zero_grad()
    _wait(device)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    rate = _STEPS * batch[0] * batch[1] * dist.get_world_size() / seconds
    return {"tokens_per_second": rate, "peak_gib": peak, "loss": last.detach().float().item()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
