"""What in a compiled kernel costs time or safety on an Ascend chip, by rule."""

from .catalogue import RULES
from .engine import examine, lint_kernel
from .rules import Finding, Rule, Subject

__all__ = ["RULES", "Finding", "Rule", "Subject", "examine", "lint_kernel"]
