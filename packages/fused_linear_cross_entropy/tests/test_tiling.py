"""Tiling is plain arithmetic: no Triton, no device."""

import dataclasses

import pytest
import torch
from npu_fused_linear_cross_entropy.call import Needs, Options
from npu_fused_linear_cross_entropy.decide import DEFAULT_BUDGET, Shape, Task, Way, choose
from npu_fused_linear_cross_entropy.loss.gradients import scale_tiling
from npu_fused_linear_cross_entropy.tiling import ChunkKernel, ChunkShape, chunk_tiling
from npu_tiling import SOCS, Device, collectives, soc

from testing.operators import *  # noqa: F403

WITHOUT_TRITON = (
    "npu_fused_linear_cross_entropy",
    "tokens=8, width=64, vocabulary=99",
    "fused_linear_cross_entropy(torch.randn(4, 8), torch.randn(9, 8), torch.arange(4))",
)
B4 = soc("Ascend910B4")
H200 = Device("H200", "cuda", "sm_90", 132, 132, 232448, max_grid=2**31 - 1)
CHIPS = [*{dataclasses.replace(chip, name=""): chip for chip in SOCS.values()}.values(), H200]  # names apart, each once
VOCABULARIES = [1, 2, 16, 123, 1000, 2048, 4096, 8192, 32000, 50257, 128256, 151936, 256000, 10**7]
PLAIN = ChunkShape(kernel=ChunkKernel.BOTH, width=1000, itemsize=4, written_itemsize=2)
EVERYTHING = dataclasses.replace(PLAIN, smoothed=True, argmax=True, transformed=True)
SHAPES = {
    "plain": PLAIN,
    "loss alone": dataclasses.replace(PLAIN, kernel=ChunkKernel.STATISTICS, written_itemsize=0),
    "gradient alone": dataclasses.replace(PLAIN, kernel=ChunkKernel.GRADIENT),
    "narrow": dataclasses.replace(PLAIN, itemsize=2),
    "everything": EVERYTHING,
    "entropy": dataclasses.replace(EVERYTHING, kernel=ChunkKernel.STATISTICS, written_itemsize=0, entropy=True),
    "distributions": dataclasses.replace(
        EVERYTHING, kernel=ChunkKernel.DISTRIBUTIONS, written_itemsize=0, argmax=False, entropy=True
    ),
    "distributions' gradient": dataclasses.replace(
        EVERYTHING, kernel=ChunkKernel.DISTRIBUTION_GRADIENT, argmax=False, entropy=True
    ),
    "exponentials": dataclasses.replace(PLAIN, kernel=ChunkKernel.EXPONENTIALS),
}


def shaped(what, width):
    return dataclasses.replace(SHAPES[what], width=width)


def widths(what):
    """Vocabularies; a kernel of exponentials notes a number for each tile, for which a row of ten million has no room."""
    return VOCABULARIES[:-1] if what == "exponentials" else VOCABULARIES


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_tiles_cover_a_row_and_fit(chip):
    for what in SHAPES:
        for width in widths(what):
            launch = chunk_tiling(shaped(what, width), chip)
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
                assert launch.constants.get("BARRIER", False) == (
                    what not in ("loss alone", "narrow", "entropy", "distributions")
                )


@pytest.mark.parametrize("what", SHAPES)
def test_transfers_of_long_rows_are_large(what):
    for width in widths(what)[8:]:
        launch = chunk_tiling(shaped(what, width), B4)
        tile = launch.block_m * launch.block_n * launch.shape.itemsize
        # Of bf16 logits, room for loads beside the arithmetic comes first: it is worth more than the last 2 KiB.
        assert tile >= (8 if launch.shape.itemsize == 4 else 5.5) * 1024
        assert launch.tail_n < launch.block_n


def test_short_rows_share_a_tile():
    assert chunk_tiling(shaped("plain", 123), B4).block_m == 33
    assert chunk_tiling(shaped("plain", 1000), B4).block_m == 4
    assert not chunk_tiling(shaped("plain", 3000), B4).streams
    assert chunk_tiling(shaped("plain", 123), H200).block_m == 32


def test_lengths_of_blocks_leave_short_tails():
    for width in (32000, 50257, 128256, 151936, 256000):
        assert chunk_tiling(shaped("plain", width), B4).tail_n <= 145
    for width in (32000, 256000):
        assert chunk_tiling(shaped("plain", width), B4).tail_n == 0


@pytest.mark.parametrize("width", [123, 1000, 50257, 128256])
def test_smaller_launches_shrink_to_an_end(width):
    launch = chunk_tiling(shaped("plain", width), B4)
    seen = [launch]
    while (following := seen[-1].smaller()) is not None:
        seen.append(following)
        assert len(seen) < 100
    assert len(set(seen)) == len(seen)
    assert seen[-1].ub_bytes < 32 * 1024
    assert chunk_tiling(shaped("plain", width), H200).smaller() is None


def test_scaling_takes_every_core_and_no_more():
    assert scale_tiling(2, B4).grid(10**9) == 40
    assert scale_tiling(2, H200).grid(1) == 1


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setattr(collectives, "ranks", lambda group: 2)


def of_a_rank(device=H200, **given):
    """The shape of a rank's part of a vocabulary."""
    plain = Shape(
        task=Task.LOSS_AND_GRADIENTS,
        tokens=512,
        width=4096,
        vocabulary=8016,
        x_dtype=torch.bfloat16,
        weight_dtype=torch.bfloat16,
        bias_dtype=None,
        options=Options(group="ranks"),
        needs=Needs(True, True, False),
        unfinished=False,
        writes_fp32=True,
        is_readable=False,
        device=device,
    )
    return plain._replace(**given)


@pytest.mark.parametrize(
    ("width", "vocabulary", "way"),
    [
        (256, 501, Way.WHOLE_ROWS),
        (4096, 8016, Way.WHOLE_ROWS),
        (1024, 8016, Way.EXPONENTIALS),
        (256, 64128, Way.EXPONENTIALS),
    ],
)
def test_ranks_sweep_short_rows_twice(two_ranks, width, vocabulary, way):
    shape = of_a_rank(width=width, vocabulary=vocabulary, options=Options(group="ranks", vocab_size=2 * vocabulary))
    assert choose(shape).way is way


@pytest.mark.parametrize("device", [None, B4, H200], ids=["cpu", "B4", "H200"])
@pytest.mark.parametrize("tokens", [0, 1, 1000, 4096, 30000])
@pytest.mark.parametrize("width", [256, 8192])
@pytest.mark.parametrize("task", [Task.LOSS_AND_GRADIENTS, Task.LOSS, Task.DISTRIBUTIONS])
def test_ranks_cut_tokens_alike(two_ranks, device, tokens, width, task):
    """With unequal parts of the vocabulary, and where TMA can read the tensors of one rank alone."""
    for size in (1000, 128257):
        for given in ({}, {"chunk_tokens": 512}, {"memory_budget": 2**24}, {"accum_dtype": torch.float32}):
            options = Options(group="ranks", vocab_size=size, **given)
            shape = of_a_rank(device, task=task, tokens=tokens, width=width, options=options)
            ranks = [
                choose(shape._replace(vocabulary=own, is_readable=readable, options=options._replace(vocab_first=first)))
                for own, readable, first in ((size - size // 2, True, 0), (size // 2, False, 9), (size // 4, True, 7))
            ]
            cuts = {tuple((part.start, part.stop) for part in rank.chunks.tokens) for rank in ranks}
            assert len(cuts) == 1
            assert all(rank.chunks.columns[-1].stop == rank.shape.vocabulary for rank in ranks)


def test_rows_of_x_count_in_a_rank_s_budget(two_ranks):
    """x and the sums of its gradient, [tokens, H], are in memory with the logits of a chunk, and may be wider."""
    for own in (4000, 1000, 7000):
        tiling = choose(of_a_rank(tokens=30000, width=8192, vocabulary=own, options=Options(group="ranks", vocab_size=8000)))
        assert tiling.chunks.longest[0] * (4000 * 4 + 8192 * (2 + 4)) <= DEFAULT_BUDGET["cuda"]


@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary", "way", "longest"),
    [
        (4096, 4096, 128256, Way.PRODUCT, 4096),
        (8192, 2048, 151936, Way.PRODUCT, 4096),
        (8192, 4096, 32000, Way.PRODUCT, 8192),
        (3000, 4096, 32000, Way.PRODUCT, 3000),
        (4096, 4096, 400000, Way.KEPT_PRODUCT, 4096),  # 1677 rows fit, of the 2048 that hide the weight's traffic
        (8192, 4096, 400000, Way.PRODUCT, 1408),  # more tokens than columns
    ],
)
def test_chunks_are_as_long_as_pays_where_a_kernel_multiplies(tokens, width, vocabulary, way, longest):
    tiling = choose(of_a_rank(tokens=tokens, width=width, vocabulary=vocabulary, options=Options(), is_readable=True))
    assert (tiling.way, tiling.chunks.longest[0]) == (way, longest)
