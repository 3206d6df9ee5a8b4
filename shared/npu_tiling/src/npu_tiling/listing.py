"""Plans: listed in place of being run (`dry_run`), or while they run (`watch_launches`). Process-wide.

Autograd runs the backward of accelerator tensors on threads of its own: a list of one thread would not have it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .chips import Device, dry_device


class PlannedCall(NamedTuple):
    """A call whose plan was run, or would have been.

    Attributes:
        direction: "forward" or "backward": whether autograd's engine asked for it.
        plan: what it does, a `Plan` of plans.py.
        again: plans it again, with these `Plan.replaced`.
    """

    direction: str
    plan: Any
    again: Callable[[Mapping[Any, Any]], Any]

    @property
    def launches(self) -> Any:
        """The plan's steps that are launches."""
        return self.plan.launches


active: list[PlannedCall] | None = None
"""Where plans are listed now; None: nowhere."""


def add(plan: Any, again: Callable[[Mapping[Any, Any]], Any]) -> None:
    """List a plan, if plans are listed."""
    if active is not None:
        active.append(PlannedCall("backward" if is_backward() else "forward", plan, again))


@contextlib.contextmanager
def dry_run(chip: Device) -> Iterator[list[PlannedCall]]:
    """Operators list their plans for `chip` in place of running them, until the block ends.

    Tensors may be on the meta device, where PyTorch's own operators compute nothing either: a call of any size takes
    neither memory nor a device, and results have shapes and no values. Triton need not be installed.
    """
    with dry_device(chip), watch_launches() as calls:
        yield calls


@contextlib.contextmanager
def watch_launches() -> Iterator[list[PlannedCall]]:
    """Operators list their plans while these run, until the block ends."""
    global active
    before, calls = active, list[PlannedCall]()
    active = calls
    try:
        yield calls
    finally:
        active = before


def is_backward() -> bool:
    """Whether autograd's engine is running."""
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._current_graph_task_id() != -1
