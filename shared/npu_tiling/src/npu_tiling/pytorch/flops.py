"""Counts of operators' products for `torch.utils.flop_counter`, registered once that is imported: it imports Triton."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COUNTER = "torch.utils.flop_counter"
_waiting: list[tuple[Any, Callable[..., int]]] = []


def count_flops(operator: Any, flops: Callable[..., int]) -> None:
    """Let PyTorch's counter count flops(*arguments) for an operator."""
    _waiting.append((operator, flops))
    if _COUNTER in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for operator, flops in _waiting:
        register_flop_formula(operator, get_raw=True)(_without_results(flops))
    _waiting.clear()


def _without_results(flops: Callable[..., int]) -> Callable[..., int]:
    def count(*arguments: Any, out_val: Any) -> int:
        return flops(*arguments)

    return count


class _Finder:
    """Finds the counter's module, for the first import of it, as one that registers what waits when it has been run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
