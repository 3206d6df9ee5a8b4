"""RMSNorm for Hugging Face's `kernels` library: `use_kernel_mapping(MAPPING)`, then `kernelize(...)`; no hub is asked.

`kernelize` binds the forward of a layer that has no state of its own to modules registered as "RMSNorm", as most of those of
transformers are. Gemma's are not: `patch` knows them. A registered class that is none of `FORMULAS` keeps its own forward.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from .patching import formula_of, normalise


class RMSNorm(nn.Module):
    """`rms_norm` with the roundings of the module that the forward is bound to."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """y for x [..., D], as the module's own class computes it."""
        formula = formula_of(type(self))
        if formula is None:
            return type(self).forward(self, hidden_states)
        return normalise(formula, hidden_states, self.weight, getattr(self, formula.eps))


class InstalledLayer:
    """A layer that comes from an installed package and not from a hub, where `kernels` wants a layer repository."""

    def load(self) -> type[nn.Module]:
        """The class whose forward is bound."""
        return RMSNorm


#: For `kernels.use_kernel_mapping` and `kernels.register_kernel_mapping`.
MAPPING: Mapping[str, Mapping[str, InstalledLayer]] = {
    "RMSNorm": {device: InstalledLayer() for device in ("npu", "cuda", "cpu")}
}
