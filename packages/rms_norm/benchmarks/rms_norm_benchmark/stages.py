"""Where the host's time of one call goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import npu_rms_norm
import torch
from npu_bench import Stage, UnavailableError
from npu_rms_norm import launch
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
    options = (EPS, 0.0, "llama", x.dtype, False)
    plain_x, plain_weight = x.detach(), weight.detach()
    forward = partial(launch.forward.launch_forward, plain_x, None, plain_weight, None, None, *options, True, chip)
    captured = _arguments(forward, (launch.forward, "plan_strided_rows"), (launch.arguments.KERNELS, "launch"))
    implementation = partial(
        OPERATORS.below_autograd, "rms_norm", plain_x, plain_weight, None, *options[:3], False, *options[3:], True
    )
    return [
        Stage("public function, with gradients", partial(npu_rms_norm.rms_norm, x, weight, EPS), ["implementation"]),
        Stage("public function, no gradients", partial(npu_rms_norm.rms_norm, plain_x, plain_weight, EPS)),
        Stage(
            "through the dispatcher",
            partial(torch.ops.npu_rms_norm.rms_norm, x, weight, None, *options[:3], False, *options[3:], False),
        ),
        Stage("implementation", implementation, ["launch.forward"]),
        Stage("launch.forward", forward, ["allocation of y and rstd", "plan look-up", "kernel launch"]),
        Stage("allocation of y and rstd", partial(_allocate, plain_x)),
        Stage("plan look-up", captured["plan_strided_rows"]),
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
