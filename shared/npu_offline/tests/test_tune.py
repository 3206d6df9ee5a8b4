"""The tile search, and what the packages' tilings chose against it."""

import dataclasses
from pathlib import Path

import npu_tiling
import pytest
from npu_offline import OfflineError, check, record
from npu_offline.cli import main
from npu_offline.tune import search
from npu_offline.tune.sizes import Site, answering
from npu_tiling import Block

PACKAGES = Path(__file__).parents[3] / "packages"
MARGIN = 0.05
rms_norm = pytest.importorskip("npu_rms_norm", reason="the operators' packages are not installed")


def sized(package, text):
    return next(call for call in check.load_calls(PACKAGES / package, "sized_calls") if text in call[0])


def test_other_sizes_are_allowed_ones_around_what_was_chosen():
    site = Site((Block("ROWS", 12, 2, 2), Block("COLUMNS", 64, 16, 16)), (("ROWS", 8), ("COLUMNS", 64)))
    others = site.others()
    assert {"ROWS": 8, "COLUMNS": 64} not in others
    assert {sizes["ROWS"] for sizes in others if sizes["COLUMNS"] == 64} == {2, 4, 6, 10, 12, 16, 32}
    assert {sizes["COLUMNS"] for sizes in others if sizes["ROWS"] == 8} == {16, 32, 48, 80, 96, 128, 256}


def test_a_tiling_takes_the_answer_it_is_given():
    _, call = sized("rms_norm", "x 1024")
    with answering("npu_rms_norm", lambda number, _: {"ROWS": 3} if number == 0 else None) as sites:
        unseen = dataclasses.replace(npu_tiling.soc("Ascend910B4"), name="a chip that no tiling remembers")
        with record("Ascend910B4") as launches, npu_tiling.use_device(unseen, emulated=True):
            call()
    forward, backward, _ = launches
    assert (forward.constants["BLOCK_M"], backward.constants["BLOCK_M"]) == (3, dict(sites[1].chosen)["ROWS"])


def test_search_ranks_candidates_and_knows_the_choice_they_replace():
    tuned = search("npu_rms_norm", *sized("rms_norm", "x 1024"), kernel="forward")
    assert [dict(one.site.chosen).keys() for one in tuned] == [{"ROWS"}]
    seconds = [candidate.seconds for candidate in tuned[0].candidates if candidate.seconds is not None]
    assert seconds == sorted(seconds)
    assert len({candidate.chosen for candidate in tuned[0].candidates}) == 1
    for candidate in tuned[0].candidates:
        assert f"BLOCK_M={candidate.sizes['ROWS']}," in candidate.kernels[0]


def test_the_command_needs_calls_of_a_size(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "ascend_calls.py").write_text("def calls():\n    yield 'one', lambda: None\n")
    with pytest.raises(OfflineError, match="must define sized_calls"):
        check.load_calls(tmp_path, "sized_calls")
    assert main(["tune", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("package", "text", "kernel"),
    [
        ("rms_norm", "x 2048", "forward"),
        ("rms_norm", "x 2048", "backward_kernel"),
        ("embedding", "fp32", "gather"),
        ("embedding", "fp32", "store_zeros"),
        ("attn_res", "x 4096", "forward"),
        ("attn_res", "x 2048", "forward"),
    ],
)
def test_choice_is_within_five_percent_of_the_best_candidate(package, text, kernel):
    tuned = search(f"npu_{package}", *sized(package, text), kernel=kernel)
    assert tuned
    for one in tuned:
        assert one.candidates
        assert one.best is None or one.best.gain <= MARGIN, one.best
