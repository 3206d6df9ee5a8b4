"""One rank of test_parallel.py, at the place that is its argument."""

import copy
import pickle
import sys
from unittest import mock

import losses
import torch
import torch.distributed as dist
import vocabulary_parts
from npu_fused_linear_cross_entropy import FusedLinearCrossEntropyLoss, fused_linear_cross_entropy, linear_log_probs
from npu_fused_linear_cross_entropy import tiling as product
from npu_fused_linear_cross_entropy.call import STATISTICS
from npu_tiling import Kernels

from testing import ranks

FLAGS = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_lse")
OPTIONS = {
    "plain": {},
    "every option": {
        "class_weight": True,
        "label_smoothing": 0.1,
        "lse_square_scale": 0.01,
        "softcap": 5.0,
        "logit_scale": 0.7,
        "token_scaling": True,
        "bias": torch.float32,
        **dict.fromkeys(FLAGS, True),
    },
    "entropy": {"return_entropy": True},
    "none": {"reduction": "none", "chunk_tokens": 4},
    "columns": {"memory_budget": 1, **dict.fromkeys(FLAGS, True)},
}


def shard(case, first, last):
    """This rank's rows of everything that is as long as the vocabulary."""
    parts = {}
    for name in ("weight", "bias", "class_weight"):
        tensor = getattr(case, name)
        parts[name] = None if tensor is None else tensor[first:last].clone()
    return parts


def compare(what, place, ranges, rank):
    """The loss, extras and gradients of a vocabulary in parts and whole, side by side, from inputs on the CPU."""
    with torch.device("cpu"):
        _compare(losses.make(13, 24, ranges[-1][1], torch.float32, ignored=0.2, **OPTIONS[what]), what, place, ranges, rank)


def compare_logits_far_apart(place, rank):
    """The other rank's logits are higher than those of the targets' rank by 200, for which fp32 has no exponential."""
    with torch.device("cpu"):
        # With few columns of x ranks compute exponentials, with more they sweep whole rows twice.
        for width, tokens in ((8, {}), (24, {}), (8, {"memory_budget": 1}), (24, {"memory_budget": 1})):
            case = losses.make(13, width, 120, torch.float32, **tokens)
            case.x[:, 0] = 1.0
            case.weight[:, 0] = torch.where(torch.arange(120) < 60, -100.0, 100.0)
            case = losses.dataclasses.replace(case, target=case.target % 60)
            _compare(case, "far apart", place, [(0, 60), (60, 120)], rank)


def _compare(case, what, place, ranges, rank):
    vocabulary = ranges[-1][1]
    first, last = ranges[rank]
    parts = shard(case, first, last)
    even = len({end - start for start, end in ranges}) == 1
    where = {} if even else {"vocab_range": (first, last), "vocab_size": vocabulary}
    part = losses.Case(case.x, parts["weight"], case.target, parts["bias"], parts["class_weight"], {**case.options, **where})
    part.options["process_group"] = dist.group.WORLD
    device = "cuda" if place == "cuda" else "cpu"
    whole, sharded = losses.run(case, device), losses.run(part, device)
    losses.check(case, whole)
    for name, expected in whole.outputs.items():
        actual = sharded.outputs[name]
        assert (actual is None) == (expected is None)
        if expected is not None:
            assert torch.allclose(actual.double(), expected.double(), rtol=1e-5, atol=1e-6), (what, place, name)
    for name, expected in whole.gradients.items():
        mine = expected if name == "x" else expected[first:last]
        assert torch.allclose(sharded.gradients[name], mine, rtol=1e-4, atol=1e-6), (what, place, name)


def unequal_parts_cut_tokens_alike(rank, device):
    """One rank's logits are within the budget and the other's are not: chunks, at whose ends they exchange, are the same."""
    torch.manual_seed(0)
    x, weight, target = torch.randn(300, 8), torch.randn(2000, 8), torch.randint(0, 2000, (300,))
    columns = slice(*[(0, 60), (60, 2000)][rank])

    def run(own, x, weight):
        options = vocabulary_parts.in_parts(own, columns, 2000, memory_budget=2**19)
        return [fused_linear_cross_entropy(x, weight, target, **options)]

    vocabulary_parts.agree(run, x, [weight], slice(None), columns, device, tolerance=1e-7)


def only_tokens_are_exchanged():
    """Nothing as long as the vocabulary, or a product of the two, travels but x and its gradient."""
    x, weight = torch.randn(13, 24, requires_grad=True), torch.randn(60, 24, requires_grad=True)
    statistics, sent = 4 * STATISTICS * 13, []
    for tokens, options in ((13, {}), (26, {"sequence_parallel": True})):
        target = torch.zeros(tokens, dtype=torch.int64)
        with ranks.collectives() as called:
            fused_linear_cross_entropy(x, weight, target, process_group=dist.group.WORLD, **options).backward()
        sent.append(called)
    assert sent[0] == [("all_gather", statistics), ("all_reduce", x.nbytes)], sent
    assert sent[1] == [("all_gather", x.nbytes), ("all_gather", 2 * statistics), ("reduce_scatter", 2 * x.nbytes)], sent


def one_launch_joins_statistics(device):
    """Small calls cost what they launch."""
    launched, launch = [], Kernels.launch

    def noted(self, module, kernel, *others):
        launched.append(kernel)
        return launch(self, module, kernel, *others)

    x, weight = torch.randn(13, 16, device=device), torch.randn(40, 16, device=device)
    with torch.no_grad(), mock.patch.object(Kernels, "launch", noted):
        target = torch.zeros(13, dtype=torch.int64, device=device)
        fused_linear_cross_entropy(x, weight, target, process_group=dist.group.WORLD)
        split = sorted(launched)
        launched.clear()
        fused_linear_cross_entropy(x, weight, target)
    assert split == sorted([*launched, "cross_entropy_join_kernel"]), (split, launched)


def exponentials_of_the_product_itself(rank):
    """bf16, where kernels multiply (test_product.py), and rows that rise above what this rank knows of them."""
    product._MIN_OPERATIONS = 0.0
    case = losses.make(150, 160, 1000, ignored=0.2)
    weight = case.weight.clone()
    weight[700:] *= 20  # and not those of the first rank
    case = losses.dataclasses.replace(case, weight=weight)
    own = slice(500 * rank, 500 * rank + 500)
    found = losses.run(
        losses.dataclasses.replace(case, weight=weight[own]).with_options(process_group=dist.group.WORLD), "cuda"
    )
    whole = losses.run(case, "cuda")
    losses.check(case, whole)
    assert torch.allclose(found.outputs["loss"], whole.outputs["loss"], rtol=1e-5)
    for name, expected in whole.gradients.items():
        mine = (expected if name == "x" else expected[own]).float()
        assert (found.gradients[name].float() - mine).norm() <= 0.01 * mine.norm(), name


def a_row_of_nan_predicts_a_token(rank):
    x, weight = torch.randn(3, 8), torch.randn(120, 8)
    x[1] = torch.nan
    options = {"process_group": dist.group.WORLD, "return_predicted_tokens": True}
    target = torch.zeros(3, dtype=torch.int64)
    found = fused_linear_cross_entropy(x, weight[60 * rank : 60 * rank + 60], target, **options).predicted_tokens
    assert found.min() >= 0
    assert found.max() < 120


def a_module_with_a_group_is_copied_and_pickled(rank):
    x, weight, target = torch.randn(3, 8), torch.randn(120, 8)[60 * rank : 60 * rank + 60], torch.tensor([0, 59, 119])
    loss = FusedLinearCrossEntropyLoss(process_group=dist.group.WORLD)
    for duplicate in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(duplicate(x, weight, target), loss(x, weight, target))
        assert duplicate.options["process_group"] is loss.options["process_group"] is dist.group.WORLD


def the_scale_of_class_weights_costs_nothing(place, rank):
    """fp16, whose gradients of logits are divided by the mean of the weights, over all ranks."""
    with torch.device("cpu"):
        case = losses.make(29, 24, 120, torch.float16, class_weight=True, ignored=0.2)
        wanted = losses.exact(case).gradients
        upstream = losses.upstream(case, {"loss": torch.zeros(()), "entropy": None})["loss"]
        for scale in (1e5, 1e-6):
            parts = shard(case, 60 * rank, 60 * rank + 60)
            part = losses.dataclasses.replace(case, weight=parts["weight"], class_weight=parts["class_weight"] * scale)
            part = losses.dataclasses.replace(
                part.with_options(process_group=dist.group.WORLD), seeds={"loss": upstream * 32}
            )
            found = losses.run(part, "cuda" if place == "cuda" else "cpu").gradients
            for name, exact in wanted.items():
                mine = (exact if name == "x" else exact[60 * rank : 60 * rank + 60]) * 32
                assert (found[name].double() - mine).norm() <= 2e-3 * mine.norm(), (scale, name)


def main() -> None:
    place = sys.argv[1]
    device = "cuda" if place == "cuda" else "cpu"
    with ranks.join(place) as rank:
        for what in ("plain", "every option") if place == "emulated" else OPTIONS:
            compare(what, place, [(0, 60), (60, 120)], rank)
        if place != "emulated":
            compare("every option", place, [(0, 100), (100, 123)], rank)
            unequal_parts_cut_tokens_alike(rank, device)
        compare_logits_far_apart(place, rank)
        only_tokens_are_exchanged()
        if place != "cpu":
            one_launch_joins_statistics(device)
        the_scale_of_class_weights_costs_nothing(place, rank)
        a_row_of_nan_predicts_a_token(rank)
        a_module_with_a_group_is_copied_and_pickled(rank)
        vocabulary_parts.everything_of_distributions(place, rank, device)
        vocabulary_parts.the_largest_of_a_masked_vocabulary(rank, device)
        vocabulary_parts.tokens_are_gathered(place, rank, device)
        vocabulary_parts.a_gradient_is_added(rank, device)
        if place != "emulated":  # the same operators of PyTorch, and the same kernels
            vocabulary_parts.a_student_and_its_teacher_are_split(rank, device)
            vocabulary_parts.probabilities_as_targets(rank, device)
        if place == "cuda":
            with torch.device("cpu"):  # where cases are made and fp64 is computed
                exponentials_of_the_product_itself(rank)
        torch.manual_seed(0)
        vocabulary_parts.an_adapter_is_split_with_the_vocabulary(rank, device)
        x, weight, target = torch.randn(5, 8), torch.randn(120, 8), torch.randint(0, 120, (5,))
        part = linear_log_probs(x, weight[60 * rank : 60 * rank + 60], target, process_group=dist.group.WORLD)
        assert torch.allclose(part, linear_log_probs(x, weight, target), rtol=1e-5)


if __name__ == "__main__":
    main()
