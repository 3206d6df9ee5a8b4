"""The cross entropy's calls."""

from __future__ import annotations

from typing import Any

import npu_tiling
import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_distillation_loss, linear_log_probs
from npu_fused_linear_cross_entropy import tiling as tiling_product
from npu_fused_linear_cross_entropy.call import STATISTICS, SUM
from torch import Tensor

from testing.steps import run_once

from .making import BF16, FP16, FP32, ROWS, Calls, backward, call, leaf, name


def calls(device: torch.device) -> Calls:
    """Vocabularies, each option alone, all of them, chunks of tokens and columns, kept exponentials, targets outside."""

    def run(
        vocabulary: int,
        dtype: torch.dtype,
        *,
        tokens: int = ROWS,
        width: int = 16,
        factor: float = 1.0,
        retain_graph: bool = False,
        **options: Any,
    ) -> None:
        x, weight = leaf((tokens, width), dtype, device), leaf((vocabulary, width), dtype, device)
        target = torch.randint(0, vocabulary, (tokens,), device=device)
        target[::5], target[3::11] = -100, vocabulary + 7
        if options.pop("bias", False):
            options["bias"] = leaf((vocabulary,), dtype, device)
        if options.pop("class_weight", False):
            options["class_weight"] = torch.rand(vocabulary, device=device)
        found = fused_linear_cross_entropy(x, weight, target, **options)
        loss = found if isinstance(found, Tensor) else found.loss
        (loss.sum() * factor).backward(retain_graph=retain_graph)

    def log_probs(vocabulary: int, **options: Any) -> None:
        x, weight = leaf((ROWS, 16), BF16, device), leaf((vocabulary, 16), BF16, device)
        target = torch.randint(0, vocabulary, (ROWS,), device=device)
        backward(linear_log_probs(x, weight, target, return_entropy=True, **options))

    def distributions(vocabulary: int, **options: Any) -> None:
        x, weight = leaf((ROWS, 16), BF16, device), leaf((vocabulary, 16), BF16, device)
        ids = torch.randint(0, vocabulary, (ROWS, 3), device=device)
        extras = ("entropy", "square_sum", "mean_logit", "is_top")
        given = {"ids": ids, "top_k": min(3, vocabulary), **{f"return_{extra}": True for extra in extras}, **options}
        if given.pop("temperatures", False):
            given["temperature"] = leaf((ROWS,), FP32, device).detach().exp().requires_grad_()
        backward(linear_log_probs(x, weight, ids[:, 0], **given))

    def distilled(vocabulary: int, **options: Any) -> None:
        (x, of_teacher), (weight, head) = ([leaf((n, 16), BF16, device) for _ in range(2)] for n in (ROWS, vocabulary))
        target = torch.randint(0, vocabulary, (ROWS,), device=device)
        linear_distillation_loss(x, weight, target, teacher=(of_teacher, head), **options).backward()

    everything = {"label_smoothing": 0.1, "lse_square_scale": 0.1, "softcap": 30.0, "logit_scale": 0.5}
    everything |= {"token_scaling": True, "return_z_loss": True, "return_token_accuracy": True, "return_lse": True}
    everything |= {"bias": True, "class_weight": True}
    singles: list[dict[str, Any]] = [{name: value} for name, value in everything.items() if name != "return_lse"]
    singles += [{"reduction": "none"}, {"reduction": "sum"}, {"return_entropy": True}, {"chunk_tokens": 16}]
    for vocabulary in (1, 2, 7, 123, 512, 1000, 2048, 4096, 8192, 10000, 16384, 33000):
        for dtype in (FP32, BF16):
            yield f"{name(dtype)} {vocabulary}", call(run, vocabulary, dtype, factor=3.0)
        yield f"fp16 {vocabulary}, everything", call(run, vocabulary, FP16, **everything)
        yield f"bf16 {vocabulary}, log-probabilities", call(log_probs, vocabulary)
    for vocabulary in (1, 1000, 10000):
        for divergence in ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation"):
            yield f"bf16 {vocabulary}, distilled, {divergence}", call(distilled, vocabulary, divergence=divergence)
        hard = {"temperature": 2.0, "hard_weight": 0.5, "softcap": 30.0, "divergence": "jensen_shannon"}
        yield f"bf16 {vocabulary}, distilled, hard labels", call(distilled, vocabulary, **hard)
    for vocabulary in (1000, 10000):
        for options in singles:
            yield f"bf16 {vocabulary}, {', '.join(options)}", call(run, vocabulary, BF16, **options)
        for dtype in (FP32, BF16):
            small = {"memory_budget": 2**17, "tokens": 200}
            yield f"{name(dtype)} {vocabulary}, columns", call(run, vocabulary, dtype, softcap=5.0, **small)
            kept = {"memory_budget": 2**19, "tokens": 200, "width": 256}  # holds the fewest columns that are kept, 512
            yield f"{name(dtype)} {vocabulary}, kept columns", call(run, vocabulary, dtype, **kept)
            yield f"{name(dtype)} {vocabulary}, everything by columns", call(run, vocabulary, dtype, **everything, **small)
        yield f"bf16 {vocabulary}, log-probabilities by columns", call(log_probs, vocabulary, memory_budget=2**14)
        yield f"bf16 {vocabulary}, distributions", call(distributions, vocabulary)
        everywhere = {"softcap": 5.0, "logit_scale": 0.5, "temperatures": True, "memory_budget": 2**14}
        yield f"bf16 {vocabulary}, distributions by columns", call(distributions, vocabulary, **everywhere)
    yield "bf16 7, many tokens", call(run, 7, BF16, tokens=5000)
    for dtype in (FP32, BF16):
        yield f"{name(dtype)} 123, a graph that is kept", call(run, 123, dtype, factor=3.0, retain_graph=True)

    def product(**options: Any) -> None:
        """As calls of many tokens do, with the product that makes exponentials."""
        least, tiling_product._MIN_OPERATIONS = tiling_product._MIN_OPERATIONS, 0.0
        try:
            run(1000, BF16, tokens=300, width=520, **options)
        finally:
            tiling_product._MIN_OPERATIONS = least

    for options in ({}, {"reduction": "none", "logit_scale": 0.5}, {"memory_budget": 300 * 2 * 600}, {"factor": 1e3}):
        yield f"bf16 1000, {', '.join(options)} with the product's exponentials", call(product, **options)

    def join() -> None:
        """What three ranks do once they have exchanged their statistics; the result is compared as a gradient is."""
        given, chip = leaf((STATISTICS, 5000), FP32, device), npu_tiling.device_for(device)
        given.grad = torch.empty_like(given)
        parts = torch.stack((given, given + 1.0, given - 1.0)).detach()
        parts[:, SUM].exp_()
        if chip is None:
            from npu_fused_linear_cross_entropy.loss.reference import join as join_ranks
        else:
            from npu_fused_linear_cross_entropy.loss.kernels import join as join_ranks
        run_once(join_ranks, chip, parts, given.grad)

    yield "statistics of three ranks", join
