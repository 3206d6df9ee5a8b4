"""The order of launches in words: what repeats is said once."""

from __future__ import annotations

from collections.abc import Sequence


def repeated(names: Sequence[str]) -> str:
    """Names in order; what follows itself is named once: "1; 8 times (2, 3); 4"."""
    said: list[str] = []
    first = 0
    while first < len(names):
        count, length = max(
            ((_repetitions(names[first:], length), length) for length in range(1, (len(names) - first) // 2 + 1)),
            key=lambda found: (found[0] > 1) * found[0] * found[1],
            default=(1, 1),
        )
        if count == 1:
            length = 1
        group = ", ".join(names[first : first + length])
        said.append(f"{count} times ({group})" if count > 1 else group)
        first += count * length
    return "; ".join(said)


def _repetitions(names: Sequence[str], length: int) -> int:
    """How many times in a row a list starts with its first `length` names."""
    count = 1
    while names[count * length : (count + 1) * length] == names[:length]:
        count += 1
    return count
