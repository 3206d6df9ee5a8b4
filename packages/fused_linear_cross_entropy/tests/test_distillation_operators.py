"""The operators of `linear_distillation_loss` as PyTorch sees them, and what is explained of its calls."""

import pytest
import torch
from npu_fused_linear_cross_entropy import explain

OPS = torch.ops.npu_fused_linear_cross_entropy


def test_what_is_explained():
    """Four products of each chunk, whose logits of both models fit in the budget, and one of our kernels."""
    found = explain(tokens=4096, width=4096, vocabulary=128256, teacher_width=8192, chip="H200", backward=True)
    decided = found.decisions[0][1]
    assert decided["way"].startswith("DISTILLATION")
    chunks = int(decided["chunks"].split()[0])
    assert [launch.kernel for launch in found.launches].count("distillation_kernel") == chunks
    assert len(found.products) == 4 * chunks
    gradients = 2 * 4096 * (4096 + 128256)
    assert found.peak <= gradients + 512 * 2**20 + 10**6
    with pytest.raises(ValueError, match="label_smoothing must be left out where linear_distillation_loss is explained"):
        explain(tokens=1, width=1, vocabulary=1, teacher_width=1, label_smoothing=0.1, chip="H200")
