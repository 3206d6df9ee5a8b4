"""The report's page holds what was found, needs nothing beside itself, and escapes what it quotes."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from npu_offline.cli import main
from npu_offline.reporting.page import render, size
from npu_offline.reporting.timeline import draw

CALLS = """
import sys
sys.path.insert(0, {folder!r})
import torch
from lint_kernels import copy_rows, square_suppressed

SAMPLE = ["copies"]


def copies():
    copy_rows[(40,)](torch.ones(200, 1024), torch.empty(200, 1024), 200, D=1024, BM=4, BN=1024)


def calls():
    yield "copies", copies
    yield "squares", lambda: square_suppressed[(1,)](*(torch.ones(8192, dtype=torch.bfloat16) for _ in range(2)), BN=8192)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    package = folder / "an_operator"
    (package / "tests").mkdir(parents=True)
    (package / "tests" / "ascend_calls.py").write_text(CALLS.format(folder=str(Path(__file__).parent)))
    chips = ["--soc", "Ascend910B4", "--soc", "Ascend950PR_9589"]
    output = ["--output", str(folder / "out"), "--jobs", "1"]
    assert main(["report", str(package), *chips, *output]) == 0
    return json.loads((folder / "out" / "report.json").read_text()), (folder / "out" / "index.html").read_text()


def test_every_compilation_is_in_the_matrix(written):
    report, page = written
    rows = report["packages"][0]["compiled"]
    assert len(rows) == 2 * 2 * 3
    assert sum(not row["supported"] for row in rows) == 2  # the 950 on 1.0.0
    assert all(row["fits"] and 0 < row["ub"][0] <= row["ub"][1] for row in rows if row["supported"])
    assert "<b>10 of 10</b>" in page


def test_waived_findings_are_shown_with_their_reason(written):
    report, page = written
    launches = report["packages"][0]["linted"]["launches"]
    assert [finding["rule"] for launch in launches for finding in launch["findings"]] == []
    assert {finding["reason"] for launch in launches for finding in launch["suppressed"]} == {"a test of suppressions"}
    assert "a test of suppressions" in page


def test_bytes_are_those_of_the_emulated_launch(written):
    report, _ = written
    read, written_ = (row for row in report["packages"][0]["ledgers"] if row["kernel"] == "copy_rows")
    assert (read["argument"], read["read"], read["useful_read"]) == ("x_ptr", 200 * 4096, 200 * 4096)
    assert (written_["argument"], written_["written"], written_["whole_rows"]) == ("y_ptr", 200 * 4096, 50)
    assert read["lengths"] == {"16384": 50}


def test_pipes_are_drawn_and_overlap(written):
    report, page = written
    timeline = next(each for each in report["packages"][0]["timelines"] if each["kernel"] == "copy_rows")
    assert {event[0] for event in timeline["events"]} >= {"MTE2", "V", "MTE3"}
    assert timeline["bound"] <= timeline["estimate"]
    assert page.count("<svg") == len(report["packages"][0]["timelines"]) == 2
    assert set(re.findall(r'class="key (\w+)"', page)) >= {"mte2", "v", "mte3"}
    assert 'class="key m"' not in page


def test_the_page_needs_nothing_beside_itself_and_its_links_lead_somewhere(written):
    _, page = written
    assert not re.search(r'(src|href)="(?!#)', page)
    assert "@import" not in page
    assert "url(" not in page
    targets = set(re.findall(r'id="([^"]+)"', page))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= targets


def test_every_element_is_closed(written):
    open_elements = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "rect", "br"):
                open_elements.append(tag)

        def handle_endtag(self, tag):
            assert tag == "rect" or open_elements.pop() == tag

    Checker().feed(written[1])
    assert not open_elements


def test_what_is_quoted_is_escaped(written):
    report, _ = written
    evil = json.loads(json.dumps(report).replace("copy_rows", "<script>alert(1)</script>"))
    assert "<script" not in render(evil)
    assert "<script" not in draw([["V", 0, 1e-6, "<script>", 1, "AIV"]])


def test_a_picture_has_a_row_for_each_pipe_that_did_something_and_names_cores_where_there_are_several():
    product, copy = ["M", 0, 1e-6, "mma_tile", 64, "AIC"], ["MTE1", 0, 1e-6, "L1 to L0A", 64, "AIC"]
    alone = draw([product, copy])
    assert re.findall(r'class="pipe">([^<]*)<', alone) == ["L1 to L0", "matrix"]
    assert "mma_tile, 64 multiplications, 1.00 µs" in alone
    together = draw([product, ["V", 0, 1e-6, "vexp", 64, "AIV1"]])
    assert re.findall(r'class="pipe">([^<]*)<', together) == ["AIC matrix", "AIV1 vector"]


def test_a_sample_is_the_calls_that_are_named(written, tmp_path):
    package = tmp_path / "an_operator"
    (package / "tests").mkdir(parents=True)
    (package / "tests" / "ascend_calls.py").write_text(CALLS.format(folder=str(Path(__file__).parent)))
    where = ["--soc", "Ascend910B4", "--toolchain", "1.2.0", "--jobs", "1", "--output", str(tmp_path)]
    assert main(["report", str(package), "--sample", *where]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert {row["kernel"] for row in report["packages"][0]["compiled"]} == {"copy_rows"}
    assert report["packages"][0]["calls"] == {"shown": 1, "all": 2}


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 * 2**20, "64 MiB")])
def test_sizes_are_readable(nbytes, text):
    assert size(nbytes) == text
