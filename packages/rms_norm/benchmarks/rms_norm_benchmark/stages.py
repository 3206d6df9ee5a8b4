"""Where the host's time of one call goes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import npu_rms_norm
import torch
from npu_bench import Stage, UnavailableError
from npu_rms_norm.call import Forward
from npu_rms_norm.operator import FORWARD
from npu_tiling import device_for
from torch import Tensor

from .formulas import EPS


def host_stages(device: torch.device, x: Tensor, weight: Tensor) -> Sequence[Stage]:
    """From the Python call to the launch, each stage called by itself, with the arguments that it gets."""
    chip = device_for(device)
    if chip is None:
        raise UnavailableError("a CPU runs plain PyTorch and launches nothing")
    plain_x, plain_weight = x.detach(), weight.detach()
    call = Forward(
        x=plain_x,
        residual=None,
        gate=None,
        weight=plain_weight,
        bias=None,
        eps=EPS,
        offset=0.0,
        casting_mode="llama",
        activation="silu",
        norm_before_gate=True,
        in_place=False,
        dtype=x.dtype,
        return_fp32=False,
        save_rstd=True,
    )
    return [
        Stage("public function, with gradients", partial(npu_rms_norm.rms_norm, x, weight, EPS), ["implementation"]),
        Stage("public function, no gradients", partial(npu_rms_norm.rms_norm, plain_x, plain_weight, EPS)),
        Stage(
            "through the dispatcher",
            partial(torch.ops.npu_rms_norm.rms_norm, *call._replace(x=x, weight=weight)),
        ),
        Stage("implementation", partial(FORWARD.run, *call), ["key of the call", "allocation of y and rstd"]),
        Stage("key of the call", partial(FORWARD.signature.key, *call)),
        Stage("allocation of y and rstd", partial(_allocate, plain_x)),
        Stage("plan of a new key", partial(FORWARD.plan, call, chip)),
    ]


def _allocate(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
