"""Compares the results of two executions of one launch, where rounding may explain differences."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..storage import bounds_of

if TYPE_CHECKING:
    import torch

_FLOATS = {"*fp32": "float32", "*fp16": "float16", "*bf16": "bfloat16"}
_MANTISSA = {"*fp32": 23, "*fp16": 10, "*bf16": 7}
_ULPS = 4  # fp32: the order of sums and products may differ
_SHARE = 0.02  # of the numbers of a narrow type may be rounded apart, where the fp32 values are close
_OF_SCALE = 2.0**-18  # of the largest number: an error that a sum with cancellation may have


def bytes_at(low: int, high: int) -> torch.Tensor:
    """The memory between two addresses as a tensor of bytes, not a copy."""
    import torch

    return torch.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), dtype=torch.uint8)


def differences(
    arguments: Sequence[tuple[str, str, Any]],
    before: Mapping[tuple[int, int], torch.Tensor],
    expected: Mapping[tuple[int, int], torch.Tensor],
    written: Mapping[str, int] | None = None,
) -> Iterator[tuple[str, str]]:
    """Arguments whose memory differs from what another execution left, and how it differs.

    Args:
        arguments: name, Triton type and value of each pointer argument.
        before: bytes of each storage before either execution, by its first and last address.
        expected: bytes of each storage after the other execution.
        written: bytes that were written through each argument; None if rounding explains no difference.

    Yields:
        The argument's name and a description of the difference.
    """
    import torch

    storages = {
        name: list(dict.fromkeys(zip(bounds[::2], bounds[1::2], strict=True))) for name, bounds in _bounds(arguments)
    }
    for name, kind, _ in arguments:
        for low, high in storages[name]:
            if high > low and not torch.equal(expected[low, high], now := bytes_at(low, high)):
                # Not counted by comparison with `before`: a kernel may write the bytes that were there.
                total = None if written is None else sum(written[arg] for arg in written if (low, high) in storages[arg])
                text = _difference(kind, before[low, high], expected[low, high], now, total)
                if text:
                    yield name, text


def _bounds(arguments: Sequence[tuple[str, str, Any]]) -> Iterator[tuple[str, Sequence[int]]]:
    for name, _, value in arguments:
        yield name, bounds_of(value)


def _difference(
    kind: str, before: torch.Tensor, one: torch.Tensor, other: torch.Tensor, bytes_written: int | None
) -> str | None:
    import torch

    if bytes_written is None or kind not in _FLOATS:
        positions = (one != other).nonzero().flatten()
        return f"{positions.numel()} bytes, the first at {int(positions[0])} of its storage"
    dtype = getattr(torch, _FLOATS[kind])
    whole = one.numel() // dtype.itemsize * dtype.itemsize
    a, b, old = (data[:whole].view(dtype) for data in (one, other, before))
    different = ((a != b) & ~(a.isnan() & b.isnan())).nonzero().flatten()
    if different.numel() == 0:
        return None
    x, y = a[different].double(), b[different].double()
    ulps = _ulps(x, y, _MANTISSA[kind])
    scale = float(b.nan_to_num(0, 0, 0).abs().max())
    small = (x - y).abs() <= _OF_SCALE * scale
    explained = (ulps <= (_ULPS if kind == "*fp32" else 1)) | small
    changed = int(((a != old) | (b != old)).sum())
    written = max(changed, min(bytes_written // dtype.itemsize, a.numel()))
    share = different.numel() / written
    if bool(explained.all()) and (kind == "*fp32" or share <= _SHARE or bool(small.all())):
        return None
    worst = int(ulps.argmax())
    return (
        f"{different.numel()} of {written} numbers differ, by {float(ulps[worst]):.3g} units in the last place at most "
        f"(number {int(different[worst])}: {float(x[worst]):.8g}, not {float(y[worst]):.8g})"
    )


def _ulps(x: torch.Tensor, y: torch.Tensor, mantissa: int) -> torch.Tensor:
    import torch

    largest = torch.maximum(x.abs(), y.abs())
    exponent = torch.frexp(largest)[1] - 1
    distance = (x - y).abs() / torch.ldexp(torch.ones_like(largest), exponent - mantissa)
    return torch.where(distance.isfinite(), distance, torch.full_like(distance, float("inf")))
