"""What stock Triton compiles of every CUDA launch, without a GPU: `hatch run interpreted:compile [PACKAGE ...]`.

Dry runs of the calls in tools/cuda_calls say what is launched on each kind of GPU. Triton's own JIT and compiler make
a cubin of each, for a driver that is made up, and the cubin says how many registers a thread takes and how many bytes of
stack, which hold what registers have no room for. `--write` keeps the largest numbers of each kernel in
tools/results/cuda_code.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from npu_tiling import Device, import_kernels
from npu_tiling.plans import Distance, Launch, Reached, Slot

from . import launches
from .cuda_calls import CALLS
from .workspace import ROOT

RECORD = ROOT / "tools" / "results" / "cuda_code.md"
WARP = 32


@dataclass(frozen=True)
class Code:
    """What one launch is compiled to.

    Attributes:
        registers: of a thread.
        stack: bytes of a thread.
        shared: bytes of shared memory of a program.
    """

    registers: int
    stack: int
    shared: int


class MadeUpDriver:
    """A driver of a GPU that is not there: a device number for each target, for which the JIT keeps what it compiled."""

    def __init__(self) -> None:
        self._targets: list[Any] = []
        self._device = 0

    def choose(self, arch: str) -> None:
        """Compile for an architecture, as "sm_90", from now on."""
        from triton.backends.compiler import GPUTarget

        target = GPUTarget("cuda", int(arch.removeprefix("sm_")), WARP)
        if target not in self._targets:
            self._targets.append(target)
        self._device = self._targets.index(target)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._targets[self._device]


def unique(package: str, chip: Device) -> dict[Hashable, Launch]:
    """Launches of a package on a GPU that Triton compiles apart, by what it tells them apart by."""
    found: dict[Hashable, Launch] = {}
    for _, made in launches.of_package(package, chip):
        for launch in made:
            arguments = tuple(map(_specialised, launch.arguments))
            constants = tuple((name, type(value), value) for name, value in sorted(launch.decision.constants.items()))
            key = launch.full_module, launch.kernel, arguments, constants, tuple(sorted(launch.decision.options.items()))
            found.setdefault(key, launch)
    return found


def _specialised(argument: Any) -> Hashable:
    """The part of an argument that another kernel is compiled for."""
    if isinstance(argument, Distance):
        return Distance
    if isinstance(argument, Reached):
        return _specialised(argument[0])
    if isinstance(argument, tuple):
        return tuple(map(_specialised, argument))
    if isinstance(argument, Slot):
        return argument.dtype, _offset(argument) == 0, argument.block
    if type(argument) is int:
        return argument == 1, argument % 16 == 0, abs(argument) >= 2**31
    return type(argument)


def compiled(launch: Launch) -> Code:
    """Compile a launch for the active driver's target."""
    kernel = getattr(import_kernels(launch.full_module, "triton"), launch.kernel)
    given = [_given(argument) for argument in launch.arguments]
    found = kernel.warmup(*given, grid=(launch.grid,), **launch.decision.constants, **launch.decision.options)
    registers, stack = _usage(found.asm["cubin"])
    return Code(registers, stack, found.metadata.shared)


def _given(argument: Any) -> Any:
    """An argument for the JIT: a tensor has a dtype and an address, which is 0 or off the alignment."""
    if isinstance(argument, Distance):
        return 2**40
    if isinstance(argument, Reached):
        return _given(argument[0])
    if isinstance(argument, tuple):
        return tuple(map(_given, argument))
    if not isinstance(argument, Slot):
        return argument
    if argument.block:
        from triton.tools.tensor_descriptor import TensorDescriptor

        tensor = torch.empty_strided(argument.shape, argument.strides, dtype=argument.dtype, device="meta")
        return TensorDescriptor.from_tensor(tensor, list(argument.block))
    return _Pointer(argument.dtype, _offset(argument))


def _offset(slot: Slot) -> int:
    """Bytes from the last address before it that is a multiple of 16."""
    return slot.start * slot.dtype.itemsize % 16


@dataclass
class _Pointer:
    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", said), re.search(r"STACK:(\d+)", said)
    assert registers is not None and stack is not None, said
    return int(registers[1]), int(stack[1])


def of_package(package: str, every: int = 1) -> Iterator[tuple[str, str, Launch, Code | str]]:
    """Architecture, kernel, launch, and its code or the compiler's error; of one launch of each kernel in `every`."""
    from triton.runtime import driver

    made_up = MadeUpDriver()
    driver.set_active(made_up)
    for chip in launches.CHIPS["cuda"]:
        made_up.choose(chip.arch)
        counts: dict[str, int] = {}
        for launch in unique(package, chip).values():
            name = f"{launch.module}.{launch.kernel}"
            counts[name] = counts.get(name, -1) + 1
            if counts[name] % every:
                continue
            try:
                yield chip.arch, name, launch, compiled(launch)
            except Exception as error:  # the compiler's, whatever it is: one launch's failure is not the others'
                while error.__cause__ is not None:
                    error = error.__cause__  # type: ignore[assignment]
                yield chip.arch, name, launch, f"{type(error).__name__}: {str(error)[-400:]}"


def table(found: Mapping[tuple[str, str, str], Sequence[Code]]) -> str:
    """The largest numbers of each kernel."""
    archs = [chip.arch for chip in launches.CHIPS["cuda"]]
    lines = [f"| {' | '.join(['Package', 'Kernel', *archs])} |", "|---" * (2 + len(archs)) + "|"]
    for package, name in dict.fromkeys((package, name) for package, name, _ in found):
        cells = []
        for arch in archs:
            codes = found.get((package, name, arch), ())
            numbers = (
                [max(getattr(code, each) for code in codes) for each in ("registers", "stack", "shared")] if codes else []
            )
            cells.append(f"{len(codes)}: {numbers[0]}, {numbers[1]}, {numbers[2]}" if numbers else "")
        lines.append(f"| {package} | `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cuda_code", description=__doc__)
    parser.add_argument("package", nargs="*", help="default: every operator")
    parser.add_argument("--every", type=int, default=1, help="of each kernel one launch in so many (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {RECORD.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    found: dict[tuple[str, str, str], list[Code]] = {}
    failed = 0
    for package in options.package or CALLS:
        for arch, name, launch, code in of_package(package, options.every):
            if isinstance(code, Code):
                found.setdefault((package, name, arch), []).append(code)
            else:
                failed += 1
                print(f"{arch} {name} {dict(launch.decision.constants)}: {code}", flush=True)
    said = table(found)
    print(said)
    if options.write:
        import triton

        share = "every launch" if options.every == 1 else f"one launch in {options.every}"
        RECORD.write_text(HEAD.format(triton=triton.__version__, torch=torch.__version__, share=share) + said)
    return failed


HEAD = """# CUDA's code of every launch

Compiled by stock Triton {triton} (torch {torch}), without a GPU; of each kernel {share} that the calls of
tools/cuda_calls make. A cell has the number of launches, and the largest of: registers of a thread; bytes of its
stack, which hold what registers have no room for; bytes of shared memory.

"""


if __name__ == "__main__":
    sys.exit(bool(main()))
