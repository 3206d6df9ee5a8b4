"""The Python blocks of the README are one program that runs as it stands, with nothing defined beforehand."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import npu_offline
import pytest
from npu_offline.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
CONSOLE = re.findall(r"```console\n\$ npu-offline (.*?)(?<!\\)\n(.*?)```", README, re.S)
pytestmark = pytest.mark.skipif("1.2.0" not in npu_offline.installed(), reason="needs a toolchain (npu-offline fetch 1.2.0)")


def test_blocks_run_one_after_the_other(tmp_path):
    assert len(BLOCKS) >= 7
    program = tmp_path / "readme.py"  # Triton reads a kernel's source from its file
    program.write_text("\n".join(BLOCKS))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    promised = re.findall(r"^print\(.*\)  # ([\d ]+)$", "\n".join(BLOCKS), re.M)
    assert promised
    assert set(promised) <= set(printed)


def test_what_the_readme_tells_to_write_is_what_the_commands_take(tmp_path, capsys):
    kernel, operator, tuned = (
        next(block for block in BLOCKS if text in block) for text in ("def double", "def calls", "def sized_calls")
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "ascend_calls.py").write_text(f"{kernel}\n{operator}\n{tuned}")
    where = ["--soc", "Ascend910B4", "--toolchain", "1.2.0"]
    assert main(["check", str(tmp_path), *where]) == 0
    assert main(["time", str(tmp_path), *where]) == 0
    assert main(["tune", str(tmp_path), *where]) in (0, 1)  # 1: another size is predicted to be faster
    assert "(in use)" in capsys.readouterr().out
    report = ["report", str(tmp_path), *where, "--jobs", "1", "--output", str(tmp_path / "out")]
    assert main(report) == 0
    page = (tmp_path / "out" / "index.html").read_text()
    assert "double" in page
    assert not re.search("rms_norm|attn_res|liger", page), "a report is of the packages that were asked for"


def test_the_readme_has_an_example_of_each_command_for_one_kernel():
    assert {line.split()[0] for line, _ in CONSOLE} == {"run", "check", "lint", "time", "tune", "bounds"}


@pytest.mark.parametrize(("line", "printed"), CONSOLE, ids=[line.split()[0] for line, _ in CONSOLE])
def test_commands_print_what_the_readme_shows(line, printed, tmp_path, monkeypatch, capsys):
    (tmp_path / "kernels.py").write_text(BLOCKS[0])
    monkeypatch.chdir(tmp_path)
    main(shlex.split(line.replace("\\\n", " ")))
    said = capsys.readouterr().out
    if line.startswith("check"):  # verdicts of an earlier run may be kept
        said = "".join(row for row in said.splitlines(keepends=True) if "--fresh" not in row)
    assert [row.rstrip() for row in said.splitlines()] == [row.rstrip() for row in printed.splitlines()]
