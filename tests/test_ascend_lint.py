"""What npu-offline's lint finds in a package's launches is suppressed in its source, with the reason.

At each commit a sample of launches is looked at, for one chip and compiler; every night all of them are, as by
`npu-offline lint <package>`: on chips of both architectures, with every compiler.
"""

from __future__ import annotations

from pathlib import Path

import npu_offline
import pytest
from npu_offline.check import load_calls, load_sample
from npu_offline.check.linting import examine_all, load
from npu_offline.cli import main

PACKAGES = sorted(path.parents[1] for path in Path(__file__).parents[1].glob("packages/*/tests/ascend_calls.py"))
SOC, TOOLCHAIN = "Ascend910B4", "1.2.0"
pytestmark = [
    pytest.mark.compilers,
    pytest.mark.skipif(
        TOOLCHAIN not in npu_offline.installed(),
        reason=f"needs triton-ascend and a toolchain (npu-offline fetch {TOOLCHAIN})",
    ),
]


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_a_sample_of_launches_is_clean(folder):
    sample = load_sample(folder)
    package = load([call for call in load_calls(folder) if call[0] in sample], [SOC], [TOOLCHAIN])
    assert len(package.subjects) >= len(sample)
    examined = list(examine_all(package, workers=1))
    assert not [each.problem for each in examined if each.problem]
    found = {(finding.kernel, finding.rule, finding.message) for each in examined for finding in each.findings}
    assert not found


@pytest.mark.nightly
@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_every_launch_is_clean_and_every_suppression_suppresses(folder, capsys):
    assert main(["lint", str(folder), "--jobs", "1"]) == 0, capsys.readouterr().out
