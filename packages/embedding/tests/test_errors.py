"""Every wrong argument is refused by name, with what it was and what it must be, before anything is launched."""

import sys

import pytest
import torch
from npu_embedding import VocabParallelEmbedding, embedding
from npu_tiling import MissingTritonError

WEIGHT = torch.randn(10, 4)
INDICES = torch.tensor([1, 2])

WRONG = {
    "indices is a list": (TypeError, {"indices": [1, 2]}),
    "indices is torch.float32 and must be torch.int32 or torch.int64": (TypeError, {"indices": torch.ones(2)}),
    "indices is torch.sparse_coo and must be a dense tensor": (TypeError, {"indices": INDICES.to_sparse()}),
    "weight is torch.sparse_coo and must be a dense tensor": (
        TypeError,
        {"weight": WEIGHT.char().to_sparse(), "row_scales": torch.ones(10)},
    ),
    "indices is torch.int16": (TypeError, {"indices": INDICES.short()}),
    "weight is a list": (TypeError, {"weight": [[1.0]]}),
    "weight is torch.int64 on cpu and must be torch.float32": (TypeError, {"weight": WEIGHT.long()}),
    r"weight has shape \(10,\) and must have two dimensions": (ValueError, {"weight": WEIGHT[:, 0]}),
    "indices is on meta and must be on weight's device, cpu": (ValueError, {"indices": INDICES.to("meta")}),
    "padding_idx is 10 and must be from -10 to 9": (ValueError, {"padding_idx": 10}),
    "padding_idx is 0 and must be None where there are no rows": (
        ValueError,
        {"weight": WEIGHT[:0], "indices": INDICES[:0], "padding_idx": 0},
    ),
    "row_scales is torch.float64 and must be torch.float32": (
        TypeError,
        {"weight": WEIGHT.char(), "row_scales": torch.ones(10, dtype=torch.float64)},
    ),
    "padding_idx is -11 and must be from -10 to 9": (ValueError, {"padding_idx": -11}),
    "max_norm is -1.0 and must be at least 0": (ValueError, {"max_norm": -1.0}),
    "max_norm is nan and must": (ValueError, {"max_norm": float("nan")}),
    "^max_norm is a str and must be a number or None.$": (TypeError, {"max_norm": "a"}),
    "norm_type is a NoneType and must be a number": (TypeError, {"norm_type": None}),
    "padding_idx is 'a' and must be a whole number, or None": (TypeError, {"padding_idx": "a"}),
    "padding_idx is 1.5 and must be a whole number": (ValueError, {"padding_idx": 1.5}),
    "sparse is None and must be True or False": (TypeError, {"sparse": None}),
    "vocab_range is 3 and must be two whole numbers": (TypeError, {"vocab_range": 3}),
    r"vocab_range\[1\] is 'a' and must be a whole number": (TypeError, {"vocab_range": (0, "a")}),
    "num_embeddings is 'a' and must be a whole number": (TypeError, {"vocab_range": (0, 10), "num_embeddings": "a"}),
    r"vocab_range is \(0, 9\) and must be \(first, first \+ 10\)": (ValueError, {"vocab_range": (0, 9)}),
    r"vocab_range is \(-1, 9\) and must": (ValueError, {"vocab_range": (-1, 9)}),
    r"vocab_range is .* from 0 up and below 2\^63": (ValueError, {"vocab_range": (2**64, 2**64 + 10)}),
    "num_embeddings is .* and must be at least 10, .* and below 2": (
        ValueError,
        {"vocab_range": (0, 10), "num_embeddings": 2**65},
    ),
    "num_embeddings is 10 and must be left out": (ValueError, {"num_embeddings": 10}),
    "num_embeddings is 14 and must be at least 15": (ValueError, {"vocab_range": (5, 15), "num_embeddings": 14}),
    "padding_idx is -1 and must be at least 0 where": (ValueError, {"vocab_range": (5, 15), "padding_idx": -1}),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    error, changed = WRONG[message]
    with pytest.raises(error, match=message):
        embedding(**{"indices": INDICES, "weight": WEIGHT, **changed})


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.tensor([[0, 1], [10, 2]]), r"^indices\[1, 0\] is 10 and must be from 0 to 9\.$"),
        (torch.tensor([3, -4], dtype=torch.int32), r"^indices\[1\] is -4 and must be from 0 to 9\.$"),
        (torch.tensor(99), r"^indices is 99 and must be from 0 to 9\.$"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"multiplier": 2.0}, {"rms_norm_eps": 1.0}])
def test_index_outside_the_table_on_a_cpu(indices, message, options):
    before = WEIGHT.clone()
    with pytest.raises(IndexError, match=message):
        embedding(indices, WEIGHT, **options)
    assert torch.equal(WEIGHT, before)


def test_index_outside_a_frozen_table_on_a_cpu():
    with pytest.raises(IndexError, match=r"^indices\[1, 0\] is 10 and must be from 0 to 9\.$"):
        embedding(torch.tensor([[0, 1], [10, 2]]), WEIGHT.to(torch.int8), row_scales=torch.ones(10))


def test_index_into_an_empty_table():
    with pytest.raises(IndexError, match=r"^indices\[0\] is 1 and the table has no rows\.$"):
        embedding(INDICES, WEIGHT[:0])


def test_fp64_is_for_a_cpu():
    assert embedding(INDICES, WEIGHT.double()).dtype == torch.float64
    with pytest.raises(TypeError, match=r"weight is torch\.float64 on meta and must be torch\.float32"):
        embedding(INDICES.to("meta"), WEIGHT.double().to("meta"))


def test_wrong_padding_row_of_a_parallel_table():
    with pytest.raises(ValueError, match="padding_idx is 12 and must be from -12 to 11"):
        VocabParallelEmbedding(12, 4, padding_idx=12)


def test_missing_triton_names_the_command(monkeypatch):
    """Triton is looked for at the first launch, and where it is missing the error is what to type."""
    from npu_embedding import lookup
    from npu_embedding.lookup import FORWARD
    from npu_tiling import launch as kernels
    from npu_tiling import soc, use_device

    pages = ("npu_tiling.device", "npu_embedding.lookup.ascend", "npu_embedding.lookup.cuda", "npu_embedding.formula")
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" or name.startswith(pages)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    for page in ("ascend", "ascend_sort", "cuda", "cuda_sort"):
        monkeypatch.delattr(lookup, page, raising=False)
    monkeypatch.setattr(FORWARD, "_plans", {})
    for cached in (kernels.kernels_of, kernels._of_package):  # none loaded yet
        cached.cache_clear()
    with use_device(soc("Ascend910B4"), emulated=True), pytest.raises(MissingTritonError, match=r"npu-embedding\[npu\]"):
        embedding(INDICES, WEIGHT)
