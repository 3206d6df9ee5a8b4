"""Finds and loads benchmark scripts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from .declaration import Benchmark
from .errors import BenchError


def find(target: str, start: Path) -> Path:
    """The script of `target`: a path, or a name for `packages/<name>/benchmarks/<name>.py` in `start` or above it.

    Raises:
        BenchError: there is none.
    """
    if target.endswith(".py"):
        path = Path(target)
        if not path.is_file():
            raise BenchError(f"benchmark is {target!r} and there is no such file.")
        return path
    inside = Path("packages", target, "benchmarks", f"{target}.py")
    for folder in _upwards(start):
        if (folder / inside).is_file():
            return folder / inside
        if (folder / "packages").is_dir():
            known = sorted(script.stem for script in (folder / "packages").glob("*/benchmarks/*.py"))
            names = ", ".join(known) or "none: there are none"
            raise BenchError(f"benchmark is {target!r} and must be one of {names}.")
    raise BenchError(f"benchmark is {target!r}, and no folder above {start} has packages: give the script's path.")


def names(start: Path) -> list[str]:
    """All that `find` takes as a name in `start` or above it.

    Raises:
        BenchError: there are none.
    """
    for folder in _upwards(start):
        if found := sorted((folder / "packages").glob("*/benchmarks/*.py")):
            return [script.stem for script in found]
    raise BenchError(f"no folder above {start} has packages with benchmarks: give the scripts' paths.")


def load(path: Path) -> Benchmark:
    """The `BENCHMARK` of a script, which may import from its own folder, as a script that Python runs.

    Raises:
        BenchError: it has none.
    """
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"npu_bench_script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look their types up
    spec.loader.exec_module(module)
    benchmark = getattr(module, "BENCHMARK", None)
    if not isinstance(benchmark, Benchmark):
        raise BenchError(f"{path} has no BENCHMARK = npu_bench.Benchmark(...).")
    return benchmark


def _upwards(start: Path) -> Iterable[Path]:
    start = start.resolve()
    return (start, *start.parents)
