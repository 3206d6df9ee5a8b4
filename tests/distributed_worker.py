"""One rank of test_distributed.py, at the place that is its argument."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import npu_attn_res
import npu_embedding
import npu_fused_linear_cross_entropy
import npu_rms_norm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from testing import ranks

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.demo.blocks import OURS  # noqa: E402
from tools.demo.model import Config, LanguageModel  # noqa: E402
from tools.demo.training import Setup, batches, build, loss_of  # noqa: E402

SETUP = Setup(Config(layers=2, hidden_size=32, heads=2, mlp_size=64, block_size=2), steps=6, batch=8, context=16)


def train(model: nn.Module, windows: Tensor) -> list[float]:
    """The loss of each step, on this rank's windows [steps, batch, context + 1].

    Plain gradient descent: what it does to a parameter is proportional to the gradient, where Adam makes as much of a
    gradient that is rounding alone as of any other.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for batch in windows:
        loss = loss_of(model, batch)  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def shard(model: LanguageModel, mesh: DeviceMesh) -> None:
    """FSDP2: what takes and returns tensors, as its hooks want it, and then the rest: a layer itself returns none."""
    for layer in model.layers:
        fully_shard(layer.attention, mesh=mesh)
        fully_shard(layer.mlp, mesh=mesh)
    fully_shard(model, mesh=mesh)


def check_fsdp(rank: int, mesh: DeviceMesh) -> None:
    """Sharded training on a part of each batch is training on all of it: losses, and parameters at the end."""
    device = torch.get_default_device()
    with torch.device("cpu"):
        windows, count = batches(SETUP).to(device), mesh.size()
        whole, sharded = build(SETUP, OURS, device), build(SETUP, OURS, device)
    start = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    shard(sharded, mesh)
    losses = train(whole, windows)
    own = torch.tensor(train(sharded, windows.chunk(count, dim=1)[rank]))
    dist.all_reduce(own)
    # Sums over a batch in another order: units in the last place of the largest term, carried through six steps; on a GPU
    # products too are summed up in an order that depends on their shapes.
    torch.testing.assert_close(own / count, torch.tensor(losses), rtol=2e-6 if device.type == "cpu" else 2e-5, atol=0)
    assert losses[-1] < losses[0] - 0.5
    for (name, parameter), part in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert part.to_local().numel() < parameter.numel(), name
        moved = (parameter - start[name]).abs().max()
        off = (part.full_tensor() - parameter).abs().max()
        assert off <= 1e-4 * moved, f"{name} moved by {moved:.2g} and is off by {off:.2g}"


def place(mesh: DeviceMesh, tensor: Tensor, *placements: object) -> Tensor:
    return distribute_tensor(tensor, mesh, placements).detach().requires_grad_(tensor.is_floating_point())  # type: ignore[arg-type]


def equals(function: Callable[..., Tensor], wholes: list[Tensor], parts: list[Tensor]) -> None:
    """A function of DTensors, and its gradients, equal those of whole tensors."""
    results = []
    for tensors in ([whole.detach().requires_grad_(whole.is_floating_point()) for whole in wholes], parts):
        out = function(*tensors)
        out.square().sum().backward()
        results.append([out, *(tensor.grad for tensor in tensors if tensor.requires_grad)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-4, atol=1e-5)


def check_two_dimensions(mesh: DeviceMesh) -> None:
    """Batches over one dimension of the mesh, the sequence or the vocabulary over the other."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 6, 16), torch.randn(16)
    blocks = torch.randn(3, 4, 6, 16)
    indices, table = torch.randint(0, 21, (4, 6)), torch.randn(21, 16)
    whole, batch, split = (Replicate(), Replicate()), (Shard(0), Replicate()), (Shard(0), Shard(1))
    vocabulary = (Replicate(), Shard(0))
    norm = npu_rms_norm.rms_norm
    equals(norm, [x, weight], [place(mesh, x, *split), place(mesh, weight, *whole)])
    later = (Shard(1), Shard(2))  # the same of blocks that are stacked
    queries = [place(mesh, weight, *whole) for _ in range(2)]
    equals(npu_attn_res.attn_res, [blocks, weight, weight], [place(mesh, blocks, *later), *queries])
    embedding = npu_embedding.embedding
    equals(embedding, [indices, table], [place(mesh, indices, *batch), place(mesh, table, *vocabulary)])
    for rows in (4, 6):  # ranks have one each, or two, one, two and one
        indices_of_all = torch.randint(0, 21, (rows, 6))
        parts = place(mesh, indices_of_all, Shard(0), Shard(0)), place(mesh, table, *vocabulary)
        equals(embedding, [indices_of_all, table], list(parts))
    tensors = [place(mesh, x, *batch), place(mesh, table, *vocabulary), place(mesh, indices, *batch)]
    equals(npu_fused_linear_cross_entropy.fused_linear_cross_entropy, [x, table, indices], tensors)


def main() -> None:
    with ranks.join(sys.argv[1]) as rank:
        count, kind = dist.get_world_size(), torch.get_default_device().type
        check_fsdp(rank, init_device_mesh(kind, (count,)))
        if count == 4:
            mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("replicas", "shards"))
            check_fsdp(rank, mesh)
            check_two_dimensions(mesh)


if __name__ == "__main__":
    main()
