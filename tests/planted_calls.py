"""Calls of every package, and of kernels with matrix products, small enough to run them with hundreds of defects."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from npu_attn_res import attn_res, attn_res_keys, attn_res_merge, attn_res_phase1
from npu_embedding import embedding, embedding_bag, ngram_embedding
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_distillation_loss, linear_log_probs, matmul
from npu_rms_norm import add_rms_norm, rms_norm

BF16, FP32 = torch.bfloat16, torch.float32


@cache
def _products() -> Any:
    """Kernels with matrix products: no package has any."""
    path = Path(__file__).parents[1] / "shared" / "npu_offline" / "tests" / "timing_kernels.py"
    spec = importlib.util.spec_from_file_location("timing_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _noise(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def _backward(*outputs: torch.Tensor | None) -> None:
    given = [out for out in outputs if out is not None and out.requires_grad]
    torch.autograd.backward(given, [torch.randn(out.shape).to(out.dtype) for out in given])


def _rms_norm() -> None:
    _backward(rms_norm(_noise(77, 512, dtype=BF16), _noise(512, dtype=BF16)))


def _add_rms_norm() -> None:
    _backward(*add_rms_norm(_noise(90, 1000, dtype=BF16), _noise(90, 1000), _noise(1000)))


def _wide_rms_norm() -> None:
    _backward(rms_norm(_noise(5, 16384), _noise(16384)))


def _embedding() -> None:
    _backward(embedding(torch.randint(19, (150,)), _noise(19, 768), scale_grad_by_freq=True))


def _wide_embedding() -> None:
    _backward(embedding(torch.randint(5, (20,), dtype=torch.int32), _noise(5, 12300, dtype=BF16)))


def _sparse_embedding() -> None:
    """More indices than one group: runs are merged."""
    _backward(embedding(torch.randint(19, (2100,)), _noise(19, 64), sparse=True))


def _bags() -> None:
    ids, weights = torch.randint(19, (12, 4)), _noise(12, 4)
    _backward(embedding_bag(ids, _noise(19, 768), mode="sum", per_sample_weights=weights))


def _ngrams() -> None:
    ids, before = torch.randint(11, (1, 5)), torch.randint(11, (1, 2))
    sizes, firsts = [10] * 4, [0, 10, 20, 30]
    _backward(ngram_embedding(ids, _noise(40, 160, dtype=BF16), [2**62 - 1] * 3, sizes, firsts, 0, 3, before))


def _attn_res(n: int = 4, width: int = 1024) -> None:
    _backward(attn_res([_noise(9, width, dtype=BF16) for _ in range(n)], _noise(width), _noise(width)))


def _attn_res_of_a_tensor() -> None:
    _backward(attn_res(_noise(4, 5, 8192), _noise(8192), _noise(8192)))


def _normalised_attn_res() -> None:
    given = (_noise(4, 5, 7168, dtype=BF16), *(_noise(7168, dtype=BF16) for _ in range(2)))
    _backward(*attn_res(*given, output_rms_weight=_noise(7168, dtype=BF16)))


def _keys() -> None:
    _backward(attn_res_keys(_noise(5, 3, 512, dtype=BF16), _noise(5, 512), _noise(2, 512), scale=512**-0.5))


def _phase1() -> None:
    _backward(*attn_res_phase1(_noise(3, 512), _noise(3, 21, 512, dtype=BF16), _noise(512)))


def _merge() -> None:
    given = [
        _noise(9, 1024),
        _noise(9),
        _noise(9, 1024, dtype=BF16),
        _noise(1024, dtype=BF16),
        _noise(1024, dtype=BF16),
    ]
    _backward(*attn_res_merge(*given, layer_output=_noise(9, 1024, dtype=BF16).detach()))


def _loss() -> None:
    _cross_entropy(3000)


def _loss_with_everything() -> None:
    _cross_entropy(
        20000,
        class_weight=torch.rand(20000),
        bias=_noise(20000, dtype=BF16),
        label_smoothing=0.1,
        lse_square_scale=0.1,
        softcap=30.0,
        return_token_accuracy=True,
        return_entropy=True,
    )


def _loss_of_narrow_logits() -> None:
    with mock.patch.object(matmul, "writes_fp32", lambda *_: False):
        _cross_entropy(4096, 12)


def _cross_entropy(vocabulary: int, tokens: int = 7, **options: object) -> None:
    x, weight = _noise(tokens, 16, dtype=BF16), _noise(vocabulary, 16, dtype=BF16)
    found = fused_linear_cross_entropy(x, weight, torch.randint(vocabulary, (tokens,)), **options)  # type: ignore[arg-type]
    loss = found if isinstance(found, torch.Tensor) else found.loss
    loss.backward(torch.full_like(loss, 0.5))  # 1 would multiply nothing


def _log_probs() -> None:
    x, weight, temperature = _noise(3, 16, dtype=BF16), _noise(9000, 16, dtype=BF16), torch.rand(3).add(0.5).requires_grad_()
    extras = {"top_k": 4, "return_entropy": True, "return_square_sum": True, "return_mean_logit": True, "softcap": 30.0}
    ids = torch.randint(9000, (3, 3))
    _backward(*linear_log_probs(x, weight, ids[:, 0], ids=ids, temperature=temperature, **extras))  # type: ignore[arg-type]


def _log_probs_of_parts() -> None:
    x, weight = _noise(3, 16, dtype=BF16), _noise(600, 16, dtype=BF16)
    _backward(linear_log_probs(x, weight, torch.randint(600, (3,)), batch_invariant=True, vocab_parts=2))


def _distillation() -> None:
    x, weight, target = _noise(3, 16, dtype=BF16), _noise(2500, 16, dtype=BF16), torch.randint(2500, (3,))
    teacher = torch.randn(3, 32).bfloat16(), torch.randn(2500, 32).bfloat16(), torch.randn(2500).bfloat16(), 20.0
    options = {"divergence": "jensen_shannon", "hard_weight": 0.5, "temperature": 2.0, "softcap": 30.0}
    loss = linear_distillation_loss(x, weight, target, teacher=teacher, **options)  # type: ignore[arg-type]
    loss.backward(torch.full_like(loss, 0.5))


def _matmul() -> None:
    a, b, c = torch.randn(192, 128).bfloat16(), torch.randn(128, 64).bfloat16(), torch.empty(192, 64)
    _products().matmul[(2,)](a, b, c, 192, 64, 128, BM=64, BN=64, BK=64)


def _exp_of_matmul() -> None:
    a, b, c = torch.randn(128, 128).div(16).bfloat16(), torch.randn(128, 64).bfloat16(), torch.empty(128, 64)
    _products().exp_of_matmul[(2,)](a, b, c, 128, B=64)


def _matmul_of_exp() -> None:
    a, b, c = torch.randn(192, 128).bfloat16(), torch.randn(128, 64).div(64).bfloat16(), torch.empty(192, 64, dtype=BF16)
    _products().matmul_of_exp[(2,)](a, b, c, 3, 128, B=64)


CALLS: dict[str, Callable[[], None]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "wide rms_norm": _wide_rms_norm,
    "embedding": _embedding,
    "wide embedding": _wide_embedding,
    "sparse embedding": _sparse_embedding,
    "bags": _bags,
    "n-grams": _ngrams,
    "attn_res": _attn_res,
    "wide attn_res": partial(_attn_res, width=16384),
    "attn_res of 33 sources": partial(_attn_res, 33, 512),
    "attn_res of a tensor": _attn_res_of_a_tensor,
    "attn_res, normalised": _normalised_attn_res,
    "attn_res of keys": _keys,
    "attn_res, phase 1": _phase1,
    "attn_res, merge": _merge,
    "loss": _loss,
    "loss with everything": _loss_with_everything,
    "loss of many rows": partial(_cross_entropy, 40, 4200),
    "loss, narrow logits": _loss_of_narrow_logits,
    "loss, kept exponentials": partial(_cross_entropy, 20000, 16, memory_budget=2**18),
    "log probabilities": _log_probs,
    "log probabilities of two parts": _log_probs_of_parts,
    "distillation": _distillation,
    "matmul": _matmul,
    "exp of matmul": _exp_of_matmul,
    "matmul of exp": _matmul_of_exp,
}


def call_of(name: str) -> Callable[[], None]:
    """A call with the same values every time."""

    def run() -> None:
        torch.manual_seed(0)
        CALLS[name]()

    return run
