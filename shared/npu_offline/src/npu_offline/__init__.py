"""Compile, check and emulate Ascend Triton kernels on a machine without an NPU, with the real Ascend compiler."""

from .compilation import compile_kernel
from .emulation import emulate, record
from .errors import (
    CompilationError,
    Finding,
    FindingsError,
    OfflineError,
    OutOfBoundsError,
    RaceError,
    ToolchainMissingError,
    UnsupportedError,
)
from .launches import Emulation, Launch, LaunchRecord, Ledger, Traffic
from .reports import Report, Usage
from .toolchains import VERSIONS, fetch, installed, supported

__all__ = [
    "VERSIONS",
    "CompilationError",
    "Emulation",
    "Finding",
    "FindingsError",
    "Launch",
    "LaunchRecord",
    "Ledger",
    "OfflineError",
    "OutOfBoundsError",
    "RaceError",
    "Report",
    "ToolchainMissingError",
    "Traffic",
    "UnsupportedError",
    "Usage",
    "compile_kernel",
    "emulate",
    "fetch",
    "installed",
    "record",
    "supported",
]
