"""Checks of a split table with equal counts, for parallel_worker.py: sizes are known, and nothing waits."""

import torch
from npu_embedding import Embedding, VocabParallelEmbedding, split
from torch.overrides import TorchFunctionMode

from testing import ranks

WIDTH = 24
ITEM = {torch.int64: 8, torch.int32: 4, torch.float32: 4, torch.bfloat16: 2}


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
        first = module(indices)
        (gradient,) = torch.autograd.grad(first.sum(), module.weight)
        for _ in range(5):  # from the fifth equal call on a device's calls are repeated
            module(indices).sum().backward()
        module.zero_grad()
        with Read() as read, ranks.collectives() as forward:
            out = module(indices)
        with read, ranks.collectives() as backward:
            out.sum().backward()
        assert torch.equal(out, first)
        assert torch.equal(module.weight.grad, gradient)
        if equal:
            assert forward == [("all_gather", n * 8), ("reduce_scatter", count * n * row)]
            assert backward == [("all_gather", n * row)]
        assert ("tolist" in read.names) == (not equal)
        assert not (equal and read.names) or place == "cpu"  # where the definition reads indices
    most, split._MOST_SENT = split._MOST_SENT, (count - 1) * n * row
    module = VocabParallelEmbedding(rows, WIDTH, equal_counts=True, dtype=dtype)
    for more, name in ((0, "all_gather"), (1, "all_to_all")):
        with ranks.collectives() as called:
            module(torch.cat((indices, indices[:more])))
        assert called[0][0] == name, "the way of a call is not chosen by its bytes"
    split._MOST_SENT = most


def check_compiled(rank, count):
    """A module with equal counts in a compiler's graph, also for another number of indices."""
    rows = 40 * count
    module = VocabParallelEmbedding(rows, WIDTH, equal_counts=True)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (64, 48):
        indices = batches(count, rows, [n] * count)[rank]
        found, expected = (torch.autograd.grad(run(indices).square().sum(), module.weight) for run in (compiled, module))
        assert torch.equal(*found, *expected)


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
