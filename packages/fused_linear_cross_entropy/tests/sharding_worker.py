"""One rank of test_shards_are_the_whole, at the place that is its argument."""

import sys

import npu_fused_linear_cross_entropy as package
import torch

from testing import sharding
from testing.sharding import CommDebugMode, Partial, Replicate, Shard, distribute_tensor

SHAPE, WIDTH = (3, 5), 8
WHOLE = Replicate()
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
BY_TOKEN = ("predicted_tokens", "lse", "entropy")
EXTRAS = {f"return_{name}": True for name in ("z_loss", "predicted_tokens", "lse")}
EVERYTHING = {"label_smoothing": 0.1, "lse_square_scale": 0.01, "softcap": 5.0, "logit_scale": 0.7, **EXTRAS}


def make(vocabulary):
    torch.manual_seed(0)
    target = torch.randint(0, vocabulary, SHAPE)
    target[0, 1] = target[2, 4] = -100
    vectors = {"bias": torch.randn(vocabulary), "class_weight": torch.rand(vocabulary)}
    return {"x": torch.randn(*SHAPE, WIDTH), "weight": torch.randn(vocabulary, WIDTH), "target": target, **vectors}


def train(tensors, function=package.fused_linear_cross_entropy, **options):
    """Outputs by name, and gradients."""
    leaves = {k: v.detach().requires_grad_(k in ("x", "weight", "bias")) for k, v in tensors.items()}
    found = function(**leaves, **options)
    outputs = {"loss": found} if isinstance(found, torch.Tensor) else found._asdict()
    outputs = {name: output for name, output in outputs.items() if output is not None}
    outputs["loss"].sum().backward()
    return outputs, {name: leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}


def check(mesh, vocabulary, of_tokens, of_weight, names=("x", "weight", "target", "bias", "class_weight"), **options):
    """A loss of DTensors is that of whole tensors, and so are its gradients; returns how many collectives it took."""
    tensors = {name: tensor for name, tensor in make(vocabulary).items() if name in names}
    outputs, gradients = train(tensors, **options)
    place = {name: of_tokens if name in ("x", "target") else of_weight for name in tensors}
    sharded = {name: distribute_tensor(tensor, mesh, [place[name]]) for name, tensor in tensors.items()}
    with CommDebugMode() as communication:
        parts, part_gradients = train(sharded, **options)
    for name, expected in outputs.items():
        rows = name in BY_TOKEN or options.get("reduction") == "none"
        split = WHOLE if of_tokens.is_replicate() else Partial()
        assert parts[name].placements == (of_tokens if rows else split,), (name, parts[name].placements)
        torch.testing.assert_close(parts[name].full_tensor(), expected, **TOLERANCE, msg=lambda s, name=name: f"{name}: {s}")
    for name, expected in gradients.items():
        own = place[name] if name == "x" or of_tokens.is_replicate() else Partial()
        assert part_gradients[name].placements == (own,), (name, part_gradients[name].placements)
        gradient = part_gradients[name].full_tensor()
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6, msg=lambda s, name=name: f"d{name}: {s}")
    return communication.get_total_counts()


def check_against_process_group(mesh, rank, vocabulary):
    """The same bits as the loss of parts that the caller made, whose messages are the same."""
    tensors = make(vocabulary)
    sharded = {
        name: distribute_tensor(t, mesh, [WHOLE if name in ("x", "target") else Shard(0)]) for name, t in tensors.items()
    }
    local = {name: tensor.to_local() for name, tensor in sharded.items()}
    share = -(-vocabulary // 2)
    where = {"vocab_range": (rank * share, min(vocabulary, (rank + 1) * share)), "vocab_size": vocabulary}
    outputs, gradients = train(local, process_group=mesh.get_group(), **where, **EVERYTHING)
    parts, part_gradients = train(sharded, **EVERYTHING)
    for found, expected in ((parts, outputs), (part_gradients, gradients)):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name].to_local(), tensor), name


def check_other_functions(mesh):
    tensors = make(120)
    for name in ("bias", "class_weight"):
        del tensors[name]
    place = {"x": WHOLE, "weight": Shard(0), "target": WHOLE}
    sharded = {name: distribute_tensor(tensor, mesh, [place[name]]) for name, tensor in tensors.items()}
    parts = package.linear_log_probs(**sharded, return_entropy=True)
    for part, expected in zip(parts[:2], package.linear_log_probs(**tensors, return_entropy=True)[:2], strict=True):
        torch.testing.assert_close(part.full_tensor(), expected, **TOLERANCE)
    for placement in (WHOLE, Shard(0)):
        given = {"x": placement, "weight": WHOLE, "target": placement}
        x, weight, labels = (distribute_tensor(tensor, mesh, [given[name]]) for name, tensor in tensors.items())
        part = package.causal_lm_loss(x, weight, labels, num_items_in_batch=7, shift_labels=False)
        expected = package.causal_lm_loss(*tensors.values(), num_items_in_batch=7, shift_labels=False)
        torch.testing.assert_close(part.full_tensor(), expected, **TOLERANCE)


def refused(error, message, *arguments, **options):
    sharding.refused(error, message, package.fused_linear_cross_entropy, *arguments, **options)


def check_gathered_tokens(mesh, rank):
    """x is split where the weight is: the gradients are those of whole tensors, and x's is split as x is."""
    tensors = make(123)
    tensors |= {"x": torch.randn(4, 5, WIDTH), "target": torch.randint(0, 123, (4, 5))}
    outputs, gradients = train(tensors, **EVERYTHING)
    place = {name: WHOLE if name == "target" else Shard(0) for name in tensors}
    sharded = {name: distribute_tensor(tensor, mesh, [place[name]]) for name, tensor in tensors.items()}
    parts, part_gradients = train(sharded, **EVERYTHING)
    for found, expected in ((parts, outputs), (part_gradients, gradients)):
        for name, tensor in expected.items():
            assert found[name].placements == (WHOLE if found is parts else Shard(0),), name
            torch.testing.assert_close(found[name].full_tensor(), tensor, rtol=1e-4, atol=1e-5)


def check_refusals(mesh):
    tensors = make(120)

    def place(name, placement):
        return distribute_tensor(tensors[name], mesh, [placement])

    x, weight, target = place("x", WHOLE), place("weight", Shard(0)), place("target", WHOLE)
    rows, part = place("x", Shard(1)), place("target", Shard(1))
    said = "x is Shard(dim=2) on mesh dimension 0 and must be Replicate() or Shard of a dimension from 0 to 1."
    refused(ValueError, said, place("x", Shard(2)), weight, target)
    said = "weight is Shard(dim=1) on mesh dimension 0 and must be Replicate() or Shard(0)."
    refused(ValueError, said, x, place("weight", Shard(1)), target)
    said = "weight is Shard(dim=0) on mesh dimension 0 and must be Replicate() where x is split along another dimension"
    refused(ValueError, said, rows, weight, part)
    said = "x is Shard(dim=0) on mesh dimension 0 and must be Replicate(), or have a multiple of 2 rows along dimension 0"
    refused(ValueError, said, place("x", Shard(0)), weight, target)
    refused(ValueError, "target is Shard(dim=1) on mesh dimension 0 and must be Replicate(), as x is.", x, weight, part)
    said = "bias is Replicate() on mesh dimension 0 and must be Shard(dim=0), as weight is."
    refused(ValueError, said, x, weight, target, place("bias", WHOLE))
    refused(TypeError, "x is a plain tensor and must be a DTensor on weight's mesh", tensors["x"], weight, target)
    few = distribute_tensor(torch.zeros(1, WIDTH), mesh, [Shard(0)])
    refused(ValueError, "weight has 1 rows and must have some on each of the 2 ranks", x, few, target)
    group = {"process_group": mesh.get_group()}
    refused(ValueError, "process_group must be left out where weight is a DTensor", x, weight, target, **group)
    head = place("weight", WHOLE)
    refused(ValueError, "return_token_accuracy is True and must be False", rows, head, part, return_token_accuracy=True)
    said = "reduction is 'mean' and must be 'sum' or 'none' where x is split and there are class weights."
    refused(ValueError, said, rows, head, part, class_weight=place("class_weight", WHOLE))


def main() -> None:
    with sharding.joined(sys.argv[1]) as mesh:
        rank = mesh.get_local_rank()
        plain = ("x", "weight", "target")
        for vocabulary in (120, 123):
            check(mesh, vocabulary, WHOLE, Shard(0), return_token_accuracy=True, **EVERYTHING)
            check_against_process_group(mesh, rank, vocabulary)
        check(mesh, 120, WHOLE, Shard(0), plain, reduction="none", return_entropy=True)
        assert check(mesh, 120, WHOLE, WHOLE, return_token_accuracy=True, **EVERYTHING) == 0
        assert check(mesh, 120, Shard(1), WHOLE, plain, **EVERYTHING) == 1  # how many tokens count
        for reduction in ("sum", "none"):
            assert check(mesh, 120, Shard(0), WHOLE, reduction=reduction, **EVERYTHING) == 0
        check_other_functions(mesh)
        check_gathered_tokens(mesh, rank)
        check_refusals(mesh)


if __name__ == "__main__":
    main()
