"""One rank of test_parallel.py, at the place that is its argument."""

import sys

import torch
import torch.distributed as dist
from npu_embedding import Embedding, VocabParallelEmbedding, exchange
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from testing import ranks

WIDTH = 24
ITEM = {torch.int64: 8, torch.int32: 4, torch.float32: 4, torch.bfloat16: 2}


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


class Called(TorchDispatchMode):
    """In its block, the collectives that this rank calls, with the bytes that it gives them."""

    def __init__(self):
        super().__init__()
        self.collectives = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.collectives.append((function.name().removeprefix("c10d::"), args[1].nbytes))
        return function(*args, **(kwargs or {}))


class Read(TorchFunctionMode):
    """In its block, what the host reads of tensors: on a device it would wait."""

    READS = frozenset(("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"))

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if (name := getattr(function, "__name__", "")) in self.READS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def seeded(number):
    """A generator on the device of this rank's tensors: all ranks draw the same."""
    return torch.Generator(torch.get_default_device()).manual_seed(number)


def batches(count, rows, lengths, dtype=torch.int64, step=0):
    """Indices of all ranks, the same on each: `lengths[r]` of rank r."""
    generator = seeded(step)
    return [torch.randint(0, rows, (lengths[r],), generator=generator).to(dtype) for r in range(count)]


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


def check_equal_counts(rank, count, place, rows, dtype, n=29, padding_idx=None, **options):
    """All look up all: the whole table's rows and gradients, and those of an exchange by counts, bit for bit."""
    torch.manual_seed(0)
    whole = Embedding(rows, WIDTH, padding_idx=padding_idx, dtype=dtype, **options)
    with torch.no_grad():
        whole.weight[::2, ::3] = -0.0
        whole.weight[1::4, 0] = torch.inf
    fixed, counted = (
        VocabParallelEmbedding(rows, WIDTH, padding_idx, equal_counts=equal, dtype=dtype, **options)
        for equal in (True, False)
    )
    held = slice(fixed.vocab_start_index, fixed.vocab_end_index)
    for module in (fixed, counted):
        module.load_table(whole.weight)
    seen = torch.randn(count, n, 1, WIDTH, generator=seeded(1)).to(dtype)
    for index_dtype in (torch.int64, torch.int32):
        # Two dimensions, at strides; of few rows, so that ranks name the same.
        flat = batches(count, min(rows, 15), [n] * count, index_dtype)
        indices = [torch.stack((own, own), dim=1)[:, :1] for own in flat]
        results = []
        for module in (fixed, counted):
            module.zero_grad()
            out = module(indices[rank])
            assert out.shape == (n, 1, WIDTH)
            out.backward(seen[rank])
            results.append((out, module.weight.grad.to_dense()))
            if options.get("sparse"):  # entries are of this rank's rows alone: an optimizer changes no other
                assert module.weight.grad._nnz() == sum(((own >= held.start) & (own < held.stop)).sum() for own in indices)
        whole.zero_grad()
        everything = whole(torch.stack(indices))
        everything.backward(seen)
        gradient = whole.weight.grad.to_dense()[held]
        for out, found in results:
            assert torch.equal(bits(out), bits(everything[rank])), (place, options)
            assert torch.equal(bits(found), bits(gradient)) or place != "cpu", options
            torch.testing.assert_close(found, gradient)


def check_equal_calls(rank, count, place, dtype):
    """Two collectives forward and one backward, of sizes that ranks know; the host reads no number. By counts it does."""
    rows, n = 40 * count, 64
    row = WIDTH * ITEM[dtype]
    indices = batches(count, rows, [n] * count)[rank]
    for equal in (True, False):
        module = VocabParallelEmbedding(rows, WIDTH, equal_counts=equal, dtype=dtype)
        module(indices).sum().backward()  # compiles
        with Read() as read, Called() as forward:
            out = module(indices)
        with read, Called() as backward:
            out.sum().backward()
        if equal:
            assert forward.collectives == [("_allgather_base_", n * 8), ("_reduce_scatter_base_", count * n * row)]
            assert backward.collectives == [("_allgather_base_", n * row)]
        assert ("tolist" in read.names) == (not equal)
        assert not (equal and read.names) or place == "cpu"  # where the definition reads indices
    most, exchange._MOST_SENT = exchange._MOST_SENT, (count - 1) * n * row
    module = VocabParallelEmbedding(rows, WIDTH, equal_counts=True, dtype=dtype)
    for more, name in ((0, "_allgather_base_"), (1, "alltoall_base_")):
        with Called() as called:
            module(torch.cat((indices, indices[:more])))
        assert called.collectives[0][0] == name, "the way of a call is not chosen by its bytes"
    exchange._MOST_SENT = most


def check_capture(rank, count):
    """A step with equal counts in a CUDA graph, replayed with other indices; nothing in it waits."""
    rows, n = 40 * count, 64
    module = VocabParallelEmbedding(rows, WIDTH, equal_counts=True)
    indices, others = (batches(count, rows, [n] * count, step=step)[rank] for step in (0, 1))
    seen = torch.randn(n, WIDTH)

    def step():
        out = module(indices)
        return out.detach(), *torch.autograd.grad(out, module.weight, seen)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        torch.cuda.set_sync_debug_mode("error")
        step()
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # threads of NCCL ask for the end of earlier calls
        captured = step()
    indices.copy_(others)
    graph.replay()
    for found, expected in zip(captured, step(), strict=True):
        assert torch.equal(found, expected)


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
