"""Compile, check and emulate Ascend Triton kernels on a machine without an NPU, with the real Ascend compiler."""

from .errors import (
    CompilationError,
    EndlessLoopError,
    Finding,
    FindingsError,
    OfflineError,
    OutOfBoundsError,
    RaceError,
    ToolchainMissingError,
    UnsupportedError,
)
from .execute.emulation import emulate
from .execute.recording import record
from .launches import Emulation, Launch, LaunchRecord, Ledger, Traffic
from .reports import Report, Usage
from .toolchain.compilation import compile_kernel
from .toolchain.compilers import VERSIONS, fetch, installed, supported

__all__ = [
    "VERSIONS",
    "CompilationError",
    "EndlessLoopError",
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
