"""What stock Triton's interpreter lacks for our kernels, until the block ends: `complete()`.

Casts to bf16 round, as a GPU's do; the interpreter cuts. Inline assembly is computed by what its instruction means. A loop's
counter is a number of Triton, which has a dtype; the interpreter's is Python's. Products of bf16 are products of numbers;
the interpreter's are of their bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from npu_tiling.plans import Neighbours


def _rounded_to_bf16(bits: Any) -> Any:
    """uint32 bits of fp32 numbers whose upper half is the nearest bf16 number, the even one of two; NaN stays as it is."""
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.where(np.isnan(bits.view(np.float32)), bits | np.uint32(0x400000), rounded)


def _bf16_as_fp32(data: Any) -> Any:
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    return (_rounded_to_bf16(bits) & np.uint32(0xFFFF0000)).view(np.float32)


def _sigmoid(data: Any) -> Any:
    with np.errstate(over="ignore"):
        return (1.0 / (1.0 + np.exp(-data))).astype(np.float32)


def _widened(data: Any) -> Any:
    """bf16 numbers, which the interpreter keeps as uint16, in fp32."""
    return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)


# By a part of the text of the assembly.
ASSEMBLY: dict[str, Callable[[Any], Any]] = {
    "ex2.approx.ftz.f32": _sigmoid,
    "shl.b32 $0, $2, 16;": _widened,
    "prmt.b32 $0, $2, 0, 0x1044;": _widened,
}


class _Results:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def get_result(self, number: int) -> Any:
        assert number == 0
        return self._handle


@contextlib.contextmanager
def complete() -> Iterator[None]:
    """Kernels that are imported in this block or before, with TRITON_INTERPRET=1, run as on a GPU."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float  # type: ignore[attr-defined]

    def convert_float(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            data = _bf16_as_fp32(data)
        return convert(data, source, target, mode)

    def inline_assembly(_: Any, text: str, constraints: str, values: Any, types: Any, *options: Any) -> _Results:
        meaning = next((function for part, function in ASSEMBLY.items() if part in text), None)
        if meaning is None:
            raise NotImplementedError(f"tests/cuda/interpreter.py does not know the assembly {text!r}.")
        return _Results(interpreter.TensorHandle(meaning(values[0].data), tl.float32))

    def counted(*bounds: Any, **options: Any) -> Iterator[Any]:
        for i in range(*(int(getattr(getattr(bound, "handle", None), "data", bound)) for bound in bounds)):
            yield tl.tensor(interpreter.TensorHandle(np.array([i], dtype=np.int32), tl.int32), tl.int32)

    patch_core = interpreter._patch_lang_core  # type: ignore[attr-defined]

    def patch_core_and_range(language: Any, scope: Any) -> None:
        patch_core(language, scope)
        scope.set_attr(language, "range", counted)

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    dot, executed = builder.create_dot, executor.__call__

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        operands = [
            interpreter.TensorHandle(_widened(each.data), tl.float32) if each.dtype.scalar == tl.bfloat16 else each
            for each in (a, b)
        ]
        return dot(self, *operands, *others)

    def execute(self: Any, *arguments: Any, **named: Any) -> Any:
        first = [argument[0] if isinstance(argument, Neighbours) else argument for argument in arguments]
        return executed(self, *first, **named)

    with (
        mock.patch.object(interpreter, "_convert_float", convert_float),
        mock.patch.object(interpreter, "_patch_lang_core", patch_core_and_range),
        mock.patch.object(executor, "__call__", execute),
        mock.patch.object(builder, "create_dot", create_dot),
        mock.patch.object(builder, "create_inline_asm", inline_assembly),
    ):
        yield
