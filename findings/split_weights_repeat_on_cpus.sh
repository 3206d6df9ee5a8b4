#!/usr/bin/env bash
# Weights that are initialised after they were split over CPUs repeat: each rank draws the same numbers, so that half of the rows are copies.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11; two ranks, gloo, one seed, as DTensors ask for.
# Input: the way of FSDP2's documentation: a model on the meta device, fully_shard, to_empty, reset_parameters; dropout of a tensor of ones
#   [8, 6], Shard(0).
# Expected: random numbers for the whole tensor, as on GPUs, where each rank draws its part of one sequence.
# Seen on 2026-11-30; the only warning: random operators "may not have complete support on cpu device mesh":
#     Linear(32, 16)     rows 0 to 7 equal rows 8 to 15; the matrix has the rank 8
#     Embedding(8, 4)    tokens 0 to 3 have the vectors of tokens 4 to 7
#     dropout, rand_like, bernoulli, multinomial    the second half of the rows is the first one
#   With more ranks there are more copies. A rehearsal of a training on CPUs learns worse than the training will, and a test that compares
#   losses on one rank and on two fails for no fault of the model. With FSDP2's CPU offload it happens on GPUs too (torchtitan's #3106).
# A way round: make the model on each rank with one seed, then fully_shard or distribute_tensor; orthogonal_ is right as it is.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/draws.py" <<'PYTHON'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))


def is_a_copy(tensor):
    """Whether the second half of the rows is the first one."""
    return torch.equal(*tensor.full_tensor().chunk(2))


torch.manual_seed(0)
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Embedding(8, 4))
fully_shard(model, mesh=mesh)
model.to_empty(device="cpu")
for layer in model:
    layer.reset_parameters()
seen = {name: is_a_copy(parameter) for name, parameter in model.named_parameters()}
rank = torch.linalg.matrix_rank(model[0].weight.full_tensor()).item()
ones = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])
seen |= {"dropout": is_a_copy(F.dropout(ones, 0.5)), "rand_like": is_a_copy(torch.rand_like(ones)), "bernoulli": is_a_copy((ones / 2).bernoulli())}
seen["multinomial"] = is_a_copy(torch.multinomial(ones, 2))
whole = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)])
if dist.get_rank() == 0:
    print("the second half is the first one:", seen, "; rank of the matrix:", rank, "; made whole and then split:", end=" ", flush=True)
repeats = is_a_copy(whole)
if dist.get_rank() == 0:
    print(repeats, flush=True)
dist.destroy_process_group()
if not all(seen.values()) or rank != 8 or repeats:
    raise SystemExit("changed")
PYTHON
PYTHONWARNINGS=ignore "$work/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$work/draws.py"
