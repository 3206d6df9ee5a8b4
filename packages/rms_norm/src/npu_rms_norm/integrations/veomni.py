"""VeOmni: the norms of its models where `rms_norm_implementation` is "npu", which is its default on npu.

VeOmni's backend of that name gives `1 + weight` of Qwen 3.5 to the vendor's norm in bf16, and computes norms without a
weight in several passes. Elsewhere than on npu VeOmni takes Liger: see `liger`. Written against VeOmni 0.1.12.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..api import rms_norm
from ..patching import GEMMA, LLAMA, normalise

BACKEND = "npu"


def unweighted(x: Tensor, weight: None, eps: float) -> Tensor:
    """DeepSeek 4's norm without a weight: 1 / rms is rounded to x's dtype before it multiplies x."""
    if weight is not None:
        raise ValueError("weight must be None for the variant 'unweighted'.")
    y = rms_norm(x, None, eps, casting_mode="none")
    assert isinstance(y, Tensor)
    return y


def forward(module: Any, x: Tensor) -> Tensor:
    """The forward of a class that VeOmni patches as a whole, as DeepSeek 3's."""
    return normalise(LLAMA, x, module.weight, module.variance_epsilon)


#: By VeOmni's name of the variant: y of x, the weight and eps.
VARIANTS: dict[str, Callable[..., Tensor]] = {
    "standard": partial(normalise, LLAMA),
    "qwen3_5": partial(normalise, GEMMA),
    "unweighted": unweighted,
}
_before: dict[str, Any] = {}


def register() -> None:
    """Let VeOmni's backend "npu" call ours; before a model is built."""
    from veomni.ops.config.registry import BackendSpec, get_op
    from veomni.ops.kernel_registry import KERNEL_REGISTRY, HardwareRequirement, KernelSpec

    backends = get_op("rms_norm").backends
    if not _before:
        _before.update({name: KERNEL_REGISTRY._specs["rms_norm", name][BACKEND] for name in VARIANTS})
        _before["forward"] = backends[BACKEND]
    for name, function in VARIANTS.items():
        spec = KernelSpec(
            name=BACKEND,
            op_name="rms_norm",
            variant=name,
            factory=lambda function=function: function,
            hardware=HardwareRequirement(device_type="any"),
            description="npu_rms_norm",
        )
        KERNEL_REGISTRY.register(spec, force=True)
    backends[BACKEND] = BackendSpec(entry=f"{__name__}:forward", replace_forward=True)


def unregister() -> None:
    """Let VeOmni call its own; models that are built keep what they have."""
    from veomni.ops.config.registry import get_op
    from veomni.ops.kernel_registry import KERNEL_REGISTRY

    if _before:
        get_op("rms_norm").backends[BACKEND] = _before.pop("forward")
    while _before:
        KERNEL_REGISTRY.register(_before.popitem()[1], force=True)
