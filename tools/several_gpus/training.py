"""A Llama of a 1B model's widths under FSDP2, with our operators, with Liger's and with neither."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import npu_embedding
import npu_fused_linear_cross_entropy
import npu_rms_norm
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from .measuring import attempt
from .steps import Steps

_WIDTHS = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 6, "vocab_size": 128256,
}  # fmt: skip
_TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 101,
}  # fmt: skip


def measure(rank: int, device: torch.device, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """What `Steps` measures, for each set of operators."""
    names = ["plain PyTorch", "ours"]
    if device.type == "cuda":
        names.append("liger (norms and loss)")  # the last: it changes the model's classes for good
    for name in names:
        yield attempt(name, partial(_train, rank, device, name, tiny))


def _train(rank: int, device: torch.device, name: str, tiny: bool) -> dict[str, Any]:
    if name.startswith("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(rope=False, swiglu=False, rms_norm=True, fused_linear_cross_entropy=True)
    config = LlamaConfig(**(_TINY if tiny else _WIDTHS), use_cache=False, tie_word_embeddings=False)
    torch.manual_seed(0)
    with device:  # the model is made there; steps run outside of it, since it slows every call of PyTorch on the host
        model = LlamaForCausalLM(config).to(torch.float32 if tiny else torch.bfloat16)
    if name == "ours":
        for package in (npu_embedding, npu_rms_norm, npu_fused_linear_cross_entropy):
            package.patch(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    steps = Steps(model, lambda tokens: model(input_ids=tokens, labels=tokens).loss, rank, device, config.vocab_size, tiny)
    return steps.measured()
