"""Every rule there is."""

from __future__ import annotations

from collections.abc import Mapping

from . import arithmetic, language, loops, transfers
from .rules import Rule

RULES: Mapping[str, Rule] = {
    rule.name: rule for rule in (*arithmetic.RULES, *transfers.RULES, *loops.RULES, *language.RULES)
}
"""Every rule by name."""
