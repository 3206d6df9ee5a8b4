#!/usr/bin/env bash
# Megatron's label smoothing spreads over a rank's part of the vocabulary: with two ranks each has another loss, and both are wrong.
#
# Versions: megatron-core 0.16.1, the last one for Python 3.11, torch 2.13.0 (a CPU build is enough), numpy 2.4.6; the main branch, read in a
#   stored copy of late 2026, has the same lines. Two ranks, gloo.
# Input: vocab_parallel_cross_entropy(logits, target, label_smoothing=0.1), 6 tokens, 8 words, four of them on a rank; on one rank, logits that
#   are 0, 1 and -120, the last one as a word that padding has added.
# Expected: its docstring's formula, 0.9 for the target and 0.1 / 7 for each other word, in float64.
# Seen on 2026-12-01, without an error or a warning:
#     mean loss           2.779 on one rank and 2.715 on the other, the formula 2.752
#     gradients           differ by up to 0.019; a row's sum is -0.133, and must be 0
#     logits 0, 1, -120   inf, the formula 7.26
#   The number of words and the mean of their log probabilities are those of a rank; and the logarithm is taken of a probability that has
#   underflown. Ranks that log or scale by their loss part company. Reported as Megatron-LM's #737 (2024) and #7464, both open.
#   Liger's LigerMegatronCrossEntropy offers both: label_smoothing_mode="global" is the formula.
# A way round: label_smoothing=0 and the mean of the log probabilities by hand, summed over ranks.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet megatron-core==0.16.1 torch==2.13.0 numpy==2.4.6

cat >"$work/smoothing.py" <<'PYTHON'
import torch
import torch.distributed as dist
import torch.nn.functional as F

dist.init_process_group("gloo")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy  # noqa: E402

parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
rank = dist.get_rank()


def exact(logits, target, smoothing=0.1):
    """The formula of the docstring: smoothing / (words - 1) for each word but the target."""
    words = logits.shape[-1]
    share = torch.full_like(logits, smoothing / (words - 1)).scatter_(-1, target[..., None], 1 - smoothing)
    return -(share * F.log_softmax(logits, -1)).sum(-1)


torch.manual_seed(0)
logits, target = torch.randn(6, 1, 8), torch.randint(0, 8, (6, 1))
whole = logits.double().requires_grad_()
must = exact(whole, target).mean()
must.backward()
part = logits[..., 4 * rank : 4 * rank + 4].clone().requires_grad_()
loss = vocab_parallel_cross_entropy(part * 1.0, target, 0.1).mean()
loss.backward()
losses, parts = [torch.zeros(()) for _ in range(2)], [torch.zeros_like(part) for _ in range(2)]
dist.all_gather(losses, loss.detach())
dist.all_gather(parts, part.grad)
gradient = torch.cat(parts, -1) * 6
far, sums = (gradient - whole.grad * 6).abs().max().item(), gradient.sum(-1).flatten()

# One rank with the whole vocabulary.
parallel_state.destroy_model_parallel()
parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
padded = torch.tensor([[[0.0, 1.0, -120.0]]])
underflow, finite = vocab_parallel_cross_entropy(padded.clone(), torch.tensor([[0]]), 0.1).item(), exact(padded.double(), torch.tensor([[0]])).item()
if rank == 0:
    print(f"mean loss of the two ranks {losses[0].item():.3f}, {losses[1].item():.3f}; the formula {must.item():.3f}")
    print(f"gradients of the logits differ by {far:.4f}, and a row's sum is {sums.mean().item():.4f}")
    print(f"0, 1, -120: {underflow}; the formula {finite:.3f}", flush=True)
dist.destroy_process_group()
wrong = [abs(loss.item() - must.item()) > 5e-3 for loss in losses]
if not all(wrong) or abs(losses[0] - losses[1]) < 1e-3 or far < 0.01 or underflow != float("inf"):
    raise SystemExit("changed")
PYTHON
PYTHONWARNINGS=ignore "$work/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$work/smoothing.py"
