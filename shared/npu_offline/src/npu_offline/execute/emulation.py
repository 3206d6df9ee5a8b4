"""`emulate`: launches on CPU tensors run on this host."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import npu_tiling

from ..errors import OfflineError
from ..launches import Emulation
from ..toolchain.compilers import DEFAULT, tool
from ..toolchain.triton_ascend import require_triton_ascend
from .idle import decorate_without_devices, no_benchmark, warn_once
from .launcher import Launcher
from .settings import RunningEmulation, running

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp


_lock, _threads = threading.Lock(), list[int]()  # of open blocks

decorate_without_devices()


@contextlib.contextmanager
def emulate(
    soc: str = "Ascend910B4",
    *,
    threads: int | None = None,
    shuffle: int | None = None,
    toolchain: str = DEFAULT,
    races: bool = False,
    ledgers: bool = False,
    final: bool = False,
    checks: bool = False,
    distinct: bool = False,
    keep_going: bool = False,
    accesses: bool = False,
    compilation: int = 0,
    meaning: Literal["", "only", "other", "races", "beside"] = "",
    mutate: Callable[[ModuleOp], object] | None = None,
) -> Iterator[Emulation]:
    """Run Triton kernels that are launched on CPU tensors as the Ascend compiler sees them, until the block ends.

    The Linalg IR that triton-ascend makes of a kernel runs natively on the host: same tiles, same DMA transfers, same
    program grid. Blocks nest; the innermost counts.

    It applies to the whole process: every launch of every thread is emulated, Triton's active driver is replaced, and
    `npu_tiling.device_for` of a CPU tensor returns this chip. Another thread cannot have a block of its own meanwhile.

    Args:
        soc: the chip to be, a name of `npu_tiling.SOCS`.
        threads: host threads that run the programs of a grid; None for all cores, 1 for program order.
        shuffle: seed for a random program order; None for ascending order.
        toolchain: the compiler version whose passes are used.
        races: refuse launches in which two programs access one address, unless all read it or all update it atomically, in
            any order of programs. Takes two to four times the memory of the arguments.
        ledgers: count how each argument is used: distinct bytes, contiguous pieces, lengths of transfers.
        final: run the module that the compiler of `toolchain` makes for `soc`, not the Linalg IR.
        checks: at each launch, follow pipes and flags, compare every access of a buffer with those before, run again with
            different unwritten memory, and compare the results with those of the Linalg IR. Implies `final`; programs run
            one after another.
        distinct: with checks, run the first and the last program of each grid, and the programs that take a step that no
            program before them takes: an instruction, the sizes and on-chip addresses of its operands, and the instruction
            before; scalar operands do not count. The scalar code of all programs runs, and their accesses to global memory
            are checked against the bounds of the arguments. Programs that are not run leave their part of the results
            unwritten, except integers.
        keep_going: put the findings of the checks in `Launch.notes` instead of raising.
        accesses: with checks, note which buffers of the Unified Buffer each instruction of the first program accesses, in
            `Launch.accesses`.
        compilation: another number compiles kernels again: some compilers make several modules of one input, with the same
            operations at other addresses.
        meaning: "only": execute the kernel's TTIR, as Triton itself defines it, in place of the Linalg IR; no compiler for
            a chip takes part. "races": the same, but an error where programs race. "other": the same in fp64, with other
            numbers where Triton leaves a number undefined. "beside": execute it after each launch from Linalg IR, on the
            same inputs; a difference is a finding in `Launch.notes`, an error without `keep_going`.
        mutate: changes each parsed final module before it runs, to test that the checks find the defect. Nothing is taken
            from the cache of shared objects.

    Yields:
        The launches so far with their global memory traffic.

    Raises:
        OfflineError: options do not go together, or another thread is inside a block.
        ToolchainMissingError: the toolchain has not been fetched, or triton-ascend or a C compiler is missing.
        OutOfBoundsError: at a launch that accessed memory outside the storage of its arguments.
        RaceError: at a launch whose programs race, if `races` is given.
        EndlessLoopError: at a launch of which a program takes more than 60 s of processor time.
        UnsupportedError: at a launch that uses something that only the chip has.
        FindingsError: at a launch whose final module is wrong, if `checks` is given.
    """
    if threads is not None and threads < 1:
        raise OfflineError(f"threads is {threads}, must be at least 1")
    if meaning and (final or checks):
        raise OfflineError(f"meaning is {meaning!r} with a final module: it stands in place of the Linalg IR, or beside it")
    if accesses and not checks:
        raise OfflineError("accesses is True without checks: only checks look at them")
    if distinct and not checks:
        raise OfflineError("distinct is True without checks: only what is checked is run in part")
    device = npu_tiling.soc(soc)
    tool(toolchain, "bishengir-opt")
    require_triton_ascend()
    from .backend import CHECKED, FINAL, MEANING, HostDriver, emulated_target
    from .launcher import MeaningLauncher
    from .native import runtime

    runtime()
    threads = threads or len(os.sched_getaffinity(0))
    emulation = RunningEmulation(
        soc,
        toolchain,
        threads,
        shuffle,
        races=races,
        ledgers=ledgers,
        checks=checks,
        distinct=distinct,
        keep_going=keep_going,
        accesses=accesses,
        meaning=meaning,
    )
    alone = meaning in ("only", "other", "races")
    target = emulated_target(
        soc, toolchain, MEANING if alone else CHECKED if checks else FINAL if final else "", mutate, compilation
    )
    driver = HostDriver(target, device, MeaningLauncher if alone else Launcher)
    with _of_one_thread(), active_driver(driver), npu_tiling.use_device(device, emulated=True):
        running.append(emulation)
        try:
            yield emulation
        finally:
            running.remove(emulation)


@contextlib.contextmanager
def _of_one_thread() -> Iterator[None]:
    """Until the block ends, no other thread opens one."""
    thread = threading.get_ident()
    with _lock:
        if _threads and _threads[-1] != thread:
            raise OfflineError(
                "another thread is inside an emulate block, which emulates launches of every thread: share it"
            )
        _threads.append(thread)
    try:
        yield
    finally:
        _threads.remove(thread)


@contextlib.contextmanager
def active_driver(driver: Any) -> Iterator[None]:
    """Until the block ends, Triton's active driver is this one, and autotuning takes the first configuration."""
    from triton import testing
    from triton.runtime.driver import driver as config

    warn_once()
    before = config.active, testing.do_bench
    config.set_active(driver)
    testing.do_bench = no_benchmark()
    try:
        yield
    finally:
        config.set_active(before[0])
        testing.do_bench = before[1]
