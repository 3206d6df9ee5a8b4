import dataclasses
import itertools

import pytest
from npu_tiling import (
    Block,
    Candidate,
    Tile,
    UnifiedBufferError,
    first_fit,
    fit,
    footprint,
    passed_over,
    persistent_grid,
    soc,
)

B4 = soc("Ascend910B4")


def test_rows_are_padded_to_32_bytes():
    assert Tile("x", ("M", "N"), 2).nbytes({"M": 3, "N": 123}, 32) == 3 * 256
    assert Tile("x", (64, 1), 4).nbytes({}, 32) == 2048
    assert Tile("x", ("N",), 4).nbytes({"N": 9}, 32) == 64


def test_footprint_is_the_joint_one():
    tiles = [Tile("x", ("M", "N"), 2, buffers=2), Tile("acc", ("M", "N"), 4), Tile("w", ("N",), 4)]
    assert footprint(tiles, {"M": 4, "N": 1024}, B4) == 4 * 1024 * (2 * 2 + 4) + 1024 * 4


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [1, 7, 123, 1000, 4096, 20000])
def test_choice_fits_and_the_next_size_would_not(itemsize, width):
    tiles = [Tile("x", ("M", "N"), itemsize, buffers=2), Tile("acc", ("M", "N"), 4)]
    chosen = fit(tiles, [Block("M", 4096), Block("N", width, 16, 16)], B4)
    assert footprint(tiles, chosen, B4) <= B4.ub_bytes
    if chosen["N"] == width and chosen["M"] < 4096:
        assert footprint(tiles, {**chosen, "M": chosen["M"] + 1}, B4) > B4.ub_bytes
    if chosen["N"] < width:
        assert chosen["M"] == 1
        assert footprint(tiles, {**chosen, "N": chosen["N"] + 16}, B4) > B4.ub_bytes


def test_agrees_with_trying_every_size():
    tiles = [Tile("a", ("M", "K"), 2, 2), Tile("b", ("K", "N"), 2, 2), Tile("c", ("M", "N"), 4)]
    blocks = [Block("K", 128, 16, 16), Block("N", 256, 32, 32), Block("M", 256, 16, 16)]
    small = dataclasses.replace(B4, ub_bytes=60_000)
    fitting = [
        sizes
        for sizes in itertools.product(*(block.sizes() for block in blocks))
        if footprint(tiles, dict(zip("KNM", sizes, strict=True)), small) <= small.ub_bytes
    ]
    # The last block is the one to keep, so the best choice is the largest M, then the largest N, then the largest K.
    assert tuple(fit(tiles, blocks, small)[name] for name in "KNM") == max(fitting, key=lambda s: (s[2], s[1], s[0]))


def test_sizes_keep_to_their_multiple():
    assert Block("N", 100, 10, 32).sizes() == [10, 32, 64, 96, 100]


def test_nothing_shrinks_without_need():
    assert fit([Tile("x", ("M", "N"), 2)], [Block("M", 8), Block("N", 512)], B4) == {"M": 8, "N": 512}


@pytest.mark.parametrize(("width", "found"), [(1000, ("two buffers", {"M": 48})), (40000, ("one buffer", {}))])
def test_the_first_way_that_fits_is_taken(width, found):
    candidates = [
        Candidate("two buffers", [Tile("x", ("M", width), 2, 2)], [Block("M", 4096, 2)]),
        Candidate("one buffer", [Tile("x", (1, width), 2)]),
        Candidate("columns", [Tile("x", (1, "N"), 2)], [Block("N", width)]),
    ]
    assert first_fit(candidates, B4) == found
    before = {"two buffers": None, "one buffer": ("two buffers", 8 * width), "columns": ("one buffer", 2 * width)}
    assert passed_over(candidates, found[0], B4) == before[found[0]]


def test_no_way_that_fits_is_an_error_of_the_last_one():
    candidates = [Candidate(name, [Tile(name, (200_000,), 4)]) for name in ("several", "one")]
    with pytest.raises(UnifiedBufferError, match="one 800000"):
        first_fit(candidates, B4)


def test_error_names_every_tile_and_the_bytes():
    tiles = [Tile("query", ("M", 40000), 4), Tile("key", (10000,), 4)]
    with pytest.raises(
        UnifiedBufferError, match=r"M=1\) needs 200000 bytes .* Ascend910B4 has 196608: query 160000, key 40000"
    ):
        fit(tiles, [Block("M", 16)], B4)


@pytest.mark.parametrize(("tiles", "programs"), [(0, 1), (1, 1), (39, 39), (40, 40), (10**9, 40)])
def test_grid_is_cores_or_tiles(tiles, programs):
    assert persistent_grid(tiles, B4) == programs


def test_grid_by_kind_of_core_and_limit():
    assert persistent_grid(1000, B4, per_core=3) == 120
    assert persistent_grid(10**9, B4, per_core=10**6) == B4.max_grid
