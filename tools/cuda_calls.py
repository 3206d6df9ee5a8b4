"""Calls whose launches are every kernel that a CUDA device can be given, in every shape of tile that tilings choose for it.

Shapes are small and ragged: the last tile of rows and of columns is a partial one wherever there can be one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from npu_attn_res import attn_res, attn_res_bank, attn_res_merge, attn_res_phase1
from npu_embedding import embedding, embedding_bag, ngram_embedding
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_distillation_loss, linear_log_probs
from npu_fused_linear_cross_entropy.cuda import tiling as tiling_product
from npu_rms_norm import add_rms_norm, add_rms_norm_dynamic_quant, gated_rms_norm, qk_rms_norm, rms_norm
from torch import Tensor

Call = tuple[str, Callable[[], None]]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROWS, MANY_ROWS = 37, 1500  # fewer, and more tiles than a persistent grid has programs


def rms_norm_calls(device: torch.device) -> Iterator[Call]:
    """Widths on both sides of every step of the tables, casting modes, residuals, rows at strides, in place, heads, int8."""

    def run(shape: tuple[int, ...], dtype: torch.dtype, weight: torch.dtype | None, view: str = "", **options: Any) -> None:
        x = _rows(shape, dtype, device, view)
        w = None if weight is None else _leaf((shape[-1],), weight, device)
        y = rms_norm(x, w, **options)
        y.backward(_rows(shape, dtype, device, view).detach() if view else torch.ones_like(y))

    def add(width: int, dtype: torch.dtype, residual: torch.dtype, **options: Any) -> None:
        x, stream = _leaf((ROWS, width), dtype, device), _leaf((ROWS, width), residual, device)
        _backward(add_rms_norm(x, stream, _leaf((width,), dtype, device), **options))

    def gate(width: int, dtype: torch.dtype, **options: Any) -> None:
        x, values, weight = (_leaf(shape, dtype, device) for shape in ((ROWS, width), (ROWS, width), (width,)))
        _backward(gated_rms_norm(x, values, weight, **options))

    def heads(width: int, dtype: torch.dtype, n_heads: int, **options: Any) -> None:
        x, values = (_leaf((ROWS, n_heads, width), dtype, device) for _ in range(2))
        weight, bias = (_leaf((n_heads, width), dtype, device) for _ in range(2))
        _backward(gated_rms_norm(x, values, weight, bias=bias, **options))

    def quantise(width: int, dtype: torch.dtype) -> None:
        x, stream, weight = (_leaf(shape, BF16, device) for shape in ((ROWS, width), (ROWS, width), (width,)))
        add_rms_norm_dynamic_quant(x, stream, weight, dtype=dtype)

    def projection(width: int, dtype: torch.dtype) -> None:
        qkv, *weights = (_leaf(shape, dtype, device) for shape in ((ROWS, 8 * width), (width,), (width,)))
        results = qk_rms_norm(qkv, *weights, 4, 2)
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])

    for width in (50, 128):
        yield f"bf16 {width}, q and k", _call(projection, width, BF16)
    for width in (7, 128, 2560, 20000):
        yield f"bf16 {width}, 3 heads, bias", _call(heads, width, BF16, 3)
        yield f"bf16 {width}, added, int8", _call(quantise, width, torch.int8)
        for first in (True, False):
            yield f"bf16 {width}, gated, norm first {first}", _call(gate, width, BF16, norm_before_gate=first)
    for width in (1, 7, 100, 512, 1000, 1024, 1500, 2048, 2560, 4096, 5000, 8192, 12000, 16384, 20000, 40000):
        for dtype in (FP32, BF16):
            yield f"{_name(dtype)} {width}", _call(run, (ROWS, width), dtype, dtype)
        yield f"bf16 {width}, added", _call(add, width, BF16, BF16)
    for width in (1000, 4096, 20000):
        yield f"bf16 {width}, {MANY_ROWS} rows", _call(run, (MANY_ROWS, width), BF16, FP32)
        yield f"bf16 {width}, no weight", _call(run, (ROWS, width), BF16, None)
        yield f"bf16 {width}, added to fp32", _call(add, width, BF16, FP32, in_place=True)
        yield f"bf16 {width}, in place", _call(run, (ROWS, width), BF16, BF16, in_place=True)
        for mode in ("gemma", "none"):
            yield f"fp16 {width}, {mode}", _call(run, (ROWS, width), FP16, FP16, casting_mode=mode, offset=1.0)
        for view in ("sliced", "groups", "transposed", "unaligned"):
            yield f"bf16 {width}, {view}", _call(run, (3, 13, width), BF16, BF16, view)


def embedding_calls(device: torch.device) -> Iterator[Call]:
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
        weight = _leaf((rows, width), dtype, device)
        out = embedding(indices.to(index_dtype), weight, **options)
        out.backward(torch.ones_like(out))

    def ngrams(width: int, dtype: torch.dtype, mode: str, history: bool = True, tokens: int = 41) -> None:
        ids = torch.randint(0, 9, (3, tokens), device=device)
        table = _leaf((301, width), dtype, device)
        before = ids[:, :2] if history else None
        out = ngram_embedding(ids, table, [2**62 - 1, 3, 5], [71, 73, 79, 67], [0, 71, 144, 223], 0, 3, before, mode=mode)
        out.backward(torch.ones_like(out))

    def bags(width: int, dtype: torch.dtype, ends: list[int] | None = None, **options: Any) -> None:
        indices = torch.randint(0, 301, (120,), device=device)
        offsets = None if ends is None else torch.tensor(ends, device=device)
        weights = _leaf((120,), dtype, device) if options["mode"] == "sum" else None
        if ends is None:
            indices, weights = indices.view(-1, 4), None if weights is None else weights.view(-1, 4)
        out = embedding_bag(indices, _leaf((301, width), dtype, device), offsets, per_sample_weights=weights, **options)
        out.backward(torch.ones_like(out))

    for width in (1, 7, 64, 100, 512, 1000, 2048, 4096, 5000, 8192, 16411):
        for dtype in (FP32, BF16):
            yield f"{_name(dtype)} {width}", _call(run, width, dtype)
    for width in (100, 1024, 5000):
        for kind in ("equal", "outside"):
            yield f"bf16 {width}, {kind}", _call(run, width, BF16, kind)
        yield f"fp16 {width}, int32", _call(run, width, FP16, "uniform", torch.int32)
        yield f"bf16 {width}, outside, int32", _call(run, width, BF16, "outside", torch.int32)
        yield f"bf16 {width}, padding, by frequency", _call(run, width, BF16, padding_idx=5, scale_grad_by_freq=True)
        yield f"fp32 {width}, sparse", _call(run, width, FP32, sparse=True)
        yield f"fp32 {width}, shard", _call(run, width, FP32, vocab_range=(200, 501), num_embeddings=900)
        yield f"fp32 {width}, norms", _call(run, width, FP32, max_norm=1.0)
        for kind in ("uniform", "equal", "outside"):
            yield f"bf16 {width}, few indices, {kind}", _call(run, width, BF16, kind, n=777)
        yield f"fp32 {width}, few indices, by frequency", _call(run, width, FP32, n=777, scale_grad_by_freq=True)
        yield f"bf16 {width}, one index", _call(run, width, BF16, n=1)
        yield f"bf16 {width}, one row", _call(run, width, BF16, rows=1)
    for width in (1, 100, 160, 5000):
        for mode in ("concat", "sum"):
            yield f"bf16 {width}, n-grams, {mode}", _call(ngrams, width, BF16, mode)
    for width in (7, 1100):
        yield f"bf16 {width}, bags", _call(bags, width, BF16, mode="mean", padding_idx=5)
        yield f"fp32 {width}, bags between offsets", _call(bags, width, FP32, [0, 3, 3, 77], mode="sum")
    yield "fp32 160, n-grams without history", _call(ngrams, 160, FP32, "concat", False, 100)
    yield "bf16 1024, more indices than launches of ours sort", _call(run, 1024, BF16, n=70000, rows=40000)
    yield "bf16 64, many groups", _call(run, 64, BF16, n=20000, rows=40000)


def attn_res_calls(device: torch.device) -> Iterator[Call]:
    """Widths, numbers of blocks, one tensor, a list or a bank, frozen blocks, layers, the merge, each with a norm."""

    def run(width: int, dtype: torch.dtype, n: int, listed: bool, normed: bool = False, frozen: bool = False) -> None:
        weights = [_leaf((width,), dtype, device) for _ in range(3)]
        blocks = _leaf((n, ROWS, width), dtype, device)
        each = [_leaf((ROWS, width), dtype, device).requires_grad_(not frozen or i % 2 == 0) for i in range(n)]
        _backward(attn_res(each if listed else blocks, *weights[:2], output_rms_weight=weights[2] if normed else None))

    def layers(width: int, dtype: torch.dtype, n_layers: int, listed: bool) -> None:
        queries, rms_weight = _leaf((n_layers, width), FP32, device), _leaf((width,), FP32, device)
        blocks = _leaf((3, ROWS, width), dtype, device)
        _backward(attn_res_phase1(queries, list(blocks.unbind()) if listed else blocks, rms_weight))

    def merge(width: int, dtype: torch.dtype, added: bool, normed: bool) -> None:
        o, weights = _leaf((ROWS, width), FP32, device), [_leaf((width,), dtype, device) for _ in range(3)]
        lse = _leaf((ROWS,), FP32, device)
        partial, x = (_leaf((ROWS, width), dtype, device) for _ in range(2))
        more = {"layer_output": x if added else None, "output_rms_weight": weights[2] if normed else None}
        _backward(attn_res_merge(o, lse, partial, *weights[:2], **more)[: 3 if added else 2])

    def bank(width: int, dtype: torch.dtype, n: int, of: torch.dtype = BF16, counted: bool = False) -> None:
        blocks, weights = _leaf((ROWS, n + 1, width), of, device), [_leaf((width,), dtype, device) for _ in range(3)]
        prefix, x = (_leaf((ROWS, width), dtype, device) for _ in range(2))
        count = torch.tensor(n, device=device) if counted else n
        _backward(attn_res_bank(blocks, count, prefix, *weights, layer_output=x)[:3])

    def update(width: int, dtype: torch.dtype, n: int, trained: bool) -> None:
        """The prefix in place, and appended to the bank; with gradients, or with n_blocks on the device."""
        blocks, prefix = torch.randn(ROWS, n + 1, width, device=device).to(dtype), torch.randn(ROWS, width, device=device)
        weights = [_leaf((width,), FP32, device).requires_grad_(trained) for _ in range(3)]
        count = n if trained else torch.tensor(n, dtype=torch.int32, device=device)
        x = prefix.to(dtype)
        found = attn_res_bank(blocks, count, prefix, *weights, layer_output=x, append=True, in_place=True)
        if trained:
            _backward(found[:2])

    def inference(width: int) -> None:
        blocks = torch.randn(4, ROWS, width, device=device)
        attn_res(blocks, blocks[0, 0], blocks[0, 1], output_rms_weight=blocks[0, 2])

    for width in (1, 7, 100, 512, 1000, 2048, 4096, 5120, 8192, 12288, 16384, 20000):
        for dtype in (FP32, BF16):
            number, listed = (4, False) if dtype == FP32 else (3, True)
            yield f"{_name(dtype)} {width}, {number}{' listed' * listed}", _call(run, width, dtype, number, listed)
        yield f"bf16 {width}, normalised", _call(run, width, BF16, 2, True, True)
        yield f"bf16 {width}, merge", _call(merge, width, BF16, True, True)
        yield f"fp32 {width}, merge", _call(merge, width, FP32, False, False)
    for width in (100, 1000, 4096, 20000):
        yield f"bf16 {width}, 1", _call(run, width, BF16, 1, False)
        yield f"bf16 {width}, 9", _call(run, width, BF16, 9, False)
        yield f"fp32 {width}, 9 listed", _call(run, width, FP32, 9, True)
        yield f"bf16 {width}, 40 listed, half of them frozen", _call(run, width, BF16, 40, True, False, True)
        yield f"fp16 {width}, 17", _call(run, width, FP16, 17, False, True)
        yield f"fp32 {width}, no gradients", _call(inference, width)
        for n_layers in (1, 2, 5, 9):
            yield f"bf16 {width}, {n_layers} layers", _call(layers, width, BF16, n_layers, n_layers == 5)
        yield f"fp32 {width}, 3 layers", _call(layers, width, FP32, 3, True)
    for width in (1, 7, 100, 1000, 2048, 4096, 7168, 8192, 16384, 20000):
        yield f"bf16 {width}, bank", _call(bank, width, BF16, 3)
        yield f"bf16 {width}, fp32 bank, n_blocks on the device", _call(bank, width, BF16, 4, FP32, True)
        yield f"fp32 {width}, bank without blocks", _call(bank, width, FP32, 0)
        yield f"bf16 {width}, bank in place", _call(update, width, BF16, 2, True)
        yield f"fp32 {width}, bank in place, n_blocks on the device", _call(update, width, FP32, 5, False)


def cross_entropy_calls(device: torch.device) -> Iterator[Call]:
    """Vocabularies, each option alone and all of them, chunks of tokens and of columns, kept logits, targets outside."""

    def run(
        vocabulary: int, dtype: torch.dtype, *, tokens: int = ROWS, width: int = 16, factor: float = 1.0, **options: Any
    ) -> None:
        x, weight = _leaf((tokens, width), dtype, device), _leaf((vocabulary, width), dtype, device)
        target = torch.randint(0, vocabulary, (tokens,), device=device)
        target[::5], target[3::11] = -100, vocabulary + 7
        if options.pop("bias", False):
            options["bias"] = _leaf((vocabulary,), dtype, device)
        if options.pop("class_weight", False):
            options["class_weight"] = torch.rand(vocabulary, device=device)
        found = fused_linear_cross_entropy(x, weight, target, **options)
        loss = found if isinstance(found, Tensor) else found.loss
        (loss.sum() * factor).backward()

    def log_probs(vocabulary: int, **options: Any) -> None:
        x, weight = _leaf((ROWS, 16), BF16, device), _leaf((vocabulary, 16), BF16, device)
        target = torch.randint(0, vocabulary, (ROWS,), device=device)
        _backward(linear_log_probs(x, weight, target, return_entropy=True, **options))

    def distributions(vocabulary: int, **options: Any) -> None:
        x, weight = _leaf((ROWS, 16), BF16, device), _leaf((vocabulary, 16), BF16, device)
        ids = torch.randint(0, vocabulary, (ROWS, 3), device=device)
        extras = ("entropy", "square_sum", "mean_logit", "is_top")
        given = {"ids": ids, "top_k": min(3, vocabulary), **{f"return_{extra}": True for extra in extras}, **options}
        if given.pop("temperatures", False):
            given["temperature"] = _leaf((ROWS,), FP32, device).detach().exp().requires_grad_()
        _backward(linear_log_probs(x, weight, ids[:, 0], **given))

    def distilled(vocabulary: int, **options: Any) -> None:
        (x, of_teacher), (weight, head) = ([_leaf((n, 16), BF16, device) for _ in range(2)] for n in (ROWS, vocabulary))
        target = torch.randint(0, vocabulary, (ROWS,), device=device)
        linear_distillation_loss(x, weight, target, teacher=(of_teacher, head), **options).backward()

    everything = {"label_smoothing": 0.1, "lse_square_scale": 0.1, "softcap": 30.0, "logit_scale": 0.5}
    everything |= {"token_scaling": True, "return_z_loss": True, "return_token_accuracy": True, "return_lse": True}
    everything |= {"bias": True, "class_weight": True}
    singles: list[dict[str, Any]] = [{name: value} for name, value in everything.items() if name != "return_lse"]
    singles += [{"reduction": "none"}, {"reduction": "sum"}, {"return_entropy": True}, {"chunk_tokens": 16}]
    for vocabulary in (1, 2, 7, 123, 512, 1000, 2048, 4096, 8192, 10000, 16384, 33000):
        for dtype in (FP32, BF16):
            yield f"{_name(dtype)} {vocabulary}", _call(run, vocabulary, dtype, factor=3.0)
        yield f"fp16 {vocabulary}, everything", _call(run, vocabulary, FP16, **everything)
        yield f"bf16 {vocabulary}, log-probabilities", _call(log_probs, vocabulary)
    for vocabulary in (1, 1000, 10000):
        for divergence in ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation"):
            yield f"bf16 {vocabulary}, distilled, {divergence}", _call(distilled, vocabulary, divergence=divergence)
        hard = {"temperature": 2.0, "hard_weight": 0.5, "softcap": 30.0, "divergence": "jensen_shannon"}
        yield f"bf16 {vocabulary}, distilled, hard labels", _call(distilled, vocabulary, **hard)
    for vocabulary in (1000, 10000):
        for options in singles:
            yield f"bf16 {vocabulary}, {', '.join(options)}", _call(run, vocabulary, BF16, **options)
        for dtype in (FP32, BF16):
            small = {"memory_budget": 2**17, "tokens": 200}
            yield f"{_name(dtype)} {vocabulary}, columns", _call(run, vocabulary, dtype, softcap=5.0, **small)
            kept = {"memory_budget": 2**19, "tokens": 200, "width": 256}  # holds the fewest columns that are kept, 512
            yield f"{_name(dtype)} {vocabulary}, kept columns", _call(run, vocabulary, dtype, **kept)
            kept["label_smoothing"] = 0.1  # logits are kept, not exponentials
            yield f"{_name(dtype)} {vocabulary}, kept columns, smoothing", _call(run, vocabulary, dtype, **kept)
            yield f"{_name(dtype)} {vocabulary}, everything by columns", _call(run, vocabulary, dtype, **everything, **small)
        yield f"bf16 {vocabulary}, log-probabilities by columns", _call(log_probs, vocabulary, memory_budget=2**14)
        yield f"bf16 {vocabulary}, distributions", _call(distributions, vocabulary)
        everywhere = {"softcap": 5.0, "logit_scale": 0.5, "temperatures": True, "memory_budget": 2**14}
        yield f"bf16 {vocabulary}, distributions by columns", _call(distributions, vocabulary, **everywhere)
    yield "bf16 7, many tokens", _call(run, 7, BF16, tokens=5000)

    def product(**options: Any) -> None:
        """As calls of many tokens do, with the product that makes exponentials."""
        least, tiling_product._MIN_OPERATIONS = tiling_product._MIN_OPERATIONS, 0.0
        try:
            run(1000, BF16, tokens=300, width=520, **options)
        finally:
            tiling_product._MIN_OPERATIONS = least

    for options in ({}, {"reduction": "none", "logit_scale": 0.5}, {"memory_budget": 300 * 2 * 600}, {"factor": 1e3}):
        yield f"bf16 1000, {', '.join(options)} with the product's exponentials", _call(product, **options)


CALLS: dict[str, Callable[[torch.device], Iterator[Call]]] = {
    "rms_norm": rms_norm_calls,
    "embedding": embedding_calls,
    "attn_res": attn_res_calls,
    "fused_linear_cross_entropy": cross_entropy_calls,
}


def _call(function: Callable[..., None], *arguments: Any, **options: Any) -> Callable[[], None]:
    return lambda: function(*arguments, **options)


def _leaf(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def _rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, view: str) -> Tensor:
    """Rows as a view has them: part of wider rows, groups apart, groups side by side, or an address of 2 bytes more."""
    outer, inner, width = shape if view else (1, *shape)
    storage = torch.randn(2 * outer * inner * width + 1, device=device).to(dtype)
    strides = {
        "": (inner * width, width, 1),
        "sliced": (2 * inner * width, 2 * width, 1),
        "groups": (2 * inner * width, width, 1),
        "transposed": (width, outer * width, 1),
        "unaligned": (inner * width, width, 1),
    }
    rows = storage.as_strided((outer, inner, width), strides[view], int(view == "unaligned"))
    return rows.view(shape).requires_grad_()


def _backward(outputs: Tensor | tuple[Tensor | None, ...]) -> None:
    every = [outputs] if isinstance(outputs, Tensor) else [output for output in outputs if output is not None]
    given = [output for output in every if output.requires_grad]
    torch.autograd.backward(given, [torch.ones_like(output) for output in given])


def _name(dtype: torch.dtype) -> str:
    return {FP32: "fp32", BF16: "bf16", FP16: "fp16"}[dtype]
