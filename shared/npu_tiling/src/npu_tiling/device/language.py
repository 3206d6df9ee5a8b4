"""Triton for pages of kernels that host code imports: `from npu_tiling.device.language import tl, triton`.

Where no Triton can be imported, stand-ins let such a page be imported all the same: `triton.jit` leaves a kernel the plain
Python function that it decorates, whose parameters can be read and which cannot be launched.
"""

from __future__ import annotations

from typing import Any


class _Absent:
    """Every name of Triton's that a page asks for while it is imported."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name)

    def __contains__(self, name: object) -> bool:
        return False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if arguments else self


tl: Any
triton: Any
try:
    import triton
    import triton.backends
    import triton.language as tl
except Exception:  # two Tritons in one environment break each other in many ways; a launch says what is wrong
    triton = tl = _Absent("triton")
