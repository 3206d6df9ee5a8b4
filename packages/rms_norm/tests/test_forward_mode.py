"""Forward-mode differentiation, Hessians and vmap: as of the same formula in PyTorch's operators, on every place."""

import pytest
import torch
from npu_rms_norm import RMSNorm, add_rms_norm, gated_rms_norm, rms_norm

from testing import forward_mode


def formula(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def module(x, weight):
    return torch.func.functional_call(RMSNorm(8), {"weight": weight}, (x,))


def gated(x, gate, weight):
    return formula(x, weight) * gate * gate.sigmoid()


def gated_first(x, gate, weight):
    return formula(x * gate.sigmoid(), weight)


CALLS = {
    "rms_norm": (rms_norm, formula, [(3, 8), (8,)]),
    "in place": (lambda x, w: rms_norm(x, w, in_place=True), formula, [(3, 8), (8,)]),
    "add_rms_norm": (
        lambda x, residual, w: torch.cat(add_rms_norm(x, residual, w)),
        lambda x, residual, w: torch.cat([formula(x + residual, w), x + residual]),
        [(3, 8), (3, 8), (8,)],
    ),
    "in fp32 too": (
        lambda x, w: torch.cat([part.double() for part in rms_norm(x, w, return_fp32=True)]).to(x.dtype),
        lambda x, w: torch.cat([formula(x, w)] * 2),
        [(3, 8), (8,)],
    ),
    "gated": (gated_rms_norm, gated, [(3, 8), (3, 8), (8,)]),
    "gated first": (
        lambda x, gate, w: gated_rms_norm(x, gate, w, activation="sigmoid", norm_before_gate=False),
        gated_first,
        [(3, 8), (3, 8), (8,)],
    ),
    "module": (module, formula, [(3, 8), (8,)]),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("taken", forward_mode.TAKEN)
@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_is_that_of_the_formula(device, what, taken):
    dtype = torch.float64 if device.name == "cpu" else torch.float32
    forward_mode.check(*CALLS[what], taken, device.torch, dtype)
