"""The tile search, and what the packages' tilings chose against it."""

import dataclasses
import json
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
    with answering(lambda number, _: {"ROWS": 3} if number == 0 else None) as sites:
        unseen = dataclasses.replace(npu_tiling.soc("Ascend910B4"), name="a chip that no tiling remembers")
        with record("Ascend910B4") as launches, npu_tiling.use_device(unseen, emulated=True):
            call()
    forward, backward, _ = launches
    assert (forward.constants["M"], backward.constants["M"]) == (3, dict(sites[1].chosen)["ROWS"])


def test_search_ranks_candidates_and_knows_the_choice_they_replace():
    tuned = search(*sized("rms_norm", "x 1024"), kernel="forward")
    assert [dict(one.site.chosen).keys() for one in tuned] == [{"ROWS"}]
    seconds = [candidate.seconds for candidate in tuned[0].candidates if candidate.seconds is not None]
    assert seconds == sorted(seconds)
    assert len({candidate.chosen for candidate in tuned[0].candidates}) == 1
    for candidate in tuned[0].candidates:
        assert f" M={candidate.sizes['ROWS']}," in candidate.kernels[0]


def test_the_command_needs_calls_of_a_size(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "ascend_calls.py").write_text("def calls():\n    yield 'one', lambda: None\n")
    with pytest.raises(OfflineError, match="must define sized_calls"):
        check.load_calls(tmp_path, "sized_calls")
    assert main(["tune", str(tmp_path)]) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("package", "text", "kernel"),
    [
        ("rms_norm", "x 2048", "forward"),
        ("rms_norm", "x 2048", "backward_kernel"),
        ("embedding", "fp32", "gather"),
        ("embedding", "fp32", "sum_rows"),
        ("attn_res", "x 4096", "forward"),
        ("attn_res", "x 2048", "forward"),
    ],
)
def test_choice_is_within_five_percent_of_the_best_candidate(package, text, kernel):
    tuned = search(*sized(package, text), kernel=kernel)
    assert tuned
    for one in tuned:
        assert one.candidates
        assert one.best is None or one.best.gain <= MARGIN, one.best


# A package that is not of this repository: a kernel whose block is the caller's choice.
MINE = """
import sys
import torch
sys.path.insert(0, "{folder}")
from sample_kernels import cast

def calls():
    yield "4096", lambda: cast[(4,)](torch.empty(4096), torch.empty(4096, dtype=torch.bfloat16), BN=1024)

def run(BN):
    cast[(4096 // BN,)](torch.empty(4096), torch.empty(4096, dtype=torch.bfloat16), BN=BN)

def sized_calls():
    yield "4096", {call}
"""


def mine(folder, call):
    (folder / "tests").mkdir()
    (folder / "tests" / "ascend_calls.py").write_text(MINE.format(folder=Path(__file__).parent, call=call))
    return str(folder)


def test_a_kernel_of_any_package_is_tuned_over_the_sizes_that_it_lists(tmp_path, capsys):
    table = tmp_path / "table.json"
    main(["tune", mine(tmp_path, "run, {'BN': (1024, 64, 2048)}"), "--json", str(table)])
    assert "(in use)" in capsys.readouterr().out
    (tuned,) = json.loads(table.read_text())
    assert tuned["chosen"] == {"BN": 1024}
    assert {candidate["sizes"]["BN"] for candidate in tuned["candidates"]} == {64, 2048}
    by_size = {candidate["sizes"]["BN"]: candidate["seconds"] for candidate in tuned["candidates"]}
    assert by_size[64] > tuned["candidates"][0]["chosen"], "sixty-four programs cost more than four"


def test_what_cannot_be_timed_is_not_a_tile_that_does_not_fit(tmp_path, capsys):
    target = mine(tmp_path, "run, {'BN': (1024, 64)}")
    assert main(["tune", target, "--soc", "Ascend910_9392"]) == 2  # whose clock nobody has published
    said = " ".join(capsys.readouterr().out.split())
    assert "nothing could be timed" in said
    assert "BN=64: not timed: soc is Ascend910_9392, must be a chip whose bandwidth and clock are known" in said
    assert main(["time", target, "--soc", "Ascend910_9392"]) == 2
    assert "soc is Ascend910_9392, must be a chip" in " ".join(capsys.readouterr().out.split())


def test_a_call_with_nothing_to_tune_is_an_error_that_says_how_to_list_sizes(tmp_path, capsys):
    assert main(["tune", mine(tmp_path, "lambda: run(1024)")]) == 2
    assert "Have sized_calls() list them" in capsys.readouterr().err
