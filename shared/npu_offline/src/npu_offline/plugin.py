"""The pytest plugin: tests with the fixture `npu_place` run on every available place; the summary says which are missing.

With --npu-device emulated, suites without that fixture run as on an NPU (`suite`).

Projects that do not use it are not affected: every option and fixture is named `npu_...`, and torch and Triton are imported
only when a test uses a fixture.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

PLACES = ("cpu", "emulated", "cuda", "npu")
_USED = pytest.StashKey[bool]()
_SUMMARY = pytest.StashKey[list[str]]()


@dataclass(frozen=True)
class Place:
    """Where a test runs: a name of `PLACES`, and the torch device of its tensors."""

    name: str
    torch: torch.device


@functools.cache
def why_not(name: str) -> str | None:
    """Why tests cannot run at a place on this machine, None if they can."""
    if name == "emulated":
        from .execute.c_compiler import missing_c_compiler
        from .toolchain.compilers import DEFAULT, installed
        from .toolchain.triton_ascend import missing_triton_ascend

        if DEFAULT not in installed():
            return f"toolchain {DEFAULT} is missing (npu-offline fetch {DEFAULT})"
        return missing_triton_ascend() or missing_c_compiler()
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        return "torch has no CUDA device"
    if name == "npu":
        with contextlib.suppress(ImportError):
            import torch_npu  # noqa: F401
        if not hasattr(torch, "npu"):
            return "torch_npu is not installed"
        if not torch.npu.is_available():
            return "torch_npu has no device"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("npu-offline")
    group.addoption("--npu-device", choices=PLACES, help="run tests there, and nowhere else")
    group.addoption("--npu-soc", default="Ascend910B4", help="the chip that is emulated (default: %(default)s)")
    group.addoption("--npu-final", metavar="VERSION", help="emulate the final modules of that compiler version")
    group.addoption("--npu-json", metavar="FILE", help="write outcomes, launches and findings of an emulated suite there")
    group.addoption("--npu-checks", action="store_true", help="with --npu-final: every check at every launch")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """With --npu-device emulated, an NPU is there before a conftest.py is imported."""
    options = early_config.known_args_namespace
    if options.npu_device == "emulated" and why_not("emulated") is None:
        from .suite import Suite

        early_config.pluginmanager.register(Suite(options.npu_soc, options.npu_final))


def pytest_configure(config: pytest.Config) -> None:
    forced = config.getoption("--npu-device")
    reason = why_not(forced) if forced else None
    if reason:
        raise pytest.UsageError(f"--npu-device {forced}: {reason}")
    final = config.getoption("--npu-final")
    if final is not None:
        from .toolchain.compilers import VERSIONS, installed

        if final not in VERSIONS:
            raise pytest.UsageError(f"--npu-final is {final!r}, must be one of {', '.join(VERSIONS)}")
        if final not in installed():
            raise pytest.UsageError(f"--npu-final {final}: toolchain is missing (npu-offline fetch {final})")
    elif config.getoption("--npu-checks"):
        raise pytest.UsageError("--npu-checks needs --npu-final VERSION")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "npu_place" not in metafunc.fixturenames:
        return
    metafunc.config.stash[_USED] = True
    forced = metafunc.config.getoption("--npu-device")
    names = [forced] if forced else [name for name in PLACES if why_not(name) is None]
    metafunc.parametrize("npu_place", names, indirect=True)


@pytest.fixture
def npu_place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The place where a test runs. At "emulated", launches on CPU tensors are emulated.

    Kernels run from their Linalg IR, or, with --npu-final, from the modules that the compiler makes of it.
    """
    import torch

    from .execute.emulation import emulate
    from .toolchain.compilers import DEFAULT

    name = request.param
    if name == "emulated":
        final, checks = (request.config.getoption(option) for option in ("--npu-final", "--npu-checks"))
        soc = request.config.getoption("--npu-soc")
        with emulate(soc, toolchain=final or DEFAULT, races=True, final=final is not None, checks=checks):
            yield Place(name, torch.device("cpu"))
    else:
        yield Place(name, torch.device(name))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # in a worker of pytest-xdist
    if output is not None and session.config.stash.get(_USED, False):
        output["npu_places"] = _summary(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over a worker's lines of the summary: this process has no need of torch."""
    if lines := getattr(node, "workeroutput", {}).get("npu_places"):
        node.config.stash[_SUMMARY] = lines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(_SUMMARY, []) or (_summary(config) if config.stash.get(_USED, False) else [])
    if lines:
        terminalreporter.section("places")
    for line in lines:
        terminalreporter.write_line(line)


def _summary(config: pytest.Config) -> list[str]:
    """A line for each place: whether tests ran there, or why not."""
    forced = config.getoption("--npu-device")
    reasons = {name: f"--npu-device {forced} was given" if forced and name != forced else why_not(name) for name in PLACES}
    return [f"{name}: not run: {reason}" if reason else f"{name}: run" for name, reason in reasons.items()]
