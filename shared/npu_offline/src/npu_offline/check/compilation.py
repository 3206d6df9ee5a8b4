"""Every kernel that a package launches, compiled for every chip by every toolchain."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import npu_tiling

from ..errors import OfflineError
from ..launches import LaunchRecord, describe_tile
from ..reports import SPACES, Report
from ..toolchain.compilation import compile_linalg, front_end_of
from ..toolchain.compilers import supported
from .calls import Call, launches_of
from .stopped import is_refusal

_FEW = 6  # compilations
_MOST_TRIED = 12  # compilations for one kernel


@dataclass(frozen=True)
class Job:
    """One kernel with one set of constants for one chip and toolchain."""

    kernel: str
    tile: str
    ttir: str
    linalg: str
    options: tuple[tuple[str, object], ...]
    soc: str
    toolchain: str


@dataclass(frozen=True)
class Result:
    """The result of a job: a report, or why there is none."""

    job: Job
    report: Report | None
    problem: str = ""
    unsupported: bool = False

    @property
    def ok(self) -> bool:
        """False if the kernel cannot run on that chip although the toolchain knows the chip."""
        return self.unsupported or (self.report is not None and self.report.fits)


def jobs_for(
    calls: Sequence[Call], socs: Sequence[str], toolchains: Sequence[str], refused: dict[str, str] | None = None
) -> list[Job]:
    """The distinct compilations that the calls need.

    Args:
        calls, socs, toolchains: what is compiled, for what, by what.
        refused: as in `launches_of`.

    Raises:
        OfflineError: the calls launched no kernel at all.
    """
    jobs: dict[Job, None] = {}
    recorded: dict[npu_tiling.Device, list[tuple[str, str, str, str, tuple[tuple[str, object], ...]]]] = {}
    for soc in socs:
        chip = dataclasses.replace(npu_tiling.soc(soc), name="")  # chips that differ in name alone are tiled alike
        if chip not in recorded:
            recorded[chip] = [describe(launch) for launch in launches_of(calls, soc, refused)]
        for kernel, tile, ttir, linalg, options in recorded[chip]:
            for toolchain in toolchains:
                jobs[Job(kernel, tile, ttir, linalg, options, soc, toolchain)] = None
    if not jobs and not refused:
        raise OfflineError("the calls launched no kernel: CPU tensors must reach the Triton kernels under emulation")
    return list(jobs)


def describe(launch: LaunchRecord) -> tuple[str, str, str, str, tuple[tuple[str, object], ...]]:
    """The first five attributes of a `Job` that compiles a launch."""
    name, ttir, linalg = front_end_of(launch)
    return name, describe_tile(launch), ttir, linalg, tuple(sorted(launch.options.items()))


def run(job: Job) -> Result:
    """Compile one job."""
    try:
        if not supported(job.soc, job.toolchain):
            return Result(job, None, f"toolchain {job.toolchain} has no target {job.soc}", unsupported=True)
        options = dict(job.options)
        return Result(job, compile_linalg(job.kernel, job.ttir, job.linalg, options, job.soc, job.toolchain))
    except OfflineError as error:
        return Result(job, None, str(error))


def largest_that_fit(record: LaunchRecord, soc: str, toolchain: str) -> str:
    """What a kernel that does not fit could have: "the largest BLOCK that does is 2048", or nothing.

    Each constant is halved, the others left as they are, until the kernel fits, or until the compiler says the same as
    before: then it scales no tile.

    Args:
        record: a launch of it.
        soc, toolchain: what it is compiled for, and by what.
    """
    left, found, whole = _MOST_TRIED, dict[str, int](), _tried(record, soc, toolchain)
    for name, size in record.constants.items():
        before = whole
        while left and before is not None and type(size) is int and size > 1:
            size, left = size // 2, left - 1
            constants = {**record.constants, name: size}
            report = _tried(dataclasses.replace(record, constants=constants), soc, toolchain)
            if report is not None and report.fits:
                found[name] = size
            before = None if report is None or report.fits or report.message == before.message else report
    return ", or ".join(f"the largest {name} that does is {size}" for name, size in found.items())


def _tried(record: LaunchRecord, soc: str, toolchain: str) -> Report | None:
    """What a compiler says of a kernel; None where it is refused."""
    try:
        return run(Job(*describe(record), soc, toolchain)).report
    except Exception as error:
        if not is_refusal(error):
            raise
        return None


def run_all(jobs: Sequence[Job], workers: int | None = None, *, every_chip: bool = False) -> Iterator[Result]:
    """Compile all jobs in parallel processes; results come as they are ready.

    Args:
        jobs: what to compile.
        workers: processes; None for one per core.
        every_chip: compile for each chip. Otherwise chips that the compiler describes alike in all but their name share
            one compilation, and the report is repeated under each name.
    """
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job if every_chip else _what_matters(job), []).append(job)
    with new_pool(len(groups), workers) as pool:
        pending = {pool.submit(run, group[0]): group for group in groups.values()}
        for future in as_completed(pending):
            result = future.result()
            for job in pending[future]:
                report = result.report and dataclasses.replace(result.report, soc=job.soc)
                yield dataclasses.replace(result, job=job, report=report)


def new_pool(tasks: int, workers: int | None = None) -> Executor:
    """What runs compilations in parallel: threads, where they are so few that starting a process takes longer.

    Args:
        tasks: how many there are.
        workers: at a time; None for one per core.
    """
    workers = workers or len(os.sched_getaffinity(0))
    if workers == 1 or tasks <= _FEW:
        return ThreadPoolExecutor(workers)
    # Not forked: the compiler's front end has started threads in this process.
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def _what_matters(job: Job) -> object:
    """What the result of a job depends on: of the chip only its buffers and cores."""
    chip = npu_tiling.soc(job.soc)
    sizes = (chip.arch, chip.vector_cores, chip.cube_cores, *(getattr(chip, f"{space}_bytes") for space in SPACES))
    return sizes, supported(job.soc, job.toolchain), dataclasses.replace(job, soc="", tile="")
