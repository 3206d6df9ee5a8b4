"""Layers that take the place of transformers' norms, by the names that transformers marks these with.

A layer is a forward alone: it runs on the module that it replaces. A marked class that is not known keeps its own forward,
and so does a module with other settings than its class has by default.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..patching import applied, formula_of

__all__ = ["RMSNorm", "RMSNormGated", "RMSNormZeroCentered"]


class RMSNorm(nn.Module):
    """The forward of modules marked "RMSNorm" or "RMSNormZeroCentered"; they keep their parameters and eps."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        formula = formula_of(type(self))
        y = None if formula is None else applied(formula, self, hidden_states)
        return type(self).forward(self, hidden_states) if y is None else y


class RMSNormGated(nn.Module):
    """The forward of modules marked "RMSNormGated"."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        formula = formula_of(type(self))
        y = None if formula is None else applied(formula, self, hidden_states, gate)
        return type(self).forward(self, hidden_states, gate) if y is None else y


RMSNormZeroCentered = RMSNorm
