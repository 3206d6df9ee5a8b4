"""Every refusal is one sentence: the argument's name, what it was, what it must be."""

import math
from fractions import Fraction

import npu_tiling
import pytest
import torch
from npu_tiling import arguments
from npu_tiling.chips import plain_pytorch
from torch._subclasses.fake_tensor import FakeTensorMode

REFUSED = {
    "a word": (lambda: arguments.number("n", "a"), TypeError, "n is a str and must be a number."),
    "a flag": (lambda: arguments.number("n", True), TypeError, "n is a bool and must be a number."),
    "nothing": (lambda: arguments.number("n", None), TypeError, "n is a NoneType and must be a number."),
    "a list": (lambda: arguments.number("n", [], or_none=True), TypeError, "n is a list and must be a number or None."),
    "too small": (lambda: arguments.number("n", -1, least=0, finite=False), ValueError, "n is -1 and must be at least 0."),
    "NaN": (lambda: arguments.number("n", math.nan, finite=False), ValueError, "n is nan and must be a number."),
    "infinite": (lambda: arguments.number("n", math.inf), ValueError, "n is inf and must be finite."),
    "too large": (lambda: arguments.number("n", 2, least=0, most=1), ValueError, "n is 2 and must be from 0 to 1."),
    "above fp32": (lambda: arguments.number("n", 4e38), ValueError, "n is 4e+38 and must be finite in fp32."),
    "below fp32": (lambda: arguments.number("n", -(10**40)), ValueError, f"n is {-(10**40)} and must be finite in fp32."),
    "0 in fp32": (
        lambda: arguments.number("n", 1e-38, above=0),
        ValueError,
        "n is 1e-38 and must be above 0 and finite in fp32.",
    ),
    "not above": (
        lambda: arguments.number("n", 0, above=0, or_none=True),
        ValueError,
        "n is 0 and must be above 0 and finite, or None.",
    ),
    "a part": (lambda: arguments.whole("n", 1.5), ValueError, "n is 1.5 and must be a whole number."),
    "no whole number": (lambda: arguments.whole("n", "a"), TypeError, "n is 'a' and must be a whole number."),
    "too few": (lambda: arguments.whole("n", 0, least=1), ValueError, "n is 0 and must be a whole number of at least 1."),
    "a flag for a number": (lambda: arguments.whole("n", True), TypeError, "n is True and must be a whole number."),
    "no flag": (lambda: arguments.flags(n=1), TypeError, "n is 1 and must be True or False."),
    "no choice": (lambda: arguments.one_of("n", ["a"], ("a", "b")), ValueError, "n is ['a'] and must be one of 'a', 'b'."),
    "no span": (lambda: arguments.span("n", (1,)), TypeError, "n is (1,) and must be two whole numbers, (first, last)."),
    "no tensor": (lambda: arguments.tensor("n", 1, or_none=True), TypeError, "n is a int and must be a tensor or None."),
    "sparse": (
        lambda: arguments.rows("n", torch.eye(2).to_sparse()),
        TypeError,
        "n is torch.sparse_coo and must be a dense tensor.",
    ),
    "sparse whole numbers": (
        lambda: arguments.dtype("n", torch.ones(2).int().to_sparse(), torch.int32),
        TypeError,
        "n is torch.sparse_coo and must be a dense tensor.",
    ),
    "a sparse parameter": (
        lambda: arguments.parameter("n", torch.eye(2).to_sparse(), [(2, 2)], torch.eye(2), "x's"),
        TypeError,
        "n is torch.sparse_coo and must be a dense tensor.",
    ),
    "whole numbers on a CPU": (
        lambda: arguments.rows("n", torch.ones(2, dtype=torch.int64)),
        TypeError,
        "n is torch.int64 on cpu and must be torch.float32, torch.bfloat16, torch.float16 or torch.float64.",
    ),
    "fp64 elsewhere": (
        lambda: arguments.rows("n", torch.ones(2, dtype=torch.float64, device="meta")),
        TypeError,
        "n is torch.float64 on meta and must be torch.float32, torch.bfloat16 or torch.float16.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_one_sentence(what):
    call, error, sentence = REFUSED[what]
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == sentence


def test_fp64_is_taken_wherever_plain_pytorch_serves():
    with FakeTensorMode():
        x = torch.empty(2, dtype=torch.float64, device="cuda")
    with npu_tiling.use_device(npu_tiling.soc("Ascend910B4"), emulated=True):
        with pytest.raises(TypeError, match="n is torch.float64 on cuda"):
            arguments.rows("n", x)
        with plain_pytorch():
            arguments.rows("n", x)


def test_numbers_of_any_kind_become_floats_and_ints():
    for value in (1, 1.0, Fraction(1), torch.tensor(1.0).numpy()[()]):
        found = arguments.number("n", value)
        assert type(found) is float
        assert found == 1.0
    assert type(arguments.whole("n", torch.tensor(3).numpy()[()])) is int
    assert arguments.number("n", None, or_none=True) is arguments.whole("n", None, or_none=True) is None


def test_kernels_take_every_number_that_is_allowed():
    """The numbers that a kernel takes are fp32."""
    for value in (3.4e38, -3.4e38, 1e-50):
        assert arguments.number("n", value) == value
    assert arguments.number("n", 2**-126, above=0) == 2**-126
    for value in (4e38, 10**400, math.inf):
        assert arguments.number("n", value, finite=False) == -arguments.number("n", -value, finite=False) == math.inf
