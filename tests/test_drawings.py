"""Drawings of the documentation show what their records have."""

import json
import re

import pytest

from tools.docs import charts, graphs, losses
from tools.workspace import ROOT

TRAINING = sorted((ROOT / "tools" / "convergence" / "results").glob("*.json"))
DRAWN = re.compile(r"<!-- charts (\S+) -->")
HISTORIES = sorted(
    {ROOT / name for page in ROOT.glob("tools/docs/pages/**/*.md") for name in DRAWN.findall(page.read_text())}
)


def test_pages_draw_the_sweeps_of_every_operator():
    assert {file.relative_to(ROOT).parts[1] for file in HISTORIES} == {
        "attn_res",
        "embedding",
        "fused_linear_cross_entropy",
        "rms_norm",
    }


@pytest.mark.parametrize("file", HISTORIES, ids=lambda file: str(file.relative_to(ROOT / "packages")))
def test_a_chart_has_every_point_that_was_recorded_higher_where_the_share_is(file):
    assert charts.sweeps(file)
    for sweep, mode in charts.sweeps(file):
        lines, run = charts.shares(file, sweep, mode)
        assert lines[0].style == "ours" and run["x_name"] == sweep
        for line in lines:  # the table's floors are those of the record's cases
            assert all(0.01 < y < 2 for _, y, _ in line.points), (file, sweep, line.points)
        drawn = charts.draw(lines, mode, run)
        measured = [y for line in lines for _, y, _ in line.points]
        assert drawn.count("<circle") == len(measured) > 4
        heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)]
        assert [y for _, y in sorted(zip(measured, heights, strict=True))] == sorted(heights, reverse=True)
        assert all(charts.TOP <= y <= charts.HEIGHT - charts.BOTTOM for y in heights)


def test_a_record_of_no_commit_is_said_to_be():
    assert "no commits: `0.1.0+g12.dirty`" in charts._clean(["0.1.0+g12.dirty", "0.1.0+g12.dirty"])
    assert charts._clean(["0.1.0+g12"]) == "Recorded as `0.1.0+g12`."


def test_the_picture_of_the_readme_shows_shares_of_the_limit():
    rows = "| A | forward | **.2** | .4 | .1 (x) | .1 |\n| | backward | .4 | 4.0 | .1 | .1 |\n| B | - | .1 | - | .2 | .1 |"
    table = f"| | pass | this | torch | liger-kernel | limit |\n|---|\n{rows}"
    drawn = charts.bars(f"\n## Results\n\n{table}\n\n")
    assert re.findall(r"(\d+)% (?:this|torch|liger-kernel)<", drawn) == ["50", "25", "100", "25", "2", "100", "100", "50"]


def test_the_picture_of_ascend_shows_shares_ranges_and_bytes(tmp_path):
    record = tmp_path / "record.json"
    row = {"operator": "rms_norm", "direction": "forward", "whose": "ours", "moved": 12, "fewest": 10}
    large = {**row, "size": 2, "kernels_over_floor": 2.0, "range_over_floor": [1.0, 4.0]}
    record.write_text(json.dumps([{**row, "size": 1, "kernels_over_floor": 9.0, "range_over_floor": [8.0, 10.0]}, large]))
    drawn = charts.predicted_bars(record)
    assert re.findall(r"(\d+)% this, ([\d.]+)x bytes<", drawn) == [("50", "1.20")]
    zero, half, whole = (float(x) for x in re.findall(r'class="grid" d="M([\d.]+)', drawn))
    low, high = map(float, re.findall(r'class="range" d="M([\d.]+) \S+H([\d.]+)', drawn)[0])
    assert (low - zero) / (whole - zero) == pytest.approx(0.25, abs=0.01) and high == whole and zero < half < whole


@pytest.mark.parametrize("file", TRAINING, ids=lambda file: file.stem)
def test_a_training_run_is_a_line_that_falls(file):
    run = json.loads(file.read_text())
    for precision, curves in run["curves"].items():
        drawn = losses.draw(curves, precision, run["measured_every"])
        lines = re.findall(r'class="line (\w+)" d="M([^"h]+)"', drawn)
        assert [name for name, _ in lines] == [losses.RUNS[curve["name"]] for curve in curves]
        for (_, line), curve in zip(lines, curves, strict=True):
            heights = [float(point.split()[1]) for point in line.split("L")]
            assert len(heights) == len(curve["held_out"]) and heights[-1] > heights[0]  # down the page


def test_a_box_is_above_what_it_uses():
    assert graphs.ranks([("a", "b"), ("b", "c"), ("a", "c"), ("d", "c")]) == [["a"], ["b", "d"], ["c"]]
    drawn = graphs.replace("x\n```mermaid\nflowchart TD\n  a --> b\n```\ny")
    assert drawn.startswith('x\n<div class="wide"><svg') and drawn.count("<rect") == 2 and drawn.count('class="edge"') == 1
