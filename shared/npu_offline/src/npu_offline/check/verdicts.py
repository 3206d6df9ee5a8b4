"""Caches the results of executed calls on disk, under a key of everything that they depend on."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import npu_tiling
import torch

from ..errors import Finding, OfflineError
from ..execute.native import native_key
from ..launches import LaunchRecord, Memory
from ..toolchain.cache import checked, private_folder, source_digest
from ..toolchain.compilation import compile_linalg, front_end_of
from ..toolchain.compilers import compilations, installed
from .calls import Call, launches_of
from .execution import SEED, Executed, Ran, execute_calls

_PACKAGE = Path(__file__).parents[1]
_INTERPRETER = ("stdlib", "platstdlib", "purelib", "platlib")
_FOLDERS = ("check", "execute", "module", "toolchain")  # of this package: what executes calls


class _NotWholeError(Exception):
    """A call was not executed as a whole; such a result is not cached."""

    def __init__(self, executed: Executed) -> None:
        super().__init__(executed.problem)
        self.executed = executed


def execute_package(
    package: Path, calls: Sequence[Call], soc: str, toolchain: str, *, fresh: bool = False
) -> Iterator[Executed]:
    """Execute the calls of a package, except those whose result is in the cache.

    Where a compiler may make several modules of one input, the input is compiled several times, and each module executed.
    The key of a result has the chip's properties, the toolchain, the final modules, arguments and grids of the call's
    launches, and digests of all code that takes part: of this package, of modules that are loaded from outside of the
    interpreter's folders with the files beside them, and of every installed distribution.

    Args:
        package: its folder, or the one file that the calls are in.
        calls: all of its calls, in order.
        soc, toolchain: as `execute_calls` takes them.
        fresh: execute all of them.

    Yields:
        The result of each call, in order.
    """
    for position, call in enumerate(calls):
        records = launches_of([call], soc)
        inputs = [front_end_of(record)[2] for record in records] if toolchain else []
        found: dict[tuple[str, ...], Executed] = {}  # by the final modules of its launches
        for compilation in range(max((compilations(toolchain, linalg) for linalg in inputs), default=1)):
            modules = tuple(_described(record, soc, toolchain, compilation) for record in records)
            if modules not in found:
                about = (position, call[0], SEED, _chip(soc), toolchain, *modules)
                found[modules] = _executed(package, call, soc, toolchain, compilation, about, fresh=fresh)
        yield _worst(list(found.values()))


def _executed(
    package: Path, call: Call, soc: str, toolchain: str, compilation: int, about: tuple[object, ...], *, fresh: bool
) -> Executed:
    """The result of a call with one module of each of its kernels."""
    environment = (installed()[-1], torch.get_num_threads(), sys.version)
    key = repr((about, environment, _machine_digest(), native_key(), _code_digest(package)))
    path = private_folder("verdicts") / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    if fresh:
        path.unlink(missing_ok=True)
    kept = True

    def execute() -> bytes:
        nonlocal kept
        kept = False
        (executed,) = execute_calls([call], soc, toolchain, compilation)
        if executed.problem:
            raise _NotWholeError(executed)
        return json.dumps([dataclasses.asdict(launch) for launch in executed.launches]).encode()

    try:
        launches = json.loads(checked(path, execute))
    except _NotWholeError as error:
        return error.executed
    return Executed(call[0], toolchain, [_ran(launch) for launch in launches], kept=kept)


def _worst(variants: Sequence[Executed]) -> Executed:
    """One result of a call that was executed with several modules of one input: of each launch that which has findings."""
    first, *others = variants
    stopped = [each for each in variants if each.problem]
    if stopped or not others:
        return (stopped or variants)[0]
    launches = []
    for runs in zip(*(each.launches for each in variants), strict=True):
        wrong = [run for run in runs if run.findings]
        if wrong and len(wrong) < len(runs):
            where = f" (in {len(wrong)} of {len(runs)} modules that the compiler made of this input)"
            findings = [dataclasses.replace(each, text=each.text + where) for each in wrong[0].findings]
            wrong = [dataclasses.replace(wrong[0], findings=findings)]
        launches.append((wrong or runs)[0])
    return dataclasses.replace(first, launches=launches, kept=all(each.kept for each in variants))


def _ran(launch: dict[str, object]) -> Ran:
    findings, unissued = launch.pop("findings"), launch.pop("unissued")
    assert isinstance(findings, list)
    assert isinstance(unissued, list)
    read = [Finding(f["kind"], None if f["program"] is None else tuple(f["program"]), f["text"]) for f in findings]
    return Ran(**launch, unissued=tuple(unissued), findings=tuple(read))  # type: ignore[arg-type]


def _chip(soc: str) -> str:
    """The chip without its name, on which no result depends."""
    return repr(dataclasses.replace(npu_tiling.soc(soc), name=""))


def _described(record: LaunchRecord, soc: str, toolchain: str, compilation: int) -> str:
    """A digest of what a launch runs and is given."""
    name, ttir, linalg = front_end_of(record)
    try:
        final = toolchain and compile_linalg(
            name, ttir, linalg, dict(record.options), soc, toolchain, compilation
        ).stages.get("final", "")
    except OfflineError as error:
        final = str(error)
    given = [(name, _value(value)) for name, value in record.arguments.items()]
    text = repr((name, linalg, final.replace(soc, ""), record.grid, sorted(record.options.items()), given))
    return hashlib.sha256(text.encode()).hexdigest()


def _value(value: Memory | int | float) -> object:
    if not isinstance(value, Memory):
        return value
    content = None if value.values is None else hashlib.sha256(repr(value.values.tolist()).encode()).hexdigest()
    return value.nbytes, value.row_bytes, content


def _machine_files() -> list[Path]:
    """The files of this package that a result may depend on."""
    found = [*_PACKAGE.glob("*.py"), *(path for folder in _FOLDERS for path in (_PACKAGE / folder).rglob("*.*"))]
    return sorted(path for path in found if path.suffix in (".py", ".c", ".h"))


@functools.cache
def _machine_digest() -> str:
    return source_digest(*(str(path.relative_to(_PACKAGE)) for path in _machine_files()))


def _code_digest(package: Path) -> str:
    """A digest of a package's code, of the code it has loaded, and of every installed distribution."""
    digest = hashlib.sha256(_installed_digest().encode())
    file, _, _ = str(package).partition("::")
    for name, path in sorted(_loaded(Path(file).resolve())):
        digest.update(name.encode() + b"\0" + Path(path).read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _installed_digest() -> str:
    """A digest of the lists of files of all distributions."""
    found = {str(d.metadata["Name"]): str(d.read_text("RECORD") or d.version) for d in importlib.metadata.distributions()}
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _loaded(package: Path) -> set[tuple[str, str]]:
    """The Python files of a package, and of loaded modules outside of the interpreter's folders.

    Each has a name before its path, so that the key does not depend on where the code lies.
    """
    found = _python_files(package, package) if package.is_dir() else {(package.name, str(package))}
    packages = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name == "__main__" or name.partition(".")[0] == __name__.partition(".")[0]:
            continue
        if (path := _outside_the_interpreter(file)) is None:
            continue
        folder, top = os.path.split(_real(getattr(sys.modules.get(name.partition(".")[0]), "__file__", None) or file))
        if top == "__init__.py":
            packages.add(folder)
        else:
            found.add((os.path.basename(path), path))
    return found.union(*(_python_files(Path(folder), Path(folder).parent) for folder in packages))


def _python_files(folder: Path, root: Path) -> set[tuple[str, str]]:
    """The Python files in a folder, each with its path from another one before it."""
    start = len(str(root)) + 1
    return {(path[start:], path) for path in map(str, folder.rglob("*.py"))}


@functools.cache  # there are thousands of modules, and a digest for each call
def _outside_the_interpreter(file: str) -> str | None:
    """The real path of a module's Python file, None if there is none, or it is in one of the interpreter's folders.

    PyTorch says that `torch.ops` is in "_ops.py", in whichever folder.
    """
    path = Path(_real(file))
    known = [_real(folder) for folder in (*map(sysconfig.get_path, _INTERPRETER), site.getusersitepackages())]
    inside = any(path.is_relative_to(folder) for folder in known)
    return str(path) if path.suffix == ".py" and path.is_file() and not inside else None


@functools.cache
def _real(file: str) -> str:
    return os.path.realpath(file)
