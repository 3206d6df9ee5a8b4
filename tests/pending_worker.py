"""One rank of test_pending_dtensors.py, at the place that is its argument."""

import sys

import torch
from npu_attn_res import attn_res
from npu_embedding import embedding
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_log_probs
from npu_rms_norm import add_rms_norm, gated_rms_norm, rms_norm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from testing import ranks


def calls(whole, split):
    """What each operator makes of a tensor that was just redistributed, with the placement and shape of that tensor."""
    norm, table, ids = whole(torch.randn(8)), whole(torch.randn(11, 8)), torch.randint(0, 11, (4,))
    other, rows = split(torch.randn(4, 8)), split(torch.randn(11, 8))
    return {
        "RMSNorm": (Shard(0), 4, lambda x: rms_norm(x, norm)),
        "RMSNorm beside another way": (Shard(0), 4, lambda x: x + rms_norm(x, norm)),
        "RMSNorm of whole rows": (Replicate(), 4, lambda x: rms_norm(x, norm)),
        "RMSNorm's rows": (Replicate(), 4, lambda w: rms_norm(other, w[0])),
        "sum and RMSNorm": (Shard(0), 4, lambda x: add_rms_norm(x, other, norm)[0]),
        "gate": (Shard(0), 4, lambda x: gated_rms_norm(x, x, norm)),
        "Attention Residuals": (Shard(0), 4, lambda x: attn_res([x, 2 * x], norm, norm)),
        "embedding, split table": (Shard(0), 11, lambda w: embedding(whole(ids), w)),
        "embedding, whole table": (Replicate(), 11, lambda w: embedding(whole(ids), w)),
        "loss of split tokens": (Shard(0), 4, lambda x: fused_linear_cross_entropy(x, table, split(ids))),
        "loss of a split vocabulary": (Replicate(), 4, lambda x: fused_linear_cross_entropy(x, rows, whole(ids))),
        "log-probabilities": (Shard(0), 4, lambda x: linear_log_probs(x, table, split(ids))),
    }


def main() -> None:
    with ranks.join(sys.argv[1]):
        mesh = init_device_mesh(torch.get_default_device().type, (2,))
        torch.manual_seed(0)
        made = calls(
            lambda tensor: distribute_tensor(tensor, mesh, [Replicate()]),
            lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]),
        )
        for what, (placement, length, call) in made.items():
            values, gradients = torch.randn(length, 8), []
            for waits in (False, True):
                leaf = values.clone().requires_grad_()
                pending = DTensor.from_local(leaf / 2, mesh, [Partial()]).redistribute(mesh, [placement], async_op=True)
                result = call(pending * 1 if waits else pending)
                result = result.full_tensor() if isinstance(result, DTensor) else result
                result.square().sum().backward()
                gradients.append(leaf.grad)
            assert gradients[0] is not None, what
            assert torch.allclose(*gradients, atol=1e-6), what
            assert gradients[0].norm() > 0, what


if __name__ == "__main__":
    main()
