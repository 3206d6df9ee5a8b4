"""How this repository's tests are run: threads, and what the short run leaves out."""

from __future__ import annotations

import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest

from tools import wheels
from tools.workspace import ROOT, read_packages

TESTS = """
import os
import pytest

@pytest.mark.compilers
@pytest.mark.parametrize("number", range(3))
def test_compiled(number):
    pytest.skip("no compiler is here")

@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_placed(device):
    pass

def test_threads():
    assert os.environ.get("OMP_NUM_THREADS") == {threads!r}
"""
INI = "[pytest]\naddopts = --strict-markers\nmarkers =\n  compilers: x\n"


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    pytester.makeini(INI)

    def run(*arguments, threads=None):
        pytester.makepyfile(TESTS.format(threads=threads))
        plugins = ["-p", "tools.suite", "-p", "xdist", "-p", "no:npu_offline", "-p", "no:cacheprovider"]
        return pytester.runpytest_subprocess(*plugins, *arguments)

    return run


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.slow
def test_a_worker_computes_on_one_thread(run, workers):
    run("-n", workers, threads="1" if workers == "2" else None).assert_outcomes(passed=3, skipped=3)


@pytest.mark.slow
def test_emulated_tests_need_compilers(run):
    run("-m", "not compilers").assert_outcomes(passed=2, deselected=4)


def test_short_run_leaves_out_what_takes_long_or_needs_compilers():
    scripts = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["default"]["scripts"]
    assert "fetch" in scripts["test"]
    assert "fetch" not in scripts["fast"]
    assert "-m 'not slow and not compilers and not nightly'" in scripts["fast"][-1]


def test_packages_are_built_once_for_all_workers(tmp_path: Path, monkeypatch):
    built = []

    def build(package, output, root):
        built.append(package.key)
        sleep(0.05)  # another worker asks now
        output.mkdir(exist_ok=True)

    monkeypatch.setattr(wheels, "build", build)
    with ThreadPoolExecutor() as pool:
        folders = list(pool.map(wheels.build_once, [tmp_path / "wheels"] * 3))
    assert sorted(built) == sorted(read_packages())
    assert folders == [tmp_path / "wheels"] * 3
    assert folders[0].is_dir()
