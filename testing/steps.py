"""Steps of a plan that belong to no operator, run by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from npu_tiling import launch
from npu_tiling.calls import device_of
from npu_tiling.chips import Device
from npu_tiling.plans import Plan, run_plan
from torch import Tensor


def run_once(write: Callable[..., Any], chip: Device | None, *tensors: Tensor | None) -> Any:
    """Runs the steps that `write(plan, *slots)` adds, and returns the tensors of the slots that it returns."""

    def replan(replaced: Mapping[Any, Any]) -> Plan:
        plan = Plan(chip, {}, replaced, device_of(tensors))
        plan.results = tuple(write(plan, *map(plan.argument, tensors)) or ())
        return plan

    return run_plan(replan(launch.replaced), tensors, replan)[0]
