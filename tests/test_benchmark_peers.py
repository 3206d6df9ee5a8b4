"""The peers of the operators' benchmarks: called as their signatures say, and right."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import npu_bench
import pytest
import torch
from npu_bench.checks import expect, verify
from npu_bench.runner import make_inputs
from npu_bench.scripts import load

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


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
