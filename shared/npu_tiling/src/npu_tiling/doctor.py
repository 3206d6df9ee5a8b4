"""`python -m npu_tiling [PACKAGE ...]`: what is installed for kernels, what keeps them from running, and what mends it.

For every trainer that is installed it says which parts are ours, by which hook, and why the others are not. Every module of
device code of the packages that are named is imported.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

BY_CANN = {"8.5": "3.2.0", "9.0": "3.2.1", "9.1": "3.2.2"}
"""By the release of CANN, as triton-ascend's installation guide and vllm-ascend pair them. The public index has 3.2.0."""

_VERSION_FILES = ("*-linux/ascend_toolkit_install.info", "runtime/version.info", "compiler/version.info", "version.info")
_VERSION = re.compile(r"^version=[vV]?(\d+\.\d+)", re.IGNORECASE | re.MULTILINE)


def cann_version() -> str | None:
    """The release of CANN at ASCEND_HOME_PATH, as "9.1"; None where none is set up or it does not say.

    It is read from the files that CANN's installers leave, or from the name of its folder.
    """
    home = os.environ.get("ASCEND_HOME_PATH")
    if not home:
        return None
    folder = Path(home).resolve()
    for pattern in _VERSION_FILES:
        for file in sorted(folder.glob(pattern)):
            found = _VERSION.search(file.read_text(errors="replace"))
            if found:
                return found[1]
    named = re.search(r"(\d+\.\d+)", folder.name)
    return named[1] if named else None


def expected_triton_ascend() -> str | None:
    """The release of triton-ascend that belongs to the CANN that is set up; None where that is not known."""
    version = cann_version()
    return None if version is None else BY_CANN.get(version)


TRITON_ASCEND = "3.2.0"
"""The release of triton-ascend whose compiler stages npu-offline drives; the newest that the public index has."""

TRITON_ASCEND_RANGE = ">=3.2.0,<3.7"
"""What the extra `npu` takes: 3.2.0, which was run, and releases of which the launcher and the options were read alone."""

WHEELS_PYTHON = ((3, 9), (3, 11))
"""The oldest and the newest Python that it has wheels for."""

WHEELS_MACHINES = ("x86_64", "aarch64")
"""The machines that it has wheels for, all under Linux."""

_TRITONS = ("triton", "flagtree", "triton-ascend")  # each installs the module triton
_NOT_READ = (3, 7)  # and later ones
_PINNED = re.compile(r"(torch|torch_npu|triton-ascend)==([\w.]+);.*extra == ['\"]npu['\"]")
_HASHED_BYTES = 1 << 20  # larger files, the shared libraries, are compared by size


@dataclass(frozen=True)
class Problem:
    """Something that keeps Triton from working.

    Attributes:
        what: one sentence.
        cure: the commands that mend it, in order; none where no command does.
    """

    what: str
    cure: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} Cure: {' && '.join(self.cure)}" if self.cure else self.what


REINSTALL_ASCEND = f"pip install --force-reinstall --no-deps triton-ascend=={TRITON_ASCEND}"
BUILDS_WITH = "pybind11"
"""What triton-ascend imports and its metadata do not ask for; the extra `npu` does."""


def reinstall_ascend() -> tuple[str, ...]:
    """The lines that install the release of triton-ascend that belongs to the CANN that is set up, and what it lacks."""
    release = expected_triton_ascend() or TRITON_ASCEND
    line = REINSTALL_ASCEND.replace(TRITON_ASCEND, release)
    if release != TRITON_ASCEND:
        line += " --extra-index-url INDEX  # the index that triton-ascend's installation guide names"
    return (line, *_install_what_it_builds_with())


def _install_what_it_builds_with() -> tuple[str, ...]:
    return () if version(BUILDS_WITH) else (f"pip install {BUILDS_WITH}",)


def version(distribution: str) -> str | None:
    """The version of an installed distribution, None where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_wheel() -> str | None:
    """Why pip finds no triton-ascend for this Python and this machine, None if it does."""
    oldest, newest = (".".join(map(str, python)) for python in WHEELS_PYTHON)
    wheels = f"triton-ascend {TRITON_ASCEND} has wheels for Python {oldest} to {newest}"
    if not WHEELS_PYTHON[0] <= sys.version_info[:2] <= WHEELS_PYTHON[1]:
        return f"{wheels}, and this is Python {platform.python_version()}."
    if platform.system() != "Linux" or platform.machine() not in WHEELS_MACHINES:
        return f"{wheels} on Linux ({', '.join(WHEELS_MACHINES)}), and this is {platform.system()} on {platform.machine()}."
    return None


def damaged_files(distribution: str) -> list[str]:
    """The files of an installed distribution that are missing or not its own."""
    found = importlib.metadata.distribution(distribution)
    damaged = []
    for name, recorded, size in csv.reader((found.read_text("RECORD") or "").splitlines()):
        algorithm, _, digest = recorded.partition("=")
        if not algorithm:  # what Python compiled, and the record itself
            continue
        path = Path(str(found.locate_file(name)))
        try:
            if int(size) < _HASHED_BYTES:
                same = _digest(algorithm, path.read_bytes()) == digest
            else:
                same = path.stat().st_size == int(size)
        except OSError:
            same = False
        if not same:
            damaged.append(name)
    return damaged


def _digest(algorithm: str, data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.new(algorithm, data).digest()).rstrip(b"=").decode()


def triton_problem(*, ascend: bool | None = None) -> Problem | None:
    """What is wrong with the installed Triton, None if nothing is.

    Args:
        ascend: Triton is to compile for Ascend; None: where torch_npu is installed.
    """
    if ascend is None:
        ascend = version("torch_npu") is not None
    reinstall = reinstall_ascend()
    tritons = {name: found for name in _TRITONS if (found := version(name))}
    ours = tritons.get("triton-ascend")
    others = [name for name in tritons if name != "triton-ascend"]
    cure = (f"pip uninstall -y {' '.join(others)}", *reinstall)
    if len(tritons) > 1:
        *first, last = (f"{name} {found}" for name, found in tritons.items())
        count, files = ("both", "other") if len(first) == 1 else ("all", "others")
        what = f"{', '.join(first)} and {last} are {count} installed, each over files of the {files}."
        if not ascend and "triton" in tritons:
            rest = " ".join(name for name in tritons if name != "triton")
            cuda = f"pip install --force-reinstall --no-deps triton=={tritons['triton']}"
            what += f" To keep the one for CUDA instead: pip uninstall -y {rest} && {cuda}."
        return Problem(what, cure)
    if ascend and not ours and not _has_ascend("flagtree"):
        reason = missing_wheel()
        if reason:
            return Problem(f"triton-ascend is not installed: {reason}")
        if not tritons:
            return Problem("triton-ascend is not installed.", reinstall)
        ((name, found),) = tritons.items()
        return Problem(f"{name} {found} does not compile for Ascend, and triton-ascend is not installed.", cure)
    expected = expected_triton_ascend()
    if ascend and expected is not None and ours in BY_CANN.values() and ours != expected:
        return Problem(f"triton-ascend {ours} is for another CANN than {cann_version()}, which takes {expected}.", reinstall)
    more = _install_what_it_builds_with() if ours else ()
    for name, found in tritons.items():
        damaged = damaged_files(name)
        if damaged:
            files = ", ".join(damaged[:3]) + (", ..." if len(damaged) > 3 else "")
            what = f"{name} {found} is damaged: {len(damaged)} of its files are missing or another's ({files})."
            return Problem(what, (f"pip install --force-reinstall --no-deps {name}=={found}", *more))
    if more:
        return Problem(f"triton-ascend {ours} imports {BUILDS_WITH}, which is not installed.", more)
    return None


def notes() -> list[str]:
    """What differs from what was run, and need not be wrong: a sentence each."""
    said = []
    ours, flagtree = version("triton-ascend"), version("flagtree")
    if ours and ours != TRITON_ASCEND:
        read = "its launcher and its options were read" if _numbers(ours) < _NOT_READ else "nothing of it was read"
        said.append(f"triton-ascend {ours}: our kernels were run with {TRITON_ASCEND} alone; {read}.")
    if flagtree and _has_ascend("flagtree"):
        said.append(f"flagtree {flagtree} takes the place of triton-ascend: our kernels were not run with it.")
    if version("torch_npu"):
        said += map(_pins_of, importlib.metadata.distributions())
    return [*filter(None, said)]


def _pins_of(distribution: importlib.metadata.Distribution) -> str:
    """What a package's extra `npu` pins and another release of which is installed, as fla-core's; "" where nothing is."""
    other = []
    for requirement in distribution.requires or ():
        pin = _PINNED.match(requirement)
        installed = pin and version(pin[1])
        if pin and installed and installed.partition("+")[0] != pin[2]:
            other.append(f"{pin[1]} {pin[2]} (here {installed})")
    if not other:
        return ""
    return f"{distribution.metadata['Name']} {distribution.version} asks in its extra npu for {', '.join(other)}."


def _has_ascend(distribution: str) -> bool:
    """Whether an installed Triton has a backend for Ascend; False where it is not installed."""
    if version(distribution) is None:
        return False
    return "triton/backends/ascend/" in (importlib.metadata.distribution(distribution).read_text("RECORD") or "")


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release.partition("+")[0])[:3]))


NORMS, LOSS, EMBEDDING = "npu-rms-norm", "npu-fused-linear-cross-entropy", "npu-embedding"


class Part(NamedTuple):
    """A part of a trainer.

    Attributes:
        name: what it is.
        package: whose operator takes its place; "" where none does.
        how: what makes it ours; without a package, why it is not.
        rest: what stays with the trainer all the same.
        refused: says why the hook cannot be used here, "" where it can.
        off: a variable of the environment and the value that turns the hook off.
    """

    name: str
    package: str
    how: str
    rest: str = ""
    refused: Callable[[], str] = str
    off: tuple[str, str] | None = None


class Trainer(NamedTuple):
    """A trainer: the name to install it by, the releases that tests run with ("" without a hook), its parts."""

    distribution: str
    seen: str
    parts: tuple[Part, ...]


def refused_kernels() -> str:
    """Why transformers' `use_kernels` takes no kernels here, and what to do; "" where it takes them.

    Raises:
        ImportError: transformers cannot be imported.
    """
    import_utils = importlib.import_module("transformers.utils.import_utils")

    if import_utils.is_kernels_available():
        return ""
    found = version("kernels")
    wanted = f"kernels>={import_utils.KERNELS_MIN_VERSION}"
    if hasattr(import_utils, "KERNELS_MAX_VERSION"):
        wanted += f",<{import_utils.KERNELS_MAX_VERSION}"
    return (
        f"transformers {version('transformers')} takes {wanted}, and {found or 'none'} is installed: "
        f"pip install '{wanted}', or transformers==5.22.2 with kernels 0.17, "
        "or replace the norms of a model with npu_rms_norm.patch(model)"
    )


def _asked(function: Callable[[], str]) -> Callable[[], str]:
    """What a function of this module says in a process of its own, where it may import what cannot be imported."""

    def ask() -> str:
        code = f"from {__name__} import {function.__name__}\nprint({function.__name__}())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        said = done.stderr.strip().splitlines()[-1:] if done.returncode else done.stdout.split("\n")[:1]
        return "".join(said)

    return ask


_HEADS, _NORMS = "npu_fused_linear_cross_entropy.integrations", "npu_rms_norm.integrations"
_OF_TRANSFORMERS = "its models are those of transformers: see there"
_NO_HOOK = "it has no hook for it"

TRAINERS = (
    Trainer(
        "verl",
        "0.9.1",
        (
            Part(
                "scores of the policy",
                LOSS,
                "by itself: verl loads npu_fused_linear_cross_entropy.integrations.verl_plugin",
                off=("VERL_USE_EXTERNAL_PLUGINS", "none"),
            ),
            Part("norms, embedding", "", _OF_TRANSFORMERS),
        ),
    ),
    Trainer(
        "transformers",
        "5.22.2 (use_kernels), 5.24.0 (patch)",
        (
            Part("norms", NORMS, "npu_rms_norm.patch(model)", "norms that are not known: patch says which"),
            Part(
                "norms that it marks",
                NORMS,
                "npu_rms_norm.use_kernels() and use_kernels=True",
                refused=_asked(refused_kernels),
            ),
            Part("loss", LOSS, "npu_fused_linear_cross_entropy.patch(model)", "models that are not known: patch says which"),
            Part("embedding", EMBEDDING, "npu_embedding.patch(model)"),
        ),
    ),
    Trainer(
        "trl",
        "1.16.0",
        (
            Part("fused head", LOSS, f"{_HEADS}.trl.register()", "a head that ZeRO-3 splits"),
            Part("norms, embedding", "", _OF_TRANSFORMERS),
        ),
    ),
    Trainer(
        "liger-kernel",
        "0.8.5",
        (
            Part("norms", NORMS, f"{_NORMS}.liger.register()"),
            Part("fused loss", LOSS, f"{_HEADS}.liger.register()"),
            Part("other kernels", "", "there is no operator of ours"),
        ),
    ),
    Trainer(
        "veomni",
        "0.1.12",
        (
            Part("norms", NORMS, f"{_NORMS}.veomni.register()", "those of other backends than npu; gated norms"),
            Part("loss, scores", LOSS, f"{_HEADS}.veomni.register()", "distillation; the backends eager and liger_kernel"),
            Part("embedding", "", _NO_HOOK),
        ),
    ),
    Trainer(
        "torchtitan",
        "0.3.0",
        (
            Part("norms", NORMS, f"--override.imports {_NORMS}.torchtitan.rms_norm"),
            Part("chunked loss", LOSS, f"--override.imports {_HEADS}.torchtitan.loss", "heads under tensor parallelism"),
            Part("embedding", "", "there is no hook of ours"),
        ),
    ),
    Trainer(
        "ms-swift",
        "4.6.0",
        (
            Part("norms", NORMS, f"{_NORMS}.ms_swift.register() in a file of --external_plugins"),
            Part(
                "loss of fine-tuning",
                LOSS,
                f"{_HEADS}.ms_swift.register() in a file of --external_plugins",
                "preference training; losses that it computes from logits; Megatron",
            ),
            Part("embedding", "", _NO_HOOK),
        ),
    ),
    Trainer(
        "llamafactory",
        "0.9.5",
        (
            Part("norms", NORMS, f"{_NORMS}.llamafactory.register() and use_v1_kernels: npu_fused_rmsnorm"),
            Part("loss of fine-tuning", LOSS, f"{_HEADS}.llamafactory.register()", "preference training; version 1"),
            Part("embedding", "", _NO_HOOK),
        ),
    ),
    Trainer("xtuner", "", (Part("norms, loss", "", "there is no hook of ours; where it uses Liger, see there"),)),
    Trainer(
        "megatron-core",
        "0.16.1",
        (
            Part("norms of local layers", NORMS, "npu_rms_norm.patch(model)", "those of Transformer Engine and Apex"),
            Part(
                "loss of a GPTModel", LOSS, f"{_HEADS}.megatron.register()", "multi-token prediction; logits without labels"
            ),
            Part("embedding", "", _NO_HOOK),
        ),
    ),
)


def report() -> list[str]:
    """Lines that say, for every trainer that is installed, what is ours; nothing where none is."""
    lines = []
    for trainer in TRAINERS:
        installed = version(trainer.distribution)
        if installed is None:
            continue
        tested = f", tested with {trainer.seen}" if trainer.seen not in ("", installed) else ""
        lines.append(f"{trainer.distribution} {installed}{tested}")
        lines += [f"    {part.name}: {_said(part)}" for part in trainer.parts]
    return ["", "Trainers:", *lines] if lines else []


def _said(part: Part) -> str:
    if not part.package:
        return f"not ours, {part.how}"
    if version(part.package) is None:
        return f"not ours, {part.package} is not installed"
    reason = part.refused()
    if reason:
        return f"not ours, {reason}"
    if part.off is not None and os.environ.get(part.off[0]) == part.off[1]:
        return f"not ours, {part.off[0]} is {part.off[1]}"
    how = part.how if part.how.startswith("by itself") else f"with {part.how}"
    return f"ours {how}" + (f" (not: {part.rest})" if part.rest else "")


_IMPORTS_TRITON = re.compile(r"^(?:(?:import|from) triton\b|from (?:npu_tiling)?\.device import .*\btriton\b)", re.MULTILINE)
_SECONDS = 300  # torch from a cold disk takes tens of them
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # as PyTorch's installation page names it
DISTRIBUTIONS = ("torch", "torch_npu", "triton", "triton-ascend")
OURS = ("npu-tiling", NORMS, EMBEDDING, "npu-attn-res", LOSS, "npu-offline", "npu-bench")
_WITHOUT_CANN = (
    "Is CANN's set_env.sh sourced? On a machine without an NPU, pip uninstall -y torch_npu: "
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is enough for torch alone, since transformers imports torch_npu itself."
)


def import_error(modules: Sequence[str]) -> tuple[str, str] | None:
    """The first of these modules that cannot be imported and the last line that Python says; None where all can be.

    They are imported in one process of their own.
    """
    code = f"import importlib\nfor name in {list(modules)}:\n    print(name, flush=True)\n    importlib.import_module(name)"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return printed.split()[-1], f"it took more than {_SECONDS} s"
    if not done.returncode:
        return None
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    begun = [line for line in done.stdout.splitlines() if line in modules]
    return begun[-1], said[-1]


def device_modules(package: str) -> list[str]:
    """Every module of an installed package that imports Triton, by its source; nothing is imported.

    Raises:
        ModuleNotFoundError: there is no such package.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"there is no package {package}")
    found = []
    for folder in map(Path, spec.submodule_search_locations):
        for file in sorted(folder.rglob("*.py")):
            if _IMPORTS_TRITON.search(file.read_text()):
                parts = file.relative_to(folder).with_suffix("").parts
                found.append(".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)]))
    return found


def is_cuda_build() -> bool:
    """Whether the installed torch is a build with CUDA, by the file in which it says so; nothing is imported.

    What it requires does not tell: wheels for aarch64 without CUDA name what wheels for x86-64 require.
    """
    try:
        said = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    except (importlib.metadata.PackageNotFoundError, OSError):
        return False
    return re.search(r"^cuda\b.*= ['\"]", said, re.MULTILINE) is not None


def torch_npu_problems() -> list[Problem]:
    """What keeps the installed torch_npu from loading into the installed torch."""
    found = []
    torch, torch_npu = version("torch"), version("torch_npu")
    if torch and torch_npu and _numbers(torch) != _numbers(torch_npu):
        cure = f"pip install torch=={'.'.join(torch_npu.split('.')[:3])}"
        found.append(Problem(f"torch_npu {torch_npu} is for another torch than {torch}.", (cure,)))
    if torch and torch_npu and is_cuda_build():
        release = torch.partition("+")[0]
        cure = f"pip install --force-reinstall --no-deps torch=={release} --index-url {TORCH_CPU_INDEX}"
        found.append(Problem(f"torch {torch} is a build with CUDA, into which torch_npu does not load.", (cure,)))
    return found


def problems(modules: Sequence[str] = (), *, ascend: bool | None = None) -> list[Problem]:
    """Everything that keeps kernels from running here, worst first.

    Args:
        modules: device code, which is imported.
        ascend: they are to run on Ascend, or to be compiled for it; None: where torch_npu is installed.
    """
    found = []
    ascend = version("torch_npu") is not None if ascend is None else ascend
    triton = triton_problem(ascend=ascend)
    if triton:
        found.append(triton)
    found += torch_npu_problems()
    if not found:
        here = {"torch": ("torch",), "torch_npu": ("torch_npu",), "triton": _TRITONS}
        basis = [module for module, names in here.items() if any(map(version, names))]
        error = import_error([*basis, *modules])
        if error:
            module, said = error
            hint = f" {_WITHOUT_CANN}" if version("torch_npu") and module in ("torch", "torch_npu") else ""
            found.append(Problem(f"`import {module}` fails: {said.rstrip('.')}.{hint}"))
    return found


def main(
    packages: Sequence[str] = (), *, ascend: bool | None = None, more: Callable[[], list[Problem]] | None = None
) -> int:
    """Print what is here and what is wrong; returns the exit status, 1 where something is.

    Args:
        packages: whose device code is imported.
        ascend: as in `problems`.
        more: further problems, found by a package that builds on this one.

    Raises:
        ModuleNotFoundError: there is no such package; nothing was printed.
    """
    modules = {package: device_modules(package) for package in packages}
    print(f"Python {platform.python_version()} ({sys.executable}), {platform.system()} on {platform.machine()}")
    for names in (DISTRIBUTIONS, OURS):
        print(", ".join(f"{name} {version(name) or 'not installed'}" for name in names))
    print(f"CANN: {os.environ.get('ASCEND_HOME_PATH') or 'ASCEND_HOME_PATH is not set (its set_env.sh sets it)'}")
    if expected_triton_ascend():
        print(f"CANN {cann_version()} takes triton-ascend {expected_triton_ascend()}")
    for note in notes():
        print(f"Note: {note}")
    reason = missing_wheel()
    print(f"Ascend: {reason or 'triton-ascend has wheels for this Python and machine'}")
    for line in report():
        print(line)
    has_triton = any(map(version, _TRITONS))
    imports = [name for each in modules.values() for name in each] if has_triton else []
    found = problems(imports, ascend=ascend) + (more() if more else [])
    for problem in found:
        print(f"\nProblem: {problem.what}")
        for command in problem.cure:
            print(f"    {command}")
    if not found and has_triton:
        imported = "".join(f" {len(each)} modules of {name}'s kernels were imported." for name, each in modules.items())
        print(f"No problem found.{imported}")
    elif not found:
        left = f" No kernels of {', '.join(packages)} were imported." if packages else ""
        print(f"No problem found. Without a Triton, operators run on CPU tensors alone.{left}")
    return 1 if found else 0


def command_line(arguments: Sequence[str] | None = None) -> int:
    """`python -m npu_tiling`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m npu_tiling", description=__doc__.partition(":")[2].strip())
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="whose kernels are imported, as npu_rms_norm")
    options = parser.parse_args(arguments)
    try:
        return main(options.packages)
    except ModuleNotFoundError as error:
        parser.error(str(error))
