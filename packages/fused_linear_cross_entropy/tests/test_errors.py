"""Bad input is refused with one sentence that names the argument, what it was and what it must be."""

import pytest
import torch
from npu_fused_linear_cross_entropy import FusedLinearCrossEntropyLoss as Loss
from npu_fused_linear_cross_entropy import Teacher, patch
from npu_fused_linear_cross_entropy import causal_lm_loss as causal
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy as loss
from npu_fused_linear_cross_entropy import linear_distillation_loss as distillation
from npu_fused_linear_cross_entropy import linear_log_probs as log_probs

from testing.operators import *  # noqa: F403
from testing.operators import Wide

X, W, Y = torch.ones(2, 8), torch.ones(11, 8), torch.zeros(2, dtype=torch.int64)
NOTHING = torch.nn.Identity()
REFUSED = {
    TypeError: {
        "x is a list and must be a tensor": lambda: loss([1.0], W, Y),
        "x is torch.int64 on cpu and must be torch.float32": lambda: loss(X.long(), W, Y),
        "weight is a NoneType": lambda: loss(X, None, Y),
        "weight is torch.float16 and must be x's dtype, torch.float32": lambda: loss(X, W.half(), Y),
        "target is a list": lambda: loss(X, W, [0, 0]),
        "bias is a float and must be a tensor or None": lambda: loss(X, W, Y, 1.0),
        "bias is torch.float16": lambda: loss(X, W, Y, torch.ones(11).half()),
        "class_weight is torch.int64": lambda: loss(X, W, Y, class_weight=Y.new_ones(11)),
        "accum_dtype is torch.float16": lambda: loss(X, W, Y, accum_dtype=torch.float16),
        "^logit_scale is a str and must be a number.$": lambda: loss(X, W, Y, logit_scale="a"),
        "softcap is a str and must be a number or None": lambda: loss(X, W, Y, softcap="a"),
        "label_smoothing is a NoneType": lambda: loss(X, W, Y, label_smoothing=None),
        "ignore_index is None and must be a whole number": lambda: loss(X, W, Y, ignore_index=None),
        "token_scaling is 1 and must be True or False": lambda: loss(X, W, Y, token_scaling=1),
        "chunk_tokens is 'a' and must be a whole": lambda: loss(X, W, Y, chunk_tokens="a"),
        "logit_scale is a str": lambda: log_probs(X, W, Y, logit_scale="a"),
        "num_items_in_batch is a str": lambda: causal(X, W, Y, num_items_in_batch="a"),
        "shift_labels is None and must be True": lambda: causal(X, W, Y, shift_labels=None),
        "labels is a list and must be a tensor": lambda: causal(X, W, [0, 0]),
        "hidden_states is a NoneType and must be a tensor": lambda: causal(None, W, Y),
        "softcap is a str": lambda: Loss(softcap="a"),
        "accum_dtype is 'x' and must be torch": lambda: patch(NOTHING, accum_dtype="x"),
        "model is a NoneType and must be a torch.nn.Module": lambda: patch(None),
        "model is the class FusedLinearCrossEntropyLoss and must be": lambda: patch(Loss),
        "bias is .* and must be x's dtype, torch.float32": lambda: loss(X, W, Y, torch.ones(11).half()),
        "process_group is a str and must be a torch.dist": lambda: loss(X, W, Y, process_group="x"),
        r"adapter is a tuple of 1 .* two tensors, \(u, b\)": lambda: loss(X, W, Y, adapter=(X,)),
        "labels is torch.float32 and must be torch.int64": lambda: causal(X, W, Y.float()),
        "foo is no option here: ignore_index, label_smoothing": lambda: causal(X, W, Y, foo=1),
        r"teacher_top_k\[0\] is torch.float32 and must be torch.int64": lambda: distillation(
            X, W, teacher_top_k=(X[:, :1], X[:, :1])
        ),
        r"teacher_top_k\[1\] is torch.int64 and must be floating point": lambda: distillation(
            X, W, teacher_top_k=(Y[:, None], Y[:, None])
        ),
        "shifts is a tuple_iterator and must be a sequence of numbers": lambda: causal(
            torch.stack([X, X]), W, Y, shifts=iter((1, 2))
        ),
        "shifts is a Tensor and must be a sequence of numbers": lambda: causal(X, W, Y, shifts=torch.tensor(1)),
        "class_weight is torch.sparse_coo and must be a dense tensor": lambda: loss(
            X, W, Y, class_weight=torch.ones(11).to_sparse()
        ),
        "token_weight is torch.sparse_coo and must be a dense tensor": lambda: loss(
            X, W, Y, token_weight=torch.ones(2).to_sparse()
        ),
        "temperature is torch.sparse_coo and must be a dense tensor": lambda: log_probs(
            X, W, Y, temperature=torch.ones(2).to_sparse()
        ),
        "adapter is a tuple of 1 and must be a tuple of two tensors": lambda: distillation(
            X, W, teacher=(X, W), adapter=(X,)
        ),
        "shift_weights is a tuple_iterator and must be a sequence of numbers": lambda: causal(
            torch.stack([X, X]), W, Y, shifts=(1, 2), shift_weights=iter((1.0, 0.5))
        ),
    },
    ValueError: {
        r"x has shape \(2, 7\) and must have weight's .* 8": lambda: loss(X[:, :7], W, Y),
        r"weight has shape \(8,\) and must have shape \(V, H\)": lambda: loss(X, W[0], Y),
        r"weight has shape \(0, 8\)": lambda: loss(X, W[:0], Y),
        "weight is on meta": lambda: loss(X, W.to("meta"), Y),
        r"target has shape \(2, 8\) and must have shape": lambda: loss(X, W, X),
        r"target has shape \(3,\) .* \(2,\)": lambda: loss(X, W, Y.new_zeros(3)),
        r"bias has shape \(12,\) .* \(11,\)": lambda: loss(X, W, Y, torch.ones(12)),
        r"class_weight has shape": lambda: loss(X, W, Y, class_weight=torch.ones(12)),
        "reduction is 'max' and must be one of 'mean', 'sum'": lambda: loss(X, W, Y, reduction="max"),
        "label_smoothing is 1.5 .* from 0 to 1": lambda: loss(X, W, Y, label_smoothing=1.5),
        "lse_square_scale is nan": lambda: loss(X, W, Y, lse_square_scale=float("nan")),
        r"target is torch.float32 with shape .2,. and must be torch.int64 or torch.int32, or have shape .2, 11.": lambda: (
            loss(X, W, Y.float())
        ),
        "num_items_in_batch is -2 and must be at least 0": lambda: causal(X, W, Y, num_items_in_batch=-2),
        "logit_scale is inf and must be finite": lambda: loss(X, W, Y, logit_scale=float("inf")),
        "logit_scale is 1e\\+39 and must be finite in fp32": lambda: loss(X, W, Y, logit_scale=1e39),
        "^temperature is 1e-39 and must be above 0 and finite in fp32": lambda: log_probs(X, W, Y, temperature=1e-39),
        "softcap is 0.0 and must be above 0": lambda: loss(X, W, Y, softcap=0.0),
        "softcap is 10001.0 and must be at most 10000": lambda: loss(X, W, Y, softcap=10001),
        "softcap is 30000.0 and must be at most 20000": lambda: log_probs(X, W, Y, softcap=3e4, logit_scale=-2),
        "teacher.softcap is 1000000000.0": lambda: distillation(X, W, teacher=Teacher(X, W, softcap=1e9)),
        "chunk_tokens is 0 and must be a whole number": lambda: loss(X, W, Y, chunk_tokens=0),
        "memory_budget is 1.5": lambda: loss(X, W, Y, memory_budget=1.5),
        "must be left out where process_group is": lambda: Loss(vocab_range=(0, 11))(X, W, Y),
        "reduction is 'max' and must be one of 'mean'": lambda: Loss(reduction="max"),
        "chunk_tokens is -1": lambda: patch(NOTHING, chunk_tokens=-1),
        r"ids has shape \(2,\) and must have shape \(2, 1, K\), K at least 1": lambda: log_probs(
            X[:, None], W, Y[:, None], ids=Y
        ),
        r"labels has shape \(\) and must have shape \(2,\)": lambda: causal(X, W, Y[0]),
        "num_items_in_batch has 2 numbers and must have one": lambda: causal(X, W, Y, num_items_in_batch=Y),
        "shift_weights must be left out where shifts are": lambda: causal(X, W, Y, shift_weights=[1.0]),
        r"teacher_top_k\[0\] has shape \(\) and must have shape \(\.\.\., K\)": lambda: distillation(
            X[0], W, teacher_top_k=(Y[0], X[0, 0])
        ),
        r"^target has shape \(1,\)": lambda: distillation(X, W, Y[:1], teacher_top_k=(Y[:, None], X[:, :1])),
        r"teacher_top_k\[0\] has shape \(1, 1\) and must have shape \(2, 1\)": lambda: distillation(
            X, W, Y, teacher_top_k=(Y[:1, None], X[:1, :1])
        ),
        r"labels has shape \(\) and must have shape \(..., T\) where labels are shifted": lambda: causal(X[0], W, Y[0]),
        r"token_weight has shape \(\) and must have shape \(..., T\) where labels are shifted": lambda: causal(
            X, W, Y, token_weight=torch.tensor(1.0)
        ),
        r"hidden_states has shape \(2, 2, 8\) and must have shape \(1, ..., H\) with these shifts": lambda: causal(
            torch.stack([X, X]), W, Y, shifts=(1,)
        ),
        r"shift_labels has shape \(1,\) and must have shape \(2,\)": lambda: causal(X, W, Y, shift_labels=Y[:1]),
        "ignore_index is 3 and must be negative where target has probabilities": lambda: loss(
            X, W, torch.ones(2, 11), ignore_index=3
        ),
        r"teacher.x has shape \(\) and must have a last dimension": lambda: distillation(X, W, teacher=(X[0, 0], W)),
        r"shifts is \(\) and must have at least one number": lambda: causal(X[None], W, Y, shifts=()),
        r"adapter\[0\] has shape \(\) and must have shape \(2, 1\)": lambda: loss(X, W, Y, adapter=(torch.tensor(1.0), W)),
        "num_items_in_batch is -3 and must be at least 0": lambda: causal(X, W, Y, num_items_in_batch=torch.tensor(-3)),
        "vocab_parts must be 1 unless batch_invariant is True": lambda: log_probs(X, W, Y, vocab_parts=2),
        "vocab_parts must be 1 unless": lambda: log_probs(X, W, Y, batch_invariant=True, vocab_parts=2, top_k=2),
        "vocab_parts is 2 and must divide the vocabulary, 11, into parts of which weight's 11 rows are some": lambda: (
            log_probs(X, W, Y, batch_invariant=True, vocab_parts=2)
        ),
        "kept must be left out where target is None": lambda: log_probs(X, W, kept=Y[:, None], return_entropy=True),
        r"kept has shape \(2,\) and must have shape \(2, K\)": lambda: log_probs(X, W, Y, kept=Y),
        "vocab_parts is 0": lambda: log_probs(X, W, Y, batch_invariant=True, vocab_parts=0),
        r"target has shape \(1,\)": lambda: log_probs(X, W, Y[:1], batch_invariant=True),
        "where there is no process_group": lambda: loss(X, W, Y, sequence_parallel=True),
        "vocab_range .*must be left out where process_group is": lambda: loss(X, W, Y, vocab_range=(0, 11)),
    },
    IndexError: {
        r"target\[0\] is 11 and must be from 0 to 10": lambda: loss(X, W, Y + 11),
        r"ids\[1, 0\] is 11 and must be from 0 to 10": lambda: log_probs(X, W, Y, ids=torch.tensor([[0], [11]])),
        r"labels\[1\] is 11 and must be from 0 to 10": lambda: causal(X, W, Y + 11),
        r"target\[0, 0\] is 77 and must be from 0 to 10": lambda: log_probs(X[:, None], W, Y[:, None] + 77, top_k=2),
        r"target\[0, 0\] is 77": lambda: log_probs(X[:, None], W, Y[:, None] + 77, batch_invariant=True),
        r"target\[0\] is 77": lambda: log_probs(X, W, Y + 77, top_k=2, counted_tokens=2),
        r"target\[0\] is 77 and must be from 0 to 10": lambda: distillation(
            X, W, Y + 77, teacher_top_k=(Y[:, None], X[:, :1]), hard_weight=1.0
        ),
        r"shift_labels\[0\] is 11 and must be from 0 to 10": lambda: causal(X, W, Y, shift_labels=Y + 11),
    },
}
WIDE = (Wide("x", loss, (X, W, Y)),)


def test_a_tensor_without_data_is_refused_also_after_an_equal_call():
    x, weight, target, bias = torch.randn(4, 8), torch.randn(5, 8), torch.arange(4), torch.randn(5)
    for _ in range(2):
        with pytest.raises(ValueError, match="weight is on meta and must be on x's device, cpu"):
            loss(x, weight.to("meta"), target)
        with pytest.raises(ValueError, match="bias is on meta and must be on x's device, cpu"):
            log_probs(x, weight, target, bias.to("meta"))
        loss(x, weight, target)
        log_probs(x, weight, target, bias)
