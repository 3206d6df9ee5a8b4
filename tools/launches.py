"""Every launch of a package on a kind of chip: the calls of its tests in dry runs, with neither data nor a device."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import npu_tiling
import torch
from npu_tiling import Device
from npu_tiling.explaining import Explanation, explain
from npu_tiling.plans import Launch

from .cuda_calls import CALLS
from .workspace import ROOT

CHIPS: dict[str, tuple[Device, ...]] = {
    "ascend": (npu_tiling.soc("Ascend910B4"), npu_tiling.soc("Ascend910_9579")),
    "cuda": tuple(npu_tiling.GPUS[name] for name in ("A100", "H200", "B200")),
}
TYPICAL_CHIPS = {"ascend": CHIPS["ascend"][0], "cuda": CHIPS["cuda"][1]}  # one of each kind
ResultT = TypeVar("ResultT")
META, CPU = torch.device("meta"), torch.device("cpu")


def of_package(package: str, chip: Device) -> Iterator[tuple[str, list[Launch]]]:
    """A label and the launches of each call that `package` tests on a chip."""
    for label, run in _calls(package, chip):
        yield label, _launches(run, chip)


def explained(package: str, chip: Device) -> Iterator[tuple[str, Explanation]]:
    """A label and the explanation of each call that `package` tests on a chip."""
    for label, run in _calls(package, chip):
        yield label, _on_meta(lambda device, label=label, run=run: explain(label, lambda: run(device) or {}, chip))


def _calls(package: str, chip: Device) -> Iterator[tuple[str, Callable[[torch.device], None]]]:
    if chip.kind == "ascend":
        with _ascend_calls(package) as calls:
            yield from ((label, lambda device, call=call: _on(device, call)) for label, call in calls())
    elif package in CALLS:
        on_cpu, on_meta = list(CALLS[package](CPU)), list(CALLS[package](META))
        for (label, slow), (_, fast) in zip(on_cpu, on_meta, strict=True):
            yield label, lambda device, slow=slow, fast=fast: (fast if device == META else slow)()


def _on(device: torch.device, call: Callable[[], None]) -> None:
    with device:
        call()


def _launches(run: Callable[[torch.device], None], chip: Device) -> list[Launch]:
    def listed(device: torch.device) -> list[Launch]:
        with npu_tiling.dry_run(chip) as calls:
            run(device)
        return [launch for call in calls for launch in call.launches]

    return _on_meta(listed)


def _on_meta(function: Callable[[torch.device], ResultT]) -> ResultT:
    """On the meta device, or on a CPU where a call takes integers from tensors or PyTorch knows no autocast on meta."""
    try:
        return function(META)
    except (NotImplementedError, RuntimeError, TypeError):  # PyTorch 2.11 has no addmm of meta tensors into another dtype
        return function(CPU)


@contextmanager
def _ascend_calls(package: str) -> Iterator[Callable[[], Iterator[tuple[str, Callable[[], None]]]]]:
    """The function `calls` of a package's tests/ascend_calls.py, which may import its neighbours."""
    folder = ROOT / "packages" / package / "tests"
    spec = importlib.util.spec_from_file_location(f"{package}_ascend_calls", folder / "ascend_calls.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
        yield module.calls
    finally:
        sys.path.remove(str(folder))
