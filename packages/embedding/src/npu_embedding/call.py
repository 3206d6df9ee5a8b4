"""The records of the operators: the arguments and the results of each. And checks of arguments that several functions take.

From a record npu_tiling/calls.py derives the operator's schema, its fake function and the key of its plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from npu_tiling import arguments, device_for
from npu_tiling.calls import Empty, Size, statistics_dtype
from npu_tiling.dispatch import all_plain, is_unobserved
from torch import Tensor

NO_ROW = -1  # in place of the padding row where there is none
NO_ID = -(2**63)  # in place of the padding row where none is left out of its bag
FROZEN = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)  # of rows with scales


class Forward(NamedTuple):
    """out[...] = weight[indices[...] - first_row]

    Attributes:
        indices: [...].
        weight: [V, D], rows `first_row` to `first_row + V - 1` of a table.
        padding_idx: the row that gets no gradient, NO_ROW for none.
        scale_grad_by_freq, sparse: as `embedding` has them. Autograd alone reads these two and `padding_idx`.
        first_row: the row of the whole table that the table at hand begins with.
        n_total: rows of the whole table.
    """

    indices: Tensor
    weight: Tensor
    padding_idx: Size
    scale_grad_by_freq: bool
    sparse: bool
    first_row: Size
    n_total: Size

    def results(self) -> dict[str, Empty | None]:
        """The rows [..., D]."""
        return {"out": Empty((*self.indices.shape, self.weight.shape[1]), self.weight.dtype)}


class Backward(NamedTuple):
    """dweight[r] = sum of dy over the positions whose index is first_row + r

    Attributes:
        dy: [..., D], the gradient of the rows.
        indices, padding_idx, scale_grad_by_freq, sparse, first_row: the forward's.
        n_rows: V.
        dtype: of dweight, which is rounded once.
    """

    dy: Tensor
    indices: Tensor
    n_rows: Size
    padding_idx: Size
    scale_grad_by_freq: bool
    sparse: bool
    first_row: Size
    dtype: torch.dtype

    def results(self) -> dict[str, Empty | None]:
        """dweight [V, D]; if `sparse`, an entry for each index: values [n, D] and rows [n] (`reference.slots`)."""
        n = self.indices.numel()
        return {
            "dweight": Empty((n if self.sparse else self.n_rows, self.dy.shape[-1]), self.dtype),
            "rows": Empty((n,), torch.int64) if self.sparse else None,
        }


class Renormalise(NamedTuple):
    """Scales rows of `weight` that an index names down to a norm of at most `max_norm`, in place.

    Attributes:
        indices, weight, first_row, n_total: as `Forward` has them.
        max_norm, norm_type: as `embedding` has them.
    """

    indices: Tensor
    weight: Tensor
    max_norm: float
    norm_type: float
    first_row: Size
    n_total: Size

    def results(self) -> dict[str, Empty | None]:
        """None."""
        return {}


class Bags(NamedTuple):
    """out[b] = factor * sum over the positions i of bag b of sample_weights[i] * row_scales[ids[i]] * weight[ids[i]]

    where ids are indices + base. With `eps` a bag has one id, and rows are normalised: see `embedding`.

    Attributes:
        indices: [n].
        offsets: [n_bags], or one more: the first position of each bag; None: bags of n / n_bags ids.
        base: int64 [K]: what is added to ids, to each in turn; None: nothing.
        sample_weights: [n]; None: 1.
        weight, first_row, n_total, padding_idx, scale_grad_by_freq, sparse: as `Forward` has them.
        row_scales: [V]; None: 1.
        n_bags: how many.
        mean: whether sums are divided by how many ids a bag has.
        factor: of the sums.
        eps: rows are over the roots of their mean squares plus this; None: they are not.
        left_out: the id that is not in its bag; NO_ID for none.
        dtype: of the result.
    """

    indices: Tensor
    offsets: Tensor | None
    base: Tensor | None
    sample_weights: Tensor | None
    weight: Tensor
    row_scales: Tensor | None
    n_bags: Size
    mean: bool
    factor: float
    eps: float | None
    left_out: Size
    dtype: torch.dtype
    padding_idx: Size
    scale_grad_by_freq: bool
    sparse: bool
    first_row: Size
    n_total: Size

    def results(self) -> dict[str, Empty | None]:
        """The bags [n_bags, D]."""
        return {"out": Empty((self.n_bags, self.weight.shape[1]), self.dtype)}


class Spread(NamedTuple):
    """The backward of `Bags` up to dx and dsample.

        dx[i] = factor * sample_weights[i] * dy[b]        dsample[i] = factor * weight[ids[i]] . dy[b]

    over the count of bag b, where they are means.

    Attributes:
        dy: [n_bags, D].
        weight: the forward's; None: neither dsample nor, of rows that are normalised, dx needs it.
        need_dx: whether dx is asked for.
        indices, offsets, base, sample_weights, n_bags, mean, factor, eps, left_out, first_row: the forward's.
    """

    dy: Tensor
    indices: Tensor
    offsets: Tensor | None
    base: Tensor | None
    sample_weights: Tensor | None
    weight: Tensor | None
    need_dx: bool
    n_bags: Size
    mean: bool
    factor: float
    eps: float | None
    left_out: Size
    first_row: Size

    @property
    def dtype(self) -> torch.dtype:
        """Of dx: wider than dy's in means and weighted sums, for the table's gradient is rounded once."""
        is_narrow = self.eps is not None or (self.sample_weights is None and not self.mean)
        return self.dy.dtype if is_narrow else statistics_dtype(self.dy.dtype)

    def results(self) -> dict[str, Empty | None]:
        """dx [n, D] and dsample [n] in fp32; None for what is not asked for."""
        n, with_samples = self.indices.numel(), self.weight is not None and self.eps is None
        return {
            "dx": Empty((n, self.dy.shape[1]), self.dtype) if self.need_dx else None,
            "dsample": Empty((n,), statistics_dtype(self.dy.dtype)) if with_samples else None,
        }


class NGram(NamedTuple):
    """Rows of a table that n-grams of ids name by a hash: see `ngram_embedding`.

    Attributes:
        ids: [B, T].
        history: [B, ngram_size - 1]; None: EOS stands before the ids.
        table: [V, D].
        multipliers: int64 [ngram_size], or [H, ngram_size].
        sizes, offsets: int64 [H].
        eos, fill, sparse: as `ngram_embedding` has them.
        add: whether the hash adds its products; else it combines them by exclusive or.
        concat: whether rows of all heads stand side by side; else they are added.
    """

    ids: Tensor
    history: Tensor | None
    table: Tensor
    multipliers: Tensor
    sizes: Tensor
    offsets: Tensor
    eos: Size
    fill: Size
    add: bool
    concat: bool
    sparse: bool

    def results(self) -> dict[str, Empty | None]:
        """[B, T, H * D], or [B, T, D] for sums; and the rows, int32 [H, B, T], -1 where the table has none."""
        heads, width = self.sizes.shape[0], self.table.shape[1]
        return {
            "out": Empty((*self.ids.shape, heads * width if self.concat else width), self.table.dtype),
            "rows": Empty((heads, *self.ids.shape), torch.int32),
        }


class ByAll(NamedTuple):
    """The look-up in a table whose rows are split over ranks, each of which looks up the indices of all.

    Attributes:
        indices, weight, padding_idx, scale_grad_by_freq, first_row, n_total: of this rank, as `Forward` has them.
        group: the name of the process group.
        ranks: how many it has.
    """

    indices: Tensor
    weight: Tensor
    padding_idx: Size
    scale_grad_by_freq: bool
    first_row: Size
    n_total: Size
    group: str
    ranks: int

    def results(self) -> dict[str, Empty | None]:
        """The rows [..., D] of this rank's indices, and the indices of all ranks, [ranks, ...]."""
        return {
            "rows": Empty((*self.indices.shape, self.weight.shape[1]), self.weight.dtype),
            "of_all": Empty((self.ranks, *self.indices.shape), self.indices.dtype),
        }


class ByAllBackward(NamedTuple):
    """The backward of `ByAll`.

    Attributes:
        dy: [..., D], the gradient of this rank's rows.
        of_all: [ranks, ...], from the forward.
        n_rows: of this rank's part of the table.
        padding_idx, scale_grad_by_freq, first_row, group, ranks: the forward's.
    """

    dy: Tensor
    of_all: Tensor
    n_rows: Size
    padding_idx: Size
    scale_grad_by_freq: bool
    first_row: Size
    group: str
    ranks: int

    def results(self) -> dict[str, Empty | None]:
        """dweight [n_rows, D]."""
        return {"dweight": Empty((self.n_rows, self.dy.shape[-1]), self.dy.dtype)}


def check_table(indices: Tensor, weight: Tensor, row_scales: Tensor | None, dtype: torch.dtype | None) -> torch.dtype:
    """Indices, and a table with the scales of its rows; the dtype of the result."""
    arguments.dtype("indices", indices, torch.int32, torch.int64)
    if row_scales is None:
        arguments.floating("weight", weight)
    else:
        arguments.dense("weight", weight)
        if weight.dtype not in FROZEN:
            raise TypeError(
                f"weight is {weight.dtype} and must be {' or '.join(map(str, FROZEN))} where row_scales is given."
            )
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)} and must have two dimensions.")
    arguments.device("indices", indices, weight, "weight's")
    if row_scales is None:
        if dtype is not None:
            raise ValueError(
                f"dtype is {dtype} and must be left out where there are no row_scales: the result has weight's dtype."
            )
        return weight.dtype
    arguments.dtype("row_scales", row_scales, *arguments.DTYPES)
    arguments.shape("row_scales", row_scales, weight.shape[:1])
    arguments.device("row_scales", row_scales, weight, "weight's")
    for name, tensor in (("weight", weight), ("row_scales", row_scales)):
        if tensor.requires_grad:
            raise ValueError(f"{name} requires grad and must not: a table with row_scales is frozen; detach it.")
    if dtype is None:
        return row_scales.dtype
    if dtype not in arguments.DTYPES:
        raise ValueError(f"dtype is {dtype} and must be {' or '.join(map(str, arguments.DTYPES))}.")
    return dtype


def padding_row(padding_idx: int | None, rows: int | None) -> int:
    """padding_idx counted from the start, NO_ROW for none; `rows`: of the table, None where that is not known."""
    if padding_idx is None:
        return NO_ROW
    arguments.whole("padding_idx", padding_idx, or_none=True)
    if rows is None:
        if padding_idx < 0:
            raise ValueError(f"padding_idx is {padding_idx} and must be at least 0 where num_embeddings is not given.")
        return signed("padding_idx", padding_idx, 64, least=0)
    if not -rows <= padding_idx < rows:
        allowed = f"from {-rows} to {rows - 1}" if rows else "None where there are no rows"
        raise ValueError(f"padding_idx is {padding_idx} and must be {allowed}.")
    return padding_idx % rows


def signed(name: str, value: int, bits: int, least: int | None = None) -> int:
    """A whole number that an integer of so many bits holds."""
    found: int = arguments.whole(name, value, least=least)
    if not -(2 ** (bits - 1)) <= found < 2 ** (bits - 1):
        first = -(2 ** (bits - 1)) if least is None else least
        raise ValueError(f"{name} is {value} and must be from {first} to {2 ** (bits - 1) - 1}.")
    return found


def numbers(name: str, value: Tensor | Sequence[int], like: Tensor, of: str, least: int | None = None) -> Tensor:
    """int64 [n] on the device of `like`, which the error names as `of`; `least`: of those in a sequence."""
    if not isinstance(value, Tensor):
        if not isinstance(value, Sequence):
            raise TypeError(f"{name} is a {type(value).__name__} and must be a tensor, or a sequence of whole numbers.")
        found = [signed(f"{name}[{i}]", each, 64, least) for i, each in enumerate(value)]
        return torch.tensor(found, dtype=torch.int64, device=like.device)
    arguments.dtype(name, value, torch.int64)
    if value.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)} and must have one dimension.")
    arguments.device(name, value, like, of)
    return value


def check_inside(indices: Tensor, n_total: int, base: Tensor | None = None) -> None:
    """On a CPU, an index outside the table is an IndexError that names its place among those given; see `check_indices`.

    Operators check again, under transforms and modes too; they are given indices in another shape.
    """
    if is_unobserved() and not indices.is_meta and device_for(indices.device) is None and all_plain((indices, base)):
        check_indices(indices, n_total, base=base)


def check_indices(indices: Tensor, n_total: int, counted: Tensor | None = None, base: Tensor | None = None) -> None:
    """Raises IndexError naming the first index, of those that count, that is outside 0 to n_total - 1.

    With `base` [K] the row that an index names is base[k] more, k its place in the last dimension.
    """
    if not indices.numel():
        return
    rows = indices.long()  # PyTorch wraps a number that it compares int32 with
    rows = rows if base is None else rows + base
    wrong = (rows < 0) | (rows >= n_total)
    wrong = wrong if counted is None else wrong & counted.view(wrong.shape)
    if not wrong.any():
        return
    where = tuple(wrong.nonzero()[0].tolist())
    index = f"indices{list(where) if where else ''} is {int(indices[where])}"
    row = "" if base is None else f", row {int(rows[where])} with table_offsets[{where[-1]}],"
    allowed = f"must be from 0 to {n_total - 1}" if n_total else "the table has no rows"
    raise IndexError(f"{index}{row} and {allowed}.")
