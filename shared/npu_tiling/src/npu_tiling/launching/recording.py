"""Launches as they are asked for: listed in place of being made (`dry_run`), or while they are made (`watch_launches`)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..chips.detection import dry_device
from ..chips.devices import Device
from ..places import place_of
from .spec import LaunchSpec, Tiled

_numbers = itertools.count()  # of memory


@dataclass(frozen=True, kw_only=True)
class Argument:
    """A tensor that a launch was given, without its memory.

    Attributes:
        dtype: PyTorch's name of it, as "bfloat16".
        shape, strides: in elements.
        offset: bytes from the start of its memory.
        memory: a number, equal for tensors that share memory.
        block: of a descriptor, the shape of its tiles; empty for a pointer.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    memory: int
    block: tuple[int, ...] = ()


Attempt = tuple[object, Any]  # the name and the spec that `launch_with_fallback` is given, or a plan's decision and tiling


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedLaunch:
    """One launch of a kernel.

    Attributes:
        module: full name of the module of the kernel.
        kernel: its name.
        grid: number of programs.
        arguments: in the kernel's order: numbers, an `Argument` for each tensor, and tuples of those.
        constants: `tl.constexpr` parameters by name.
        options: compiler options.
        tiling: what decided constants, options and grid.
        attempt: what to refuse (`Recorder`) to see the launches that follow where this one overflows; None: there are none.
        called_from: file and line, from the package's folder on, of the code that asked for the launch.
        caller: the function that has that line.
        direction: "forward" or "backward": whether autograd's engine asked for it.
    """

    module: str
    kernel: str
    grid: int
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    tiling: Any
    attempt: Attempt | None
    called_from: str
    caller: str
    direction: str


class Recorder:
    """Lists launches.

    Attributes:
        launches: so far.
        decisions: about calls of several launches, so far: the direction, and what a package's tiling decided.
        runs: whether they are made too.
        refused: attempts in whose place their fallback runs, as if their tile did not fit.
        torch_asked: the plan's line that asks for PyTorch's operators now; empty where none does.
    """

    def __init__(self, *, runs: bool, refused: frozenset[Attempt] = frozenset()) -> None:
        self.launches: list[RecordedLaunch] = []
        self.decisions: list[tuple[str, Any]] = []
        self.runs, self.refused = runs, refused
        self._attempt: Attempt | None = None
        self._asked: tuple[str, str] | None = None
        self.torch_asked = ""

    def plan_asks(self, asked: tuple[str, str], attempt: Attempt | None) -> None:
        """The next launch is a plan's: who asked for it, file and line and function, and what its attempt is called."""
        self._asked, self._attempt = asked, attempt

    def torch_asks(self, place: str) -> None:
        """A plan's line, file and line, asks for PyTorch's operators from now on; empty: whoever calls them does."""
        self.torch_asked = place

    def decided(self, decision: Any) -> None:
        """List a decision about a call of several launches."""
        self.decisions.append(("backward" if is_backward() else "forward", decision))

    @contextlib.contextmanager
    def attempt(self, name: object, spec: LaunchSpec, smaller: Callable[[Any], Tiled | None]) -> Iterator[LaunchSpec]:
        """Marks launches in this block as attempts of a spec, if `smaller` has a fallback; gives the spec that is to run."""
        following = smaller(spec.launch)
        attempt = None if following is None else (name, spec)
        if following is not None and attempt in self.refused:
            spec = LaunchSpec.of(following, spec.flags)
        before, self._attempt = self._attempt, attempt
        try:
            yield spec
        finally:
            self._attempt = before

    def add(self, module: str, kernel: str, grid: int, arguments: tuple[Any, ...], spec: LaunchSpec) -> None:
        """List a launch of a spec."""
        called_from, function = self._asked or caller()
        launch = RecordedLaunch(
            module=module,
            kernel=kernel,
            grid=grid,
            arguments=tuple(map(without_memory, arguments)),
            constants=spec.constants,
            options=spec.options,
            tiling=spec.launch,
            attempt=self._attempt,
            called_from=called_from,
            caller=function,
            direction="backward" if is_backward() else "forward",
        )
        self.launches.append(launch)
        if self._asked is not None:
            self._asked = self._attempt = None


active: Recorder | None = None
"""What lists launches now; process-wide, since autograd runs the backward of accelerator tensors on threads of its own."""


@contextlib.contextmanager
def recorded(recorder: Recorder) -> Iterator[list[RecordedLaunch]]:
    """A recorder lists launches until the block ends. Process-wide."""
    global active
    before, active = active, recorder
    try:
        yield recorder.launches
    finally:
        active = before


@contextlib.contextmanager
def dry_run(chip: Device, recorder: Recorder | None = None) -> Iterator[list[RecordedLaunch]]:
    """Operators decide for `chip` and list their launches in place of making them, until the block ends. Process-wide.

    Tensors may be on the meta device, where PyTorch's own operators compute nothing either: a call of any size takes
    neither memory nor a device, and results have shapes and no values. Triton need not be installed.
    """
    with dry_device(chip), recorded(recorder or Recorder(runs=False)) as launches:
        yield launches


@contextlib.contextmanager
def watch_launches() -> Iterator[list[RecordedLaunch]]:
    """List launches while they are made, until the block ends. Process-wide."""
    with recorded(Recorder(runs=True)) as launches:
        yield launches


def without_memory(argument: Any) -> Any:
    """An argument of a launch, an `Argument` where it is a tensor."""
    if hasattr(argument, "block_shape"):  # a descriptor, which Triton makes of a tensor
        return dataclasses.replace(without_memory(argument.base), block=tuple(argument.block_shape))
    if isinstance(argument, tuple):
        if hasattr(argument, "data_ptr"):  # `Neighbours`, which one pointer stands for
            return without_memory(argument[0])
        return tuple(map(without_memory, argument))
    if not hasattr(argument, "untyped_storage"):
        return argument
    storage = argument.untyped_storage()
    if not hasattr(storage, "npu_tiling_number"):
        storage.npu_tiling_number = next(_numbers)
    return Argument(
        dtype=str(argument.dtype).removeprefix("torch."),
        shape=tuple(argument.shape),
        strides=tuple(argument.stride()),
        offset=argument.storage_offset() * argument.itemsize,
        memory=storage.npu_tiling_number,
    )


def caller(passed_through: Sequence[str] = ()) -> tuple[str, str]:
    """File and line, and the name of the function, of the innermost frame that is outside this package and PyTorch.

    Args:
        passed_through: full names of modules that are passed over too.
    """
    frame = sys._getframe(1)
    over = (__name__.partition(".")[0], "contextlib", "torch")
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in over and module not in passed_through:
            break
        frame = frame.f_back
    code = frame.f_code
    function = getattr(code, "co_qualname", code.co_name).partition(".<locals>")[0]  # Python 3.10 has no qualified names
    return place_of(frame), function


def is_backward() -> bool:
    """Whether autograd's engine is running."""
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._current_graph_task_id() != -1
