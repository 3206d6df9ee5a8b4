import pytest
import torch
from npu_tiling import row_layout
from npu_tiling.rows import layout_of, may_overlap


def addresses(layout, index, width, tensor):
    """The first address of every row, in row-major order, as the layout has it."""
    outer, inner = layout.strides[index]
    return [tensor.storage_offset() + o * outer + i * inner for o in range(layout.n_outer) for i in range(layout.n_inner)]


def true_addresses(tensor):
    storage = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    return torch.as_strided(storage, tensor.shape, tensor.stride(), tensor.storage_offset())[..., 0].flatten().tolist()


VIEWS = {
    "contiguous": lambda: torch.empty(3, 4, 8),
    "one row": lambda: torch.empty(8),
    "slice of a wider tensor": lambda: torch.empty(3, 4, 20)[..., 5:13],
    "heads of a fused projection": lambda: torch.empty(2, 5, 6 * 8)[..., 8:40].view(2, 5, 4, 8),
    "every second row": lambda: torch.empty(3, 8, 8)[:, ::2],
    "transposed rows": lambda: torch.empty(4, 3, 8).transpose(0, 1),
    "repeated rows": lambda: torch.empty(1, 4, 8).expand(3, 4, 8),
    "width one": lambda: torch.empty(3, 4, 2)[..., 1:],
    "sizes of one": lambda: torch.empty(1, 3, 1, 4, 20)[..., :8],
}


@pytest.mark.parametrize("view", VIEWS)
def test_layout_finds_every_row(view):
    tensor = VIEWS[view]()
    layout = row_layout(tensor)
    assert addresses(layout, 0, tensor.shape[-1], tensor) == true_addresses(tensor)


def test_tensors_share_the_levels_but_not_the_strides():
    x, y = torch.empty(2, 5, 48)[..., 8:40].view(2, 5, 4, 8), torch.empty(2, 5, 4, 8)
    layout = row_layout(x, y)
    assert (layout.n_outer, layout.n_inner) == (10, 4)
    for index, tensor in enumerate((x, y)):
        assert addresses(layout, index, 8, tensor) == true_addresses(tensor)


@pytest.mark.parametrize(
    "tensor", [torch.empty(8, 4).t(), torch.empty(2, 9, 9, 9)[:, ::2, ::2, :8], torch.empty(4, 1).expand(4, 8)]
)
def test_what_takes_a_copy_has_no_layout(tensor):
    assert row_layout(tensor) is None


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (1, 3), False),
        ((3, 4), (0, 1), True),
        ((3, 4), (2, 1), True),
        ((1, 4), (0, 1), False),
        ((0, 4), (0, 1), False),
        ((2, 3, 4), (4, 8, 1), False),
        ((2, 3, 4), (4, 4, 1), True),
        ((3,), (0,), True),
        ((), (), False),
    ],
)
def test_what_may_be_written_in_place(shape, strides, overlaps):
    tensor = torch.empty(100).as_strided(shape, strides)
    assert may_overlap(tensor) == overlaps


def test_more_rows_than_32_bits_count_are_on_one_level():
    """Tiles of a group and of groups are multiplied in a kernel, in the width of their numbers."""
    shape, apart = (2**30, 3, 1), [(4, 1, 1)]
    assert layout_of(shape, apart) is None
    assert layout_of((2**29, 3, 1), apart) == (2**29, 3, ((4, 1),))
    assert layout_of(shape, [(3, 1, 1)]) == (1, 3 * 2**30, ((0, 1),))
