"""TRL's fused head with ours inside, against TRL's own."""

import pytest
import torch

pytest.importorskip("trl.kernels.chunked_logprob", reason="TRL from 1.16 is not installed")

from npu_fused_linear_cross_entropy.integrations import trl as integration  # noqa: E402
from trl.kernels.chunked_logprob import ChunkedLogProbFunction as OfTRL  # noqa: E402
from trl.trainer import utils  # noqa: E402

EVERYTHING = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    yield
    integration.unregister()


def a_head():
    torch.manual_seed(0)
    x = torch.randn(19, 24, requires_grad=True)
    weight, bias = torch.randn(52, 24, requires_grad=True), torch.randn(52, requires_grad=True)
    return x, weight, bias, torch.randint(52, (19,))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy"), EVERYTHING], ids=len)
def test_values_and_gradients_are_those_of_trl(temperature, softcap, outputs):
    x, weight, bias, target = a_head()
    arguments = (x, weight, bias, target, temperature, 16, softcap, 1.3, outputs)
    results = []
    for function in (utils._ChunkedLogProbFunction, OfTRL):
        log_probs, entropy, *others = function.apply(*arguments)
        assert not any(other is not None and other.requires_grad for other in others)
        upstream = log_probs.sum() if entropy is None else (log_probs + 0.3 * entropy).sum()
        results.append((log_probs, entropy, *others, *torch.autograd.grad(upstream, [x, weight, bias])))
    assert utils._ChunkedLogProbFunction is not OfTRL
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_model_with_trls_fused_head_has_the_loss_that_it_had():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(64, (2, 16))
    labels = ids.clone()
    labels[:, :5] = -100
    expected = model(input_ids=ids, labels=labels).loss
    utils.add_fused_lm_head(model)
    loss = model(input_ids=ids, labels=labels, fused_lm_head=True).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0
