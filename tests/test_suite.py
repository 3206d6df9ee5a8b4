"""How this repository's tests are run: threads, seeds, what is collected where and what is nightly."""

from __future__ import annotations

import itertools
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest

from testing.collection import pairs
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


def test_every_pair_is_tried_and_every_toolchain():
    sizes = {"dtype": 3, "width": 4, "mode": 3, "toolchain": 3}
    cases = [dict(zip(sizes, values, strict=True)) for values in itertools.product(*map(range, sizes.values()))]
    chosen = [cases[number] for number in pairs(cases)]
    for one, other in itertools.combinations(("dtype", "width", "mode"), 2):
        assert {(case[one], case[other]) for case in chosen} == {(case[one], case[other]) for case in cases}
    assert {case["toolchain"] for case in chosen} == {0, 1, 2}
    assert len(chosen) <= 16  # 12 pairs of the two longest


COLLECTED = """
import random
import pytest

@pytest.mark.parametrize("npu_place", ["cpu", "cuda"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.uncollected("too large", lambda place, size: place == "cpu" and size == 2)
def test_of_sizes(npu_place, size):
    pass

@pytest.mark.skipif(True, reason="not on this machine")
def test_of_another_machine():
    pass

@pytest.mark.compilers
@pytest.mark.parametrize("toolchain", [1, 2, 3])
@pytest.mark.parametrize("dtype", [1, 2, 3])
def test_of_toolchains(dtype, toolchain):
    pass

@pytest.mark.whole
@pytest.mark.compilers
@pytest.mark.parametrize("toolchain", [1, 2, 3])
@pytest.mark.parametrize("dtype", [1, 2, 3])
def test_of_all(dtype, toolchain):
    pass

@pytest.mark.parametrize("case", [0, 1])
def test_numbers(case):
    raise AssertionError(f"drawn: {random.random()}")
"""


@pytest.fixture
def collected(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini(INI + "  nightly: x\n")
    pytester.makepyfile(COLLECTED)
    plugins = ["-p", "testing.plugin", "-p", "testing.collection", "-p", "no:npu_offline", "-p", "no:cacheprovider"]
    return lambda *arguments: pytester.runpytest_subprocess(*plugins, "-p", "xdist", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_cannot_run_is_not_collected_and_products_are_nightly(collected, workers):
    found = collected("-m", "not nightly", "-n", workers)
    found.assert_outcomes(passed=3 + 3 + 9, failed=2)
    found.stdout.fnmatch_lines(["*compiled for Ascend: 12*", "*1 tests are not for here: too large*"])
    found.stdout.fnmatch_lines(["*1 tests are not for here: not on this machine*"])


@pytest.mark.slow
def test_numbers_follow_from_the_name_and_the_seed(collected):
    drawn = {}
    for seed in ("0", "0", "1"):
        lines = collected("-k", "test_numbers", "--npu-seed", seed).outlines
        numbers = sorted(line.split("drawn: ")[1] for line in lines if line.startswith("E") and "drawn: " in line)
        assert len(set(numbers)) == 2
        assert any("of the test's name and --npu-seed" in line for line in lines)
        assert drawn.setdefault(seed, numbers) == numbers
    assert drawn["0"] != drawn["1"]


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
