"""A launch that a compiler refuses has a smaller one with the same results, down to the least tile that its kernel takes."""

import lookup
import ngrams
import npu_offline
import pytest
import torch
from npu_embedding import EmbeddingBag, embedding, embedding_bag, ngram_embedding
from npu_embedding.bags import ascend as bags_page
from npu_embedding.bags.ascend import BAG_TILES, BAGS, SPREAD_TILES
from npu_embedding.lookup import ascend as lookup_page
from npu_embedding.lookup import ascend_sort as lookup_sort
from npu_embedding.lookup.ascend import GATHER, SUMS
from npu_embedding.ngram import ascend as ngram_page
from npu_embedding.ngram.ascend import NGRAM, NGRAM_SUM
from npu_tiling import UnifiedBufferError
from npu_tiling import launch as launcher

from testing.plugin import OVERFLOW

pytestmark = [
    pytest.mark.compilers,
    pytest.mark.skipif(not npu_offline.installed(), reason="needs triton-ascend and a toolchain (npu-offline fetch)"),
    pytest.mark.filterwarnings("ignore:.* overflows the Unified Buffer:RuntimeWarning"),
]


def kind_of(decision):
    return getattr(decision.tiling, "kernel", None)


def test_a_compiler_that_needs_more_gets_a_smaller_tile(npu_refuse):
    """Everything of more than 2 rows or 1024 columns overflows."""
    refused, _ = npu_refuse(
        lambda kernel, decision: (
            kernel not in ("sort_runs_kernel", "merge_runs_kernel")
            and (decision.constants.get("BLOCK_M", 0) > 2 or decision.constants["BLOCK_N"] > 1024)
        )
    )
    case = lookup.make(300, 50, 2048, torch.bfloat16, "zipf", seed=3)
    with npu_offline.emulate("Ascend910B4"):
        with pytest.warns(RuntimeWarning, match="overflows the Unified Buffer"):
            lookup.check(case, lookup.run(case, "cpu"))
        assert {kernel for kernel, _ in refused} == {"gather_rows_kernel", "sum_rows_kernel", "add_partials_kernel"}
        refused.clear()
        lookup.check(case, lookup.run(case, "cpu"))
    assert not refused  # what worked is remembered


@pytest.mark.parametrize(
    ("mode", "columns"), [("concat", 160), pytest.param("concat", 32, marks=pytest.mark.nightly), ("sum", 32)]
)
def test_the_ngram_lookup_hashes_whole_units_of_tokens_in_the_least_tile(npu_refuse, mode, columns):
    _, ran = npu_refuse(
        lambda _, decision: (
            kind_of(decision) in (NGRAM, NGRAM_SUM) and (decision.tiling.block_m > 8 or decision.tiling.block_n > columns)
        )
    )
    case = ngrams.make((2, 19), 160, torch.float32, mode=mode)
    with npu_offline.emulate("Ascend910B4"):
        ngrams.check(case, ngrams.run(case, "cpu"))
    tile = ran[0][1].tiling
    assert tile.block_m == 8 and tile.block_n <= columns < 2 * tile.block_n


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}])
def test_bags_of_whole_rows_become_bags_row_by_row(npu_refuse, options):
    _, ran = npu_refuse(lambda _, decision: kind_of(decision) in (BAG_TILES, SPREAD_TILES))
    torch.manual_seed(0)
    module, ids = EmbeddingBag(40, 64, mode="sum", **options), torch.randint(0, 40, (9, 4))
    expected = module(ids)
    (gradient,) = torch.autograd.grad(expected.square().sum(), module.weight)
    with npu_offline.emulate("Ascend910B4"):
        found = module(ids)
        (found_gradient,) = torch.autograd.grad(found.square().sum(), module.weight)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_gradient, gradient)
    assert BAGS in [kind_of(decision) for _, decision in ran]


def test_rows_that_no_launch_has_whole_are_normalised_by_pytorch(npu_refuse):
    npu_refuse(lambda _, decision: decision.constants.get("BLOCK_N", 0) == 64 and kind_of(decision) not in (GATHER, SUMS))
    weight, ids = torch.randn(40, 64, requires_grad=True), torch.randint(0, 40, (9,))
    expected = torch.nn.functional.rms_norm(weight[ids], (64,), eps=1e-3)
    (gradient,) = torch.autograd.grad(expected.square().sum(), weight)
    with npu_offline.emulate("Ascend910B4"):
        found = embedding(ids, weight, rms_norm_eps=1e-3)
        (found_gradient,) = torch.autograd.grad(found.square().sum(), weight)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-4, atol=1e-5)


WEIGHT, IDS = torch.randn(64, 32, requires_grad=True), torch.arange(20000) % 64
LAUNCHED = {  # every kernel, and a call that launches it
    "gather_rows_kernel": lambda: embedding(IDS, WEIGHT),
    **dict.fromkeys(
        ("sort_runs_kernel", "merge_runs_kernel", "sum_rows_kernel", "add_partials_kernel"),
        lambda: embedding(IDS, WEIGHT).sum().backward(),
    ),
    "find_slots_kernel": lambda: embedding(IDS, WEIGHT, sparse=True).sum().backward(),
    "sum_bags_kernel": lambda: embedding_bag(IDS.view(-1, 4), WEIGHT),
    "spread_bags_kernel": lambda: embedding_bag(IDS, WEIGHT, IDS[:60]).sum().backward(),
    "ngram_rows_kernel": lambda: ngram_embedding(IDS, WEIGHT, [3, 5], [31], [0], eos=0, ngram_size=2),
}


def test_every_kernel_is_launched_here():
    pages = (lookup_page, lookup_sort, bags_page, ngram_page)
    assert {name for page in pages for name in vars(page) if name.endswith("_kernel")} == {*LAUNCHED}


@pytest.mark.parametrize("kernel", LAUNCHED)
def test_a_launch_that_has_no_smaller_one_says_which_and_what_to_do(monkeypatch, kernel):
    """And not what a compiler says."""
    real = launcher.Launcher.__call__

    def call(self, *arguments):
        if self._kernel.__name__ == kernel:
            raise RuntimeError(OVERFLOW)
        real(self, *arguments)

    monkeypatch.setattr(launcher.Launcher, "__call__", call)
    monkeypatch.setattr(launcher, "replaced", {})
    said = r"not even its smallest tile runs: .*Tiling\(.* overflows the Unified Buffer .* Take a CANN"
    with npu_offline.emulate("Ascend910B4"), pytest.raises(UnifiedBufferError, match=said) as raised:
        LAUNCHED[kernel]()
    assert OVERFLOW in str(raised.value.__cause__) or OVERFLOW in str(raised.value.__cause__.__cause__)
