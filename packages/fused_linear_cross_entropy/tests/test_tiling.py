"""Tiling is plain arithmetic: no Triton, no device."""

import dataclasses
import subprocess
import sys

import pytest
from npu_fused_linear_cross_entropy.tiling import Problem, chunk_launch, scale_launch, smaller
from npu_tiling import SOCS, Device, soc

B4 = soc("Ascend910B4")
H200 = Device("H200", "cuda", "sm_90", 132, 132, 232448, max_grid=2**31 - 1)
VOCABULARIES = [1, 2, 16, 123, 1000, 2048, 4096, 8192, 32000, 50257, 128256, 151936, 256000, 10**7]
PLAIN = Problem(1000, 4, 2, True)
PROBLEMS = {
    "plain": PLAIN,
    "loss alone": dataclasses.replace(PLAIN, gradient_itemsize=0),
    "gradient alone": dataclasses.replace(PLAIN, statistics=False),
    "narrow": dataclasses.replace(PLAIN, itemsize=2),
    "everything": Problem(1000, 4, 2, True, True, False, True, True),
    "entropy": Problem(1000, 4, 0, True, True, True, True, True),
}


def problem(what, width):
    return dataclasses.replace(PROBLEMS[what], width=width)


def test_importing_tilings_needs_neither_triton_nor_a_device():
    code = (
        "import sys; sys.modules['triton'] = None; import npu_fused_linear_cross_entropy; "
        "sys.exit('torch.cuda.nvtx' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("chip", [*SOCS.values(), H200], ids=lambda chip: chip.name)
def test_tiles_cover_a_row_and_fit(chip):
    for what in PROBLEMS:
        for width in VOCABULARIES:
            launch = chunk_launch(problem(what, width), chip)
            full = width // launch.block_n * launch.block_n
            assert full + launch.tail_n >= width
            assert launch.streams == (full > 0)
            assert 1 <= launch.grid(10**6) <= chip.max_grid
            if chip.kind == "ascend":
                assert full + launch.tail_n == width  # no mask over columns
                assert launch.block_m >= 2  # row reductions stay in the vector unit
                assert launch.grid(10**6) == chip.vector_cores
                assert launch.ub_bytes <= chip.ub_bytes
            else:
                assert launch.block_n & (launch.block_n - 1) == launch.tail_n & (launch.tail_n - 1) == 0
                assert launch.constants.get("BARRIER", False) == (what not in ("loss alone", "narrow", "entropy"))


@pytest.mark.parametrize("what", PROBLEMS)
def test_transfers_of_long_rows_are_large(what):
    for width in VOCABULARIES[8:]:
        launch = chunk_launch(problem(what, width), B4)
        tile = launch.block_m * launch.block_n * launch.problem.itemsize
        # Of bf16 logits, room for loads beside the arithmetic comes first: it is worth more than the last 2 KiB.
        assert tile >= (8 if launch.problem.itemsize == 4 else 5.5) * 1024
        assert launch.tail_n < launch.block_n


def test_short_rows_share_a_tile():
    assert chunk_launch(problem("plain", 123), B4).block_m == 33
    assert chunk_launch(problem("plain", 1000), B4).block_m == 4
    assert not chunk_launch(problem("plain", 3000), B4).streams
    assert chunk_launch(problem("plain", 123), H200).block_m == 32


def test_lengths_of_blocks_leave_short_tails():
    for width in (32000, 50257, 128256, 151936, 256000):
        assert chunk_launch(problem("plain", width), B4).tail_n <= 145
    for width in (32000, 256000):
        assert chunk_launch(problem("plain", width), B4).tail_n == 0


@pytest.mark.parametrize("width", [123, 1000, 50257, 128256])
def test_smaller_launches_shrink_to_an_end(width):
    launch = chunk_launch(problem("plain", width), B4)
    seen = [launch]
    while (following := smaller(seen[-1])) is not None:
        seen.append(following)
        assert len(seen) < 100
    assert len(set(seen)) == len(seen)
    assert seen[-1].ub_bytes < 32 * 1024
    assert smaller(chunk_launch(problem("plain", width), H200)) is None


def test_scaling_takes_every_core_and_no_more():
    assert scale_launch(2, B4).grid(10**9) == 40
    assert scale_launch(2, H200).grid(1) == 1
