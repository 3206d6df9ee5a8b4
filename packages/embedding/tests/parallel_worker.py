"""One rank of test_parallel.py, at the place that is its argument."""

import copy
import pickle
import sys

import torch
import torch.distributed as dist
from equal_counts import ITEM, WIDTH, batches, check_capture, check_compiled, check_equal_calls, check_equal_counts, seeded
from npu_embedding import Embedding, VocabParallelEmbedding
from torch._subclasses.fake_tensor import FakeTensorMode

from testing import ranks


class Sent:
    """In its block, the bytes that this rank sends others through all_to_all_single, by dtype."""

    def __enter__(self):
        self.bytes, self._real = {}, dist.all_to_all_single

        def counting(output, input, output_split_sizes=None, input_split_sizes=None, group=None):
            pieces = input.split(input_split_sizes or len(input) // dist.get_world_size())
            elements = sum(piece.numel() for rank, piece in enumerate(pieces) if rank != dist.get_rank())
            self.bytes[input.dtype] = self.bytes.get(input.dtype, 0) + elements * input.element_size()
            return self._real(output, input, output_split_sizes, input_split_sizes, group=group)

        dist.all_to_all_single = counting
        return self

    def __exit__(self, *error):
        dist.all_to_all_single = self._real


def check(rank, count, place, rows, padding_idx=None, **options):
    """A split table on indices of each rank's own, beside the whole table on all indices."""
    torch.manual_seed(0)
    whole = Embedding(rows, WIDTH, padding_idx=padding_idx, **options)
    split = VocabParallelEmbedding(rows, WIDTH, padding_idx, **options)
    held = slice(split.vocab_start_index, split.vocab_end_index)
    assert held == slice(rank * rows // count, (rank + 1) * rows // count)
    if padding_idx is not None and held.start <= padding_idx % rows < held.stop:
        assert not split.weight[padding_idx % rows - held.start].any()
    split.load_table(whole.weight)
    lengths = [9 + 20 * r if r != 1 else 0 for r in range(count)]  # the second rank has none
    for dtype in (torch.int64, torch.int32):
        indices = batches(count, rows, lengths, dtype)
        seen = torch.randn(sum(lengths), WIDTH, generator=seeded(1))
        own, of_own = indices[rank].unsqueeze(0), seen.split(lengths)[rank].unsqueeze(0)
        out, everything = split(own), whole(torch.cat(indices))
        assert torch.equal(out[0], everything.split(lengths)[rank]), place
        for module, result, gradient in ((split, out, of_own), (whole, everything, seen)):
            module.zero_grad()
            result.backward(gradient)
        found, expected = (module.weight.grad.to_dense() for module in (split, whole))
        # The owner adds in the order of the ranks. Kernels cut a table's sums elsewhere than a part's.
        assert torch.equal(found, expected[held]) or place != "cpu"
        torch.testing.assert_close(found, expected[held])


def check_bytes(rank, count, dtype):
    """Sent are the indices of others' rows, those rows, their gradients, and one number to each rank; nothing else."""
    rows, lengths = 40 * count, [64] * count
    split = VocabParallelEmbedding(rows, WIDTH, dtype=dtype)
    owners = [own * count // rows for own in batches(count, rows, lengths)]
    asked = int((owners[rank] != rank).sum())  # of others
    answered = sum(int((owner == rank).sum()) for r, owner in enumerate(owners) if r != rank)
    with Sent() as forward:
        out = split(batches(count, rows, lengths)[rank])
    assert forward.bytes == {torch.int64: 8 * (asked + count - 1), dtype: answered * WIDTH * ITEM[dtype]}
    with Sent() as backward:
        out.sum().backward()
    assert backward.bytes == {dtype: asked * WIDTH * ITEM[dtype]}
    # The sum over the ranks of look-ups of all ranks' indices, in a ring: 2 (ranks - 1) / ranks of its bytes from each rank.
    summed = 2 * (count - 1) / count * sum(lengths) * WIDTH * ITEM[dtype]
    assert forward.bytes[dtype] < summed / count


def check_row_wise_optimizer(rank, count, equal_counts):
    """`torch.optim.SparseAdam` changes rows that an index names, as Adam does in its first step, and no other."""
    rows = 30 * count
    split, dense = (
        VocabParallelEmbedding(rows, WIDTH, rows - 1, sparse=sparse, equal_counts=equal_counts) for sparse in (True, False)
    )
    start = torch.randn(rows, WIDTH, generator=seeded(2))
    held = slice(split.vocab_start_index, split.vocab_end_index)
    sparse_adam, adam = torch.optim.SparseAdam(split.parameters(), lr=0.1), torch.optim.Adam(dense.parameters(), lr=0.1)
    for module in (split, dense):
        module.load_table(start)
    for step, last in enumerate((rows, 11)):  # in the second step all rows have momentum, and few are named
        indices = [torch.randint(5 * step, last, (60,), generator=seeded(r)) for r in range(count)]
        indices = [torch.cat((own, torch.tensor([rows - 1]))) for own in indices]
        before = split.weight.detach().clone()
        for module, optimizer in ((split, sparse_adam), (dense, adam)):
            module.zero_grad()
            module(indices[rank]).sum().backward()
            optimizer.step()
        named = torch.zeros(rows, dtype=torch.bool)
        named[torch.cat(indices)] = True
        named[rows - 1] = False
        assert torch.equal((split.weight != before).any(-1), named[held]), step
        if not step:
            torch.testing.assert_close(split.weight, dense.weight)


def check_one_index(rank, count, equal_counts):
    """An index without dimensions on each rank."""
    module = VocabParallelEmbedding(count, WIDTH, equal_counts=equal_counts)
    table = torch.randn(count, WIDTH, generator=seeded(3))
    module.load_table(table)
    named = count - 1 - rank
    out = module(torch.tensor(named))
    assert torch.equal(out, table[named])
    (gradient,) = torch.autograd.grad(out.sum() * (rank + 1), module.weight)
    assert torch.equal(gradient, torch.full((1, WIDTH), float(count - rank)))


def check_copies(rank, count, equal_counts):
    """A module that names its group, and copies of it."""
    rows = 3 * count
    module = VocabParallelEmbedding(rows, WIDTH, equal_counts=equal_counts, process_group=dist.group.WORLD)
    indices = torch.arange(rank, rows)[: 2 * count]
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.process_group is dist.group.WORLD
        assert torch.equal(copied(indices), module(indices))
    assert VocabParallelEmbedding(rows, WIDTH).process_group is None


def check_initial_rows(rank, count):
    """Ranks with one seed have rows of their own, and the same state of the default generator afterwards."""
    torch.manual_seed(0)
    drawn = []
    for make in (
        lambda: VocabParallelEmbedding(3 * count + 1, WIDTH),
        lambda: VocabParallelEmbedding(3 * count + 1, WIDTH, device="meta").to_empty(device=torch.get_default_device()),
    ):
        module = make()
        module.reset_parameters()
        drawn.append(module.weight.detach()[:3])
    drawn = torch.cat(drawn)
    of_all = [torch.empty_like(drawn) for _ in range(count)]
    dist.all_gather(of_all, drawn)
    assert len(torch.cat(of_all).unique(dim=0)) == 6 * count
    assert drawn.std() > 0.5
    after = torch.rand(4)
    of_all = [torch.empty_like(after) for _ in range(count)]
    dist.all_gather(of_all, after)
    assert all(torch.equal(each, after) for each in of_all)
    with FakeTensorMode():
        assert VocabParallelEmbedding(3 * count, WIDTH).weight.shape == (3, WIDTH)


def check_outside(place, rows, equal_counts):
    module = VocabParallelEmbedding(rows, WIDTH, equal_counts=equal_counts)
    rank, count = dist.get_rank(), dist.get_world_size()
    for outside in (rows, -1):
        indices = torch.arange(count)
        indices[rank] = outside
        if place == "cpu":
            try:
                module(indices)
            except IndexError as error:
                assert str(error) == f"indices[{rank}] is {outside} and must be from 0 to {rows - 1}."  # noqa: PT017
            else:
                raise AssertionError("an index outside the table was taken")
        else:
            out = module(indices)
            assert torch.equal(out.isnan().all(-1), torch.arange(count) == rank)
            (gradient,) = torch.autograd.grad(out.nansum(), module.weight)
            assert gradient.isfinite().all()


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, dy):
        return None


def check_one_rank_without_gradient(rank, count, equal_counts):
    """The backward of a rank whose rows get no gradient: others wait for it all the same."""
    module = VocabParallelEmbedding(count, WIDTH, equal_counts=equal_counts)
    out = module(torch.arange(count))
    if rank == 0:
        out = WithoutGradient.apply(out)
    out.sum().backward()
    assert torch.equal(module.weight.grad, torch.full((1, WIDTH), count - 1.0))


def check_refusals(count, equal_counts):
    module = VocabParallelEmbedding(3 * count, WIDTH, equal_counts=equal_counts)
    for weight, error, message in (
        (torch.zeros(2, WIDTH), ValueError, "(2, 24)" if equal_counts else "vocab_range is"),
        (torch.zeros(3), ValueError, "weight has shape (3,) and must have two dimensions."),
        (torch.zeros(3, WIDTH, dtype=torch.int8), TypeError, "weight is torch.int8"),
    ):
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        try:
            module(torch.zeros(2, dtype=torch.int64))
        except error as caught:
            assert message in str(caught), caught  # noqa: PT017
        else:
            raise AssertionError(f"not refused: {message}")


def main() -> None:
    place = sys.argv[1]
    with ranks.join(place) as rank:
        count = dist.get_world_size()
        for rows, options in (
            (20, {}),
            (13, {"padding_idx": 5}),
            (13, {"padding_idx": -1}),
            (1, {}),
            (20, {"padding_idx": 3, "scale_grad_by_freq": True}),
            (20, {"padding_idx": 3, "sparse": True}),
        ):
            check(rank, count, place, rows, **options)
        for dtype in (torch.float32, torch.bfloat16):
            for rows, options in (
                (20, {}),
                (13, {"padding_idx": -4}),
                (1, {"n": 5}),
                (20, {"n": 0}),
                (20, {"padding_idx": 3, "scale_grad_by_freq": True}),
                (20, {"padding_idx": 3, "sparse": True}),
            ):
                check_equal_counts(rank, count, place, rows, dtype, **options)
            check_equal_calls(rank, count, place, dtype)
            check_bytes(rank, count, dtype)
        for equal_counts in (True, False):
            check_row_wise_optimizer(rank, count, equal_counts)
            check_outside(place, 13, equal_counts)
            check_one_index(rank, count, equal_counts)
            check_copies(rank, count, equal_counts)
            check_one_rank_without_gradient(rank, count, equal_counts)
            check_refusals(count, equal_counts)
        check_initial_rows(rank, count)
        check_compiled(rank, count)
        if place == "cuda":
            check_capture(rank, count)
        try:
            VocabParallelEmbedding(13, WIDTH).load_table(torch.zeros(12, WIDTH))
        except ValueError as error:
            assert str(error) == f"table has shape (12, {WIDTH}) and must have shape (13, {WIDTH})."  # noqa: PT017
        else:
            raise AssertionError("a table of another shape was taken")
        assert "13, 24, rows " in repr(VocabParallelEmbedding(13, WIDTH))


if __name__ == "__main__":
    main()
