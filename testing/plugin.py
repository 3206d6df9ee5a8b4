"""Fixtures and options that the operators' tests share; `npu_place` is npu-offline's or tools/cpu_plugin.py's."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from npu_offline.plugin import Place

    from .properties import Search

pytest_plugins = ["testing.collection"]
_TRIED = "npu_search: examples"
OVERFLOW = "error: ub overflow, requires 1966592 bits while 1572864 bits available!"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("properties")
    group.addoption("--npu-search", choices=("short", "long"), default="short", help="how long properties are tried")
    group.addoption("--npu-seed", type=int, default=0, help="draws other numbers in every test; not 0: in another order too")
    group.addoption("--npu-seconds", type=float, help="a long search of one property takes (default: 100)")
    group.addoption("--npu-shares", type=int, default=1, help="searches of each property, with seeds of their own")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "npu_search" in metafunc.fixturenames:
        metafunc.parametrize("npu_search", range(metafunc.config.getoption("--npu-shares")), indirect=True)
    question = getattr(metafunc.function, "asked", None)
    if question is not None and question.fixture in metafunc.fixturenames:
        cases = question.cases(metafunc.function, metafunc.module)
        rows = [pytest.param(case, id=getattr(case, "name", case), marks=getattr(case, "marks", ())) for case in cases]
        metafunc.parametrize(question.fixture, rows)


def pytest_pycollect_makeitem(collector: pytest.Module, name: str, obj: object) -> list[pytest.Item] | None:
    """Questions of the suite are not for modules without a table of their cases."""
    question = getattr(obj, "asked", None) if inspect.isfunction(obj) else None
    return [] if question is not None and not hasattr(collector.obj, question.table) else None


@pytest.fixture
def npu_poisoned() -> Iterator[None]:
    """Memory that torch allocates without a value is full of NaN, or of the largest integer, during the test."""
    from . import memory

    with memory.poisoned():
        yield


@pytest.fixture
def npu_refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str, Any], bool]], tuple[list[Any], list[Any]]]:
    """A function that has launches refused, as a compiler whose tile overflows does: those of which a condition holds.

    The condition is of a kernel's name and what is launched. Lists of both are returned: of launches refused, and run.
    """
    from npu_tiling import Kernels

    real = Kernels.launch

    def refuse(condition: Callable[[str, Any], bool]) -> tuple[list[Any], list[Any]]:
        refused: list[Any] = []
        ran: list[Any] = []

        def launch(self: Any, module: Any, kernel: str, spec: Any, *arguments: Any) -> None:
            overflows = condition(kernel, spec)
            (refused if overflows else ran).append((kernel, spec))
            if overflows:
                raise RuntimeError(OVERFLOW)
            real(self, module, kernel, spec, *arguments)

        monkeypatch.setattr("npu_tiling.launch.replaced", {})
        monkeypatch.setattr(Kernels, "launch", launch)
        return refused, ran

    return refuse


@pytest.fixture
def npu_opcheck(npu_place: Place) -> Callable[..., object]:
    """`torch.library.opcheck`; on an NPU without the check of autograd registration, which PyTorch lacks there.

    On the emulated NPU results are held against the schema and the fake functions. Autograd and tracing see CPU tensors
    there, as on a CPU, where every check runs.
    """
    import torch
    from torch.testing._internal.optests import generate_tests

    if npu_place.name == "emulated":
        return functools.partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    if npu_place.name != "npu":
        return torch.library.opcheck
    known = [name for name in generate_tests.DEFAULT_TEST_UTILS if name != "test_autograd_registration"]
    return functools.partial(torch.library.opcheck, test_utils=known)


@pytest.fixture
def npu_capture(npu_place: Place) -> Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]:
    """A function that runs a step, then captures it in a graph; returns the step's result and a function that replays it."""
    import torch

    backend = torch.get_device_module(npu_place.torch)

    def capture(step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        stream = backend.Stream()
        stream.wait_stream(backend.current_stream())
        with backend.stream(stream):
            step()
        backend.current_stream().wait_stream(stream)
        graph = backend.CUDAGraph() if npu_place.name == "cuda" else backend.NPUGraph()
        with backend.graph(graph):
            captured = step()
        return captured, graph.replay

    return capture


@pytest.fixture
def npu_no_waits(npu_place: Place) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context manager in which it is an error if the host waits for the device."""
    import torch

    backend = torch.get_device_module(npu_place.torch)

    @contextlib.contextmanager
    def no_waits() -> Iterator[None]:
        backend.set_sync_debug_mode("error")
        try:
            yield
        finally:
            backend.set_sync_debug_mode("default")

    return no_waits


@pytest.fixture
def npu_search(request: pytest.FixtureRequest, npu_place: Place) -> Search:
    """Searches for an example that a property does not hold for (`testing.properties.Search`)."""
    pytest.importorskip("hypothesis", reason="hypothesis is not installed")
    from .properties import Search

    options = request.config.option
    seconds = options.npu_seconds if options.npu_search == "long" else None

    def tell(tried: int) -> None:
        request.node.user_properties.append((_TRIED, tried))

    return Search(npu_place.name, options.npu_search, options.npu_seed * 1000 + request.param, seconds, tell)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, ())]
    tried: dict[str, int] = {}
    for report in reports:
        for name, count in report.user_properties:
            if name == _TRIED:
                test = report.nodeid.partition("[")[0].rpartition("::")[2]
                tried[test] = tried.get(test, 0) + count
    if tried:
        options = config.option
        each = ", ".join(f"{test} {count}" for test, count in sorted(tried.items()))
        line = f"{options.npu_search} search, seed {options.npu_seed}: {sum(tried.values())} examples ({each})"
        terminalreporter.section("properties")
        terminalreporter.write_line(line)
