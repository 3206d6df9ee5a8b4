"""`patch` without transformers: what is left alone and why. What it does is tested with transformers, in tests/."""

import contextlib
import copy
import functools
from concurrent.futures import ThreadPoolExecutor
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


def of_all(self, logits, labels):
    return nn.functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def of_marked(self, logits, labels):
    """The next token's, where it is marked; as speech models drop padding."""
    marked = labels[:, 1:] > 9
    return nn.CrossEntropyLoss(label_smoothing=0.1)(logits[..., :-1, :][marked].contiguous(), labels[:, 1:][marked])


def of_biased(self, logits, labels):
    rows = (logits + torch.arange(VOCABULARY) / 9)[:, 1:].reshape(-1, logits.size(-1))
    return (
        2 * nn.functional.cross_entropy(rows, labels[:, 1:].reshape(-1), ignore_index=3, reduction="sum") + logits.shape[0]
    )


def nested(self, hidden):
    return self.cls(hidden)


def with_own_loss(own_loss, logits_of=plain):
    """A model whose forward computes its loss itself."""
    known = type(ours := model(logits_of=logits_of))

    def forward(self, input_ids, labels=None, **kwargs):
        logits = known.forward(self, input_ids).logits
        return Output(loss=None if labels is None else own_loss(self, logits, labels), logits=logits)

    ours.__class__ = type("OwnForConditionalGeneration", (known,), {"forward": forward, "__module__": "of_tomorrow"})
    return ours


def with_nested_head():
    """A model whose head is inside another module, after a layer."""
    ours = model(logits_of=nested)
    ours.cls = nn.Sequential(nn.Linear(16, 16), ours.lm_head)
    del ours.lm_head
    type(ours).get_output_embeddings = lambda self: self.cls[1]
    return ours


OF_ROWS = {each.__name__: lambda each=each: with_own_loss(each) for each in (of_all, of_marked, of_biased)}


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("make", [*OF_ROWS.values(), with_nested_head], ids=[*OF_ROWS, "nested"])
def test_rows_of_logits_and_nested_heads_are_known(make, keep_logits):
    ours = make()
    ids = torch.randint(VOCABULARY, (2, 7))
    expected = ours(ids, labels=ids)
    wanted = torch.autograd.grad(expected.loss, list(ours.parameters()))
    report = patch(ours, keep_logits=keep_logits)
    names = [name for name, _ in ours.named_modules()]
    found = ours(ids, labels=ids)
    assert report.replaced and not report.fell_back
    assert (
        torch.equal(found.logits, expected.logits) and not found.logits.requires_grad
        if keep_logits
        else found.logits is None
    )
    torch.testing.assert_close(found.loss, expected.loss)
    for one, other in zip(torch.autograd.grad(found.loss, list(ours.parameters())), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert [name for name, _ in ours.named_modules()] == names
    with pytest.warns(UserWarning, match="it is compiled"):
        compiled = torch.compile(ours, backend="eager")(ids, labels=ids)
    torch.testing.assert_close(compiled.loss, expected.loss)
    assert torch.equal(ours.eval()(ids, labels=ids).logits, expected.logits)


@pytest.mark.parametrize("make", [model, *OF_ROWS.values(), with_nested_head], ids=["plain", *OF_ROWS, "nested"])
@pytest.mark.filterwarnings("ignore:.* a call in another thread has its cls.1:UserWarning")
def test_a_call_in_another_thread_is_one_of_its_own(make):
    """In the midst of a fused call the model is evaluated, and trained, elsewhere."""
    ours = make()
    ids = torch.randint(VOCABULARY, (2, 7))
    expected = ours(ids, labels=ids)
    patch(ours)
    embed, found = ours.base.forward, []

    def elsewhere(ids):
        ours.base.forward = embed
        with ThreadPoolExecutor(1) as others:
            found.append(others.submit(lambda: (ours(ids), ours(ids, labels=ids))).result())
        return embed(ids)

    ours.base.forward = elsewhere
    torch.testing.assert_close(ours(ids, labels=ids).loss, expected.loss)
    ((evaluated, trained),) = found
    assert torch.equal(evaluated.logits, expected.logits)
    torch.testing.assert_close(trained.loss, expected.loss)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_loss_of_rows_has_the_dtype_of_torchs(autocast):
    ours, ids = with_own_loss(of_all).bfloat16(), torch.randint(VOCABULARY, (2, 7))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = ours(ids, labels=ids).loss
        assert patch(ours).replaced
        found = ours(ids, labels=ids).loss
    assert found.dtype is expected.dtype is (torch.float32 if autocast else torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=torch.finfo(torch.bfloat16).eps, atol=0)  # torch rounds each logarithm


@pytest.mark.parametrize(
    "own_loss",
    [
        lambda self, logits, labels: of_all(self, logits / 2, labels),
        lambda self, logits, labels: of_all(self, logits, labels) + logits.square().mean(),
        lambda self, logits, labels: nn.functional.cross_entropy(logits.transpose(1, 2), labels),
        lambda self, logits, labels: nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), torch.ones(VOCABULARY)
        ),
        lambda self, logits, labels: of_all(self, logits, labels) + of_all(self, logits, labels),
    ],
    ids=["scaled", "read", "transposed", "weighted", "twice"],
)
def test_what_reads_its_logits_is_left(own_loss):
    ours = with_own_loss(own_loss)
    assert patch(ours).left


def test_logits_that_are_read_at_last_are_made():
    """A forward does otherwise than when it was looked at: it gets its logits."""

    def loss(self, logits, labels):
        return of_all(self, logits if self.factor == 1 else logits * self.factor, labels)

    ours = with_own_loss(loss)
    ours.factor, ids = 1, torch.randint(VOCABULARY, (2, 7))
    report = patch(ours)
    assert report.replaced
    ours.factor = 3
    found = ours(ids, labels=ids).loss
    assert all(each.any() for each in torch.autograd.grad(found, list(ours.parameters()), retain_graph=True))
    report.undo()
    assert torch.equal(found, ours(ids, labels=ids).loss)


def test_hooks_above_a_nested_head_see_what_they_saw():
    ours, ids, seen = with_nested_head(), torch.randint(VOCABULARY, (2, 7)), []
    report = patch(ours)
    ours.cls.register_forward_hook(lambda module, given, result: seen.append(result))
    with pytest.warns(UserWarning, match="its cls is not its forward alone: it has hooks"):
        assert ours(ids, labels=ids).logits is seen[0]
    assert report.fell_back


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
        (lambda: model(logits_of=lambda self, x: 5e4 * torch.tanh(self.lm_head(x) / 5e4)), "its softcap is 50000"),
        (lambda: model(logits_of=lambda self, x: self.lm_head(x)[..., :-1]), "the shape of its logits"),
        (lambda: model(logits_of=lambda self, x: self.lm_head(x) + self.lm_head(x)), "once each"),
        (lambda: model(logits_of=lambda self, x: x @ self.lm_head.weight.t()), "once each"),
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


def test_a_model_with_other_logits_in_evaluation_is_left_where_evaluation_is_asked_for():
    def ours():
        return model(logits_of=lambda self, x: self.lm_head(x) * (1.0 if self.training else 2.0))

    assert patch(ours()).replaced
    assert "otherwise in evaluation" in patch(ours(), evaluation=True).left[0].text


def test_to_look_at_a_model_changes_nothing():
    ours = model()
    before, content = dict(vars(ours)), copy.deepcopy(ours.state_dict())
    patch(ours).undo()
    assert vars(ours) == before
    assert all(torch.equal(each, ours.state_dict()[name]) for name, each in content.items())


@pytest.mark.parametrize("of", ["config", "config.text_config", "base", ""])
def test_a_factor_of_the_logits_that_changes_is_followed(of):
    def owner(of_model):
        return functools.reduce(getattr, of.split(".") if of else (), of_model)

    ours, ids = model(logits_of=lambda self, x: self.lm_head(x) * owner(self).logit_scale), torch.randint(VOCABULARY, (2, 7))
    ours.config.text_config, ours.base_model_prefix, owner(ours).logit_scale = SimpleNamespace(), "base", 2.0
    report = patch(ours)
    assert ours(ids, labels=ids).logits is None and not report.fell_back
    owner(ours).logit_scale = 3.0
    with pytest.warns(UserWarning, match=f"its {of and f'{of}.'}logit_scale is 3.0 and was 2.0 when it was patched"):
        found = ours(ids, labels=ids)
    report.undo()
    torch.testing.assert_close(found.loss, ours(ids, labels=ids).loss)


def test_head_with_hooks_is_left():
    found = model()
    found.lm_head.register_forward_pre_hook(lambda module, given: None)
    assert "lm_head" in patch(found).left[0].text


def test_the_class_of_a_patched_model_makes_patched_ones():
    """As `type(model).from_pretrained` does, for a reference model."""
    ours, ids = model(), torch.randint(VOCABULARY, (2, 7))
    expected = ours(ids, labels=ids).loss
    patch(ours)
    other = type(ours)()
    other.load_state_dict(ours.state_dict())
    other.base = ours.base
    found = other(ids, labels=ids)
    torch.testing.assert_close(found.loss, expected)
    assert found.logits is None


class WrapperForCausalLM(nn.Module):
    """As PEFT's: what it does not have it asks its model for."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def test_the_model_inside_a_wrapper_of_its_name_is_known():
    report = patch(WrapperForCausalLM(model()))
    assert [each.name for each in report.replaced] == ["inner"] and not report.left


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SET = {
    "bf16": lambda: default_dtype(torch.bfloat16),
    "fp64": lambda: default_dtype(torch.float64),
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("what", SET)
@pytest.mark.parametrize("logits_of", [capped, lambda self, x: self.lm_head(x).square()])
def test_what_a_program_has_set_changes_no_patch(what, logits_of):
    expected = patch(model(logits_of=logits_of))
    ours = model(logits_of=logits_of)
    with SET[what]():
        before = torch.empty(0).dtype, torch.empty(0).device
        report = patch(ours)
        assert (torch.empty(0).dtype, torch.empty(0).device) == before
    assert (report.replaced, report.left) == (expected.replaced, expected.left)


def test_other_modules_are_none_of_its_business():
    report = patch(nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4)))
    assert report.replaced == report.left == ()
    assert str(report) == "npu_fused_linear_cross_entropy: 0 modules replaced, 0 left"


def test_options_are_keywords():
    with pytest.raises(TypeError):
        patch(model(), accumulate=torch.float32)
