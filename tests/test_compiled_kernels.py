"""How many compiled kernels a forward and a backward need for any batch: counted from plans, as Triton's JIT would count."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from npu_attn_res import attn_res
from npu_embedding import embedding
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy
from npu_rms_norm import rms_norm
from npu_tiling import dry_run
from npu_tiling.chips import chip as chip_named
from npu_tiling.direct import specialisation, unspecialised

from tools.workspace import ROOT

BATCHES = sorted(
    {1, 3, 5, 7, 100, 1000, 8191, 12288, 20000, 32769} | {2**k for k in range(1, 17)} | {3 * 2**k + 1 for k in range(16)}
)


def tensor(*sizes, dtype=torch.bfloat16):
    return torch.empty(*sizes, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


CALLS = {
    "`rms_norm`, 4096 columns": lambda n: rms_norm(tensor(n, 4096), tensor(4096)),
    "`embedding`, 32000 x 4096": lambda n: embedding(tensor(n, dtype=torch.int64), tensor(32000, 4096)),
    "`attn_res`, 8 blocks of 4096 columns": lambda n: attn_res(tensor(8, n, 4096), tensor(4096), tensor(4096)),
    "`fused_linear_cross_entropy`, 4096 x 32000": lambda n: fused_linear_cross_entropy(
        tensor(n, 4096), tensor(32000, 4096), tensor(n, dtype=torch.int64)
    ),
}
CHIPS = ("Ascend910B4", "H200")
PAGE = (ROOT / "tools/docs/pages/operators/index.md").read_text()
SHOWN = {name: found for name, *found in re.findall(r"^\| (`\w+`, [^|]+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)}


def compiled(launch):
    """Equal for launches that share a compiled kernel."""
    kernel = getattr(importlib.import_module(launch.full_module), launch.kernel)
    plain = unspecialised(kernel)[len(launch.slots) :]
    absent = tuple(slot is None for slot in launch.slots)
    return (
        launch.full_module,
        launch.kernel,
        launch.decision.key,
        absent,
        tuple(map(str, specialisation(launch.numbers, plain))),
    )


def count(call, chip):
    """Distinct compiled kernels over all batches."""
    found = set()
    for n in BATCHES:
        with dry_run(chip_named(chip)) as planned:
            call(n).sum().backward()
        assert {each.direction for each in planned} == {"forward", "backward"}
        found |= {compiled(launch) for each in planned for launch in each.launches}
    return found


@pytest.mark.parametrize("name", CALLS)
def test_the_page_has_how_many_kernels_serve_any_batch(name):
    assert len(BATCHES) == 40
    assert SHOWN[name] == [str(len(count(CALLS[name], chip))) for chip in CHIPS]


def test_the_page_has_every_call():
    assert SHOWN.keys() == CALLS.keys()
