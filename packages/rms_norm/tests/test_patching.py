"""`patch`, without transformers: its classes are stood in for by ones of the same name and place."""

import contextlib
import copy
import pickle

import pytest
import torch
from npu_rms_norm import RMSNorm, patch, use_kernels
from npu_rms_norm.patching import TORCH, normalise
from torch import nn

from testing.other_paths import FunctionMode, Packed, replaced, tripled


class Norm(nn.Module):
    """As transformers writes it. Llama rounds before the weight and promotes, the others round the result."""

    def __init__(self, width, kind="llama", eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.epsilon, self.kind = eps, kind

    def forward(self, hidden_states):
        x = hidden_states
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self.kind == "llama":
            return self.weight * wide.to(x.dtype)
        if self.kind == "llama, first fp32":  # Llama 4
            return wide.type_as(x) * self.weight
        if self.kind == "t5":
            return self.weight * (wide if self.weight.dtype == torch.float32 else wide.to(self.weight.dtype))
        if self.kind == "summed":
            return (wide * (1.0 + self.weight).float()).type_as(x)
        if self.kind == "none":
            rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.epsilon).to(x.dtype)
            return x * rstd * self.weight.to(x.dtype)
        if self.kind == "unweighted":
            return wide.to(x.dtype)
        return (wide * ({"gemma": 1.0, "olmo": 0.0}[self.kind] + self.weight.float())).to(x.dtype)


class Grouped(Norm):
    def __init__(self, width, size):
        super().__init__(width, "gemma")
        self.group_size = size

    def forward(self, hidden_states):
        x = hidden_states.float().unflatten(-1, (-1, self.group_size))
        wide = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)).flatten(-2)
        return (wide * (1.0 + self.weight.float())).to(hidden_states.dtype)


DTYPES = [("float32",) * 2, ("bfloat16",) * 2, ("bfloat16", "float32"), ("float32", "bfloat16"), ("float16",) * 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Norm(64),
        lambda: Norm(64, "llama, first fp32"),
        lambda: Norm(64, "gemma"),
        lambda: Norm(64, "olmo"),
        lambda: Norm(64, "t5"),
        lambda: Norm(64, "summed"),
        lambda: Norm(64, "none"),
        lambda: Norm(64, "unweighted"),
        lambda: Grouped(64, 16),
        lambda: Grouped(64, 64),
        lambda: Norm(1, "olmo"),
        lambda: Norm(3000),
    ],
)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.filterwarnings("ignore:.*rounds torch.float32")
def test_rounds_as_the_class_does(make, dtypes):
    dtype, weight_dtype = (getattr(torch, each) for each in dtypes)
    module = make().to(weight_dtype)
    plain = copy.deepcopy(module)
    report = patch(module)
    assert report.replaced
    x = torch.randn(3, 5, module.weight.shape[0]).to(dtype).requires_grad_()
    y, expected = module(x), plain(x)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    assert not report.fell_back or (module.kind, dtypes) in ALONE
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    assert (module.weight.grad is None) == (plain.weight.grad is None)
    if plain.weight.grad is not None:
        assert module.weight.grad.dtype == weight_dtype
        torch.testing.assert_close(module.weight.grad, plain.weight.grad, rtol=2**-5, atol=2**-5)


# What none of our functions computes: the product of fp32 rows is rounded to the weight's bf16, or the other way about.
ALONE = {("t5", ("float32", "bfloat16")), ("none", ("bfloat16", "float32")), ("none", ("float32", "bfloat16"))}


class GatedNorm(nn.Module):
    """As transformers writes it."""

    def __init__(self, width, kind, activation="silu", size=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.variance_epsilon, self.kind, self.activation, self.group_size = 1e-5, kind, activation, size

    def forward(self, hidden_states, gate=None):
        x, wide, act = hidden_states, hidden_states.float(), ACTIVATIONS[self.activation]
        if self.kind == "mamba":
            wide = wide if gate is None else wide * act(gate.float())
            wide = wide.unflatten(-1, (-1, self.group_size))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.kind == "mamba":
            return self.weight * wide.flatten(-2).to(x.dtype)
        wide = self.weight.float() * wide if self.kind == "kimi" else self.weight * wide.to(x.dtype)
        return (wide * act(gate.float())).to(x.dtype)


ACTIVATIONS = {"silu": nn.functional.silu, "sigmoid": torch.sigmoid, "gelu": nn.functional.gelu}


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (("qwen3_next",), True),
        (("kimi", "sigmoid"), True),
        (("mamba", "silu", 64), True),
        (("mamba", "silu", 16), True),
        (("mamba", "silu", 64), False),
    ],
)
@pytest.mark.parametrize("dtypes", [*DTYPES[:4], ("float32", "bfloat16", "bfloat16")])
def test_gated_norms_round_as_the_class_does(options, given, dtypes):
    dtype, weight_dtype, gate_dtype = (getattr(torch, each) for each in (*dtypes, dtypes[0])[:3])
    module = GatedNorm(64, *options).to(weight_dtype)
    plain = copy.deepcopy(module)
    report = patch(module)
    assert report.replaced
    assert "gated_rms_norm" in report.replaced[0].text
    x, gate = torch.randn(3, 5, 64).to(dtype), torch.randn(3, 5, 64).to(gate_dtype) if given else None
    y, expected = module(x, gate), plain(x, gate)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    assert not report.fell_back
    y.sum().backward()
    assert module.weight.grad.dtype == weight_dtype


class HalvedNorm(Norm):
    def forward(self, hidden_states):
        return 0.5 * super().forward(hidden_states)


class OfConstantRowsNorm(Norm):
    def forward(self, hidden_states):
        return super().forward(hidden_states.detach())


class WithConstantEpsNorm(Norm):
    def forward(self, hidden_states):
        return (hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + 1e-5)) * self.weight


class OfClampedRowsNorm(Norm):
    def forward(self, hidden_states):
        return super().forward(hidden_states.clamp(-65504.0, 65504.0))


class OfFiniteRowsNorm(Norm):
    def forward(self, hidden_states):
        return super().forward(hidden_states.nan_to_num())


class WithoutGradientsNorm(Norm):
    def forward(self, hidden_states):
        return (1.0 if torch.is_grad_enabled() else 2.0) * super().forward(hidden_states)


class InEvaluationNorm(Norm):
    def forward(self, hidden_states):
        return (1.0 if self.training else 2.0) * super().forward(hidden_states)


class UnderAutocastNorm(Norm):
    def forward(self, hidden_states):
        return (2.0 if torch.is_autocast_enabled("cpu") else 1.0) * super().forward(hidden_states)


class OfLongSequencesNorm(Norm):
    def forward(self, hidden_states):
        return (1.0 if hidden_states.shape[-2] < 1000 else 2.0) * super().forward(hidden_states)


class OfLargeBatchesNorm(Norm):
    def forward(self, hidden_states):
        return (1.0 if len(hidden_states) < 1000 else 2.0) * super().forward(hidden_states)


class OfOneTokenNorm(Norm):
    def forward(self, hidden_states):
        return (1.0 if hidden_states.shape[-2] > 1 else 2.0) * super().forward(hidden_states)


class OverTokensNorm(Norm):
    """Of four dimensions, otherwise than of three."""

    def forward(self, hidden_states):
        return super().forward(hidden_states if hidden_states.dim() < 4 else hidden_states.flip(1))


@pytest.mark.parametrize(
    "module",
    [
        HalvedNorm(64),
        OfConstantRowsNorm(64),
        WithConstantEpsNorm(64),
        OfClampedRowsNorm(64),
        OfFiniteRowsNorm(64),
        WithoutGradientsNorm(64),
        InEvaluationNorm(64),
        InEvaluationNorm(64).eval(),
        UnderAutocastNorm(64),
        OfLongSequencesNorm(64),
        OfLargeBatchesNorm(64),
        OfOneTokenNorm(64),
        OverTokensNorm(64),
        GatedNorm(64, "qwen3_next", "gelu"),
        nn.LayerNorm(64, bias=False),
        nn.LayerNorm(64, elementwise_affine=False),
        nn.BatchNorm1d(64, affine=False, track_running_stats=False),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_norm_that_computes_anything_else_is_left_with_the_reason(module):
    (left,) = patch(module).left
    assert left.text.startswith("no RMSNorm that is known: ")


def test_a_class_of_any_name_is_known_and_another_one_is_not_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(8))
            self.rate = 0.5

        def forward(self, x):
            return x * self.gain

    Rooted = type("Rooted", (Norm,), {})
    report = patch(nn.ModuleDict({"scale": Scale(), "rooted": Rooted(8), "linear": nn.Linear(8, 8, bias=False)}))
    assert [entry.name for entry in report.replaced] == ["rooted"]
    assert report.left == ()


def test_settings_that_change_later_run_the_class_s_own_forward():
    module = Norm(64)
    plain, x = copy.deepcopy(module), torch.randn(2, 64)
    patch(module)
    module.epsilon = plain.epsilon = 0.5  # read at each call
    assert torch.equal(module(x), plain(x))
    module.kind = plain.kind = "gemma"
    with pytest.warns(UserWarning, match="settings have changed"):
        assert torch.equal(module(x), plain(x))


CHANGES = {
    "one weight for all columns": lambda norm: setattr(norm, "weight", nn.Parameter(torch.tensor([0.5]))),
    "a weight for each token": lambda norm: setattr(norm, "weight", nn.Parameter(torch.randn(3, 1))),
    "a tensor of eps": lambda norm: setattr(norm, "epsilon", torch.tensor([0.5])),
    "an eps below zero": lambda norm: setattr(norm, "epsilon", -1e-3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_shapes_and_numbers_that_our_functions_refuse_are_left_to_the_class(change):
    module, x = Norm(64), torch.randn(3, 64)
    plain = copy.deepcopy(module)
    patch(module)
    for each in (module, plain):
        torch.manual_seed(0)
        CHANGES[change](each)
    with pytest.warns(UserWarning, match="settings have changed, or shapes"):
        found = module(x)
    assert torch.equal(found, plain(x))
    found.square().sum().backward()
    plain(x).square().sum().backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)


def test_rows_without_columns_are_left_to_the_class():
    module = Norm(0)
    patch(module)
    assert module(torch.randn(3, 0)).shape == (3, 0)


def test_to_look_at_a_model_leaves_it_and_the_random_numbers_alone():
    class NoisyNorm(Norm):
        seen = 0

        def forward(self, hidden_states):
            self.seen += 1
            return super().forward(hidden_states) + torch.randn(1)

    noisy = nn.ModuleDict({"norm": NoisyNorm(8)})
    before, weight = torch.random.get_rng_state(), noisy["norm"].weight.detach().clone()
    assert patch(noisy).left
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(noisy["norm"].weight, weight)
    assert noisy["norm"].seen == 0


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_class_is_looked_at_on_a_cpu_wherever_its_weight_is(device):
    with torch.device(device), torch.inference_mode():
        module = Norm(64)
        assert patch(module).replaced


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}, {"elementwise_affine": False}])
def test_torch_rms_norm_gives_the_same(dtype, options):
    module = nn.RMSNorm(64, **options).to(dtype)
    if module.weight is not None:
        nn.init.normal_(module.weight)
    x = 1e-3 * torch.randn(3, 64, dtype=dtype)  # so small that eps counts
    expected = module(x)
    with patch(module) as report:
        assert isinstance(module, nn.RMSNorm)
        actual = module(x)
    assert len(report.replaced) == 1
    assert type(module) is nn.RMSNorm
    assert torch.allclose(actual, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


class OfTorch(nn.Module):
    """Calls torch's function itself, and may round its result."""

    def __init__(self, width, rounds=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.eps, self.rounds = 1e-6, rounds

    def forward(self, hidden_states):
        y = nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)
        return y.to(hidden_states.dtype) if self.rounds else y


@contextlib.contextmanager
def cast_by_autocast():
    """Autocast on a CPU runs torch's rms_norm in fp32, as PyTorch has it on CUDA from 2.12 on."""

    def wide(tensor):
        return tensor if tensor is None or tensor.dtype == torch.float64 else tensor.float()

    def of_fp32(x, shape, weight=None, eps=None):
        with torch.autocast("cpu", enabled=False):
            return torch.rms_norm(wide(x), shape, wide(weight), eps)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("rms_norm", of_fp32, "AutocastCPU")
        yield


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.RMSNorm(64),
        lambda: nn.RMSNorm(64, elementwise_affine=False),
        lambda: OfTorch(64),
        lambda: OfTorch(64, rounds=True),
        lambda: Norm(64),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_norm_that_autocast_runs_in_fp32_is_fp32(make, dtypes, compiled):
    dtype, weight_dtype = (getattr(torch, each) for each in dtypes)
    module = make().to(weight_dtype)
    plain, x = copy.deepcopy(module), torch.randn(3, 64, dtype=dtype)
    report = patch(module)
    assert report.replaced
    torch.compiler.reset()
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    with cast_by_autocast(), torch.autocast("cpu", torch.bfloat16):
        y, expected = run(x), plain(x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected)
    assert not report.fell_back
    torch.testing.assert_close(module(x), plain(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_formula_of_torch_follows_autocast(dtype):
    x, weight = torch.randn(3, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    for around in (contextlib.nullcontext, cast_by_autocast):
        with around(), torch.autocast("cpu", torch.bfloat16):
            y, expected = normalise(TORCH, x, weight, None), nn.functional.rms_norm(x, (64,), weight)
        torch.testing.assert_close(y, expected)


def test_kernels_run_in_place_of_the_forward(device, monkeypatch):
    monkeypatch.setattr("npu_rms_norm.patching._recognised", {})
    module = nn.RMSNorm(64, eps=1e-6).to(device.torch)
    nn.init.normal_(module.weight)
    x = torch.randn(3, 64, device=device.torch)
    expected = module(x)
    patch(module)
    assert torch.allclose(module(x), expected, rtol=1e-5, atol=1e-6)


def test_what_is_not_known_is_left_and_named():
    class Own(nn.RMSNorm):
        """Leaves torch's forward alone."""

    gated, quantised, hooked = GatedNorm(8, "qwen3_next", "gelu"), Norm(8), nn.RMSNorm(8)
    quantised.weight = nn.Parameter(torch.ones(8, dtype=torch.int8), requires_grad=False)
    hooked.forward = lambda x: x
    modules = {
        "ours": RMSNorm(8),
        "layer_norm": nn.LayerNorm(8),
        "gated": gated,
        "own": Own(8),
        "two": nn.RMSNorm((2, 8)),
        "quantised": quantised,
        "hooked": hooked,
        "linear": nn.Linear(8, 8),
        "known": nn.RMSNorm(8),
    }
    model = nn.ModuleDict(modules)
    before = {name: type(module) for name, module in modules.items()}
    report = patch(model)
    assert [entry.name for entry in report.replaced] == ["own", "known"]
    reasons = {entry.name: entry.text for entry in report.left}
    assert reasons.keys() == {"ours", "layer_norm", "gated", "two", "quantised", "hooked"}
    assert "2 dimensions" in reasons["two"]
    assert "int8" in reasons["quantised"]
    assert "forward was replaced" in reasons["hooked"]
    assert "layer_norm" in str(report)
    assert all(type(modules[name]) is before[name] for name in reasons)
    assert {entry.text for entry in patch(model).left if entry.name == "known"} == {"it is patched already"}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_can_be_copied_and_pickled(duplicate):
    module = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8))
    report = patch(module)
    twin = duplicate(module)
    assert type(twin[0]) is type(module[0])
    x = torch.randn(2, 8)
    assert torch.equal(twin(x), module(x))
    report.undo()
    assert type(module[0]) is nn.RMSNorm
    assert type(twin[0]) is not nn.RMSNorm


def test_a_class_of_ones_own_from_a_patched_one_is_copied_as_itself():
    module = nn.Sequential(nn.RMSNorm(8))
    patch(module)

    class Own(type(module[0])):
        pass

    twin = copy.deepcopy(Own(8))
    assert type(twin) is Own
    assert torch.equal(twin(torch.ones(2, 8)), module(torch.ones(2, 8)))


def test_a_release_of_kernels_that_transformers_does_not_take_is_named(monkeypatch):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr("transformers.utils.import_utils.is_kernels_available", lambda: False)
    said = f"transformers {transformers.__version__} takes kernels>=[0-9.]+,<.*patch"
    with pytest.raises(ImportError, match=said):
        use_kernels()


OTHER_PATHS = {
    "class": lambda module: replaced(nn.RMSNorm, "forward", tripled),
    "function": lambda module: replaced(nn.functional, "rms_norm", tripled),
    "mode of functions": lambda module: FunctionMode(),
    "weight": lambda module: replaced(module, "weight", lambda weight: nn.Parameter(Packed(weight.detach()), False)),
}


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_what_torch_would_see_or_change_is_left_to_torch(path):
    module, x = nn.RMSNorm(8), torch.randn(2, 8)
    expected = 3 * module(x)
    report = patch(module)
    with OTHER_PATHS[path](module), pytest.warns(UserWarning, match=r"the model \(RMSNorm\) computes without our operators"):
        assert torch.allclose(module(x), expected)
    assert len(report.fell_back) == 1
    assert torch.allclose(module(x), expected / 3)


def test_a_forward_of_the_class_that_was_replaced_is_kept():
    known = type("OtherNorm", (Norm,), {"forward": Norm.forward})
    patched, x = known(8), torch.ones(2, 8)
    report = patch(patched)
    with replaced(known, "forward", lambda forward: lambda self, hidden_states: 3 * hidden_states):
        with pytest.warns(UserWarning, match="forward of the class OtherNorm was replaced"):
            assert torch.equal(patched(x), 3 * x)
        assert "class OtherNorm was replaced" in patch(known(8)).left[0].text
    assert "class OtherNorm was replaced" in str(report)
    assert not torch.equal(patched(x), 3 * x)


@pytest.mark.parametrize(
    ("module", "given"),
    [(Norm(8), "hidden_states"), (GatedNorm(8, "mamba", "silu", 8), "hidden_states"), (nn.RMSNorm(8), "x")],
)
def test_arguments_by_name(module, given):
    x = torch.randn(2, 8)
    patch(module)
    assert torch.equal(module(**{given: x}), module(x))
    with pytest.raises(TypeError):
        module(rows=x)


def test_a_subclass_of_torch_s_norm_asks_for_torch_s_function():
    module, x = type("Own", (nn.RMSNorm,), {})(8), torch.randn(2, 8)
    assert patch(module).replaced
    with replaced(nn.functional, "rms_norm", tripled), pytest.warns(UserWarning, match="rms_norm was replaced"):
        assert torch.allclose(module(x), 3 * nn.RMSNorm(8)(x) / 3)


def test_a_class_is_known_under_another_default_device_and_dtype(monkeypatch):
    monkeypatch.setattr("npu_rms_norm.patching._recognised", {})
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            report = patch(nn.Sequential(Norm(64), Norm(64, "gemma")))
    finally:
        torch.set_default_dtype(default)
    assert ['casting_mode="llama", offset=0.0' in str(report), 'casting_mode="gemma", offset=1.0' in str(report)] == [
        True
    ] * 2
