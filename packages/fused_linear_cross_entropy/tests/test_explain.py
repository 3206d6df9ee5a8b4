"""What `explain` says of a loss is what the loss launches and multiplies, wherever there are kernels."""

import npu_tiling
import pytest
import torch
from npu_fused_linear_cross_entropy import explain, fused_linear_cross_entropy, linear_log_probs, matmul
from npu_fused_linear_cross_entropy.call import Options
from npu_fused_linear_cross_entropy.decide import Way
from npu_fused_linear_cross_entropy.operator import FORWARD
from npu_tiling.explaining import ExplainedLaunch
from planned_anew import planned_anew

from testing.memory import Taken
from testing.operators import *  # noqa: F403

pytestmark = pytest.mark.few(2)
SIZES = {"tokens": 64, "width": 16, "vocabulary": 2048}
SMALL = {"memory_budget": 2**18}
WAYS = {
    Way.WHOLE_ROWS: {"softcap": 30.0},
    Way.EXPONENTIALS: {"vocabulary": 32000},
    Way.KEPT_EXPONENTIALS: {"width": 64, **SMALL},
    Way.COLUMNS: {"bias": True, **SMALL},
    Way.DISTRIBUTIONS: {"log_probs": True, "softcap": 30.0},
}
PARTS = {"log_probs": True, "batch_invariant": True, "vocab_parts": 4, "chunk_tokens": 32}
EXPLAINED = {way.name: {**SIZES, **options} for way, options in WAYS.items()} | {"parts": {**SIZES, **PARTS}}


def comparable(steps):
    """How a product is made depends on the device."""
    return [step if isinstance(step, ExplainedLaunch) else step.called_from for step in steps]


def run(place, *, tokens, width, vocabulary, bias=False, log_probs=False, **options):
    """The call that `explain` has these options for."""
    make = {"dtype": torch.bfloat16, "device": place.torch, "requires_grad": True}
    x, weight = torch.zeros(tokens, width, **make), torch.zeros(vocabulary, width, **make)
    added = torch.zeros(vocabulary, **make) if bias else None
    target = torch.zeros(tokens, dtype=torch.int64, device=place.torch)
    if options.get("batch_invariant"):
        linear_log_probs(x, weight, target, added, **options).sum().backward()
    elif log_probs:
        found = linear_log_probs(x, weight, target, added, return_square_sum=True, return_mean_logit=True, **options)
        (found.log_probs + found.square_sum + found.mean_logit).sum().backward()
    else:
        fused_linear_cross_entropy(x, weight, target, added, **options).sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_the_first_decision_names_the_way(way):
    found = explain(**SIZES | WAYS[way], chip="Ascend910B4", backward=True)
    assert found.decisions[0][1]["way"].startswith(way.name)


@pytest.mark.whole
@pytest.mark.parametrize("way", [way for way in WAYS if way is not Way.DISTRIBUTIONS])
def test_memory_is_what_the_operators_take(npu_place, way, monkeypatch):
    chip = npu_tiling.device_for(npu_place.torch)
    if chip is None or npu_place.torch.type != "cpu":
        pytest.skip("tensors are counted where no product takes memory of its own: on the emulated NPU, without products")
    monkeypatch.setattr(matmul, "multiply", lambda *_, **__: None)
    options = {**SIZES, **WAYS[way]}
    bias = torch.zeros(options["vocabulary"], dtype=torch.bfloat16) if options.pop("bias", False) else None
    tokens, width, vocabulary = (options.pop(name) for name in SIZES)
    x, weight = (torch.zeros(count, width, dtype=torch.bfloat16) for count in (tokens, vocabulary))
    target = torch.zeros(tokens, dtype=torch.int64)
    with planned_anew(), Taken() as memory:
        tensors = (x, weight, target, bias, None, None, None, None)
        found = FORWARD.forward.run(
            *tensors, *Options(**options, vocab_size=vocabulary), False, True, True, bias is not None
        )
    assert found[0].numel() == 1
    sizes = {"tokens": tokens, "width": width, "vocabulary": vocabulary, "bias": bias is not None}
    assert explain(**sizes, **options, chip=chip, backward=True).peak == pytest.approx(memory.peak, abs=1024)


def test_a_call_of_any_size_is_explained_for_every_gpu():
    found = explain(tokens=2**18, width=4096, vocabulary=128256, chip="H200", backward=True)
    assert found.decisions[0][1]["way"].startswith("PRODUCT")
    assert found.floor("forward") == 6 * 2**18 * 4096 * 128256 / 989e12
    assert {product.dtype for product in found.products} == {"bf16"}
    text = explain(tokens=4096, width=4096, vocabulary=128256, chip="B200", reduction="none", backward=True).text
    assert "backward: " in text and "way            EXPONENTIALS" not in text.partition("backward: ")[2]
    assert "1. cross_entropy_targets_kernel (npu_fused_linear_cross_entropy/loss/" in text


def test_lengths_of_chunks_are_explained_by_the_rows_that_fit():
    """500 rows of fp32 logits take 64 MB; 624 tokens are three eighths of those that hide the weight's traffic."""
    wide = {"width": 64, "vocabulary": 32000, "softcap": 30.0, "chip": "Ascend910B4", "backward": True}
    columns = explain(tokens=8192, **wide, memory_budget=64 * 10**6).decisions[0][1]
    assert "hold 500 whole rows of logits, and a chunk of whole rows has at least 624" in columns["why these"]
    kept = explain(tokens=4096, width=4096, vocabulary=128256, chip="Ascend910B4", backward=True)
    assert kept.brief.count("fits in the weight's gradient, and the logits of a chunk in 128 MiB") == 1
    given = explain(tokens=8192, **wide, memory_budget=64 * 10**6, chunk_tokens=1000).decisions[0][1]
    assert given["why these"].endswith("hold 500 whole rows of logits, of the 1000 that were given")


def test_options_of_the_loss_alone_are_refused_with_log_probs():
    with pytest.raises(ValueError, match="label_smoothing must be left out where linear_log_probs is explained"):
        explain(**SIZES, chip="H200", log_probs=True, label_smoothing=0.1)
    with pytest.raises(ValueError, match="class_weight must be left out where linear_log_probs is explained"):
        explain(**SIZES, chip="H200", log_probs=True, class_weight=True)
    with pytest.raises(ValueError, match="vocab_parts must be left out where fused_linear_cross_entropy is explained"):
        explain(**SIZES, chip="H200", vocab_parts=2)


@pytest.mark.parametrize(("given", "measured"), [({}, 2132), ({"memory_budget": 128 * 2**20}, 1154)])
def test_peak_on_an_h200_is_what_was_measured(given, measured):
    """In MiB beside the inputs."""
    found = explain(tokens=4096, width=4096, vocabulary=128256, chip="H200", backward=True, **given)
    assert round(found.peak / 2**20) == measured
