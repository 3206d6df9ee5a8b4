"""A sample of every operator's launches, executed from the final modules of all three compilers with all checks."""

from pathlib import Path

import npu_offline
import pytest
from npu_offline.check import load_calls, load_sample
from npu_offline.check.execution import execute_calls

PACKAGES = sorted(path.parents[1] for path in Path(__file__).parents[1].glob("packages/*/tests/ascend_calls.py"))
REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
@pytest.mark.parametrize(
    ("package", "label"),
    [pytest.param(package, label, id=f"{package.name} {label}") for package in PACKAGES for label in load_sample(package)],
)
def test_a_call_executes_as_its_kernels_say(package, label, toolchain):
    calls = dict(load_calls(package))
    (executed,) = execute_calls([(label, calls[label])], "Ascend910B4", toolchain)
    assert not executed.problem
    assert executed.launches
    assert [f"{kernel}: {finding}" for kernel, finding in executed.findings] == []
