"""Where the caller says how many tokens count, or which, others take part in no product: the results are the same."""

import functools

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
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from testing.pairs import all_pairs

EXTRAS = dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_lse"), True)


def counting(case, how):
    """What is passed for counted_tokens."""
    places = (case.target.reshape(-1) != case.options.get("ignore_index", -100)).nonzero().squeeze(1)
    twice = torch.cat((places.flip(0), places[:5]))
    mask = case.target != case.options.get("ignore_index", -100)
    return {"count": len(places), "more": len(places) + 5, "places": places, "places, twice": twice, "mask": mask}[how]


HOW = ("count", "more", "places", "places, twice", "mask")


@pytest.mark.parametrize(
    *all_pairs(
        how=HOW, ignored=[0.0, 0.5, 1.0], options=[{}, {"reduction": "none", **EXTRAS}, {"class_weight": True, **EXTRAS}]
    )
)
def test_results_are_those_of_all_tokens(device, how, ignored, options):
    case = losses.make((3, 13), 32, 1000, ignored=ignored, **options)
    counted = counting(case, how)
    counted = counted.to(device.torch) if isinstance(counted, torch.Tensor) else counted
    found = losses.run(case, device.torch, functools.partial(fused_linear_cross_entropy, counted_tokens=counted))
    losses.check(case, found)
    assert not found.gradients["x"][case.target == -100].any()


@pytest.mark.uncollected("the same kernels", lambda place, how: place == "emulated" and how not in ("count", "mask"))
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ignored", [0.5, 1.0])
def test_tokens_that_do_not_count_may_hold_nan(device, how, ignored):
    """The first one too, which stands in for tokens that there are not."""
    case = losses.make((3, 13), 32, 1000, ignored=ignored)
    case.target[0, 0] = -100
    wanted = losses.run(case, device.torch)
    counted = counting(case, how)
    counted = counted.to(device.torch) if isinstance(counted, torch.Tensor) else counted
    x = torch.where((case.target == -100).unsqueeze(-1), torch.nan, case.x)
    function = functools.partial(fused_linear_cross_entropy, counted_tokens=counted)
    found = losses.run(losses.dataclasses.replace(case, x=x), device.torch, function)
    assert torch.allclose(found.outputs["loss"], wanted.outputs["loss"], rtol=1e-6)
    for name, gradient in wanted.gradients.items():
        assert torch.allclose(found.gradients[name].float(), gradient.float(), rtol=2**-6, atol=1e-5), name


@pytest.mark.uncollected("the same kernels", lambda place, reduction: place == "emulated" and reduction != "mean")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_mask_and_places_leave_tokens_out_whose_target_counts(device, reduction):
    case = losses.make((3, 13), 32, 123, ignored=0.2, reduction=reduction)
    mask = torch.arange(39).view(3, 13) % 3 != 0
    wanted = losses.run(losses.dataclasses.replace(case, target=torch.where(mask, case.target, -100)), device.torch)
    for counted in (mask, mask.flatten().nonzero().squeeze(1)):
        function = functools.partial(fused_linear_cross_entropy, counted_tokens=counted.to(device.torch))
        found = losses.run(case, device.torch, function)
        assert torch.allclose(found.outputs["loss"], wanted.outputs["loss"], rtol=1e-5)
        for name, gradient in wanted.gradients.items():
            unit = 2**-8 * gradient.float().abs().max()  # of sums in bf16, whose terms come in another order
            assert (found.gradients[name].float() - gradient.float()).abs().max() <= 2 * unit, name


@pytest.mark.parametrize("places", [[0, 5, 19], [-1, 3], [2**40]])
def test_a_place_outside_of_the_tokens(device, places):
    case = losses.make(19, 32, 123)
    arguments = [tensor.to(device.torch) for tensor in (case.x, case.weight, case.target, torch.tensor(places))]
    if device.name == "cpu":
        with pytest.raises(IndexError, match=r"counted_tokens\[\d\] is -?\d+ and must be from 0 to 18"):
            fused_linear_cross_entropy(*arguments[:3], counted_tokens=arguments[3])
    else:
        assert torch.isnan(fused_linear_cross_entropy(*arguments[:3], counted_tokens=arguments[3]))
        each = fused_linear_cross_entropy(*arguments[:3], counted_tokens=arguments[3], reduction="none")
        inside = sorted(place for place in places if 0 <= place < 19)
        assert torch.isnan(each[inside[0]]) if inside else not each.any()
        assert torch.isfinite(each[inside[1:]]).all()


@pytest.mark.parametrize("ignored", [0.3, 1.0])
def test_log_probabilities_and_entropies(device, ignored):
    case = losses.make(29, 32, 1000, ignored=ignored)
    count = int((case.target != -100).sum())
    for some in (None, count):
        x, weight = losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)
        given = {"return_entropy": True, "counted_tokens": some}
        found = linear_log_probs(x, weight, case.target.to(device.torch), **given)
        (found.log_probs.sum() + found.entropy.sum()).backward()
        results = [found.log_probs, found.entropy, x.grad, weight.grad]
        if some is None:
            wanted = results
    for one, other in zip(results, wanted, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=2**-6, atol=1e-3)


@pytest.mark.uncollected("what is multiplied is the same on a CPU, where all of it is counted", lambda place: place != "cpu")
def test_only_tokens_that_count_are_multiplied(device):
    case = losses.make(100, 32, 1000, ignored=0.7)
    count, flops = counting(case, "count"), []
    for some in (None, count):
        with FlopCounterMode(display=False) as counter:
            losses.run(case, device.torch, functools.partial(fused_linear_cross_entropy, counted_tokens=some))
        flops.append(counter.get_total_flops())
    assert flops[1] * 100 == flops[0] * count


@pytest.mark.parametrize("count", [18, 0])
def test_fewer_than_count_are_an_error(device, count):
    case = losses.make(19, 32, 123)
    arguments = [tensor.to(device.torch) for tensor in (case.x, case.weight, case.target)]
    if device.name == "cpu":
        with pytest.raises(ValueError, match=f"counted_tokens is {count} and must be at least 19"):
            fused_linear_cross_entropy(*arguments, counted_tokens=count)
    else:
        assert torch.isnan(fused_linear_cross_entropy(*arguments, counted_tokens=count))


def _distillation(x, weight, target, **options):
    teacher = (x.detach(), weight.detach())
    return linear_distillation_loss(x, weight, target, teacher=teacher, hard_weight=0.5, **options)


OF_TARGETS = {
    "loss": fused_linear_cross_entropy,
    "log-probabilities": linear_log_probs,
    "entropies": functools.partial(linear_log_probs, return_entropy=True, top_k=2),
    "distillation": _distillation,
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", OF_TARGETS)
def test_a_wrong_target_that_counts_is_named_by_its_place_among_all(what, how):
    case = losses.make((3, 13), 32, 123, ignored=0.5)
    case.target[0], case.target[2, 7] = -100, 4
    counted = counting(case, how)
    case.target[2, 7] = 123
    if how in ("places", "places, twice", "mask"):
        case.target[0, 5] = 500  # it does not count
    for dtype in (torch.int64, torch.int32):
        with pytest.raises(IndexError, match=r"target\[2, 7\] is 123 and must be from 0 to 122"):
            OF_TARGETS[what](case.x, case.weight, case.target.to(dtype), counted_tokens=counted)


@pytest.mark.parametrize("counted", [1, torch.tensor([0]), torch.tensor(True)])
def test_a_target_without_dimensions(counted):
    generator = torch.Generator().manual_seed(0)
    x, weight, target = torch.randn(8, generator=generator), torch.randn(5, 8, generator=generator), torch.tensor(2)
    wanted = torch.nn.functional.cross_entropy(weight @ x, target)
    assert torch.allclose(fused_linear_cross_entropy(x, weight, target, counted_tokens=counted, reduction="none"), wanted)
    assert torch.allclose(linear_log_probs(x, weight, target, counted_tokens=counted), -wanted)


@pytest.mark.parametrize("how", ["places", "mask"])
def test_labels_that_do_not_count_may_hold_anything(how):
    case = losses.make((3, 13), 32, 123, ignored=0.5)
    counted = counting(case, how)
    expected = causal_lm_loss(case.x, case.weight, case.target, shift_labels=False, counted_tokens=counted)
    labels = case.target.where(case.target != -100, 500)
    assert torch.equal(causal_lm_loss(case.x, case.weight, labels, shift_labels=False, counted_tokens=counted), expected)
    labels[case.target != -100] = 123
    with pytest.raises(IndexError, match=r"target\[.*\] is 123"):
        causal_lm_loss(case.x, case.weight, labels, shift_labels=False, counted_tokens=counted)


def test_every_way_to_call_takes_it(device):
    case = losses.make((2, 9), 32, 123, ignored=0.5)
    x, weight, target = (tensor.to(device.torch) for tensor in (case.x, case.weight, case.target))
    count = counting(case, "count")
    wanted = fused_linear_cross_entropy(x, weight, target)
    module = FusedLinearCrossEntropyLoss()(x, weight, target, counted_tokens=count)
    causal = causal_lm_loss(x, weight, target, shift_labels=False, counted_tokens=count)
    assert torch.allclose(module, wanted, rtol=1e-6)
    assert torch.allclose(causal, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "bad", [-1, 1.5, True, "all", torch.zeros(2), torch.zeros(1, 2, dtype=torch.int64), torch.ones(18) > 0]
)
def test_what_is_no_count_and_no_place_is_refused(bad):
    case = losses.make(19, 32, 123)
    with pytest.raises((TypeError, ValueError), match="counted_tokens"):
        fused_linear_cross_entropy(case.x, case.weight, case.target, counted_tokens=bad)


@pytest.mark.uncollected("a device that says when something waits for it", lambda place: place != "cuda")
def test_nothing_waits_for_the_device(device):
    case = losses.make(64, 64, 1000, ignored=0.5)
    x, weight, target = (tensor.to(device.torch) for tensor in (case.x, case.weight, case.target))
    x.requires_grad_()
    ways = [counting(case, how) for how in HOW]
    ways = [way.to(device.torch) if isinstance(way, torch.Tensor) else way for way in ways]
    for counted in ways:
        fused_linear_cross_entropy(x, weight, target, counted_tokens=counted).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for counted in ways:
            fused_linear_cross_entropy(x, weight, target, counted_tokens=counted).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


META = {
    "mean": {},
    "class weights": {"class_weight": torch.ones(123, device="meta"), "label_smoothing": 0.1},
    "none, entropy": {"reduction": "none", "return_entropy": True},
    "a count": {"counted_tokens": 3},
    "places": {"counted_tokens": torch.zeros(3, dtype=torch.int64, device="meta")},
    "a mask": {"counted_tokens": torch.zeros(2, 9, dtype=torch.bool, device="meta")},
}


@pytest.mark.parametrize("what", META)
def test_meta_tensors_have_shapes_alone(what):
    case = losses.make((2, 9), 32, 123)
    x, weight = (losses.leaf(tensor, "meta") for tensor in (case.x, case.weight))
    found = fused_linear_cross_entropy(x, weight, case.target.to("meta"), **META[what])
    loss, *_ = found if isinstance(found, tuple) else (found,)
    assert loss.shape == (case.target.shape if "none" in what else ())
    loss.sum().backward()
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)
    assert linear_log_probs(x, weight, case.target.to("meta")).is_meta
    assert causal_lm_loss(x, weight, case.target.to("meta"), 5).is_meta


@pytest.mark.slow
@pytest.mark.parametrize("counted", [2, [0, 40]])
def test_a_compiled_graph_says_on_a_cpu_that_the_count_is_wrong(counted):
    case = losses.make(19, 32, 123)
    some = counted if isinstance(counted, int) else torch.tensor(counted)
    run = torch.compile(fused_linear_cross_entropy, fullgraph=True, backend="aot_eager")
    enough = {"counted_tokens": 19 if isinstance(counted, int) else torch.arange(19)}
    torch.testing.assert_close(
        run(case.x, case.weight, case.target, **enough), fused_linear_cross_entropy(case.x, case.weight, case.target)
    )
    with pytest.raises(RuntimeError, match=r"^counted_tokens must be at least the tokens not ignored, and its places "):
        run(case.x, case.weight, case.target, counted_tokens=some)


@pytest.mark.parametrize("how", ["count", "places", "mask"])
def test_a_checkpoint_may_save_every_operator(how):
    case = losses.make(19, 32, 123, ignored=0.5)
    save = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    x, weight, counted = losses.leaf(case.x, "cpu"), losses.leaf(case.weight, "cpu"), counting(case, how)

    def loss():
        return fused_linear_cross_entropy(x, weight, case.target, counted_tokens=counted)

    found = torch.autograd.grad(checkpoint(loss, use_reentrant=False, context_fn=save), (x, weight))
    torch.testing.assert_close(found, torch.autograd.grad(loss(), (x, weight)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("counted", [[False, True, True, False], [1, 2], [1, 2, 2], [False] * 4], ids=str)
@pytest.mark.parametrize("nobodys", [0.0, float("nan")])
def test_temperatures_of_tokens_that_do_not_count_may_be_anything(nobodys, counted, compiled):
    x, target, counted = torch.randn(4, 3), torch.arange(4), torch.tensor(counted)
    weight = torch.randn(5, 3, requires_grad=True)
    temperature = torch.tensor([nobodys, 1.0, 2.0, nobodys], requires_grad=True)

    def loss(weight, temperature):
        return linear_log_probs(x, weight, target, counted_tokens=counted, temperature=temperature).sum()

    run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    found = torch.autograd.grad(run(weight, temperature), (weight, temperature))
    some = torch.tensor([1, 2])
    logits = (x @ weight.detach().T)[some].requires_grad_()
    expected = torch.log_softmax(logits / temperature[some].detach().unsqueeze(1), 1).gather(1, some.unsqueeze(1)).sum()
    of_logits = torch.autograd.grad(expected, logits)[0]
    counts = bool(counted.any())
    torch.testing.assert_close(found[0], counts * (of_logits.T @ x[some]), rtol=1e-4, atol=1e-5)
    assert found[1][[0, 3]].tolist() == [0.0, 0.0] and bool(found[1][some].ne(0).all()) is counts


@pytest.mark.parametrize("teacher", ["teacher", "teacher_top_k"])
@pytest.mark.parametrize("counted", [2, 3, [1, 2, 2], [False] * 4], ids=str)
def test_an_adapters_rows_of_tokens_that_do_not_count_may_be_anything(counted, teacher):
    x, weight, u, b = torch.randn(4, 3), torch.randn(5, 3), torch.randn(4, 2), torch.randn(5, 2, requires_grad=True)
    target = torch.tensor([-100, 1, 2, -100])
    u[0] = x[0] = u[3] = x[3] = float("nan")
    u.requires_grad_()
    given = (torch.randn(4, 3), torch.randn(5, 3)) if teacher == "teacher" else (torch.zeros(4, 1).long(), torch.zeros(4, 1))
    counted = torch.tensor(counted) if isinstance(counted, list) else counted
    loss = linear_distillation_loss(x, weight, target, counted_tokens=counted, adapter=(u, b), **{teacher: given})
    found = torch.autograd.grad(loss, (u, b))
    assert all(each.isfinite().all() for each in found)
    assert not found[0][[0, 3]].any()
