"""What happens when a tile that should fit does not, with a user's compiler or on a user's device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import GPUResourcesError, TileTooLargeError, UnifiedBufferError
from ..installation.cann import TRITON_ASCEND

replaced: dict[tuple[str, Any], Any] = {}
"""What takes the place of a refused tiling, in all later plans: by the name of its decision and the tiling."""

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
