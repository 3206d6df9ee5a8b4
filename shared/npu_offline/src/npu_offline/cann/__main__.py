"""`python -m npu_offline.cann COMMAND`: runs a command with the stand-in of CANN in its environment."""

from __future__ import annotations

import argparse
import os
import sys

import npu_tiling

from ..errors import OfflineError
from ..toolchain.compilers import DEFAULT
from .environment import KERNELS, environment


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m npu_offline.cann", description=__doc__)
    parser.add_argument("--soc", default="Ascend910B4", choices=sorted(npu_tiling.SOCS), metavar="NAME", help="the chip")
    parser.add_argument("--devices", type=int, default=2, help="how many there are (default: %(default)s)")
    parser.add_argument("--streams", default="late", help="late, eager, or the seed of a random order (default: late)")
    parser.add_argument(
        "--kernels", default="final", choices=KERNELS, help="the module that they run from (default: %(default)s)"
    )
    parser.add_argument("--toolchain", default=DEFAULT, help="the compiler's version (default: %(default)s)")
    parser.add_argument(
        "--exact", action="store_true", help="no caching allocator: kernels are held to the bytes of their tensors"
    )
    parser.add_argument("--skip", action="store_true", help="kernels do nothing, so that a call's time is that of the host")
    parser.add_argument("--trace", action="store_true", help="say on standard error what is launched and when it is done")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, such as: pytest --npu-device npu")
    given = vars(parser.parse_args())
    command = given.pop("command")
    if not command:
        parser.error("a COMMAND is needed")
    try:
        variables = environment(**given)
    except OfflineError as error:
        print(f"npu-offline: {error}", file=sys.stderr)
        return 2
    return os.spawnvpe(os.P_WAIT, command[0], command, {**os.environ, **variables})


if __name__ == "__main__":
    sys.exit(main())
