"""One rank of test_parallel.py, at the place that is its argument."""

import sys

import log_probs
import losses
import torch
import torch.distributed as dist
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_distillation_loss, linear_log_probs
from npu_fused_linear_cross_entropy.cuda import tiling as product
from npu_fused_linear_cross_entropy.options import DIVERGENCES

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
        for tokens in ({}, {"memory_budget": 1}):
            case = losses.make(13, 24, 120, torch.float32, **tokens)
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


def unequal_parts_cut_tokens_alike(rank):
    """One rank's logits are within the budget and the other's are not: chunks, at whose ends they exchange, are the same."""
    torch.manual_seed(0)
    tensors = [torch.randn(300, 8), torch.randn(2000, 8)]
    target = torch.randint(0, 2000, (300,))
    first, last = [(0, 60), (60, 2000)][rank]
    results = []
    for rows, options in (
        (slice(None), {}),
        (slice(first, last), {"process_group": dist.group.WORLD, "vocab_range": (first, last), "vocab_size": 2000}),
    ):
        x, weight = tensors[0].clone().requires_grad_(), tensors[1][rows].clone().requires_grad_()
        loss = fused_linear_cross_entropy(x, weight, target, memory_budget=2**19, **options)
        loss.backward()
        results.append((loss, x.grad, weight.grad if options else weight.grad[first:last]))
    for whole, part in zip(*results, strict=True):
        assert torch.allclose(whole, part, rtol=1e-4, atol=1e-7)


def only_tokens_are_exchanged():
    """Nothing as long as the vocabulary, or a product of the two, travels but x and its gradient."""
    sizes, names = [], ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    originals = {name: getattr(dist, name) for name in names}

    def counting(name):
        def send(*arguments, **keywords):
            sizes.append((name, arguments[name != "all_reduce"].numel()))
            return originals[name](*arguments, **keywords)

        return send

    x, weight = torch.randn(13, 24, requires_grad=True), torch.randn(60, 24, requires_grad=True)
    statistics, sent = ("all_gather_into_tensor", 6 * 13), []
    for name in names:
        setattr(dist, name, counting(name))
    try:
        for tokens, options in ((13, {}), (26, {"sequence_parallel": True})):
            target = torch.zeros(tokens, dtype=torch.int64)
            fused_linear_cross_entropy(x, weight, target, process_group=dist.group.WORLD, **options).backward()
            sent.append(list(sizes))
            sizes.clear()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    gathered, scattered = ("all_gather_into_tensor", x.numel()), ("reduce_scatter_tensor", 2 * x.numel())
    assert sent[0] == [statistics, ("all_reduce", x.numel())], sent
    assert sent[1] == [gathered, (statistics[0], 2 * statistics[1]), scattered], sent


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


def everything_of_distributions(place, rank):
    """Of parts of a vocabulary, one of which has fewer columns than the largest logits that are asked for."""
    device = "cuda" if place == "cuda" else "cpu"
    with torch.device("cpu"):
        tensors = log_probs.make(vocabulary=123, bias=True, temperature=True)
    for middle in (120, 60)[: 1 if place == "emulated" else 2]:
        own = slice(*[(0, middle), (middle, 123)][rank])

        def of_part(x, weight, target, bias, own=own, **options):
            part = {"process_group": dist.group.WORLD, "vocab_range": (own.start, own.stop), "vocab_size": 123}
            return linear_log_probs(x, weight[own], target, bias[own], **options, **part)

        found, given = [], {**log_probs.EVERYTHING, "memory_budget": 2**14}
        for function in (linear_log_probs, of_part):
            moved, leaves = log_probs.leaves_of(tensors, device)
            outputs = function(moved.pop("x"), moved.pop("weight"), moved.pop("target"), moved.pop("bias"), **moved, **given)
            gradients = log_probs.gradients_of(outputs, leaves)
            found.append([*outputs, *(gradients[name] for name in ("x", "temperature"))])
            found[-1] += [gradients[name][own] for name in ("weight", "bias")]
        for whole, part in zip(*found, strict=True):
            torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-5)


def probabilities_as_targets(place, rank):
    device = "cuda" if place == "cuda" else "cpu"
    with torch.device("cpu"):
        case = losses.make(13, 24, 123, torch.float32, class_weight=True)
        q, own = torch.rand(13, 123, generator=torch.Generator().manual_seed(0)), slice(*[(0, 60), (60, 123)][rank])
    results = []
    for columns in (slice(0, 123), own):
        part = {"process_group": dist.group.WORLD, "vocab_range": (own.start, own.stop), "vocab_size": 123}
        part |= {"class_weight": case.class_weight[columns].to(device), "label_smoothing": 0.1, "memory_budget": 2**14}
        x, weight = losses.leaf(case.x, device), losses.leaf(case.weight[columns], device)
        options = part if columns is own else {name: part[name] for name in list(part)[3:]}
        loss = fused_linear_cross_entropy(x, weight, q[:, columns].to(device), **options)
        results.append((loss, *torch.autograd.grad(loss, (x, weight))))
    (whole, *gradients), (part, dx, dweight) = results
    for one, other in zip((part, dx, dweight), (whole, gradients[0], gradients[1][own]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def tokens_are_gathered(place, rank):
    """x is this rank's tokens: outputs are those of whole tensors, and gradients too, x's scattered, the weight's added."""
    device = "cuda" if place == "cuda" else "cpu"
    with torch.device("cpu"):
        tensors = log_probs.make(tokens=(6, 3), vocabulary=120, bias=True, temperature=True)
    rows, columns = slice(3 * rank, 3 * rank + 3), slice(60 * rank, 60 * rank + 60)
    part = {"process_group": dist.group.WORLD, "sequence_parallel": True}
    probs = torch.rand(6, 3, 120, generator=torch.Generator().manual_seed(1))

    def score(x, weight, bias, others, **options):
        return linear_log_probs(x, weight, others["target"], bias, ids=others["ids"], temperature=others["temperature"],
                                **log_probs.EVERYTHING, **options).ids_log_probs  # fmt: skip

    def loss(x, weight, bias, others, **options):
        return fused_linear_cross_entropy(x, weight, others["target"], bias, **options)

    def of_probabilities(x, weight, bias, others, **options):
        own = columns if "process_group" in options else slice(None)
        return fused_linear_cross_entropy(x, weight, others["probs"][..., own], bias, **options)

    for function in (loss, score, of_probabilities)[: 1 if place == "emulated" else 3]:
        for budget in (None, 2**14):
            found = []
            for own in (False, True):
                given = {name: None if value is None else value.to(device) for name, value in tensors.items()}
                given["probs"] = probs.to(device)
                x = losses.leaf(given["x"][rows] if own else given["x"], device)
                weight, bias = (
                    losses.leaf(given[name][columns] if own else given[name], device) for name in ("weight", "bias")
                )
                added = torch.ones_like(weight)
                options = {"memory_budget": budget, "weight_grad": added, **(part if own else {})}
                output = function(x, weight, bias, given, **options)
                output.sum().backward()
                pieces = (x.grad, added, bias.grad) if own else (x.grad[rows], added[columns], bias.grad[columns])
                found.append((output.detach(), *pieces))
            for whole, piece in zip(*found, strict=True):
                torch.testing.assert_close(piece, whole, rtol=1e-4, atol=1e-5)


def a_student_and_its_teacher_are_split(place, rank):
    """Every divergence, with hard labels, weights of tokens and gathered tokens: what whole heads give."""
    device = "cuda" if place == "cuda" else "cpu"
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        case, other = (losses.make((4, 3), width, 123, torch.float32, ignored=0.2, seed=width) for width in (8, 24))
        probs, each = torch.rand(4, 3, 123, generator=generator), torch.rand(4, 3, generator=generator)
        log_q, ids = torch.log_softmax(other.x @ other.weight.t(), -1).topk(4)
    middle = 100
    columns, rows = slice(*[(0, middle), (middle, 123)][rank]), slice(2 * rank, 2 * rank + 2)
    part = {"process_group": dist.group.WORLD, "vocab_range": (columns.start, columns.stop), "vocab_size": 123}
    teachers = (
        lambda columns, rows: {"teacher": (other.x[rows].to(device), other.weight[columns].to(device))},
        lambda columns, rows: {"teacher_probs": probs[..., columns].to(device)},
        lambda columns, rows: {"teacher_top_k": (ids.to(device), log_q.to(device))},
    )
    for teacher, divergence in zip([0, 0, 0, 1, 2], [*DIVERGENCES, "forward_kl"], strict=True):
        for reduction in ("mean", "none"):
            options = {"divergence": divergence, "hard_weight": 0.3, "temperature": 2.0, "reduction": reduction, "beta": 0.3}
            options |= {"chunk_tokens": 5, "token_weight": each.to(device)}
            found = []
            for own in (False, True):
                mine, tokens = (columns, rows) if own else (slice(None), slice(None))
                x, weight = losses.leaf(case.x[tokens], device), losses.leaf(case.weight[mine], device)
                given = {**options, **teachers[teacher](mine, tokens), "weight_grad": torch.ones_like(weight)}
                given |= {**part, "sequence_parallel": True} if own else {}
                loss = linear_distillation_loss(x, weight, case.target.to(device), **given)
                (dx,) = torch.autograd.grad(loss.sum(), x)
                pieces = (dx, given["weight_grad"]) if own else (dx[rows], given["weight_grad"][columns])
                found.append((loss.detach(), *pieces))
            for whole, piece in zip(*found, strict=True):
                torch.testing.assert_close(piece, whole, rtol=1e-4, atol=1e-6)


def an_adapter_is_split_with_the_vocabulary(rank):
    """LoRA's B has this rank's columns, and what A makes of the tokens is gathered with them."""
    x, weight, lora_a, lora_b = torch.randn(6, 8), torch.randn(120, 8), torch.randn(2, 8), torch.randn(120, 2)
    rows, columns = slice(3 * rank, 3 * rank + 3), slice(60 * rank, 60 * rank + 60)
    target, part = torch.randint(0, 120, (6,)), {"process_group": dist.group.WORLD, "sequence_parallel": True}
    results = []
    for some, some_columns, options in ((slice(None), slice(None), {}), (rows, columns, part)):
        leaves = [tensor.clone().requires_grad_() for tensor in (x[some], lora_a, lora_b[some_columns])]
        adapter = torch.nn.functional.linear(leaves[0], leaves[1]), leaves[2]
        loss = fused_linear_cross_entropy(leaves[0], weight[some_columns], target, adapter=adapter, **options)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    dist.all_reduce(results[1][2])  # each rank's A has the gradient of its tokens
    (whole, dx, da, db), found = results
    for one, other in zip(found, (whole, dx[rows], da, db[columns]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def main() -> None:
    place = sys.argv[1]
    with ranks.join(place) as rank:
        for what in ("plain", "every option") if place == "emulated" else OPTIONS:
            compare(what, place, [(0, 60), (60, 120)], rank)
        if place != "emulated":
            compare("every option", place, [(0, 100), (100, 123)], rank)
            unequal_parts_cut_tokens_alike(rank)
        compare_logits_far_apart(place, rank)
        only_tokens_are_exchanged()
        the_scale_of_class_weights_costs_nothing(place, rank)
        a_row_of_nan_predicts_a_token(rank)
        everything_of_distributions(place, rank)
        tokens_are_gathered(place, rank)
        if place != "emulated":  # the same operators of PyTorch
            a_student_and_its_teacher_are_split(place, rank)
        if place != "emulated":  # the same kernels
            probabilities_as_targets(place, rank)
        if place == "cuda":
            with torch.device("cpu"):  # where cases are made and fp64 is computed
                exponentials_of_the_product_itself(rank)
        torch.manual_seed(0)
        an_adapter_is_split_with_the_vocabulary(rank)
        x, weight, target = torch.randn(5, 8), torch.randn(120, 8), torch.randint(0, 120, (5,))
        part = linear_log_probs(x, weight[60 * rank : 60 * rank + 60], target, process_group=dist.group.WORLD)
        assert torch.allclose(part, linear_log_probs(x, weight, target), rtol=1e-5)


if __name__ == "__main__":
    main()
