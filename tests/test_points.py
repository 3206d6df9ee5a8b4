"""Published times beside predictions: what stands on the page is what was predicted, and what counts was not fitted to."""

import math
import re

import pytest
from npu_offline import installed
from npu_offline.timing import constants

from tools.compare import data_copy, fetch, page, predicted
from tools.compare.points import POINTS, SOURCES
from tools.compare.predicted import Prediction, counted, spread, times
from tools.docs import scatter

FOUND = page.load()


def test_every_point_has_its_row_and_every_source_its_points():
    rows = [(each.source, each.kernel, each.commit, each.published) for each in FOUND]
    assert rows == [(point.source, point.kernel, point.commit[:10], point.microseconds) for point in POINTS]
    assert len({point.label + point.commit for point in POINTS}) == len(POINTS)
    assert {point.source for point in POINTS} == set(SOURCES)


def test_at_least_sixty_points_of_six_projects_count():
    kept = counted(FOUND)
    assert len(kept) >= 60
    assert len({SOURCES[each.source].repository for each in kept}) >= 6


def test_every_source_says_how_it_was_measured():
    for source in SOURCES.values():
        assert source.where and source.stated and source.stack and source.toolchain and source.l2
        assert re.fullmatch(r"[\w-]+/[\w-]+", source.repository)


def test_a_point_that_a_constant_was_chosen_after_does_not_count():
    beginnings = [beginning for constant in constants.constants().values() for beginning in constant.fitted]
    for beginning in beginnings:
        of_it = [each for each in FOUND if f"{each.source} {each.kernel} {each.arguments} ".startswith(beginning)]
        assert of_it, f"{beginning} is no point"
        assert all(each.fitted for each in of_it)
    assert all(each not in counted(FOUND) for each in FOUND if each.fitted)


def test_the_goal_is_met():
    found = spread(each.ratio for each in counted(FOUND))
    assert found.median <= 0.15
    assert found.nine_of_ten <= 0.40


def test_the_range_of_an_estimate_is_what_the_points_show():
    assert (constants.RANGE_LOW.value, constants.RANGE_HIGH.value) == tuple(round(time, 2) for time in times(FOUND))


def test_half_and_twice_are_equally_wrong():
    assert spread([0.5]).median == spread([2.0]).median == pytest.approx(1)
    found = spread([1.0, 1.1, 1.2, 0.5])
    assert (found.number, found.median) == (4, pytest.approx(0.15))
    assert found.nine_of_ten == pytest.approx(1)


def test_nine_of_ten_published_times_lie_within_the_range():
    given = [Prediction("s", "k", "", "", published=1 + n / 10, predicted=1.0) for n in range(20)]
    low, high = times(given)
    assert sum(low <= each.published <= high for each in given) == 18


def test_the_plot_has_every_prediction_and_marks_those_that_do_not_count():
    drawn = scatter.figure(page.RESULTS)
    assert drawn.count("<title>") == sum(not each.problem for each in FOUND)
    assert drawn.count('fill="none"') == sum(each.fitted for each in FOUND)


def test_a_prediction_can_be_made_again():
    kept = next(each for each in FOUND if each.kernel == "data_copy")
    point = next(point for point in POINTS if point.kernel == "data_copy")
    seconds, _ = data_copy.seconds(SOURCES[point.source].chip, **point.arguments)
    assert seconds * 1e6 == pytest.approx(kept.predicted)


@pytest.mark.compilers
@pytest.mark.skipif("1.1.0" not in installed(), reason="needs a toolchain (npu-offline fetch 1.1.0)")
def test_a_kernel_of_another_project_is_predicted_from_its_own_source(tmp_path, monkeypatch):
    source = """
import triton, triton.language as tl
BLOCK = 2048

@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + o, tl.load(x_ptr + o, o < n) + tl.load(y_ptr + o, o < n), o < n)
"""
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "vector_add_bench.py").write_text(source)
    monkeypatch.setattr(fetch, "folder", lambda source, commit: tmp_path)
    (first, *_) = predicted.predictions("vTriton vector_add")
    assert 1 / 3 < first.ratio < 3 and math.isfinite(first.pipes["V"][1])
