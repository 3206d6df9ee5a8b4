"""Runs a whole Python program as if an NPU were there: its tensors lie on the CPU, and its kernels are emulated."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import runpy
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import npu_tiling
import torch
from torch.overrides import TorchFunctionMode

from ..errors import OfflineError, UnsupportedError
from ..execute.emulation import emulate
from ..launches import Emulation
from .absent import imported, later_names, torch_npu_stand_in
from .execution import MADE_EMPTY

_DEVICES = ("cuda", "npu")
_UB_BITS = "ASCEND_UB_CAPACITY_BITS"  # libraries look for the size of the Unified Buffer there
_METHODS = ("cuda", "npu")  # of tensors: they lie here
_DEVICE, _IS_CPU = torch.Tensor.device.__get__, torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_NPU = re.compile(r"(?<![a-z])npu", re.IGNORECASE)  # no "input"
_LIBRARIES = tuple(str(Path(str(package.__file__)).parent) for package in (torch, npu_tiling))


class _OnCpu(TorchFunctionMode):
    """Tensors of devices that the program names lie on the CPU, and every tensor says that it lies on the NPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _METHODS:
            return args[0]
        if name == "__get__" and func == _DEVICE:
            device = func(*args)
            return torch.device("npu", 0) if device.type == "cpu" else device
        if name == "__get__" and func == _IS_CPU:
            return False
        if name == "__get__" and func == _IS_CUDA:
            return _knows_cuda_alone(sys._getframe(1).f_code.co_filename)
        if name == "histc" and not args[0].is_floating_point():  # of integers on an NPU alone
            return func(args[0].double(), *args[1:], **(kwargs or {})).to(args[0].dtype)
        made = func(*map(_on_cpu, args), **{key: _on_cpu(value) for key, value in (kwargs or {}).items()})
        if name in MADE_EMPTY and made.device.type == "cpu":
            _unwritten(made)
        return made


def _unwritten(tensor: torch.Tensor) -> None:
    """Fill a tensor that nobody has written so that it shows: NaN, the largest integer, true."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(torch.nan)
        else:
            tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type in (*_DEVICES, "privateuseone") else value
    if isinstance(value, str) and value.partition(":")[0] in _DEVICES:
        return "cpu"
    return value


@functools.cache
def _knows_cuda_alone(file: str) -> bool:
    """Whether a file that asks for CUDA names no NPU: a program for CUDA is told yes, a library that would choose, no."""
    if file.startswith(_LIBRARIES) or "triton" in Path(file).parts:
        return False
    return not _NPU.search("".join(linecache.getlines(file)))


@contextlib.contextmanager
def npu_on_cpu(soc: str, *, toolchain: str | None = None) -> Iterator[Emulation]:
    """Until the block ends, programs find an NPU: torch.npu, a module torch_npu, and Triton's target "npu".

    Args:
        soc: the chip.
        toolchain: a compiler, whose final modules run with all checks; None for Linalg IR, with races between programs.

    Yields:
        The launches, with findings in their notes.
    """
    from ..execute.backend import seen_as

    options: dict[str, Any] = {"toolchain": toolchain, "checks": True} if toolchain else {"races": True, "meaning": "beside"}
    with (
        _modules(soc),
        seen_as("npu"),
        emulate(soc, keep_going=True, **options) as emulation,
        _OnCpu(),
    ):
        yield emulation


@contextlib.contextmanager
def _modules(soc: str) -> Iterator[None]:
    with contextlib.suppress(RuntimeError):  # it has that name, where this ran before
        torch.utils.rename_privateuse1_backend("npu")
    npu = _npu(soc)
    torch_npu = torch_npu_stand_in()
    torch_npu.npu = npu  # type: ignore[attr-defined]
    with (
        mock.patch.dict(os.environ, {_UB_BITS: str(8 * npu_tiling.soc(soc).ub_bytes)}),
        mock.patch.object(torch, "npu", npu, create=True),
        mock.patch.object(torch, "compile", _not_compiled),
        imported({"torch.npu": npu, "torch_npu": torch_npu, **later_names()}),
        _cuda_is(npu),
        _autocast_on_cpu(),
        mock.patch.object(torch.nn.Module, "npu", lambda module, device=None: module, create=True),
        mock.patch.object(torch.nn.Module, "cuda", lambda module, device=None: module),
        mock.patch.object(torch.Tensor, "is_npu", True, create=True),
        mock.patch.object(torch.Tensor, "get_device", lambda tensor: 0),
        mock.patch.object(torch.Tensor, "npu", lambda tensor, *_, **__: tensor, create=True),
    ):
        yield


def _not_compiled(model: Any = None, **options: Any) -> Any:
    """In place of torch.compile, which would compile for the CPU: what it is given runs as it is."""
    return model if model is not None else lambda function: function


@contextlib.contextmanager
def _autocast_on_cpu() -> Iterator[None]:
    """Until the block ends, autocast for an NPU is autocast for the CPU, where the tensors lie."""
    autocast = torch.amp.autocast
    init, enabled, get_dtype = autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def on_cpu(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        dtype = dtype or (torch.float16 if device_type in _DEVICES else None)  # their default; a CPU's is bf16
        init(self, _on_cpu(device_type), dtype, enabled, cache_enabled)

    with (
        mock.patch.object(autocast, "__init__", on_cpu),
        mock.patch.object(torch, "is_autocast_enabled", lambda *device: enabled(*map(_on_cpu, device))),
        mock.patch.object(torch, "get_autocast_dtype", lambda device: get_dtype(_on_cpu(device))),
    ):
        yield


@contextlib.contextmanager
def _cuda_is(npu: types.ModuleType) -> Iterator[None]:
    """Until the block ends, programs for CUDA find the NPU: torch.cuda has the functions of torch.npu."""

    generator = torch.Generator

    class Kind(type(generator)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, generator)

    class Generator(generator, metaclass=Kind):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            return generator(device=_on_cpu(device))

    def missing() -> None:
        name = sys._getframe(1).f_code.co_name
        raise UnsupportedError(f"torch.cuda.{name} is not emulated: no NPU has it, or a program for one has no need of it")

    def is_available() -> bool:
        return _knows_cuda_alone(sys._getframe(1).f_code.co_filename)

    def device_count() -> int:
        return int(_knows_cuda_alone(sys._getframe(1).f_code.co_filename))

    forwarded = {name: value for name, value in vars(npu).items() if not name.startswith("_")}
    forwarded |= {"is_available": is_available, "device_count": device_count, "_lazy_init": missing}
    with contextlib.ExitStack() as stack:
        for name in ("range_push", "range_pop", "mark"):
            stack.enter_context(mock.patch.object(torch.cuda.nvtx, name, lambda *_: 0))
        stack.enter_context(mock.patch.object(torch.cuda, "_DeviceGuard", npu.device))  # what FlagGems generates
        for name, value in forwarded.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value, create=True))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True))
        yield


class _Stream:
    """A stream that does everything at once."""

    npu_stream = cuda_stream = stream_id = 0

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("npu", 0)

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: object) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Event:
    """An event: the times between two are of this host."""

    def __init__(self, *_: object, **__: object) -> None:
        self._seconds = 0.0

    def record(self, stream: object = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1000 * (end._seconds - self._seconds)

    def synchronize(self) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True


def _npu(soc: str) -> types.ModuleType:
    """What programs ask torch.npu for: one device, and streams that do everything at once."""
    chip = npu_tiling.soc(soc)
    npu = types.ModuleType("torch.npu")
    memory = 64 * 2**30
    properties = types.SimpleNamespace(
        name=soc,
        cube_core_num=chip.cube_cores,
        vector_core_num=chip.vector_cores,
        multi_processor_count=chip.vector_cores,
        total_memory=memory,
        major=8,
        minor=0,
    )

    def seeded(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    for name in ("synchronize", "set_device", "set_stream", "empty_cache", "init", "reset_peak_memory_stats"):
        setattr(npu, name, lambda *_, **__: None)  # a function for each: torch.compile knows them by identity
    answers: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: soc,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "mem_get_info": lambda *_: (memory, memory),
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "_is_in_bad_fork": lambda: False,
        "manual_seed": seeded,
        "manual_seed_all": seeded,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "device": lambda *_: contextlib.nullcontext(),
        "device_of": lambda *_: contextlib.nullcontext(),
        "stream": lambda *_: contextlib.nullcontext(),
        "current_stream": _Stream,
        "default_stream": _Stream,
        "Stream": _Stream,
        "Event": _Event,
    }
    for name, answer in answers.items():
        setattr(npu, name, answer)
    return npu


def program_of(words: Sequence[str]) -> Callable[[], object]:
    """A function that runs a Python program in this process, as its command line does.

    Args:
        words: `python FILE ...`, `python -m MODULE ...`, or a console script of this environment.

    Raises:
        OfflineError: it is no Python program.
    """
    first, *rest = words
    if not Path(first).name.startswith("python"):
        found = shutil.which(first) or first
        if not Path(found).is_file() or b"python" not in Path(found).read_bytes()[:200]:
            raise OfflineError(f"{first} is no Python program; write: npu-offline run -- python FILE ...")
        rest = [found, *rest]
    is_module = rest[:1] == ["-m"]
    arguments = rest[1:] if is_module else rest
    if not arguments or arguments[0].startswith("-"):
        raise OfflineError("write: npu-offline run -- python FILE ..., or python -m MODULE ...")
    if not is_module and not Path(arguments[0]).is_file():
        raise OfflineError(f"{arguments[0]} does not exist")
    folder = "" if is_module else str(Path(arguments[0]).resolve().parent)

    def run() -> None:
        with mock.patch.object(sys, "argv", arguments), mock.patch.object(sys, "path", [folder, *sys.path]):
            if is_module:
                runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(arguments[0], run_name="__main__")

    return run
