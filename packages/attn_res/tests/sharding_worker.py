"""One rank of test_shards_are_the_whole, at the place that is its argument."""

import sys

import npu_attn_res
import torch
from torch import Tensor

from testing import sharding
from testing.sharding import CommDebugMode, Partial, Replicate, Shard, distribute_tensor, refused

BLOCKS, TOKENS, WIDTH = 3, (2, 5), 24  # five tokens do not divide by two ranks
WEIGHTS = ("query", "rms_weight", "output_rms_weight")
REPLICATES = torch.__version__ < "2.12"  # the gradients of what `banked` joins, where tokens do not divide by the ranks
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def listed(blocks, query, rms_weight, output_rms_weight):
    """h, y and alpha of a list of blocks."""
    return npu_attn_res.attn_res(list(blocks), query, rms_weight, output_rms_weight=output_rms_weight, return_weights=True)


def stack(tensors, dim=0):
    """`torch.stack`: PyTorch 2.11 gathers DTensors that it stacks, and 2.7 has no backward of that."""
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def stacked(blocks, query, rms_weight, output_rms_weight):
    """h and alpha of the blocks as one tensor, with the norm's weight in the place of the other one."""
    return npu_attn_res.attn_res(stack(blocks), query, rms_weight * output_rms_weight, return_weights=True)


def phases(blocks, query, rms_weight, output_rms_weight):
    """h, y and the new partial sum of a layer of Block AttnRes."""
    *blocks, partial, layer_output = blocks
    queries = stack([query, rms_weight])
    o, lse = npu_attn_res.attn_res_phase1(queries, blocks, rms_weight)
    state = (o[0], lse[0])
    options = {"layer_output": layer_output, "output_rms_weight": output_rms_weight}
    return npu_attn_res.attn_res_merge(*state, partial, query, rms_weight, **options)


def banked(blocks, query, rms_weight, output_rms_weight):
    """h, y, the new prefix and alpha of a bank with one block too many."""
    *blocks, prefix = blocks
    bank = stack(blocks, blocks[0].dim() - 1)
    options = {"layer_output": blocks[0], "return_weights": True}
    return npu_attn_res.attn_res_bank(bank, len(blocks) - 1, prefix, query, rms_weight, output_rms_weight, **options)


def train(function, blocks, weights):
    """Results, and gradients of blocks and of weights."""
    blocks, weights = ([tensor.detach().requires_grad_() for tensor in tensors] for tensors in (blocks, weights))
    results = [result for result in function(blocks, *weights) if result is not None]
    trained = [result for result in results if result.requires_grad]
    torch.autograd.backward(trained, [3 * result.detach() ** 2 for result in trained])  # of the sum of cubes
    return list(results), [block.grad for block in blocks], [weight.grad for weight in weights]


def check(function, mesh, placement):
    torch.manual_seed(0)
    blocks = [torch.randn(*TOKENS, WIDTH) for _ in range(BLOCKS)]
    weights = [torch.randn(WIDTH) for _ in WEIGHTS]
    whole = train(function, blocks, weights)
    blocks = [distribute_tensor(block, mesh, [placement]) for block in blocks]
    weights = [distribute_tensor(weight, mesh, [Replicate()]) for weight in weights]
    with CommDebugMode() as communication:
        results, dblocks, dweights = train(function, blocks, weights)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    for part in dblocks + [result for result in results if result.dim() == 3 and result.shape[-1] == WIDTH]:
        assert part.placements == (placement,)
    for part in dweights:
        assert part.placements == (Replicate() if placement.is_replicate() else Partial(),)
    parts = (results, dblocks, dweights)
    for found, expected in zip(parts, whole, strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.full_tensor(), b, **TOLERANCE)


def check_module(mesh):
    """Four layers of Block AttnRes, as a model runs them."""
    torch.manual_seed(0)
    module = npu_attn_res.BlockAttnRes(WIDTH, 5, 2)
    torch.nn.init.normal_(module.query)

    def run(embedding):
        depth = module.start(embedding)
        for scale in (0.5, -1.0, 2.0, 0.1):
            depth.add(torch.tanh(scale * depth.input()))
        h = depth.input()
        h.square().sum().backward()
        gradients = [module.query.grad, module.rms_weight.grad]
        module.zero_grad()
        return [h, *gradients]

    x = torch.randn(*TOKENS, WIDTH)
    whole = run(x)
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()])))
    parts = run(distribute_tensor(x, mesh, [Shard(1)]))
    for part, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.full_tensor(), expected, **TOLERANCE)


def check_refusals(mesh):
    def place(tensor: Tensor, placement) -> Tensor:
        return distribute_tensor(tensor, mesh, [placement])

    block, weight = torch.randn(*TOKENS, WIDTH), torch.ones(WIDTH)
    rows, whole = place(block, Shard(1)), place(weight, Replicate())
    attn_res, phase1, merge = npu_attn_res.attn_res, npu_attn_res.attn_res_phase1, npu_attn_res.attn_res_merge
    said = "residuals[0] is Shard(dim=2) on mesh dimension 0 and must be Replicate() or Shard of a dimension from 0 to 1."
    refused(ValueError, said, attn_res, [place(block, Shard(2))], whole, whole)
    said = "residuals[1] is Shard(dim=0) on mesh dimension 0 and must be Shard(dim=1), as residuals[0] is."
    refused(ValueError, said, attn_res, [rows, place(block, Shard(0))], whole, whole)
    said = "residuals is Shard(dim=0) on mesh dimension 0 and must be Replicate() or Shard of a dimension from 1 to 2."
    refused(ValueError, said, attn_res, place(torch.randn(4, *TOKENS, WIDTH), Shard(0)), whole, whole)
    said = "output_rms_weight is Shard(dim=0) on mesh dimension 0 and must be Replicate()."
    refused(ValueError, said, attn_res, [rows], whole, whole, output_rms_weight=place(weight, Shard(0)))
    refused(TypeError, "residuals[0] is a plain tensor and must be a DTensor", attn_res, [block], whole, whole)
    queries = place(torch.ones(2, WIDTH), Shard(0))
    refused(ValueError, "queries is Shard(dim=0) on mesh dimension 0 and must be", phase1, queries, [rows], whole)
    state = (place(block, Replicate()), place(torch.ones(TOKENS), Shard(1)))
    bank, trained = place(torch.randn(*TOKENS, 3, WIDTH), Shard(1)), place(weight, Replicate()).requires_grad_()
    said = "append is True and must be False for DTensors: autograd cannot record what is written there."
    refused(ValueError, said, npu_attn_res.attn_res_bank, bank, 1, rows, trained, whole, append=True)
    said = "o is Replicate() on mesh dimension 0 and must be Shard(dim=1), as prefix is."
    refused(ValueError, said, merge, *state, rows, whole, whole)


def main() -> None:
    place = sys.argv[1]
    with sharding.joined(place) as mesh:
        for function in (listed, stacked, phases, banked):
            for placement in (Shard(0), Shard(1), Replicate()) if place != "emulated" else (Shard(1),):
                if function is not banked or placement != Shard(1) or not REPLICATES:
                    check(function, mesh, placement)
        if place != "emulated":
            check_module(mesh)
            check_refusals(mesh)


if __name__ == "__main__":
    main()
