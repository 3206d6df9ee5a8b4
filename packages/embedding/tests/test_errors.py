"""Every wrong argument is refused by name, with what it was and what it must be, before anything is launched."""

import pytest
import torch
from npu_embedding import VocabParallelEmbedding, embedding

from testing.operators import *  # noqa: F403
from testing.operators import Wide

WEIGHT = torch.randn(10, 4)
INDICES = torch.tensor([1, 2])


def wrong(**changed):
    return embedding(**{"indices": INDICES, "weight": WEIGHT, **changed})


REFUSED = {
    TypeError: {
        r"weight is torch\.float64 on meta and must be torch\.float32": lambda: wrong(
            indices=INDICES.to("meta"), weight=WEIGHT.double().to("meta")
        ),
        "indices is a list": lambda: wrong(indices=[1, 2]),
        "indices is torch.float32 and must be torch.int32 or torch.int64": lambda: wrong(indices=torch.ones(2)),
        "indices is torch.sparse_coo and must be a dense tensor": lambda: wrong(indices=INDICES.to_sparse()),
        "weight is torch.sparse_coo and must be a dense tensor": lambda: wrong(
            weight=WEIGHT.char().to_sparse(), row_scales=torch.ones(10)
        ),
        "indices is torch.int16": lambda: wrong(indices=INDICES.short()),
        "weight is a list": lambda: wrong(weight=[[1.0]]),
        "weight is torch.int64 on cpu and must be torch.float32": lambda: wrong(weight=WEIGHT.long()),
        "row_scales is torch.float64 and must be torch.float32": lambda: wrong(
            weight=WEIGHT.char(), row_scales=torch.ones(10, dtype=torch.float64)
        ),
        "^max_norm is a str and must be a number or None.$": lambda: wrong(max_norm="a"),
        "norm_type is a NoneType and must be a number": lambda: wrong(norm_type=None),
        "padding_idx is 'a' and must be a whole number, or None": lambda: wrong(padding_idx="a"),
        "sparse is None and must be True or False": lambda: wrong(sparse=None),
        "vocab_range is 3 and must be two whole numbers": lambda: wrong(vocab_range=3),
        r"vocab_range\[1\] is 'a' and must be a whole number": lambda: wrong(vocab_range=(0, "a")),
        "num_embeddings is 'a' and must be a whole number": lambda: wrong(vocab_range=(0, 10), num_embeddings="a"),
    },
    ValueError: {
        r"weight has shape \(10,\) and must have two dimensions": lambda: wrong(weight=WEIGHT[:, 0]),
        "indices is on meta and must be on weight's device, cpu": lambda: wrong(indices=INDICES.to("meta")),
        "padding_idx is 10 and must be from -10 to 9": lambda: wrong(padding_idx=10),
        "padding_idx is 0 and must be None where there are no rows": lambda: wrong(
            weight=WEIGHT[:0], indices=INDICES[:0], padding_idx=0
        ),
        "padding_idx is -11 and must be from -10 to 9": lambda: wrong(padding_idx=-11),
        "max_norm is -1.0 and must be at least 0": lambda: wrong(max_norm=-1.0),
        "max_norm is nan and must": lambda: wrong(max_norm=float("nan")),
        "padding_idx is 1.5 and must be a whole number": lambda: wrong(padding_idx=1.5),
        r"vocab_range is \(0, 9\) and must be \(first, first \+ 10\)": lambda: wrong(vocab_range=(0, 9)),
        r"vocab_range is \(-1, 9\) and must": lambda: wrong(vocab_range=(-1, 9)),
        r"vocab_range is .* from 0 up and below 2\^63": lambda: wrong(vocab_range=(2**64, 2**64 + 10)),
        "num_embeddings is .* and must be at least 10, .* and below 2": lambda: wrong(
            vocab_range=(0, 10), num_embeddings=2**65
        ),
        "num_embeddings is 10 and must be left out": lambda: wrong(num_embeddings=10),
        "num_embeddings is 14 and must be at least 15": lambda: wrong(vocab_range=(5, 15), num_embeddings=14),
        "padding_idx is -1 and must be at least 0 where": lambda: wrong(vocab_range=(5, 15), padding_idx=-1),
    },
}

WIDE = (Wide("weight", embedding, (INDICES, WEIGHT)),)


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


def test_wrong_padding_row_of_a_parallel_table():
    with pytest.raises(ValueError, match="padding_idx is 12 and must be from -12 to 11"):
        VocabParallelEmbedding(12, 4, padding_idx=12)
