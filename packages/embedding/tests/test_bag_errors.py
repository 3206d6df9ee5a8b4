"""What bags refuse: indices outside the table, and arguments that are wrong, each named."""

import pytest
import torch
from lookup import small_table
from npu_embedding import EmbeddingBag, embedding_bag

from testing.operators import *  # noqa: F403

pytestmark = pytest.mark.usefixtures("npu_poisoned")


def test_index_outside_the_table(device):
    indices = torch.tensor([[3, 2], [1, 40], [-1, 2], [0, 2**40]]).to(device.torch)
    weight = small_table(1, 64)[1].to(device.torch)
    if device.name == "cpu":
        with pytest.raises(IndexError, match="is 40 and must be from 0 to 39"):
            embedding_bag(indices, weight)
        return
    assert embedding_bag(indices, weight).isnan().all(1).tolist() == [False, True, True, True]


_BAD_TABLES = (  # of each mode and option
    [torch.tensor([[1, 19], [2, 20]])],
    r"^indices\[1, 1\] is 20, row 40 with table_offsets\[1\], and must be from 0 to 39\.$",
)
BAD_ROWS = {  # arguments after the table of 40 rows, and what is said of the index
    "places count ids that are left out": (
        [torch.tensor([[1, 1], [1, 40]])],
        {"padding_idx": 1},
        r"^indices\[1, 1\] is 40 and must be from 0 to 39\.$",
    ),
    "packed tables": (_BAD_TABLES[0], {"table_offsets": [0, 20]}, _BAD_TABLES[1]),
    "packed tables, max_norm": (_BAD_TABLES[0], {"table_offsets": [0, 20], "max_norm": 1.0}, _BAD_TABLES[1]),
    "packed tables, concat": (_BAD_TABLES[0], {"table_offsets": [0, 20], "mode": "concat"}, _BAD_TABLES[1]),
    "max_norm": (
        [torch.tensor([[1, 1], [1, 40]])],
        {"max_norm": 1.0},
        r"^indices\[1, 1\] is 40 and must be from 0 to 39\.$",
    ),
    "three dimensions": (
        [torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 40]]])],
        {},
        r"^indices\[1, 1, 1\] is 40 and must be from 0 to 39\.$",
    ),
    "between offsets": (
        [torch.tensor([1, -1, 2])],
        {"offsets": torch.tensor([0, 2])},
        r"^indices\[1\] is -1 and must be from 0 to 39\.$",
    ),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_an_index_outside_the_table_is_named_by_its_place(what):
    (indices,), options, message = BAD_ROWS[what]
    with pytest.raises(IndexError, match=message):
        embedding_bag(indices, small_table(1, 64)[1], **options)


def test_a_mode_without_kernel_is_refused_where_the_module_is_made():
    with pytest.raises(NotImplementedError, match="mode is 'max' and must be 'sum', 'mean' or 'concat'"):
        EmbeddingBag(5, 8, mode="max")
    with pytest.raises(ValueError, match="mode is 'avg' and must be one of 'sum', 'mean'"):
        EmbeddingBag(5, 8, mode="avg")


IDS, TABLE, SCALES = torch.tensor([[1, 2]]), torch.randn(10, 4), torch.ones(10)


def bags(**changed):
    return embedding_bag(**{"indices": IDS, "weight": TABLE, **changed})


REFUSED = {
    NotImplementedError: {
        "mode is 'max' and must be 'sum', 'mean' or 'concat': for ids": lambda: bags(mode="max"),
    },
    ValueError: {
        "mode is 'min' and must be one of": lambda: bags(mode="min"),
        "indices has at|indices has shape": lambda: bags(indices=IDS[0]),
        r"indices has shape \(1, 2\) and must have one dimension where offsets": lambda: bags(offsets=torch.tensor([0])),
        "offsets must begin with 0, not descend": lambda: bags(indices=IDS[0], offsets=torch.tensor([1])),
        "offsets is empty and must begin with 0": lambda: bags(indices=IDS[0], offsets=torch.zeros(0).long()),
        "include_last_offset is True and must be False": lambda: bags(include_last_offset=True),
        "mode is 'mean' and must be 'sum' where per_sample_weights": lambda: bags(per_sample_weights=torch.ones(1, 2)),
        r"per_sample_weights has shape \(2,\)": lambda: bags(per_sample_weights=torch.ones(2), mode="sum"),
        r"table_offsets has shape \(1,\) and must have shape \(2,\)": lambda: bags(table_offsets=[0]),
        r"table_offsets\[0\] is 9223372036854775808 and must be from 0": lambda: bags(table_offsets=[2**63, 1]),
        "row_scales has shape": lambda: bags(weight=TABLE.char(), row_scales=SCALES[:3]),
        "weight requires grad and must not: a table with row_scales": lambda: bags(
            weight=TABLE.to(torch.float8_e4m3fn).requires_grad_(), row_scales=SCALES
        ),
        "max_norm is 1.0 and must be None where row_scales": lambda: bags(
            weight=TABLE.char(), row_scales=SCALES, max_norm=1.0
        ),
        "dtype is torch.bfloat16 and must be left out": lambda: bags(dtype=torch.bfloat16),
    },
    TypeError: {
        "offsets is torch.float32": lambda: bags(indices=IDS[0], offsets=torch.ones(1)),
        "table_offsets is a float": lambda: bags(table_offsets=1.0),
        "table_offsets is torch.sparse_coo": lambda: bags(table_offsets=torch.ones(2).long().to_sparse()),
        "offsets is torch.sparse_coo": lambda: bags(indices=IDS[0], offsets=torch.zeros(1).long().to_sparse()),
        "weight is torch.float32 and must be torch.int8 or": lambda: bags(row_scales=SCALES),
        "weight is torch.int8 on cpu and must be": lambda: bags(weight=TABLE.char()),
    },
}
