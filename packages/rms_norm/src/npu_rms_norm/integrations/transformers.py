"""transformers: `model.set_use_kernels(True)` and `from_pretrained(..., use_kernels=True)` take our norms.

transformers marks its RMSNorms "RMSNorm", "RMSNormGated" or "RMSNormZeroCentered", and looks up each mark in a mapping by
device. `register` puts our layers there. A marked class that we do not know keeps its own forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from npu_tiling.doctor import refused_kernels
from torch import nn

from . import layers

_replaced: dict[tuple[str, str], Any] = {}


class Layer(NamedTuple):
    """What the mapping holds: it gives a layer by `load`, as a repository of the Hub does."""

    layer_name: str

    def load(self) -> type[nn.Module]:
        layer: type[nn.Module] = getattr(layers, self.layer_name)
        return layer


def register(devices: Iterable[str] = ("npu", "cuda")) -> None:
    """Put our layers into transformers' mapping of kernels, for these types of devices.

    Raises:
        ImportError: transformers or `kernels` is not installed, or transformers does not take this release of `kernels`.
    """
    refused = refused_kernels()
    if refused:
        raise ImportError(f"{refused}.")
    from kernels import Mode
    from transformers.integrations.hub_kernels import (
        get_kernel_mapping_transformers,
        register_kernel_mapping_transformers,
    )

    mapping = get_kernel_mapping_transformers()
    for name in layers.__all__:
        by_device = mapping.setdefault(name, {})
        for device in devices:
            _replaced.setdefault((name, device), by_device.get(device))
            by_device[device] = {Mode.TRAINING: Layer(name), Mode.INFERENCE: Layer(name)}
    register_kernel_mapping_transformers(mapping)


def unregister() -> None:
    """Put back the mapping that was there. Models that were kernelised keep their layers."""
    from transformers.integrations.hub_kernels import (
        get_kernel_mapping_transformers,
        register_kernel_mapping_transformers,
    )

    mapping = get_kernel_mapping_transformers()
    for (name, device), before in _replaced.items():
        if before is None:
            del mapping[name][device]
        else:
            mapping[name][device] = before
    _replaced.clear()
    register_kernel_mapping_transformers(mapping)
