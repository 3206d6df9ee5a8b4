"""Look-ups and gradients with CUDA's launches, each way to a gradient, in Triton's interpreter: see test_cuda.py."""

import sys
from unittest import mock

import lookup
import ngrams
import npu_tiling
import numpy as np
import torch
from npu_embedding import cuda as bags_cuda
from npu_embedding import embedding, embedding_bag
from npu_embedding.lookup import cuda_sort
from npu_embedding.lookup.cuda_sort import GROUP, SEARCHED, Stage
from npu_embedding.rows import Way
from triton.runtime import interpreter

from testing.interpreter import mend

GPU = npu_tiling.Device("a GPU", "cuda", "sm_90", vector_cores=1, cube_cores=1, ub_bytes=232448, ub_align=16)
KERNEL_OF = {
    Way.SEARCHED: "sum_searched_kernel",
    Way.RANKED: "rank_runs_kernel",
    Way.REPEATED: "sum_bags_kernel",
    Way.SORTED: "mark_rows_kernel",
}
OUTSIDE = 2**40
# Ragged in indices, rows and columns; one group of indices and several; fewer rows than programs; all rows named, few, one.
CASES = {
    **{kind: lookup.make(1100, 1101, 12, kind=kind) for kind in lookup.KINDS},
    "sorted": lookup.make(1025, 64, 9),
    "reverse": lookup.make(1025, 64, 9),
    "frequency": lookup.make(385, 70, 33, kind="zipf", padding_idx=0, scale_grad_by_freq=True),
    "shard": lookup.make(300, 50, 33, vocab_range=(30, 80), padding_idx=31),
    "tiny": lookup.make(257, 1, 8, kind="equal"),
    "padding": lookup.make(257, 3, 8, padding_idx=1),
    "outside": lookup.make(300, 40, 16),
    "few": lookup.make(50, 20, 7, torch.float16, "zipf", padding_idx=3),
    "few, by frequency": lookup.make(30, 9, 500, kind="equal", scale_grad_by_freq=True),
    "few, of a shard": lookup.make(40, 50, 256, vocab_range=(30, 80)),
    "one": lookup.make(1, 5, 1030),
    "as many as are searched": lookup.make(SEARCHED, 70, 12, torch.float16, "zipf"),
    "as many, equal": lookup.make(SEARCHED, 3, 20, torch.bfloat16, "equal"),
    "columns of dy, int32": lookup.make(90, 40, 21, kind="zipf", padding_idx=1),
    "one row of dy": lookup.make(70, 9, 130),
}
AGAIN = ("as many, equal", "few, by frequency", "outside")  # are looked up twice: equal bits
SPARSE = ("zipf", "padding", "outside", "few")  # have a sparse gradient too
STAGES = (Stage(GROUP, 2, 16), Stage(2 * GROUP, 0, 8))
IN_STAGES = ("zipf", "equal", "outside", "sorted")  # are sorted in two stages too
UNSCALED = ("as many, equal", "one row of dy")
NGRAMS = {
    "n-grams": ngrams.make((3, 41), 100, torch.float32, history=True, ngram_size=4),
    "n-grams, added": ngrams.make((50,), 33, torch.float16, mode="sum", mix="sum", fill=0),
    "n-grams, own multipliers": ngrams.make((2, 30), 40, torch.float32, own=True, mix="sum", fill=0),
    "n-grams, one token": ngrams.make((4, 1), 9, torch.float32, history=True, heads=1),
}
# Options of bags of 60 indices; offsets, or ids to a bag; weights.
BAGS = {
    "bags": ({"mode": "mean", "padding_idx": 3}, 5, False),
    "bags with weights": ({"mode": "sum"}, 3, True),
    "bags between offsets": ({"mode": "sum", "padding_idx": 3}, [0, 7, 7, 30], True),
    "means between offsets": ({"mode": "mean"}, [0, 59], False),
}
# Options of bags in parts of 8 ids; whether they have weights.
LONG_BAGS = {
    "long bags": ({"mode": "sum", "padding_idx": 3, "include_last_offset": True}, True),
    "means of long bags": ({"mode": "mean", "padding_idx": 3}, False),
}
LENGTHS = [0, 3, 8, 9, 0, 0, 16, 1, 17, 15, 7, 81, 0, 64, 65, 2, 33, 4, 5, 0]  # ids of a bag
CASES["sorted"].indices = CASES["sorted"].indices.sort().values
CASES["reverse"].indices = CASES["reverse"].indices.sort(descending=True).values.to(torch.int32)
CASES["columns of dy, int32"].indices = CASES["columns of dy, int32"].indices.to(torch.int32)
CASES["columns of dy, int32"].dy = torch.randn(90, 25)[:, 3:24]
CASES["one row of dy"].dy = torch.randn(1, 130).expand(70, 130)
# The interpreter does not round to bf16: sums that it has.
CASES["as many, equal"].dy = torch.randint(-1, 2, (SEARCHED, 20)).to(torch.bfloat16)
CASES["outside"].indices[::3] = -1
CASES["outside"].indices[1::3] = OUTSIDE


def mend_interpreter() -> None:
    """Triton 3.2 sums int32 in int64."""
    mend()
    reduction = interpreter.ReduceOps
    to_tensor = reduction.to_tensor
    reduction.to_tensor = lambda self, sums, dtype: to_tensor(self, sums.astype(interpreter._get_np_dtype(dtype)), dtype)
    # triton-ascend has a sort of its own, which its interpreter lacks.
    interpreter.InterpreterBuilder.create_sort = lambda self, keys, axis, descending: interpreter.TensorHandle(
        np.sort(keys.data, axis=axis), keys.dtype
    )


def gradient(case: lookup.Case, **options: bool) -> torch.Tensor:
    """The gradient of the table. The output is compared with the table's rows, bit for bit."""
    weight = case.weight.clone().requires_grad_()
    with npu_tiling.use_device(GPU, emulated=True):
        out = embedding(case.indices, weight, **case.options, **options)
        known = (case.indices >= 0) & (case.indices.long() < OUTSIDE)
        assert torch.equal(out[known], lookup.expected(case)[0][known])
        assert out[~known].isnan().all()
        return torch.autograd.grad(out, weight, case.dy)[0]


def check_bags(options: dict, bags: int | list[int], weighted: bool) -> None:
    """Results and gradients against PyTorch's; rows of 8 bits against the same in fp32."""
    case = lookup.make(60, 11, 1100)
    samples = torch.randn(60).requires_grad_() if weighted else None
    ids, ends = (case.indices.view(-1, bags), None) if isinstance(bags, int) else (case.indices, torch.tensor(bags))
    results = []
    for function in (embedding_bag, torch.nn.functional.embedding_bag):
        weight = lookup.leaf(case.weight, "cpu")
        given = None if samples is None else samples.view(ids.shape)
        with npu_tiling.use_device(GPU, emulated=True):
            out = function(ids, weight, ends, per_sample_weights=given, **options)
            asked = [weight] if samples is None else [weight, samples]
            results.append([out, *torch.autograd.grad(out, asked, torch.linspace(-1, 1, out.numel()).view(out.shape))])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    with npu_tiling.use_device(GPU, emulated=True):
        out = embedding(case.indices, weight, rms_norm_eps=1e-3)
        (gradient,) = torch.autograd.grad(out, weight, case.dy)
    exact = torch.nn.functional.rms_norm(weight[case.indices], (1100,), eps=1e-3)
    assert torch.allclose(out, exact, rtol=1e-5, atol=1e-6)
    assert torch.allclose(gradient, torch.autograd.grad(exact, weight, case.dy)[0], rtol=1e-4, atol=1e-5)
    for kind in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        table, scales = torch.randint(-128, 128, (11, 256), dtype=torch.int8).view(kind), torch.rand(11)
        with npu_tiling.use_device(GPU, emulated=True):
            out = embedding(case.indices, table, row_scales=scales, multiplier=3.0)
        exact = table.float()[case.indices] * scales[case.indices].unsqueeze(-1) * 3
        assert torch.equal(out.isnan(), exact.isnan())
        assert torch.allclose(out, exact, rtol=1e-6, equal_nan=True)


def check_long_bags(options: dict, weighted: bool) -> None:
    """Sums against those in fp64; a bag alone has the same bits; an id that is wrong is seen in its bag alone."""
    lengths = torch.tensor(LENGTHS)
    n, ends = sum(LENGTHS), lengths.cumsum(0)
    offsets = torch.cat((ends.new_zeros(1), ends)) if "include_last_offset" in options else ends - lengths
    indices, weight = torch.randint(0, 11, (n,)), torch.randn(11, 300)
    samples = torch.randn(n) if weighted else None
    with mock.patch.object(bags_cuda, "PART", 8), npu_tiling.use_device(GPU, emulated=True):
        with npu_tiling.watch_launches() as calls:
            out = embedding_bag(indices, weight, offsets, per_sample_weights=samples, **options)
        assert [launch.kernel for call in calls for launch in call.launches] == ["sum_bags_kernel", "add_parts_kernel"]
        wide = None if samples is None else samples.double()
        exact = torch.nn.functional.embedding_bag(indices, weight.double(), offsets, per_sample_weights=wide, **options)
        assert torch.allclose(out.double(), exact, rtol=1e-5, atol=1e-5)
        for i, stop in enumerate(ends.tolist()):
            own = slice(stop - LENGTHS[i], stop)
            ids, weights = indices[own], None if samples is None else samples[own]
            zero = torch.tensor([0, len(ids)] if "include_last_offset" in options else [0])
            alone = embedding_bag(ids, weight, zero, per_sample_weights=weights, **options)
            assert torch.equal(alone[0], out[i]), LENGTHS[i]
            if LENGTHS[i] > 8:
                same = embedding_bag(ids[None], weight, None, **without_ends(options), per_sample_weights=given(weights))
                assert torch.equal(same[0], out[i]), LENGTHS[i]
        wrong = indices.clone()
        wrong[ends[11] - 1] = 11
        found = embedding_bag(wrong, weight, offsets, per_sample_weights=samples, **options)
        assert found[11].isnan().all() and torch.equal(found[:11], out[:11]) and torch.equal(found[12:], out[12:])
        tables = embedding_bag(torch.zeros(2, 20, dtype=torch.int64), weight, mode="mean", table_offsets=[*range(10)] * 2)
        assert torch.allclose(tables, weight[:10].mean(0).expand(2, -1), rtol=1e-5, atol=1e-6)


def given(weights: torch.Tensor | None) -> torch.Tensor | None:
    return None if weights is None else weights[None]


def without_ends(options: dict) -> dict:
    return {name: value for name, value in options.items() if name != "include_last_offset"}


def main() -> None:
    mend_interpreter()
    for name in sys.argv[1:]:
        if name in BAGS:
            check_bags(*BAGS[name])
            print("right:", name, flush=True)
            continue
        if name in LONG_BAGS:
            check_long_bags(*LONG_BAGS[name])
            print("right:", name, flush=True)
            continue
        if name in NGRAMS:
            with npu_tiling.use_device(GPU, emulated=True):
                ngrams.check(NGRAMS[name], ngrams.run(NGRAMS[name], "cpu"))
            print("right:", name, flush=True)
            continue
        case = CASES[name]
        if name not in UNSCALED:
            case.dy *= 10 ** torch.randint(-4, 5, case.dy.shape)  # so that the order of a sum shows
        _, dweight, added = lookup.expected(case)
        gradients = {}
        for way, kernel in KERNEL_OF.items():
            if way is Way.SEARCHED and case.indices.numel() > SEARCHED:
                continue
            lookup.take(way, setattr)
            with npu_tiling.watch_launches() as calls:
                gradients[way] = gradient(case)
            made = [launch.kernel for call in calls for launch in call.launches]
            assert kernel in made, (name, way)
            if way is Way.SEARCHED:
                assert made == ["gather_rows_kernel", kernel]
                assert name not in AGAIN or torch.equal(gradient(case), gradients[way]), name
            lookup.check_gradient(gradients[way], dweight, added, case.indices.numel())
        assert torch.equal(gradients[Way.RANKED], gradients[Way.SORTED]), name
        if name in IN_STAGES:
            lookup.take(Way.RANKED, setattr)
            stages = mock.patch.object(cuda_sort, "rank_stages", return_value=STAGES)
            wide = mock.patch.object(cuda_sort, "INT32_END", 0)  # as many rows as need numbers of 64 bits
            with stages, wide, npu_tiling.watch_launches() as calls:
                assert torch.equal(gradient(case), gradients[Way.SORTED]), name
            assert [launch.kernel for call in calls for launch in call.launches].count("rank_runs_kernel") == 2
        if name in SPARSE:
            lookup.check_gradient(gradient(case, sparse=True).to_dense(), dweight, added, case.indices.numel())
        print("right:", name, flush=True)


if __name__ == "__main__":
    main()
