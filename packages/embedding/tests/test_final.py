"""Results of final modules: what the compilers hand to the chip, at their addresses, with every check of npu-offline's."""

from types import SimpleNamespace

import lookup
import ngrams
import npu_offline
import pytest
import torch
from bags import OFFSETS, compare

REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]
PLACE = SimpleNamespace(name="final", torch=torch.device("cpu"))
CASES = {  # indices, rows, width, dtype, kind of indices
    "several rows a tile": ((500, 60, 123, torch.float32, "zipf"), {"padding_idx": 2}),
    "a run over many programs": ((500, 60, 768, torch.bfloat16, "equal"), {"scale_grad_by_freq": True}),
    "rows in columns": ((50, 30, 16411, torch.float32, "uniform"), {}),
    "two blocks of keys": ((2100, 900, 64, torch.float16, "uniform"), {}),
    "a shard": ((500, 60, 1000, torch.bfloat16, "uniform"), {"vocab_range": (20, 80)}),
}


@pytest.fixture(autouse=True, params=npu_offline.VERSIONS)
def chip(request):
    with npu_offline.emulate("Ascend910B4", toolchain=request.param, checks=True) as emulation:
        yield emulation


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_rows_and_gradients_are_those_of_the_definition(name):
    sizes, options = CASES[name]
    case = lookup.make(*sizes, **options)
    lookup.check(case, lookup.run(case, "cpu"))


@pytest.mark.few(1)
def test_ngrams_are_those_of_python_s_integers():
    case = ngrams.make((2, 21), 160, torch.float32, history=True)
    ngrams.check(case, ngrams.run(case, "cpu"))


@pytest.mark.few(1)
def test_bags_of_equal_lengths_are_those_of_the_definition():
    indices, weight, samples = lookup.small_table(60, 123)
    compare(PLACE, indices, weight, samples, torch.arange(60) // 5, (12, 5), mode="sum")


@pytest.mark.few(1)
def test_bags_between_offsets_are_those_of_the_definition():
    indices, weight, _ = lookup.small_table(60, 123)
    ends = torch.tensor(OFFSETS[:-1])
    bags = torch.searchsorted(ends, torch.arange(60), right=True) - 1
    compare(PLACE, indices, weight, None, bags, offsets=ends, mode="mean", padding_idx=1)
