"""Processes that have imported PyTorch when they begin: forks of one that has, for to import it takes two seconds of a core.

    done = forks.run("program.py", "--option")         as subprocess.run([sys.executable, "program.py", "--option"])
    fork = forks.start(["-c", "import torch"], out, error)

A fork has nothing else of the test's process. It begins with the arguments, the environment and the `sys.path` that Python
gives a program, with the folder of `testing` at its end. A test of imports, or of how Python begins or ends, starts Python.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

MODULES = ("torch", "torch.fx.experimental.symbolic_shapes")
"""What a fork has imported when it begins: the second is most of what PyTorch imports later, with the whole of SymPy."""

# One thread: more get in the way of other processes. No device of another maker, with all that it would import.
_ALONE = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
_ROOT = str(Path(__file__).parents[1])
_MOST = 1 << 20  # bytes of a request


class Fork:
    """A process that runs."""

    def __init__(self, status: int) -> None:
        self._status = os.fdopen(status)
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, None while it runs; -n: signal n ended it."""
        return self.wait(0) if self.returncode is None else self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            with self._status:
                self.returncode = int(self._status.readline())
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def start(
    command: Sequence[str | Path],
    out: IO[Any],
    error: IO[Any],
    *,
    environment: Mapping[str, str] = os.environ,
    folder: Path | None = None,
    number: int = 0,
) -> Fork:
    """Begin a process.

    Args:
        command: what stands behind `python`: a file, or "-c" and code; then its arguments.
        out: a file, its standard output.
        error: a file, its standard error.
        environment: its variables.
        folder: where it begins; None: in this one's.
        number: processes of different numbers are forks of different ones: sets of strings have another order in each.
    """
    request = {
        "command": [str(word) for word in command],
        "environment": {**environment, **_ALONE},
        "folder": str(folder or Path.cwd()),
    }
    reading, writing = os.pipe()
    server = _server(number)
    socket.send_fds(server, [json.dumps(request).encode()], [out.fileno(), error.fileno(), writing])
    os.close(writing)
    return Fork(reading)


def run(*command: str | Path, timeout: float | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *command], capture_output=True, text=True)`.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        fork = start(command, out, error, **options)
        try:
            if fork.wait(timeout) is None:
                assert timeout is not None
                raise subprocess.TimeoutExpired(command, timeout)
        finally:
            if fork.poll() is None:
                fork.kill()
                fork.wait()
        out.seek(0), error.seek(0)
        assert fork.returncode is not None
        return subprocess.CompletedProcess(command, fork.returncode, out.read(), error.read())


@functools.cache
def _server(number: int) -> socket.socket:
    """Where a process takes requests, which has imported `MODULES`; it ends with this one."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | _ALONE
    with there:
        command = [sys.executable, __file__, str(there.fileno())]
        process = subprocess.Popen(command, env=environment, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
    atexit.register(process.wait)  # its time is this one's
    atexit.register(here.close)
    return here


def _serve(number: int, path: list[str]) -> dict[str, Any] | None:
    """Fork at each request; returns it where it is to be run, None at the end."""
    with socket.socket(fileno=number) as requests:
        while True:
            message, files, _, _ = socket.recv_fds(requests, _MOST, 3)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG if message else 0)[0]:
                    pass
            if not message:
                return None
            if os.fork() == 0:
                break
            for file in files:
                os.close(file)
    out, error, status = files
    if process := os.fork():  # this one waits for the other, and says how it ended
        os.write(status, f"{process}\n".encode())
        os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}\n".encode())
        os._exit(0)
    os.dup2(out, 1), os.dup2(error, 2)
    for file in files:
        os.close(file)
    request: dict[str, Any] = json.loads(message)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    first, *others = request["command"]
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = ["" if first == "-c" else os.path.dirname(os.path.realpath(first)), *given, *path, _ROOT]
    sys.argv = ["-c", *others[1:]] if first == "-c" else [first, *others]
    return request


def _main() -> None:
    path = sys.path[1:]
    number = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the tests says when this one ends
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    if (request := _serve(number, path)) is None:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    first, *others = request["command"]
    module = types.ModuleType("__main__")
    text = others[0] if first == "-c" else Path(first).read_text()
    if first != "-c":
        module.__file__ = first
    sys.modules["__main__"] = module
    status = 0
    try:
        exec(compile(text, "<string>" if first == "-c" else first, "exec"), vars(module))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    # As Python ends, but that it would take PyTorch's modules apart, for half a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _main()
