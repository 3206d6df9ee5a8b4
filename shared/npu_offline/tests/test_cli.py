"""The command line, on a package made for the purpose."""

import json
import re
import subprocess
import sys

import pytest
from npu_offline import check
from npu_offline.cli import main
from npu_offline.commands.check import _refusals
from npu_offline.toolchain import compilers as toolchains

CALLS = """
import torch
import triton
import triton.language as tl


@triton.jit
def double(x_ptr, y_ptr, n, BN: tl.constexpr):
    for i in tl.range(tl.program_id(0), n, tl.num_programs(0)):
        o = i * BN + tl.arange(0, BN)
        tl.store(y_ptr + o, tl.load(x_ptr + o) * 2.0)


def launch(width):
    x = torch.zeros(4 * width)
    double[(2,)](x, torch.empty_like(x), 4, BN=width)


def calls():
    for width in WIDTHS:
        yield f"width {width}", lambda width=width: launch(width)
"""


@pytest.fixture
def package(tmp_path):
    def make(widths, text=CALLS):
        (tmp_path / "tests").mkdir()
        (tmp_path / "tests" / "ascend_calls.py").write_text(text.replace("WIDTHS", repr(widths)))
        return str(tmp_path)

    return make


def test_the_command_line_loads_no_torch():
    """torch_npu, which `import torch` loads, fails without CANN or its stand-in, which needs `npu-offline fetch` first."""
    code = "import sys, npu_offline.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_check_compiles_each_tile_once_and_succeeds(package, tmp_path, capsys):
    report = tmp_path / "report.json"
    path = package([1024, 1024, 4096])
    chips = ["--soc", "Ascend910B4", "--soc", "Ascend950PR_9589"]
    assert main(["check", path, *chips, "--jobs", "2", "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert (found["findings"], found["not_executed"], found["refused"]) == ([], [], [])
    rows = found["compilations"]
    assert {(row["tile"], row["soc"], row["toolchain"]) for row in rows} == {
        (f"BN={width}, *fp32", soc, version)
        for width in (1024, 4096)
        for soc in ("Ascend910B4", "Ascend950PR_9589")
        for version in ("1.0.0", "1.1.0", "1.2.0")
    }
    assert len(rows) == 12
    assert [row["supported"] for row in rows].count(False) == 2  # the 950 on 1.0.0
    largest = next(row for row in rows if "4096" in row["tile"] and row["toolchain"] == "1.2.0")
    assert largest["fits"] is True
    assert largest["double_buffered"] is True
    assert 0 < largest["ub_used"] <= largest["ub_available"]
    table = capsys.readouterr().out
    assert "double" in table
    assert "unsupported" in table
    assert "12 compilations, 0 failed" in table


SCANS = """
import torch
import triton
import triton.language as tl


@triton.jit
def running_sums(x_ptr, y_ptr, n, BN: tl.constexpr):
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(y_ptr + o, tl.cumsum(tl.load(x_ptr + o), 0))


@triton.jit
def halves(x_ptr, y_ptr, n, BN: tl.constexpr):
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    b_x = tl.load(x_ptr + o)
    if n > 100:
        b_x = tl.exp(b_x)
    tl.store(y_ptr + o, b_x * 0.5)


def calls():
    x = torch.randn(4 * 256)
    for kernel in (running_sums, halves):
        for n in WIDTHS:
            yield f"{kernel.__name__} {n}", lambda kernel=kernel, n=n: kernel[(4,)](x, torch.empty_like(x), n, BN=256)
"""


@pytest.mark.parametrize(("sizes", "issued"), [([7], False), ([7, 200], True)])
def test_check_says_what_was_compared_and_which_instructions_no_program_issued(package, capsys, sizes, issued):
    assert main(["check", package(sizes, SCANS), "--soc", "Ascend910B4", "--toolchain", "1.2.0", "--jobs", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    count = len(sizes)
    assert f"{2 * count} launches compared with their Linalg IR, 0 with nothing" in said
    assert f"{count} launches, {2 * count} of {4 * count} programs" in said
    left = re.findall(r"halves 1\.2\.0, BN=256, \*fp32: (\d+) of \d+ instructions issued by no program: (\S+)", said)
    assert left == [] if issued else "vexp" in left[0][1]
    total = re.search(r"(\d+) of (\d+) instructions issued", said)
    assert (total[1] == total[2]) == issued


def test_check_fails_where_a_tile_does_not_fit(package, capsys):
    assert main(["check", package([16384, 65536]), "--soc", "Ascend910B4", "--toolchain", "1.1.0"]) == 1
    assert "2 compilations, 1 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def calls(): return []", "yields nothing"),
        ("calls_ = 1", "must define calls()"),
        ("def calls(): yield 'none', lambda: None", "launched no kernel"),
    ],
)
def test_check_refuses_a_package_that_says_nothing(package, capsys, text, message):
    assert main(["check", package([], text), "--soc", "Ascend910B4", "--toolchain", "1.2.0"]) == 2
    assert message in capsys.readouterr().err


def test_check_without_the_file(tmp_path, capsys):
    assert main(["check", str(tmp_path)]) == 2
    assert "ascend_calls.py does not exist" in capsys.readouterr().err


def test_check_without_toolchain(package, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NPU_OFFLINE_CACHE", str(tmp_path / "empty"))
    assert main(["check", package([1024])]) == 2
    assert "npu-offline fetch 1.0.0" in capsys.readouterr().err


def test_fetch_prints_where_toolchains_are(capsys):
    assert main(["fetch", "1.2.0"]) == 0
    assert capsys.readouterr().out.strip().endswith("1.2.0")


def test_check_takes_a_compiler_of_the_users_own_and_executes_what_it_makes(package, tmp_path, capsys):
    own = tmp_path / "cann" / "bishengir-compile"
    own.parent.mkdir()
    own.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && {{ echo "bishengir-compile 9.9.9"; exit 0; }}
exec {toolchains.tool("1.2.0", "bishengir-compile")} "$@"
"""
    )
    own.chmod(0o755)
    assert main(["check", package([1024]), "--soc", "Ascend910B4", "--compiler", str(own)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "bishengir-compile 9.9.9" in said
    assert "an unknown version" in said
    assert "1 calls executed, 1 launches, 2 of 2 programs, 0 findings" in said


def test_a_compiler_of_the_users_own_that_is_a_known_build_is_said_to_be_it():
    known = toolchains.tool("1.1.0", "bishengir-compile")
    assert toolchains.describe(toolchains.adopt(known)).endswith("the same build as 1.1.0")


def test_what_a_compiler_says_of_many_chips_is_said_once():
    said = {"Ascend910B1": "no", "Ascend910B2": "no", "Ascend910B3": "never"}
    failures = [
        check.Result(check.Job("k", "", "", "", (), soc, "1.0.0"), None, f"cannot compile k for {soc}: {why}")
        for soc, why in said.items()
    ]
    assert list(_refusals(failures)) == [
        "k Ascend910B1 and 1 more 1.0.0: cannot compile k for Ascend910B1: no",
        "k Ascend910B3 1.0.0: cannot compile k for Ascend910B3: never",
    ]
