"""Calls whose launches are every kind of tile that this package's tiling can choose: what `npu-offline check` compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import lookup
import torch
from npu_embedding import embedding, embedding_bag, ngram_embedding
from npu_embedding.lookup import ascend_sort
from npu_tiling import device_for

N, ROWS = 2000, 300  # no tile depends on them
OUTSIDE = 20  # rows of the shard before, which indices into a shard name too
WIDTHS = (1, 7, 64, 100, 123, 128, 768, 1000, 1024, 2048, 3584, 4096, 5120, 7168, 8192, 12288, 16384, 16411)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# A call for each kind of tile: what lint at each commit and quick reports look at.
SAMPLE = (
    "fp32 768",
    "bf16 7168",
    "fp32 123",
    "fp32 16384",
    "bf16 4096, by frequency",
    "fp32 768, equal indices",
    "bf16 64, several groups",
    "bf16 160, n-grams",
    "bf16 160, bags",
)
# Calls that launch every kernel with every value of its flags: executed at each commit.
WAYS = (
    "bf16 8192, sparse, shard",
    "fp32 123, by frequency",
    "fp32 768, equal indices",
    "fp32 16384",
    "bf16 64, several groups",
    "sort by two digits",
    "bf16 160, n-grams",
    "bf16 160, n-grams, own multipliers",
    "fp32 123, n-grams, added",
    "bf16 160, bags",
    "fp32 123, bags between offsets",
    "bf16 768, normalised",
    "e4m3 768",
)
# Calls among these that launch every kernel: executed with every compiler, and for an A3.
KERNELS = ("bf16 8192, sparse, shard", "bf16 64, several groups", "bf16 160, n-grams", "bf16 160, bags")


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """A label and a function that runs a forward and a backward on CPU tensors."""
    for name, dtype in DTYPES.items():
        for width in WIDTHS:
            yield f"{name} {width}", _call(width, dtype)
    for width in (123, 768, 4096, 8192, 16384):
        yield f"bf16 {width}, int32", _call(width, torch.bfloat16, index_dtype=torch.int32)
        for name in ("bf16", "fp32"):
            yield f"{name} {width}, by frequency", _call(width, DTYPES[name], scale_grad_by_freq=True)
        yield f"bf16 {width}, sparse, shard", _call(width, torch.bfloat16, sparse=True, vocab_range=(1000, 1000 + ROWS))
        yield f"bf16 {width}, shard", _call(width, torch.bfloat16, vocab_range=(1000, 1000 + ROWS))
    # A run over many chunks, so that partial sums are added up.
    for width in (123, 768, 4096, 16384, 16411):
        for name in ("bf16", "fp32"):
            yield f"{name} {width}, equal indices", _call(width, DTYPES[name], named=1)
    yield "bf16 64, several groups", _call(64, torch.bfloat16, n=5000, rows=20000)
    yield "sort by two digits", _sort
    yield "fp32 16411, equal indices, by frequency", _call(16411, torch.float32, named=1, scale_grad_by_freq=True)
    for name, width, options in (
        ("bf16 160", 160, {}),
        ("fp32 160, added", 160, {"mode": "sum"}),
        ("fp32 123, added", 123, {"mode": "sum", "mix": "sum", "history": False}),
        ("bf16 123", 123, {"ngram_size": 2}),
        ("bf16 160, own multipliers", 160, {"own": True}),
        ("fp32 123, added, own multipliers", 123, {"own": True, "mode": "sum"}),
        ("fp32 16384", 16384, {"history": False}),
    ):
        label, _, more = name.partition(", ")
        yield f"{label}, n-grams{', ' * bool(more)}{more}", _ngrams(width, DTYPES[label[:4]], **options)
    yield "bf16 160, bags", _bags(160, torch.bfloat16, mode="sum", padding_idx=3)
    yield "fp32 123, bags between offsets", _bags(123, torch.float32, ragged=True, mode="mean", padding_idx=3)
    yield "fp32 16411, bags between offsets, weights", _bags(16411, torch.float32, ragged=True, weighted=True, mode="sum")
    for width in (768, 4096, 16411):
        yield f"bf16 {width}, scaled", _call(width, torch.bfloat16, multiplier=3.0)
        yield f"bf16 {width}, normalised", _call(width, torch.bfloat16, rms_norm_eps=1e-6)
    for name, kind in (("int8", torch.int8), ("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        for width in (768, 7168):
            yield f"{name} {width}", _frozen(width, kind)
    yield "fp32 768, columns of a wider table", _call(768, torch.float32, pitch=1000)


def _sort() -> None:
    """Of indices into a table of so many rows that its gradient is too large for a test."""
    indices = (torch.arange(140000) * 7919 % 2**30).to(torch.int32)
    device = device_for(indices.device)
    assert device is not None
    lookup.planned(partial(ascend_sort.sorted_keys, rule=ascend_sort.WAYS[0]), device, indices, 2**30, 5, False, 0)


def _ngrams(
    width: int, dtype: torch.dtype, *, ngram_size: int = 3, history: bool = True, own: bool = False, **options: str
) -> Callable[[], None]:
    def call() -> None:
        table = torch.empty(ROWS, width, dtype=dtype).requires_grad_()
        ids = torch.arange(2 * N // 50).view(2, -1) % 11
        before = ids[:, : ngram_size - 1] if history else None
        heads = 2 * (ngram_size - 1)
        sizes = [ROWS // heads] * heads
        factors = [2**62 - 1] * ngram_size
        numbers = ([factors] * heads if own else factors, sizes, [head * sizes[0] for head in range(heads)])
        out = ngram_embedding(ids, table, *numbers, 0, ngram_size, before, **options)
        out.backward(torch.empty_like(out))

    return call


def _bags(
    width: int, dtype: torch.dtype, *, ragged: bool = False, weighted: bool = True, **options: object
) -> Callable[[], None]:
    def call() -> None:
        table = torch.empty(ROWS, width, dtype=dtype).requires_grad_()
        indices = torch.arange(N // 5) * 7919 % ROWS
        weights = torch.ones(N // 5, dtype=dtype).requires_grad_() if weighted and options["mode"] == "sum" else None
        offsets = torch.tensor([0, 3, 3, 200, N // 5 - 1]) if ragged else None
        if not ragged:
            indices, weights = indices.view(-1, 4), None if weights is None else weights.view(-1, 4)
        out = embedding_bag(indices, table, offsets, per_sample_weights=weights, **options)  # type: ignore[arg-type]
        out.backward(torch.empty_like(out))

    return call


def _frozen(width: int, kind: torch.dtype) -> Callable[[], None]:
    def call() -> None:
        table = torch.zeros(ROWS, width, dtype=torch.int8).view(kind)
        embedding(torch.arange(N) % ROWS, table, row_scales=torch.ones(ROWS), dtype=torch.bfloat16)

    return call


def sized_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """The same at sizes at which time counts: what `npu-offline tune` searches tiles for."""
    for name, width in (("fp32", 768), ("bf16", 1024), ("bf16", 4096), ("bf16", 8192)):
        yield f"{name} 16384 of 32000 x {width}", _call(width, DTYPES[name], n=16384, rows=32000)


def _call(
    width: int,
    dtype: torch.dtype,
    *,
    index_dtype: torch.dtype = torch.int64,
    pitch: int | None = None,
    n: int = N,
    rows: int = ROWS,
    named: int | None = None,
    vocab_range: tuple[int, int] | None = None,
    **options: object,
) -> Callable[[], None]:
    def call() -> None:
        weight = torch.empty(rows, pitch or width, dtype=dtype)[:, :width].requires_grad_()
        indices = torch.arange(n) * 7919 % (named or rows)
        if vocab_range is not None:
            indices += vocab_range[0] - OUTSIDE
        out = embedding(indices.to(index_dtype), weight, vocab_range=vocab_range, **options)  # type: ignore[arg-type]
        out.backward(torch.empty_like(out))

    return call
