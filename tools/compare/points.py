"""Times of kernels on Ascend chips that others have published, with what they publish of how they were measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from npu_offline.module.operations import Pipe
from npu_offline.timing.traffic import L2State


@dataclass(frozen=True)
class Source:
    """A project, the commit whose kernels were measured, and what of it is needed.

    Attributes:
        repository: owner and name.
        paths: files and folders that the kernels need.
        where: the times were published.
        chip: SoC that is predicted; `stated` is what the source says.
        clock: assumed, in Hz, where none is published of the chip.
        stack: software, as stated or "not stated".
        toolchain: compiler version that stands for it.
        l2: state of the L2 cache before a measured launch, by how the source measures.
    """

    repository: str
    paths: Sequence[str]
    where: str
    chip: str
    stated: str
    stack: str
    toolchain: str
    l2: L2State
    clock: float | None = None


@dataclass(frozen=True)
class Point:
    """One published time.

    Attributes:
        source: a key of `SOURCES`.
        kernel: name, also of the function of `launches` that launches it.
        commit: of the source.
        arguments: of that function.
        microseconds: published.
        pipes: published time of pipes.
    """

    source: str
    kernel: str
    commit: str
    arguments: dict[str, Any]
    microseconds: float
    pipes: dict[Pipe, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Source, kernel and arguments."""
        return f"{self.source} {self.kernel} {' '.join(f'{name}={value}' for name, value in self.arguments.items())}"


_TTX = "mojo_opset/backends/ttx/kernels"
_MOJO: dict[str, Any] = {
    "repository": "XPU-Forces/mojo_opset",
    "paths": (f"{_TTX}/npu", f"{_TTX}/utils.py", "mojo_opset/utils"),
    "l2": "warm",  # its profiler repeats a call ten times and counts the last five
}
_VTRITON: dict[str, Any] = {
    "repository": "shane-kshongmo/vTriton",
    "paths": ("test",),
    "chip": "Ascend910B3",
    "stated": "Ascend910B3",
    "stack": "CANN 9.0.0",
    "toolchain": "1.1.0",
}
_910B = {"chip": "Ascend910B3", "stated": "910B", "stack": "CANN 8.5.0, Triton 3.2 of FlagTree", "toolchain": "1.0.0"}
_910C = {**_910B, "chip": "Ascend910_9392", "stated": "910C", "stack": "Triton 3.2 of FlagTree", "clock": 1.8e9}
_UNSTATED = {"chip": "Ascend910B3", "stated": "not stated", "stack": "not stated", "toolchain": "1.0.0"}

SOURCES: dict[str, Source] = {
    "mojo 363": Source(where="XPU-Forces/mojo_opset#363", **_MOJO, **_910B),
    "mojo 364": Source(where="XPU-Forces/mojo_opset#364", **_MOJO, **_910C),
    "mojo 365": Source(where="XPU-Forces/mojo_opset#365", **_MOJO, **_910C),
    "mojo 366": Source(where="XPU-Forces/mojo_opset#366", **_MOJO, **_UNSTATED),
    # Its launches take an option that the compiler of CANN 8.5 lacks.
    "mojo 367": Source(where="XPU-Forces/mojo_opset#367", **_MOJO, **{**_UNSTATED, "toolchain": "1.1.0"}),
    "vTriton": Source(where="tests/perfbound/fixtures: medians of 11 launches", l2="cold", **_VTRITON),
    "vTriton seeded": Source(where=".omc/research/hw_runs/seeded_serial: medians of 48 launches", l2="warm", **_VTRITON),
    "vTriton copy": Source(where="tests/perfbound/fixtures, less 114 us of host", l2="warm", **_VTRITON),
    "FlagGems 2162": Source(
        repository="flagos-ai/FlagGems",
        paths=("src/flag_gems/runtime/backend/_ascend/ops/mean.py",),
        where="flagos-ai/FlagGems#2162",
        chip="Ascend910B3",
        stated="Ascend",
        stack="not stated",
        toolchain="1.0.0",
        l2="dirty",  # its benchmark clears the cache by writing
    ),
    "Liger 1210": Source(
        repository="linkedin/Liger-Kernel",
        paths=(),  # the wheel of 0.8.5
        where="linkedin/Liger-Kernel#1210",
        chip="Ascend910B4",
        stated="Ascend910B4",
        stack="not stated",
        toolchain="1.2.0",
        l2="dirty",  # triton.testing.do_bench clears the cache by writing
    ),
    "fla 1126": Source(
        repository="fla-org/flash-linear-attention",
        paths=("fla/modules/backends/triton_ascend/causal_conv1d.py",),
        where=".agents/skills/fla-ascend-performance/references/cases.md",
        chip="Ascend910B2",
        stated="Ascend910 of 48 vector cores",
        stack="not stated",
        toolchain="1.0.0",
        l2="cold",
    ),
    "asc-devkit": Source(
        repository="hicann/asc-devkit",
        paths=(),  # no code of it: its loads are counted in its README
        where="examples/01_simd_cpp_api/05_best_practices/04_memory_access/data_copy/README_en.md",
        chip="Ascend910B2",
        stated="Atlas A2/A3 of 48 vector cores",
        stack="CANN 9.0 or later",
        toolchain="1.1.0",
        l2="cold",
    ),
}

_NORM = ((1, 8, 128), (4, 32, 256), (8, 256, 2048), (8, 256, 4096), (1, 16, 4096), (4, 32, 2048))
_BEFORE_363, _AFTER_363 = (4.1424, 5.3104, 25.936, 38.6848, 6.6352, 5.944), (2.1648, 3.1248, 25.3568, 38.6608, 4.68, 5.4448)
_GELU = ((16, 16), (32, 64), (128, 128), (128, 256), (256, 256), (512, 256))
_BEFORE_364, _AFTER_364 = (2.560, 2.728, 3.324, 3.7602, 4.4282, 4.984), (1.512, 1.516, 2.036, 2.400, 3.304, 4.084)
_SILU = ((16, 16), (32, 64), (128, 128), (512, 256), (1024, 1024), (2048, 512))
_BEFORE_365, _AFTER_365 = (2.696, 2.536, 3.188, 3.500, 6.996, 6.784), (1.436, 1.280, 1.884, 2.656, 5.280, 5.288)
_LAYER = (
    *((8, 8192), (16, 4096), (32, 64), (32, 128), (32, 2048), (128, 128)),
    *((128, 2048), (256, 128), (256, 512), (256, 12800), (1024, 1024)),
)
_BEFORE_366 = (11.952, 8.2624, 4.088, 4.1568, 6.4656, 5.1024, 6.7168, 5.48, 6.376, 35.9152, 14.3488)
_AFTER_366 = (4.7712, 3.9824, 2.2608, 2.3184, 3.8, 2.7152, 5.9072, 3.2048, 4.7824, 24.5744, 10.5536)
_ADD = (((8, 8192), "pre"), ((8, 8192), "post"), ((16, 4096), "pre"), ((16, 4096), "post"), ((32, 128), "pre"))
_BEFORE_367, _AFTER_367 = (11.7296, 12.0592, 9.0768, 9.3024, 5.344), (5.7968, 5.2912, 4.2528, 3.9584, 4.2912)
_COPY = {32: 4430.5, 64: 2324.7, 128: 1253.7, 256: 715.5, 512: 442.8, 1024: 295.7, 2048: 226.6, 4096: 182.6, 8192: 174.3}
_HOST = 114.0  # of every launch of stream_copy: the same for all, as the source's smallest launches show
_MEAN = {
    (64, 64): 2.6,
    (4096, 4096): 108.0,
    (1024, 1): 11.7,
    (1024, 16): 6.76,
    (1024, 256): 7.5,
    (1024, 4096): 21.8,
    (1024, 65536): 375.0,
    (1024, 1048576): 3103.0,
}


def _mojo(source: str, kernel: str, commit: str, shapes: Sequence[Any], before: Sequence[float], after: Sequence[float]):
    for times, at in ((before, f"{commit}~1"), (after, commit)):
        for shape, time in zip(shapes, times, strict=True):
            yield Point(source, kernel, at, {"shape": shape}, time)


def _points() -> Iterator[Point]:
    yield from _mojo("mojo 363", "rms_norm", "1cc6b3b1", _NORM, _BEFORE_363, _AFTER_363)
    yield from _mojo("mojo 364", "gelu", "7a258044", _GELU, _BEFORE_364, _AFTER_364)
    yield from _mojo("mojo 365", "silu", "fa00ed3d", _SILU, _BEFORE_365, _AFTER_365)
    yield from _mojo("mojo 366", "layer_norm", "874f894e", _LAYER, _BEFORE_366, _AFTER_366)
    for times, at in ((_BEFORE_367, "084a2446~1"), (_AFTER_367, "084a2446")):
        for (shape, mode), time in zip(_ADD, times, strict=True):
            yield Point("mojo 367", "add_rms_norm", at, {"shape": shape, "mode": mode}, time)
    vtriton = "c54407b2623191df2f308113414c23ec79b0940f"
    rows = {"shape": (8192, 2048)}
    yield Point("vTriton", "vector_add", vtriton, {"n": 2**24}, 307.0, {"V": 11.6, "S": 151.7, "MTE2": 102.6, "MTE3": 47.0})
    yield Point("vTriton", "vector_add", vtriton, {"n": 2**25}, 605.3, {"V": 23.0, "S": 293.8, "MTE2": 205.2, "MTE3": 92.7})
    yield Point("vTriton", "softmax", vtriton, rows, 307.0, {"V": 80.1, "S": 147.4, "MTE2": 72.5, "MTE3": 34.4})
    yield Point("vTriton", "rmsnorm", vtriton, rows, 603.6, {"V": 53.0, "S": 392.6, "MTE2": 125.2, "MTE3": 58.3})
    yield Point("vTriton", "layernorm", vtriton, rows, 612.3, {"V": 111.3, "S": 294.1, "MTE2": 217.1, "MTE3": 65.7})
    for n, barrier, time, scalar, vector, load, store in (
        (2**23, 1, 3289.4, 662.9, 2992.7, 14.8, 16.3),
        (2**23, 0, 3268.1, 661.3, 2992.5, 14.6, 18.7),
        (2**22, 1, 1660.3, 333.9, 1508.6, 8.0, 8.2),
        (2**22, 0, 1650.0, 333.3, 1508.9, 7.9, 9.9),
    ):
        pipes: dict[Pipe, float] = {"V": vector, "S": scalar, "MTE2": load, "MTE3": store}
        yield Point("vTriton seeded", "seeded_serial", vtriton, {"n": n, "barrier": barrier}, time, pipes)
    for tile, time in _COPY.items():
        yield Point("vTriton copy", "stream_copy", vtriton, {"programs": 48, "block": 524288, "tile": tile}, time - _HOST)
    for tile, time in {512: 1075.8, 2048: 543.3, 8192: 475.6, 16384: 462.7}.items():
        yield Point("vTriton copy", "stream_copy", vtriton, {"programs": 48, "block": 1048576, "tile": tile}, time - _HOST)
    for tile, time in {512: 272.6, 2048: 163.8, 8192: 150.8, 16384: 144.8}.items():
        yield Point("vTriton copy", "stream_copy", vtriton, {"programs": 48, "block": 262144, "tile": tile}, time - _HOST)
    for shape, time in _MEAN.items():
        yield Point("FlagGems 2162", "mean_dim", "d89d74da", {"shape": shape}, time)
    for n, time in {2**20: 41.7, 2**30: 8310.0}.items():
        yield Point("FlagGems 2162", "mean", "d89d74da", {"n": n}, time)
    for tokens, time in {1024: 913.0, 2048: 1760.0, 4096: 3520.0, 8192: 6970.0}.items():
        yield Point("Liger 1210", "attn_res_forward", "0.8.5", {"tokens": tokens}, time)
    convolution = {"shape": (1, 8192, 4096), "taps": 4}
    yield Point("fla 1126", "causal_conv1d", "d48f4830", convolution, 350.0, {"V": 0.64 * 350})
    for rows, columns, repeats, slices, time, load in (
        (1, 64, 1, 1, 564.84, 548.161),
        (64, 64, 1, 1, 233.54, 220.772),
        (64, 1024, 1, 1, 215.82, 202.657),
        (64, 1024, 4, 1, 828.06, 0.0),
        (64, 1024, 4, 4, 365.74, 0.0),
    ):
        arguments = {"rows": rows, "columns": columns, "repeats": repeats, "slices": slices}
        yield Point("asc-devkit", "data_copy", "README", arguments, time, {"MTE2": load} if load else {})


POINTS: tuple[Point, ...] = tuple(_points())
