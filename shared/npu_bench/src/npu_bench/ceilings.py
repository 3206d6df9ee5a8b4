"""What the device reaches at best, measured in the same run as what is compared with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .devices import Device
from .timing import device_times

_BUDGET_S = 0.2


@dataclass(frozen=True)
class Ceilings:
    """Rates of the device.

    Attributes:
        copy_gbs: GB/s of copying a large buffer, bytes read and bytes written both counted.
        matmul_tflops: TFLOP/s of a large square matrix product; None where operations do not count.
    """

    copy_gbs: float
    matmul_tflops: float | None = None

    def floor_ms(self, bytes_moved: int, operations: int) -> float:
        """The time that the bytes, or the operations, take at these rates: the larger."""
        return max(bytes_moved / self.copy_gbs / 1e6, self._arithmetic_ms(operations))

    def bound_by_operations(self, bytes_moved: int, operations: int) -> bool:
        return self._arithmetic_ms(operations) > bytes_moved / self.copy_gbs / 1e6

    def _arithmetic_ms(self, operations: int) -> float:
        return operations / self.matmul_tflops / 1e9 if self.matmul_tflops else 0.0


def measure_ceilings(device: Device, matmul: bool) -> Ceilings:
    """Time a copy of `device.copy_bytes`, and a product of `device.matmul_size` squared where `matmul`."""
    ceilings = Ceilings(2 * device.copy_bytes / _copy_ms(device) / 1e6)
    if matmul:
        ceilings = replace(ceilings, matmul_tflops=2 * device.matmul_size**3 / _matmul_ms(device) / 1e9)
    device.release()
    return ceilings


def _copy_ms(device: Device) -> float:
    source = torch.ones(device.copy_bytes // 4, dtype=torch.float32, device=device.torch_device)
    target = torch.empty_like(source)
    return device_times({"copy": lambda: target.copy_(source)}, device, _BUDGET_S)["copy"].p50


def _matmul_ms(device: Device) -> float:
    n = device.matmul_size
    a, b = torch.randn(2, n, n, device=device.torch_device).to(device.matmul_dtype)
    product = torch.empty_like(a)
    return device_times({"matmul": lambda: torch.mm(a, b, out=product)}, device, _BUDGET_S)["matmul"].p50
