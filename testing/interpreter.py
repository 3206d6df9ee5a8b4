"""Triton's interpreter, where TRITON_INTERPRET=1 is set before Triton is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def mend() -> None:
    """Triton 3.2 makes a number of an array of one element by int(), which NumPy 2.4 refuses.

    At each call of a function of a kernel it also looks at all of Triton's language for what it has replaced already, which
    takes half of the time: here once for each module.
    """
    from triton.runtime import interpreter

    patch_tensor: Callable[..., None] = interpreter._patch_lang_tensor
    patch_language: Callable[[Any], object] = interpreter._patch_lang
    patched: set[int] = set()

    def with_index(tensor: Any, *others: object) -> None:
        patch_tensor(tensor, *others)
        tensor.__index__ = lambda self: self.handle.data.item()

    def once(function: Any) -> object:
        module = id(function.__globals__)
        if module in patched:
            return None
        scope = patch_language(function)
        if scope is None:  # later releases return what takes back their replacements, after each call
            patched.add(module)
        return scope

    interpreter._patch_lang_tensor, interpreter._patch_lang = with_index, once
