"""Widths whose tilings the program for CUDA devices finds, here without a device."""

import dataclasses
import time

import npu_tiling
import pytest
import torch

from tools.cuda_widths.calls import CALLS, DTYPES, Call, Maker
from tools.cuda_widths.tilings import Widths, merged, tilings
from tools.cuda_widths.work import Task, edges, plan, run_all

H200 = npu_tiling.Device("NVIDIA H200", "cuda", "sm_90", 132, 132, 232448, ub_align=16, max_grid=2**31 - 1)


@pytest.mark.parametrize("name", CALLS)
def test_every_width_has_a_tiling_in_every_dtype(name):
    found = tilings(H200, range(1, 20), [name])
    assert {dtype for _, dtype, _ in found} == set(DTYPES)
    assert all(launches for _, _, launches in found)  # what was planned is what would be launched
    for dtype in DTYPES:
        widths = [both for (_, of, _), both in found.items() if of == dtype]
        assert min(both.first for both in widths) == 1 and max(both.last for both in widths) == 19


def test_a_tiling_that_changes_has_its_edges_run():
    """Rows that one program holds, and rows that it takes in pieces: the width where that changes is run on both sides."""
    held = {width: _kernels(tilings(H200, [width], ["rms_norm"])) for width in (8192, 70_000)}
    assert held[8192] != held[70_000]
    low, high = 8192, 70_000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _kernels(tilings(H200, [middle], ["rms_norm"])) == held[8192] else (low, middle)
    near = range(low - 40, high + 40)
    tasks = edges(tilings(H200, near, ["rms_norm"]))
    assert Task("rms_norm", low, torch.float32) in tasks and Task("rms_norm", high, torch.float32) in tasks
    smaller = dataclasses.replace(H200, ub_bytes=H200.ub_bytes // 8)
    assert tilings(smaller, near, ["attn_res_list"]).keys() != tilings(H200, near, ["attn_res_list"]).keys()


def _kernels(found):
    return {launch[1] for (_, dtype, launches) in found if dtype == torch.float32 for launch in launches}


@pytest.mark.parametrize("name", CALLS)
def test_tilings_of_fp16_change_where_those_of_bf16_do(name, monkeypatch):
    widths = (1, 31, 100, 1024, 5000, 33_000)
    as_planned = _of_fp16(tilings(H200, widths, [name]))
    monkeypatch.setattr("tools.cuda_widths.tilings._TWO_BYTES", (torch.float16,))
    assert _of_fp16(tilings(H200, widths, [name])) == as_planned


def _of_fp16(found):
    return sorted(both for (_, dtype, _), both in found.items() if dtype == torch.float16)


@pytest.mark.slow
def test_processes_share_the_work():
    found = plan(H200, 20, ["embedding"], 2)
    assert found == tilings(H200, range(1, 21), ["embedding"])
    tasks = edges(found)
    outcomes = list(run_all(tasks, torch.device("cpu"), 2, time.time() + 600))
    assert (
        len(outcomes) == len(tasks)
        and {outcome.task for outcome in outcomes} == {*tasks}
        and not any(outcome.wrong for outcome in outcomes)
    )


def test_parts_are_merged():
    parts = [tilings(H200, range(first, 40, 3), ["embedding"]) for first in (1, 2, 3)]
    assert merged(parts) == tilings(H200, range(1, 40), ["embedding"])
    assert Widths(3, 9).joined(Widths(5, 12)) == Widths(3, 12)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_calls_agree_with_pytorch(name, dtype):
    torch.manual_seed(0)
    call = CALLS[name](37, Maker(dtype, torch.device("cpu")))
    assert call.wrong() is None
    planted = Call(lambda *inputs: _shifted(call.own(*inputs)), call.plain, call.inputs)
    assert "off by" in planted.wrong()


def _shifted(found):
    return (_shifted(found[0]), *found[1:]) if isinstance(found, tuple) else found + found.detach().abs().max() + 1
