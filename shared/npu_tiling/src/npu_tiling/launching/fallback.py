"""What happens when a tile that should fit does not, with a user's compiler or on a user's device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import UnifiedBufferError
from .kernels import LaunchSpec, Tiled

ResultT = TypeVar("ResultT")

_replaced: dict[tuple[str, LaunchSpec], LaunchSpec] = {}


def is_ub_overflow(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, is the Ascend compiler's complaint that a kernel needs more Unified Buffer.

    Its note that it tries again after an overflow ("Ub overflow detected; ... retrying") is no complaint: what comes of the
    trial may be an error of another kind.
    """
    while error is not None:
        said = [str(error)]
        for stream in (getattr(error, "stderr", None), getattr(error, "stdout", None)):
            said.append(stream.decode(errors="replace") if isinstance(stream, bytes) else str(stream))
        if any("ub overflow, requires" in text.lower() for text in said):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_out_of_resources(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, is Triton's complaint that a kernel needs more than a CUDA device has."""
    while error is not None:
        if type(error).__name__ == "OutOfResources":
            return True
        error = error.__cause__ or error.__context__
    return False


def is_no_cooperation(error: BaseException | None) -> bool:
    """Whether `error` says that programs which wait for one another cannot be launched: too many, or an older Triton."""
    return error is not None and "cooperative" in str(error).lower()


def launch_with_fallback(
    name: str, spec: LaunchSpec, run: Callable[[LaunchSpec], ResultT], smaller: Callable[[Any], Tiled | None]
) -> ResultT:
    """Run a launch; where it overflows the Unified Buffer or is out of a CUDA device's resources, run the next smaller one.

    So where programs that wait for one another are refused (`launch_cooperative_grid`: Triton before 3.3, or a device that
    does not hold all of them at once).

    The spec that worked is remembered for the process, so the failed compilation happens once, and so does the warning.

    Args:
        name: the kernel's name, for the warning and the memory.
        spec: the launch that tiling chose: one object for equal launches, from a cached function.
        run: launches a spec; its result is returned.
        smaller: from a tiling to the next smaller one, or None when there is none.

    Raises:
        UnifiedBufferError: not even the smallest tiling fits; the compiler's or Triton's own error is its cause.
    """
    chosen = _replaced.get((name, spec), spec) if _replaced else spec
    while True:
        try:
            result = run(chosen)
        except Exception as error:
            if is_ub_overflow(error):
                what = "overflows the Unified Buffer with the installed compiler"
            elif is_out_of_resources(error):
                what = f"needs more than this device has ({error})"
            elif is_no_cooperation(error):
                what = f"cannot be launched with programs that wait for one another ({error})"
            else:
                raise
            tiling = chosen.launch
            following = smaller(tiling)
            if following is None:
                raise UnifiedBufferError(f"{name}: not even its smallest tile, {tiling}, compiles for this chip.") from error
            warnings.warn(f"{name}: {tiling} {what}; using {following} instead.", RuntimeWarning, stacklevel=2)
            chosen = LaunchSpec.of(following, chosen.flags)
            continue
        if chosen is not spec:
            _replaced[name, spec] = chosen
        return result
