"""`patch` without transformers: what is left alone and why. What it does is tested with transformers, in tests/."""

import copy
from types import SimpleNamespace

import pytest
import torch
from npu_fused_linear_cross_entropy import patch
from torch import nn

VOCABULARY = 100


def ForCausalLMLoss(logits, labels, vocab_size, ignore_index=-100, **kwargs):  # noqa: N802
    target = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=ignore_index)


class Output(dict):
    """As transformers' ModelOutput."""

    __getattr__ = dict.__getitem__

    def to_tuple(self):
        return tuple(each for each in self.values() if each is not None)


def plain(self, hidden):
    return self.lm_head(hidden)


def model(name="NewForCausalLM", head=None, loss=ForCausalLMLoss, logits_of=plain, loss_of=lambda loss: loss):
    """A causal language model of a class that is in no package; how it makes logits is given."""

    def initialise(self):
        nn.Module.__init__(self)
        self.body, self.lm_head = nn.Embedding(VOCABULARY, 16), head or nn.Linear(16, VOCABULARY)
        self.config = SimpleNamespace(return_dict=True)

    def forward(self, input_ids, labels=None, logits_to_keep=0, **kwargs):
        hidden = self.base(input_ids)[0]
        logits = logits_of(self, hidden[:, -logits_to_keep:])
        found = None if labels is None else loss_of(self.loss_function(logits=logits, labels=labels, vocab_size=9, **kwargs))
        return Output(loss=found, logits=logits)

    base = nn.Module()
    base.forward = lambda ids: (found.body(ids),)
    attributes = {"__init__": initialise, "forward": forward, "loss_function": property(lambda self: loss, None)}
    torch.manual_seed(0)
    found = type(name, (nn.Module,), {"__module__": "of_tomorrow", **attributes})()
    found.base = base
    return found.train()


def other_loss(logits, labels):
    return logits.sum()


def scaled(self, hidden):
    return self.lm_head(hidden) / 8


def capped(self, hidden):
    return 3 * torch.tanh(self.lm_head(hidden).float() / 3)


def scaled_before(self, hidden):
    return self.lm_head((hidden / 3).to(self.lm_head.weight.dtype))


def scaled_and_capped(self, hidden):
    return 3 * torch.tanh(self.lm_head(hidden) * 2 / 3)


@pytest.mark.parametrize("logits_of", [plain, scaled, capped, scaled_and_capped, scaled_before])
@pytest.mark.parametrize("keep_logits", [False, True])
def test_a_model_is_known_by_what_its_forward_does(logits_of, keep_logits):
    ours = model(logits_of=logits_of)
    ids = torch.randint(VOCABULARY, (2, 7))
    expected = ours(ids, labels=ids)
    wanted = torch.autograd.grad(expected.loss, list(ours.parameters()))
    report = patch(ours, keep_logits=keep_logits)
    assert report.replaced
    found = ours(ids, labels=ids)
    assert not report.fell_back
    torch.testing.assert_close(found.loss, expected.loss)
    for one, other in zip(torch.autograd.grad(found.loss, list(ours.parameters())), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert torch.equal(found.logits, expected.logits) if keep_logits else found.logits is None
    assert len(ours(ids, labels=ids, return_dict=False)) == 1 + keep_logits
    assert torch.equal(ours.eval()(ids, labels=ids).logits, expected.logits)


def test_what_the_model_adds_to_its_loss_is_added():
    ours, ids = model(loss_of=lambda loss: loss + 5), torch.randint(VOCABULARY, (2, 7))
    expected = ours(ids, labels=ids).loss
    report = patch(ours)
    assert (len(report.replaced), len(report.left)) in ((0, 1), (1, 0))
    torch.testing.assert_close(ours(ids, labels=ids).loss, expected)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: model("OtherForCausalLM", loss_of=lambda loss: 2 * loss), "its loss is not what its loss function returns"),
        (lambda: model(logits_of=lambda self, x: self.lm_head(x).square()), "more than a factor and a softcap"),
        (lambda: model(logits_of=lambda self, x: self.lm_head(x) + 1), "more than a factor and a softcap"),
        (lambda: model(logits_of=lambda self, x: self.lm_head(x).clamp(max=100)), "more than a factor and a softcap"),
        (lambda: model(logits_of=lambda self, x: -self.lm_head(x)), "more than a factor and a softcap"),
        (lambda: model(logits_of=lambda self, x: self.lm_head(x)[..., :-1]), "the shape of its logits"),
        (lambda: model(logits_of=lambda self, x: self.lm_head(x) + self.lm_head(x)), "once each"),
        (lambda: model(logits_of=lambda self, x: x @ self.lm_head.weight.t()), "does not run by itself"),
        (lambda: model(head=nn.Sequential(nn.Linear(16, VOCABULARY))), "lm_head is not a plain torch.nn.Linear"),
        (lambda: model(loss=other_loss), "its loss function is other_loss and not ForCausalLMLoss"),
    ],
)
def test_what_is_not_known_is_left_and_named(make, reason):
    found = make()
    before = type(found)
    whole = nn.ModuleDict({"language_model": found, "projector": nn.Linear(4, 4)})
    report = patch(whole)
    assert report.replaced == ()
    ((name, was, text),) = report.left
    assert (name, was) == ("language_model", before.__name__)
    assert reason in text
    assert type(found) is before


def test_to_look_at_a_model_changes_nothing():
    ours = model()
    before, content = dict(vars(ours)), copy.deepcopy(ours.state_dict())
    patch(ours).undo()
    assert vars(ours) == before
    assert all(torch.equal(each, ours.state_dict()[name]) for name, each in content.items())


def test_head_with_hooks_is_left():
    found = model()
    found.lm_head.register_forward_pre_hook(lambda module, given: None)
    assert "lm_head" in patch(found).left[0].text


def test_other_modules_are_none_of_its_business():
    report = patch(nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4)))
    assert report.replaced == report.left == ()
    assert str(report) == "npu_fused_linear_cross_entropy: 0 modules replaced, 0 left"


def test_options_are_keywords():
    with pytest.raises(TypeError):
        patch(model(), accumulate=torch.float32)
