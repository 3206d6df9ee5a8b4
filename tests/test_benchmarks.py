"""The operators' benchmark scripts: their sweeps, what they count, and providers that only an NPU has."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import npu_bench
import pytest
import torch
from npu_bench.checks import default_tolerance, expect, verify
from npu_bench.runner import make_inputs
from npu_bench.scripts import load

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(ROOT.glob("packages/*/benchmarks/*.py"))
CPU = torch.device("cpu")
MODES = ("forward", "backward", "no-grad-forward")


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.stem)
def benchmark(request):
    return load(request.param)


def test_every_operator_has_a_benchmark():
    assert {script.stem for script in SCRIPTS} == {folder.name for folder in (ROOT / "packages").iterdir()}


AXES = {"tokens", "hidden", "vocabulary", "blocks"}


def test_sweeps_go_over_tokens_hidden_sizes_and_models(benchmark):
    assert {"tokens", "hidden", "model"} <= set(benchmark.sweeps)
    for name, sweep in benchmark.sweeps.items():
        positions = [case.position for case in sweep.cases]
        if name == "model":
            assert all(isinstance(position, str) for position in positions)
        if name in AXES:  # two decades, in order
            assert positions == sorted(positions)
            assert positions[-1] >= 100 * positions[0]


def test_work_grows_along_every_axis(benchmark):
    for name, sweep in benchmark.sweeps.items():
        if name == "model":
            continue
        for mode in MODES:
            counted = [benchmark.bytes_moved(case, mode) + benchmark.operations(case, mode) for case in sweep.cases]
            assert counted == sorted(counted)
            assert counted[0] > 0


@pytest.mark.parametrize(
    ("script", "sizes"),
    [
        ("rms_norm", {"shape": (4, 64), "storage": (4, 64)}),
        ("embedding", {"n": 8, "rows": 16, "width": 32, "dtype": torch.bfloat16, "kind": "zipf"}),
        ("attn_res", {"tokens": 4, "blocks": 3, "width": 64, "listed": True}),
        ("attn_res", {"tokens": 4, "blocks": 3, "width": 64, "listed": False, "bank": True}),
        ("fused_linear_cross_entropy", {"tokens": 8, "width": 16, "vocabulary": 32}),
    ],
)
def test_vendors_operators_are_providers_on_an_npu(script, sizes, monkeypatch):
    """With a stand-in for torch_npu, whose operators have the signatures of its documentation."""
    vendor = ModuleType("torch_npu")
    vendor.npu_rms_norm = lambda x, gamma, epsilon=1e-6: (torch.nn.functional.rms_norm(x, gamma.shape, gamma, epsilon), None)
    vendor.npu_cross_entropy_loss = lambda logits, target: (
        torch.nn.functional.cross_entropy(logits, target),
        None,
        None,
        None,
    )
    monkeypatch.setitem(sys.modules, "torch_npu", vendor)
    benchmark = load(ROOT / "packages" / script / "benchmarks" / f"{script}.py")
    case = npu_bench.Case("tiny", sizes)
    inputs = make_inputs(benchmark, case, CPU)
    expected, seeds = expect(benchmark.reference, inputs, torch.float64)
    npu = SimpleNamespace(type="npu")
    for name in {"ours", "torch", "torch_npu"} & set(benchmark.providers):  # torch's embedding on an NPU is the vendor's
        verdict = verify(benchmark.providers[name](case, npu), inputs, seeds, expected, 2**-5)
        assert verdict.right, (name, verdict.reason)
    if "torch_npu" in benchmark.providers:
        del vendor.npu_rms_norm, vendor.npu_cross_entropy_loss
        vendor.__version__ = "2.1"
        with pytest.raises(npu_bench.UnavailableError, match=r"torch_npu 2\.1 has no npu_"):
            benchmark.providers["torch_npu"](case, npu)
        with pytest.raises(npu_bench.UnavailableError):
            benchmark.providers["torch_npu"](case, CPU)


BAGS = load(ROOT / "packages" / "embedding" / "benchmarks" / "embedding_benchmark" / "bags.py")
OPTION_BYTES = {"weighted": 4, "dequantised": 2}  # for an index


@pytest.mark.parametrize("case", BAGS.cases, ids=lambda case: case.name)
def test_bags_are_right_and_their_bytes_count(case):
    tiny = npu_bench.Case(case.name, {**case.parameters, "bags": 7, "rows": 50, "width": 32})
    inputs = make_inputs(BAGS, tiny, CPU)
    expected, seeds = expect(BAGS.reference, inputs, torch.float64)
    for name, provider in BAGS.providers.items():
        verdict = verify(provider(tiny, CPU), inputs, seeds, expected, default_tolerance(inputs))
        assert verdict.right, (name, verdict.reason)
    n, weight = inputs["indices"].numel(), inputs["weight"]
    bytes_of_one = weight.shape[1] * weight.element_size() + inputs["indices"].element_size()
    result = provider(tiny, CPU)(*inputs.values())
    if case["kind"] != "mean":  # whose bags have lengths from a seed
        assert BAGS.bytes_moved(tiny, "forward") - OPTION_BYTES.get(case["kind"], 0) * n == n * bytes_of_one + result.nbytes


CROSS_ENTROPY = ROOT / "packages" / "fused_linear_cross_entropy" / "benchmarks" / "fused_linear_cross_entropy.py"
ATTN_RES = ROOT / "packages" / "attn_res" / "benchmarks" / "attn_res.py"
RMS_NORM = ROOT / "packages" / "rms_norm" / "benchmarks" / "rms_norm.py"


@pytest.mark.parametrize("logit_bytes", [2**31, 101 * 8 * 5])
def test_exact_cross_entropy_is_the_definition_whatever_logits_are_in_memory_at_a_time(logit_bytes):
    load(CROSS_ENTROPY)
    from linear_cross_entropy_benchmark.exact import ExactLoss

    x, weight = (torch.randn(n, 16, dtype=torch.float64).requires_grad_() for n in (37, 101))
    target = torch.randint(0, 101, (37,))
    target[::3] = -100
    right = 2 * torch.nn.functional.cross_entropy(x @ weight.t(), target)
    found = 2 * ExactLoss.apply(x, weight, target, logit_bytes)
    torch.testing.assert_close(found, right)
    for one, other in zip(*(torch.autograd.grad(loss, (x, weight)) for loss in (found, right)), strict=True):
        torch.testing.assert_close(one, other)


def test_cross_entropys_peers_are_called_as_their_signatures_say(monkeypatch):
    """With stand-ins for the packages, whose functions have the parameters of liger-kernel 0.8.5 and quack-kernels 0.6.5."""
    asked = []

    def loss(x, weight, target):
        return torch.nn.functional.cross_entropy(x @ weight.t(), target)

    def liger(x, weight, target, bias=None, ce_weight=None, ignored=-100, z=0.0, smoothing=0.0, reduction="mean", *more):
        (softcap, return_z, accumulator, scaling, accuracy, predicted, kernels, mode) = more or (None,) * 8
        asked.append(kernels or "default")
        assert (bias, ce_weight, ignored, z, smoothing, reduction) == (None, None, -100, 0.0, 0.0, "mean")
        assert not any((softcap, return_z, accumulator, scaling, accuracy, predicted, mode))
        return loss(x, weight, target), None, None, None

    def sm90(x, weight, target, ignore_index=-100, reduction="mean"):
        asked.append("sm90")
        return loss(x, weight, target)

    def chunked(x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean"):
        asked.append(chunk_size)
        return loss(x, weight, target)

    def whole(x, weight, bias, target, ignore_index=-100, reduction="mean", inplace_backward=False):
        asked.append("whole")
        assert bias is None
        return loss(x, weight, target)

    default, hopper = SimpleNamespace(apply=liger), SimpleNamespace(apply=sm90)
    modules = {
        "liger_kernel.ops": {"LigerFusedLinearCrossEntropyFunction": default},
        "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90": {"LigerFusedLinearCrossEntropySM90Function": hopper},
        "liger_kernel.ops.cutile.ops.fused_linear_cross_entropy": {"LigerFusedLinearCrossEntropyFunction": default},
        "cutlass.cute": {},
        "quack.linear_cross_entropy": {"chunked_linear_cross_entropy": chunked, "linear_cross_entropy_func": whole},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    benchmark, cuda = load(CROSS_ENTROPY), SimpleNamespace(type="cuda")
    case = npu_bench.Case("tiny", {"tokens": 8, "width": 16, "vocabulary": 32})
    inputs = make_inputs(benchmark, case, CPU)
    expected, seeds = expect(benchmark.reference, inputs, torch.float64)
    peers = [name for name in benchmark.providers if name.startswith(("liger", "quack"))]
    for name in peers:
        assert verify(benchmark.providers[name](case, cuda), inputs, seeds, expected, 2**-5).right, name
        with pytest.raises(npu_bench.UnavailableError):
            benchmark.providers[name](case, CPU)
    # Each is called with gradients and without.
    assert asked[::2] == ["default", "nvidia-cutedsl", "sm90", "default", 4096, 2048, "whole"]
    odd = npu_bench.Case("odd", {"tokens": 8, "width": 16, "vocabulary": 33})
    with pytest.raises(npu_bench.UnavailableError, match="multiples of 8"):
        benchmark.providers["quack"](odd, cuda)


def test_rms_norms_peer_is_called_as_its_signature_says(monkeypatch):
    """With a stand-in for quack-kernels 0.6.5."""

    def rmsnorm(x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6, prenorm=False):
        assert (bias, residual, out_dtype, residual_dtype, prenorm) == (None, None, None, None, False)
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    module = ModuleType("quack")
    module.rmsnorm = rmsnorm
    monkeypatch.setitem(sys.modules, "quack", module)
    benchmark, cuda = load(RMS_NORM), SimpleNamespace(type="cuda")
    case = npu_bench.Case("tiny", {"shape": (8, 64), "storage": (8, 64)})
    inputs = make_inputs(benchmark, case, CPU)
    expected, seeds = expect(benchmark.reference, inputs, torch.float64)
    assert verify(benchmark.providers["quack"](case, cuda), inputs, seeds, expected, 2**-5).right
    with pytest.raises(npu_bench.UnavailableError):
        benchmark.providers["quack"](case, CPU)
    gated = npu_bench.Case("gated", {"shape": (8, 2, 64), "storage": (8, 2, 64), "gated": True})
    with pytest.raises(npu_bench.UnavailableError, match="no gate"):
        benchmark.providers["quack"](gated, cuda)


def test_attention_residuals_peers_are_called_as_their_signatures_say(monkeypatch):
    """With stand-ins for liger-kernel 0.8.5 and fla-core 0.6.0: blocks listed, stacked, and of a bank."""
    asked = []

    def mixed(v, query, weight, eps):
        return load(ATTN_RES).reference(v.double(), query.double(), weight.double()).to(v.dtype)

    def liger(stacked, query, weight, eps):
        assert eps == 1e-6
        return mixed(stacked, query, weight, eps)

    def fla(name):
        def fused(query, residuals, rms_weight, output_rms_weight=None, rms_eps=1e-5, scale=1.0, return_weights=False):
            asked.append(name)
            assert (rms_eps, scale, return_weights) == (1e-6, 1.0, False)
            h = mixed(torch.stack(tuple(residuals)), query, rms_weight, rms_eps)
            if output_rms_weight is None:
                return h
            return torch.nn.functional.rms_norm(h.double(), h.shape[-1:], output_rms_weight.double(), rms_eps).to(h.dtype)

        return fused

    class Gluon:
        fused_attnres = staticmethod(fla("gluon"))

        def fused_attnres_verifier(self, query, residuals, rms_weight, output_rms_weight=None):
            assert query.shape == rms_weight.shape == residuals[0].shape[-1:]
            return (True, None) if query.numel() >= 64 else (False, "rows must have 128 bytes")

    modules = {
        "liger_kernel.ops": {"LigerAttnResFunction": SimpleNamespace(apply=liger)},
        "fla.ops.attnres": {"fused_attnres": fla("triton")},
        "fla.ops.attnres.backends.gluon": {"AttnResGluonBackend": Gluon},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    benchmark = load(ATTN_RES)
    monkeypatch.setattr(torch, "empty", lambda *sizes, device, **more: torch.zeros(*sizes, **more))
    cuda = SimpleNamespace(type="cuda")
    sizes = {"tokens": 4, "blocks": 3, "width": 64, "listed": False}
    for more in ({}, {"listed": True}, {"bank": True}):
        case = npu_bench.Case("tiny", {**sizes, **more})
        inputs = make_inputs(benchmark, case, CPU)
        expected, seeds = expect(benchmark.reference, inputs, torch.float64)
        for name in ("liger", "fla", "fla_gluon"):
            with pytest.raises(npu_bench.UnavailableError):
                benchmark.providers[name](case, CPU)
            if name == "liger" and "bank" in more:
                continue
            verdict = verify(benchmark.providers[name](case, cuda), inputs, seeds, expected, 2**-5)
            assert verdict.right, (name, more, verdict.reason)
    assert asked == ["triton", "triton", "gluon", "gluon"] * 3  # each with gradients and without
    narrow = npu_bench.Case("narrow", {**sizes, "width": 32})
    with pytest.raises(npu_bench.UnavailableError, match="128 bytes"):
        benchmark.providers["fla_gluon"](narrow, cuda)
    monkeypatch.setenv("FLA_GLUON", "1")
    with pytest.raises(npu_bench.UnavailableError, match="FLA_GLUON"):
        benchmark.providers["fla"](narrow, cuda)


def test_heads_of_models_are_cases_from_1024_tokens_to_65536():
    names = {case.name for case in load(CROSS_ENTROPY).sweeps["heads"].cases}
    assert {"1024x4096x128256", "16384x2880x201088", "65536x7168x129280", "32768x1024x151936"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small_block", "small_model"])
def test_block_with_our_operators_is_one_graph_and_right(name):
    benchmark = load(ROOT / "tools" / "bench_block.py")
    case = next(case for case in benchmark.cases if case.name == name)
    inputs = make_inputs(benchmark, case, CPU)
    expected, seeds = expect(benchmark.reference, inputs, torch.float64)
    forward = benchmark.providers["ours"](case, CPU)
    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True, dynamic=False, backend="aot_eager")
    for provider in (benchmark.providers["plain"](case, CPU), compiled):
        verdict = verify(provider, inputs, seeds, expected, benchmark.tolerance(case))
        assert verdict.right, verdict.reason


MEASURED = ("block", "host_npu")  # in tools/results; the others are predicted
HISTORIES = sorted(
    [
        *ROOT.glob("packages/*/benchmarks/results/**/*.json"),
        *(ROOT / "tools" / "results" / f"{name}.json" for name in MEASURED),
    ]
)


@pytest.mark.parametrize("history", HISTORIES, ids=lambda path: str(path.relative_to(ROOT)))
def test_records_name_a_commit_or_say_that_none_has_what_was_measured(history):
    for record in json.loads(history.read_text()):
        assert re.fullmatch(r"\d+\.\d+\.\d+\+(g[0-9a-f]{7,}(\.dirty)?|unversioned)(\.\w+)*", record["version"])
