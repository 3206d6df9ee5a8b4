"""How many pieces of work a call puts into the device's queue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .devices import Device, over_stand_in
from .timing import Quantiles

_CALLS = 2


def counts_launches(device: Device) -> bool:
    """Whether somebody counts a device's launches."""
    return device.kind == "cuda" or (device.kind == "npu" and over_stand_in())


def count_launches(call: Callable[[], Any], device: Device) -> Quantiles | None:
    """Kernels, copies and fills of one call, over a few calls.

    CUDA's are counted by PyTorch's profiler, those over npu-offline's stand-in of CANN by that; None where nobody counts.
    """
    if device.kind == "cuda":
        return Quantiles.of([_profiled(call, device) for _ in range(_CALLS)])
    if counts_launches(device):
        return Quantiles.of([_counted(call, device) for _ in range(_CALLS)])
    return None


def _profiled(call: Callable[[], Any], device: Device) -> int:
    device.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        device.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiler.events() or ())


def _counted(call: Callable[[], Any], device: Device) -> int:
    from npu_offline.cann import launched

    device.synchronize()  # torch_npu has a queue of its own, and a thread that empties it
    before = launched()
    call()
    device.synchronize()
    return launched() - before


def returning_at_once(device: Device) -> contextlib.AbstractContextManager[None]:
    """Over the stand-in of CANN launches do nothing, so that no host time is a kernel's; elsewhere nothing changes."""
    if device.kind == "npu" and over_stand_in():
        from npu_offline.cann import kernels_do_nothing

        return kernels_do_nothing()
    return contextlib.nullcontext()


def one_operator(device: torch.device) -> Callable[[], Any]:
    """One operator of PyTorch, with which host times of different machines can be compared."""
    a, b = torch.ones(2, 16, 16, device=device)
    return lambda: torch.mm(a, b)


def empty_function(device: torch.device) -> Callable[[], Any]:
    """An autograd function written in Python that computes nothing, forward and backward of two inputs.

    No operator whose gradient is written in Python costs the host less.
    """
    x, weight = torch.ones(2, 16, 16, device=device).unbind()
    leaves, seed = (x.requires_grad_(), weight.requires_grad_()), torch.ones_like(x)
    return lambda: torch.autograd.grad(_Empty.apply(*leaves), leaves, seed)


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, weight = ctx.saved_tensors
        return dy, weight
