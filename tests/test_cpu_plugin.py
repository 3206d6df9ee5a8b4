"""The fixtures of npu-offline where it cannot be installed: the jobs of CI for every Python but one."""

from __future__ import annotations

import re
from pathlib import Path

from npu_offline import plugin

from tools import cpu_plugin
from tools.workspace import ROOT

FIXTURE = re.compile(r"^@pytest\.fixture\ndef (\w+)", re.MULTILINE)


def test_it_has_every_fixture_of_npu_offline():
    ours, stand_ins = (FIXTURE.findall(Path(module.__file__).read_text()) for module in (plugin, cpu_plugin))
    assert "npu_place" in stand_ins == ours


def test_shared_helpers_import_without_npu_offline_but_for_the_one_that_compiles():
    importing = {file.stem for file in ROOT.glob("testing/**/*.py") if cpu_plugin._IMPORTS.search(file.read_text())}
    users = [file for file in ROOT.glob("packages/*/tests/*.py") if "from testing.ascend" in file.read_text()]
    assert importing == {"ascend"}
    assert users and all(cpu_plugin._IMPORTS.search(file.read_text()) for file in users)
