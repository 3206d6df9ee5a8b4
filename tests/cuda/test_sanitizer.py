"""Every kernel of every package under the four tools of compute-sanitizer: `hatch run cuda:sanitize`, on a CUDA machine.

Of PyTorch's and cuBLAS's kernels only those are watched whose names look like ours, and what a tool says of them does not
count. Memory is not cached, so that every tensor is an allocation of its own.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from marks import cuda
from test_calls import PARTS, TOOL

from tools.workspace import ROOT

HERE = Path(__file__).parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SECONDS = 400  # for one part under one tool
# Parts of the names of a package's kernels that few kernels of PyTorch's share: what is watched is slow.
NAMES = {"attn_res": ("attn_res_",), "fused_linear_cross_entropy": ("cross_entropy_", "distillation_", "distribution_")}
ANY_NAME = ("_kernel",)
OURS = r"[a-z][a-z_]*_kernel"  # plain names; those of C++ kernels have a signature


def watched(tool, names, *command):
    """What a tool prints of the kernels of a Python program whose names have one of `names`; the program's exit status."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    assert sanitizer, "compute-sanitizer is not on the PATH and not in /usr/local/cuda/bin: it comes with the CUDA toolkit."
    options = ["--tool", tool, "--print-limit", "1000", "--report-api-errors", "no"]
    for name in names:
        options += ["--kernel-name", f"kns={name}"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1", TOOL: tool}
    program = [sanitizer, *options, sys.executable, *map(str, command)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    done = subprocess.run(program, **pipes, env=environment, timeout=SECONDS)
    print(done.stdout)
    return done.stdout, done.returncode


def findings(text):
    """What a tool printed of kernels of ours, and how often."""
    lines = "\n".join(line[len("========= ") :] for line in text.splitlines() if line.startswith("========="))
    found = Counter()
    for record in re.split(r"\n(?! )", lines):  # a line that is not indented begins another
        place = re.search(r"\bat (.+?)\+0x", record)
        if place and re.fullmatch(OURS, place[1]) and ("Race" in record or not record.startswith("Warning: ")):
            said = re.findall(r"^\w.*|^ +and .*", record, re.MULTILINE)  # with the other side of a race
            found[f"{place[1]}: {re.sub('0x[0-9a-f]+', 'ADDRESS', ' '.join(map(str.strip, said)))}"] += 1
    return found


def finished(text):
    """Whether the tool came to an end."""
    return re.search(r"^=+ (ERROR|RACECHECK) SUMMARY: ", text, re.MULTILINE) is not None


@cuda
@pytest.mark.parametrize("tool", ["memcheck", "initcheck"])
def test_a_tool_sees_kernels_of_ours(tool):
    assert findings(watched(tool, ("planted_", "no_such_name"), HERE / "planted.py")[0])
    assert not findings(watched(tool, ("no_such_name",), HERE / "planted.py")[0])


@pytest.mark.parametrize("package", PARTS)
def test_every_kernel_of_a_package_is_watched(package):
    sources = "".join(file.read_text() for file in (ROOT / "packages" / package / "src").rglob("*.py"))
    kernels = re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE)
    assert kernels and all(any(part in kernel for part in NAMES.get(package, ANY_NAME)) for kernel in kernels)


@cuda
@pytest.mark.parametrize(("package", "part"), [(package, part) for package, n in PARTS.items() for part in range(n)])
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_finds_nothing(tool, package, part):
    pytest_of_part = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "nightly", "--npu-device", "cuda"]
    chosen = [HERE / "test_calls.py", "-k", f"{package}-part{part}-"]
    text, status = watched(tool, NAMES.get(package, ANY_NAME), *pytest_of_part, *chosen)
    assert not findings(text)
    assert status == 0 and finished(text)


SAID = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at forward_kernel+0x2f0 in kernels.py:176
=========     by thread (1,0,0) in block (0,0,0)
=========     Address 0x7f0000000000 is out of bounds
=========         Host Frame: launch [0x1234] in driver.so
=========
========= Invalid __global__ read of size 4 bytes
=========     at forward_kernel+0x2f0 in kernels.py:176
=========     by thread (2,0,0) in block (0,0,0)
=========
========= Error: Race reported between Write access at sum_runs_kernel+0x10 in kernels_backward.py:9
=========     and Read access at sum_runs_kernel+0x20 in kernels_backward.py:10 [4 hazards]
=========
========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4, at::native::Add>(int, T2)+0x110
=========     by thread (0,0,0) in block (0,0,0)
=========
not a line of the tool
========= ERROR SUMMARY: 4 errors
"""


def test_findings_are_told_apart_by_kernel():
    assert findings(SAID) == {
        "forward_kernel: Invalid __global__ read of size 4 bytes": 2,
        "sum_runs_kernel: Error: Race reported between Write access at sum_runs_kernel+ADDRESS in kernels_backward.py:9"
        " and Read access at sum_runs_kernel+ADDRESS in kernels_backward.py:10 [4 hazards]": 1,
    }
    assert finished(SAID)


def test_a_run_that_broke_off_did_not_finish():
    assert not finished(SAID.rpartition("=========")[0])
