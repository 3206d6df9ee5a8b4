"""`linear_distillation_loss` against its formula in fp64, at every place, and what it promises beside values."""

import math

import losses
import pytest
import torch
from npu_fused_linear_cross_entropy import DistillationLoss, Teacher, explain, linear_distillation_loss
from npu_fused_linear_cross_entropy.options import DistillationOptions
from npu_offline.plugin import Place

DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation")
OPS = torch.ops.npu_fused_linear_cross_entropy
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CPU = Place("cpu", torch.device("cpu"))
SOFTCAPS = {"softcap": 4.0, "logit_scale": 0.7, "bias": True, "teacher_bias": True, "teacher_options": (6.0, 1.3)}
HARD = {"temperature": 2.5, "hard_weight": 0.7, "soft_weight": 0.4, "return_parts": True}
OPTIONS = ({}, HARD, SOFTCAPS, {**SOFTCAPS, **HARD, "reduction": "none"})


def exact(x, weight, target, bias, teacher, *, divergence="forward_kl", beta=0.5, temperature=1.0, **options):
    """The row losses and their parts in fp64, from torch's own functions."""
    softcap, scale = options.get("softcap"), options.get("logit_scale", 1.0)
    z = logits(x, weight, bias, softcap, scale)
    of_teacher = teacher.log() if isinstance(teacher, torch.Tensor) else logits(*teacher)
    s, t = torch.log_softmax(z / temperature, -1), torch.log_softmax(of_teacher / temperature, -1).detach()
    kl = lambda a, b: torch.nn.functional.kl_div(b, a, reduction="none", log_target=True).sum(-1)  # noqa: E731
    m = torch.logaddexp(t + math.log(beta), s + math.log1p(-beta))
    soft = {
        "forward_kl": lambda: kl(t, s),
        "reverse_kl": lambda: kl(s, t),
        "jensen_shannon": lambda: beta * kl(t, m) + (1 - beta) * kl(s, m),
        "total_variation": lambda: (s.exp() - t.exp()).abs().sum(-1) / 2,
    }[divergence]()
    counted = torch.ones(x.shape[:-1], dtype=torch.bool) if target is None else target != options.get("ignore_index", -100)
    hard = torch.zeros_like(soft)
    if options.get("hard_weight"):
        hard = torch.nn.functional.cross_entropy(z.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)
    rows = options.get("soft_weight", 1.0) * soft + options.get("hard_weight", 0.0) * hard
    reduction = options.get("reduction", "mean")

    def reduced(values):
        values = torch.where(counted, values, 0.0)
        return values if reduction == "none" else values.sum() / (max(1, int(counted.sum())) if reduction == "mean" else 1)

    return reduced(rows), reduced(soft), reduced(hard)


def logits(x, weight, bias=None, softcap=None, scale=1.0):
    z = x.double() @ weight.double().t()
    z = (z if bias is None else z + bias.double()) * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def make(shape=(37,), width=16, teacher_width=24, vocabulary=123, dtype=FP32, *, scale=1.0, bias=False, teacher_bias=False,
         teacher_options=(None, 1.0), ignored=0.3, **options):  # fmt: skip
    """x, weight, target, bias, teacher and options."""
    case = losses.make(shape, width, vocabulary, dtype, scale=scale, ignored=ignored, bias=dtype if bias else None, seed=1)
    other = losses.make(shape, teacher_width, vocabulary, dtype, scale=scale, bias=dtype if teacher_bias else None, seed=2)
    return case.x, case.weight, case.target, case.bias, Teacher(other.x, other.weight, other.bias, *teacher_options), options


def check(device, x, weight, target, bias, teacher, options, *, tolerance=None):
    leaves = [None if each is None else losses.leaf(each, device.torch) for each in (x, weight, bias)]
    moved = tuple(each.to(device.torch) if isinstance(each, torch.Tensor) else each for each in teacher)
    on_device = None if target is None else target.to(device.torch)
    found = linear_distillation_loss(*leaves[:2], on_device, leaves[2], teacher=moved, **options)
    wide = [None if each is None else each.double().requires_grad_() for each in (x, weight, bias)]
    expected, soft, hard = exact(*wide[:2], target, wide[2], teacher, **options)
    if options.get("return_parts"):
        assert isinstance(found, DistillationLoss)
        for part, wanted in ((found.soft, soft), (found.hard, hard)):
            assert part is None or not part.requires_grad
            torch.testing.assert_close(part.cpu().double(), wanted.detach(), rtol=1e-4, atol=2e-5)
        found = found.loss
    eps = torch.finfo(x.dtype).eps
    tolerance = tolerance or 40 * 2.0**-23
    torch.testing.assert_close(found.detach().cpu().double(), expected.detach(), rtol=tolerance, atol=tolerance)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=FP64)
    some = [(leaf, w) for leaf, w in zip(leaves, wide, strict=True) if leaf is not None]
    gradients = torch.autograd.grad(found, [leaf for leaf, _ in some], upstream.to(device.torch, found.dtype))
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, [w for _, w in some], upstream), strict=True):
        bound = max(tolerance, 4 * eps) * (wanted.abs().max() if wanted.numel() else 0.0)
        torch.testing.assert_close(gradient.cpu().double(), wanted, rtol=2 * eps, atol=float(bound))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "hard", "capped", "all"])
def test_plain_pytorch_is_the_formula(divergence, options):
    check(CPU, *make(divergence=divergence, beta=0.3, **options))


@pytest.mark.parametrize(("divergence", "options"), list(zip(DIVERGENCES, OPTIONS, strict=True)))
def test_every_place_has_its_values(device, divergence, options):
    check(device, *make((7,), divergence=divergence, beta=0.3, **options))


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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("by", ["head", "top_k"])
def test_weights_of_tokens_and_how_many_count(device, by, reduction):
    """Losses and gradients are those of the tokens' losses times their weights; what does not count takes no part."""
    if device.name == "emulated" and (by, reduction) != ("head", "mean"):
        pytest.skip("the same kernels")
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
        with pytest.raises(IndexError, match=r"target\[1\] is 9 and must be from 0 to 8"):
            linear_distillation_loss(*tensors, teacher=pair, hard_weight=1.0)
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


def test_operators_are_registered_properly(device, npu_opcheck):
    x, weight, target, _, teacher, _ = make((5,))
    x, weight, target, *of_teacher = (each.to(device.torch) for each in (x, weight, target, *teacher[:2]))
    for reduction in ("mean", "none"):
        options = DistillationOptions(reduction=reduction, hard_weight=0.5, return_parts=True, vocab_size=123)
        for first in ((x, weight), tuple(losses.leaf(each, device.torch) for each in (x, weight))):
            arguments = (*first, target, None, *of_teacher, None, None, None, None, None, *options, False, False, False)
            npu_opcheck(OPS.distillation.default, arguments)
        rest = (x, weight, target, None, *of_teacher, None, None, None, None, None, *options, True, True, False)
        if reduction == "none":
            npu_opcheck(OPS.distillation_backward.default, (torch.rand(5, device=device.torch), *rest))
        else:
            npu_opcheck(OPS.distillation.default, rest)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch.func.vmap, which takes one after the other
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compilation_transforms_and_checkpoints(device, reduction):
    x, weight, target, _, teacher, _ = make((5,))
    x, weight, target, *pair = (each.to(device.torch) for each in (x, weight, target, *teacher[:2]))

    def head(x, weight):
        loss = linear_distillation_loss(torch.sin(x), weight, target, teacher=tuple(pair), reduction=reduction)
        return loss.square().sum()

    def gradients(function):
        leaves = [losses.leaf(each, device.torch) for each in (x, weight)]
        return torch.autograd.grad(function(*leaves), leaves)

    expected = gradients(head)
    compiled = torch.compile(head, backend="inductor" if device.name == "cuda" else "aot_eager", fullgraph=True)
    again = lambda *leaves: torch.utils.checkpoint.checkpoint(head, *leaves, use_reentrant=False)  # noqa: E731
    for found in (gradients(compiled), gradients(again), torch.func.grad(head, argnums=(0, 1))(x, weight)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    batched = torch.func.vmap(torch.func.grad(head), in_dims=(0, None))(torch.stack((x, 2 * x)), weight)
    torch.testing.assert_close(batched[0], expected[0], rtol=1e-5, atol=1e-7)
    (gradient,) = torch.autograd.grad(head(x.requires_grad_(), weight), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


def test_what_is_explained():
    """Four products of each chunk, whose logits of both models fit in the budget, and one of our kernels."""
    found = explain(tokens=4096, width=4096, vocabulary=128256, teacher_width=8192, chip="H200", backward=True)
    decided = found.decisions[0][1]
    assert decided["way"].startswith("DISTILLATION")
    chunks = int(decided["chunks"].split()[0])
    assert [launch.kernel for launch in found.launches].count("distillation_kernel") == chunks
    assert len(found.products) == 4 * chunks
    gradients = 2 * 4096 * (4096 + 128256)
    assert found.peak <= gradients + 512 * 2**20 + 10**6
    with pytest.raises(ValueError, match="label_smoothing must be left out where linear_distillation_loss is explained"):
        explain(tokens=1, width=1, vocabulary=1, teacher_width=1, label_smoothing=0.1, chip="H200")
