"""For tests: runs a Python file once for each rank, as processes of one gloo group on this machine.

assert ranks.run(WORKER, 2, "cpu")          in the test
with ranks.join() as rank: ...              in the file, whose arguments are what `run` was given
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

_RANK, _COUNT, _STORE = "RANK", "WORLD_SIZE", "NPU_OFFLINE_STORE"
_FIRST = "first"  # in the folder of the store: the rank whose block raised first
_POLL = 0.05  # seconds
_SHOWN = 3000  # characters of what a rank said


def why_not() -> str | None:
    """Why ranks cannot meet on this machine, None if they can."""
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return "torch was built without gloo"
    return None


def run(worker: Path, count: int, *arguments: str, timeout: float = 300.0) -> list[str]:
    """Run a Python file on `count` ranks at once.

    When a rank fails, the others are ended: they might wait for it for ever.

    Args:
        worker: the file; it calls `join`.
        count: ranks.
        arguments: of the file, the same on every rank.
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
                # Ranks that wait for each other must leave the cores to those that work.
                # They compute on the CPU: torch is not to load what it finds of another device, with all that this imports.
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **known}
                process = subprocess.Popen(
                    [sys.executable, str(worker), *arguments],
                    stdout=stack.enter_context(out.open("w")),
                    stderr=stack.enter_context(error.open("w")),
                    env=environment,
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


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> tuple[int, str] | None:
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


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


@contextlib.contextmanager
def join() -> Iterator[int]:
    """In the block this process is a rank of the default process group; yields which. The process ends with the block.

    Raises:
        RuntimeError: `run` did not start this process.
    """
    if _STORE not in os.environ:
        raise RuntimeError(f"{sys.argv[0]} is one rank of a test and must be started by npu_offline.ranks.run.")
    import torch.distributed as dist

    rank, count = int(os.environ[_RANK]), int(os.environ[_COUNT])
    dist.init_process_group("gloo", init_method=f"file://{os.environ[_STORE]}", rank=rank, world_size=count)
    status = 1
    try:
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
