"""Classes of modules swapped and restored, whatever the classes compute."""

import abc
import contextlib
import copy
import inspect
import pickle
import warnings

import pytest
import torch
from npu_tiling.models import (
    Derived,
    Replacement,
    called_otherwise,
    derived,
    in_order,
    stands_for,
    swap_classes,
    with_signature_of,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from testing.other_paths import FunctionMode, OperatorMode, Packed, replaced, tripled


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
    later = swap_classes(model, "ours", recognise)
    report.undo()  # of an earlier block: a later patch is no business of it
    assert isinstance(model["head"], Doubled)
    later.undo()
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


def careful(known):
    """A class that computes zeros where they may stand for what the known one computes."""

    @with_signature_of(known)
    def forward(self, *arguments, **keywords):
        given = in_order(known.forward, arguments, keywords)
        if len(given) == 1 and stands_for(self, known, input=given[0], weight=self.weight):
            return given[0].new_zeros(())
        return known.forward(self, *arguments, **keywords)

    return derived(f"Careful{known.__name__}", (Derived, known), {"forward": forward}, careful, known)


def patch_carefully(model):
    return swap_classes(
        model, "ours", lambda module: Replacement(careful(nn.Linear), "zeros") if type(module) is nn.Linear else None
    )


@contextlib.contextmanager
def other_weight(model, make):
    before = {module: module.weight for module in model}
    for module, weight in before.items():
        module.weight = nn.Parameter(make(weight.detach()), requires_grad=False)
    yield
    for module, weight in before.items():
        module.weight = weight


CHANGES = {
    "a forward of the class": (
        lambda model: replaced(nn.Linear, "forward", tripled),
        "forward of the class Linear was replaced",
    ),
    "a function": (lambda model: replaced(nn.functional, "linear", tripled), "functional.linear was replaced"),
    "a mode of functions": (lambda model: FunctionMode(), "a FunctionMode is in force"),
    "a mode of operators": (lambda model: OperatorMode(), "a OperatorMode is in force"),
    "a kind of weight": (
        lambda model: other_weight(model, Packed),
        "its weight is a Packed and no plain tensor",
    ),
    "a layout": (lambda model: other_weight(model, lambda w: w.to_sparse_csr()), "its weight is a sparse tensor"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("change", CHANGES)
def test_who_falls_back_is_told_once_and_reported(change):
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    report, x, (make, reason) = patch_carefully(model), torch.ones(2, 4), CHANGES[change]
    assert not model[0](x).any()
    with make(model), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [module(x) for module in (*model, *model)]
        assert all(torch.equal(y, nn.Linear.forward(module, x)) for y, module in zip(found, (*model, *model), strict=True))
        assert found[0].any()
    (message,) = [str(each.message) for each in told if "ours" in str(each.message)]
    assert reason in message and "0 (Linear)" in message
    assert [(entry.name, reason in entry.text) for entry in report.fell_back] == [("0", True), ("1", True)]
    assert reason in str(report)
    assert not model[0](x).any()  # nothing stands in the way any more
    assert len(report.fell_back) == 2


@pytest.mark.parametrize("change", ["a forward of the class", "a function"])
def test_what_was_replaced_before_is_left_and_named(change):
    make, reason = CHANGES[change]
    with make(None):
        report = patch_carefully(nn.Linear(4, 4))
    assert report.replaced == ()
    assert reason in report.left[0].text


@pytest.mark.parametrize(
    "surrounding",
    [lambda: FlopCounterMode(display=False), lambda: torch.device("cpu"), contextlib.nullcontext],
    ids=["counter", "device", "none"],
)
def test_what_torch_itself_puts_around_a_call_does_not_mind(surrounding):
    module = nn.Linear(4, 4)
    report = patch_carefully(module)
    module.weight = nn.Parameter(module.weight.detach().as_subclass(type("Named", (torch.Tensor,), {})))
    with surrounding():
        assert not module(torch.ones(4)).any()
    assert report.fell_back == ()


def test_arguments_are_named_as_the_class_names_them():
    module, x = nn.Linear(4, 4), torch.ones(4)
    patch_carefully(module)
    assert not module(input=x).any()
    assert list(inspect.signature(module.forward).parameters) == ["input"]
    for wrong in (lambda: module(x=x), lambda: module(x, input=x), lambda: module(x, x), lambda: module()):
        with pytest.raises(TypeError, match=r"Linear\.forward\(\)"):
            wrong()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_exporters_get_operators_of_torch():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    expected = model(x)
    report = patch_carefully(model)
    for made in (torch.jit.trace(model, (x,), check_trace=False), torch.fx.symbolic_trace(model)):
        assert torch.equal(made(x), expected)
    assert not model(x).any()
    assert report.fell_back == ()


def test_a_derived_class_is_pickled():
    made = careful(nn.Linear)
    assert pickle.loads(pickle.dumps(made)) is made
    assert copy.deepcopy(made) is made

    class Abstract(nn.Linear, abc.ABC):
        pass

    assert isinstance(derived("Both", (Derived, Abstract), {}, careful, Abstract), abc.ABCMeta)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_of_all_modules_are_calls(kind):
    head = nn.Linear(4, 4)
    assert called_otherwise(head, "head", nn.Linear) is None
    handle = getattr(torch.nn.modules.module, f"register_module_{kind}")(lambda *given: None)
    try:
        assert "head is not a plain torch.nn.Linear: all modules have hooks" in called_otherwise(head, "head", nn.Linear)
    finally:
        handle.remove()
    with FlopCounterMode(display=False):  # whose hooks are torch's
        assert called_otherwise(head, "head", nn.Linear) is None
    getattr(head, f"register_{kind}")(lambda *given: None)
    assert "it has hooks" in called_otherwise(head, "head", nn.Linear)


@pytest.mark.slow
def test_a_compiler_asks_the_same():
    module, x = nn.Linear(4, 4), torch.ones(2, 4)
    report = patch_carefully(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert not compiled(x).any()
    with torch.device("cpu"):
        assert not compiled(x).any()
    with (
        pytest.warns(UserWarning, match=r"the model \(Linear\) computes without our operators: a FunctionMode"),
        FunctionMode(),
    ):
        assert torch.equal(compiled(x), nn.Linear.forward(module, x))
    assert len(report.fell_back) == 1
    torch._dynamo.reset()
    with replaced(nn.Linear, "forward", tripled):
        assert torch.equal(compiled(input=x), nn.Linear.forward(module, x))
    assert len(report.fell_back) == 2
    torch._dynamo.reset()
