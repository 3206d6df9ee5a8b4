"""Launching a kernel with little work on the host, and what follows where its tile does not fit.

At the end: plans are listed in place of being run (`dry_run`), or while they run (`watch_launches`). Lists are process-wide:
autograd runs the backward of accelerator tensors on threads of its own, and a list of one thread would not have it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller, or_
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from . import doctor as installation
from .budget import GPUResourcesError, TileTooLargeError, UnifiedBufferError, persistent_grid
from .chips import Device, dry_runs, use_device
from .direct import ALIGNMENT, DirectCall, Watchers, always_specialised, observe, specialisation, unspecialised
from .doctor import BY_CANN

if TYPE_CHECKING:
    import torch

_numbers = itertools.count()
_numbered: dict[Hashable, int] = {}


def _number(key: Hashable) -> int:
    """The same number for equal keys: a number hashes faster than a nested tuple."""
    return _numbered.setdefault(key, next(_numbers))


class Tiling:
    """How a launch is cut up, as a table of a package chooses it.

    It has also `why`, the reason, and `decided_at`, file and line of the table's row.

    Attributes:
        way: the method that the table's row stands for; empty where the table has one method alone.
    """

    way: Any = ""

    @property
    def constants(self) -> Mapping[str, Any]:
        """`tl.constexpr` parameters that follow from the tiling, by name: a launch takes those that its kernel has."""
        return {}

    @property
    def options(self) -> Mapping[str, Any]:
        """Compiler options."""
        return {}

    def smaller(self) -> Any:
        """The next smaller tiling, for a compiler or device that needs more on chip than was declared; None at the end."""
        return None


@dataclass(frozen=True, kw_only=True)
class CountTiling(Tiling):
    """Blocks for any number of rows or numbers, from which `grid` follows.

    Attributes:
        device: the chip.
        blocks: the kernel's `tl.constexpr` that follow from the tiling, by name.
        per_program: how many rows or numbers a program takes at a time, of one block of columns.
        column_blocks: how many blocks of columns a row has.
        per_core: programs resident on a core, which stride over tiles; 0: on CUDA a program for each tile, on Ascend one.
        warps: warps of a program (CUDA).
        way, why, decided_at: as `Tiling` has them.
    """

    device: Device = field(repr=False)
    blocks: tuple[tuple[str, int], ...]
    per_program: int = 1
    column_blocks: int = 1
    per_core: int = 0
    warps: int = 4
    way: Any = ""
    why: str
    decided_at: str

    @property
    def constants(self) -> Mapping[str, Any]:
        return dict(self.blocks)

    @property
    def options(self) -> Mapping[str, Any]:
        return {"num_warps": self.warps} if self.device.kind == "cuda" else {}

    def grid(self, count: int) -> int:
        """Programs for so many rows or numbers."""
        tiles = -(-count // self.per_program) * self.column_blocks
        if self.device.kind == "cuda" and not self.per_core:
            return min(tiles, self.device.max_grid)
        return persistent_grid(tiles, self.device, per_core=self.per_core or 1)


@dataclass(frozen=True, eq=False)
class Decision:
    """A tiling that was chosen for one or more launches of a plan.

    Attributes:
        name: names the decision in `Plan.tiles` and `Plan.replaced`, in warnings and in errors.
        tiling: what was chosen.
        constants: all of the kernel's `tl.constexpr` parameters, by name.
        options: compiler options.
        key: equal for decisions whose constants and options are equal.
        first_step: the number of the first step that depends on the decision.
    """

    name: str
    tiling: Any
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    key: Hashable
    first_step: int = 0

    @classmethod
    def of(
        cls, name: str, tiling: Tiling, flags: Mapping[str, Any], first_step: int = 0, names: Sequence[str] | None = None
    ) -> Decision:
        """That of a tiling; `flags`: the constants that the tiling does not choose; `names`: those that the kernel has."""
        constants, options = {**tiling.constants, **flags}, tiling.options
        if names is not None and len(names) < len(constants):
            constants = {each: constants[each] for each in names if each in constants}
        # With their types: 1, 1.0 and True are equal.
        values = (*constants.values(), *options.values())
        key = _number((tuple(constants), tuple(options), values, tuple(map(type, values))))
        return cls(name, tiling, constants, options, key, first_step)


replaced: dict[tuple[str, Any], Any] = {}
"""What takes the place of a refused tiling, in all later plans: by the name of its decision and the tiling."""

_UB_OVERFLOW = re.compile(r"ub overflow, requires (\d+) bits while (\d+) bits available", re.IGNORECASE)


def _ub_overflow(error: BaseException) -> re.Match[str] | None:
    """The Ascend compiler's complaint, in `error` or in what caused it, that a kernel needs more Unified Buffer.

    Its note that it tries again after an overflow ("Ub overflow detected; ... retrying") is no complaint: what comes of the
    trial may be an error of another kind.
    """
    for cause in _causes(error):
        said = [str(cause)]
        for stream in (getattr(cause, "stderr", None), getattr(cause, "stdout", None)):
            said.append(stream.decode(errors="replace") if isinstance(stream, bytes) else str(stream))
        for text in said:
            complaint = _UB_OVERFLOW.search(text)
            if complaint:
                return complaint
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class Refusal(NamedTuple):
    """Why a launch cannot run with its tile.

    Attributes:
        error: what to raise where there is no smaller tile.
        reason: what exceeds what; a sentence goes on with it after the tile.
        cure: a sentence with what is left to do.
    """

    error: type[TileTooLargeError]
    reason: str
    cure: str

    def without_smaller(self, name: object, tiling: Any) -> TileTooLargeError:
        """The error of a launch for which there is no smaller tile."""
        return self.error(f"{name}: not even its smallest tile runs: {tiling} {self.reason}. {self.cure}")


_REPORT = "please report this error, with the versions that `python -m npu_tiling` prints"
_CURE_ASCEND = f"Take a CANN whose compiler it was tried with ({', '.join(BY_CANN)}), and {_REPORT}."
_CURE_CUDA = f"Take tensors in a smaller dtype or with shorter rows, or a GPU that has more, and {_REPORT}."


def refusal(error: BaseException) -> Refusal | None:
    """Why a launch failed, if a smaller tile may run; None for any other error."""
    overflow = _ub_overflow(error)
    if overflow:
        needed, available = (int(bits) // 8 for bits in overflow.groups())
        return Refusal(
            UnifiedBufferError,
            f"overflows the Unified Buffer with the installed compiler (it needs {needed} bytes of {available})",
            _CURE_ASCEND,
        )
    exceeded = next((cause for cause in _causes(error) if type(cause).__name__ == "OutOfResources"), None)  # Triton's
    if exceeded is not None:
        return Refusal(GPUResourcesError, f"needs more than this GPU has ({exceeded})", _CURE_CUDA)
    return None


_NEVER = object()
_MOST_PROGRAMS = 65535  # triton-ascend refuses more


class Launcher:
    """One `@triton.jit` kernel, launched on a 1-D grid.

    The compiled kernel is kept, under what the JIT specialises kernels on, and called directly from the third launch on (see
    direct.py), which saves the JIT's look-up. A descriptor is passed on as it is, and Triton's launcher makes a tensor map.
    On CPU tensors, for pointers that are not aligned to 16 bytes, where a profiler has hooked into Triton's launches, and
    where the installed Triton calls its kernels in another way, every launch goes through the JIT.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._plain = unspecialised(kernel)
        # By `_compiled_for`: what the JIT compiled, after the second launch a DirectCall; None: the JIT every time.
        self._calls: dict[Hashable, Any] = {}
        self._places: dict[torch.device, tuple[str, int, Callable[[], int] | None]] = {}
        triton = sys.modules["triton"]
        self._watchers = Watchers(triton, kernel)
        self._driver: Any = getattr(getattr(triton, "runtime", None), "driver", None)
        self._descriptor = descriptor_type()
        # Where PyTorch was built for ROCm, the JIT asks for the sizes of tensors too.
        self._possible = self._watchers.known and self._driver is not None and not sys.modules["torch"].version.hip

    def __call__(
        self,
        grid: int,
        tensors: Sequence[Any],
        scalars: tuple[int | float | None, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
        key: Hashable,
    ) -> None:
        """Launch the kernel.

        Args:
            grid: number of programs.
            tensors: the kernel's first parameters, None where there is none, on CUDA also tuples of tensors and Triton's
                descriptors; the first is a tensor, whose device runs the kernel.
            scalars: the parameters that follow, numbers; None for one that the call does not have.
            constants: the parameters that follow those, `tl.constexpr`, by name.
            options: compiler options (`num_warps` on CUDA, `multibuffer` on Ascend).
            key: equal for two launches only if constants and options are.
        """
        device = tensors[0].device
        place = self._places.get(device)
        if place is None:
            place = self._places[device] = (device.type, device.index, current_device(device.type))
        kind, index, current = place
        if current is not None and index != current():  # Triton launches on the current device, whatever the tensors'
            with getattr(sys.modules["torch"], kind).device(device):
                self(grid, tensors, scalars, constants, options, key)
            return

        def launch_by_jit() -> Any:
            return self._kernel[(grid,)](*tensors, *scalars, **constants, **options)

        if kind == "cpu" or not self._possible or self._watchers or (kind == "npu" and grid > _MOST_PROGRAMS):
            launch_by_jit()
            return
        on_cuda = kind == "cuda"
        pointers, dtypes = self._pointers_on_cuda(tensors) if on_cuda else _pointers_on_npu(tensors)
        if dtypes is None:
            launch_by_jit()
            return
        compiled_for = self._compiled_for(key, index, scalars, dtypes)
        call = self._calls.get(compiled_for, _NEVER)
        if type(call) is DirectCall:
            try:
                call.launch(index, grid, pointers, scalars)
            except TypeError:  # it takes no addresses, and nothing was launched
                self._calls[compiled_for] = None
                launch_by_jit()
                return
        elif call is None:
            launch_by_jit()
        elif call is _NEVER:
            self._calls[compiled_for] = launch_by_jit()
        else:
            arguments = (*tensors, *scalars)
            self._calls[compiled_for] = observe(call, launch_by_jit, grid, arguments, self._streams(kind), index, on_cuda)

    def direct_call(
        self, key: Hashable, grid: int, device: torch.device, dtypes: Sequence[Any], scalars: tuple[Any, ...]
    ) -> tuple[DirectCall, Watchers] | None:
        """How a launch of aligned tensors of these dtypes is called without the JIT; None: through the JIT."""
        if device.type == "cpu" or not self._possible or (device.type == "npu" and grid > _MOST_PROGRAMS):
            return None
        call = self._calls.get(self._compiled_for(key, device.index, scalars, dtypes))
        return (call, self._watchers) if type(call) is DirectCall else None

    def _pointers_on_cuda(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any] | None]:
        """Addresses and dtypes, each a tuple for a tuple; no dtypes where one is not aligned, or not on a GPU."""
        bits, direct = 0, True
        pointers: list[Any] = []
        dtypes: list[Any] = []
        for tensor in tensors:
            if tensor is None:
                pointers.append(None)
                dtypes.append(None)
            elif type(tensor) is tuple:
                addresses = [each.data_ptr() for each in tensor]
                pointers.append(tuple(addresses))
                dtypes.append(tuple([each.dtype for each in tensor]))
                bits = functools.reduce(or_, addresses, bits)
                direct &= all(each.is_cuda for each in tensor)
            elif type(tensor) is self._descriptor:
                pointers.append(tensor)
                dtypes.append((tensor.base.dtype, *tensor.block_shape))
                bits |= tensor.base.data_ptr()
                direct &= tensor.base.is_cuda
            else:
                pointer = tensor.data_ptr()
                pointers.append(pointer)
                dtypes.append(tensor.dtype)
                bits |= pointer
                direct &= tensor.is_cuda  # the JIT refuses others in words, a kernel would read through the address
        return pointers, None if not direct or bits % ALIGNMENT else dtypes

    def _compiled_for(self, key: Hashable, index: int, scalars: tuple[Any, ...], dtypes: Sequence[Any]) -> Hashable:
        """Equal for launches that share a compiled kernel."""
        plain = self._plain[len(dtypes) :] if self._plain else always_specialised(len(scalars))
        return key, index, tuple(specialisation(scalars, plain)), *dtypes

    def _streams(self, kind: str) -> list[Callable[[int], Any]]:
        """Functions that give the current stream, the fastest first: triton-ascend's driver asks torch_npu itself."""
        of_torch = _of_torch_npu("_npu_getCurrentRawStream") if kind == "npu" else None
        return [*filter(None, [of_torch]), self._driver.active.get_current_stream]


@functools.cache
def descriptor_type() -> Any:
    """Triton's class of descriptors for TMA that the host makes; None where the installed Triton has none."""
    try:
        return importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    except ImportError:
        return None


def _pointers_on_npu(tensors: Sequence[Any]) -> tuple[Sequence[Any], list[Any] | None]:
    """The tensors, since triton-ascend's launcher asks them for their sizes while CANN profiles; dtypes as on CUDA."""
    present = [tensor for tensor in tensors if tensor is not None]
    bits = functools.reduce(or_, map(methodcaller("data_ptr"), present), 0)
    return tensors, None if bits % ALIGNMENT else [None if tensor is None else tensor.dtype for tensor in tensors]


def current_device(kind: str) -> Callable[[], int] | None:
    """What says which device is current; None for a CPU."""
    if kind == "cpu":
        return None
    torch = sys.modules["torch"]
    if kind == "cuda":
        from .dispatch import current_cuda_device

        return current_cuda_device
    directly = _of_torch_npu("_npu_getDevice") if kind == "npu" else None
    return directly or getattr(torch, kind).current_device


def _of_torch_npu(name: str) -> Callable[..., int] | None:
    """A function of torch_npu in C++, which PyTorch's API for it calls after some Python."""
    return getattr(getattr(sys.modules.get("torch_npu"), "_C", None), name, None)


class MissingTritonError(ImportError):
    """A kernel was to be launched and no Triton works here; the message has the commands that install one."""


def import_kernels(module: str, package: str) -> ModuleType:
    """Import a module of device code, or say how to install what it needs.

    Args:
        module: full name of the module, which imports triton.
        package: the pip name of the package that it belongs to.

    Raises:
        MissingTritonError: no Triton is installed, or the one that is cannot be imported; the message has the commands.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            reason = installation.triton_problem() or installation.missing_wheel()
            raise MissingTritonError(
                f"{package} needs Triton to run on an accelerator: pip install '{package}[npu]' on Ascend, "
                f"pip install '{package}[cuda]' on CUDA (never both in one environment)." + (f" {reason}" if reason else "")
            ) from None
        if "triton" in sys.modules or (isinstance(error, ModuleNotFoundError) and not _is_of_triton(error.name)):
            raise
        problem = installation.triton_problem()
        if problem is None:
            raise
        raise MissingTritonError(f"{package} cannot import Triton. {problem}") from error


def _is_of_triton(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "triton"


class Kernels:
    """A package's kernels, by module and name; each is imported when it is first launched.

    Attributes:
        package: its full name.
    """

    def __init__(self, package: str, distribution: str) -> None:
        """For the modules of `package` (a full name), installed as `distribution`."""
        self.package, self._distribution = package, distribution
        self._launchers: dict[tuple[str, str], Launcher] = {}

    def launch(
        self,
        module: str,
        kernel: str,
        decision: Decision,
        grid: int,
        tensors: Sequence[Any],
        scalars: tuple[int | float | None, ...],
    ) -> None:
        """Launch `kernel` of `module`: tensors, then scalars, then the decision's constants (see `Launcher.__call__`)."""
        launcher = self._launchers.get((module, kernel))
        if launcher is None:
            launcher = self._launchers[module, kernel] = Launcher(self._import(module, kernel))
        launcher(grid, tensors, scalars, decision.constants, decision.options, decision.key)

    def direct_call(
        self,
        module: str,
        kernel: str,
        decision: Decision,
        grid: int,
        device: torch.device,
        dtypes: Sequence[Any],
        scalars: tuple[Any, ...],
    ) -> tuple[DirectCall, Watchers] | None:
        """How `launch` would call the kernel without Triton's JIT (see `Launcher.direct_call`)."""
        launcher = self._launchers.get((module, kernel))
        return None if launcher is None else launcher.direct_call(decision.key, grid, device, dtypes, scalars)

    def _import(self, module: str, kernel: str) -> Any:
        found = getattr(import_kernels(f"{self.package}.{module}", self._distribution), kernel)
        if isinstance(found, FunctionType):  # device.py found no Triton that can be imported
            import_kernels("triton", self._distribution)
        return found


@functools.cache
def kernels_of(module: str) -> tuple[Kernels, str]:
    """The kernels of the package that a module belongs to, and the module's name in it.

    A package of ours may be a part of another one, as in a kernel repository of the Hugging Face Hub.
    """
    parts = module.split(".")
    end = next((i for i, part in enumerate(parts) if part.startswith("npu_")), 0) + 1
    return _of_package(".".join(parts[:end])), ".".join(parts[end:])


@functools.cache
def _of_package(package: str) -> Kernels:
    return Kernels(package, package.rpartition(".")[2].replace("_", "-"))


@functools.cache
def signature_of(kernel: Any) -> tuple[str, str, tuple[str, ...], tuple[str, ...]]:
    """A kernel's module and name, its parameters that are not `tl.constexpr`, and those that are.

    Another annotation, as `tl.int64`, is the type of a number, and has a name.
    """
    function = getattr(kernel, "fn", kernel)
    of = inspect.signature(function).parameters.values()
    constant = [
        each.name
        for each in of
        if each.annotation is not inspect.Parameter.empty and getattr(each.annotation, "name", "constexpr") == "constexpr"
    ]
    return function.__module__, function.__name__, tuple(e.name for e in of if e.name not in constant), tuple(constant)


class PlannedCall(NamedTuple):
    """A call whose plan was run, or would have been.

    Attributes:
        direction: "forward" or "backward": whether autograd's engine asked for it.
        plan: what it does, a `Plan` of plans.py.
        replan: plans it again, with these `Plan.replaced`.
    """

    direction: str
    plan: Any
    replan: Callable[[Mapping[Any, Any]], Any]

    @property
    def launches(self) -> Any:
        """The plan's steps that are launches."""
        return self.plan.launches


active: list[PlannedCall] | None = None
"""Where plans are listed now; None: nowhere."""


def list_plan(plan: Any, replan: Callable[[Mapping[Any, Any]], Any]) -> None:
    """List a plan, if plans are listed."""
    if active is not None:
        from .dispatch import is_backward

        active.append(PlannedCall("backward" if is_backward() else "forward", plan, replan))


@contextlib.contextmanager
def dry_run(chip: Device) -> Iterator[list[PlannedCall]]:
    """Operators list their plans for `chip` in place of running them, until the block ends.

    Tensors may be on the meta device, where PyTorch's own operators compute nothing either: a call of any size takes
    neither memory nor a device, and results have shapes and no values. Triton need not be installed.
    """
    with use_device(chip, emulated=True), watch_launches() as calls:
        dry_runs.append(chip)
        try:
            yield calls
        finally:
            dry_runs.remove(chip)


@contextlib.contextmanager
def watch_launches() -> Iterator[list[PlannedCall]]:
    """Operators list their plans while these run, until the block ends."""
    global active
    before, calls = active, list[PlannedCall]()
    active = calls
    try:
        yield calls
    finally:
        active = before
