"""A sample of every operator's launches, executed from the compilers' final modules with all checks."""

from pathlib import Path

import npu_offline
import pytest
from npu_offline.check import load_calls, load_sample
from npu_offline.check.execution import execute_calls

PACKAGES = sorted(path.parents[1] for path in Path(__file__).parents[1].glob("packages/*/tests/ascend_calls.py"))
REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]


*OLDER, NEWEST = npu_offline.VERSIONS


def _cases():
    """Every call with the newest compiler and with one of the older ones, in turns; with the others every night."""
    for package in PACKAGES:
        for place, label in enumerate(load_sample(package)):
            for toolchain in npu_offline.VERSIONS:
                always = toolchain in (NEWEST, OLDER[place % len(OLDER)])
                marks = () if always else pytest.mark.nightly
                yield pytest.param(package, label, toolchain, marks=marks, id=f"{package.name} {label}-{toolchain}")


@pytest.mark.parametrize(("package", "label", "toolchain"), list(_cases()))
def test_a_call_executes_as_its_kernels_say(package, label, toolchain):
    calls = dict(load_calls(package))
    (executed,) = execute_calls([(label, calls[label])], "Ascend910B4", toolchain)
    assert not executed.problem
    assert executed.launches
    assert [f"{kernel}: {finding}" for kernel, finding in executed.findings] == []
