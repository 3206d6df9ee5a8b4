"""A dispatch mode that also sees what operators of ours call."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class InsideOperators(TorchDispatchMode):
    """Gives every operator of PyTorch's to `run`, those within operators of ours too."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.type.upper()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace.startswith("npu_"):
            with self:  # for the operators that this one calls
                return func.redispatch(self._key, *args, **kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator of PyTorch's returns."""
        raise NotImplementedError
