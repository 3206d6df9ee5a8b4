"""A sample of every operator's launches: final modules with all checks, and Linalg IR with races between all programs."""

from pathlib import Path

import npu_offline
import pytest
from npu_offline.check import launches_of, load_calls, load_sample
from npu_offline.check.execution import LINALG, execute_calls

PACKAGES = sorted(path.parents[1] for path in Path(__file__).parents[1].glob("packages/*/tests/ascend_calls.py"))
REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]


*OLDER, NEWEST = npu_offline.VERSIONS
A2, A3 = "Ascend910B4", "Ascend910_9391"
PLACES = [(A2, LINALG), (A2, NEWEST), *((A2, toolchain) for toolchain in OLDER), (A3, NEWEST)]


def _cases():
    """Calls that launch every kernel, with the newest compiler; all ways, other compilers and an A3 are nightly."""
    for package in PACKAGES:
        kernels = load_sample(package, "KERNELS")
        for label in load_sample(package, "WAYS"):
            for soc, toolchain in PLACES:
                always = label in kernels and (soc, toolchain) == (A2, NEWEST)
                name = f"{package.name} {label}-{soc} {toolchain or 'Linalg IR'}"
                yield pytest.param(package, label, soc, toolchain, marks=() if always else pytest.mark.nightly, id=name)


@pytest.mark.parametrize(("package", "label", "soc", "toolchain"), list(_cases()))
def test_a_call_executes_as_its_kernels_say(package, label, soc, toolchain):
    calls = dict(load_calls(package))
    (executed,) = execute_calls([(label, calls[label])], soc, toolchain)
    assert not executed.problem
    assert executed.launches
    assert all(launch.compared for launch in executed.launches) or toolchain == LINALG
    assert [f"{kernel}: {finding}" for kernel, finding in executed.findings] == []


def _ways(package, labels):
    """Each kernel that calls launch, with each value of each flag, and with and without each optional argument."""
    for launch in launches_of([call for call in load_calls(package) if call[0] in labels], A2):
        yield (launch.name,)
        flags = {name: value for name, value in launch.constants.items() if value is None or isinstance(value, bool)}
        yield from ((launch.name, name, value) for name, value in flags.items())
        yield from ((launch.name, name, "given") for name, kind in launch.signature.items() if kind.startswith("*"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_calls_that_every_place_executes_are_among_the_sample(package):
    assert set(load_sample(package, "KERNELS")) <= set(load_sample(package, "WAYS"))


@pytest.mark.nightly
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_the_sample_has_every_kernel_and_every_way(package):
    found = set(_ways(package, dict(load_calls(package))))
    assert found - set(_ways(package, load_sample(package, "WAYS"))) == set()
    assert {way for way in found if len(way) == 1} - set(_ways(package, load_sample(package, "KERNELS"))) == set()
