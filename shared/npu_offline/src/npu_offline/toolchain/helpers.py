"""Helpers of one name: triton-ascend 3.2.0 compiles the first and calls it for the second (compiler fault 11)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

from triton.compiler import code_generator

from ..errors import CompilationError

_HASH = 64  # digits at the start of a function's cache key: its source and that of its helpers; its line follows
_calling = threading.local()


def computes_the_same(one: Any, other: Any) -> bool:
    """Whether two JIT functions have the same source and helpers, and read the same global values."""
    return one is other or (one.cache_key[:_HASH] == other.cache_key[:_HASH] and _globals_of(one) == _globals_of(other))


def _globals_of(function: Any) -> dict[str, Any]:
    return {name: value for (name, _), (value, _) in function.used_global_vals.items()}


def refuse_helpers_of_one_name() -> None:
    """Make Triton's code generator raise a `CompilationError` where it would call another function than the kernel says."""
    generator: Any = code_generator.CodeGenerator
    if hasattr(generator.call_JitFunction, "__wrapped__"):
        return
    call, mangle = generator.call_JitFunction, code_generator.mangle_fn

    @functools.wraps(call)
    def checked_call(self: Any, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # The dictionary of return types is one for a whole kernel: each generator of a helper is given it.
        _calling.function, _calling.compiled = function, self.function_ret_types
        return call(self, function, args, kwargs)

    @functools.wraps(mangle)
    def checked_mangle(name: str, types: Any, constants: Any) -> str:
        mangled: str = mangle(name, types, constants)
        function = _calling.function
        first = _calling.compiled.setdefault(("helper", mangled), function)
        if not computes_the_same(first, function):
            raise CompilationError(
                f"a kernel calls two helpers of the name {name} with the same types of arguments: {_place(first)} and "
                f"{_place(function)}; triton-ascend would call the first in place of the second: rename one"
            )
        return mangled

    generator.call_JitFunction, code_generator.mangle_fn = checked_call, checked_mangle


def _place(function: Any) -> str:
    code = function.fn.__code__
    return f"{function.fn.__module__}.{function.fn.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
