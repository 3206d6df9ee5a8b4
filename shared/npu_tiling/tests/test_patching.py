"""Classes of modules swapped and restored, whatever the classes compute."""

import copy
import pickle

import pytest
import torch
from npu_tiling.pytorch.patching import Derived, Replacement, derived, swap_classes
from torch import nn


class Doubled(Derived):
    def forward(self, x):
        return 2 * super().forward(x)


def doubled(known):
    return derived(f"Doubled{known.__name__}", (Doubled, known), {}, doubled, known)


def recognise(module):
    if isinstance(module, nn.Bilinear):
        return "it takes two inputs"
    return Replacement(doubled(type(module)), "twice") if type(module) is nn.Linear else None


def network():
    layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    return nn.ModuleDict({"layers": layers, "other": nn.Bilinear(4, 4, 4), "head": nn.Linear(4, 4)})


def test_report_has_one_line_for_equal_layers():
    report = swap_classes(network(), "ours", recognise)
    assert [entry.name for entry in report.replaced] == ["layers.0.0", "layers.1.0", "layers.2.0", "head"]
    assert str(report).splitlines() == [
        "ours: 4 modules replaced, 1 left",
        "  layers.*.* (3)  Linear  twice",
        "  head            Linear  twice",
        "left:",
        "  other  Bilinear  it takes two inputs",
    ]
    assert "(the model)" in str(swap_classes(nn.Linear(2, 2), "ours", recognise))


def test_everything_but_the_class_stays():
    model = network().eval()
    model["head"].weight = model["layers"][0][0].weight  # tied
    model["head"].bias.requires_grad_(False)
    seen = []
    model["head"].register_forward_hook(lambda module, given, output: seen.append(output))
    modules, content = dict(model.named_modules()), [list(vars(module).items()) for module in model.modules()]
    x = torch.ones(4)
    expected = model["head"](x)
    report = swap_classes(model, "ours", recognise)
    assert dict(model.named_modules()) == modules
    assert [list(vars(module).items()) for module in model.modules()] == content
    assert isinstance(model["head"], nn.Linear)
    assert torch.equal(model["head"](x), 2 * expected)
    assert len(seen) == 2
    report.undo()
    assert torch.equal(model["head"](x), expected)
    assert [list(vars(module).items()) for module in model.modules()] == content


def test_undone_at_the_end_of_a_block_once_and_for_all():
    model = network()
    with pytest.raises(KeyError), swap_classes(model, "ours", recognise) as report:
        assert isinstance(model["head"], Doubled)
        raise KeyError
    assert type(model["head"]) is nn.Linear
    swap_classes(model, "ours", recognise)
    model["head"].__class__ = nn.Linear
    report.undo()  # of an earlier block: what was restored since is no business of it
    assert type(model["head"]) is nn.Linear


def test_what_was_put_around_a_module_must_go_first():
    model = network()
    report = swap_classes(model, "ours", recognise)
    model["head"].forward = lambda x: x
    with pytest.raises(RuntimeError, match="head cannot be restored, its forward was replaced"):
        report.undo()
    assert isinstance(model["layers"][0][0], Doubled)
    del model["head"].forward
    wrapped = type("Sharded", (doubled(nn.Linear),), {})
    model["head"].__class__ = wrapped
    with pytest.raises(RuntimeError, match="head cannot be restored, it is a Sharded by now"):
        report.undo()


def test_forward_of_the_class_on_the_module_is_no_obstacle():
    module, x = nn.Linear(4, 2), torch.ones(4)
    expected = module(x)
    module.forward = module.forward  # as accelerate leaves it
    with swap_classes(module, "ours", recognise):
        assert torch.equal(module(x), 2 * expected)
        module.forward = module.forward
    assert torch.equal(module(x), expected)
    assert "forward" not in vars(module)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_modules_of_a_derived_class_are_copied(duplicate):
    module = nn.Linear(4, 2)
    module.__class__ = derived("Copied", (Derived, nn.Linear), {}, _copied, nn.Linear)
    twin = duplicate(module)
    assert type(twin) is type(module)
    assert torch.equal(twin(torch.ones(4)), module(torch.ones(4)))


def _copied(known):
    return derived("Copied", (Derived, known), {}, _copied, known)


def _accelerated(module):
    module._hf_hook = object()


def _replaced(module):
    module.forward = lambda x: x


def _quantised(module):
    module.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)


def _subclass(module):
    module.weight = nn.Parameter(torch.ones(2, 2).as_subclass(type("Packed", (torch.Tensor,), {})))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_accelerated, "accelerate moves its parameters"),
        (_replaced, "its forward was replaced by something else"),
        (_quantised, "its weight is quantised to int8"),
        (_subclass, "its weight is a Packed and no plain parameter"),
    ],
)
def test_obstacles_are_named(change, reason):
    module = nn.Linear(2, 2)
    change(module)
    report = swap_classes(module, "ours", recognise)
    assert report.replaced == ()
    assert [entry.text for entry in report.left] == [reason]
    assert type(module) is nn.Linear
