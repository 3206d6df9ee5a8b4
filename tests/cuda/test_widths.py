"""Every form of a launch for rows from 1 to 70,000 elements, against PyTorch in fp32: `hatch run cuda:widths`.

A kernel is compiled for each width, so launching all widths would take days. What else of a launch depends on the width, its
form, changes at few of them. So every width is planned, and the narrowest and the widest width of each form are run, and
other widths from a seed (`--npu-seed`).
"""

from __future__ import annotations

import dataclasses

import npu_tiling
import pytest
import torch
from marks import cuda
from width_calls import CALLS, DTYPES, Call, Maker
from width_forms import WIDEST, edges, form, others

H200 = npu_tiling.GPUS["H200"]
RANGES = [range(first, first + 7000) for first in range(1, WIDEST, 7000)]
each_call = pytest.mark.parametrize("name", CALLS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check(name, dtype, widths, device):
    """An operator at several widths, all of which run even if one is wrong."""
    wrong = {}
    for width in widths:
        torch.manual_seed(width)
        try:
            CALLS[name](width, Maker(dtype, torch.device(device))).check()
        except Exception as error:  # whatever it is: what is wrong with one width is not what is wrong with another
            wrong[width] = f"{type(error).__name__}: {error}"
    assert not wrong


@cuda
@pytest.mark.parametrize("widths", RANGES, ids=lambda widths: f"{widths[0]}-{widths[-1]}")
@each_dtype
@each_call
def test_both_ends_of_every_form(name, dtype, widths, one_thread):
    device = npu_tiling.device_for(torch.device("cuda:0"))
    check(name, dtype, edges(device, name, dtype, widths), "cuda")


@cuda
@each_dtype
@each_call
def test_other_widths(name, dtype, pytestconfig):
    check(name, dtype, others(pytestconfig.getoption("--npu-seed")), "cuda")


@each_dtype
@each_call
def test_every_width_has_a_form(name, dtype):
    assert all(form(H200, name, dtype, width) for width in range(1, 20))
    assert edges(H200, name, dtype, range(1, 20))[0] == 1


def test_both_sides_of_a_change_are_edges():
    """Rows that one program holds, and rows that it takes in pieces."""
    low, high = 8192, WIDEST
    held = _kernels(low)
    assert held != _kernels(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _kernels(middle) == held else (low, middle)
    assert {low, high} <= {*edges(H200, "rms_norm", torch.float32, range(low - 9, high + 9))}
    assert low in edges(H200, "rms_norm", torch.float32, range(low - 9, high))
    assert high in edges(H200, "rms_norm", torch.float32, range(high, high + 9))


def _kernels(width):
    return {launch[1] for launch in form(H200, "rms_norm", torch.float32, width)}


def test_a_form_depends_on_the_device():
    smaller = dataclasses.replace(H200, ub_bytes=H200.ub_bytes // 8)
    forms = [[form(device, "attn_res_list", torch.float32, width) for width in (1024, 8192)] for device in (H200, smaller)]
    assert forms[0] != forms[1]


def test_ranges_have_the_edges_of_all_widths(one_thread):
    found = [edges(H200, "embedding", torch.float16, widths) for widths in (range(1, 700), range(700, 1500))]
    assert {*edges(H200, "embedding", torch.float16, range(1, 1500))} <= {*found[0], *found[1]}
    assert len(found[0] + found[1]) < 100
    assert [RANGES[0][0], RANGES[-1][-1]] == [1, WIDEST]
    assert sum(map(len, RANGES)) == WIDEST


@each_dtype
@each_call
def test_calls_agree_with_pytorch(name, dtype):
    check(name, dtype, [37], "cpu")


@each_dtype
@each_call
def test_what_is_off_is_found(name, dtype):
    call = CALLS[name](37, Maker(dtype, torch.device("cpu")))
    with pytest.raises(AssertionError, match="not close"):
        Call(lambda *inputs: _shifted(call.own(*inputs)), call.plain, call.inputs).check()


def _shifted(found):
    return (_shifted(found[0]), *found[1:]) if isinstance(found, tuple) else found + found.detach().abs().max() + 1


def test_other_widths_are_of_every_kind():
    found = others(0)
    assert len(found) == 30 and len({*found}) >= 28 and found != others(1)
    assert all(width % 16 == 0 for width in found[1::3]) and all(1 <= width <= WIDEST for width in found)
