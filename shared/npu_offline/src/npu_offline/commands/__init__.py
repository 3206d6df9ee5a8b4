"""The commands of `npu-offline`, one module each: arguments, and what is printed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Subparsers: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]
    """What `ArgumentParser.add_subparsers` returns."""
