"""Every launch of the packages' calls on three chips is the one that is written down in golden/PACKAGE.json.xz.

`python -m tests.test_golden_launches PACKAGE` at the root writes a package's file anew.
"""

import functools
import json
import lzma
import sys
from pathlib import Path

import npu_tiling
import pytest

FOLDER = Path(__file__).with_name("golden")
PACKAGES = ("rms_norm", "embedding", "attn_res", "fused_linear_cross_entropy")
CHIPS = {name: npu_tiling.soc(name) for name in ("Ascend910B4", "Ascend910_9579")} | {"H200": npu_tiling.GPUS["H200"]}


def described(found):
    """A call's launches as JSON has them; memory is numbered in the order of its first use in the call."""
    numbers = {}

    def value(argument):
        if isinstance(argument, tuple):
            return [value(each) for each in argument]
        if not hasattr(argument, "memory"):
            return argument
        memory = numbers.setdefault(argument.memory, len(numbers))
        return [argument.dtype, list(argument.shape), list(argument.strides), argument.offset, memory]

    return [
        {
            "kernel": launch.kernel,
            "grid": launch.grid,
            "constants": dict(launch.constants),
            "options": dict(launch.options),
            "arguments": [value(argument) for argument in launch.arguments],
            "direction": launch.direction,
        }
        for launch in found
    ]


def current(package, chip):
    from tools import launches

    return {label: described(found) for label, found in launches.of_package(package, CHIPS[chip])}


@functools.cache
def golden(package):
    return json.loads(lzma.decompress((FOLDER / f"{package}.json.xz").read_bytes()))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("package", PACKAGES)
def test_launches_are_those_that_were_written_down(package, chip):
    found = json.loads(json.dumps(current(package, chip)))
    wanted = golden(package)[chip]
    assert found.keys() == wanted.keys()
    for label, launches in wanted.items():
        assert found[label] == launches, label


if __name__ == "__main__":
    for package in sys.argv[1:]:
        launches = {chip: current(package, chip) for chip in CHIPS}
        (FOLDER / f"{package}.json.xz").write_bytes(lzma.compress(json.dumps(launches).encode()))
