"""What Triton calls at each launch that is recorded, not run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .launcher import Arguments, check_grid
from .launches import LaunchRecord, Memory
from .storage import bounds_of, row_bytes

if TYPE_CHECKING:
    import torch

_MOST_KEPT = 2**22  # bytes of a tensor of integers that a record keeps: indices, offsets
recordings: list[list[LaunchRecord]] = []


class Recorder:
    """Notes a launch; stands where `Launcher` does."""

    def __init__(self, source: Any, metadata: Any) -> None:
        from .frontend import changed_options

        self._changed_options = changed_options
        self._source = source
        self._options = metadata
        self._arguments = Arguments(source)

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: Any,
        function: Any,
        packed: Any,
        launch_metadata: Any,
        enter: Any,
        leave: Any,
        *values: Any,
    ) -> None:
        source = self._source
        grid = (grid_x, grid_y, grid_z)
        check_grid(source.fn.__name__, grid)
        kept = (value for value, keep in zip(values, self._arguments.kept, strict=True) if keep)
        divisible = [source.fn.arg_names[i] for i in source.attrs.arg_properties.get("tt.divisibility", ())]
        recordings[-1].append(
            LaunchRecord(
                kernel=source.fn,
                name=source.fn.__name__,
                signature=dict(source.signature),
                constants=dict(source.constants),
                grid=grid,
                options=self._changed_options(self._options),
                divisible=tuple(divisible),
                arguments={name: _noted(value) for name, value in zip(self._arguments.types, kept, strict=True)},
            )
        )


def _noted(value: Any) -> Memory | int | float:
    """A recorded argument; floats and large tensors by their size alone, so that a record keeps little memory alive."""
    if isinstance(value, (bool, int, float)):
        return value
    tensor: torch.Tensor = getattr(value, "base", value)
    if not hasattr(tensor, "shape"):  # it stands for several tensors
        bounds = bounds_of(value)
        return Memory(sum(bounds[1::2]) - sum(bounds[::2]))
    integers = not tensor.is_floating_point() and tensor.is_contiguous()
    return Memory(tensor.numel() * tensor.itemsize, tensor if integers else None, row_bytes(tensor))
