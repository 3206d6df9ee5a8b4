"""RMSNorm inside trainers: a module a trainer, which imports that trainer and nothing else of the kind.

Each has `register()`, which puts our operators where the trainer looks for its own, and `unregister()`, which puts back what
was there.
"""

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
    from .transformers import register  # not part of every copy of this package

    register(devices)
