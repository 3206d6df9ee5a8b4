"""RMSNorm as PyTorch sees it: the questions of testing/operators, and what is this package's alone."""

import copy
from functools import partial

import pytest
import torch
from npu_rms_norm import (
    GemmaRMSNorm,
    LlamaRMSNorm,
    Olmo2RMSNorm,
    Qwen3RMSNorm,
    RMSNorm,
    add_rms_norm,
    add_rms_norm_dynamic_quant,
    gated_rms_norm,
    qk_rms_norm,
    rms_norm,
    rms_norm_dynamic_quant,
)

from testing.operators import *  # noqa: F403
from testing.operators import Case, Input

OPS = torch.ops.npu_rms_norm
SHARDED_AT = ("cpu", "cuda")  # sharding_worker.py

FACTORS = {"offset": 0.5, "eps": 1e-2}
MODES = ("gemma", "none")


def formula(x, weight=1.0, offset=0.0, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + weight)


def modes(x):
    return tuple(rms_norm(x, casting_mode=mode) for mode in MODES)


def heads_formula(x, weight, bias):
    return formula(x, weight) + bias


def added(x, residual, weight):
    return formula(x + residual, weight, **FACTORS), x + residual


def gated(x, gate, weight):
    return formula(x, weight) * gate * gate.sigmoid()


def gated_first(x, gate, weight):
    return formula(x * gate.sigmoid(), weight)


def qkv_formula(qkv, q_weight, k_weight):
    q, k, v = qkv.unflatten(-1, (4, 8)).split((2, 1, 1), -2)
    return formula(q, q_weight), formula(k, k_weight), v


MODULE = RMSNorm(8)


def together_formula(qkv, q_weight, k_weight):
    q, k, v = qkv.split((16, 8, 8), -1)
    return formula(q, q_weight).unflatten(-1, (2, 8)), formula(k, k_weight).unflatten(-1, (1, 8)), v.unflatten(-1, (1, 8))


def module(x, weight):
    return torch.func.functional_call(MODULE, {"weight": weight}, (x,))


def rows(n):
    return (n, 2, 8), (8,)


def rows_twice(n):
    return (n, 2, 8), (n, 2, 8), (8,)


STATELESS = frozenset({"test_a_trace_has_the_operator_and_its_gradient"})  # torch.func.functional_call is not traced
CASES = (
    Case("rms_norm", rms_norm, rows, formula, saved=(6, 8, 48)),
    Case("without weight", rms_norm, lambda n: ((n, 8),), formula, saved=(3, 24), option=True),
    Case("in place", partial(rms_norm, offset=1.0, in_place=True), rows, partial(formula, offset=1.0)),
    *(Case(m, partial(rms_norm, **FACTORS, casting_mode=m), rows, partial(formula, **FACTORS), option=True) for m in MODES),
    Case("modes alone", modes, lambda n: ((n, 8),), lambda x: (formula(x), formula(x)), option=True),
    Case("heads", lambda x, w, b: rms_norm(x, w, bias=b), lambda n: ((n, 2, 8), (2, 8), (2, 8)), heads_formula, option=True),
    Case("bias", lambda x, b: rms_norm(x, bias=b), rows, lambda x, b: formula(x, 1.0) + b),
    Case("in fp32 too", partial(rms_norm, return_fp32=True), rows, lambda x, w: (formula(x, w), formula(x, w))),
    Case("add_rms_norm", partial(add_rms_norm, **FACTORS), rows_twice, added, saved=(6, 8, 48)),
    Case("gated", gated_rms_norm, rows_twice, gated),
    Case(
        "gated first",
        partial(gated_rms_norm, activation="sigmoid", norm_before_gate=False),
        rows_twice,
        gated_first,
        option=True,
    ),
    Case(
        "qk_rms_norm",
        lambda qkv, q, k: qk_rms_norm(qkv, q, k, 2, 1),
        lambda n: ((n, 32), (8,), (8,)),
        qkv_formula,
        saved=(3, 6, 8, 8, 96),
        without=frozenset({"test_forward_mode_is_that_of_the_definition"}),  # its gradient has none
    ),
    Case(
        "heads together",
        lambda qkv, q, k: qk_rms_norm(qkv, q, k, 2, 1),
        lambda n: ((n, 32), (16,), (8,)),
        together_formula,
        option=True,
        without=frozenset({"test_forward_mode_is_that_of_the_definition"}),
    ),
    Case("q alone", lambda qkv: qk_rms_norm(qkv, None, None, 2, 1).q, lambda n: ((n, 32),), option=True),
    Case("k and v", lambda qkv: qk_rms_norm(qkv, None, None, 2, 1)[1:], lambda n: ((n, 32),), option=True),
    Case("16 and 32 bits", partial(add_rms_norm, dtype=torch.bfloat16, return_fp32=True), rows_twice),
    Case("int8", rms_norm_dynamic_quant, lambda n: (Input((n, 8)), Input((8,)))),
    Case("add, int8", add_rms_norm_dynamic_quant, lambda n: ((n, 8), (n, 8), Input((8,))), tangents=False, option=True),
    Case("module", module, rows, formula, without=STATELESS),
)


def _batches():
    narrow, fp32 = torch.bfloat16, torch.float32
    for width, dtype in ((64, narrow), (100, fp32), (1000, torch.float16), (4096, narrow), (40000, fp32)):
        one, two = (lambda n, w=width, k=k: (*[(n, w)] * k, (w,)) for k in (1, 2))
        yield Case(f"{width}", rms_norm, one, dtype=dtype, tokens=131)
        if width in (64, 4096):
            yield Case(f"{width}, none", partial(rms_norm, casting_mode="none"), one, dtype=dtype, tokens=131)
        yield Case(f"{width}, residual", add_rms_norm, two, dtype=dtype, tokens=131)


BATCHES = tuple(_batches())


def test_module_is_a_drop_in(npu_place):
    ours = RMSNorm(64, eps=1e-5, device=npu_place.torch, dtype=torch.bfloat16)
    theirs = torch.nn.RMSNorm(64, eps=1e-5, device=npu_place.torch, dtype=torch.bfloat16)
    torch.nn.init.normal_(theirs.weight, generator=_seeded(npu_place.torch))
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == ["weight"]
    x = Case("", rms_norm, rows).draw(npu_place.torch, dtype=torch.bfloat16).tensors[0].repeat(1, 1, 8)
    assert torch.allclose(ours(x), theirs(x), rtol=2**-6)
    plain = RMSNorm(64, elementwise_affine=False)
    assert list(plain.parameters()) == []
    assert copy.deepcopy(ours).weight.dtype == torch.bfloat16
    assert "64, eps=1e-05" in repr(ours)


def _seeded(device):
    return torch.Generator(device).manual_seed(0)


@pytest.mark.parametrize(
    ("module", "offset", "mode"),
    [(LlamaRMSNorm, 0.0, "llama"), (Qwen3RMSNorm, 0.0, "llama"), (GemmaRMSNorm, 1.0, "gemma"), (Olmo2RMSNorm, 0.0, "gemma")],
)
def test_presets_start_at_one_and_compute_their_model(npu_place, module, offset, mode):
    norm = module(64, eps=1e-5, device=npu_place.torch)
    x, residual = torch.randn(2, 5, 64, device=npu_place.torch, generator=_seeded(npu_place.torch))
    assert torch.equal(norm(x), rms_norm(x, eps=1e-5))
    torch.nn.init.normal_(norm.weight, generator=_seeded(npu_place.torch))
    options = {"eps": 1e-5, "offset": offset, "casting_mode": mode}
    assert torch.equal(norm(x), rms_norm(x, norm.weight, **options))
    for actual, expected in zip(norm(x, residual), add_rms_norm(x, residual, norm.weight, **options), strict=True):
        assert torch.equal(actual, expected)
