"""Layers that take the place of transformers' norms, by the names that transformers marks these with.

A layer is a forward alone: it runs on the module that it replaces. A marked class that is not known keeps its own forward.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..patching import GATED, formula_of, normalise, normalise_gated

__all__ = ["RMSNorm", "RMSNormGated", "RMSNormZeroCentered"]


class RMSNorm(nn.Module):
    """The forward of modules marked "RMSNorm" or "RMSNormZeroCentered"; they keep their parameters and eps."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        formula = formula_of(type(self))
        if formula is None:
            return type(self).forward(self, hidden_states)
        return normalise(formula, hidden_states, self.weight, getattr(self, formula.eps))  # type: ignore[arg-type]


class RMSNormGated(nn.Module):
    """The forward of modules marked "RMSNormGated"."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        formula = GATED.get(type(self).__name__)
        if formula is None:
            return type(self).forward(self, hidden_states, gate)
        return normalise_gated(formula, self, hidden_states, gate)


RMSNormZeroCentered = RMSNorm
