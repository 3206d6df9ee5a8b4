"""Attention Residuals' calls."""

from __future__ import annotations

import torch
from npu_attn_res import attn_res, attn_res_bank, attn_res_keys, attn_res_merge, attn_res_phase1

from .making import BF16, FP16, FP32, ROWS, Calls, backward, call, leaf, name


def calls(device: torch.device) -> Calls:
    """Widths, numbers of blocks, one tensor, a list or a bank, frozen blocks, layers, the merge, each with a norm."""

    def run(width: int, dtype: torch.dtype, n: int, listed: bool, normed: bool = False, frozen: bool = False) -> None:
        weights = [leaf((width,), dtype, device) for _ in range(3)]
        blocks = leaf((n, ROWS, width), dtype, device)
        each = [leaf((ROWS, width), dtype, device).requires_grad_(not frozen or i % 2 == 0) for i in range(n)]
        backward(attn_res(each if listed else blocks, *weights[:2], output_rms_weight=weights[2] if normed else None))

    def layers(width: int, dtype: torch.dtype, n_layers: int, listed: bool) -> None:
        queries, rms_weight = leaf((n_layers, width), FP32, device), leaf((width,), FP32, device)
        blocks = leaf((3, ROWS, width), dtype, device)
        backward(attn_res_phase1(queries, list(blocks.unbind()) if listed else blocks, rms_weight))

    def merge(width: int, dtype: torch.dtype, added: bool, normed: bool) -> None:
        o, weights = leaf((ROWS, width), FP32, device), [leaf((width,), dtype, device) for _ in range(3)]
        lse = leaf((ROWS,), FP32, device)
        partial, x = (leaf((ROWS, width), dtype, device) for _ in range(2))
        more = {"layer_output": x if added else None, "output_rms_weight": weights[2] if normed else None}
        backward(attn_res_merge(o, lse, partial, *weights[:2], **more)[: 3 if added else 2])

    def bank(width: int, dtype: torch.dtype, n: int, of: torch.dtype = BF16, counted: bool = False) -> None:
        blocks, weights = leaf((ROWS, n + 1, width), of, device), [leaf((width,), dtype, device) for _ in range(3)]
        prefix, x = (leaf((ROWS, width), dtype, device) for _ in range(2))
        count = torch.tensor(n, device=device) if counted else n
        backward(attn_res_bank(blocks, count, prefix, *weights, layer_output=x)[:3])

    def update(width: int, dtype: torch.dtype, n: int, trained: bool) -> None:
        """The prefix in place, and appended to the bank; with gradients, or with n_blocks on the device."""
        blocks, prefix = torch.randn(ROWS, n + 1, width, device=device).to(dtype), torch.randn(ROWS, width, device=device)
        weights = [leaf((width,), FP32, device).requires_grad_(trained) for _ in range(3)]
        count = n if trained else torch.tensor(n, dtype=torch.int32, device=device)
        x = prefix.to(dtype)
        found = attn_res_bank(blocks, count, prefix, *weights, layer_output=x, append=True, in_place=True)
        if trained:
            backward(found[:2])

    def keys(width: int, queries: int, n: int, prefix: bool) -> None:
        blocks, query = leaf((ROWS, n, width), BF16, device), leaf((queries, width), FP32, device)
        last = leaf((ROWS, width), FP32, device) if prefix else None
        backward(attn_res_keys(blocks, last, query, scale=width**-0.5, output_dtype=FP32))

    def inference(width: int) -> None:
        blocks = torch.randn(4, ROWS, width, device=device)
        attn_res(blocks, blocks[0, 0], blocks[0, 1], output_rms_weight=blocks[0, 2])

    for width in (1, 7, 100, 512, 1000, 2048, 4096, 5120, 8192, 12288, 16384, 20000):
        for dtype in (FP32, BF16):
            number, listed = (4, False) if dtype == FP32 else (3, True)
            yield f"{name(dtype)} {width}, {number}{' listed' * listed}", call(run, width, dtype, number, listed)
        yield f"bf16 {width}, normalised", call(run, width, BF16, 2, True, True)
        yield f"bf16 {width}, merge", call(merge, width, BF16, True, True)
        yield f"fp32 {width}, merge", call(merge, width, FP32, False, False)
    for width in (100, 1000, 4096, 20000):
        yield f"bf16 {width}, 1", call(run, width, BF16, 1, False)
        yield f"bf16 {width}, 9", call(run, width, BF16, 9, False)
        yield f"fp32 {width}, 9 listed", call(run, width, FP32, 9, True)
        yield f"bf16 {width}, 40 listed, half of them frozen", call(run, width, BF16, 40, True, False, True)
        yield f"fp16 {width}, 17", call(run, width, FP16, 17, False, True)
        yield f"fp32 {width}, no gradients", call(inference, width)
        for n_layers in (1, 2, 5, 9):
            yield f"bf16 {width}, {n_layers} layers", call(layers, width, BF16, n_layers, n_layers == 5)
        yield f"fp32 {width}, 3 layers", call(layers, width, FP32, 3, True)
    for width in (1, 100, 1000, 4608, 20000):
        yield f"bf16 {width}, 1 query of keys", call(keys, width, 1, 1, True)
        yield f"bf16 {width}, 3 queries of keys", call(keys, width, 3, 8, True)
        yield f"bf16 {width}, 4 queries of keys without a prefix", call(keys, width, 4, 3, False)
    for width in (1, 7, 100, 1000, 2048, 4096, 7168, 8192, 16384, 20000):
        yield f"bf16 {width}, bank", call(bank, width, BF16, 3)
        yield f"bf16 {width}, fp32 bank, n_blocks on the device", call(bank, width, BF16, 4, FP32, True)
        yield f"fp32 {width}, bank without blocks", call(bank, width, FP32, 0)
        yield f"bf16 {width}, bank in place", call(update, width, BF16, 2, True)
        yield f"fp32 {width}, bank in place, n_blocks on the device", call(update, width, FP32, 5, False)
