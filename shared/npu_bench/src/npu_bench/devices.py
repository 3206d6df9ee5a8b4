"""What a benchmark needs of a device: a clock on its queue, memory statistics, a cache to flush."""

from __future__ import annotations

import abc
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from .errors import BenchError, UnavailableError

ResultT = TypeVar("ResultT")

MIB = 2**20
# Several times the last-level cache: 50 MB on an H200, 192 MB on an Ascend 910B.
_WARM_UP_CALLS = 3  # before a capture: compiling and first allocations cannot be recorded
_FLUSH_BYTES = {"cuda": 256 * MIB, "npu": 768 * MIB, "cpu": 64 * MIB}


class Device(abc.ABC):
    """One device of one kind.

    Attributes:
        kind: "cuda", "npu" or "cpu".
        torch_device: where tensors are made.
        name: the chip, as its driver calls it.
        asynchronous: calls return before the device has run them.
        reference_dtype: the widest dtype whose arithmetic the device has.
        copy_bytes: size of the buffer whose copy measures the memory's bandwidth.
        matmul_size, matmul_dtype: the square product that measures the arithmetic's rate.
    """

    kind: str
    name: str
    torch_device: torch.device
    asynchronous: bool
    reference_dtype = torch.float64
    copy_bytes: int
    matmul_size: int
    matmul_dtype: torch.dtype
    _flush_buffer: torch.Tensor | None = None

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has run everything."""

    @abc.abstractmethod
    def stamp(self) -> Any:
        """Put a time stamp into the device's queue."""

    @abc.abstractmethod
    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two stamps that the device has reached."""

    @abc.abstractmethod
    def allocated(self) -> int | None:
        """Bytes that live tensors take; None where nobody counts them."""

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Let `peak` start from what is allocated now."""

    @abc.abstractmethod
    def peak(self) -> int | None:
        """The most bytes that were allocated at once since `reset_peak`; None where nobody counts them."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give memory that no tensor uses back to the device."""

    @abc.abstractmethod
    def capture(self, call: Callable[[], ResultT]) -> tuple[Callable[[], None], ResultT]:
        """Record what a call queues on the device.

        Returns:
            A function that queues all of it again at once, and the results of the call, which it writes again.

        Raises:
            UnavailableError: the device has no such graphs.
            RuntimeError: the call waits for the device, or does something else that a graph cannot hold.
        """

    def flush(self) -> None:
        """Overwrite a buffer several times the size of the last-level cache, so that nothing else is left in it."""
        if self._flush_buffer is None:
            self._flush_buffer = torch.empty(_FLUSH_BYTES[self.kind] // 4, dtype=torch.int32, device=self.torch_device)
        self._flush_buffer.zero_()


class Accelerator(Device):
    """A CUDA GPU or an Ascend NPU, through `torch.cuda` or `torch.npu`, whose functions have the same names."""

    asynchronous = True
    copy_bytes = 2048 * MIB
    matmul_size = 8192
    matmul_dtype = torch.bfloat16

    def __init__(self, kind: str, backend: Any, torch_device: torch.device) -> None:
        self.kind = kind
        self.torch_device = torch_device
        self._backend = backend
        self.name = backend.get_device_name()
        if kind == "npu":  # the vector unit has no fp64
            self.reference_dtype = torch.float32
            self.name += ", stand-in of CANN: host times alone" if over_stand_in() else ""

    def synchronize(self) -> None:
        self._backend.synchronize()

    def stamp(self) -> Any:
        event = self._backend.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end))

    def allocated(self) -> int:
        return int(self._backend.memory_allocated())

    def reset_peak(self) -> None:
        self._backend.reset_peak_memory_stats()

    def peak(self) -> int:
        return int(self._backend.max_memory_allocated())

    def release(self) -> None:
        self._backend.empty_cache()

    def capture(self, call: Callable[[], ResultT]) -> tuple[Callable[[], None], ResultT]:
        graph_type = getattr(self._backend, f"{self.kind.upper()}Graph", None)
        if graph_type is None:
            raise UnavailableError(f"torch.{self.kind} has no {self.kind.upper()}Graph")
        current, side = self._backend.current_stream(), self._backend.Stream()
        side.wait_stream(current)
        with self._backend.stream(side):
            for _ in range(_WARM_UP_CALLS):
                call()
            with self._waiting_is_an_error():
                call()
        current.wait_stream(side)
        graph = graph_type()
        with self._backend.graph(graph):
            results = call()
        return graph.replay, results

    @contextlib.contextmanager
    def _waiting_is_an_error(self) -> Iterator[None]:
        """A capture that is broken off half-way leaves allocator and random numbers unusable: find out before."""
        if not hasattr(self._backend, "set_sync_debug_mode"):
            yield
            return
        before = self._backend.get_sync_debug_mode()
        self._backend.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self._backend.set_sync_debug_mode(before)


class Cpu(Device):
    """The host itself. A call has run when it returns; nobody counts allocations."""

    kind = "cpu"
    asynchronous = False
    copy_bytes = 128 * MIB
    matmul_size = 512
    matmul_dtype = torch.float32

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.name = f"CPU, {torch.get_num_threads()} threads"

    def synchronize(self) -> None:
        return

    def stamp(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def allocated(self) -> None:
        return None

    def reset_peak(self) -> None:
        return

    def peak(self) -> None:
        return None

    def release(self) -> None:
        return

    def capture(self, call: Callable[[], ResultT]) -> tuple[Callable[[], None], ResultT]:
        raise UnavailableError("a CPU has no queue whose work could be recorded")


def over_stand_in() -> bool:
    """Whether torch_npu runs over npu-offline's stand-in of CANN (`python -m npu_offline.cann`), not over a chip."""
    return "NPU_OFFLINE_CANN_RUNTIME" in os.environ


def open_device(kind: str) -> Device:
    """The current device of a kind.

    Raises:
        BenchError: there is none.
    """
    if kind == "cpu":
        return Cpu()
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise BenchError("device is 'cuda' and torch finds no CUDA device here.")
        return Accelerator("cuda", torch.cuda, torch.device("cuda", torch.cuda.current_device()))
    if kind == "npu":
        try:
            import torch_npu  # noqa: F401 - adds torch.npu
        except ImportError as error:
            raise BenchError(f"device is 'npu' and torch_npu cannot be imported: {error}.") from None
        backend = torch.npu  # type: ignore[attr-defined]
        if not backend.is_available():
            raise BenchError("device is 'npu' and torch_npu finds no NPU here.")
        return Accelerator("npu", backend, torch.device("npu", backend.current_device()))
    raise BenchError(f"device is {kind!r} and must be cuda, npu, emulated or cpu.")


def default_kind() -> str:
    """The accelerator that is here, or "cpu"."""
    for kind in ("npu", "cuda"):
        try:
            open_device(kind)
        except BenchError:
            continue
        return kind
    return "cpu"
