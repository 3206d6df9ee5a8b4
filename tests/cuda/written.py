"""What PyTorch's own kernels write counts as written although initcheck does not watch them.

initcheck takes as written what a kernel stored that it watches, and what the driver set or copied. Watching all of PyTorch's
and cuBLAS's kernels takes far too long, so it watches ours alone, and the driver sets the memory of what PyTorch's operators
wrote before one of PyTorch's kernels puts the values back. Memory that was only allocated (`torch.empty`) and what our
kernels left unwritten stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from inside import InsideOperators
from npu_tiling import Kernels
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Whose results nobody has written.
_ALLOCATE = ("empty", "new_empty", "resize")


class MarkWritten(InsideOperators):
    """Marks what PyTorch's operators wrote on a device as written; within operators of ours too."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results = func(*args, **kwargs)
        if not func._schema.name.partition("::")[2].lstrip("_").startswith(_ALLOCATE):
            for tensor in tree_leaves(_written(func._schema, args, kwargs, results)):
                if isinstance(tensor, Tensor) and tensor.device.type == self.device.type:
                    self.mark(tensor)
        return results

    def mark(self, tensor: Tensor) -> None:
        """Let the driver set a tensor's part of memory, and put back what was there."""
        if tensor.layout != torch.strided or not tensor.numel():
            return
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        memory = tensor.detach().as_strided((span,), (1,), tensor.storage_offset()).view(torch.uint8)
        values = torch.bitwise_or(memory, 0)  # by a kernel: the driver's copies are checked
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
            status = ctypes.CDLL("libcuda.so.1").cuMemsetD8_v2(
                ctypes.c_uint64(memory.data_ptr()), ctypes.c_ubyte(0), ctypes.c_size_t(memory.numel())
            )
            if status:
                raise RuntimeError(f"cuMemsetD8 failed: {status}")
        torch.bitwise_or(values, 0, out=memory)


@contextlib.contextmanager
def marking(mode: MarkWritten) -> Iterator[None]:
    """Marks what PyTorch's operators wrote, and after each launch what it was given as a descriptor."""
    launch = Kernels.launch

    def launch_and_mark(kernels: Kernels, *arguments: Any) -> None:
        launch(kernels, *arguments)
        for given in tree_leaves(arguments, is_leaf=lambda part: hasattr(part, "block_shape")):
            if hasattr(given, "block_shape"):
                mode.mark(given.base)

    with mock.patch.object(Kernels, "launch", launch_and_mark), mode:
        yield


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> list[Any]:
    """New results, and arguments that the operator writes; no views.

    `to`, `reshape` and `contiguous` return a view or a copy: what is not in the memory of an argument is new.
    """
    results = results if isinstance(results, tuple) and len(schema.returns) > 1 else (results,)
    memory = {_memory(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
    written = [
        result
        for returned, result in zip(schema.returns, results, strict=False)
        if returned.alias_info is None or (isinstance(result, Tensor) and _memory(result) not in memory)
    ]
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return written


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
