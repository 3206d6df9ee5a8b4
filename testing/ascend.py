"""What the Ascend compilers make of an operator's kernels, and how many bytes they move: no chip, and no time, involved.

from testing.ascend import *            # the marks of such tests, and questions, each asked of the module's table for it
launches_of = partial(launches, __file__)
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import npu_offline
import npu_tiling
import pytest
import torch
from npu_offline import VERSIONS, LaunchRecord, compile_kernel, supported
from npu_offline.check import load_calls
from npu_offline.toolchain.compilation import as_record, compile_linalg, front_end_of
from npu_tiling import plans
from torch import Tensor

from .memory import guarded
from .operators.case import asked

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

__all__ = [
    "pytestmark",
    "test_compiling_depends_on_no_size_of_a_batch",
    "test_nothing_outside_the_tensors_is_written",
    "test_other_chips_give_the_same_result",
    "test_programs_in_any_order_and_at_once_give_the_same_bits",
    "test_the_widest_tile_that_is_declared_to_fit_does",
    "test_tiles_fit_and_are_double_buffered",
]
REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]
FAMILIES = ("Ascend910B4", "Ascend950PR_957b")  # a chip of each
Results = Callable[[], Sequence[Tensor]]


def labels(table: Iterable[str]) -> list[Named]:
    """Rows that are a word each."""
    return [Named(label) for label in table]


class Named(NamedTuple):
    """A row of a table that is a label of `ascend_calls.py`."""

    name: str


class Batches(NamedTuple):
    """A call of a batch's sizes, several of these, and how many kernels are compiled for all of them."""

    name: str
    call: Callable[..., object]
    sizes: Sequence[tuple[int, ...]]
    kernels: int


class Computed(NamedTuple):
    """A call with results, their check, and how many tensors it allocates at least."""

    name: str
    run: Results
    check: Callable[[Sequence[Tensor]], object] = lambda found: None
    tensors: int = 1


class Declared(NamedTuple):
    """A tile of which the widest that is declared to fit does: its declared bytes, and whether it compiles, of its width.

    Attributes:
        name: of the test.
        soc: the chip.
        declared: the bytes that a tile of some columns is declared to take.
        fits: whether every compiler for the chip takes it; of `tight` ones, also in so many `tries`.
        first: columns are this and multiples of 16 more.
        most: columns, where wider ones are not chosen.
        tight: whether a tile that is a third wider does not fit.
        marks: of the test: one case is tried for every change.
    """

    name: str
    soc: str
    declared: Callable[[int], int]
    fits: Callable[..., bool]
    first: int = 0
    most: int = 2**17
    tight: bool = False
    marks: Any = pytest.mark.nightly


@functools.cache
def launches(file: str, label: str, soc: str = FAMILIES[0]) -> list[LaunchRecord]:
    """What a call of the package's `ascend_calls.py` launches; `file`: one beside it."""
    with npu_offline.record(soc) as records:
        dict(load_calls(Path(file).parents[1]))[label]()
    return list(records)


def moved(launch: Any) -> int:
    """The bytes that a launch reads and writes."""
    return sum(traffic.read + traffic.written for traffic in launch.arguments.values())


def changed(record: LaunchRecord, constants: Mapping[str, object]) -> dict[str, object]:
    """A recorded launch's constants, with others for those that its kernel has."""
    return {name: constants.get(name, value) for name, value in record.constants.items()}


def required(record: LaunchRecord, constants: Mapping[str, object], toolchain: str = "1.1.0", **options: object) -> int:
    """The Unified Buffer that a compiler asks for, where it refuses a tile and has reused every buffer that it can."""
    given, more = changed(record, constants), {**record.options, **options}
    report = compile_kernel(record.kernel, record.signature, given, soc=FAMILIES[0], toolchain=toolchain, options=more)
    assert not report.fits and report.required_ub_bytes is not None
    return report.required_ub_bytes


def widest(declared: Callable[[int], int], soc: str, *, step: int = 16, first: int = 0, most: int = 2**17) -> int:
    """The largest of first + step, first + 2 * step, ... below `most` whose declared bytes fit on the chip."""
    widths = range(first + step, most, step)
    place = bisect.bisect_right(widths, npu_tiling.soc(soc).ub_bytes, key=declared)
    if not 0 < place < len(widths):
        raise ValueError(f"declared bytes say of no width below {most} that it is the widest that fits")
    return widths[place - 1]


def fits_everywhere(
    record: LaunchRecord,
    constants: Mapping[str, object],
    soc: str,
    *,
    options: Mapping[str, object] | None = None,
    kernel: JITFunction | None = None,
    tries: int = 1,
) -> bool:
    """Whether every toolchain for the chip compiles a recorded kernel with other constants.

    Args:
        record: a launch, which has the kernel, the types of its arguments and its constants.
        constants: those that differ.
        soc: a name of `npu_tiling.SOCS`.
        options: compiler options; None: the record's.
        kernel: another kernel with the same arguments; None: the record's.
        tries: compilations by each.
    """
    changes = changed(record, constants)
    compiled = as_record(kernel or record.kernel, record.signature, changes, record.options if options is None else options)
    front_end = front_end_of(compiled)
    return all(
        compile_linalg(*front_end, compiled.options, soc, toolchain, number).fits
        for toolchain in VERSIONS
        if supported(soc, toolchain)
        for number in range(tries)
    )


@asked(table="TILES", rows=labels)
@pytest.mark.uncollected("the toolchain has no such target", lambda soc, toolchain: not supported(soc, toolchain))
@pytest.mark.parametrize("toolchain", VERSIONS)
@pytest.mark.parametrize("soc", FAMILIES)
def test_tiles_fit_and_are_double_buffered(request: pytest.FixtureRequest, soc: str, toolchain: str, case: Named) -> None:
    """TILES: labels of calls. The module's function `may_lose_a_buffer` says of what, and `check_report` asks more."""
    may_lose_a_buffer = getattr(request.module, "may_lose_a_buffer", lambda record, soc, toolchain: False)
    check_report = getattr(request.module, "check_report", lambda record, report: None)
    for record in launches(str(request.path), case.name, soc):
        report = compile_kernel(record, soc=soc, toolchain=toolchain)
        assert report.fits, report.message
        one_buffer = record.options.get("multibuffer") is False or may_lose_a_buffer(record, soc, toolchain)
        assert report.double_buffered is not False or one_buffer
        check_report(record, report)


@asked(table="INDEPENDENT")
def test_compiling_depends_on_no_size_of_a_batch(case: Batches) -> None:
    kernels = set()
    for sizes in case.sizes:
        with npu_offline.record(FAMILIES[0]) as records:
            case.call(*sizes)
        kernels |= {(each.name, str(each.signature), str(each.constants), str(each.divisible)) for each in records}
    assert len(kernels) == case.kernels


@asked(table="ON_OTHER_CHIPS")
@pytest.mark.parametrize("soc", ["Ascend910B1", "Ascend950DT_95A1"])
def test_other_chips_give_the_same_result(soc: str, case: Computed) -> None:
    with npu_offline.emulate(soc):
        case.check(case.run())


@asked(table="IN_ANY_ORDER")
def test_programs_in_any_order_and_at_once_give_the_same_bits(case: Computed) -> None:
    results = []
    for threads, shuffle in ((1, None), (1, 1), (2, 2)):
        with npu_offline.emulate(FAMILIES[0], threads=threads, shuffle=shuffle):
            results.append(case.run())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@asked(table="GUARDED")
def test_nothing_outside_the_tensors_is_written(case: Computed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that the operator allocates stands between guard values."""
    checks = []

    def guarding(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor, check = guarded(tuple(shape), dtype, device)
        checks.append(check)
        return tensor.as_strided(shape, strides)

    monkeypatch.setattr(plans, "empty_strided", guarding)
    with npu_offline.emulate(FAMILIES[0]):
        found = case.run()
    assert len(checks) >= case.tensors
    for check in checks:
        check()
    case.check(found)


@asked(table="DECLARED")
def test_the_widest_tile_that_is_declared_to_fit_does(case: Declared) -> None:
    """With every compiler; where `tight`, one that is a third wider does not with some: rows would be split that fit.

    Near the limit of an Ascend950's buffer 1.1.0 refuses a kernel in some compilations, and takes it in others.
    """
    width = min(case.most, widest(case.declared, case.soc, first=case.first))
    assert case.fits(width), f"{width} columns are declared to fit"
    if case.tight:
        wider = width * 4 // 3 // 16 * 16
        assert not case.fits(wider, tries=12), f"{wider} columns fit, and are declared not to"
