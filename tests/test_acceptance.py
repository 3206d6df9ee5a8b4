"""The acceptance run, on a stand-in for an NPU: torch.npu as torch_npu has it, the emulated chip where kernels run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import npu_bench.cli
import pytest
from npu_offline.plugin import why_not

from testing import forks
from tools.acceptance import predictions, report, steps, tiles
from tools.acceptance.__main__ import main
from tools.workspace import ROOT

emulated = pytest.mark.skipif(why_not("emulated") is not None, reason=str(why_not("emulated")))

# torch takes the name "npu" for good: a process of its own. What it starts is told that the device is emulated.
STAND_IN = """
import sys, types
import torch

torch.utils.rename_privateuse1_backend("npu")
properties = types.SimpleNamespace(name="Ascend910B3", total_memory=2**36, cube_core_num=18, vector_core_num=36)
torch.npu = types.SimpleNamespace(
    is_available=lambda: True,
    current_device=lambda: 0,
    device_count=lambda: 8,
    get_device_properties=lambda device: properties,
)
sys.modules["torch_npu"] = types.ModuleType("torch_npu")

from tools.acceptance import steps
from tools.acceptance.__main__ import main

start = steps._process
steps._process = lambda command: start(["emulated" if part == "npu" else part for part in command])
sys.exit(main(sys.argv[1:]))
"""
TESTS = """
import torch

def test_right(npu_place):
    assert npu_place.name == "emulated"

def test_wrong(npu_place):
    assert torch.ones(2).sum() == 3, "one and one"
"""


@pytest.fixture
def cann(tmp_path, monkeypatch):
    """A CANN toolkit, as its installer leaves it."""
    import platform

    folder = tmp_path / "cann"
    info = folder / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir(parents=True)
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\npath=/usr/local/Ascend\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(folder))


@pytest.mark.compilers
@emulated
@pytest.mark.usefixtures("cann")
def test_stand_in_is_described_tested_compiled_for_and_reported(tmp_path):
    tests = tmp_path / "test_two.py"
    tests.write_text(TESTS)
    asked = ["--packages", "rms_norm", "--steps", "tests", "tiles", "--tests", str(tests), "--calls", "bfloat16 123"]
    done = forks.run("-c", STAND_IN, *asked, "--output", tmp_path, folder=ROOT)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 tests failed" in done.stdout
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["system"]["soc"] == "Ascend910B3"
    assert found["system"]["cann"] == "8.5.0"
    assert found["system"]["torch"]
    assert found["system"]["tiled_for"]["vector_cores"] == 36  # what the driver says, not what the table has
    assert found["tests"]["counts"] == {"passed": 1, "failed": 1, "skipped": 0}
    assert "one and one" in found["tests"]["failures"][0]["message"]
    assert [(call["call"], call["error"]) for call in found["tiles"]["rms_norm"]["calls"]] == [("bfloat16 123", None)]
    page = (tmp_path / "report.html").read_text()
    for shown in ("Ascend910B3", "8.5.0", "1 passed, 1 failed", "test_wrong", "1 calls compiled and launched, 0 failed"):
        assert shown in page


def test_failing_call_is_reported_and_the_next_one_runs():
    def overflow():
        raise RuntimeError("ub overflow, requires 1 more bits")

    waited = []
    found = list(tiles.run([("wide", overflow), ("narrow", lambda: None)], lambda: waited.append(1)))
    assert [(result["call"], result["error"]) for result in found] == [
        ("wide", "RuntimeError: ub overflow, requires 1 more bits"),
        ("narrow", None),
    ]
    assert len(waited) == 1


def test_process_that_dies_is_wrong_and_its_last_words_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(steps.sys, "executable", "false")
    for step in (steps.tiles, steps.times):
        assert step("rms_norm", "npu", tmp_path)["status"] == 1
    dead = {"status": 139, "said": "aicore exception", "calls": [{"call": "a", "seconds": 1.0, "error": None}]}
    assert report.verdict({"tiles": {"rms_norm": dead}}) == [
        "rms_norm: compiling its tiles ended with status 139, 1 calls in"
    ]
    lost = {"counts": {}, "failures": [], "skips": {}, "status": 139, "said": ""}
    assert report.verdict({"tests": lost}) == ["the tests ended with status 139"]
    none = {"counts": {"passed": 0, "failed": 0, "skipped": 9}, "failures": [], "skips": {}, "status": 0, "said": ""}
    assert report.verdict({"tests": none}) == ["no test passed"]
    assert report.verdict({"times": {"rms_norm": {"status": 1, "records": []}}}) == [
        "rms_norm: its benchmark ended with status 1"
    ]


@pytest.mark.parametrize("package", steps.SIZES)
def test_published_sizes_are_sizes_of_the_benchmarks(package, tmp_path, capsys, monkeypatch):
    """All that npu-bench has to say against what it is asked is that there is no NPU here."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert npu_bench.cli.main(steps.bench_arguments(package, "npu", tmp_path / "times.json")) == 2
    assert "device is 'npu' and torch_npu cannot be imported" in capsys.readouterr().err


def record(provider, values, metric="speed", mode="forward"):
    return {
        "kernel_provider": provider,
        "metric_name": metric,
        "kernel_operation_mode": mode,
        "x_label": "tokens",
        "x_values": [1024, 2048],
        "y_values_50": values,
    }


def test_times_stand_beside_those_of_others():
    records = [record("ours", [0.5, 1.0]), record("torch", [2.0, None]), record("ours", [7, 7], metric="wall")]
    (table,) = report.time_tables([*records])
    assert table["providers"] == ["ours", "torch"]
    assert table["rows"] == {1024: {"ours": 0.5, "torch": 2.0}, 2048: {"ours": 1.0, "torch": None}}
    assert [table["mode"] for table in report.time_tables([*records, record("ours", [1, 2], mode="full")])] == [
        "forward",
        "full",
    ]
    times = {"attn_res": {"status": 0, "said": "", "records": records}}
    page = report.html({"device": "npu", "system": {"soc": "Ascend910B4", "cann": None}, "times": times})
    assert "Everything that was run was right." in page
    assert "not found" in page
    assert '<td class="number">0.5</td>' in page
    assert '<td class="number">-</td>' in page


def test_predicted_times_stand_beside_the_measured():
    records = [record("ours", [0.5, 1.0]), record("torch", [2.0, None])]
    (table,) = report.time_tables(records, {"forward": {"2048": 0.75}, "backward": {"1024": 1.0}})
    assert table["providers"] == ["ours", "predicted", "torch"]
    assert table["rows"] == {1024: {"ours": 0.5, "torch": 2.0}, 2048: {"ours": 1.0, "predicted": 0.75, "torch": None}}
    found = predictions.load()
    times = {"attn_res": {"status": 0, "said": "", "records": records}}
    described = {"device": "npu", "system": {"soc": "Ascend910B4", "cann": None}, "times": times, "predicted": found}
    page = report.html(described)
    assert f"{found['times']['attn_res']['forward']['1024']:.4g}" in page


@pytest.mark.compilers
@emulated
def test_predicted_times_are_what_the_model_says():
    found = predictions.load()["times"]
    assert set(found) == set(steps.SIZES)
    assert predictions.predict(["rms_norm"])["rms_norm"] == found["rms_norm"]


@pytest.mark.skipif(why_not("npu") is None, reason="there is an NPU")
def test_device_that_is_not_there_is_refused(capsys, tmp_path):
    assert main(["--output", str(tmp_path / "never")]) == 2
    assert "--device npu cannot be: torch_npu is not installed." in capsys.readouterr().err
    assert not Path(tmp_path / "never").exists()


@pytest.mark.compilers
@emulated
def test_times_of_an_emulated_chip_are_refused(capsys):
    assert main(["--device", "emulated", "--steps", "times"]) == 2
    assert "--steps has times and must not where the device is emulated" in capsys.readouterr().err
