"""`pytest --npu-device emulated` in a project that knows nothing of npu-offline: its tests run as on an NPU."""

import json
import re
from importlib.metadata import entry_points

import pytest
from npu_offline.toolchain import cache

if not entry_points(group="pytest11", name="npu_offline"):
    pytest.skip("npu-offline is on the path but not installed: pytest does not find its plugin", allow_module_level=True)

CACHE = cache.cache_dir()
CONFTEST = """
import torch

DEVICE = "npu" if hasattr(torch, "npu") else "cpu"
"""
TESTS = """
import pytest, torch, triton
import triton.language as tl
from triton.language.extra import libdevice
from conftest import DEVICE

@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < n) * 2)

@triton.jit
def helper(x):
    return libdevice.tanh(x) + 1

@triton.jit
def refused(x, y, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y + o, helper(tl.load(x + o)))

@pytest.fixture
def x():
    return torch.randn(64, device=DEVICE)

def test_right(x):
    y = torch.empty_like(x)
    double[(1,)](x, y, 64, BLOCK=64)
    assert y.device.type == DEVICE == "npu"
    assert torch.equal(y, 2 * x)

def test_wrong(x):
    y = torch.empty_like(x)
    double[(1,)](x, y, 64, BLOCK=64)
    assert torch.equal(y, 3 * x)

def test_out_of_bounds(x):
    double[(1,)](x, torch.empty_like(x), 64, BLOCK=128)

def test_refused(x):
    refused[(1,)](x, torch.empty_like(x), BLOCK=64)

@triton.jit
def unconverted(x, y):
    tl.store(y + tl.atomic_add(x, 1), tl.program_id(0))

def test_refused_by_the_front_end(x):
    unconverted[(1,)](*torch.zeros(2, 8, dtype=torch.int32, device=DEVICE))

def test_mistake_of_the_emulation(x, monkeypatch):
    monkeypatch.setattr("npu_offline.execute.launcher.storage_of", lambda *_: {}["mistake"])
    double[(1,)](x, torch.empty_like(x), 64, BLOCK=64)

def test_refused_option(x):
    double[(1,)](x, torch.empty_like(x), 64, BLOCK=64, option_of_another_release=True)
"""


def test_tests_pass_fail_and_are_refused_by_name(forking, monkeypatch):
    monkeypatch.setenv("NPU_OFFLINE_CACHE", str(CACHE))  # pytester gives its tests a home of their own
    forking.makeconftest(CONFTEST)
    forking.makepyfile(TESTS)
    result = forking.runpytest_subprocess("--npu-device", "emulated", "--npu-json", "out.json", "-n", "1", "-v")
    result.stdout.fnmatch_lines_random(
        [
            "*PASSED*::test_right*",
            "*FAILED*::test_wrong*",
            "*FAILED*::test_out_of_bounds*",
            "*REFUSED*::test_refused*",
            "*.py:9:*: double, bounds: *write of 512 bytes at byte 0 of argument y, outside its storage of 256 bytes",
            "3 launches in 3 tests, as on Ascend910B4, from Linalg IR",
            "1 refused: triton-ascend cannot convert the kernel (test_tests_pass_fail_and_are_refused_by_name.py:*",
            "1 refused: Triton refuses the kernel: AttributeError(*NoneType*triton.language.extra.ascend.libdevice*",
            "1 refused: Triton refuses the launch: Keyword argument option_of_another_release was *",
            "1 refused: npu-offline itself fails, please report it: KeyError: 'mistake' *",
            "*2 failed, 1 passed, 4 refused*",
        ]
    )
    found = {test["test"].rpartition("::test_")[2]: test for test in json.loads((forking.path / "out.json").read_text())}
    assert {name: test["outcome"] for name, test in found.items()} == {
        "right": "passed",
        "wrong": "failed",
        "out_of_bounds": "failed",
        "refused": "refused",
        "refused_by_the_front_end": "refused",
        "mistake_of_the_emulation": "refused",
        "refused_option": "refused",
    }
    assert found["right"] == {**found["right"], "launches": 1, "findings": [], "refused": ""}
    assert re.match(r".*\.py:9:\d+: double, bounds: ", found["out_of_bounds"]["findings"][0])
    assert "libdevice" in found["refused"]["refused"]


def test_a_chip_that_nobody_knows_is_an_error_of_the_call(forking, monkeypatch):
    monkeypatch.setenv("NPU_OFFLINE_CACHE", str(CACHE))
    result = forking.runpytest_subprocess("--npu-device", "emulated", "--npu-soc", "Ascend1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*SoC 'Ascend1' is not in npu_tiling.SOCS*"])
