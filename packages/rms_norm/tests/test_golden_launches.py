"""Every launch of this package's calls on three chips is the one that is written down in golden_launches.json.xz.

`python packages/rms_norm/tests/test_golden_launches.py` at the root writes the file anew.
"""

import json
import lzma
from pathlib import Path

import npu_tiling
import pytest

FILE = Path(__file__).with_name("golden_launches.json.xz")
CHIPS = {name: npu_tiling.soc(name) for name in ("Ascend910B4", "Ascend910_9579")} | {"H200": npu_tiling.GPUS["H200"]}


def described(found):
    """A call's launches as JSON has them; memory is numbered in the order of its first use in the call."""
    numbers = {}

    def value(argument):
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


def current(chip):
    from tools import launches

    return {label: described(found) for label, found in launches.of_package("rms_norm", CHIPS[chip])}


@pytest.fixture(scope="module")
def golden():
    return json.loads(lzma.decompress(FILE.read_bytes()))


@pytest.mark.parametrize("chip", CHIPS)
def test_launches_are_those_that_were_written_down(golden, chip):
    found = json.loads(json.dumps(current(chip)))
    assert found.keys() == golden[chip].keys()
    for label, wanted in golden[chip].items():
        assert found[label] == wanted, label


if __name__ == "__main__":
    FILE.write_bytes(lzma.compress(json.dumps({chip: current(chip) for chip in CHIPS}).encode()))
