"""Bad input is refused with one sentence that names the argument, what it was and what it must be."""

import pytest
import torch
from npu_fused_linear_cross_entropy import FusedLinearCrossEntropyLoss as Loss
from npu_fused_linear_cross_entropy import causal_lm_loss, linear_distillation_loss, linear_log_probs, patch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy as loss

X, W, Y = torch.ones(2, 8), torch.ones(11, 8), torch.zeros(2, dtype=torch.int64)
NOTHING = torch.nn.Identity()
REFUSED = {
    "x is no tensor": (lambda: loss([1.0], W, Y), TypeError, "x is a list and must be a tensor"),
    "x is integer": (lambda: loss(X.long(), W, Y), TypeError, "x is torch.int64 on cpu and must be torch.float32"),
    "x is narrower": (lambda: loss(X[:, :7], W, Y), ValueError, r"x has shape \(2, 7\) and must have weight's .* 8"),
    "weight is no tensor": (lambda: loss(X, None, Y), TypeError, "weight is a NoneType"),
    "weight is a vector": (lambda: loss(X, W[0], Y), ValueError, r"weight has shape \(8,\) and must have shape \(V, H\)"),
    "weight is empty": (lambda: loss(X, W[:0], Y), ValueError, r"weight has shape \(0, 8\)"),
    "weight's dtype": (
        lambda: loss(X, W.half(), Y),
        TypeError,
        "weight is torch.float16 and must be x's dtype, torch.float32",
    ),
    "weight is elsewhere": (lambda: loss(X, W.to("meta"), Y), ValueError, "weight is on meta"),
    "target is no tensor": (lambda: loss(X, W, [0, 0]), TypeError, "target is a list"),
    "probabilities of another vocabulary": (
        lambda: loss(X, W, X),
        ValueError,
        r"target has shape \(2, 8\) and must have shape",
    ),
    "target is longer": (lambda: loss(X, W, Y.new_zeros(3)), ValueError, r"target has shape \(3,\) .* \(2,\)"),
    "target is outside": (lambda: loss(X, W, Y + 11), IndexError, r"target\[0\] is 11 and must be from 0 to 10"),
    "bias is no tensor": (lambda: loss(X, W, Y, 1.0), TypeError, "bias is a float and must be a tensor or None"),
    "bias is longer": (lambda: loss(X, W, Y, torch.ones(12)), ValueError, r"bias has shape \(12,\) .* \(11,\)"),
    "bias's dtype": (lambda: loss(X, W, Y, torch.ones(11).half()), TypeError, "bias is torch.float16"),
    "class_weight is longer": (lambda: loss(X, W, Y, class_weight=torch.ones(12)), ValueError, r"class_weight has shape"),
    "class_weight is integer": (
        lambda: loss(X, W, Y, class_weight=Y.new_ones(11)),
        TypeError,
        "class_weight is torch.int64",
    ),
    "reduction": (lambda: loss(X, W, Y, reduction="max"), ValueError, "reduction is 'max' and must be one of 'mean', 'sum'"),
    "label_smoothing": (lambda: loss(X, W, Y, label_smoothing=1.5), ValueError, "label_smoothing is 1.5 .* from 0 to 1"),
    "lse_square_scale": (lambda: loss(X, W, Y, lse_square_scale=float("nan")), ValueError, "lse_square_scale is nan"),
    "a float for each token": (
        lambda: loss(X, W, Y.float()),
        ValueError,
        r"target is torch.float32 with shape \(2,\) and must be torch.int64 or torch.int32, or have shape \(2, 11\)",
    ),
    "negative items": (
        lambda: causal_lm_loss(X, W, Y, num_items_in_batch=-2),
        ValueError,
        "num_items_in_batch is -2 and must be at least 0",
    ),
    "logit_scale": (lambda: loss(X, W, Y, logit_scale=float("inf")), ValueError, "logit_scale is inf and must be finite"),
    "softcap": (lambda: loss(X, W, Y, softcap=0.0), ValueError, "softcap is 0.0 and must be above 0"),
    "accum_dtype": (lambda: loss(X, W, Y, accum_dtype=torch.float16), TypeError, "accum_dtype is torch.float16"),
    "chunk_tokens": (lambda: loss(X, W, Y, chunk_tokens=0), ValueError, "chunk_tokens is 0 and must be a whole number"),
    "memory_budget": (lambda: loss(X, W, Y, memory_budget=1.5), ValueError, "memory_budget is 1.5"),
    "logit_scale is a word": (
        lambda: loss(X, W, Y, logit_scale="a"),
        TypeError,
        "^logit_scale is a str and must be a number.$",
    ),
    "softcap is a word": (lambda: loss(X, W, Y, softcap="a"), TypeError, "softcap is a str and must be a number or None"),
    "label_smoothing is None": (lambda: loss(X, W, Y, label_smoothing=None), TypeError, "label_smoothing is a NoneType"),
    "ignore_index": (lambda: loss(X, W, Y, ignore_index=None), TypeError, "ignore_index is None and must be a whole number"),
    "token_scaling": (lambda: loss(X, W, Y, token_scaling=1), TypeError, "token_scaling is 1 and must be True or False"),
    "chunk_tokens is a word": (
        lambda: loss(X, W, Y, chunk_tokens="a"),
        TypeError,
        "chunk_tokens is 'a' and must be a whole",
    ),
    "log_probs' scale": (lambda: linear_log_probs(X, W, Y, logit_scale="a"), TypeError, "logit_scale is a str"),
    "items": (lambda: causal_lm_loss(X, W, Y, num_items_in_batch="a"), TypeError, "num_items_in_batch is a str"),
    "shift_labels": (lambda: causal_lm_loss(X, W, Y, shift_labels=None), TypeError, "shift_labels is None and must be True"),
    "labels": (lambda: causal_lm_loss(X, W, [0, 0]), TypeError, "labels is a list and must be a tensor"),
    "hidden_states": (lambda: causal_lm_loss(None, W, Y), TypeError, "hidden_states is a NoneType and must be a tensor"),
    "an option of a module": (lambda: Loss(softcap="a"), TypeError, "softcap is a str"),
    "a module's part": (lambda: Loss(vocab_range=(0, 11))(X, W, Y), ValueError, "must be left out where process_group is"),
    "a module's reduction": (lambda: Loss(reduction="max"), ValueError, "reduction is 'max' and must be one of 'mean'"),
    "chunk_tokens of a patch": (lambda: patch(NOTHING, chunk_tokens=-1), ValueError, "chunk_tokens is -1"),
    "accum_dtype of a patch": (lambda: patch(NOTHING, accum_dtype="x"), TypeError, "accum_dtype is 'x' and must be torch"),
    "a patch of nothing": (lambda: patch(None), TypeError, "model is a NoneType and must be a torch.nn.Module"),
    "a patch of a class": (lambda: patch(Loss), TypeError, "model is the class FusedLinearCrossEntropyLoss and must be"),
    "fp32's bias": (
        lambda: loss(X, W, Y, torch.ones(11).half()),
        TypeError,
        "bias is .* and must be x's dtype, torch.float32",
    ),
    "process_group": (
        lambda: loss(X, W, Y, process_group="x"),
        TypeError,
        "process_group is a str and must be a torch.dist",
    ),
    "adapter of one": (lambda: loss(X, W, Y, adapter=(X,)), TypeError, r"adapter is a tuple of 1 .* two tensors, \(u, b\)"),
    "ids outside": (
        lambda: linear_log_probs(X, W, Y, ids=torch.tensor([[0], [11]])),
        IndexError,
        r"ids\[1, 0\] is 11 and must be from 0 to 10",
    ),
    "ids without K": (
        lambda: linear_log_probs(X[:, None], W, Y[:, None], ids=Y),
        ValueError,
        r"ids has shape \(2,\) and must have shape \(2, 1, K\), K at least 1",
    ),
    "float labels": (lambda: causal_lm_loss(X, W, Y.float()), TypeError, "labels is torch.float32 and must be torch.int64"),
    "one label": (lambda: causal_lm_loss(X, W, Y[0]), ValueError, r"labels has shape \(\) and must have shape \(2,\)"),
    "labels outside": (lambda: causal_lm_loss(X, W, Y + 11), IndexError, r"labels\[1\] is 11 and must be from 0 to 10"),
    "items of several": (
        lambda: causal_lm_loss(X, W, Y, num_items_in_batch=Y),
        ValueError,
        "num_items_in_batch has 2 numbers and must have one",
    ),
    "another name": (
        lambda: causal_lm_loss(X, W, Y, foo=1),
        TypeError,
        "foo is no option here: ignore_index, label_smoothing",
    ),
    "shift_weights alone": (
        lambda: causal_lm_loss(X, W, Y, shift_weights=[1.0]),
        ValueError,
        "shift_weights must be left out where shifts are",
    ),
    "a target beside ids": (
        lambda: linear_log_probs(X[:, None], W, Y[:, None] + 77, top_k=2),
        IndexError,
        r"target\[0, 0\] is 77 and must be from 0 to 10",
    ),
    "a target of invariant batches": (
        lambda: linear_log_probs(X[:, None], W, Y[:, None] + 77, batch_invariant=True),
        IndexError,
        r"target\[0, 0\] is 77",
    ),
    "a counted target": (
        lambda: linear_log_probs(X, W, Y + 77, top_k=2, counted_tokens=2),
        IndexError,
        r"target\[0\] is 77",
    ),
    "a target beside the largest": (
        lambda: linear_distillation_loss(X, W, Y + 77, teacher_top_k=(Y[:, None], X[:, :1]), hard_weight=1.0),
        IndexError,
        r"target\[0\] is 77",
    ),
    "ids of the largest": (
        lambda: linear_distillation_loss(X, W, teacher_top_k=(X[:, :1], X[:, :1])),
        TypeError,
        r"teacher_top_k\[0\] is torch.float32 and must be torch.int64",
    ),
    "an id without dimensions": (
        lambda: linear_distillation_loss(X[0], W, teacher_top_k=(Y[0], X[0, 0])),
        ValueError,
        r"teacher_top_k\[0\] has shape \(\) and must have shape \(\.\.\., K\)",
    ),
    "log-probabilities in integers": (
        lambda: linear_distillation_loss(X, W, teacher_top_k=(Y[:, None], Y[:, None])),
        TypeError,
        r"teacher_top_k\[1\] is torch.int64 and must be floating point",
    ),
    "fewer targets than tokens": (
        lambda: linear_distillation_loss(X, W, Y[:1], teacher_top_k=(Y[:, None], X[:, :1])),
        ValueError,
        r"target has shape \(1,\)",
    ),
    "fewer ids than tokens": (
        lambda: linear_distillation_loss(X, W, Y, teacher_top_k=(Y[:1, None], X[:1, :1])),
        ValueError,
        r"teacher_top_k\[0\] has shape \(1, 1\) and must have shape \(2, 1\)",
    ),
    "a label of one token": (
        lambda: causal_lm_loss(X[0], W, Y[0]),
        ValueError,
        r"labels has shape \(\) and must have shape \(..., T\) where labels are shifted",
    ),
    "a weight of one token": (
        lambda: causal_lm_loss(X, W, Y, token_weight=torch.tensor(1.0)),
        ValueError,
        r"token_weight has shape \(\) and must have shape \(..., T\) where labels are shifted",
    ),
    "shifts": (
        lambda: causal_lm_loss(torch.stack([X, X]), W, Y, shifts=iter((1, 2))),
        TypeError,
        "shifts is a tuple_iterator and must be a sequence of numbers",
    ),
    "shifts of fewer states": (
        lambda: causal_lm_loss(torch.stack([X, X]), W, Y, shifts=(1,)),
        ValueError,
        r"hidden_states has shape \(2, 2, 8\) and must have shape \(1, ..., H\) with these shifts",
    ),
    "shift_labels of another length": (
        lambda: causal_lm_loss(X, W, Y, shift_labels=Y[:1]),
        ValueError,
        r"shift_labels has shape \(1,\) and must have shape \(2,\)",
    ),
    "a shifted label outside": (
        lambda: causal_lm_loss(X, W, Y, shift_labels=Y + 11),
        IndexError,
        r"shift_labels\[0\] is 11 and must be from 0 to 10",
    ),
    "an ignored column of probabilities": (
        lambda: loss(X, W, torch.ones(2, 11), ignore_index=3),
        ValueError,
        "ignore_index is 3 and must be negative where target has probabilities",
    ),
    "class_weight is sparse": (
        lambda: loss(X, W, Y, class_weight=torch.ones(11).to_sparse()),
        TypeError,
        "class_weight is torch.sparse_coo and must be a dense tensor",
    ),
    "token_weight is sparse": (
        lambda: loss(X, W, Y, token_weight=torch.ones(2).to_sparse()),
        TypeError,
        "token_weight is torch.sparse_coo and must be a dense tensor",
    ),
    "temperatures are sparse": (
        lambda: linear_log_probs(X, W, Y, temperature=torch.ones(2).to_sparse()),
        TypeError,
        "temperature is torch.sparse_coo and must be a dense tensor",
    ),
    "a student's adapter of one tensor": (
        lambda: linear_distillation_loss(X, W, teacher=(X, W), adapter=(X,)),
        TypeError,
        "adapter is a tuple of 1 and must be a tuple of two tensors",
    ),
    "a teacher's number": (
        lambda: linear_distillation_loss(X, W, teacher=(X[0, 0], W)),
        ValueError,
        r"teacher.x has shape \(\) and must have a last dimension",
    ),
    "no shifts": (
        lambda: causal_lm_loss(X[None], W, Y, shifts=()),
        ValueError,
        r"shifts is \(\) and must have at least one number",
    ),
    "weights of shifts": (
        lambda: causal_lm_loss(torch.stack([X, X]), W, Y, shifts=(1, 2), shift_weights=iter((1.0, 0.5))),
        TypeError,
        "shift_weights is a tuple_iterator and must be a sequence of numbers",
    ),
    "an adapter of a number": (
        lambda: loss(X, W, Y, adapter=(torch.tensor(1.0), W)),
        ValueError,
        r"adapter\[0\] has shape \(\) and must have shape \(2, 1\)",
    ),
    "a negative tensor of items": (
        lambda: causal_lm_loss(X, W, Y, num_items_in_batch=torch.tensor(-3)),
        ValueError,
        "num_items_in_batch is -3 and must be at least 0",
    ),
    "parts without invariant batches": (
        lambda: linear_log_probs(X, W, Y, vocab_parts=2),
        ValueError,
        "vocab_parts must be 1 unless batch_invariant is True",
    ),
    "parts of other outputs": (
        lambda: linear_log_probs(X, W, Y, batch_invariant=True, vocab_parts=2, top_k=2),
        ValueError,
        "vocab_parts must be 1 unless",
    ),
    "parts that are not equal": (
        lambda: linear_log_probs(X, W, Y, batch_invariant=True, vocab_parts=2),
        ValueError,
        "vocab_parts is 2 and must divide the vocabulary, 11, into parts of which weight's 11 rows are some",
    ),
    "a kept set without a target": (
        lambda: linear_log_probs(X, W, kept=Y[:, None], return_entropy=True),
        ValueError,
        "kept must be left out where target is None",
    ),
    "a kept set of another shape": (
        lambda: linear_log_probs(X, W, Y, kept=Y),
        ValueError,
        r"kept has shape \(2,\) and must have shape \(2, K\)",
    ),
    "no parts": (lambda: linear_log_probs(X, W, Y, batch_invariant=True, vocab_parts=0), ValueError, "vocab_parts is 0"),
    "targets of invariant batches": (
        lambda: linear_log_probs(X, W, Y[:1], batch_invariant=True),
        ValueError,
        r"target has shape \(1,\)",
    ),
    "sequence_parallel alone": (
        lambda: loss(X, W, Y, sequence_parallel=True),
        ValueError,
        "where there is no process_group",
    ),
    "vocab_range alone": (lambda: loss(X, W, Y, vocab_range=(0, 11)), ValueError, "must be left out where process_group is"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, error, sentence = REFUSED[what]
    with pytest.raises(error, match=sentence):
        call()


def test_fp64_is_for_the_cpu_alone(device):
    if device.name == "cpu":
        assert loss(X.double(), W.double(), Y).dtype == torch.float64
    else:
        x, w, y = (t.to(device.torch) for t in (X.double(), W.double(), Y))  # torch_npu's own conversion makes fp32 of it
        with pytest.raises(TypeError, match="x is torch.float64"):
            loss(x, w, y)
