"""VeOmni's losses with ours inside, against VeOmni's own."""

import pytest
import torch

pytest.importorskip("veomni", reason="VeOmni is not installed")

from npu_fused_linear_cross_entropy.integrations import veomni as integration  # noqa: E402
from veomni.ops.kernels import cross_entropy as of_veomni  # noqa: E402

WIDTH, VOCABULARY = 24, 52


@pytest.fixture
def registered():
    integration.register()
    yield
    integration.unregister()


def a_head(dtype=torch.float32):
    if dtype is torch.float64 and torch.cuda.is_available():
        pytest.skip("our kernels take no fp64")
    torch.manual_seed(0)
    x = torch.randn(2, 11, WIDTH, dtype=dtype, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH, dtype=dtype) / 2).requires_grad_()
    labels = torch.randint(VOCABULARY, (2, 11))
    labels[0, :4] = -100
    return x, weight, labels


def loss_of(head, **options):
    x, weight, labels = head
    loss, logits, aux = of_veomni._chunk_loss_dispatch(
        hidden_states=x, weights=weight, labels=labels, vocab_size=VOCABULARY, **options
    )
    assert logits is None
    return loss, aux


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_loss_and_gradients(registered, dtype):
    head = a_head(dtype)
    integration.unregister()
    expected, _ = loss_of(head, chunk_size=4)
    integration.register()
    loss, aux = loss_of(head)
    assert of_veomni.chunk_loss_function is integration.chunk_loss_function
    assert aux is None
    gradients = [torch.autograd.grad(value, head[:2]) for value in (loss, expected)]
    # VeOmni computes the logits' cross entropy in fp32.
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("loss", ["ForCausalLMLoss", "_chunk_loss_dispatch"])
def test_log_probabilities_and_entropies(registered, temperature, shifted, loss):
    x, weight, labels = a_head(torch.float32)
    options = {"return_log_probs": True, "temperature": temperature, "shift_labels": labels if shifted else None}
    upstream = torch.randn(2, *labels.shape)
    results = []
    for function in (integration.register, integration.unregister):
        function()
        aux = getattr(of_veomni, loss)(hidden_states=x, weights=weight, labels=labels, **options)[2]
        scores = torch.stack((aux.log_probs, aux.entropy))
        results.append((scores, *torch.autograd.grad(scores, [x, weight], upstream)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_loss_mapping_and_slots_take_ours(registered, monkeypatch):
    """Models reach the loss through transformers' mapping or through VeOmni's registry."""
    from transformers.loss.loss_utils import LOSS_MAPPING
    from veomni.ops.kernel_registry import KERNEL_REGISTRY

    calls = []
    monkeypatch.setattr(of_veomni, "chunk_loss_function", lambda **named: calls.append(named) or (None, None))
    before = dict(LOSS_MAPPING)
    of_veomni.install_loss_mapping("chunk_loss")
    LOSS_MAPPING["ForCausalLM"](hidden_states=1)
    LOSS_MAPPING.update(before)
    KERNEL_REGISTRY.resolve("cross_entropy_loss", "causal", "chunk_loss")(hidden_states=2)
    assert calls == [{"hidden_states": 1}, {"hidden_states": 2}]
