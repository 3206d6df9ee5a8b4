"""Explains the launches of a loss on a chip, without data and without a device.

`python -m npu_fused_linear_cross_entropy explain` is the same as a command.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import torch
from npu_tiling import Device
from npu_tiling.command import Dtype, check_sizes, chosen_chip, gradients, leaf, nbytes
from npu_tiling.explaining import Explanation, short
from npu_tiling.explaining import explain as explain_run
from torch import Tensor

from .api import fused_linear_cross_entropy
from .decide import Layout, LossTiling, Way
from .distillation import linear_distillation_loss
from .log_probs import linear_log_probs

NAMES = {
    "N": "columns of a chunk of logits, or of a row",
    "H": "columns of x",
    "BLOCK_M": "rows of a tile",
    "BLOCK_N": "columns of a tile",
    "BLOCK_H": "columns of x at a time",
    "AT_ONCE": "rows of x that are loaded together",
    "BLOCK_P": "partial sums that are added at a time",
    "BLOCK_T": "tiles' sums that are added at a time",
    "TAIL_N": "columns of a row's last tile; 0: it is no shorter",
    "TILES": "tiles of a row, padded",
    "GROUP": "tiles of rows, after which the next tile of columns is taken",
    "PADDED": "the logits' memory has whole tiles of rows",
    "BARRIER": "threads meet before elements are overwritten",
    "MERGE": "with the statistics of earlier columns",
    "FIRST": "the first chunk of columns",
    "SMOOTHED": "label_smoothing",
    "TOKEN_SCALING": "token_scaling",
    "ARGMAX": "the first largest logit is asked for",
    "ENTROPY": "entropies are asked for",
    "LOSS": "the loss has a gradient",
    "EACH_LOSS": "each token's loss has a gradient of its own",
    "EACH_ENTROPY": "each token's entropy has a gradient of its own",
    "REDUCED": "losses are added up",
    "MEAN": "of the losses",
    "WEIGHTED": "class_weight",
    "SMALL_INDEX": "ignore_index is exact in fp32",
    "DIVERGENCE": "from the teacher",
}
"""What sizes and flags of the kernels are."""


@torch.inference_mode(False)
def explain(
    *,
    tokens: int,
    width: int,
    vocabulary: int,
    dtype: Dtype = "bf16",
    chip: str | Device | None = None,
    backward: bool = False,
    weight_dtype: Dtype | None = None,
    bias: bool = False,
    class_weight: bool = False,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_entropy: bool = False,
    log_probs: bool = False,
    batch_invariant: bool = False,
    vocab_parts: int = 1,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
    teacher_width: int | None = None,
    divergence: Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation"] = "forward_kl",
) -> Explanation:
    """Explains how a loss is computed on a chip: which way, chunks, kernels and matrix products, and why.

    Products of bf16 and fp16 are assumed to write fp32, as PyTorch's do on CUDA, and torch_npu's from 2.13 on.

    Args:
        tokens: rows of x.
        width: elements of a row.
        vocabulary: rows of the weight.
        dtype: of x.
        chip: a chip, or its name in `npu_tiling.SOCS` or `npu_tiling.GPUS`; None: the chip in this machine.
        backward: x, weight and bias need gradients, and the backward is explained too.
        weight_dtype: of weight and bias (default: dtype).
        bias: a bias is added.
        class_weight: losses are weighted.
        reduction: of the losses of tokens.
        label_smoothing: from 0 to 1.
        lse_square_scale: factor of the z-loss.
        softcap: of the logits.
        logit_scale: factor of the logits.
        token_scaling: losses are multiplied by probabilities.
        return_token_accuracy: the share of right tokens too.
        return_entropy: entropies too.
        log_probs: explain `linear_log_probs` with sum of squares and mean, in place of the loss; of the options above bias,
            softcap, logit_scale and entropies go with it. Its top_k, PyTorch's topk of each chunk, is not explained.
        batch_invariant, vocab_parts: of `linear_log_probs`, without sum of squares and mean then.
        chunk_tokens: tokens of a chunk.
        memory_budget: bytes for logits and sums.
        teacher_width: elements of a row of a teacher's x, for `linear_distillation_loss`; None: there is no teacher.
        divergence: from the teacher.

    Returns:
        An Explanation; `text` is for people.

    Raises:
        UnknownDeviceError: the chip is not known, or none is named where there is none.
        ValueError: no call has these options.
    """
    check_sizes(tokens=tokens, width=width, vocabulary=vocabulary, teacher_width=teacher_width)
    x = leaf(tokens, width, dtype=dtype, gradient=backward)
    weight = leaf(vocabulary, width, dtype=weight_dtype or dtype, gradient=backward)
    added = leaf(vocabulary, dtype=weight_dtype or dtype, gradient=backward) if bias else None
    target = torch.empty(tokens, dtype=torch.int64, device="meta")
    options: dict[str, Any] = {
        "class_weight": leaf(vocabulary, dtype="fp32", gradient=False) if class_weight else None,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "lse_square_scale": lse_square_scale,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "token_scaling": token_scaling,
        "return_token_accuracy": return_token_accuracy,
        "return_entropy": return_entropy,
        "batch_invariant": batch_invariant,
        "vocab_parts": vocab_parts,
        "chunk_tokens": chunk_tokens,
        "memory_budget": memory_budget,
    }
    name, function = "cross entropy", cast("Callable[..., Any]", fused_linear_cross_entropy)
    teacher: tuple[Tensor, ...] = ()
    more: dict[str, Any] = {}
    if log_probs:
        name, function, reduction = "log-probabilities", linear_log_probs, "none"
        more = {} if batch_invariant else {"return_square_sum": True, "return_mean_logit": True}
    if teacher_width is not None:
        name, function = "distillation", linear_distillation_loss
        teacher = tuple(leaf(rows, teacher_width, dtype=dtype, gradient=False) for rows in (tokens, vocabulary))
        more = {"teacher": teacher, "divergence": divergence}
    options = _options_of(function, options) | more
    inputs, product = [x, weight, added], 2 * tokens * width * vocabulary
    flops = {"forward": product}
    is_one_number = reduction != "none" and not return_entropy
    if backward:  # of one number the forward computes the gradients, with the logits that it has
        flops = {"forward": 3 * product} if is_one_number else {"forward": product, "backward": 3 * product}
    if teacher_width is not None:
        flops = {direction: count + 2 * tokens * teacher_width * vocabulary for direction, count in flops.items()}

    def run() -> Mapping[str, int]:
        found = function(x, weight, target, added, **options)
        results = [found] if isinstance(found, Tensor) else [each for each in found if each is not None]
        read = [*inputs, target, options.get("class_weight"), *teacher]
        moved = {"forward": nbytes([*read, *results])}
        if backward:
            written = nbytes(gradients(results, inputs))
            moved["forward"] += written if is_one_number else 0
            moved["backward"] = nbytes(results) + (0 if is_one_number else nbytes(read) + written)
        return moved

    return explain_run(
        f"linear {name} of {tokens} x {width} and {vocabulary} x {width} in {dtype}",
        run,
        chosen_chip(chip),
        flops=flops,
        describe=_described,
        names=NAMES,
    )


def _options_of(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a function that is explained in place of the loss; raises for options that it does not have."""
    known = inspect.signature(function).parameters
    for name, value in options.items():
        is_given = value is not None and (isinstance(value, Tensor) or bool(value))
        if name not in known and is_given and (name, value) not in (("reduction", "mean"), ("vocab_parts", 1)):
            raise ValueError(f"{name} must be left out where {function.__name__} is explained.")
    return {name: value for name, value in options.items() if name in known}


def _described(tiling: LossTiling) -> dict[str, str]:
    """The decision for one call, in words."""
    chunks, dtype = tiling.chunks, short(tiling.logits_dtype)
    (tokens, columns), size = chunks.longest, tiling.buffer * tiling.logits_dtype.itemsize
    what = "exponentials" if tiling.way.multiplies or tiling.way is Way.KEPT_EXPONENTIALS else "logits"
    kept = f"; all {what} in the weight's gradient" if chunks.layout is Layout.KEPT else ""
    whose = " of each model" if tiling.way is Way.DISTILLATION else ""
    sums = f"of the weight's gradient in {short(tiling.sum_dtype)}" if tiling.shape.needs.dweight else ""
    return {
        "way": f"{tiling.way.name}: {tiling.way.value}",
        "why": tiling.why,
        "decided at": tiling.decided_at,
        "chunks": f"{_parts(len(chunks.tokens), tokens, 'tokens')}, {_parts(len(chunks.columns), columns, 'columns')}",
        "why these": chunks.why,
        what: f"{size:,} bytes of {dtype}{whose} at a time{kept}" if size else "none in memory",
        "sums": sums,
    }


def _parts(count: int, longest: int, of: str) -> str:
    return f"all {longest} {of}" if count == 1 else f"{count} chunks of at most {longest} {of}"
