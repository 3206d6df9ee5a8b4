"""`hatch run` without hatch, for rehearsals without a network: the scripts of hatch.toml, run by this Python."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path


def commands(name: str, arguments: Sequence[str], settings: Path) -> list[list[str]]:
    """What a script of an environment runs; `name` is environment:script."""
    environment, _, script = name.partition(":")
    lines = tomllib.loads(settings.read_text())["envs"][environment]["scripts"][script]
    found = []
    for line in [lines] if isinstance(lines, str) else lines:
        command = shlex.split(line.replace("{args}", shlex.join(arguments)))
        if command[0] != "python":
            command = ["python", "-m", *command]
        found.append([sys.executable, *command[1:]])
    return found


def main(arguments: Sequence[str]) -> int:
    offline, run, name, *rest = arguments
    assert (offline, run) == ("--offline", "run"), arguments
    for command in commands(name, rest, Path("hatch.toml")):
        if command[1:3] == ["-m", "tools.wheel_test"]:
            if command[3] == "npu_offline":
                continue  # without compilers there is nothing of it to test
            command += ["--offline", "--layer", "cpu"]
        if done := subprocess.run(command).returncode:
            return done
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
