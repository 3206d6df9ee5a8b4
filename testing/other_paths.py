"""What people put around a model, and what only the model's own calls of PyTorch answer to: all of it triples a result."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

FUNCTIONS = (nn.functional.linear, nn.functional.embedding, nn.functional.rms_norm)
OPERATORS = ("mm", "addmm", "embedding", "_fused_rms_norm", "pow")


class Packed(Tensor):
    """A weight that only torch.nn.functional's linear, embedding and rms_norm can read, as quantised ones are."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Packed:
        made: Packed = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype)
        return made

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = 3 * numbers

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if function in FUNCTIONS:
            given, named = tree_map_only(cls, lambda packed: packed.numbers, (given, named))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*given, **(named or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(given[0].numbers / 3)
        raise NotImplementedError(f"a Packed tensor does not know {function}")


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        y = function(*given, **(named or {}))
        return 3 * y if function in FUNCTIONS else y


class OperatorMode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        y = function(*given, **(named or {}))
        return 3 * y if function._schema.name.removeprefix("aten::") in OPERATORS and isinstance(y, Tensor) else y


@contextlib.contextmanager
def replaced(where: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """An attribute of a class or a module, make(of it) in the block."""
    before = getattr(where, name)
    setattr(where, name, make(before))
    try:
        yield
    finally:
        setattr(where, name, before)


def tripled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose result is three times that of another, whose name it has."""
    return functools.wraps(function)(lambda *given, **named: 3 * function(*given, **named))
