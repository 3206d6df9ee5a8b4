"""One kernel of a file, launched on arguments that a command line describes: `FILE::kernel x=bf16:512x1000 n=1000`."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import npu_tiling

from ..errors import OfflineError
from ..execute.recording import record
from ..toolchain.triton_ascend import missing_triton_ascend

_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "i1": "bool",
}
_BELOW = 2
"""Random integers of a tensor are below this number, unless the argument says otherwise."""

FORMS = """an argument is NAME=VALUE, and VALUE one of
    bf16:512x1000    a tensor of random numbers (fp64, fp32, fp16, bf16, i64, i32, i16, i8, u8, i1)
    i64:512:32000    a tensor of random integers below 32000 (2 if it is left out)
    1000, 1e-5, True, None    a number, a flag, no argument
    128,64,256    sizes that `tune` compares; other commands use the first"""


@dataclass(frozen=True)
class KernelCall:
    """A launch of one kernel.

    Attributes:
        path: its file.
        kernel: what `@triton.jit` made, autotuning taken off.
        given: argument name to its values as they were written; several where `tune` may choose.
        grid: programs in x, y and z: an expression of the arguments.
        names: what its file defines.
    """

    path: Path
    kernel: Any
    given: Mapping[str, Sequence[str]]
    grid: str
    names: Mapping[str, Any]

    @property
    def label(self) -> str:
        """What tables call the launch."""
        return str(self.kernel.__name__)

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """The arguments with several values."""
        return {name: tuple(map(_number, values)) for name, values in self.given.items() if len(values) > 1}

    def arguments(self, **chosen: Any) -> dict[str, Any]:
        """New arguments: floating-point tensors are empty, integers random."""
        return {name: chosen.get(name, _value(name, values[0])) for name, values in self.given.items()}

    def launch(self, **chosen: Any) -> None:
        """Launch it on new arguments."""
        self.launch_on(self.arguments(**chosen))

    def launch_on(self, arguments: Mapping[str, Any]) -> None:
        """Launch it."""
        from triton.runtime.driver import driver

        self.kernel[self.programs(arguments, driver.active.device)](**arguments)

    def programs(self, arguments: Mapping[str, Any], chip: npu_tiling.Device) -> tuple[int, ...]:
        """The grid.

        Raises:
            OfflineError: its expression is not of one to three integers.
        """
        import triton

        cores = {"cores": chip.vector_cores, "cube_cores": chip.cube_cores}
        names = {"cdiv": triton.cdiv, "math": math, "min": min, "max": max, "triton": triton}
        try:
            grid = eval(f"({self.grid},)", {"__builtins__": {}}, {**names, **cores, **arguments})
        except Exception as error:
            raise OfflineError(f"--grid is {self.grid!r}: {error}") from None
        if not 1 <= len(grid) <= 3 or not all(isinstance(size, int) and size > 0 for size in grid):
            raise OfflineError(f"--grid is {self.grid!r}, which is {grid}, must be one to three positive integers")
        return grid


def load_file(path: Path, *, partly: bool = False) -> ModuleType:
    """Import a Python file, with its folder on the path, as Python does for a program, and with Triton's driver a recorder.

    Where torch_npu is not installed, an empty module stands in its place.

    Args:
        path: the file.
        partly: accept a file that fails after it has defined kernels, such as a program that goes on to run them on a chip.

    Raises:
        OfflineError: it does not exist, or fails.
    """
    if not path.is_file():
        raise OfflineError(f"{path} does not exist")
    spec = importlib.util.spec_from_file_location(f"npu_offline_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    problem = None
    # Autotuning asks for a driver where it decorates. Without triton-ascend, on a CUDA machine, there is Triton's own.
    with _no_torch_npu(), contextlib.nullcontext() if missing_triton_ascend() else record():
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            problem = error
    if problem is not None:
        frames = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == str(path)]
        line = f" at line {frames[-1]}" if frames else ""
        said = f"{path} fails{line}: {type(problem).__name__}: {problem}"
        if not partly or not kernels_of(module):
            raise OfflineError(said) from problem
        print(f"npu-offline: {said}; the kernels above are used", file=sys.stderr)
    return module


@contextlib.contextmanager
def _no_torch_npu() -> Iterator[None]:
    """Until the block ends, `import torch_npu` finds an empty module, unless it is installed."""
    if "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu"):
        yield
        return
    sys.modules["torch_npu"] = ModuleType("torch_npu")
    try:
        yield
    finally:
        del sys.modules["torch_npu"]


def kernels_of(module: ModuleType) -> dict[str, Any]:
    """The kernels that a module defines or imports, by name."""
    from triton.runtime.jit import JITFunction

    found = {name: jit_function(value) for name, value in vars(module).items()}
    return {name: kernel for name, kernel in found.items() if isinstance(kernel, JITFunction)}


def jit_function(value: Any) -> Any:
    """What `@triton.jit` made, without autotuning and heuristics around it."""
    while type(value).__module__.startswith("triton.runtime.auto"):
        value = value.fn
    return value


def parse(target: str, given: Sequence[str], grid: str | None) -> KernelCall:
    """The launch that a command line describes.

    Args:
        target: `FILE::kernel`.
        given: arguments as NAME=VALUE.
        grid: programs in x, y and z.

    Raises:
        OfflineError: a part of it is missing or wrong.
    """
    file, _, name = target.partition("::")
    module = load_file(Path(file), partly=True)
    kernels = kernels_of(module)
    if name not in kernels:
        raise OfflineError(f"{file} has no kernel {name!r}; it has {', '.join(kernels) or 'none: @triton.jit is missing'}")
    kernel = kernels[name]
    values: dict[str, list[str]] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise OfflineError(f"{text!r} is no argument; {FORMS}")
        values[key] = value.split(",")
    unknown = set(values) - set(kernel.arg_names)
    if unknown:
        raise OfflineError(f"kernel {name} has no argument {min(unknown)}; it has {', '.join(kernel.arg_names)}")
    missing = [each.name for each in kernel.params if each.name not in values and not each.has_default]
    if missing:
        raise OfflineError(f"kernel {name} also needs {', '.join(missing)}; {FORMS}")
    if grid is None:
        raise OfflineError(
            "--grid is missing: the programs in x, y and z, numbers or an expression of the arguments, such as"
            " --grid 512, --grid 'cdiv(n, BLOCK)', --grid 8,4 or --grid cores"
        )
    call = KernelCall(Path(file), kernel, values, grid, vars(module))
    call.programs(call.arguments(), npu_tiling.soc("Ascend910B4"))  # so that a mistake is reported before anything runs
    call.choices()
    return call


def _value(name: str, text: str) -> Any:
    kind, colon, rest = text.partition(":")
    if not colon:
        return _number(text)
    import torch

    dtype = getattr(torch, _DTYPES.get(kind, kind), None)
    shape, _, below = rest.partition(":")
    try:
        sizes = [int(size) for size in shape.split("x")]
        bound = int(below) if below else _BELOW
    except ValueError:
        sizes, bound = [], 0
    if not isinstance(dtype, torch.dtype) or not sizes or min(sizes) < 0 or bound < 1:
        raise OfflineError(f"{name} is {text!r}; {FORMS}")
    if dtype.is_floating_point:
        return torch.empty(sizes, dtype=dtype)
    return torch.randint(bound, sizes, generator=torch.Generator().manual_seed(0)).to(dtype)


def _number(text: str) -> Any:
    """A number, a flag or None as in Python; any other text stands for itself, as some kernels take names."""
    try:
        return float(text) if text in ("inf", "-inf", "nan") else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def tuned_call(call: KernelCall) -> tuple[str, Callable[..., None], dict[str, tuple[Any, ...]]]:
    """What `tune.search` takes.

    Raises:
        OfflineError: no argument has several values.
    """
    choices = call.choices()
    if not choices:
        raise OfflineError("nothing can be tuned: give an argument several sizes, the one in use first: BLOCK=1024,512,2048")
    return call.label, call.launch, choices
