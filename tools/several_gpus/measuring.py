"""What all measurements do: wait for a device, and go on where one of them fails."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def attempt(name: str, run: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """A row of a table, with its error where it fails: the same on all ranks, or they wait for each other."""
    try:
        return {"name": name, **run()}
    except Exception as error:
        return {"name": name, "error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
    finally:
        gc.collect()  # models have cycles
        torch.cuda.empty_cache()
