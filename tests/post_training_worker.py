"""One rank of test_post_training.py: the page's head under FSDP2 against the loss of both ranks' tokens in one process."""

import re
import sys
from pathlib import Path

import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from testing import ranks

PAGE = Path(__file__).parents[1] / "tools" / "docs" / "pages" / "trainers" / "post_training.md"
(SOURCE,) = re.findall(r"^class LossHead.*?(?=^loss_head)", PAGE.read_text(), re.M | re.S)


def counts(found: CommDebugMode) -> tuple[int, int]:
    sent = {str(operator): number for operator, number in found.get_comm_counts().items()}
    return tuple(sum(number for name, number in sent.items() if word in name) for word in ("allgather", "reduce_scatter"))


def main() -> None:
    with ranks.join(sys.argv[1]) as rank:
        mesh = init_device_mesh("cpu", (2,))
        names = {"torch": torch, "fused_linear_cross_entropy": fused_linear_cross_entropy}
        exec(SOURCE, names)
        torch.manual_seed(0)
        hidden, tokens = torch.randn(2, 40, 64), torch.randint(0, 1000, (2, 40))  # 40 tokens a rank: three chunks
        whole = torch.nn.Linear(64, 1000, bias=False)
        expected = fused_linear_cross_entropy(hidden, whole.weight, tokens)
        (gradient,) = torch.autograd.grad(expected, whole.weight)
        for reshard in (False, True):
            head = names["LossHead"](64, 1000, bias=False)
            head.load_state_dict(whole.state_dict())
            fully_shard(head, mesh=mesh, reshard_after_forward=reshard)
            x = hidden[rank].clone().requires_grad_()
            with CommDebugMode() as communication:
                loss = head(x, tokens[rank])
                loss.backward()
            assert counts(communication) == (1 + reshard, 1), communication.get_comm_counts()
            torch.testing.assert_close(head.weight.grad.full_tensor(), gradient, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    main()
