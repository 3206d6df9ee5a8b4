"""Triton's driver where there is no device and nothing is emulated: kernels can be decorated, and not launched."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ..errors import OfflineError

_DRIVER = "triton.runtime.driver"


def first_configuration() -> Callable[..., Any]:
    """A benchmarker for autotuning, which measures nothing: the first configuration is the fastest."""
    order = itertools.count()
    return lambda kernel_call, quantiles: [float(next(order))] * len(quantiles)


def no_benchmark() -> Callable[..., Any]:
    """In place of `triton.testing.do_bench`, which kernels with `@triton.autotune(warmup=...)` call: measures nothing."""
    measured = first_configuration()

    def do_bench(function: Callable[[], object], *_: object, quantiles: Sequence[float] | None = None, **__: object) -> Any:
        times = measured(function, quantiles or [0.5])
        return times if quantiles else times[0]

    return do_bench


class _IdleDriver:
    """What `@triton.autotune` asks for a benchmarker where it decorates."""

    def get_benchmarker(self) -> Callable[..., Any]:
        return first_configuration()

    def __getattr__(self, name: str) -> Any:
        raise OfflineError("0 active drivers: launch kernels inside `with npu_offline.emulate():`")


class _Loader(importlib.abc.Loader):
    """Loads Triton's module of drivers, and lets it have the idle one where it has none."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _allow_none(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds that module alone, by the other finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _DRIVER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _allow_none(module: ModuleType) -> None:
    proxy: Any = getattr(getattr(module, "driver", None), "default", None)
    if proxy is None or not hasattr(proxy, "_init_fn"):
        return
    create = proxy._init_fn

    def created() -> Any:
        try:
            return create()
        except RuntimeError as error:
            if not str(error).startswith("0 active drivers"):
                raise
            return _IdleDriver()

    proxy._init_fn = created


def warn_once() -> None:
    """Let triton-ascend's JIT say once, not at every compilation, that a chip ignores num_warps and its like."""
    from triton.runtime import jit

    if "print" in vars(jit):
        return
    said = set[str]()

    def say(text: str) -> None:
        kind, tune, _ = text.partition("DO NOT tune")
        if not tune or kind not in said:
            print(text, file=sys.stderr if tune else sys.stdout)
        said.add(kind)

    vars(jit)["print"] = say


def decorate_without_devices() -> None:
    """Let files with autotuned kernels be imported where there is no device. Imports nothing."""
    if _DRIVER in sys.modules:
        _allow_none(sys.modules[_DRIVER])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
