"""What stopped a call of somebody's code, and whether that says something about its results."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import UnsupportedError, ours, reason_of
from ..module.places import Place

_NOT_THEIRS = (sysconfig.get_path("purelib"), str(Path(__file__).parents[1]))

_OF_TRITON = str(Path(sysconfig.get_path("purelib"), "triton"))
_NESTED = re.compile(
    r"""<ast\.\w+ object at 0x\w+>, (['"])(.*)\1\)$""", re.DOTALL
)  # the reason, in a function that a kernel calls
_ADVICE = {  # by what Triton says of a kernel
    "unexpected type fp8": ": triton-ascend 3.2.0 has no casts to 8-bit floats",
    "cannot cast pointer<": ": these are addresses: tl.load reads what is there",
    "Cannot call @triton.jit'd outside of the scope of a kernel": ": Triton 3.2 has no methods: tl.sum(x, 0), not x.sum(0)",
    "unsupported tensor index: constexpr[": ": no tensor has elements by number, and Triton 3.2 no tuples: name each",
    "'constexpr' object is not subscriptable": ": Triton 3.2 has no tuples of constants: give their elements",
}
_NO_LIBDEVICE = (
    ": functions of triton.language.extra.libdevice return None with triton-ascend 3.2.0: import them from"
    " triton.language.extra.ascend.libdevice, or take those of tl.math"
)


def said_of(error: BaseException) -> str:
    """One message for what stopped a call: ours, Triton's, or an exception of the caller's code with its line."""
    reason = reason_of(error)
    if reason:
        return reason
    if _is_unknown_option(error):
        return f"Triton refuses the launch: {error.args[0]}: triton-ascend 3.2.0 has no such option"
    missing = _missing_from_triton(error)
    place = refused_at(error)
    refuses = f"Triton refuses the kernel{f' ({place})' if place.file else ''}: "
    if missing:
        return f"{refuses}triton-ascend 3.2.0 has no {missing}"
    if _is_of_triton(error):
        said = _without_frame(str(error))
        source, caret, reason = said.rpartition("^\n")
        inner = _NESTED.search(reason)
        reason = inner[2].replace("\\'", "'") if inner else reason
        hint = _NO_LIBDEVICE if "NoneType" in reason else ""
        hint += "".join(advice for sign, advice in _ADVICE.items() if sign in reason)
        return f"{refuses}{reason}{hint}\n{source}{caret}".rstrip()
    error = _wrapped(error) or error
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THEIRS)]
    places = (Place(frame.filename, frame.lineno or 0, (frame.colno or 0) + 1) for frame in frames[-1:])
    return f"{type(error).__name__}: {error}{''.join(f' ({place})' for place in places)}"


def refused_at(error: BaseException | None) -> Place:
    """Where Triton refuses a kernel: in the innermost function that it was compiling."""
    place = Place()
    while error is not None:
        frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
        nodes = [getattr(error, "node", None), *(each.get("node") for each in reversed(frames))]
        node = next((each for each in nodes if hasattr(each, "lineno")), None)
        functions = (each["self"] for each in reversed(frames) if hasattr(each.get("self"), "starting_line_number"))
        function = _function_of(getattr(error, "src", None)) or next(functions, None)
        if function is not None and isinstance(node, ast.expr | ast.stmt):
            place = _place_in(function, node) or place
        error = error.__cause__ if _is_of_triton(error) else None
    return place


def _function_of(source: str | None) -> Any:
    """The JIT function of a source; Triton's errors have the source alone."""
    from triton.runtime.jit import JITFunction

    found = (each for each in gc.get_objects() if issubclass(type(each), JITFunction) and each.src == source)
    return next(found, None) if source else None


def _place_in(function: Any, node: ast.expr | ast.stmt) -> Place | None:
    from triton.compiler.code_generator import get_jit_fn_file_line

    file, first = get_jit_fn_file_line(function)
    return None if file.startswith(_OF_TRITON) else Place(file, first - 1 + node.lineno, node.col_offset + 1)


def is_refusal(error: BaseException | None) -> bool:
    """Whether an error says nothing about results: Triton refuses the kernel, the emulation cannot run it or fails."""
    if error is not None and not reason_of(error):
        return _is_of_triton(error) or _is_unknown_option(error) or bool(_missing_from_triton(error))
    return isinstance(ours(error), UnsupportedError)


def _is_of_triton(error: BaseException) -> bool:
    return type(error).__module__.startswith("triton.") and _wrapped(error) is None


def _is_unknown_option(error: BaseException) -> bool:
    return isinstance(error, KeyError) and "was specified but unrecognised" in str(error)


def _missing_from_triton(error: BaseException) -> str:
    """What a kernel names of a module of Triton that this release does not have; empty if the error is another."""
    module = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and isinstance(module, ModuleType) and module.__name__.startswith("triton"):
        return f"{module.__name__}.{error.name}"
    return ""


def _wrapped(error: BaseException) -> BaseException | None:
    """A mistake of this package's, around which Triton put its error of a failed stage; None where Triton itself refuses."""
    inside = error.__context__ if type(error).__name__ == "MLIRCompilationError" else None
    return None if isinstance(inside, (RuntimeError, subprocess.CalledProcessError)) else inside


def _without_frame(said: str) -> str:
    """A message of triton-ascend's without its banner and its name of a folder."""
    return "\n".join(line for line in said.splitlines() if line and not line.startswith(("///---", "[INFO]")))
