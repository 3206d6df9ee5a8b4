"""Calls whose launches are every kind of tile that this package's tiling can choose: what `npu-offline check` compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from npu_attn_res import attn_res, attn_res_bank, attn_res_keys, attn_res_merge, attn_res_phase1

TOKENS, N_BLOCKS = 200, 4  # the tile does not depend on them
WIDTHS = {
    torch.bfloat16: (1, 123, 1000, 2048, 4096, 5120, 7168, 8192, 16384),
    torch.float16: (4096,),
    torch.float32: (123, 2048, 4096, 6144, 8192),
}
LAYERS = {1024: (5, 12), 4096: (8,), 16384: (8,)}
# A call for each kind of tile: what lint at each commit and quick reports look at.
SAMPLE = (
    "bfloat16 4096, list",
    "bfloat16 7168, normalised merge",
    "float32 123",
    "bfloat16 16384",
    "bfloat16 1024, 5 layers",
    "bfloat16 4608, 3 keys",
)
# Calls that launch every kernel with every value of its flags: executed at each commit.
WAYS = (
    "bfloat16 4096, list",
    "bfloat16 1024, 5 layers",
    "float32 8192, merge",
    "float32 8192",
    "bfloat16 16384",
    "bfloat16 7168, normalised",
    "bfloat16 4096, no gradients",
    "bfloat16 123",
    "float32 4096, list",
    "float16 5376, normalised list, weights",
    "bfloat16 4096, bank, in place",
    "bfloat16 4608, 3 keys",
    "bfloat16 1000, 4 keys alone",
)
# Calls among these that launch every kernel: executed with every compiler, and for an A3.
KERNELS = (
    "bfloat16 4096, list",
    "bfloat16 1024, 5 layers",
    "float32 8192, merge",
    "float32 8192",
    "bfloat16 16384",
    "bfloat16 7168, normalised",
    "bfloat16 4608, 3 keys",
)


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """A label and a function that runs a forward and a backward on CPU tensors."""
    for dtype, widths in WIDTHS.items():
        for width in widths:
            name = str(dtype).removeprefix("torch.")
            yield f"{name} {width}", _attn_res(width, dtype)
            yield f"{name} {width}, merge", _merge(width, dtype)
    for width in (128, 4096, 7168):
        yield f"bfloat16 {width}, list", _attn_res(width, torch.bfloat16, listed=True)
        yield f"bfloat16 {width}, normalised", _attn_res(width, torch.bfloat16, normalised=True)
        yield f"bfloat16 {width}, normalised merge", _merge(width, torch.bfloat16, normalised=True)
    yield (
        "float16 5376, normalised list, weights",
        _attn_res(5376, torch.float16, listed=True, normalised=True, weights=True),
    )
    yield "bfloat16 16384, list", _attn_res(16384, torch.bfloat16, listed=True)
    yield "float32 4096, list", _attn_res(4096, torch.float32, listed=True)
    yield "bfloat16 4096, no gradients", _inference(4096)
    for width in (1000, 4096, 7168):
        yield f"bfloat16 {width}, bank", _bank(width)
    yield "bfloat16 4096, bank, in place", _bank_in_place(4096)
    yield "bfloat16 4096, float32 bank", _bank(4096, bank=torch.float32)
    yield "float32 4096, bank", _bank(4096, torch.float32, torch.float32)
    for queries in (1, 3):
        yield f"bfloat16 4608, {queries} keys", _keys(4608, queries)
    yield "bfloat16 1000, 4 keys alone", _keys(1000, 4, prefix=False)
    for width, layers in LAYERS.items():
        for n_layers in layers:
            yield f"bfloat16 {width}, {n_layers} layers", _phase1(width, n_layers)


def sized_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """The same at sizes at which time counts: what `npu-offline tune` searches tiles for."""
    for width in (1024, 2048, 4096, 7168):
        for tokens in (1024, 4096):
            yield f"bfloat16 8 x {tokens} x {width}", _attn_res(width, torch.bfloat16, n_blocks=8, tokens=tokens)


def _attn_res(
    width: int,
    dtype: torch.dtype,
    *,
    listed: bool = False,
    normalised: bool = False,
    weights: bool = False,
    n_blocks: int = N_BLOCKS,
    tokens: int = TOKENS,
) -> Callable[[], None]:
    def call() -> None:
        blocks = torch.empty(n_blocks, tokens, width, dtype=dtype)
        query, key_weight, normal = (torch.empty(width, dtype=dtype, requires_grad=True) for _ in range(3))
        given = [block.requires_grad_() for block in blocks.unbind()] if listed else blocks.requires_grad_()
        output_rms_weight = normal if normalised else None
        results = attn_res(given, query, key_weight, output_rms_weight=output_rms_weight, return_weights=weights)
        _backward(results if isinstance(results, tuple) else (results,))

    return call


def _inference(width: int) -> Callable[[], None]:
    blocks = torch.empty(N_BLOCKS, TOKENS, width, dtype=torch.bfloat16)
    return lambda: attn_res(blocks, blocks[0, 0], blocks[0, 0])


def _bank(width: int, dtype: torch.dtype = torch.bfloat16, bank: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    def call() -> None:
        blocks = torch.empty(TOKENS, N_BLOCKS + 1, width, dtype=bank, requires_grad=True)
        prefix, x = (torch.empty(TOKENS, width, dtype=dtype, requires_grad=True) for _ in range(2))
        weights = [torch.empty(width, dtype=dtype, requires_grad=True) for _ in range(3)]
        found = attn_res_bank(blocks, N_BLOCKS, prefix, *weights, layer_output=x)
        _backward((found.output, found.normalized, found.prefix))

    return call


def _bank_in_place(width: int) -> Callable[[], None]:
    blocks = torch.empty(TOKENS, N_BLOCKS + 1, width, dtype=torch.bfloat16)
    prefix, x = torch.empty(2, TOKENS, width, dtype=torch.bfloat16).unbind()
    n_blocks = torch.zeros((), dtype=torch.int32)
    weights = [torch.empty(width, dtype=torch.bfloat16) for _ in range(3)]
    return lambda: attn_res_bank(blocks, n_blocks, prefix, *weights, layer_output=x, append=True, in_place=True)


def _phase1(width: int, n_layers: int) -> Callable[[], None]:
    def call() -> None:
        blocks = torch.empty(N_BLOCKS, TOKENS, width, dtype=torch.bfloat16, requires_grad=True)
        queries = torch.empty(n_layers, width, requires_grad=True)
        _backward(attn_res_phase1(queries, blocks, torch.empty(width, requires_grad=True)))

    return call


def _keys(width: int, queries: int, *, prefix: bool = True) -> Callable[[], None]:
    def call() -> None:
        blocks = torch.empty(TOKENS, N_BLOCKS, width, dtype=torch.bfloat16, requires_grad=True)
        partial = torch.empty(TOKENS, width, requires_grad=True) if prefix else None
        given = blocks, partial, torch.empty(queries, width, requires_grad=True)
        _backward((attn_res_keys(*given, scale=width**-0.5, output_dtype=torch.float32),))

    return call


def _merge(width: int, dtype: torch.dtype, *, normalised: bool = False) -> Callable[[], None]:
    def call() -> None:
        o = torch.empty(TOKENS, 2, width, requires_grad=True)
        lse = torch.empty(TOKENS, requires_grad=True)
        partial = torch.empty(TOKENS, width, dtype=dtype, requires_grad=True)
        weights = [torch.empty(width, dtype=dtype, requires_grad=True) for _ in range(3)]
        output_rms_weight = weights[2] if normalised else None
        results = attn_res_merge(
            o[:, 0], lse, partial, *weights[:2], layer_output=partial.detach(), output_rms_weight=output_rms_weight
        )
        _backward(results)

    return call


def _backward(outputs: tuple[torch.Tensor | None, ...]) -> None:
    given = [output for output in outputs if output is not None and output.requires_grad]
    torch.autograd.backward(given, [torch.empty_like(output) for output in given])
