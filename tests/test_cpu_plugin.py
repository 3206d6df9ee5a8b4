"""The fixtures of npu-offline where it cannot be installed: the jobs of CI for every Python but one."""

from __future__ import annotations

import re

from npu_offline import plugin

from tools import cpu_plugin
from tools.workspace import ROOT

FIXTURE = re.compile(r"^@pytest\.fixture\ndef (\w+)", re.MULTILINE)


def fixtures(module):
    with open(module.__file__) as file:
        return set(FIXTURE.findall(file.read()))


def test_it_has_what_tests_ask_for_that_run_with_it():
    ours, stand_ins = fixtures(plugin), fixtures(cpu_plugin)
    assert "npu_place" in stand_ins <= ours
    asked = {}
    for file in [*ROOT.glob("packages/*/tests/*.py"), *ROOT.glob("shared/npu_[tb]*/tests/*.py")]:
        text = file.read_text()
        if not cpu_plugin._IMPORTS.search(text):
            asked |= dict.fromkeys(ours & set(re.findall(r"\bnpu_\w+", text)), file.relative_to(ROOT))
    assert "npu_place" in asked
    assert {name: file for name, file in asked.items() if name not in stand_ins} == {}
