"""Compares the results of two executions of one launch, where rounding may explain differences."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..storage import bounds_of

if TYPE_CHECKING:
    import torch

Bounds = tuple[int, int]  # the first address of a storage, and the one behind its last
_FLOATS = {"*fp32": "float32", "*fp16": "float16", "*bf16": "bfloat16"}
_MANTISSA = {"*fp32": 23, "*fp16": 10, "*bf16": 7}
_LEAST_EXPONENT = {"*fp32": -126, "*fp16": -14, "*bf16": -126}  # of normal numbers; below, units do not shrink
_ULPS = 4  # fp32: the order of sums and products may differ
_FOLLOWING_ULPS = 3  # narrow: a number computed from one that is a unit off, which is rounded again
_SHARE = 0.02  # of the numbers of a narrow type may be rounded apart, where the fp32 values are close
_OF_SCALE = 2.0**-18  # of the largest number: an error that a sum with cancellation may have
_OF_SPREAD = 8  # times how far a number moves when the inputs move by a rounding: two sums in other orders


def bytes_at(low: int, high: int) -> torch.Tensor:
    """The memory between two addresses as a tensor of bytes, not a copy."""
    import torch

    return torch.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), dtype=torch.uint8)


def changes(
    arguments: Sequence[tuple[str, str, Any]], expected: Mapping[Bounds, torch.Tensor], only: Mapping[Bounds, torch.Tensor]
) -> Iterator[tuple[str, str]]:
    """Arguments whose memory is not, byte by byte, what another execution left.

    Args:
        arguments: name, Triton type and value of each pointer argument.
        expected: bytes of each storage after the other execution.
        only: for each storage which bytes count.

    Yields:
        The argument's name and a description of the difference.
    """
    for name, _, value in arguments:
        for bounds in _storages(value):
            different = (expected[bounds] != bytes_at(*bounds)) & only[bounds]
            if different.any():
                positions = different.nonzero().flatten()
                yield name, f"{positions.numel()} bytes, the first at {int(positions[0])} of its storage"


def moved(arguments: Sequence[tuple[str, str, Any]], seed: int) -> None:
    """Move each number of the fp32 arguments by a unit in the last place, up, down or not at all."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for _, kind, value in arguments:
        for low, high in _storages(value) if kind == "*fp32" else ():
            numbers = bytes_at(low, high)[: (high - low) // 4 * 4].view(torch.float32)
            numbers *= 1 + 2.0**-23 * torch.randint(-1, 2, numbers.shape, generator=generator)


def differences(
    arguments: Sequence[tuple[str, str, Any]],
    before: Mapping[Bounds, torch.Tensor],
    expected: Mapping[Bounds, torch.Tensor],
    written: Mapping[str, int],
    nearby: Sequence[Mapping[Bounds, torch.Tensor]] = (),
) -> Iterator[tuple[str, str]]:
    """Arguments whose numbers differ from what another execution left, by more than rounding explains.

    Numbers that neither execution has changed take no part: their size excuses nothing. Where a narrow result is one unit
    off, the number in the same place of another result of the launch may follow from it, and be off by three. A sum whose
    terms cancel moves by more than that when its inputs move by a rounding, as `nearby` shows, and may be off by as much.

    Args:
        arguments: as for `changes`.
        before: bytes of each storage before both executions.
        expected: bytes of each storage after the other execution.
        written: bytes that were written through each argument.
        nearby: bytes of each storage after executions from inputs that `moved` has moved.

    Yields:
        The argument's name and a description of the difference.
    """
    pairs: list[tuple[str, _Numbers]] = []
    for name, kind, value in arguments:
        for bounds in _storages(value):
            now = bytes_at(*bounds)
            if (expected[bounds] == now).all():
                continue
            if kind not in _FLOATS:
                positions = (expected[bounds] != now).nonzero().flatten()
                yield name, f"{positions.numel()} bytes, the first at {int(positions[0])} of its storage"
                continue
            # Not counted by comparison with `before` alone: a kernel may write the bytes that were there.
            total = sum(count for other, count in written.items() if other in _names_in(arguments, bounds))
            others = [copies[bounds] for copies in nearby]
            pairs.append((name, _Numbers.of(kind, before[bounds], expected[bounds], now, total, others)))
    for name, numbers in pairs:
        text = numbers.unexplained([other for _, other in pairs if other is not numbers])
        if text:
            yield name, text


def _storages(value: Any) -> list[Bounds]:
    bounds = bounds_of(value)
    pairs = dict.fromkeys(zip(bounds[::2], bounds[1::2], strict=True))
    return [(low, high) for low, high in pairs if high > low]


def _names_in(arguments: Sequence[tuple[str, str, Any]], bounds: Bounds) -> list[str]:
    return [name for name, _, value in arguments if bounds in _storages(value)]


@dataclass(frozen=True)
class _Numbers:
    """The numbers of one storage, of two executions.

    Attributes:
        kind: Triton's type of the pointer.
        count: numbers of the storage.
        written: numbers that were written.
        scale: the largest number that was written.
        places: where the two differ.
        x, y: the two numbers there, in fp64.
        ulps: how many units in the last place they are apart.
        spread: how far the second moves when the inputs move by a rounding; the median of all that were written, if more.
    """

    kind: str
    count: int
    written: int
    scale: float
    places: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    ulps: torch.Tensor
    spread: torch.Tensor

    @classmethod
    def of(
        cls,
        kind: str,
        before: torch.Tensor,
        one: torch.Tensor,
        other: torch.Tensor,
        bytes_written: int,
        nearby: Sequence[torch.Tensor],
    ) -> _Numbers:
        """Of the bytes of a storage before both executions and after each, and after each from inputs nearby."""
        import torch

        dtype = getattr(torch, _FLOATS[kind])
        whole = one.numel() // dtype.itemsize * dtype.itemsize
        a, b = (data[:whole].view(dtype) for data in (one, other))
        # By bytes: garbage may be NaN, which differs from itself.
        changed = ((one[:whole] != before[:whole]) | (other[:whole] != before[:whole])).view(-1, dtype.itemsize).any(1)
        sizes = torch.maximum(a[changed].abs(), b[changed].abs()).double()
        scale = float(sizes[sizes.isfinite()].max()) if sizes.isfinite().any() else 0.0
        places = ((a != b) & ~(a.isnan() & b.isnan())).nonzero().flatten()
        x, y = a[places].double(), b[places].double()
        written = max(int(changed.sum()), min(bytes_written // dtype.itemsize, a.numel()))
        moves = torch.zeros(b.shape, dtype=torch.float64)
        for copy in nearby:
            moved_by = (copy[:whole].view(dtype).double() - b.double()).abs()
            moves = torch.maximum(moves, moved_by.nan_to_num(0.0, 0.0))
        spread = moves[places].clamp(min=float(moves[changed].median()) if changed.any() else 0.0)
        return cls(kind, a.numel(), written, scale, places, x, y, _ulps(x, y, kind), spread)

    def unexplained(self, others: Sequence[_Numbers]) -> str | None:
        """What rounding does not explain; None if it explains all.

        Args:
            others: the other results of the launch that differ.
        """
        import torch

        if not self.places.numel():
            return None
        narrow = self.kind != "*fp32"
        small = (self.x - self.y).abs() <= _OF_SCALE * self.scale
        small |= (self.x - self.y).abs() <= _OF_SPREAD * self.spread
        explained = (self.ulps <= (1 if narrow else _ULPS)) | small
        if narrow:
            for other in others:
                if other.kind == self.kind and other.count == self.count:
                    a_unit_off = other.places[other.ulps <= 1]
                    explained |= torch.isin(self.places, a_unit_off) & (self.ulps <= _FOLLOWING_ULPS)
        share = self.places.numel() / self.written
        if bool(explained.all()) and (not narrow or share <= _SHARE or bool(small.all())):
            return None
        shown = self.ulps if bool(explained.all()) else torch.where(explained, -1.0, self.ulps)
        worst = int(shown.argmax())
        wrong = int((~explained).sum())
        return (
            f"{self.places.numel()} of {self.written} numbers differ, {wrong} by more than rounding: number "
            f"{int(self.places[worst])} is {float(self.x[worst]):.8g}, not {float(self.y[worst]):.8g} "
            f"({float(self.ulps[worst]):.3g} units in the last place)"
        )


def _ulps(x: torch.Tensor, y: torch.Tensor, kind: str) -> torch.Tensor:
    import torch

    largest = torch.maximum(x.abs(), y.abs())
    exponent = (torch.frexp(largest)[1] - 1).clamp(min=_LEAST_EXPONENT[kind])
    distance = (x - y).abs() / torch.ldexp(torch.ones_like(largest), exponent - _MANTISSA[kind])
    return torch.where(distance.isfinite(), distance, torch.full_like(distance, float("inf")))
