"""Every operator at row widths from 1 to 70,000 on a CUDA device: `python -m tools.cuda_widths [--seconds 540] [--jobs 16]`.

A kernel is compiled for each width, so all widths would take days. First come those at which a tiling changes: the powers
of two and their neighbours, and the edges of the tables; then hidden sizes and vocabularies of models; then primes,
multiples of 16 and others from a seed, until the time is up. At each, every operator runs forward and backward in fp32,
fp16 and bf16, and is compared with PyTorch's operators in fp32. Processes share the device and compile beside one another.

Ends with 1 where something failed. The last line is JSON: what ran, for a README.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from queue import Empty
from typing import Any

import torch
from torch import Tensor

WIDEST = 70_000
EDGES = (
    1,
    2,
    3,
    4,
    5,
    7,
    96,
    160,
    384,
    896,
    3072,
    6144,
    9216,
    10240,
    11264,
    12288,
    13312,
    14336,
    20480,
    24576,
    40960,
    49152,
)
MODELS = (1000, 1152, 1536, 2560, 2880, 3584, 5120, 7168, 18432, 30522, 32000, 32064, 50257, 50304, 51200, 57344, 65024)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS = 3
DEVICE = os.environ.get("CUDA_WIDTHS_DEVICE", "cuda")  # "cpu" to try the program
Found = list[tuple[Tensor, Tensor]]


def widths(seed: int) -> Iterator[int]:
    """Each width once, the telling ones first."""
    near = [(1 << i) + step for i in range(WIDEST.bit_length()) for step in (0, 1, -1)]
    others = list(range(1, WIDEST + 1))
    random.Random(seed).shuffle(others)
    primes = [n for n in others if n > 1 and all(n % i for i in range(2, int(n**0.5) + 1))]
    multiples = [n for n in others if n % 16 == 0]
    turns = chain.from_iterable(zip(primes, multiples, others, strict=False))
    seen: set[int] = set()
    for width in (*near, *EDGES, *MODELS, WIDEST, *turns):
        if 1 <= width <= WIDEST and width not in seen:
            seen.add(width)
            yield width


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def _both(own: Callable[..., Any], plain: Callable[..., Any], leaves: Sequence[Tensor]) -> Found:
    """Results and gradients of an operator and of the same in fp32 by PyTorch, in pairs."""
    found = []
    for function, inputs in ((own, leaves), (plain, [leaf.detach().float() for leaf in leaves])):
        inputs = [_leaf(tensor) for tensor in inputs]
        results = function(*inputs)
        results = list(results) if isinstance(results, tuple) else [results]
        generator = torch.Generator(DEVICE).manual_seed(1)
        seeds = [torch.randn(r.shape, device=DEVICE, generator=generator).to(r.dtype) for r in results]
        found.append([*results, *torch.autograd.grad(results, inputs, seeds)])
    return list(zip(*found, strict=True))


def _normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.float()


def rms_norm(width: int, dtype: torch.dtype) -> Found:
    from npu_rms_norm import rms_norm

    leaves = (_normal(ROWS, width, dtype=dtype), _normal(width, dtype=dtype))
    return _both(lambda x, w: rms_norm(x, w, casting_mode="gemma"), _rms, leaves)


def add_rms_norm(width: int, dtype: torch.dtype) -> Found:
    from npu_rms_norm import add_rms_norm

    leaves = (_normal(ROWS, width, dtype=dtype), _normal(ROWS, width, dtype=torch.float32), _normal(width, dtype=dtype))
    own = lambda x, residual, w: add_rms_norm(x, residual, w, casting_mode="gemma")  # noqa: E731
    return _both(own, lambda x, residual, w: (_rms(x + residual, w), x + residual), leaves)


def embedding(width: int, dtype: torch.dtype) -> Found:
    from npu_embedding import embedding

    indices = torch.randint(0, 5, (7,), device=DEVICE)
    leaves = (_normal(5, width, dtype=dtype),)
    return _both(lambda w: embedding(indices, w), lambda w: torch.nn.functional.embedding(indices, w), leaves)


def _attention(query: Tensor, norm: Tensor, *blocks: Tensor) -> Tensor:
    scores = torch.stack([_rms(block, norm) @ query for block in blocks])
    return (torch.softmax(scores, 0).unsqueeze(-1) * torch.stack(blocks)).sum(0)


def _attn_leaves(width: int, dtype: torch.dtype, blocks: int) -> list[Tensor]:
    rows = [_normal(ROWS, width, dtype=dtype) for _ in range(blocks)]
    return [_normal(width, dtype=dtype, scale=width**-0.5), _normal(width, dtype=dtype), *rows]


def attn_res_list(width: int, dtype: torch.dtype) -> Found:
    from npu_attn_res import attn_res

    return _both(lambda q, n, *v: attn_res(list(v), q, n), _attention, _attn_leaves(width, dtype, 9))


def attn_res_stacked(width: int, dtype: torch.dtype) -> Found:
    from npu_attn_res import attn_res

    def plain(query: Tensor, norm: Tensor, weight: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        h = _attention(query, norm, *blocks)
        return h, _rms(h, weight)

    query, norm, *blocks = _attn_leaves(width, dtype, 2)
    leaves = (query, norm, torch.ones_like(norm), torch.stack(blocks))
    return _both(lambda q, n, w, v: attn_res(v, q, n, norm_weight=w), plain, leaves)


def attn_res_phases(width: int, dtype: torch.dtype) -> Found:
    from npu_attn_res import attn_res_merge, attn_res_phase1

    def phases(query: Tensor, norm: Tensor, *blocks: Tensor) -> Any:
        queries = torch.stack([query, query, query])
        o, maximum, total = attn_res_phase1(queries, list(blocks[:-1]), norm)
        return attn_res_merge(o[1], maximum[1], total[1], blocks[-1], query, norm)

    return _both(phases, _attention, _attn_leaves(width, dtype, 3))


def cross_entropy(width: int, dtype: torch.dtype) -> Found:
    """The width is the vocabulary's: of a row of logits."""
    from npu_fused_linear_cross_entropy import fused_linear_cross_entropy

    target = torch.randint(0, width, (ROWS,), device=DEVICE)
    leaves = (_normal(ROWS, 16, dtype=dtype), _normal(width, 16, dtype=dtype, scale=0.25))
    return _both(
        lambda x, w: fused_linear_cross_entropy(x, w, target, reduction="sum"),
        lambda x, w: torch.nn.functional.cross_entropy(x @ w.t(), target, reduction="sum"),
        leaves,
    )


def log_probs(width: int, dtype: torch.dtype) -> Found:
    from npu_fused_linear_cross_entropy import linear_log_probs

    target = torch.randint(0, width, (ROWS,), device=DEVICE)
    leaves = (_normal(ROWS, 16, dtype=dtype), _normal(width, 16, dtype=dtype, scale=0.25))
    return _both(
        lambda x, w: linear_log_probs(x, w, target),
        lambda x, w: torch.log_softmax(x @ w.t(), 1).gather(1, target.unsqueeze(1)).squeeze(1),
        leaves,
    )


OPERATORS: dict[str, Callable[[int, torch.dtype], Found]] = {
    call.__name__: call
    for call in (
        rms_norm, add_rms_norm, embedding, attn_res_list, attn_res_stacked, attn_res_phases, cross_entropy, log_probs
    )
}  # fmt: skip


def wrong(found: Found, dtype: torch.dtype) -> str | None:
    """What is off by more than some roundings of the dtype, of the largest element; None where nothing is."""
    for i, (own, plain) in enumerate(found):
        own = own.float()
        if not torch.isfinite(own).all():
            return f"result {i} is not finite"
        error = (own - plain.float()).abs().max().item() if own.numel() else 0.0
        limit = 40 * max(torch.finfo(dtype).eps, 1e-6) * max(plain.abs().max().item() if own.numel() else 0.0, 1.0)
        if error > limit:
            return f"result {i} is off by {error:.3g}, {limit:.3g} is allowed"
    return None


def _work(tasks: Any, results: Any, end: float) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    while time.time() < end:
        try:
            name, width, dtype = tasks.get_nowait()
        except Empty:
            break
        torch.manual_seed(width)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                said = wrong(OPERATORS[name](width, dtype), dtype)
            except Exception:
                said = traceback.format_exc(limit=-2).strip()
        fell = [str(w.message) for w in warned if "using" in str(w.message) and "instead" in str(w.message)]
        results.put((name, width, str(dtype).removeprefix("torch."), said, fell[:1]))
    results.put(None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="cuda_widths", description="Every operator at widths from 1 to 70,000, on CUDA.")
    parser.add_argument("--seconds", type=float, default=540.0, help="no call begins later (%(default)s)")
    parser.add_argument("--jobs", type=int, default=16, help="processes at a time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the widths past the telling ones (%(default)s)")
    parser.add_argument("--most", type=int, default=WIDEST, help="widths at most (%(default)s)")
    parser.add_argument("--operators", nargs="+", choices=tuple(OPERATORS), default=tuple(OPERATORS))
    options = parser.parse_args()
    start = time.time()
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    chosen = list(widths(options.seed))[: options.most]
    for width in chosen:
        for name in options.operators:
            for dtype in DTYPES:
                tasks.put((name, width, dtype))
    end = start + options.seconds
    workers = [context.Process(target=_work, args=(tasks, results, end), daemon=True) for _ in range(options.jobs)]
    for worker in workers:
        worker.start()
    ran, failures, fallbacks, reached = Counter[str](), [], [], set()
    left = len(workers)
    while left:
        try:
            found = results.get(timeout=30)
        except Empty:
            if all(not worker.is_alive() for worker in workers):
                failures.append(f"{left} processes ended before their work")
                break
            continue
        if found is None:
            left -= 1
            continue
        name, width, dtype, said, fell = found
        ran[f"{name} {dtype}"] += 1
        reached.add(width)
        if said is not None:
            failures.append(f"{name} {dtype} {width}: {said}")
            print("FAILED", failures[-1], flush=True)
        if fell:
            fallbacks.append(f"{name} {dtype} {width}: {fell[0]}")
            print("fell back", fallbacks[-1], flush=True)
    tasks.cancel_join_thread()
    triton = importlib.metadata.version("triton") if DEVICE == "cuda" else None
    record = {
        "calls": sum(ran.values()), "widths": len(reached), "widest": max(reached, default=0), "seed": options.seed,
        "failures": len(failures), "fallbacks": len(fallbacks), "seconds": round(time.time() - start),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE, "torch": torch.__version__, "triton": triton,
        "each": dict(sorted(ran.items())),
    }  # fmt: skip
    print(json.dumps(record))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
