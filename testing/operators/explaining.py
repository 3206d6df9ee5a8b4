"""What `explain` says of a call is what the call launches, wherever there are kernels; and the bytes of its formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import npu_tiling
import pytest
import torch
from npu_tiling.explaining import explained

from .case import asked

if TYPE_CHECKING:
    from npu_offline.plugin import Place


class Explained(NamedTuple):
    """Options of a function's `explain`."""

    name: str
    options: Mapping[str, Any]
    bytes: Mapping[str, int] | None = None


def _calls(table: Mapping[str, Mapping[str, Any]]) -> Iterator[Explained]:
    return (Explained(name, options) for name, options in table.items())


def _bytes(table: Mapping[str, tuple[Mapping[str, Any], Mapping[str, int]]]) -> Iterator[Explained]:
    return (Explained(name, *row) for name, row in table.items())


@asked(table="EXPLAINED", rows=_calls)
@pytest.mark.uncollected("plain PyTorch launches none of our kernels", lambda place: place == "cpu")
def test_explained_steps_are_those_that_are_made(npu_place: Place, request: pytest.FixtureRequest, case: Explained) -> None:
    """EXPLAINED: options by name. The module's `run` makes the call, `comparable` leaves out what a device decides."""
    module, chip = request.module, npu_tiling.device_for(npu_place.torch)
    comparable = getattr(module, "comparable", list)
    if chip is None:
        pytest.skip("plain PyTorch launches none of our kernels")
    with npu_tiling.watch_launches() as calls:
        module.run(npu_place, **case.options)
    found = module.explain(**case.options, chip=chip, backward=True)
    assert comparable(found.steps) == comparable(explained(calls))
    assert {launch.direction for launch in found.launches} == {"forward", "backward"}


@asked(table="BYTES", rows=_bytes)
def test_bytes_are_those_of_the_formula(request: pytest.FixtureRequest, case: Explained) -> None:
    """BYTES: options, and bytes that move forward and backward, in whatever mode a program is."""
    with torch.inference_mode():
        assert request.module.explain(**case.options).bytes_moved == case.bytes
