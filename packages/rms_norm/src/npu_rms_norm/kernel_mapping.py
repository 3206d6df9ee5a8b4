"""Our norms in the mapping from which transformers takes kernels."""

from __future__ import annotations

from collections.abc import Iterable


def use_kernels(devices: Iterable[str] = ("npu", "cuda")) -> None:
    """Let `model.set_use_kernels(True)` of transformers take our norms, for every class that it marks as an RMSNorm.

    `integrations.transformers.unregister` puts back what was there.

    Args:
        devices: types of devices.

    Raises:
        ImportError: transformers or the package `kernels` is not installed, or this release of it is not taken.
    """
    from .integrations.transformers import register  # not part of every copy of this package

    register(devices)
