"""For tests: memory that shows elements that were never written, and writes outside a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

GUARD_BYTES = 4096
_PATTERN = 0xA5


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Until the block ends, memory that torch allocates without a value is full of NaN, or of the largest integer."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def guarded(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, Callable[[], None]]:
    """A tensor with guard bytes on both sides, inside one storage.

    Returns:
        The tensor, zero-filled and contiguous, and a function that raises AssertionError if a guard byte has changed.
    """
    size = torch.empty(tuple(shape), dtype=dtype, device="meta").numel() * dtype.itemsize
    buffer = torch.full((GUARD_BYTES + size + GUARD_BYTES,), _PATTERN, dtype=torch.uint8, device=device)
    inner = buffer[GUARD_BYTES : GUARD_BYTES + size]
    inner.zero_()

    def check() -> None:
        for name, guard in (("before", buffer[:GUARD_BYTES]), ("after", buffer[GUARD_BYTES + size :])):
            changed = (guard != _PATTERN).nonzero().flatten()
            if changed.numel():
                first = int(changed[0]) - (GUARD_BYTES if name == "before" else 0)
                raise AssertionError(f"{changed.numel()} bytes {name} the tensor were written, the first at byte {first}")

    return inner.view(dtype).view(tuple(shape)), check
