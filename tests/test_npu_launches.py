"""What a call launches on Ascend, our kernels and PyTorch's operators, counted by the stand-in of CANN under torch_npu: at
most so many, and those that the package's benchmarks/RECORDS.md names. `hatch run npu:test tests/test_npu_launches.py`
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OVER_THE_STAND_IN = pytest.mark.skipif(
    "NPU_OFFLINE_CANN_RUNTIME" not in os.environ, reason="not under `python -m npu_offline.cann`, which needs torch_npu"
)
SORTS = {"argsort", "bincount", "bucketize", "histc", "kthvalue", "median", "mode", "msort", "searchsorted", "sort", "topk"}
SORTS |= {"_unique", "_unique2", "unique_consecutive", "unique_dim"}
VIEWS = {"unsqueeze"}  # the stand-in counts them; nothing of them runs on a device
# A package, the words of its records for the call, and the most launches; None where the fewest are not reached yet.
CALLS = {
    "npu-rms-norm": ("rms_norm", "A call with gradients", 3),
    "npu-embedding": ("embedding", "A call with gradients", 6),
    "npu-embedding, sparse": ("embedding", "A call with a sparse gradient", 5),
    "npu-embedding, bags": ("embedding", "A call of `embedding_bag` with weights and gradients", 5),
    "npu-embedding, a norm": ("embedding", "A call with `rms_norm_eps` and a gradient", 5),
    "npu-attn-res": ("attn_res", "A call with gradients", 4),
    "npu-attn-res, a list": ("attn_res", "A call on a list with gradients", 6),
    "npu-fused-linear-cross-entropy": ("fused_linear_cross_entropy", "A call with gradients", 8),
    "npu-fused-linear-cross-entropy, every option": ("fused_linear_cross_entropy", "A call with every option", 12),
    "npu-fused-linear-cross-entropy, each row": ("fused_linear_cross_entropy", "A call of `linear_log_probs`", 12),
    "npu-fused-linear-cross-entropy, named columns": ("fused_linear_cross_entropy", "A call with `ids`", None),
    "npu-fused-linear-cross-entropy, distillation": (
        "fused_linear_cross_entropy",
        "A call of `linear_distillation_loss`",
        13,
    ),
    "npu-fused-linear-cross-entropy, given gradient": ("fused_linear_cross_entropy", "A call with `weight_grad`", 10),
    "npu-fused-linear-cross-entropy, adapter": ("fused_linear_cross_entropy", "A call with `adapter`", 12),
}


def launched(text):
    """For each call of npu_calls.py the names of what the stand-in says was launched."""
    found: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        if begins := re.fullmatch(r"begin (.*)", line):
            name = begins[1]
            found[name] = []
        elif line == "end":
            name = None
        elif name is not None and (said := re.fullmatch(r".*: (?:launch|operator) ([\w.:]+)(?:, [\w ]+)?", line)):
            if (one := said[1].removeprefix("aten::")) not in VIEWS:
                found[name].append(one)
    return found


def test_launches_are_counted_between_the_lines_of_a_call():
    said = [
        "cann stand-in: launch before, 4 programs",
        "begin one",
        "cann stand-in: launch a_kernel, 4 programs",
        "cann stand-in: stream 1 does a kernel",
        "cann stand-in: operator aten::sort.stable, Float",
        "cann stand-in: operator aten::sort.stable waits",
        "cann stand-in: operator aten::unsqueeze, Long",
        "cann stand-in: operator Mm",
        "end",
        "cann stand-in: operator Mm",
        "begin two",
        "end",
    ]
    assert launched("\n".join(said)) == {"one": ["a_kernel", "sort.stable", "Mm"], "two": []}


def sorted_integers(text):
    """What the stand-in says was sorted or searched that is no fp32 number: CANN does it on the AI CPU, users report."""
    said = re.findall(r"operator aten::(\w+)(?:\.\w+)?, (.+)", text)
    return [(name, dtype) for name, dtype in said if name in SORTS and dtype != "Float"]


def test_sorts_of_integers_are_found():
    said = [
        "operator aten::sort.stable, Float",
        "operator aten::sort.stable, Long",
        "operator aten::searchsorted.Tensor, Int",
    ]
    assert sorted_integers("\n".join(f"cann stand-in: {one}" for one in said)) == [("sort", "Long"), ("searchsorted", "Int")]


@pytest.fixture(scope="module")
def said_by_the_stand_in(request):
    """What it says of the calls that are tested in this run."""
    tested = [item for item in request.session.items if "said_by_the_stand_in" in item.fixturenames]
    variables = {"NPU_OFFLINE_CANN_TRACE": "1", "NPU_OFFLINE_CANN_SKIP": "1", "NPU_OFFLINE_CANN_STREAMS": "eager"}
    variables["TASK_QUEUE_ENABLE"] = "0"  # one thread that writes lines
    command = [sys.executable, str(ROOT / "tests" / "npu_calls.py"), *(item.callspec.params["name"] for item in tested)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr[-3000:]
    assert not sorted_integers(done.stderr)
    return launched(done.stderr)


@OVER_THE_STAND_IN
@pytest.mark.parametrize("name", CALLS)
def test_a_call_sorts_no_integers_and_launches_what_its_text_names(name, said_by_the_stand_in):
    package, words, most = CALLS[name]
    names = said_by_the_stand_in[name]
    assert most is None or len(names) <= most, names
    text = " ".join((ROOT / "packages" / package / "benchmarks" / "RECORDS.md").read_text().split())
    said = re.search(rf"{words} is (\d+) launches on Ascend: ((?:`[\w.]+`(?:, | and )?)+)", text)
    assert said, f"{words} is {len(names)} launches on Ascend: {', '.join(f'`{one}`' for one in sorted(set(names)))}"
    assert (int(said[1]), sorted(re.findall(r"`([\w.]+)`", said[2]))) == (len(names), sorted(set(names)))
