"""Compile, check and emulate Ascend Triton kernels on a machine without an NPU, with the real Ascend compiler."""

from .compilation import compile_kernel
from .emulation import emulate, record
from .errors import CompilationError, OfflineError, OutOfBoundsError, ToolchainMissingError, UnsupportedError
from .launches import Emulation, Launch, LaunchRecord, Traffic
from .reports import Report, Usage
from .toolchains import VERSIONS, fetch, installed, supported

__all__ = [
    "VERSIONS",
    "CompilationError",
    "Emulation",
    "Launch",
    "LaunchRecord",
    "OfflineError",
    "OutOfBoundsError",
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
