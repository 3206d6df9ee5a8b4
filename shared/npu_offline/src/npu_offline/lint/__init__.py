"""Rules that find what costs time or safety in a compiled kernel on an Ascend chip."""

from .catalogue import RULES
from .engine import examine, lint_kernel
from .rules import Rule, Subject, Violation

__all__ = ["RULES", "Rule", "Subject", "Violation", "examine", "lint_kernel"]
