"""What happens when a tile that should fit does not, with a user's compiler or on a user's device."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from ..errors import GPUResourcesError, TileTooLargeError, UnifiedBufferError
from ..installation.cann import TRITON_ASCEND
from . import recording
from .spec import LaunchSpec, Tiled

ResultT = TypeVar("ResultT")

_replaced: dict[tuple[object, LaunchSpec], LaunchSpec] = {}


_UB_OVERFLOW = re.compile(r"ub overflow, requires (\d+) bits while (\d+) bits available", re.IGNORECASE)


def is_ub_overflow(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, is the Ascend compiler's complaint that a kernel needs more Unified Buffer."""
    return _ub_overflow(error) is not None


def _ub_overflow(error: BaseException | None) -> re.Match[str] | None:
    """The compiler's complaint.

    Its note that it tries again after an overflow ("Ub overflow detected; ... retrying") is no complaint: what comes of the
    trial may be an error of another kind.
    """
    for cause in _causes(error):
        said = [str(cause)]
        for stream in (getattr(cause, "stderr", None), getattr(cause, "stdout", None)):
            said.append(stream.decode(errors="replace") if isinstance(stream, bytes) else str(stream))
        for text in said:
            complaint = _UB_OVERFLOW.search(text)
            if complaint:
                return complaint
    return None


def is_out_of_resources(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, is Triton's complaint that a kernel needs more than a CUDA device has."""
    return _out_of_resources(error) is not None


def _out_of_resources(error: BaseException | None) -> BaseException | None:
    return next((cause for cause in _causes(error) if type(cause).__name__ == "OutOfResources"), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class Refusal(NamedTuple):
    """Why a launch cannot run with its tile.

    Attributes:
        error: what to raise where there is no smaller tile.
        reason: what exceeds what; a sentence goes on with it after the tile.
        cure: a sentence with what is left to do.
    """

    error: type[TileTooLargeError]
    reason: str
    cure: str

    def without_smaller(self, name: object, tiling: Any) -> TileTooLargeError:
        """The error of a launch for which there is no smaller tile."""
        return self.error(f"{name}: not even its smallest tile runs: {tiling} {self.reason}. {self.cure}")


_REPORT = "please report this error, with the versions that `python -m npu_tiling` prints"
_CURE_ASCEND = f"Take a CANN whose compiler it was tried with ({', '.join(TRITON_ASCEND)}), and {_REPORT}."
_CURE_CUDA = f"Take tensors in a smaller dtype or with shorter rows, or a GPU that has more, and {_REPORT}."


def refusal(error: BaseException) -> Refusal | None:
    """Why a launch failed, if a smaller tile may run; None for any other error."""
    overflow = _ub_overflow(error)
    if overflow:
        needed, available = (int(bits) // 8 for bits in overflow.groups())
        return Refusal(
            UnifiedBufferError,
            f"overflows the Unified Buffer with the installed compiler (it needs {needed} bytes of {available})",
            _CURE_ASCEND,
        )
    exceeded = _out_of_resources(error)
    if exceeded is not None:
        return Refusal(GPUResourcesError, f"needs more than this GPU has ({exceeded})", _CURE_CUDA)
    return None


def launch_with_fallback(
    name: object, spec: LaunchSpec, run: Callable[[LaunchSpec], ResultT], smaller: Callable[[Any], Tiled | None]
) -> ResultT:
    """Run a launch; where it overflows the Unified Buffer or is out of a CUDA device's resources, run the next smaller one.

    The spec that worked is remembered for the process, so the failed compilation happens once, and so does the warning.

    Args:
        name: what names the kernel in the warning, as a string, and in the memory.
        spec: the launch that tiling chose: one object for equal launches, from a cached function.
        run: launches a spec; its result is returned.
        smaller: from a tiling to the next smaller one, or None when there is none.

    Raises:
        UnifiedBufferError, GPUResourcesError: not even the smallest tiling fits; the compiler's or Triton's own error is its
            cause.
    """
    chosen = _replaced.get((name, spec), spec) if _replaced else spec
    while True:
        try:
            if recording.active is None:
                result = run(chosen)
            else:
                with recording.active.attempt(name, chosen, smaller) as allowed:
                    result = run(allowed)
        except Exception as error:
            refused = refusal(error)
            if refused is None:
                raise
            tiling = chosen.launch
            following = smaller(tiling)
            if following is None:
                raise refused.without_smaller(name, tiling) from error
            warning = f"{name}: {tiling} {refused.reason}; using {following} instead."
            warnings.warn(warning, RuntimeWarning, stacklevel=2)
            chosen = LaunchSpec.of(following, chosen.flags)
            continue
        if chosen is not spec:
            _replaced[name, spec] = chosen
        return result
