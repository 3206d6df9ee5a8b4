"""What two ranks that share a vocabulary compute is what one computes of the whole: for vocabulary_worker.py."""

import log_probs
import losses
import torch
import torch.distributed as dist
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_distillation_loss, linear_log_probs
from npu_fused_linear_cross_entropy.call import DIVERGENCES


def agree(run, x, others, rows, columns, device="cpu", tolerance=1e-6):
    """The outputs and gradients of `run` are the same for whole tensors and for this rank's part.

    Args:
        run: takes whether it is the part, x, and the others.
        x: [tokens, ...], of which this rank has `rows`.
        others: [vocabulary, ...], of which it has `columns`.
    """
    found = []
    for own in (False, True):
        parts = [x[rows], *(each[columns] for each in others)] if own else [x, *others]
        leaves = [losses.leaf(part, device) for part in parts]
        outputs = run(own, *leaves)
        dx, *gradients = torch.autograd.grad(sum(output.sum() for output in outputs if output.requires_grad), leaves)
        found.append([*outputs, *([dx, *gradients] if own else [dx[rows], *(each[columns] for each in gradients)])])
    for whole, part in zip(*found, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=tolerance)


def in_parts(own, columns, vocabulary, **options):
    """Options of this rank's part of a vocabulary."""
    part = {"process_group": dist.group.WORLD, "vocab_range": (columns.start, columns.stop), "vocab_size": vocabulary}
    return {**options, **(part if own else {})}


def everything_of_distributions(place, rank, device):
    """Of parts of a vocabulary, one of which has fewer columns than the largest logits that are asked for."""
    with torch.device("cpu"):
        tensors = log_probs.make(vocabulary=123, bias=True, temperature=True)
    target, ids = (tensors[name].to(device) for name in ("target", "ids"))
    for middle in (120, 60)[: 1 if place == "emulated" else 2]:
        columns = slice(*[(0, middle), (middle, 123)][rank])

        def run(own, both, weight, bias, columns=columns):
            options = in_parts(own, columns, 123, **log_probs.EVERYTHING, memory_budget=2**14)
            given = {"ids": ids, "temperature": both[..., -1]}
            return linear_log_probs(both[..., :-1], weight, target, bias, **given, **options)

        x = torch.cat((tensors["x"], tensors["temperature"].unsqueeze(-1)), -1)
        agree(run, x, [tensors["weight"], tensors["bias"]], slice(None), columns, device, 1e-5)


def the_largest_of_a_masked_vocabulary(rank, device):
    """More columns than are left, and than one rank has: each is named once, and gradients are those of the whole."""
    with torch.device("cpu"):
        case, bias = losses.make(7, 8, 12, torch.float32), torch.zeros(12)
        bias[4:] = -torch.inf
    columns = slice(*[(0, 2), (2, 12)][rank])

    def run(own, x, weight):
        mine = bias[columns if own else slice(None)].to(device)
        found = linear_log_probs(x, weight, None, mine, top_k=11, **in_parts(own, columns, 12))
        assert all(len(set(row)) == 11 for row in found.top_ids.tolist())
        return [found.top_log_probs[:, :4]]

    agree(run, case.x, [case.weight], slice(None), columns, device)


def probabilities_as_targets(rank, device):
    with torch.device("cpu"):
        case = losses.make(13, 24, 123, torch.float32, class_weight=True)
        q = torch.rand(13, 123, generator=torch.Generator().manual_seed(0))
    columns = slice(*[(0, 60), (60, 123)][rank])
    for tokens in (None, 2):

        def run(own, x, weight, tokens=tokens):
            mine = columns if own else slice(None)
            given = {"class_weight": case.class_weight[mine].to(device), "label_smoothing": 0.1, "memory_budget": 2**14}
            options = in_parts(own, columns, 123, chunk_tokens=tokens, **given)
            return [fused_linear_cross_entropy(x, weight, q[:, mine].to(device), **options)]

        agree(run, case.x, [case.weight], slice(None), columns, device)


def tokens_are_gathered(place, rank, device):
    """x is this rank's tokens: outputs are those of whole tensors, and gradients too, x's scattered, the weight's added."""
    with torch.device("cpu"):
        tensors = log_probs.make(tokens=(6, 3), vocabulary=120, bias=True, temperature=True)
        probs = torch.rand(6, 3, 120, generator=torch.Generator().manual_seed(1)).to(device)
    rows, columns = slice(3 * rank, 3 * rank + 3), slice(60 * rank, 60 * rank + 60)
    target, ids, temperature = (tensors[name].to(device) for name in ("target", "ids", "temperature"))

    def score(x, weight, bias, own, **options):
        of_tokens = {"ids": ids, "temperature": temperature}
        return linear_log_probs(x, weight, target, bias, **of_tokens, **log_probs.EVERYTHING, **options).ids_log_probs

    def loss(x, weight, bias, own, **options):
        return fused_linear_cross_entropy(x, weight, target, bias, **options)

    def of_probabilities(x, weight, bias, own, **options):
        return fused_linear_cross_entropy(x, weight, probs[..., columns if own else slice(None)], bias, **options)

    for function in (loss, score, of_probabilities)[: 1 if place == "emulated" else 3]:
        for budget in (None, 2**14):

            def run(own, x, weight, bias, function=function, budget=budget):
                part = {"process_group": dist.group.WORLD, "sequence_parallel": True} if own else {}
                return [function(x, weight, bias, own, memory_budget=budget, **part)]

            agree(run, tensors["x"], [tensors["weight"], tensors["bias"]], rows, columns, device, 1e-5)


def a_student_and_its_teacher_are_split(rank, device):
    """Every divergence, with hard labels, weights of tokens and gathered tokens: what whole heads give."""
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        case, other = (losses.make((4, 3), width, 123, torch.float32, ignored=0.2, seed=width) for width in (8, 24))
        probs, each = torch.rand(4, 3, 123, generator=generator), torch.rand(4, 3, generator=generator)
        log_q, ids = torch.log_softmax(other.x @ other.weight.t(), -1).topk(4)
    columns, rows = slice(*[(0, 100), (100, 123)][rank]), slice(2 * rank, 2 * rank + 2)
    teachers = (
        lambda columns, rows: {"teacher": (other.x[rows].to(device), other.weight[columns].to(device))},
        lambda columns, rows: {"teacher_probs": probs[..., columns].to(device)},
        lambda columns, rows: {"teacher_top_k": (ids.to(device), log_q.to(device))},
    )
    for teacher, divergence in zip([0, 0, 0, 1, 2], [*DIVERGENCES, "forward_kl"], strict=True):
        for reduction in ("mean", "none"):
            options = {"divergence": divergence, "hard_weight": 0.3, "temperature": 2.0, "reduction": reduction, "beta": 0.3}
            options |= {"chunk_tokens": 5, "token_weight": each.to(device)}

            def run(own, x, weight, options=options, teacher=teacher):
                given = in_parts(own, columns, 123, **options, **({"sequence_parallel": True} if own else {}))
                given |= teachers[teacher](*((columns, rows) if own else (slice(None), slice(None))))
                return [linear_distillation_loss(x, weight, case.target.to(device), **given)]

            agree(run, case.x, [case.weight], rows, columns, device)


def a_gradient_is_added(rank, device):
    """The gradient of this rank's part of the weight is added to its `weight_grad`, whichever function computes it."""
    with torch.device("cpu"):
        case = losses.make((6, 3), 8, 120, torch.float32)
    rows, columns = slice(3 * rank, 3 * rank + 3), slice(60 * rank, 60 * rank + 60)
    x, target, part = case.x[rows].to(device), case.target.to(device), {"process_group": dist.group.WORLD}
    teacher = (x, case.weight[columns].to(device) + 1)
    for function, options in (
        (fused_linear_cross_entropy, {}),
        (lambda *given, **others: linear_log_probs(*given, top_k=2, **others).log_probs.sum(), {}),
        (linear_distillation_loss, {"teacher": teacher}),
    ):
        found = []
        for added in (None, torch.ones(60, 8, device=device)):
            weight = losses.leaf(case.weight[columns], device)
            function(x, weight, target, weight_grad=added, sequence_parallel=True, **part, **options).backward()
            found.append(weight.grad + 1 if added is None else added)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def an_adapter_is_split_with_the_vocabulary(rank, device):
    """LoRA's B has this rank's columns, and what A makes of the tokens is gathered with them."""
    x, weight, lora_a, lora_b = torch.randn(6, 8), torch.randn(120, 8), torch.randn(2, 8), torch.randn(120, 2)
    rows, columns = slice(3 * rank, 3 * rank + 3), slice(60 * rank, 60 * rank + 60)
    target = torch.randint(0, 120, (6,))

    def run(own, both, b):
        options = {"process_group": dist.group.WORLD, "sequence_parallel": True} if own else {}
        frozen = weight[columns] if own else weight
        return [fused_linear_cross_entropy(both[:, :8], frozen, target, adapter=(both[:, 8:], b), **options)]

    agree(run, torch.cat((x, x @ lora_a.t()), -1), [lora_b], rows, columns, device)
