"""`patch` without transformers: what is left alone and why. What it does is tested with transformers, in tests/."""

from types import SimpleNamespace

import pytest
import torch
from npu_fused_linear_cross_entropy import patch
from torch import nn


def ForCausalLMLoss(logits, labels):  # noqa: N802
    return logits.sum()


def model(name="LlamaForCausalLM", module="transformers.models.llama.modeling_llama", head=None, loss=ForCausalLMLoss):
    found = type(
        name, (nn.Module,), {"__module__": module, "loss_function": staticmethod(loss), "config": SimpleNamespace()}
    )()
    found.lm_head = head or nn.Linear(4, 8)
    return found


def other_loss(logits, labels):
    return logits.sum()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: model("MambaForCausalLM"), "no causal language model that is known"),
        (lambda: model(module="my_models"), "no causal language model that is known"),
        (lambda: model(head=nn.Sequential(nn.Linear(4, 8))), "lm_head is not a plain torch.nn.Linear"),
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
