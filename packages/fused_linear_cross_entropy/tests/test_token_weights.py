"""Weights of single tokens, and heads for several tokens, against fp64."""

import losses
import pytest
import torch
from npu_fused_linear_cross_entropy import (
    FusedLinearCrossEntropyLoss,
    causal_lm_loss,
    fused_linear_cross_entropy,
    linear_distillation_loss,
    linear_log_probs,
)

from testing.pairs import all_pairs

pytestmark = pytest.mark.usefixtures("npu_poisoned")

TOKENS = (3, 13)
WEIGHTS = torch.randn(TOKENS, generator=torch.Generator().manual_seed(2)) + 0.7
CASES = {
    "plain": {},
    "long rows": {"vocabulary": 9001},
    "columns": {"vocabulary": 3000, "memory_budget": 2**16, "softcap": 5.0},
    "kept": {"vocabulary": 3000, "width": 64, "memory_budget": 2**16},
    "every option": {
        "class_weight": True,
        "label_smoothing": 0.1,
        "lse_square_scale": 0.01,
        "logit_scale": 0.7,
        "bias": torch.float32,
        "return_z_loss": True,
    },
    "entropy": {"return_entropy": True},
}
UNITS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}


def weighted(rows, weights, target, reduction, class_weight=None):
    """The reduction of losses of tokens."""
    counted = weights * (target != -100)
    if reduction == "none":
        return rows * weights
    sizes = counted if class_weight is None else counted * class_weight[target.clamp_min(0)]
    return (rows * counted).sum() / (sizes.sum() if reduction == "mean" else 1)


@pytest.mark.few(6)
@pytest.mark.parametrize(*all_pairs(dtype=UNITS, reduction=["mean", "sum", "none"], what=CASES))
def test_losses_and_gradients_are_those_of_weighted_rows(device, what, reduction, dtype):
    making = {"width": 32, "vocabulary": 123, **CASES[what]}
    case = losses.make(TOKENS, making.pop("width"), making.pop("vocabulary"), dtype, ignored=0.2, **making)
    exact = [None if t is None else t.double().requires_grad_() for t in (case.x, case.weight, case.bias)]
    rows = exact_rows(case, *exact)
    wanted = weighted(
        rows, WEIGHTS.double(), case.target, reduction, None if case.class_weight is None else case.class_weight.double()
    )
    moved = {name: losses.leaf(getattr(case, name), device.torch) for name in ("x", "weight")}
    bias = None if case.bias is None else losses.leaf(case.bias, device.torch)
    class_weight = None if case.class_weight is None else case.class_weight.to(device.torch)
    given = {"class_weight": class_weight, "token_weight": WEIGHTS.to(device.torch), "reduction": reduction, **case.options}
    found = fused_linear_cross_entropy(*moved.values(), case.target.to(device.torch), bias, **given)
    loss = found if isinstance(found, torch.Tensor) else found.loss
    unit = UNITS[dtype]
    assert (loss.detach().cpu().double() - wanted).abs().max() <= 2e-5 * (1 + wanted.abs().max())
    leaves = [*moved.values(), *([] if bias is None else [bias])]
    ours = torch.autograd.grad(loss.sum() * 32, leaves)
    theirs = torch.autograd.grad(wanted.sum() * 32, [leaf for leaf in exact if leaf is not None])
    for one, other in zip(ours, theirs, strict=True):
        assert (one.cpu().double() - other).norm() <= unit * other.norm()


def exact_rows(case, x, weight, bias):
    o = {"label_smoothing": 0.0, "lse_square_scale": 0.0, "softcap": None, "logit_scale": 1.0, **case.options}
    z = (x @ weight.t() + (0 if bias is None else bias)) * o["logit_scale"]
    z = z if o["softcap"] is None else o["softcap"] * torch.tanh(z / o["softcap"])
    weights = None if case.class_weight is None else case.class_weight.double()
    given = {"weight": weights, "label_smoothing": o["label_smoothing"], "reduction": "none"}
    rows = torch.nn.functional.cross_entropy(z.flatten(0, -2), case.target.flatten(), **given).view(case.target.shape)
    return rows + (case.target != -100) * o["lse_square_scale"] * z.logsumexp(-1).square()


def test_a_mask_is_what_ignored_tokens_are(device):
    case = losses.make(TOKENS, 32, 123)
    x, weight, target = (tensor.to(device.torch) for tensor in (case.x, case.weight, case.target))
    mask = WEIGHTS.to(device.torch) > 0.5
    wanted = fused_linear_cross_entropy(x, weight, torch.where(mask, target, -100))
    assert torch.allclose(fused_linear_cross_entropy(x, weight, target, token_weight=mask), wanted, rtol=1e-5)
    assert torch.allclose(FusedLinearCrossEntropyLoss()(x, weight, target, token_weight=mask), wanted, rtol=1e-5)
    counted = fused_linear_cross_entropy(x, weight, target, token_weight=mask, counted_tokens=mask)
    assert torch.allclose(counted, wanted, rtol=1e-5)
    assert not fused_linear_cross_entropy(x, weight, target, token_weight=mask & False)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_weight_of_an_ignored_token_may_be_anything(device, reduction):
    case = losses.make(TOKENS, 32, 123, torch.float32, ignored=0.2)
    weights = torch.where(case.target == -100, torch.nan, WEIGHTS)
    results = []
    for each in (WEIGHTS, weights):
        leaves = [losses.leaf(tensor, device.torch) for tensor in (case.x, case.weight)]
        given = {"token_weight": each.to(device.torch), "reduction": reduction}
        loss = fused_linear_cross_entropy(*leaves, case.target.to(device.torch), **given)
        results.append((loss, *torch.autograd.grad(loss.sum(), leaves)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_weights_of_labels_are_shifted_with_them(device):
    case = losses.make(TOKENS, 32, 123, torch.float32, ignored=0.2)
    x, weight, labels = (tensor.to(device.torch) for tensor in (case.x, case.weight, case.target))
    weights = WEIGHTS.to(device.torch)
    found = causal_lm_loss(x, weight, labels, token_weight=weights)
    wanted = fused_linear_cross_entropy(x[:, :-1], weight, labels[:, 1:], token_weight=weights[:, 1:])
    assert torch.allclose(found, wanted, rtol=1e-5)
    items = causal_lm_loss(x, weight, labels, 5, token_weight=weights)
    total = fused_linear_cross_entropy(x[:, :-1], weight, labels[:, 1:], token_weight=weights[:, 1:], reduction="sum")
    assert torch.allclose(items, total / 5, rtol=1e-5)


HOW = {
    "plain": {},
    "items": {"num_items_in_batch": 7},
    "token weights": {"token_weight": WEIGHTS.abs()},
    "class weights": {"class_weight": torch.linspace(0.1, 2.0, 123)},
}


@pytest.mark.parametrize("options", ({}, {"lse_square_scale": 1e-3, "return_z_loss": True}, {"shifts": (1,)}))
def test_a_loss_has_the_shape_of_its_items(device, options):
    """A sum over a tensor [1] is one, as in transformers: DataParallel gathers its replicas' losses."""
    case = losses.make(TOKENS, 32, 123)
    x, weight, labels = (tensor.to(device.torch) for tensor in (case.x, case.weight, case.target))
    given = (x[None] if "shifts" in options else x, weight, labels)
    wanted = causal_lm_loss(*given, 7, **options)
    for shape in ((), (1,), (1, 1)):
        found = causal_lm_loss(*given, torch.full(shape, 7, device=device.torch), **options)
        for one, other in zip(found[:2], wanted[:2], strict=True) if "return_z_loss" in options else [(found, wanted)]:
            assert torch.equal(one, other.reshape(shape))


def test_a_number_of_items_does_not_depend_on_the_default_dtype():
    case = losses.make(TOKENS, 32, 123)
    wanted = causal_lm_loss(case.x, case.weight, case.target, 100003)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        found = causal_lm_loss(case.x, case.weight, case.target, 100003)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, wanted) and found > 0


def test_no_token_is_compared_with_the_first_label():
    case = losses.make(TOKENS, 32, 123)
    labels = case.target.clone()
    labels[:, 0] = 999
    assert torch.equal(*(causal_lm_loss(case.x, case.weight, each) for each in (labels, case.target)))
    labels[1, 3] = 777
    with pytest.raises(IndexError, match=r"labels\[1, 3\] is 777 and must be from 0 to 122"):
        causal_lm_loss(case.x, case.weight, labels)
    with pytest.raises(IndexError, match=r"labels\[0, 0\] is 999"):
        causal_lm_loss(case.x, case.weight, labels, shift_labels=False)


@pytest.mark.parametrize("what", HOW)
def test_heads_for_several_tokens_share_a_weight(device, what):
    case = losses.make(TOKENS, 32, 123, torch.float32, ignored=0.2)
    how = {name: value.to(device.torch) if isinstance(value, torch.Tensor) else value for name, value in HOW[what].items()}
    hidden = torch.stack([case.x, case.x * 2, case.x + 1]).to(device.torch).requires_grad_()
    weight, labels = losses.leaf(case.weight, device.torch), case.target.to(device.torch)
    found = causal_lm_loss(hidden, weight, labels, shifts=(1, 2, 4), shift_weights=(1.0, 0.3, 0.1), **how)
    wanted = 0.0
    for states, shift, factor in zip(hidden, (1, 2, 4), (1.0, 0.3, 0.1), strict=True):
        later = torch.nn.functional.pad(labels, (0, shift), value=-100)[..., shift:]
        of_labels = dict(how)
        if "token_weight" in how:
            of_labels["token_weight"] = torch.nn.functional.pad(how["token_weight"], (0, shift))[..., shift:]
        wanted = wanted + factor * causal_lm_loss(states, weight, later, shift_labels=False, **of_labels)
    assert torch.allclose(found, wanted, rtol=1e-5)
    for one, other in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (found, wanted)), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_policy_gradient_is_that_of_its_log_probabilities(device):
    case = losses.make(TOKENS, 32, 123, torch.float32, ignored=0.2)
    x, weight = losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)
    target, advantages = case.target.to(device.torch), WEIGHTS.to(device.torch)
    loss = fused_linear_cross_entropy(x, weight, target, token_weight=advantages, reduction="sum")
    wanted = -(linear_log_probs(x, weight, target) * advantages).sum()
    assert torch.allclose(loss, wanted, rtol=1e-5, atol=1e-4)
    for one, other in zip(*(torch.autograd.grad(value, (x, weight)) for value in (loss, wanted)), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_what_is_wrong_is_named():
    case = losses.make(TOKENS, 32, 123)
    x, weight, target = case.x, case.weight, case.target
    with pytest.raises(ValueError, match=r"token_weight has shape \(3,\) and must have shape \(3, 13\)"):
        fused_linear_cross_entropy(x, weight, target, token_weight=torch.ones(3))
    with pytest.raises(TypeError, match="token_weight is torch.int64"):
        fused_linear_cross_entropy(x, weight, target, token_weight=torch.ones(3, 13, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shifts\[1\] is -1"):
        causal_lm_loss(torch.stack([x, x]), weight, target, shifts=(1, -1))
    with pytest.raises(ValueError, match="shift_weights has 1 numbers and must have 2"):
        causal_lm_loss(torch.stack([x, x]), weight, target, shifts=(1, 2), shift_weights=(1.0,))


def test_weights_that_add_up_to_0_give_nan_and_zeros_give_0():
    """Whatever the targets are: integers, probabilities, a teacher's logits, or its largest ones."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 4, generator=generator), torch.randn(5, 4, generator=generator)
    target = torch.tensor([1, 2])
    few = (target[:, None], torch.zeros(2, 1))
    for weights, wanted in ((torch.tensor([1.0, -1.0]), torch.nan), (torch.zeros(2), 0.0)):
        for found in (
            fused_linear_cross_entropy(x, weight, target, token_weight=weights),
            fused_linear_cross_entropy(x, weight, torch.nn.functional.one_hot(target, 5).float(), token_weight=weights),
            linear_distillation_loss(x, weight, target, teacher=(x + 1, weight), token_weight=weights),
            linear_distillation_loss(x, weight, target, teacher_top_k=few, token_weight=weights),
        ):
            torch.testing.assert_close(found, torch.tensor(wanted), equal_nan=True)
