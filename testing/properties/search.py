"""How many examples a property is tried on, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy


class Example(SimpleNamespace):
    """A call: what was drawn for it, by name."""


@dataclass(frozen=True)
class Profile:
    """A length of search.

    Attributes:
        examples: of each property, by place: where kernels are compiled, one takes seconds.
        seconds: after which no further example is tried; None: all are tried, the same in every run.
    """

    examples: dict[str, int]
    seconds: float | None


PROFILES = {
    "short": Profile({"cpu": 25, "emulated": 3, "cuda": 12, "npu": 3}, None),
    "long": Profile(dict.fromkeys(("cpu", "emulated", "cuda", "npu"), 1_000_000), 100.0),
}


class _TimeIsUp(KeyboardInterrupt):
    """Stops a search early."""


class Search:
    """Searches for an example that a property does not hold for.

    Args:
        place: a name of `npu_offline.plugin.PLACES`.
        profile: a name of `PROFILES`.
        start: the seed.
        seconds: instead of the profile's.
        tell: called with the number of examples that a property was tried on.
    """

    def __init__(
        self,
        place: str,
        profile: str,
        start: int,
        seconds: float | None = None,
        tell: Callable[[int], None] = lambda tried: None,
    ) -> None:
        chosen = PROFILES[profile]
        self.place = place
        self._seed = start
        self._examples = chosen.examples[place]
        self._seconds = chosen.seconds if seconds is None else seconds
        self._tell = tell

    def __call__(self, strategy: SearchStrategy[Any], holds: Callable[[Any], None]) -> None:
        """Runs `holds` on examples of `strategy`. A failure names the example, the smallest of its kind on a CPU."""
        end = None if self._seconds is None else time.monotonic() + self._seconds
        failed, tried = False, 0

        # Shrinking an example compiles kernels again and again where they run: it takes too long there.
        phases = (Phase.generate, Phase.shrink) if self.place == "cpu" else (Phase.generate,)

        @seed(self._seed)
        @settings(
            max_examples=self._examples,
            phases=phases,
            deadline=None,
            database=None,
            derandomize=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def tries(example: Any) -> None:
            nonlocal failed, tried
            if end is not None and tried and not failed and time.monotonic() > end:
                raise _TimeIsUp
            tried += 1
            try:
                holds(example)
            except Exception:
                failed = True
                raise

        try:
            tries()
        except _TimeIsUp:
            pass
        finally:
            self._tell(tried)
