"""Whether triton-ascend, the front end of every compilation, can be used in this environment."""

from __future__ import annotations

import importlib
import importlib.util

from npu_tiling import doctor as installation

from ..errors import ToolchainMissingError


def missing_triton_ascend() -> str | None:
    """Why triton-ascend cannot be used here, with the commands that cure it; None if it can."""
    try:
        found = importlib.util.find_spec("triton.backends.ascend")
    except Exception:  # whatever a Triton raises that is made of the files of two
        found = None
    installed = installation.version("triton-ascend")
    if installed not in (None, installation.TRITON_ASCEND):
        pip = f"pip install --force-reinstall --no-deps triton-ascend=={installation.TRITON_ASCEND}"
        return (
            f"npu-offline drives the passes of triton-ascend {installation.TRITON_ASCEND}, not of {installed}. Cure: {pip}"
        )
    if found is not None:
        return None
    problem = installation.triton_problem(ascend=True)
    if problem is not None:
        return str(problem)
    triton = importlib.util.find_spec("triton")
    return f"the module triton has no backend for Ascend ({triton.origin if triton else 'it is missing'})"


def require_triton_ascend() -> None:
    """Raise ToolchainMissingError where triton-ascend cannot be used."""
    reason = missing_triton_ascend()
    if reason:
        raise ToolchainMissingError(reason)
    try:
        importlib.import_module("triton.backends.ascend.compiler")
    except Exception as error:  # again those of two Tritons, of which one has this backend
        problem = installation.triton_problem(ascend=True) or f"triton-ascend cannot be imported: {error}"
        raise ToolchainMissingError(str(problem)) from error
