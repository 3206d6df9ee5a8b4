"""Measurements on several GPUs: the program, tried on the CPU; kept tables are those of the kept numbers."""

import json
from pathlib import Path

import pytest

from testing import ranks
from tools.several_gpus import __main__ as program
from tools.several_gpus import measuring

RESULTS = Path(program.__file__).parent / "results" / "h200.json"


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


@pytest.mark.nightly
def test_two_ranks_on_the_cpu(monkeypatch, tmp_path, capsys):
    ranks.need("cpu")
    out = tmp_path / "results.json"
    monkeypatch.setattr("sys.argv", ["several_gpus", "--place", "cpu", "--tiny", "--out", str(out)])
    assert program.main() == 0
    found = json.loads(out.read_text())
    assert capsys.readouterr().out.strip() == out.with_suffix(".md").read_text().strip()
    assert len(found["operators"]) == 3
    plain, ours = found["training"]
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5)
