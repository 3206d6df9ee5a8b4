"""Every form of a launch for rows from 1 to 70,000 elements, against PyTorch in fp32: `hatch run cuda:widths`.

A kernel is compiled for each width, so launching all widths would take days. Apart from the width itself, a launch's
configuration, its form, changes at few of them. So every width is planned, and the narrowest and the widest width of each
form are run, and other widths from a seed (`--npu-seed`).
"""

from __future__ import annotations

import dataclasses

import npu_tiling
import pytest
import torch
from marks import cuda
from width_calls import CALLS, DTYPES, Call, Maker
from width_forms import PARTS, WIDEST, edges, form, forms, others

H200 = npu_tiling.GPUS["H200"]
each_call = pytest.mark.parametrize("name", CALLS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check(name, dtype, widths, device):
    """An operator at several widths, all of which run even if one is wrong."""
    wrong = []
    for width in widths:
        torch.manual_seed(width)
        try:
            CALLS[name](width, Maker(dtype, torch.device(device))).check()
        except Exception as error:
            if isinstance(error, getattr(torch, "AcceleratorError", ())):  # every later launch would fail too
                raise
            wrong.append(f"{width}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


@cuda
@each_dtype
@each_call
@pytest.mark.parametrize("part", range(PARTS))  # outermost: processes begin with different operators
def test_both_ends_of_every_form(name, dtype, part, of_all_processes, one_thread):
    device = npu_tiling.device_for(torch.device("cuda:0"))
    check(name, dtype, edges(device, name, dtype, part, of_all_processes), "cuda")


@cuda
@each_dtype
@each_call
def test_other_widths(name, dtype, pytestconfig):
    check(name, dtype, others(pytestconfig.getoption("--npu-seed")), "cuda")


@each_dtype
@each_call
def test_every_width_has_a_form(name, dtype):
    found = forms(H200, name, dtype, range(1, 20))
    assert all(found)  # what was planned is what would be launched
    assert min(first for first, _ in found.values()) == 1 and max(last for _, last in found.values()) == 19


@each_call
def test_forms_of_fp16_change_where_those_of_bf16_do(name):
    widths = (1, 31, 100, 1024, 5000, 33_000)
    found = [sorted(forms(H200, name, dtype, widths).values()) for dtype in (torch.float16, torch.bfloat16)]
    assert found[0] == found[1]


def test_both_sides_of_a_change_are_edges():
    """Of the width where rows no longer fit in one program, here."""
    low, high = 8192, WIDEST
    held = _kernels(low)
    assert held != _kernels(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _kernels(middle) == held else (low, middle)
    both = forms(H200, "rms_norm", torch.float32, range(low - 40, high + 40)).values()
    assert low in {last for _, last in both} and high in {first for first, _ in both}


def _kernels(width):
    return {launch[1] for launch in form(H200, "rms_norm", torch.float32, width)}


def test_a_form_depends_on_the_device():
    smaller = dataclasses.replace(H200, ub_bytes=H200.ub_bytes // 8)
    forms = [[form(device, "attn_res_list", torch.float32, width) for width in (1024, 8192)] for device in (H200, smaller)]
    assert forms[0] != forms[1]


def test_parts_have_the_edges_of_all_widths(tmp_path):
    whole = forms(H200, "embedding", torch.bfloat16, range(1, 301))
    parts = [edges(H200, "embedding", torch.float16, part, tmp_path, 300) for part in range(PARTS)]
    assert sorted(width for part in parts for width in part) == sorted({width for both in whole.values() for width in both})
    assert len([*tmp_path.iterdir()]) >= PARTS


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
