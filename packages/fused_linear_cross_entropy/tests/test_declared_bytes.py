"""The Unified Buffer that tilings declare, against the Ascend compilers: every kind of shape, both families of chips. The
widest tile that is declared to fit fits with every compiler."""

import dataclasses
import itertools

import npu_offline
import npu_tiling
import pytest
from npu_fused_linear_cross_entropy.loss.rows import RowKernel, row_tiling
from npu_fused_linear_cross_entropy.tiling import AscendTiling, ChunkKernel, ChunkShape

from testing.ascend import *  # noqa: F403
from testing.ascend import FAMILIES, Declared, fits_everywhere, launches

PASSES = ("cross_entropy_kernel", "cross_entropy_exponentials_kernel", "cross_entropy_statistics_kernel")
PASSES += ("distribution_statistics_kernel", "distillation_kernel")
PLAIN = ChunkShape(kernel=ChunkKernel.BOTH, width=1000, itemsize=4, written_itemsize=2)
ALONE = {"kernel": ChunkKernel.STATISTICS, "written_itemsize": 0}
DISTILLED = {"kernel": ChunkKernel.DISTILLATION}
DISTRIBUTIONS = {"kernel": ChunkKernel.DISTRIBUTIONS, "smoothed": True, "entropy": True, "transformed": True}
# Of each shape: the call that has it, without the vocabulary, and what differs from the plain one.
SHAPES = {
    "exponentials": ("", {"kernel": ChunkKernel.EXPONENTIALS}),
    "exponentials of narrow logits": (", narrow logits", {"itemsize": 2, "kernel": ChunkKernel.EXPONENTIALS}),
    "loss alone": (", loss alone", ALONE),
    "smoothing": (", smoothing", {"smoothed": True}),
    "smoothing, weights": (", smoothing, class weights", {"smoothed": True, "weighted": True}),
    "accuracy": (", accuracy", {"argmax": True}),
    "entropy": (", entropy", {**ALONE, "entropy": True}),
    "softcap": (", softcap", {"transformed": True}),
    "everything": (", everything", {"smoothed": True, "weighted": True, "argmax": True, "transformed": True}),
    "everything, entropy": (
        ", everything, entropy",
        {**ALONE, "smoothed": True, "weighted": True, "argmax": True, "transformed": True, "entropy": True},
    ),
    **{f"distilled, {what}": (f", distilled, {what}", DISTILLED) for what in ("forward", "Jensen-Shannon")},
    "distilled, everything": (", distilled, everything", {**DISTILLED, "transformed": True}),
    "distributions": (", distributions", {**ALONE, **DISTRIBUTIONS}),
    "distributions, softcap": (", distributions, everything", {**ALONE, **DISTRIBUTIONS}),
}
FORMS = ("whole rows", "two whole rows", "blocks", "blocks and a tail")


def declared(soc, what, tile, marks=pytest.mark.nightly):
    more, changes = SHAPES[what]
    # Whole rows on chip are no reason for exponentials; chunks of columns are.
    vocabulary = 1000 if "rows" in tile and "exponentials" not in what else 128256

    def launch(block):
        whole, tail = "rows" in tile, block // 2 if "tail" in tile else 0
        shape = dataclasses.replace(PLAIN, **{**changes, "width": block if whole else 8 * block + tail})
        rows, columns, tail = (2 if "two" in tile else 8, block + 16, block) if whole else (2, block, tail)
        return AscendTiling(shape=shape, device=npu_tiling.soc(soc), block_m=rows, block_n=columns, tail_n=tail)

    def fits(block):
        records = launches(__file__, f"bfloat16 {vocabulary}{more}", soc)
        return fits_everywhere(next(record for record in records if record.name in PASSES), launch(block).constants, soc)

    return Declared(f"{soc}, {what}, {tile}", soc, lambda block: launch(block).ub_bytes, fits, marks=marks)


DECLARED = [declared(*case) for case in itertools.product(reversed(FAMILIES), SHAPES, FORMS)]
DECLARED[0] = DECLARED[0]._replace(marks=())


@pytest.mark.few(1)
@pytest.mark.parametrize("soc", FAMILIES)
@pytest.mark.parametrize(
    ("kernel", "label"),
    [
        (RowKernel.TARGETS, "bfloat16 1000, everything"),
        (RowKernel.LOSSES, "bfloat16 1000, everything, each row"),
        (RowKernel.COEFFICIENTS, "bfloat16 1000, everything, each row"),
        (RowKernel.JOIN, "statistics of three ranks"),
    ],
    ids=["targets", "losses", "coefficients", "join"],
)
def test_rows_that_are_declared_to_fit_do_and_transfers_overlap(soc, kernel, label):
    """What the compilers take where they have room is declared: with less, they would not double every buffer."""
    record = next(record for record in launches(__file__, label, soc) if record.name == kernel.function)
    chosen = row_tiling(kernel, npu_tiling.soc(soc))
    for toolchain in filter(lambda version: npu_offline.supported(soc, version), npu_offline.VERSIONS):
        report = npu_offline.compile_kernel(record, soc=soc, toolchain=toolchain)
        assert report.double_buffered
        assert report.ub.used <= chosen.ub_bytes
