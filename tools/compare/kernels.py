"""What is launched for a published time: other projects' kernels, by their own code or as their benchmarks do."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import npu_tiling
import torch
import triton
import triton.language as tl
from npu_offline import LaunchRecord, record

from . import cases, fetch, peers
from .points import SOURCES, Point
from .published import Published

_TTX = "mojo_opset.backends.ttx.kernels"
_MOJO = ("mojo_opset", "mojo_opset.backends", "mojo_opset.backends.ttx", "mojo_opset.utils", _TTX, f"{_TTX}.npu")
_MEAN_ROWS, _MEAN_COLUMNS = (1, 4, 8, 32, 64), 1024  # "mean" of tune_configs.yaml beside the kernel
_BF16 = torch.bfloat16

Launches = list[LaunchRecord]


def variants(point: Point) -> Iterator[Launches]:
    """The launches of a point, in every configuration of an autotuned kernel."""
    yield from _BY_KERNEL[point.kernel](point, **point.arguments)


def _recorded(point: Point, call: Callable[[], Any]) -> Launches:
    with record(SOURCES[point.source].chip) as launches:
        call()
    return list(launches)


@contextlib.contextmanager
def _mojo(point: Point, name: str) -> Iterator[Any]:
    source = SOURCES[point.source]
    with fetch.module(fetch.folder(source, point.commit), f"{_TTX}.npu.{name}", _MOJO, source.chip) as found:
        yield found


def _tuned(module: Any) -> Iterator[None]:
    """Each configuration of the module's autotuned kernels in turn; all of them have the same ones, or fewer."""
    tuners = [value for value in vars(module).values() if hasattr(value, "configs") and hasattr(value, "fn")]
    every = {str(config): config for tuner in tuners for config in tuner.configs}
    for text, config in every.items():
        with contextlib.ExitStack() as stack:
            for tuner in tuners:
                if any(str(other) == text for other in tuner.configs):
                    stack.enter_context(mock.patch.object(tuner, "configs", [config]))
            yield


def _rms_norm(point: Point, shape: Sequence[int]) -> Iterator[Launches]:
    with _mojo(point, "rmsnorm") as module:
        yield _recorded(point, lambda: module.rmsnorm_infer_impl(torch.empty(shape), torch.empty(shape[-1]), 1e-6))


def _activation(point: Point, shape: Sequence[int]) -> Iterator[Launches]:
    with _mojo(point, point.kernel) as module:
        for _ in _tuned(module):
            yield _recorded(point, lambda: getattr(module, f"{point.kernel}_fwd_impl")(torch.empty(shape)))


def _layer_norm(point: Point, shape: Sequence[int]) -> Iterator[Launches]:
    x, weight, bias = torch.empty(shape), torch.empty(shape[-1]), torch.empty(shape[-1])
    with _mojo(point, "layernorm") as module:
        yield _recorded(point, lambda: module.layernorm_infer_impl(x, weight, bias, 1e-5))


def _add_rms_norm(point: Point, shape: Sequence[int], mode: str) -> Iterator[Launches]:
    x, residual, weight = torch.empty(shape), torch.empty(shape), torch.empty(shape[-1])
    with _mojo(point, "fused_add_rmsnorm") as module:
        yield _recorded(point, lambda: module.fused_add_rmsnorm_infer_impl(x, residual, weight, mode))


def _vtriton(point: Point, name: str) -> Any:
    return fetch.file(fetch.folder(SOURCES[point.source], point.commit) / "test" / f"{name}_bench.py")


def _vector_add(point: Point, n: int) -> Iterator[Launches]:
    x, y, module = torch.empty(n), torch.empty(n), _vtriton(point, "vector_add")
    block = module.BLOCK
    yield _recorded(point, lambda: module.add_kernel[(triton.cdiv(n, block),)](x, y, torch.empty_like(x), n, BLOCK=block))


def _softmax(point: Point, shape: Sequence[int]) -> Iterator[Launches]:
    x, module, n = torch.empty(shape), _vtriton(point, "softmax"), shape[1]
    yield _recorded(point, lambda: module.softmax_kernel[(shape[0],)](torch.empty_like(x), x, n, n, n, BLOCK=n))


def _row_norm(point: Point, shape: Sequence[int]) -> Iterator[Launches]:
    module, x, n = _vtriton(point, point.kernel), torch.empty(shape), shape[1]
    weights = [torch.empty(n) for _ in range(2 if point.kernel == "layernorm" else 1)]
    kernel = getattr(module, f"{point.kernel}_kernel")
    yield _recorded(point, lambda: kernel[(shape[0],)](x, torch.empty_like(x), *weights, n, n, module.EPS, BLOCK=n))


def _seeded_serial(point: Point, n: int, barrier: int) -> Iterator[Launches]:
    module = _vtriton(point, "seeded_serial")
    a, b, block = torch.empty(n), torch.empty(module.N_B), module.BLOCK_A
    given = (a, torch.empty_like(a), b, torch.empty_like(b), n, module.N_B)
    numbers = {"NITER": module.NITER, "FMA_MUL": module._FMA_MUL, "FMA_ADD": module._FMA_ADD}
    sizes = {"SEED_BARRIER": barrier, "BLOCK_A": block, "BLOCK_B": module.BLOCK_B}
    yield _recorded(point, lambda: module.seeded_serial_kernel[(n // block,)](*given, **sizes, **numbers))


def _stream_copy(point: Point, programs: int, block: int, tile: int) -> Iterator[Launches]:
    module, x = _vtriton(point, "stream_copy"), torch.empty(programs * block)
    yield _recorded(point, lambda: module.stream_copy[(programs,)](x, torch.empty_like(x), BLOCK=block, TILE=tile))


@contextlib.contextmanager
def _flag_gems(point: Point) -> Iterator[Any]:
    source = SOURCES[point.source]
    configs = [triton.Config({"BLOCK_M": rows, "BLOCK_N": _MEAN_COLUMNS}) for rows in _MEAN_ROWS]
    names = ("flag_gems", "flag_gems.runtime", "flag_gems.utils", "flag_gems.utils.triton_lang_extension")
    made = {name: types.ModuleType(name) for name in names}
    package, runtime, utils, language = made.values()
    vars(package)["runtime"] = runtime
    vars(runtime).update(
        get_tuned_config=lambda _: configs, torch_device_fn=types.SimpleNamespace(device=lambda _: contextlib.nullcontext())
    )
    vars(utils).update(dim_compress=lambda x, _: x, libentry=lambda: lambda kernel: kernel, triton_lang_extension=language)
    vars(language).update(program_id=tl.program_id, num_programs=tl.num_programs)
    with mock.patch.dict("sys.modules", made), record(source.chip):
        yield fetch.file(fetch.folder(source, point.commit) / source.paths[0])


def _mean_dim(point: Point, shape: Sequence[int]) -> Iterator[Launches]:
    with _flag_gems(point) as module:
        for _ in _tuned(module):
            yield _recorded(point, lambda: module.mean_dim(torch.empty(shape), [1]))


def _mean(point: Point, n: int) -> Iterator[Launches]:
    with _flag_gems(point) as module:
        yield _recorded(point, lambda: module.mean(torch.empty(n)))


def _causal_conv1d(point: Point, shape: Sequence[int], taps: int) -> Iterator[Launches]:
    """With a bias and SiLU, as measured; the tensor that the backward reads is stored too."""
    source = SOURCES[point.source]
    cores = npu_tiling.soc(source.chip).vector_cores
    made = {name: types.ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.utils", "fla.utils", "einops")}
    vars(made["fla.ops.utils"])["prepare_chunk_indices"] = None
    vars(made["fla.utils"]).update(
        get_multiprocessor_count=lambda *_: cores, input_guard=lambda **_: lambda function: function
    )
    vars(made["einops"])["rearrange"] = None
    x, weight = torch.empty(shape, dtype=_BF16), torch.empty(shape[-1], taps, dtype=_BF16)
    with mock.patch.dict("sys.modules", made), record(source.chip):
        module = fetch.file(fetch.folder(source, point.commit) / source.paths[0])
    yield _recorded(
        point, lambda: module.causal_conv1d_fwd_npu(x, weight, torch.empty(shape[-1], dtype=_BF16), None, activation="silu")
    )


def _attn_res_forward(point: Point, tokens: int) -> Iterator[Launches]:
    peers.module("attn_res")  # refuses by name where the wheel is missing
    yield cases.theirs(Published("attn_res", "forward", tokens, 0.0, 0.0, 0.0))


_BY_KERNEL: dict[str, Callable[..., Iterator[Launches]]] = {
    "rms_norm": _rms_norm,
    "gelu": _activation,
    "silu": _activation,
    "layer_norm": _layer_norm,
    "add_rms_norm": _add_rms_norm,
    "vector_add": _vector_add,
    "softmax": _softmax,
    "rmsnorm": _row_norm,
    "layernorm": _row_norm,
    "seeded_serial": _seeded_serial,
    "stream_copy": _stream_copy,
    "mean_dim": _mean_dim,
    "mean": _mean,
    "attn_res_forward": _attn_res_forward,
    "causal_conv1d": _causal_conv1d,
}
