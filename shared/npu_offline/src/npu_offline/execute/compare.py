"""Results of two executions of one launch, compared: equal, different as rounding explains, or different."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..storage import bounds_of

if TYPE_CHECKING:
    import torch

_FLOATS = {"*fp32": "float32", "*fp16": "float16", "*bf16": "bfloat16"}
_MANTISSA = {"*fp32": 23, "*fp16": 10, "*bf16": 7}
_ULPS = 4  # fp32: other orders of sums and products
_SHARE = 0.02  # of numbers of a narrow type: those that fp32 values so close to each other are rounded apart
_OF_SCALE = 2.0**-18  # sums that cancel are compared with the largest numbers


def differences(
    arguments: Sequence[tuple[str, str, Any]],
    ranges: Sequence[tuple[int, int]],
    one: Sequence[bytes],
    other: Sequence[bytes],
    *,
    exactly: bool,
) -> Iterator[tuple[str, str]]:
    """Arguments whose memory differs, and how.

    Args:
        arguments: name, Triton type and value of each pointer argument.
        ranges: first and last address of each storage.
        one, other: their bytes after either execution.
        exactly: nothing explains a difference.
    """
    for name, kind, value in arguments:
        bounds = bounds_of(value)
        for low, high in dict.fromkeys(zip(bounds[::2], bounds[1::2], strict=True)):
            if high <= low:
                continue
            position = ranges.index((low, high))
            if one[position] != other[position]:
                text = _difference(kind, one[position], other[position], exactly=exactly)
                if text:
                    yield name, text


def _difference(kind: str, one: bytes, other: bytes, *, exactly: bool) -> str | None:
    import torch

    if exactly or kind not in _FLOATS:
        return _bytes(one, other)
    dtype = getattr(torch, _FLOATS[kind])
    whole = len(one) // dtype.itemsize * dtype.itemsize
    a, b = (torch.frombuffer(bytearray(data[:whole]), dtype=dtype) for data in (one, other))
    different = ((a != b) & ~(a.isnan() & b.isnan())).nonzero().flatten()
    if different.numel() == 0:
        return None
    x, y = a[different].double(), b[different].double()
    ulps = _ulps(x, y, _MANTISSA[kind])
    finite = b[b.isfinite()].double().abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    share = different.numel() / a.numel()
    small = (x - y).abs() <= _OF_SCALE * scale
    explained = (ulps <= (_ULPS if kind == "*fp32" else 1)) | small
    if bool(explained.all()) and (kind == "*fp32" or share <= _SHARE or bool(small.all())):
        return None
    worst = int(ulps.argmax())
    return (
        f"{different.numel()} of {a.numel()} numbers differ, by {float(ulps[worst]):.3g} units in the last place at most "
        f"(number {int(different[worst])}: {float(x[worst]):.8g}, not {float(y[worst]):.8g})"
    )


def _ulps(x: torch.Tensor, y: torch.Tensor, mantissa: int) -> torch.Tensor:
    import torch

    largest = torch.maximum(x.abs(), y.abs())
    exponent = torch.frexp(largest)[1] - 1
    distance = (x - y).abs() / torch.ldexp(torch.ones_like(largest), exponent - mantissa)
    return torch.where(distance.isfinite(), distance, torch.full_like(distance, float("inf")))


def _bytes(one: bytes, other: bytes) -> str:
    positions = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    return f"{len(positions)} bytes, the first at {positions[0]} of its storage"
