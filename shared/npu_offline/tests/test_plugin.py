"""The pytest plugin, run on small test files of its own."""

import pytest
import torch
from npu_offline import cache

CACHE = cache.cache_dir()
TESTS = """
import npu_tiling, torch

def test_place(device, poisoned):
    assert torch.empty(3, device=device.torch).isnan().all()
    chip = npu_tiling.device_for(device.torch)
    if device.name == "cpu":
        assert chip is None
    if device.name == "emulated":
        assert device.torch.type == "cpu"
        assert chip == npu_tiling.soc("{soc}")

def test_elsewhere():
    pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    # pytester gives its tests a home of their own.
    monkeypatch.setenv("NPU_OFFLINE_CACHE", str(CACHE))

    def make(soc: str = "Ascend910B4") -> pytest.Pytester:
        pytester.makepyfile(TESTS.format(soc=soc))
        return pytester

    return make


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA device")
def test_runs_on_every_place_there_is_and_names_the_others(project):
    result = project().runpytest_subprocess("-v")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        [
            "*test_place?cpu? PASSED*",
            "*test_place?emulated? PASSED*",
            "*places*",
            "cpu: run",
            "emulated: run",
            "cuda: not run: torch has no CUDA device",
            "npu: not run: torch_npu is not installed",
        ]
    )


def test_force_one_place_and_choose_the_chip(project):
    result = project("Ascend910B1").runpytest_subprocess("--device", "emulated", "--soc", "Ascend910B1", "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_place?emulated? PASSED*", "cpu: not run: --device emulated was given"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA device")
def test_forcing_a_place_that_is_not_there_is_an_error(project):
    result = project().runpytest_subprocess("--device", "cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--device cuda: torch has no CUDA device*"])


def test_without_toolchain_emulation_is_reported_missing(project, tmp_path, monkeypatch):
    pytester = project()
    monkeypatch.setenv("NPU_OFFLINE_CACHE", str(tmp_path))
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(["emulated: not run: toolchain 1.2.0 is missing (npu-offline fetch 1.2.0)"])


def test_without_triton_ascend_emulation_is_reported_missing(project, monkeypatch):
    pytester = project()
    pytester.makepyfile("def test_place(device): assert device.name == 'cpu'")
    pytester.mkpydir("triton")  # stock triton: no backends.ascend
    monkeypatch.setenv("PYTHONPATH", str(pytester.path))
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(["emulated: not run: triton-ascend is not installed*"])
    result.assert_outcomes(passed=1)


def test_summary_is_silent_where_no_test_has_a_place(pytester):
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_subprocess()
    result.stdout.no_fnmatch_line("*not run*")
