"""The embedding's calls."""

from __future__ import annotations

from typing import Any

import torch
from npu_embedding import embedding, embedding_bag, ngram_embedding

from .making import BF16, FP16, FP32, Calls, call, leaf, name


def calls(device: torch.device) -> Calls:
    """Widths, dtypes of tables and of indices, runs of equal indices, indices outside of the table, shards."""

    def run(
        width: int,
        dtype: torch.dtype,
        kind: str = "uniform",
        index_dtype: torch.dtype = torch.int64,
        n: int = 1777,
        rows: int = 301,
        **options: Any,
    ) -> None:
        indices = torch.randint(0, rows, (n,), device=device)
        if kind == "equal":
            indices.fill_(5)
        if kind == "outside":
            indices[::7] = -3
            indices[3::7] = rows + 2**40 if index_dtype == torch.int64 else rows
        weight = leaf((rows, width), dtype, device)
        out = embedding(indices.to(index_dtype), weight, **options)
        out.backward(torch.ones_like(out))

    def ngrams(width: int, dtype: torch.dtype, mode: str, history: bool = True, tokens: int = 41, own: bool = False) -> None:
        ids = torch.randint(0, 9, (3, tokens), device=device)
        table = leaf((301, width), dtype, device)
        before = ids[:, :2] if history else None
        factors = [2**62 - 1, 3, 5]
        numbers = ([factors] * 4 if own else factors, [71, 73, 79, 67], [0, 71, 144, 223])
        out = ngram_embedding(ids, table, *numbers, 0, 3, before, mode=mode)
        out.backward(torch.ones_like(out))

    def bags(width: int, dtype: torch.dtype, ends: list[int] | None = None, n: int = 120, **options: Any) -> None:
        indices = torch.randint(0, 301, (n,), device=device)
        offsets = None if ends is None else torch.tensor(ends, device=device)
        weights = leaf((n,), dtype, device) if options["mode"] == "sum" else None
        if ends is None:
            indices, weights = indices.view(-1, 4), None if weights is None else weights.view(-1, 4)
        out = embedding_bag(indices, leaf((301, width), dtype, device), offsets, per_sample_weights=weights, **options)
        out.backward(torch.ones_like(out))

    for width in (1, 7, 64, 100, 512, 1000, 2048, 4096, 5000, 8192, 16411):
        for dtype in (FP32, BF16):
            yield f"{name(dtype)} {width}", call(run, width, dtype)
    for width in (100, 1024, 5000):
        for kind in ("equal", "outside"):
            yield f"bf16 {width}, {kind}", call(run, width, BF16, kind)
        yield f"fp16 {width}, int32", call(run, width, FP16, "uniform", torch.int32)
        yield f"bf16 {width}, outside, int32", call(run, width, BF16, "outside", torch.int32)
        yield f"bf16 {width}, padding, by frequency", call(run, width, BF16, padding_idx=5, scale_grad_by_freq=True)
        yield f"fp32 {width}, sparse", call(run, width, FP32, sparse=True)
        yield f"fp32 {width}, shard", call(run, width, FP32, vocab_range=(200, 501), num_embeddings=900)
        yield f"fp32 {width}, norms", call(run, width, FP32, max_norm=1.0)
        for kind in ("uniform", "equal", "outside"):
            yield f"bf16 {width}, few indices, {kind}", call(run, width, BF16, kind, n=777)
        yield f"fp32 {width}, few indices, by frequency", call(run, width, FP32, n=777, scale_grad_by_freq=True)
        yield f"bf16 {width}, one index", call(run, width, BF16, n=1)
        yield f"bf16 {width}, one row", call(run, width, BF16, rows=1)
    for width in (1, 100, 160, 5000):
        for mode in ("concat", "sum"):
            yield f"bf16 {width}, n-grams, {mode}", call(ngrams, width, BF16, mode)
    for width in (7, 1100):
        yield f"bf16 {width}, bags", call(bags, width, BF16, mode="mean", padding_idx=5)
        yield f"fp32 {width}, bags between offsets", call(bags, width, FP32, [0, 3, 3, 77], mode="sum")
        for mode in ("sum", "mean"):
            yield f"bf16 {width}, long bags, {mode}", call(bags, width, BF16, [0, 3, 3, 300], 333, mode=mode)
    yield "fp32 160, n-grams without history", call(ngrams, 160, FP32, "concat", False, 100)
    for mode in ("concat", "sum"):
        yield f"bf16 160, n-grams, own multipliers, {mode}", call(ngrams, 160, BF16, mode, own=True)
    yield "bf16 1024, more indices than launches of ours sort", call(run, 1024, BF16, n=70000, rows=40000)
    yield "bf16 64, many groups", call(run, 64, BF16, n=20000, rows=40000)
