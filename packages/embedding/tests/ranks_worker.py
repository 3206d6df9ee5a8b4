"""Gradients with CUDA's launches, indices sorted by ours and by torch.sort, in Triton's interpreter: see test_ranks.py."""

import sys

import lookup
import npu_tiling
import torch
from npu_embedding import embedding
from npu_embedding.launch import cuda
from triton.runtime import interpreter

GPU = npu_tiling.Device("a GPU", "cuda", "sm_90", vector_cores=1, cube_cores=1, ub_bytes=232448, ub_align=16)
# Ragged in indices, rows and columns; one group of indices and several; fewer rows than programs; all rows named, few, one.
CASES = {
    **{kind: lookup.make(2100, 2101, 12, kind=kind) for kind in lookup.KINDS},
    "sorted": lookup.make(1025, 64, 9),
    "reverse": lookup.make(1025, 64, 9),
    "frequency": lookup.make(385, 70, 33, kind="zipf", padding_idx=0, scale_grad_by_freq=True),
    "shard": lookup.make(300, 50, 33, vocab_range=(30, 80), padding_idx=31),
    "tiny": lookup.make(257, 1, 8, kind="equal"),
    "padding": lookup.make(257, 3, 8, padding_idx=1),
    "outside": lookup.make(300, 40, 16),
}
CASES["sorted"].indices = CASES["sorted"].indices.sort().values
CASES["reverse"].indices = CASES["reverse"].indices.sort(descending=True).values.to(torch.int32)
CASES["outside"].indices[::3] = -1
CASES["outside"].indices[1::3] = 2**40


def mend_interpreter() -> None:
    """Triton 3.2 makes a number of an array of one element by int(), which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, *others: object) -> None:
        patch(tensor, *others)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patched


def gradient(case: lookup.Case, **options: bool) -> torch.Tensor:
    weight = case.weight.clone().requires_grad_()
    with npu_tiling.use_device(GPU, emulated=True):
        out = embedding(case.indices, weight, **case.options, **options)
        return torch.autograd.grad(out, weight, case.dy)[0]


def counted(name: str) -> list[int]:
    """A list that gets longer with each call of a function of launch/cuda.py."""
    function, calls = getattr(cuda, name), []

    def call(*arguments: object) -> object:
        calls.append(1)
        return function(*arguments)

    setattr(cuda, name, call)
    return calls


def main() -> None:
    mend_interpreter()
    calls = {"ranked": counted("rank_rows"), "sorted": counted("mark_rows")}
    most = cuda.MOST_RANKED
    for name in sys.argv[1:]:
        case = CASES[name]
        case.dy *= 10 ** torch.randint(-4, 5, case.dy.shape)  # so that the order of a sum shows
        _, dweight, added = lookup.expected(case)
        gradients = []
        for way, cuda.MOST_RANKED in (("ranked", most), ("sorted", 0)):
            calls[way].clear()
            gradients.append(gradient(case))
            lookup.check_gradient(gradients[-1], dweight, added, case.indices.numel())
            assert calls[way] == [1], (name, way)
        assert torch.equal(*gradients), name
        lookup.check_gradient(gradient(case, sparse=True).to_dense(), dweight, added, case.indices.numel())
        print("right:", name, flush=True)


if __name__ == "__main__":
    main()
