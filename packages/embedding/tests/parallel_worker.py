"""One rank of test_parallel.py, at the place that is its argument."""

import sys

import torch
from npu_embedding import Embedding, VocabParallelEmbedding
from npu_offline import ranks


def train(rank, count, place, rows, padding_idx):
    """The sharded table and the whole one, three steps side by side."""
    torch.manual_seed(0)
    whole = Embedding(rows, 24, padding_idx=padding_idx)
    sharded = VocabParallelEmbedding(rows, 24, padding_idx)
    assert (sharded.vocab_start_index, sharded.vocab_end_index) == (rank * rows // count, (rank + 1) * rows // count)
    if padding_idx is not None and sharded.vocab_start_index <= padding_idx % rows < sharded.vocab_end_index:
        assert not sharded.weight[padding_idx % rows - sharded.vocab_start_index].any()
    sharded.load_table(whole.weight)
    torch.manual_seed(1)  # shards of unequal length have drawn unequally often
    head = torch.randn(24, 3)  # replicated, as what follows is
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (whole, sharded)]
    for step in range(3):
        indices = torch.randint(0, rows, (4, 9))
        outputs = []
        for module, optimizer in zip((whole, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            out = module(indices)
            (out @ head).square().sum().backward()
            optimizer.step()
            outputs.append(out.detach())
        assert torch.equal(*outputs) or step, place  # later, the order of a gradient's sums shows
        assert torch.allclose(*outputs, rtol=1e-5, atol=1e-6), place
        assert torch.allclose(
            sharded.weight, whole.weight[sharded.vocab_start_index : sharded.vocab_end_index], rtol=1e-5, atol=1e-6
        ), place


def check_outside(place, rows):
    module = VocabParallelEmbedding(rows, 24)
    indices = torch.tensor([0, rows, 1])
    if place == "cpu":
        try:
            module(indices)
        except IndexError as error:
            assert str(error) == f"indices[1] is {rows} and must be from 0 to {rows - 1}."  # noqa: PT017
        else:
            raise AssertionError("an index outside the table was taken")
    else:
        out = module(indices)
        assert torch.equal(out.isnan().all(-1), torch.tensor([False, True, False]))


def main() -> None:
    place = sys.argv[1]
    with ranks.join(place) as rank:
        for rows, padding_idx in ((20, None), (13, 5), (13, -1), (1, None)):
            train(rank, 2, place, rows, padding_idx)
        check_outside(place, 13)
        try:
            VocabParallelEmbedding(13, 24).load_table(torch.zeros(12, 24))
        except ValueError as error:
            assert str(error) == "table has shape (12, 24) and must have shape (13, 24)."  # noqa: PT017
        else:
            raise AssertionError("a table of another shape was taken")
        assert "13, 24, rows " in repr(VocabParallelEmbedding(13, 24))


if __name__ == "__main__":
    main()
