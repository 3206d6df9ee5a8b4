"""Calls that launch every kernel that a CUDA device can be given.

compute-sanitizer watches them in parts (test_sanitizer.py). A part is a sample of a package's calls.
"""

import contextlib
import os
import re

import pytest
import torch
from marks import cuda
from products import ProductsInFp32
from written import MarkWritten, marking

from tools import launches
from tools.cuda_calls import CALLS
from tools.workspace import ROOT

PARTS = {"rms_norm": 4, "embedding": 4, "attn_res": 12, "fused_linear_cross_entropy": 4}
TOOL = "TESTS_WATCHED_BY"  # a variable: the tool of compute-sanitizer that watches
CUDA = torch.device("cuda")
HELPS = {  # a context that a tool needs around a call
    "initcheck": lambda: marking(MarkWritten(CUDA)),
    "racecheck": lambda: ProductsInFp32(CUDA),
}
CASES = [
    pytest.param(call, id=f"{package}-part{number % PARTS[package]}-{label}")
    for package, calls in CALLS.items()
    for number, (label, call) in enumerate(calls(CUDA))
]


@cuda
@pytest.mark.parametrize("call", CASES)
def test_a_call_runs(call):
    with HELPS.get(os.environ.get(TOOL), contextlib.nullcontext)():
        call()
        torch.cuda.synchronize()


@pytest.mark.parametrize("package", CALLS)
def test_every_kernel_is_launched(package):
    """Those of a chip's page on that chip, those of other pages on one at least."""
    launched = {
        kind: {launch.kernel for _, made in launches.of_package(package, chip) for launch in made}
        for kind, chip in launches.TYPICAL_CHIPS.items()
    }
    both = launched["ascend"] | launched["cuda"]
    for file in (ROOT / "packages" / package / "src").rglob("*.py"):
        kinds = [kind for kind in launched if any(part.startswith(kind) for part in file.parts[-2:])]
        kernels = set(re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE))
        assert kernels <= (launched[kinds[0]] if kinds else both), f"{file.name}: {kernels}"
    assert both
