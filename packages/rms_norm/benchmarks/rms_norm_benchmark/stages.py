"""Where the host's time of one call goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import npu_rms_norm
import torch
from npu_bench import Stage, UnavailableError
from npu_rms_norm.calls import Forward
from npu_rms_norm.launch import forward as launch
from npu_rms_norm.launch.forward import launch_forward
from npu_rms_norm.launch.plan import KERNELS
from npu_rms_norm.operators import OPERATORS
from npu_tiling import device_for
from npu_tiling.pytorch.tensors import allocate
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
    forward = partial(launch_forward, call, chip)
    captured = _arguments(forward, (launch, "plan_forward"), (KERNELS, "launch"))
    implementation = partial(OPERATORS.below_autograd, "rms_norm", *call)
    return [
        Stage("public function, with gradients", partial(npu_rms_norm.rms_norm, x, weight, EPS), ["implementation"]),
        Stage("public function, no gradients", partial(npu_rms_norm.rms_norm, plain_x, plain_weight, EPS)),
        Stage(
            "through the dispatcher",
            partial(torch.ops.npu_rms_norm.rms_norm, *call._replace(x=x, weight=weight)),
        ),
        Stage("implementation", implementation, ["launch.forward"]),
        Stage("launch.forward", forward, ["allocation of y and rstd", "plan look-up", "kernel launch"]),
        Stage("allocation of y and rstd", partial(_allocate, plain_x)),
        Stage("plan look-up", captured["plan_forward"]),
        Stage("kernel launch", captured["launch"]),
    ]


def _allocate(x: Tensor) -> tuple[Tensor, Tensor]:
    return allocate(x, x.shape, x.dtype), allocate(x, x.shape[:-1], torch.float32)


def _arguments(call: Callable[[], Any], *functions: tuple[Any, str]) -> dict[str, Callable[[], Any]]:
    """The calls that `call` makes of these functions, ready to be made again; each is given by its owner and name."""
    captured: dict[str, Callable[[], Any]] = {}
    for owner, name in functions:
        function = getattr(owner, name)
        with mock.patch.object(owner, name, wraps=function) as spy:
            call()
        captured[name] = partial(function, *spy.call_args.args, **spy.call_args.kwargs)
    return captured
