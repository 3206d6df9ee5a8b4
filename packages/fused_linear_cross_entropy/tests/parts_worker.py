"""One rank of test_parallel.py, at the place that is its argument: fixed parts of a vocabulary, on one rank and on all."""

import sys

import torch
import torch.distributed as dist
from npu_fused_linear_cross_entropy import linear_log_probs

from testing import ranks

TOKENS, WIDTH, VOCABULARY, PARTS = 90, 96, 1028, 4  # parts of 257 columns


def results(x, weight, target, bias, **options):
    """Log-probabilities, entropies, and the gradients of this rank's rows of weight and bias, and of x."""
    leaves = [each.clone().requires_grad_() for each in (weight, bias, x)]
    given = {"batch_invariant": True, "chunk_tokens": 32, "return_entropy": True, **options}
    found = linear_log_probs(leaves[2], leaves[0], target, leaves[1], **given)
    (found.log_probs.sum() + found.entropy.sum()).backward()
    return [found.log_probs.detach(), found.entropy.detach(), *(leaf.grad for leaf in leaves)]


def main(place):
    with ranks.join(place) as rank:
        torch.manual_seed(0)
        device = "cuda" if place == "cuda" else "cpu"
        with torch.device("cpu"):
            x, weight, bias = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY)
            target = torch.randint(VOCABULARY, (TOKENS,))
        x, weight, bias, target = (each.to(device) for each in (x, weight, bias, target))
        rows = VOCABULARY // dist.get_world_size()
        held = slice(rank * rows, (rank + 1) * rows)
        for options in ({}, {"softcap": 5.0, "temperature": 0.7}, {"memory_budget": 1}):
            found = []
            for parts in (PARTS, 1):
                log_probs, entropy, dweight, dbias, dx = results(x, weight, target, bias, vocab_parts=parts, **options)
                alone = [log_probs, entropy, dweight[held], dbias[held], dx]
                shared = {"process_group": dist.group.WORLD, "vocab_parts": parts, **options}
                found.append((alone, results(x, weight[held], target, bias[held], **shared)))
            assert [*map(torch.equal, *found[0])] == [True, True, True, True, False], options  # ranks add their parts of dx
            assert not any(map(torch.equal, *found[1])), "without parts the bits are those of the number of ranks"
            torch.testing.assert_close(*(each[-1] for each in found[0]))


main(sys.argv[1])
