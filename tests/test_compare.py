"""The comparison: the time model against published times, and our kernels against liger's for Ascend."""

import dataclasses
import json
import re
import sys

import pytest
from npu_offline import installed
from npu_offline.timing import Timing

from tools.compare import depth, fla, peers
from tools.compare.__main__ import main, missed
from tools.compare.published import PUBLISHED, SOURCES
from tools.compare.results import GOALS, results

SMALL = {"rms_norm": 1024, "embedding": 1024, "attn_res": 1024, "fused_linear_cross_entropy": 4096}
pytestmark = [
    pytest.mark.compilers,
    pytest.mark.skipif("1.2.0" not in installed(), reason="needs a toolchain (npu-offline fetch 1.2.0)"),
]


@pytest.fixture(scope="module")
def found():
    """One size of every operator and direction, ours and, where the wheel is there, liger's."""
    chosen = tuple(row for row in PUBLISHED if row.size == SMALL[row.operator])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.compare.cases.PUBLISHED", chosen)
        return list(results(None, "1.2.0"))


def test_every_published_time_says_where():
    assert {row.operator for row in PUBLISHED} == set(SOURCES)
    assert all(re.match(r"linkedin/Liger-Kernel#\d+", source) for source in SOURCES.values())


def test_no_published_time_is_below_the_bound(found):
    for result in found:
        if result.timings:
            bound = max(result.bound, result.bound + result.other * 221.5 / 245.8)  # matrix products at their peak
            assert bound <= result.row.existing, result
            assert bound <= result.row.pytorch, result


def test_every_operator_is_predicted(found):
    ours = [result for result in found if result.whose == "ours"]
    assert len(ours) == 6
    assert not [result.problem for result in ours if result.problem]


def test_bound_is_never_above_the_estimate_and_about_the_floor_where_all_bytes_are_certain(found):
    for result in found:
        assert result.bound < result.predicted
        if result.row.operator in ("rms_norm", "attn_res") and result.whose == "ours":
            assert result.bound == pytest.approx(result.row.floor, rel=0.05)


@pytest.mark.skipif(peers.missing() is not None, reason=f"liger-kernel is not installed: {peers.missing()}")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_liger_attn_res_is_predicted_within_a_third_of_what_was_published(found, direction):
    (result,) = (r for r in found if (r.row.operator, r.row.direction, r.whose) == ("attn_res", direction, "liger"))
    assert result.predicted == pytest.approx(result.row.existing, rel=1 / 3)


def test_ours_moves_less_and_is_predicted_faster_than_liger_attn_res(found):
    by_whose = {(r.row.direction, r.whose): r for r in found if r.row.operator == "attn_res"}
    for (direction, whose), ours in by_whose.items():
        if whose == "ours" and (direction, "liger") in by_whose:
            assert ours.predicted < 0.5 * by_whose[direction, "liger"].predicted


@pytest.mark.few(1)
@pytest.mark.parametrize("operator", ["rms_norm", "embedding"])
def test_goal_is_met(found, operator):
    ours = [result for result in found if result.row.operator == operator and result.whose == "ours"]
    assert ours
    assert all(result.above_floor <= GOALS[operator] for result in ours)


def test_results_above_their_goal_are_named(found):
    timing = dataclasses.replace(next(r for r in found if r.whose == "ours").timings[0], estimate=1.0)
    assert isinstance(timing, Timing)
    slow = dataclasses.replace(next(r for r in found if r.whose == "ours"), timings=(timing,))
    assert missed([slow]) == [slow]
    assert missed([dataclasses.replace(slow, whose="liger")]) == []


def test_command_writes_the_table(tmp_path, capsys):
    path = tmp_path / "table.json"
    assert main(["--operator", "embedding", "--json", str(path)]) == 0
    lines = json.loads(path.read_text())
    assert {line["operator"] for line in lines} == {"embedding"}
    assert {line["size"] for line in lines} == {1024, 131072}
    assert "predicted" in capsys.readouterr().out.lower()


@pytest.fixture(scope="module")
def deep():
    """attn_res of both widths and forms, and few tokens."""
    return list(depth.depths("1.2.0", tokens=256))


def test_depths_are_predicted_stacked_and_as_lists_at_both_widths(deep):
    ours = [one for one in deep if one.whose == "ours"]
    assert {(one.width, one.listed, one.direction) for one in ours} == {
        (width, listed, direction)
        for width in depth.WIDTHS
        for listed in (False, True)
        for direction in ("forward", "backward")
    }
    assert all(one.floor < one.kernels and not one.problem for one in ours)


@pytest.mark.skipif(fla.missing() is not None, reason=f"fla-core is not installed: {fla.missing()}")
def test_ours_is_predicted_faster_than_fla(deep):
    by_whose = {(one.whose, one.width, one.listed, one.direction): one for one in deep}
    theirs = [one for one in deep if one.whose == "fla"]
    assert len(theirs) == 8 and not [one.problem for one in theirs if one.problem]
    assert all(by_whose["ours", one.width, one.listed, one.direction].kernels < one.kernels / 2 for one in theirs)
    assert "fla" not in sys.modules  # the stand-ins of its packages are gone


def test_depths_are_a_command(tmp_path, capsys, monkeypatch, deep):
    monkeypatch.setattr(depth, "depths", lambda toolchain: iter(deep))
    path = tmp_path / "table.json"
    assert main(["--depths", "--json", str(path)]) == 0
    assert len(json.loads(path.read_text())) == len(deep)
    assert "7168" in capsys.readouterr().out
