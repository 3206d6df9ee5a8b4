"""Casting modes: what is rounded on the way, and to which dtype. The definition, tilings and kernels read this table.

A new mode is a row of `CASTING_MODES`, and

    its name in the docstrings of reference.py, `rms_norm` (functional.py), `gated_rms_norm` (gated.py) and `RMSNorm`
    (module.py), in the README and in explain.py, whose option lists the modes
    its formula in tests/test_reference.py, how often it rounds in `check` of tests/formula.py, what it rounds in
    tests/test_final.py (`test_final_modules_round_where_the_mode_says`), and the lists of modes in other tests:
    `git grep -n '"gemma"'` finds them

A mode that rounds something else needs a new column here, in `Rounding` and in the constants of shape.py, where reference.py
(`_round`) and formula.py (`round_to`) round, in the signature of every kernel that `git grep FACTORS` finds, and in
ascend/tiling/policies.py and cuda/tiling/choice.py, which read `shape.rounding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class To(Enum):
    """The dtype that a value is rounded to before it is used in fp32 again."""

    FP32 = "not rounded"
    X = "x's dtype"
    WEIGHT = "the weight's dtype"


@dataclass(frozen=True, kw_only=True)
class Casting:
    """A casting mode.

    Attributes:
        normalised: what n = x rstd is rounded to.
        factors: what rstd, offset + weight and the bias are rounded to, all three alike: a mode that rounds the weight alone
            needs a column of its own.
        weighted: what n (offset + weight) is rounded to before a bias or a gate meets it; without a weight it is n itself.
    """

    normalised: To
    factors: To
    weighted: To


CASTING_MODES = {
    "llama": Casting(normalised=To.X, factors=To.FP32, weighted=To.WEIGHT),  # Hugging Face's Llama
    "gemma": Casting(normalised=To.FP32, factors=To.FP32, weighted=To.FP32),
    "none": Casting(normalised=To.X, factors=To.X, weighted=To.X),
}


def casting(mode: str) -> Casting:
    """The row of a mode.

    Raises:
        ValueError: there is no such mode.
    """
    if mode not in CASTING_MODES:
        raise ValueError(f"casting_mode is {mode!r} and must be one of {', '.join(map(repr, CASTING_MODES))}.")
    return CASTING_MODES[mode]
