"""One kernel of a file, launched on arguments that a command line describes: `FILE::kernel x=bf16:512x1000 n=1000`.

A file of recorded launches, which `save` writes, has such launches with the arguments that a program gave them.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import npu_tiling

from ..errors import OfflineError
from ..launches import MAX_PROGRAMS
from .files import configurations, heuristics, jit_function, kernels_of, load_file
from .values import FORMS, combinations, number_of, value_of

_ASKS = {"program_id", "num_programs"}


@dataclass(frozen=True)
class KernelCall:
    """A launch of one kernel.

    Attributes:
        path: its file.
        kernel: what `@triton.jit` made, autotuning taken off.
        given: argument name to its values as they were written; several where `tune` may choose.
        grid: programs in x, y and z: an expression of the arguments.
        names: what its file defines.
        configuration: sizes of one of an autotuned kernel's configurations.
        computed: functions of the arguments for those that `@triton.heuristics` computes.
        recorded: tensors of a program, for arguments that nothing else gives; they may share memory.
    """

    path: Path
    kernel: Any
    given: Mapping[str, Sequence[str]]
    grid: str
    names: Mapping[str, Any]
    configuration: Mapping[str, Any] = field(default_factory=dict)
    computed: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    recorded: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What tables call the launch."""
        sizes = [f"{name}={size}" for name, size in self.configuration.items()]
        return " ".join([str(self.kernel.__name__), *sizes])

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """The arguments with several values."""
        return {name: tuple(map(number_of, values)) for name, values in self.given.items() if len(values) > 1}

    def arguments(self, **chosen: Any) -> dict[str, Any]:
        """New arguments: copies of recorded tensors; others of floating-point numbers are empty, of integers random."""
        recorded = copy.deepcopy(dict(self.recorded))
        texts = {name: values[0] for name, values in self.given.items() if name not in {*recorded, *chosen}}
        found = {name: value_of(name, text) for name, text in texts.items()}
        found |= {**recorded, **self.configuration, **chosen}
        for name, compute in self.computed.items():
            if name not in found:
                found[name] = compute({**self._defaults, **found})
        return found

    @property
    def _defaults(self) -> dict[str, Any]:
        return {each.name: each.default for each in self.kernel.params if each.has_default}

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
            grid = eval(f"({self.grid},)", {"__builtins__": {}}, {**names, **cores, **self._defaults, **arguments})
        except Exception as error:
            raise OfflineError(f"--grid is {self.grid!r}: {error}") from None
        if all(isinstance(size, int) for size in grid) and math.prod(grid) > MAX_PROGRAMS:
            raise OfflineError(
                f"--grid is {self.grid!r}: {math.prod(grid):,} programs, and a chip launches at most {MAX_PROGRAMS:,}:"
                " let each program do several tiles, in a loop from tl.program_id(0) on in steps of tl.num_programs(0)"
            )
        if not 1 <= len(grid) <= 3 or not all(isinstance(size, int) and size > 0 for size in grid):
            raise OfflineError(f"--grid is {self.grid!r}, which is {grid}, must be one to three positive integers")
        return grid


def find(target: str) -> tuple[Path, ModuleType, Any]:
    """The file, its module, and the kernel with what stands around it, of `FILE::kernel`.

    Raises:
        OfflineError: the file fails, or has no such kernel.
    """
    file, _, name = target.partition("::")
    module = load_file(Path(file), partly=True)
    kernels = kernels_of(module)
    kernels = {**{jit_function(kernel).__name__: kernel for kernel in kernels.values()}, **kernels}
    if name not in kernels:
        raise OfflineError(f"{file} has no kernel {name!r}; it has {', '.join(kernels) or 'none: @triton.jit is missing'}")
    return Path(file), module, kernels[name]


def parse(target: str, given: Sequence[str], grid: str | None) -> list[KernelCall]:
    """The launches that a command line describes: one, or one for each configuration of an autotuned kernel.

    Args:
        target: `FILE::kernel`.
        given: arguments as NAME=VALUE. Those of a configuration stand in place of all configurations.
        grid: programs in x, y and z; None for one, where all programs would do the same.

    Raises:
        OfflineError: a part of it is missing or wrong.
    """
    if is_recording(target):
        return _replayed(target, given, grid)
    path, module, decorated = find(target)
    kernel, computed = jit_function(decorated), heuristics(decorated)
    name, values = kernel.__name__, _values(kernel, given)
    found = [sizes for sizes in configurations(decorated) if not sizes.keys() & values.keys()] or [{}]
    missing = [each.name for each in kernel.params if not each.has_default]
    missing = [each for each in missing if each not in values and each not in found[0] and each not in computed]
    if missing:
        tuned = configurations(decorated)
        why = f", of which its configurations give {', '.join(tuned[0])} where no other of them is given" if tuned else ""
        raise OfflineError(f"kernel {name} also needs {', '.join(missing)}{why}; {FORMS}")
    if grid is None and asks_for_programs(kernel):
        raise OfflineError(
            "--grid is missing: the programs in x, y and z, numbers or an expression of the arguments, such as"
            " --grid 512, --grid 'cdiv(n, BLOCK)', --grid 8,4 or --grid cores"
        )
    grid = "1" if grid is None else grid
    chip = npu_tiling.soc("Ascend910B4")
    calls = [KernelCall(path, kernel, values, grid, vars(module), sizes, computed) for sizes in found]
    for call in calls:  # so that a mistake is reported before anything runs
        call.programs(call.arguments(), chip)
        call.choices()
    return calls


def asks_for_programs(kernel: Any) -> bool:
    """Whether a kernel, or a function that it calls, asks for its program's number or for how many there are."""
    met, left = set[Any](), [kernel]
    while left:
        function = left.pop().fn
        met.add(function)
        found = inspect.getclosurevars(function)
        names = {*found.globals, *found.unbound}
        named = [*found.globals.values(), *found.nonlocals.values()]
        named += [
            getattr(each, name) for each in named if isinstance(each, ModuleType) for name in names if hasattr(each, name)
        ]
        if names & _ASKS or any(getattr(each, "__name__", "") in _ASKS for each in named):
            return True
        left += [each for each in named if hasattr(each, "arg_names") and each.fn not in met]
    return False


def _values(kernel: Any, given: Sequence[str]) -> dict[str, list[str]]:
    """The values of arguments as they are written."""
    values: dict[str, list[str]] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise OfflineError(f"{text!r} is no argument; {FORMS}")
        values[key] = value.split(",")
        if len(values[key]) > 1 and ":" in value:
            raise OfflineError(f"{key} is {value!r}: a tensor has one size; axes are joined by x, as in fp32:300x777")
    from triton.backends.ascend.compiler import NPUOptions

    unknown = set(values) - set(kernel.arg_names) - set(NPUOptions.__dataclass_fields__)
    if unknown:
        name = kernel.__name__
        raise OfflineError(f"kernel {name} has no argument {min(unknown)}; it has {', '.join(kernel.arg_names)}")
    return values


def is_recording(target: str) -> bool:
    """Whether a target is `FILE` or `FILE::LAUNCH` with a file of recorded launches."""
    path = Path(target.partition("::")[0])
    return path.suffix != ".py" and path.is_file()


def save(path: Path, calls: Sequence[KernelCall]) -> None:
    """Write launches of kernels to a file, which is a target of commands: `FILE`, `FILE::KERNEL`, `FILE::NUMBER`."""
    import torch

    kept = [
        {
            "file": str(call.path.absolute()),
            "kernel": call.kernel.__name__,
            **{name: getattr(call, name) for name in ("given", "grid", "configuration", "recorded")},
        }
        for call in calls
    ]
    torch.save(kept, path)


def _replayed(target: str, given: Sequence[str], grid: str | None) -> list[KernelCall]:
    """The recorded launches that a target names: all, the one of a number, or the first of a kernel."""
    import pickle

    import torch

    path, _, wanted = target.partition("::")
    try:
        kept = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise OfflineError(f"{path} is no file that npu-offline run --record has written: {error}") from None
    found = [each for number, each in enumerate(kept) if wanted in ("", str(number), each["kernel"])]
    if not found:
        names = ", ".join(f"{number} ({each['kernel']})" for number, each in enumerate(kept))
        raise OfflineError(f"{path} has no launch {wanted!r}; it has {names or 'none'}")
    calls = []
    for each in found[:1] if wanted else found:
        file, module, decorated = find(f"{each['file']}::{each['kernel']}")
        kernel = jit_function(decorated)
        values = _values(kernel, given)
        recorded = {name: tensor for name, tensor in each["recorded"].items() if name not in values}
        about = {**each["given"], **values}, grid or each["grid"], vars(module), each["configuration"]
        calls.append(KernelCall(file, kernel, *about, recorded=recorded))
    return calls


def tuned_call(calls: Sequence[KernelCall]) -> tuple[str, Callable[..., None], Sequence[Mapping[str, Any]]]:
    """What `tune.search` takes.

    Raises:
        OfflineError: no argument has several values, and the kernel has no configurations.
    """
    call, choices = calls[0], calls[0].choices()
    if len(calls) > 1:
        return str(call.kernel.__name__), call.launch, [each.configuration for each in calls]
    if not choices:
        raise OfflineError("nothing can be tuned: give an argument several sizes, the one in use first: BLOCK=1024,512,2048")
    return call.label, call.launch, combinations(choices)
