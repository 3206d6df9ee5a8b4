"""`linear_distillation_loss` against its formula in fp64, at every place."""

import math

import losses
import pytest
import torch
from distilled import DIVERGENCES, check, exact, logits, make
from npu_fused_linear_cross_entropy import linear_distillation_loss
from npu_offline.plugin import Place

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CPU = Place("cpu", torch.device("cpu"))
SOFTCAPS = {"softcap": 4.0, "logit_scale": 0.7, "bias": True, "teacher_bias": True, "teacher_options": (6.0, 1.3)}
HARD = {"temperature": 2.5, "hard_weight": 0.7, "soft_weight": 0.4, "return_parts": True}
OPTIONS = ({}, HARD, SOFTCAPS, {**SOFTCAPS, **HARD, "reduction": "none"})


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "hard", "capped", "all"])
def test_plain_pytorch_is_the_formula(divergence, options):
    check(CPU, *make(divergence=divergence, beta=0.3, **options))


@pytest.mark.parametrize(("divergence", "options"), list(zip(DIVERGENCES, OPTIONS, strict=True)))
def test_every_place_has_its_values(device, divergence, options):
    check(device, *make((7,), divergence=divergence, beta=0.3, **options))


@pytest.mark.few(2)
@pytest.mark.uncollected("the definition has no tiles", lambda place, vocabulary: place == "cpu" and vocabulary != 1)
@pytest.mark.parametrize(
    ("vocabulary", "divergence", "options"),
    [
        (1, "forward_kl", {}),
        (1801, "total_variation", {"hard_weight": 1.0, "temperature": 0.5}),
        (1808, "forward_kl", {}),
        (9100, "jensen_shannon", {}),
    ],
)
def test_rows_of_every_length_in_chunks(device, vocabulary, divergence, options):
    """Rows that are one tile, whole blocks, and blocks and a tail."""
    made = make((3,), vocabulary=vocabulary, divergence=divergence, chunk_tokens=2, reduction="sum", **options)
    check(device, *made, tolerance=1e-4)


@pytest.mark.uncollected(
    "reductions are PyTorch's",
    lambda place, dtype, reduction: place == "emulated" and (dtype == BF16) != (reduction == "mean"),
)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_narrow_tensors(device, dtype, reduction):
    options = {"reduction": reduction, "hard_weight": 0.5, "bias": True, "divergence": "jensen_shannon", "chunk_tokens": 4}
    x, weight, target, bias, teacher, options = make((2, 5), dtype=dtype, **options)
    check(device, x, weight, target, bias, teacher, options)
    if dtype == BF16:
        check(device, x, weight.float(), target, bias, teacher, {**options, "accum_dtype": FP32})


@pytest.mark.parametrize("divergence", DIVERGENCES[1:])
def test_logits_of_ten_thousand(device, divergence):
    """An fp32 logit of 1e4 is off by 1e-3; gradients and losses stay finite, and right to that."""
    x, weight, target, bias, teacher, options = make((7,), divergence=divergence)
    x, of_teacher = x.clone(), teacher.x.clone()
    x[::2] *= 1500
    of_teacher[::3] *= 1500
    check(device, x, weight, target, bias, teacher._replace(x=of_teacher), options, tolerance=5e-3)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_an_offset_that_logits_share_changes_nothing(device, divergence):
    """2^20 and 2^19, with logits that are multiples of 1/4 and a temperature of 2: all of them are fp32 numbers."""
    x, weight, target, bias, teacher, options = make((7,), 8, 8, 517, divergence=divergence, bias=True, teacher_bias=True)
    x, of_teacher = x.round(), teacher.x.round()
    weight, teacher_weight = ((2 * each).round() / 4 for each in (weight, teacher.weight))
    options |= {"hard_weight": 0.5, "temperature": 2.0, "return_parts": True}
    found = []
    for offset in (0.0, 2.0**20):
        leaves = [losses.leaf(each, device.torch) for each in (x, weight, torch.full_like(bias, offset))]
        head = [each.to(device.torch) for each in (of_teacher, teacher_weight, torch.full_like(bias, offset / 2))]
        loss = linear_distillation_loss(*leaves[:2], target.to(device.torch), leaves[2], teacher=tuple(head), **options)
        found.append([*loss, *torch.autograd.grad(loss.loss, leaves)])
    for alone, together in zip(*found, strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES[:3])
def test_a_student_equal_to_its_teacher_has_no_loss(device, divergence):
    x, weight, *_ = (each.to(device.torch) for each in make()[:2])
    x.requires_grad_()
    loss = linear_distillation_loss(x, weight, teacher=(x, weight), divergence=divergence, temperature=2.0)
    assert abs(float(loss.detach())) < 1e-6
    assert float(torch.autograd.grad(loss, x)[0].abs().max()) < 1e-6


def test_probabilities_of_the_teacher_are_divided_by_their_sum(device):
    x, weight, target, _, teacher, _ = make((3, 5))
    probs = torch.softmax(logits(teacher.x, teacher.weight), -1)
    options = {"temperature": 2.0, "divergence": "jensen_shannon"}
    leaves = [losses.leaf(each, device.torch) for each in (x, weight)]
    loss = linear_distillation_loss(
        *leaves, target.to(device.torch), teacher_probs=(3 * probs).float().to(device.torch), **options
    )
    wide = [each.double().requires_grad_() for each in (x, weight)]
    expected, *_ = exact(*wide, target, None, probs, **options)
    torch.testing.assert_close(loss.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=1e-6)
    for gradient, wanted in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, wide), strict=True):
        torch.testing.assert_close(gradient.cpu().double(), wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0, "hard_weight": 0.5, "reduction": "none"}, {"hard_weight": 0.5}]
)
def test_the_largest_probabilities_of_the_teacher(device, options):
    x, weight, target, _, teacher, _ = make((2, 5))
    log_q, ids = torch.log_softmax(logits(teacher.x, teacher.weight), -1).topk(4)
    ids[1, 2, 3] = -100
    leaves, wide = ([each.to(*to).detach().requires_grad_() for each in (x, weight)] for to in ((device.torch,), (FP64,)))
    pair = ids.to(device.torch), log_q.float().to(device.torch)
    loss = linear_distillation_loss(*leaves, target.to(device.torch), teacher_top_k=pair, **options)
    z, counted = wide[0] @ wide[1].t(), target != -100
    log_p = torch.log_softmax(z / options.get("temperature", 1.0), -1).gather(-1, ids.clamp_min(0))
    rows = torch.where(ids == -100, 0.0, log_q.exp() * (log_q - log_p)).sum(-1)
    if "hard_weight" in options:
        rows = rows + 0.5 * torch.nn.functional.cross_entropy(z.flatten(0, 1), target.flatten(), reduction="none").view(2, 5)
    rows = torch.where(counted, rows, 0.0)
    expected = rows if options.get("reduction") == "none" else rows.sum() / counted.sum()
    torch.testing.assert_close(loss.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=1e-6)
    found, wanted = torch.autograd.grad(loss.sum(), leaves), torch.autograd.grad(expected.sum(), wide)
    for gradient, exactly in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient.cpu().double(), exactly, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_of_the_largest_only_what_counts_is_read(device, dtype):
    """Ignored tokens and ids, and ids whose probability is 0, may have any partner; no ignore_index is cut to 32 bits."""
    x, weight, target, _, teacher, _ = make((2, 5))
    log_q, ids = torch.log_softmax(logits(teacher.x, teacher.weight).float(), -1).topk(4)
    ids[1, 2, 3] = ids[1, 3, 3] = -100
    weights = torch.rand(2, 5, generator=torch.Generator().manual_seed(0))
    target[1, :4] = torch.arange(4)
    spoilt = [each.clone() for each in (ids, log_q, weights)]
    ignored = target == -100
    assert ignored.any()
    spoilt[0][ignored], spoilt[1][ignored], spoilt[2][ignored] = 999, torch.nan, torch.nan
    spoilt[1][1, 2, 3] = torch.nan
    spoilt[0][1, 3, 3], spoilt[1][1, 3, 3] = -1, -torch.inf
    for options in ({"reduction": "none"}, {"hard_weight": 0.5}):
        found = []
        for some, log_some, each in ((ids, log_q, weights), spoilt):
            leaves = [losses.leaf(t, device.torch) for t in (x, weight)]
            pair, each = (some.to(device.torch, dtype), log_some.to(device.torch)), each.to(device.torch)
            labels = target.to(device.torch, dtype)
            loss = linear_distillation_loss(*leaves, labels, teacher_top_k=pair, token_weight=each, **options)
            found.append((loss, *torch.autograd.grad(loss.sum(), leaves)))
        for clean, other in zip(*found, strict=True):
            torch.testing.assert_close(other, clean)
    tensors = [each.to(device.torch) for each in (x, weight)]
    labels, pair = torch.full((2, 5), 5, dtype=dtype), (torch.full((2, 5, 1), 5, dtype=dtype), log_q[..., :1])
    far = [
        linear_distillation_loss(*tensors, labels.to(device.torch), teacher_top_k=pair, ignore_index=index)
        for pair in [tuple(each.to(device.torch) for each in pair)]
        for index in (-100, 2**32 + 5)
    ]
    assert far[0] == far[1] != 0


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_columns_that_student_and_teacher_rule_out(device, divergence):
    """A bias of minus infinity, as padded vocabularies have it: losses and gradients of the other columns."""
    x, weight, target, bias, teacher, options = make(
        (7,), vocabulary=300, bias=True, teacher_bias=True, divergence=divergence
    )
    options |= {"hard_weight": 0.5}
    target, keep = torch.where(target >= 0, target % 200, target), slice(0, 200)
    masked, of_teacher = bias.clone(), teacher.bias.clone()
    masked[200:] = of_teacher[200:] = -torch.inf
    found = []
    for part, student_bias, teacher_bias in ((slice(None), masked, of_teacher), (keep, bias[keep], teacher.bias[keep])):
        leaves = [losses.leaf(each, device.torch) for each in (x, weight[part], student_bias)]
        head = tuple(each.to(device.torch) for each in (teacher.x, teacher.weight[part], teacher_bias))
        loss = linear_distillation_loss(*leaves[:2], target.to(device.torch), leaves[2], teacher=head, **options)
        dx, *gradients = torch.autograd.grad(loss, leaves)
        found.append((loss, dx, *(each[keep] for each in gradients)))
        assert all(not each[200:].any() for each in gradients)
    for masked_out, without in zip(*found, strict=True):
        torch.testing.assert_close(masked_out, without, rtol=1e-4, atol=1e-6)


@pytest.mark.uncollected("the same kernels", lambda place, temperature: place == "emulated" and temperature == 1.0)
@pytest.mark.parametrize("divergence", [*DIVERGENCES, "top_k"])
@pytest.mark.parametrize("temperature", [1.0, 20.0])
def test_probabilities_of_zero_where_the_student_rules_columns_out(device, divergence, temperature):
    """0 log 0 is 0: losses and gradients are those of the other columns."""
    x, weight, _, bias, teacher, _ = make((7,), vocabulary=300, bias=True)
    probs = torch.softmax(logits(teacher.x, teacher.weight[:200]), -1).float()
    masked, padded = bias.clone(), torch.nn.functional.pad(probs, (0, 100))
    masked[200:] = -torch.inf
    found = []
    for columns, own_bias, q in ((300, masked, padded), (200, bias[:200], probs)):
        leaves = [losses.leaf(each, device.torch) for each in (x, weight[:columns], own_bias)]
        q = q.to(device.torch)
        if divergence == "top_k":
            given = {"teacher_top_k": (torch.arange(columns, device=device.torch).expand(7, columns), q.log())}
        else:
            given = {"teacher_probs": q, "divergence": divergence}
        loss = linear_distillation_loss(*leaves[:2], None, leaves[2], temperature=temperature, **given)
        dx, *gradients = torch.autograd.grad(loss, leaves)
        found.append((loss, dx, *(each[:200] for each in gradients)))
        assert all(not each[200:].any() for each in gradients)
    for masked_out, without in zip(*found, strict=True):
        torch.testing.assert_close(masked_out, without, rtol=1e-4, atol=1e-6)


def test_a_token_of_weight_zero_may_have_no_probabilities():
    x, weight, *_ = make((2,))
    probs = torch.rand(2, 123, generator=torch.Generator().manual_seed(0))
    probs[1] = 0.0
    weights, leaves = torch.tensor([1.0, 0.0]), [losses.leaf(each, "cpu") for each in (x, weight)]
    loss = linear_distillation_loss(*leaves, teacher_probs=probs, token_weight=weights)
    torch.testing.assert_close(loss, linear_distillation_loss(leaves[0][:1], leaves[1], teacher_probs=probs[:1]))
    assert all(each.isfinite().all() for each in torch.autograd.grad(loss, leaves))


def test_a_probability_of_zero_is_finite(device):
    x, weight, *_ = (each.to(device.torch) for each in make()[:2])
    probs = torch.nn.functional.one_hot(torch.arange(37) % 123, 123).float().to(device.torch)
    expected = torch.nn.functional.cross_entropy(logits(x.cpu(), weight.cpu()), probs.cpu().argmax(1))
    torch.testing.assert_close(
        linear_distillation_loss(x, weight, teacher_probs=probs).cpu().double(), expected, rtol=1e-5, atol=1e-5
    )
    assert linear_distillation_loss(x, weight, teacher_probs=probs, divergence="reverse_kl").isfinite()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_ignored_token_of_the_teacher_may_hold_anything(device, reduction):
    x, weight, target, _, teacher, _ = make(reduction=reduction)
    spoilt = teacher.x.clone()
    spoilt[target == -100] = torch.nan
    check(device, x, weight, target, None, teacher, {"reduction": reduction})
    leaves = [losses.leaf(each, device.torch) for each in (x, weight)]
    found = []
    for of_teacher in (teacher.x, spoilt):
        pair = of_teacher.to(device.torch), teacher.weight.to(device.torch)
        loss = linear_distillation_loss(*leaves, target.to(device.torch), teacher=pair, reduction=reduction)
        found.append((loss, *torch.autograd.grad(loss.sum(), leaves)))
    for clean, with_nan in zip(*found, strict=True):
        assert torch.equal(clean, with_nan)


@pytest.mark.parametrize("tokens", [0, 4])
def test_no_tokens_that_count(device, tokens):
    x, weight, target, _, teacher, _ = make((tokens,))
    target = torch.full_like(target, -100)
    check(device, x, weight, target, None, teacher, {"hard_weight": 0.5, "temperature": 2.0})
    check(device, x, weight, target, None, teacher, {"reduction": "none"})


@pytest.mark.uncollected(
    "the same kernels", lambda place, by, reduction: place == "emulated" and (by, reduction) != ("head", "mean")
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("by", ["head", "top_k"])
def test_weights_of_tokens_and_how_many_count(device, by, reduction):
    """Losses and gradients are those of the tokens' losses times their weights; what does not count takes no part."""
    x, weight, target, _, teacher, _ = make((2, 5))
    log_q, ids = torch.log_softmax(logits(teacher.x, teacher.weight), -1).topk(4)
    weights, counted = torch.rand(2, 5, generator=torch.Generator().manual_seed(0)), target != -100
    given = {"teacher": teacher[:2]} if by == "head" else {"teacher_top_k": (ids, log_q.float())}
    given = {name: tuple(each.to(device.torch) for each in pair) for name, pair in given.items()}
    places = counted.flatten().nonzero().squeeze(1).to(device.torch)

    def run(to, hard, **options):
        leaves = [losses.leaf(each, device.torch) for each in (x, weight)]
        options = {"hard_weight": hard, "reduction": reduction, **given, **options}
        loss = linear_distillation_loss(*leaves, target.to(device.torch), **options)
        loss = to(loss)
        return loss.detach().cpu(), *torch.autograd.grad(loss.sum(), leaves)

    def weighted(rows):
        rows = rows * weights.to(rows)
        return rows if reduction == "none" else rows.sum() / ((weights * counted).sum() if reduction == "mean" else 1)

    for hard in (0.3, 0.0):
        wanted = run(weighted, hard, reduction="none")
        for counts in (None, 10, places):
            found = run(lambda loss: loss, hard, token_weight=weights.to(device.torch), counted_tokens=counts)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        if device.name == "cpu":
            with pytest.raises(ValueError, match="counted_tokens is 1 and must be at least"):
                run(lambda loss: loss, hard, counted_tokens=1)
        else:
            assert run(lambda loss: loss, hard, counted_tokens=1)[0].isnan().any()


def test_rows_at_strides(device):
    x, weight, target, _, teacher, _ = make((6, 5))
    wide = torch.randn(5, 6, 20)
    strided = wide.to(device.torch).transpose(0, 1)[..., 3:19]
    pair = teacher.x.to(device.torch), teacher.weight.to(device.torch).t().contiguous().t()
    loss = linear_distillation_loss(strided, weight.to(device.torch), target.to(device.torch), teacher=pair)
    expected, *_ = exact(strided.cpu(), weight, target, None, teacher)
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-6)


def test_only_what_needs_a_gradient_gets_one(device):
    x, weight, _, _, teacher, _ = make()
    head = losses.leaf(teacher.weight, device.torch)
    hidden = losses.leaf(teacher.x, device.torch)
    loss = linear_distillation_loss(losses.leaf(x, device.torch), weight.to(device.torch), teacher=(hidden, head))
    loss.backward()
    assert hidden.grad is None
    assert head.grad is None


def test_a_target_outside_the_vocabulary(device):
    x, weight, target, _, teacher, _ = make((4,), vocabulary=9, ignored=0.0)
    target[1] = 9
    tensors = [each.to(device.torch) for each in (x, weight, target)]
    pair = tuple(each.to(device.torch) for each in teacher[:2])
    assert linear_distillation_loss(*tensors, teacher=pair).isfinite()  # it only counts
    if device.name == "cpu":
        tensors[2][1] = 8
        assert linear_distillation_loss(*tensors, teacher=pair, hard_weight=1.0).isfinite()
        tensors[2][1] = 9  # of a call that is like one before
        with pytest.raises(IndexError, match=r"target\[1\] is 9 and must be from 0 to 8"):
            linear_distillation_loss(*tensors, teacher=pair, hard_weight=1.0)
        ids = torch.tensor([[1, 2], [3, -9], [5, 6], [7, 8]])
        with pytest.raises(IndexError, match=r"teacher_top_k\[0\]\[1, 1\] is -9 and must be from 0 to 8"):
            linear_distillation_loss(*tensors[:2], teacher_top_k=(ids, -torch.ones(4, 2)))
    else:
        rows = linear_distillation_loss(*tensors, teacher=pair, hard_weight=1.0, reduction="none")
        assert rows.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"teacher": None}, ValueError, "teacher, teacher_probs and teacher_top_k: one of them must be given"),
        ({"teacher": "a head"}, TypeError, "teacher is a str and must be a Teacher"),
        ({"divergence": "kl"}, ValueError, "divergence is 'kl' and must be one of 'forward_kl'"),
        ({"beta": 1.0}, ValueError, "beta is 1.0 and must be above 0 and below 1"),
        ({"temperature": 0.0}, ValueError, "temperature is 0.0 and must be above 0"),
        ({"hard_weight": 1.0, "target": None}, ValueError, "target is None and must be given where hard_weight is not 0"),
        ({"teacher": (torch.zeros(5, 24), torch.zeros(122, 24))}, ValueError, "teacher.weight has shape"),
        ({"teacher": (torch.zeros(4, 24), torch.zeros(123, 24))}, ValueError, "teacher.x has shape"),
        ({"teacher": None, "teacher_probs": torch.zeros(5, 122)}, ValueError, "teacher_probs has shape"),
    ],
)
def test_errors_name_the_argument(options, error, message):
    x, weight, target, _, teacher, _ = make((5,))
    given = {"target": target, "teacher": teacher, **options}
    with pytest.raises(error, match=message):
        linear_distillation_loss(x, weight, **given)


@pytest.mark.parametrize("hard_weight", [0.0, 0.3])
def test_a_teacher_may_have_a_wider_dtype(hard_weight):
    x, weight, target = torch.randn(4, 3), torch.randn(5, 3), torch.arange(4)
    teacher = torch.randn(4, 2), torch.randn(5, 2)
    wide = tuple(each.double() for each in teacher)
    found, expected = (
        linear_distillation_loss(x, weight, target, teacher=each, hard_weight=hard_weight) for each in (wide, teacher)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_probability_of_0_counts_as_the_smallest_number_of_fp32(dtype):
    x, weight, probs = torch.ones(1, 1, dtype=dtype), torch.zeros(2, 1, dtype=dtype), torch.tensor([[1.0, 0.0]], dtype=dtype)
    found = linear_distillation_loss(x, weight, teacher_probs=probs, divergence="reverse_kl")
    expected = math.log(0.5) - 0.5 * math.log(torch.finfo(torch.float32).tiny)
    assert found.item() == pytest.approx(expected, rel=1e-5)
