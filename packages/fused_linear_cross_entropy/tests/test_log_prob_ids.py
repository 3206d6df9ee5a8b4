"""`linear_log_probs`: ids and tokens that are ignored, outside the vocabulary, or not counted."""

import log_probs
import pytest
import torch
from npu_fused_linear_cross_entropy import linear_log_probs

pytestmark = pytest.mark.usefixtures("npu_poisoned")

EVERYTHING = log_probs.EVERYTHING


def test_ignored_tokens_and_ids_are_zero_and_have_no_gradient(device):
    tensors = log_probs.make()
    found, gradients = log_probs.check(
        {name: tensor for name, tensor in tensors.items() if name != "temperature"}, device.torch, 2e-5, **EVERYTHING
    )
    ignored = tensors["target"] == -100
    for name, output in found._asdict().items():
        assert (output[ignored] == (-1 if name == "top_ids" else 0)).all(), name
    assert not found.ids_log_probs.cpu()[tensors["ids"] == -100].any()
    assert not gradients["x"].cpu()[ignored].any()


def test_an_id_is_ignored_that_is_a_column_too():
    tensors = log_probs.make()
    x, weight = tensors["x"].requires_grad_(), tensors["weight"].requires_grad_()
    ids = torch.tensor([5, 7]).expand(3, 7, 2)
    found = linear_log_probs(x, weight, ids=ids, top_k=123, ignore_index=5)
    expected = (x @ weight.t()).log_softmax(-1)
    assert not found.ids_log_probs[..., 0].any()
    ours = torch.autograd.grad(found.ids_log_probs.sum() + found.top_log_probs.square().sum(), (x, weight))
    theirs = torch.autograd.grad(expected[..., 7].sum() + expected.square().sum(), (x, weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beside", [{}, {"return_entropy": True, "top_k": 2}])
def test_a_kept_set_is_all_that_a_log_probability_is_of(device, beside):
    """Ragged sets; a token without one has the whole vocabulary, and an ignored one stays 0."""
    tensors = log_probs.make(temperature=True)
    target, bias = tensors["target"], torch.randn(123, generator=torch.Generator().manual_seed(3))
    kept = torch.stack([torch.randperm(123, generator=torch.Generator().manual_seed(i))[:9] for i in range(21)]).view(
        3, 7, 9
    )
    kept[..., 0] = target
    kept[1, :, 4:] = -100
    kept[0, 1] = -100
    leaves = [tensors["x"], tensors["weight"], bias, tensors["temperature"]]
    whole = [each.double().requires_grad_() for each in leaves]
    z = (whole[0] @ whole[1].t() + whole[2]) / whole[3].unsqueeze(-1)
    outside = torch.ones(3, 7, 124, dtype=torch.bool).scatter(-1, kept.where(kept >= 0, 123), False)[..., :123]
    outside[0, 1] = False
    of_target = z.masked_fill(outside, -torch.inf).log_softmax(-1).gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    expected = torch.where(target == -100, 0.0, of_target)
    own = [each.to(device.torch).requires_grad_() for each in leaves]
    given = {"temperature": own[3], "kept": kept.to(device.torch), **beside}
    found = linear_log_probs(own[0], own[1], target.to(device.torch), own[2], **given)
    if beside:
        assert found.ids_log_probs is None and (found.entropy.cpu() > 0)[target >= 0].all()
        found = found.log_probs
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    seen = torch.randn(3, 7, generator=torch.Generator().manual_seed(4))
    ours = torch.autograd.grad((found * seen.to(device.torch)).sum(), own)
    theirs = torch.autograd.grad((expected * seen).sum(), whole)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-4, atol=1e-5)


def test_ids_beside_a_kept_set_are_of_the_whole_vocabulary():
    tensors = log_probs.make()
    given = [tensors[name] for name in ("x", "weight", "target")]
    alone = linear_log_probs(*given, ids=tensors["ids"])
    beside = linear_log_probs(*given, ids=tensors["ids"], kept=torch.arange(123).expand(3, 7, 123))
    for one, other in zip(beside[:3], alone[:3], strict=True):  # a set of everything changes nothing
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5) if one is not None else None


def test_an_id_outside_the_vocabulary(device):
    tensors = log_probs.make()
    x, weight, ids = (tensors[name].to(device.torch) for name in ("x", "weight", "ids"))
    ids[1, 1, 2] = 123
    if device.name == "cpu":
        with pytest.raises(IndexError, match=r"ids\[1, 1, 2\] is 123 and must be from 0 to 122, or ignore_index, -100"):
            linear_log_probs(x, weight, ids=ids)
        return
    found = linear_log_probs(x.requires_grad_(), weight, ids=ids).ids_log_probs
    assert found.isnan().nonzero().tolist() == [[1, 1, 2]]
    found.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("how", [None, "places", "mask"])
def test_ids_of_tokens_that_do_not_count_may_be_anything(device, how):
    tensors = log_probs.make()
    x, weight, ids, target = (tensors[name].to(device.torch) for name in ("x", "weight", "ids", "target"))
    counts = torch.arange(21, device=device.torch).view(3, 7) % 3 > 0
    counted = {None: None, "places": counts.flatten().nonzero().squeeze(1), "mask": counts}[how]
    seen = target if how else torch.where(counts, target, -100)
    wanted = linear_log_probs(x, weight, seen, ids=ids, counted_tokens=counted).ids_log_probs
    spoilt = torch.where(counts.unsqueeze(-1), ids, 123 + ids)
    found = linear_log_probs(x, weight, seen, ids=spoilt, counted_tokens=counted).ids_log_probs
    assert torch.equal(found, wanted) and not found[~counts].any()
    spoilt[2, 6, 0] = 999
    if device.name == "cpu":
        with pytest.raises(IndexError, match=r"ids\[2, 6, 0\] is 999 and must be from 0 to 122"):
            linear_log_probs(x, weight, seen, ids=spoilt, counted_tokens=counted)


@pytest.mark.parametrize("how", ["count", "places", "mask"])
def test_tokens_that_do_not_count_are_left_out(device, how):
    tensors = log_probs.make(temperature=True)
    counted = tensors["target"] != -100
    some = {"count": int(counted.sum()), "places": counted.flatten().nonzero().squeeze(1), "mask": counted}[how]
    some = some if how == "count" else some.to(device.torch)
    log_probs.check(tensors, device.torch, 2e-5, counted_tokens=some, **EVERYTHING)


@pytest.mark.uncollected("the same kernels", lambda place, named: place == "emulated" and named != "ids")
@pytest.mark.parametrize("named", ["ids", "top_k", "target"])
def test_a_named_column_that_is_ruled_out_spoils_no_gradient(device, named):
    """A bias of minus infinity; the gradients of what is finite are those of a bias that is finite, and as low."""
    tensors = log_probs.make(vocabulary=64, bias=True, temperature=True)
    tensors["ids"] = torch.tensor([3, 40, 5, 63, 3]).expand(3, 7, 5)
    tensors["target"] = torch.arange(20, 41).view(3, 7)
    if named != "ids":
        del tensors["ids"]
    options = {"ids": {}, "top_k": {"top_k": 40}, "target": {"return_square_sum": True}}[named]
    output = {"ids": "ids_log_probs", "top_k": "top_log_probs", "target": "log_probs"}[named]
    found = []
    for function, where, dtype, lowest in (
        (linear_log_probs, device.torch, None, -torch.inf),
        (log_probs.definition, "cpu", torch.float64, -1e30),
    ):
        tensors["bias"][32:] = lowest
        given, leaves = log_probs.leaves_of(tensors, where, dtype)
        outputs = function(given.pop("x"), given.pop("weight"), given.pop("target"), **given, **options)
        finite = torch.where(getattr(outputs, output) < -1e20, 0.0, getattr(outputs, output))
        total = finite.square().sum() + (outputs.square_sum.sum() if named == "target" else 0.0)
        found.append([finite.detach(), *torch.autograd.grad(total, list(leaves.values()))])
        assert torch.equal(getattr(outputs, output).isinf().any(), torch.tensor(lowest == -torch.inf, device=where))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-4, atol=1e-4)
