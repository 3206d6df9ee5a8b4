"""Measurements on several GPUs: the program, tried on the CPU; kept tables are those of the kept numbers."""

import json
from pathlib import Path

import pytest

from testing import ranks
from tools.several_gpus import __main__ as program
from tools.several_gpus import measuring, overlap
from tools.several_gpus.overlap import Kernel

RESULTS = Path(program.__file__).parent / "results" / "h100.json"


def test_kept_tables_are_those_of_the_kept_numbers():
    assert program.tables(json.loads(RESULTS.read_text())) == RESULTS.with_suffix(".md").read_text()


def test_a_row_that_fails_says_why_and_others_stand():
    def fails():
        raise ValueError("no such | operator\nand more")

    rows = [measuring.attempt("bad", fails), measuring.attempt("good", lambda: {"one": 2.0, "all": 1.0})]
    results = {"device": "CPU", "ranks": 2, "torch": "2", "date": "2026-01-01", "operators": rows}
    assert program.tables(results).splitlines()[-2:] == [
        "| bad | ValueError: no such \\| operator |  |  |",
        "| good | 2.000 | 1.000 | 2.00 |",
    ]


def test_collectives_are_hidden_where_other_kernels_run():
    kernels = [
        Kernel("ncclDevKernel_AllReduce", 0, 100),  # the barrier
        Kernel("gemm", 100, 1100),
        Kernel("ncclDevKernel_AllGather", 600, 1600),
        Kernel("gemm", 1600, 2000),
        Kernel("ncclDevKernel_ReduceScatter", 1800, 1900),
        Kernel("add", 2500, 2600),
    ]
    found, none = overlap.shares(overlap.after_barrier(kernels)), overlap.shares([])
    assert found == pytest.approx({"collectives_ms": 1.1, "hidden_percent": 100 * 600 / 1100, "idle_ms": 0.5})
    rows = [{"name": "a", "tokens_per_second": 1, "peak_gib": 1, "loss": 1, **each} for each in (found, none)]
    results = {"device": "CPU", "ranks": 2, "torch": "2", "date": "2026-01-01", "attn_res": rows}
    lines = program.tables(results).splitlines()[-2:]
    assert lines == ["| a | 1 | 1.00 | 1.0000 | 1.1 | 54.5 | 0.5 |", "| a | 1 | 1.00 | 1.0000 | - | - | - |"]


@pytest.mark.nightly
def test_two_ranks_on_the_cpu(monkeypatch, tmp_path, capsys):
    ranks.need("cpu")
    out = tmp_path / "results.json"
    monkeypatch.setattr("sys.argv", ["several_gpus", "--place", "cpu", "--tiny", "--out", str(out)])
    assert program.main() == 0
    found = json.loads(out.read_text())
    assert capsys.readouterr().out.strip() == out.with_suffix(".md").read_text().strip()
    assert len(found["operators"]) == 3
    for name, rows in (("training", 2), ("attn_res", 4)):
        losses = [row["loss"] for row in found[name]]
        assert losses == pytest.approx([losses[0]] * rows, rel=1e-5)
