"""A call of each operator with gradients on an Ascend device; what it launches lies between the lines that this writes."""

import os
import sys
from collections.abc import Callable, Sequence

import npu_attn_res
import npu_embedding
import npu_fused_linear_cross_entropy
import npu_rms_norm
import torch
from torch import Tensor


def _noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="npu", dtype=dtype).requires_grad_()


def _calls() -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    indices, target = (torch.randint(300, (64,), device="npu") for _ in range(2))
    ids, given = torch.randint(300, (64, 4), device="npu"), torch.zeros(300, 64, device="npu")
    teacher, frozen = (_noise(64, 32).detach(), _noise(300, 32).detach()), _noise(300, 64).detach()
    return {
        "npu-rms-norm": (npu_rms_norm.rms_norm, (_noise(8, 256), _noise(256))),
        "npu-embedding": (lambda table: npu_embedding.embedding(indices, table), (_noise(300, 64, dtype=torch.float32),)),
        "npu-embedding, sparse": (
            lambda table: npu_embedding.embedding(indices, table, sparse=True),
            (_noise(300, 64, dtype=torch.float32),),
        ),
        "npu-embedding, bags": (
            lambda table, weights: npu_embedding.embedding_bag(ids, table, mode="sum", per_sample_weights=weights),
            (_noise(300, 64, dtype=torch.float32), _noise(64, 4, dtype=torch.float32)),
        ),
        "npu-embedding, a norm": (
            lambda table: npu_embedding.embedding(indices, table, rms_norm_eps=1e-6),
            (_noise(300, 64, dtype=torch.float32),),
        ),
        "npu-attn-res": (npu_attn_res.attn_res, (_noise(4, 8, 256), _noise(256), _noise(256))),
        "npu-attn-res, a list": (
            lambda query, weight, *blocks: npu_attn_res.attn_res(list(blocks), query, weight),
            (_noise(256), _noise(256), *(_noise(8, 256) for _ in range(6))),
        ),
        "npu-fused-linear-cross-entropy": (
            lambda x, w: npu_fused_linear_cross_entropy.fused_linear_cross_entropy(x, w, target),
            (_noise(64, 64), _noise(300, 64)),
        ),
        "npu-fused-linear-cross-entropy, every option": (
            _every_option(target),
            (_noise(64, 64), _noise(300, 64), _noise(300)),
        ),
        "npu-fused-linear-cross-entropy, each row": (
            lambda x, w: npu_fused_linear_cross_entropy.linear_log_probs(x, w, target),
            (_noise(64, 64), _noise(300, 64)),
        ),
        "npu-fused-linear-cross-entropy, named columns": (
            lambda x, w: npu_fused_linear_cross_entropy.linear_log_probs(x, w, ids=ids, return_entropy=True).ids_log_probs,
            (_noise(64, 64), _noise(300, 64)),
        ),
        "npu-fused-linear-cross-entropy, distillation": (
            lambda x, w: npu_fused_linear_cross_entropy.linear_distillation_loss(x, w, teacher=teacher),
            (_noise(64, 64), _noise(300, 64)),
        ),
        "npu-fused-linear-cross-entropy, given gradient": (
            lambda x, w: npu_fused_linear_cross_entropy.fused_linear_cross_entropy(x, w, target, weight_grad=given),
            (_noise(64, 64), _noise(300, 64)),
        ),
        "npu-fused-linear-cross-entropy, adapter": (
            lambda x, u, b: npu_fused_linear_cross_entropy.fused_linear_cross_entropy(x, frozen, target, adapter=(u, b)),
            (_noise(64, 64), _noise(64, 8), _noise(300, 8)),
        ),
    }


def _every_option(target: Tensor) -> Callable[..., Tensor]:
    """A loss, one number of all rows, with every option and extra but the entropy, and a bias."""
    class_weight = torch.rand(300, device="npu")
    options = {"label_smoothing": 0.1, "lse_square_scale": 0.1, "softcap": 30.0, "logit_scale": 0.5, "token_scaling": True}
    extras = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_lse")

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        given = {**options, **dict.fromkeys(extras, True), "class_weight": class_weight}
        return npu_fused_linear_cross_entropy.fused_linear_cross_entropy(x, weight, target, bias, **given).loss

    return call


def main(names: Sequence[str]) -> None:
    """The second call of each name, between `begin NAME` and `end`."""
    calls = _calls()
    for name in names:
        call, inputs = calls[name]
        for line in (None, f"begin {name}"):
            result = call(*inputs)
            gradient = torch.ones_like(result)
            torch.npu.synchronize()
            if line is None:
                torch.autograd.grad(result, inputs, gradient, allow_unused=True)
                continue
            print(line, file=sys.stderr, flush=True)
            torch.autograd.grad(call(*inputs), inputs, gradient, allow_unused=True)
            torch.npu.synchronize()
            print("end", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # PyTorch's autograd threads outlive Python: while they are torn down, a process can end by std::terminate
