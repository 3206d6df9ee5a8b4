"""One rank of test_megatron.py. Megatron asks for a CUDA device and its random state: both are stand-ins."""

import contextlib
from types import SimpleNamespace

import torch
import torch.distributed as dist

torch.cuda.current_device = lambda: "cpu"

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from npu_fused_linear_cross_entropy.integrations import megatron  # noqa: E402

from testing import ranks  # noqa: E402

VOCABULARY, LENGTH = 96, 16


def a_model(tied):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=dist.get_world_size(),
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    torch.manual_seed(0)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=tied,
    )


def step(model, ids, mask, times):
    """The losses of tokens [2, LENGTH] and all gradients, with the number of calls of the head's product."""
    model.zero_grad()
    products = []
    linear = model.output_layer
    inner = linear._forward_impl
    linear._forward_impl = lambda **given: products.append(1) or inner(**given)
    losses = model(ids, torch.arange(LENGTH).expand(2, -1), mask, labels=ids.roll(-1, 1))
    assert len(products) == times, products
    losses.mul(torch.linspace(0.5, 2.0, LENGTH)).mean().backward()
    linear._forward_impl = inner
    return [losses.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def main():
    with ranks.join("cpu"):
        parallel_state.initialize_model_parallel(dist.get_world_size())
        tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=contextlib.nullcontext)
        ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
        mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
        for tied in (False, True):
            model = a_model(tied)
            expected = step(model, ids, mask, 1)
            logits = model(ids, torch.arange(LENGTH).expand(2, -1), mask)
            megatron.register()
            megatron.register()  # changes nothing
            for one, other in zip(step(model, ids, mask, 0), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
            assert torch.equal(model(ids, torch.arange(LENGTH).expand(2, -1), mask), logits)  # no labels: as they were
            megatron.unregister()
            assert all(map(torch.equal, step(model, ids, mask, 1), expected))


main()
