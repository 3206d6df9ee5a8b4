"""For tests: runs a Python file once for each rank, as processes of one group on this machine.

@pytest.mark.parametrize("place", ranks.PLACES)
def test(place):
    ranks.need(place)
    ranks.run(WORKER, 2, place)                        in the test
with ranks.join(sys.argv[1]) as rank: ...              in the file

At "cpu" and "emulated" tensors are on the CPU and ranks talk through gloo; at "emulated" kernels run on an emulated 910B4.
At "cuda" each rank has a CUDA device of its own, which is the default device of its tensors, and they talk through NCCL.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import forks

PLACES = ("cpu", "emulated", "cuda")
_RANK, _COUNT, _STORE = "RANK", "WORLD_SIZE", "RANKS_STORE"
_FIRST = "first"  # in the folder of the store: the rank whose block raised first
_POLL = 0.05  # seconds
_SHOWN = 3000  # characters of what a rank said


def why_not(place: str = "cpu", count: int = 2) -> str | None:
    """Why `count` ranks cannot meet at a place on this machine, None if they can."""
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return "torch was built without gloo"
    if place != "cpu":
        try:
            from npu_offline.plugin import why_not as why_no_place
        except ModuleNotFoundError:
            return "npu-offline is not installed"
        if (reason := why_no_place(place)) is not None:
            return reason
    if place == "cuda" and torch.cuda.device_count() < count:
        return f"{count} ranks need a CUDA device each, and there are {torch.cuda.device_count()}"
    if place == "cuda" and not torch.distributed.is_nccl_available():
        return "torch was built without NCCL"
    return None


def need(place: str, count: int = 2) -> None:
    """Skip this test where `count` ranks cannot meet at a place, with the reason."""
    if (reason := why_not(place, count)) is not None:
        import pytest

        pytest.skip(reason)


def run(worker: Path, count: int, *arguments: str, timeout: float = 300.0) -> list[str]:
    """Run a Python file on `count` ranks at once.

    When a rank fails, the others are ended: they might wait for it for ever.

    Args:
        worker: the file; it calls `join`.
        count: ranks.
        arguments: of the file, the same on every rank; the place, where it has one, comes first.
        timeout: seconds for all of them.

    Returns:
        What each rank wrote to its standard output.

    Raises:
        RuntimeError: a rank failed, or time ran out; with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(count)]
        with contextlib.ExitStack() as stack:
            processes = []
            for rank, (out, error) in enumerate(files):
                known = {_RANK: str(rank), _COUNT: str(count), _STORE: str(Path(folder, "store"))}
                process = forks.start(
                    [worker, *arguments],
                    stack.enter_context(out.open("w")),
                    stack.enter_context(error.open("w")),
                    environment={**os.environ, **known},
                    number=rank % 2,  # what differs between ranks where each is a Python of its own differs here
                )
                stack.callback(_end, process)
                processes.append(process)
            failed = _wait(processes, time.monotonic() + timeout)
        first = Path(folder, _FIRST)
        if failed is not None and first.exists():  # others may have ended since, with an error about this one
            failed = int(first.read_text()), "ended with status 1"
        said = [(out.read_text(), error.read_text()) for out, error in files]
        if failed is None:
            return [out for out, _ in said]
        rank, why = failed
        raise RuntimeError(f"rank {rank} of {count} {why}:\n{''.join(said[rank])[-_SHOWN:]}")


def _wait(processes: list[forks.Fork], deadline: float) -> tuple[int, str] | None:
    """The first rank that did not end well, and how; None if all did."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank, f"ended with status {code}"
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return codes.index(None), "was not done in time"
        time.sleep(_POLL)


def _end(process: forks.Fork) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


@contextlib.contextmanager
def join(place: str = "cpu") -> Iterator[int]:
    """In the block this process is a rank of the default process group; yields which. The process ends with the block.

    Args:
        place: one of `PLACES`.

    Raises:
        RuntimeError: `run` did not start this process.
    """
    if _STORE not in os.environ:
        raise RuntimeError(f"{sys.argv[0]} is one rank of a test and must be started by testing.ranks.run.")
    import torch
    import torch.distributed as dist

    rank, count = int(os.environ[_RANK]), int(os.environ[_COUNT])
    meeting = {"init_method": f"file://{os.environ[_STORE]}", "rank": rank, "world_size": count}
    if place == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        torch.set_default_device(device)
        dist.init_process_group("nccl", device_id=device, **meeting)  # type: ignore[arg-type]
    else:
        dist.init_process_group("gloo", **meeting)  # type: ignore[arg-type]
    status = 1
    try:
        with _kernels(place):
            yield rank
            dist.barrier()  # none leaves while another still talks to it
        status = 0
    except BaseException:
        traceback.print_exc()
        with contextlib.suppress(FileExistsError), Path(os.environ[_STORE]).with_name(_FIRST).open("x") as file:
            file.write(str(rank))
    finally:
        # Not through Python's shutdown. A thread of gloo that drops the last reference to a tensor asks for Python's lock;
        # where Python is shutting down, it ends that thread, and with it the process: "terminate called without an active
        # exception". After an error it may still be in a collective, and destroying the group would wait for the others.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


_COLLECTIVES = {  # by the names that PyTorch's releases have for them; where the tensor that a rank gives stands
    "all_reduce": ("all_reduce", 0),
    "all_gather_single": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 1),
}


@contextlib.contextmanager
def collectives() -> Iterator[list[tuple[str, int]]]:
    """Yields the collectives that this rank calls in the block, with the bytes of the tensor that it gives to each."""
    import torch.distributed as dist

    called: list[tuple[str, int]] = []

    def noting(run: Any, kind: str, position: int) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            called.append((kind, arguments[position].nbytes))
            return run(*arguments, **named)

        return call

    originals = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
    for name, run in originals.items():
        setattr(dist, name, noting(run, *_COLLECTIVES[name]))
    try:
        yield called
    finally:
        for name, run in originals.items():
            setattr(dist, name, run)


def _kernels(place: str) -> contextlib.AbstractContextManager[object]:
    """Where kernels run at a place that has no device for them."""
    if place != "emulated":
        return contextlib.nullcontext()
    from npu_offline import emulate

    return emulate("Ascend910B4")
