"""Whether two executions of a kernel agree, where each may round and add in an order of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_ULPS = 4  # of the result's dtype: functions and sums that round in other places
_OF_FUNCTIONS = 64  # ulp of fp32: compilers make functions of others, pow(x, y) of exp(y log x)
_OF_OWN = 8  # times how far rounding moves the element itself
_OF_TYPICAL = (
    32  # times how far it moves half of all elements: sums in two orders are as far apart as their errors are large
)
_LIMITS = [limit for bits in (8, 16, 32, 64) for limit in (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, 2**bits - 1)]
_ROUNDED = 0.1  # of a large integer: what rounding, to bf16 and several times, may move it
_SHARE = 0.02  # of integers that are rounded from floats may be rounded apart


def undefined(name: str, meant: Tensor, moved: Callable[[], Tensor]) -> str:
    """Which integers come of floats that their type does not hold; empty if none does.

    `moved` has the nearest number in their place, `meant` the last bits: Triton defines neither.

    Args:
        name, meant, moved: as of `unlike`; the other launch is computed for integers.
    """
    import torch

    if meant.is_floating_point() or meant.dtype == torch.bool:
        return ""
    z = moved()
    y, nearest = meant.double(), z.double()
    off = torch.isin(nearest, torch.tensor(_LIMITS, dtype=nearest.dtype))
    off &= (nearest - y).abs() > 1 + _ROUNDED * nearest.abs()
    if not bool(off.any()):
        return ""
    at = tuple(off.nonzero()[0].tolist())
    place = f"{name}[{', '.join(map(str, at))}]" if at else name
    return (
        f"{int(off.sum())} of {off.numel()} elements of {name} come of numbers that their integers do not hold:"
        f" {place} may be {int(meant[at])}, or {int(z[at])}; tl.clamp before the cast"
    )


def unlike(name: str, got: Tensor, meant: Tensor, moved: Callable[[], Tensor]) -> str:
    """What rounding does not explain between a result and what it was meant to be; empty if it explains all.

    Reassociated sums, products of matrices, and functions that are rounded otherwise are no differences. How much they may
    move an element is measured: `moved` is the same launch in fp64, without rounding to the precisions that the kernel
    names, but with sums of fp32 one after another, programs in reverse order, and with other numbers where Triton leaves a
    number undefined. With d = |meant - moved| an element may be off by

        4 ulp + 64 ulp of fp32 + 8 d + 32 median(d) + 32 median(d / |meant|) |meant|,  medians over the elements with d > 0;

    an integer by 8 d, and, where d is above 0 for any, 2 % of the integers by one. NaN is like NaN alone.

    Args:
        name: of the argument.
        got: the result.
        meant: of the same shape and dtype.
        moved: computes the other; it is called where the two differ by more than the first two terms.
    """
    import torch

    same = (got == meant) | (
        got.isnan() & meant.isnan() if got.is_floating_point() else torch.zeros_like(got, dtype=torch.bool)
    )
    if bool(same.all()):
        return ""
    x, y = got.double(), meant.double()
    off = torch.where(same, 0.0, (x - y).abs())
    if got.is_floating_point():
        ulp = torch.finfo(got.dtype).eps * torch.maximum(y.abs(), torch.tensor(torch.finfo(got.dtype).tiny, dtype=y.dtype))
        allowed = _ULPS * ulp + _OF_FUNCTIONS * torch.finfo(torch.float32).eps * y.abs()
        if bool((off <= allowed).all()):
            return ""
    else:
        allowed = torch.zeros_like(off)
    z = moved().double()
    d = torch.where(y.isnan() & z.isnan() | (y == z), 0.0, (y - z).abs())
    d = d.nan_to_num(nan=torch.inf, posinf=torch.inf)
    moves = (d > 0) & d.isfinite()
    allowed = allowed + _OF_OWN * d
    if got.is_floating_point() and bool(moves.any()):
        relative = (d / y.abs())[moves & (y != 0)]
        allowed = allowed + _OF_TYPICAL * d[moves].median()
        if relative.numel():
            allowed = allowed + _OF_TYPICAL * relative.median() * y.abs()
    wrong = ~(off <= allowed) & ~(same | (allowed == torch.inf))
    if (
        not got.is_floating_point()
        and bool(moves.any())
        and bool((off[wrong] <= 1).all())
        and wrong.sum() <= _SHARE * wrong.numel()
    ):
        return ""
    if not bool(wrong.any()):
        return ""
    at = tuple(wrong.nonzero()[0].tolist())
    form = ".8g" if got.is_floating_point() else "d"
    place = f"{name}[{', '.join(map(str, at))}]" if at else name
    now, then = (format(each[at].item(), form) if each.dtype != torch.bool else str(bool(each[at])) for each in (got, meant))
    return f"{int(wrong.sum())} of {wrong.numel()} elements of {name} differ: {place} is {now}, not {then}"
