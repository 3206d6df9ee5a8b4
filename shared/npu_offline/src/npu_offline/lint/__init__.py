"""Rules that find what costs time or safety in a compiled kernel on an Ascend chip."""

from .catalogue import RULES
from .engine import examine, lint_kernel
from .rules import Finding, Rule, Subject

__all__ = ["RULES", "Finding", "Rule", "Subject", "examine", "lint_kernel"]
