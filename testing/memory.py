"""For tests: memory never written, writes outside a tensor, and how much memory there is at a time."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


def untouched(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that nobody has written, `poisoned` neither: of 4 GiB those pages cost something that are touched."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        return torch.empty(numel, dtype=dtype, device=device)
    finally:
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


class Taken(TorchDispatchMode):
    """Counts the bytes of tensors that PyTorch makes in a block and that are alive at a time.

    Attributes:
        peak: the most of them so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._bytes = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {id(storage) for storage in map(_storage, tree_leaves((args, kwargs))) if storage is not None}
        for storage in map(_storage, tree_leaves(result)):
            if storage is not None and id(storage) not in given | self._alive.keys():
                self._add(id(storage), storage)
        return result

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()

        def forget(_: object) -> None:
            del self._alive[key]
            self._bytes -= size

        self._alive[key] = weakref.ref(storage, forget)
        self._bytes += size
        self.peak = max(self.peak, self._bytes)


def _storage(leaf: Any) -> torch.UntypedStorage | None:
    return leaf.untyped_storage() if isinstance(leaf, torch.Tensor) and not leaf.is_sparse else None
