"""The pytest plugin, run on small test files of its own."""

import importlib.util
import os
from importlib.metadata import entry_points

import pytest
import torch
from npu_offline.toolchain import cache

if not entry_points(group="pytest11", name="npu_offline"):
    pytest.skip("npu-offline is on the path but not installed: pytest does not find its plugin", allow_module_level=True)
if importlib.util.find_spec("torch_npu") is not None:
    pytest.skip("torch_npu is installed: these tests are of an environment without an NPU", allow_module_level=True)

CACHE = cache.cache_dir()
TESTS = """
import npu_tiling, torch

def test_place(npu_place):
    chip = npu_tiling.device_for(npu_place.torch)
    if npu_place.name == "cpu":
        assert chip is None
    if npu_place.name == "emulated":
        assert npu_place.torch.type == "cpu"
        assert chip == npu_tiling.soc("{soc}")

def test_elsewhere():
    pass
"""


@pytest.fixture
def project(forking: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    # pytester gives its tests a home of their own.
    monkeypatch.setenv("NPU_OFFLINE_CACHE", str(CACHE))

    def make(soc: str = "Ascend910B4") -> pytest.Pytester:
        forking.makepyfile(TESTS.format(soc=soc))
        return forking

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
    result = project("Ascend910B1").runpytest_subprocess("--npu-device", "emulated", "--npu-soc", "Ascend910B1", "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_place?emulated? PASSED*", "cpu: not run: --npu-device emulated was given"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA device")
def test_forcing_a_place_that_is_not_there_is_an_error(project):
    result = project().runpytest_subprocess("--npu-device", "cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--npu-device cuda: torch has no CUDA device*"])


def test_without_toolchain_emulation_is_reported_missing(project, tmp_path, monkeypatch):
    pytester = project()
    monkeypatch.setenv("NPU_OFFLINE_CACHE", str(tmp_path))
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(["emulated: not run: toolchain 1.2.0 is missing (npu-offline fetch 1.2.0)"])


def test_without_triton_ascend_emulation_is_reported_missing(project, monkeypatch):
    pytester = project()
    pytester.makepyfile("def test_place(npu_place): assert npu_place.name == 'cpu'")
    pytester.mkpydir("triton")  # stock triton: no backends.ascend
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(["emulated: not run: the module triton has no backend for Ascend*"])
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_summary_names_places_where_a_test_has_one(forking, workers):
    forking.makepyfile("def test_place(npu_place): pass")
    result = forking.runpytest_subprocess("--npu-device", "cpu", *workers)
    result.stdout.fnmatch_lines(["*places*", "cpu: run"])


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_summary_is_silent_where_no_test_has_a_place(pytester, workers):
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_subprocess(*workers)
    result.stdout.no_fnmatch_line("*places*")


OTHERS_CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--device", default="tpu")
    parser.addoption("--soc", default="none")

@pytest.fixture
def device(request):
    return request.config.getoption("--device")

@pytest.fixture
def poisoned():
    return "mine"
"""
OTHERS_TESTS = """
import sys
import pytest

def instantiate_device_type_tests(function):  # as torch.testing does: an argument named device, given by the caller
    def test_of_every_device():
        for device in ("cpu", "meta"):
            function(device)
    return test_of_every_device

@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parametrized(device):
    assert device in ("cpu", "meta")

@pytest.mark.parametrize(("device", "dtype"), [("cpu", int)])
def test_parametrized_together(device, dtype):
    assert device == "cpu"

def test_fixture(device, poisoned, pytestconfig):
    assert (device, poisoned) == (pytestconfig.getoption("--device"), "mine")

@instantiate_device_type_tests
def test_given(device):
    assert device in ("cpu", "meta")

def test_nothing_large_was_imported():
    assert not {"torch", "triton", "numpy"} & set(sys.modules)
"""


@pytest.mark.parametrize("arguments", [(), ("--device", "xpu", "--soc", "any"), ("-n", "1")])
def test_the_suite_of_another_project_runs_as_without_the_plugin(pytester, arguments):
    pytester.makeconftest(OTHERS_CONFTEST)
    pytester.makepyfile(OTHERS_TESTS)
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=6)
    result.stdout.no_fnmatch_line("*places*")


def test_a_name_that_is_not_ours_is_not_found_here(pytester):
    pytester.makepyfile("def test_place(device): pass")
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(["*fixture 'device' not found*"])
