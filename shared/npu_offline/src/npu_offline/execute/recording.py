"""`record`: launches on CPU tensors are noted, and run only where later launches depend on integers that they write."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import npu_tiling

from ..errors import reason_of, reported
from ..launches import RESERVED, LaunchRecord, Memory
from ..toolchain.compilation import front_end_of
from ..toolchain.triton_ascend import require_triton_ascend
from .emulation import active_driver, emulate
from .launcher import Arguments, check_grid, record_of
from .storage import bounds_of, row_bytes, tensor_of

if TYPE_CHECKING:
    import torch

_MOST_KEPT = 2**22  # bytes of the largest integer tensor whose values a record keeps: indices, offsets
_WRITTEN = re.compile(r"%arg(\d+): memref<[^>]*> \{[^}]*tt\.tensor_kind = [12] : i32")  # 0: only read
recordings: list[tuple[str, list[LaunchRecord]]] = []
"""The chip and the launches so far of each active `record`, the innermost last."""


class Recorder:
    """Records a launch, in place of `Launcher`."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._source = source
        self._options = metadata
        self._arguments = Arguments(source)

    @reported
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
        grid = (grid_x, grid_y, grid_z)
        check_grid(self._arguments.name, grid)
        kept = [value for value, keep in zip(values, self._arguments.kept, strict=True) if keep]
        given = dict(zip(self._arguments.types, kept, strict=True))
        soc, records = recordings[-1]
        record = record_of(self._source, self._options, grid, {name: _noted(value) for name, value in given.items()})
        records.append(record)
        written = _integers_written(record)
        if written:
            _keep(records, written)
            _run(record, given, soc)


def _integers_written(record: LaunchRecord) -> list[torch.Tensor]:
    """The tensors of integers that a record keeps and the launch writes."""
    if not any(_values(argument) is not None for argument in record.arguments.values()):
        return []
    _, _, linalg = front_end_of(record)
    arguments = list(record.arguments.values())
    written = (_values(arguments[int(number) - RESERVED]) for number in _WRITTEN.findall(linalg))
    return [tensor for tensor in written if tensor is not None]


def _keep(records: Iterable[LaunchRecord], written: Iterable[torch.Tensor]) -> None:
    """Give the launches so far copies of the tensors that are about to be written."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in written}
    for record in records:
        for name, argument in record.arguments.items():
            if not isinstance(argument, Memory) or argument.values is None:
                continue
            if argument.values.untyped_storage().data_ptr() in storages:
                record.arguments[name] = replace(argument, values=argument.values.clone())


def _run(record: LaunchRecord, given: Mapping[str, Any], soc: str) -> None:
    """Run the launch from its Linalg IR, where the emulator can."""
    try:
        with emulate(soc):
            record.kernel[record.grid](**record.constants, **given, **record.options)
    except Exception as error:
        if not reason_of(error):
            raise


def _values(argument: Memory | int | float) -> torch.Tensor | None:
    return argument.values if isinstance(argument, Memory) else None


def _noted(value: Any) -> Memory | int | float:
    """An argument as a record keeps it: only the size of floating-point and of large tensors, to save memory."""
    if isinstance(value, (bool, int, float)):
        return value
    tensor = tensor_of(value)
    if tensor is None:
        bounds = bounds_of(value)
        return Memory(sum(bounds[1::2]) - sum(bounds[::2]))
    nbytes = tensor.numel() * tensor.itemsize
    integers = not tensor.is_floating_point() and tensor.is_contiguous() and nbytes <= _MOST_KEPT
    return Memory(nbytes, tensor if integers else None, row_bytes(tensor))


@contextlib.contextmanager
def record(soc: str = "Ascend910B4") -> Iterator[list[LaunchRecord]]:
    """Collect launches on CPU tensors instead of running them: outputs stay as they were allocated.

    It applies to the whole process, not to one thread. A launch that writes integer tensors of up to 4 MiB runs as well,
    from its Linalg IR where the emulator can run that: later launches may depend on the integers.

    Args:
        soc: the chip that operators are told to tile for.

    Yields:
        The launches so far, each of which `compile_kernel` accepts.

    Raises:
        ToolchainMissingError: triton-ascend is missing.
    """
    device = npu_tiling.soc(soc)
    require_triton_ascend()
    from .backend import HostDriver, recorded_target

    records: list[LaunchRecord] = []
    driver = HostDriver(recorded_target(), device, Recorder)
    with active_driver(driver), npu_tiling.use_device(device, emulated=True):
        recordings.append((soc, records))
        try:
            yield records
        finally:
            recordings[:] = [other for other in recordings if other[1] is not records]
