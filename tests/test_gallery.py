"""The gallery: its page is what was measured, what is measured finds faults, and rows can be measured again."""

import dataclasses
import json
import os

import npu_offline
import pytest
import torch
import triton
import triton.language as tl

from tools.compare import peers
from tools.gallery import count, page, suites, tallies
from tools.gallery.__main__ import RESULTS, tallied
from tools.gallery.calls import ENTRIES
from tools.gallery.counted import PACKAGES, Counted
from tools.gallery.measure import Case, Row, measure
from tools.gallery.sources import TITLES

ROWS = json.loads(RESULTS.read_text())
compilers = pytest.mark.skipif(
    set(npu_offline.installed()) != set(npu_offline.VERSIONS), reason="needs all toolchains (npu-offline fetch)"
)


@triton.jit
def twice(p_x, p_y, n, BLOCK: tl.constexpr, FACTOR: tl.constexpr, MASKED: tl.constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(p_y + o_x, FACTOR * tl.load(p_x + o_x, mask=o_x < n), mask=o_x < n)
    else:
        tl.store(p_y + o_x, FACTOR * tl.load(p_x + o_x))


def case(block=256, factor=2.0, *, masked=True):
    def call(x):
        y = torch.empty_like(x)
        twice[(triton.cdiv(x.numel(), block),)](x, y, x.numel(), BLOCK=block, FACTOR=factor, MASKED=masked)
        return y

    return Case([torch.randn(1000)], call, lambda x: 2 * x)


COUNTS = json.loads(count.RESULTS.read_text())


def test_every_call_was_counted_and_no_verdict_is_a_crash_or_unexplained():
    for package, verdicts in COUNTS.items():
        assert set(verdicts) == {call.call for call in PACKAGES[package.split()[0]]}
        for call, levels in verdicts.items():
            kind = tallies.kind_of(tallies.worst_of(levels))
            assert kind != "failed", call
            assert kind != "WRONG" or call in tallies.EXPLAINED, call
    counted = {package.split()[0]: set(files) for package, files in json.loads(suites.RESULTS.read_text()).items()}
    assert counted == {package: set(files) for package, files in suites.SUITES.items()}
    assert set(counted) == set(suites.COMMITS)


def doubled(x):
    return case().call(x.flatten()).view(x.shape)


def gone(x):
    os._exit(1)


@compilers
@pytest.mark.compilers
@pytest.mark.parametrize(
    ("call", "expected", "verdict"),
    [
        ("doubled(x)", "2 * x", "right"),
        ("doubled(x)", "3 * x", "WRONG: result 0 differs by"),
        ("doubled.no(x)", "x", "failed: "),
        ("gone(x)", "x", "failed: the process died"),
    ],
)
def test_a_call_is_counted_as_what_it_is(call, expected, verdict):
    assert count.verdict_on(Counted(__name__, call, expected), "Linalg IR").startswith(verdict)


def test_the_page_is_what_was_measured():
    assert page.PAGE.read_text() == page.rendered(ROWS, tallied()), "python -m tools.gallery --page-only"


def test_every_call_has_its_row_and_every_row_its_call():
    assert {f"{entry.source} {entry.name}" for entry in ENTRIES} == set(ROWS)
    assert {entry.source for entry in ENTRIES} == set(TITLES)
    for row in ROWS.values():
        assert set(row) == {field.name for field in dataclasses.fields(Row)} | {"date"}


@compilers
@pytest.mark.compilers
def test_a_right_call_is_right_at_every_level_and_moves_what_it_must():
    row = measure(case())
    assert all(text.startswith("right, ") for text in row.results.values())
    assert len(row.results) == 1 + len(npu_offline.VERSIONS)
    assert all(text.startswith("yes, ") for text in row.compiles.values())
    assert set(row.findings.values()) == {"none"}
    assert row.moved == row.minimum == 8000
    assert row.lint["short-transfer"] > 0
    assert row.predicted is not None


@compilers
@pytest.mark.compilers
@pytest.mark.parametrize(
    ("call", "field", "text"),
    [
        (case(factor=3.0), "results", "WRONG, 0.5"),
        (case(masked=False), "results", "outside its storage"),
        (case(masked=False), "findings", "outside its storage"),
        (case(block=65536), "compiles", "no: twice asks for"),
    ],
    ids=["wrong", "out of bounds", "out of bounds, checks", "too large"],
)
def test_a_wrong_call_is_said_to_be_wrong(call, field, text):
    assert all(text in found for level, found in getattr(measure(call), field).items() if level in npu_offline.VERSIONS)


@compilers
@pytest.mark.compilers
@pytest.mark.skipif(bool(peers.missing()), reason=str(peers.missing()))
@pytest.mark.parametrize("name", ["rms_norm forward", "swiglu forward"])
def test_rows_of_liger_can_be_measured_again(name):
    entry = next(entry for entry in ENTRIES if (entry.source, entry.name) == ("liger", name))
    again, kept = dataclasses.asdict(measure(entry.make())), ROWS[f"liger {name}"]
    for field in ("kernels", "compiles", "moved", "minimum", "scalars", "lint"):
        assert again[field] == kept[field], field
    assert again["predicted"] == pytest.approx(kept["predicted"], rel=0.02)
