"""Leaves triton-ascend alone and whole in an environment, whatever torch came with: `hatch run mend-triton`.

Every torch with CUDA asks for stock Triton, and pip then installs it over triton-ascend, or under it. Nothing tells pip not
to, so every command of hatch.toml that may import Triton begins with this; it costs 0.2 s where nothing is wrong.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_LOOK = """
import sys
sys.path.insert(0, sys.argv[1])
from npu_tiling import doctor
problem = doctor.triton_problem(ascend=True)
print(problem.what if problem else "", *(problem.cure if problem else ()), sep="\\n")
"""
_CORE = Path(__file__).parents[1] / "shared" / "npu_tiling" / "src"
_SECONDS = 1800  # triton-ascend is a wheel of 50 MB


def mend(python: str | Path = sys.executable) -> str:
    """Do what npu_tiling.doctor says cures the environment of `python`; returns what was wrong, "" if nothing was.

    Raises:
        RuntimeError: something is wrong that no command cures, or a command failed.
    """
    what, cure = _look(python)
    if not what:
        return ""
    if not cure:
        raise RuntimeError(what)
    for command in cure:
        pip, *arguments = shlex.split(command)
        assert pip == "pip"
        pip_of = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*pip_of, *arguments], capture_output=True, text=True, timeout=_SECONDS)
        if done.returncode:
            raise RuntimeError(f"{command} failed:\n{done.stdout}{done.stderr}")
    still, _ = _look(python)
    if still:
        raise RuntimeError(f"{' && '.join(cure)} did not help. {still}")
    return what


def _look(python: str | Path) -> tuple[str, list[str]]:
    done = subprocess.run([str(python), "-c", _LOOK, str(_CORE)], capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{python} cannot say what it has installed:\n{done.stderr}")
    what, *cure = done.stdout.rstrip("\n").split("\n")
    return what, cure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mend-triton", description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="the environment's Python (default: this one)")
    what = mend(parser.parse_args(arguments).python)
    if what:
        print(f"{what} Now triton-ascend alone is.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
