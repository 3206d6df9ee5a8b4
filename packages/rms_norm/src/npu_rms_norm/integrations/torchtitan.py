"""torchtitan: `--override.imports npu_rms_norm.integrations.torchtitan.rms_norm` makes a model's RMSNorms ours.

Parameters, their initialisation and their sharding are torchtitan's. Written against torchtitan 0.3.0.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common import RMSNorm as OfTorchtitan

from ..patching import TORCH, normalise


class RMSNorm(OfTorchtitan):
    """torchtitan's RMSNorm, computed by `npu_rms_norm.rms_norm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(OfTorchtitan.Config):
        """As torchtitan's."""

    def forward(self, x: Tensor) -> Tensor:
        return normalise(TORCH, x, self.weight, self.eps)


@override(target=OfTorchtitan.Config, exact=True, description="npu_rms_norm")
def rms_norm(config: OfTorchtitan.Config) -> RMSNorm.Config:
    """What torchtitan calls for every norm of a model's configuration."""
    replacement: RMSNorm.Config = derive(config, RMSNorm.Config)
    return replacement
