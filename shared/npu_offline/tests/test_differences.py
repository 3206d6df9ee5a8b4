"""Which differences between two executions of a launch rounding explains."""

import pytest
import sample_kernels
import torch
from npu_offline import emulate
from npu_offline.execute.final.compare import bytes_at, differences


def compared(*changed, written=None, nearby=()):
    """What `differences` says of tensors; each is given with a function that changes it after the other execution.

    Args:
        nearby: values of the first tensor from inputs that were moved.
    """
    places, before, expected = [], {}, {}
    for number, (tensor, start, change) in enumerate(changed):
        bounds = (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        kind = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}[tensor.dtype]
        places.append((f"p{number}", kind, tensor))
        before[bounds] = start.contiguous().view(torch.uint8).clone() if start is not None else bytes_at(*bounds).clone()
        expected[bounds] = bytes_at(*bounds).clone()
        change(tensor)
    counts = {name: tensor.nbytes if written is None else written for name, _, tensor in places}
    first = next(iter(expected))
    copies = [{**expected, first: tensor.contiguous().view(torch.uint8)} for tensor in nearby]
    return list(differences(places, before, expected, counts, copies))


def a_unit_off(tensor, place=7):
    tensor.view(torch.int16)[place] += 1


@pytest.mark.parametrize(("written", "is_explained"), [(2000, True), (2, False)])
def test_numbers_rounded_apart_are_a_share_of_what_was_written_whatever_was_there_before(written, is_explained):
    found = compared((torch.randn(1000).bfloat16(), None, a_unit_off), written=written)
    assert (not found) == is_explained


def test_the_size_of_numbers_that_nobody_wrote_excuses_nothing():
    y = torch.randn(1000)
    y[500:] = 1e30
    start = torch.full((1000,), 1e30)

    def change(y):
        y[:500] += 1

    ((name, text),) = compared((y, start, change))
    assert name == "p0"
    assert text.startswith("500 of 1000 numbers differ, 500 by more than rounding: number ")


def test_the_least_numbers_of_fp16_are_a_unit_apart_where_their_distance_is():
    y = torch.full((1000,), 3 * 2.0**-24).half()

    def change(y):
        y[3] = 2 * 2.0**-24

    assert compared((y, None, change)) == []


def test_what_follows_from_a_number_that_is_a_unit_off_is_no_finding():
    h = torch.randn(1000).half()
    y = torch.randn(1000).half()

    def two_units_off(y):
        y.view(torch.int16)[7] += 2

    assert compared((h, None, a_unit_off), (y, None, two_units_off)) == []
    ((name, _),) = compared((h, None, lambda h: a_unit_off(h, 8)), (y, None, two_units_off))
    assert name == "p1"


def test_the_message_shows_a_number_that_rounding_does_not_explain():
    y = torch.randn(1000).bfloat16()
    y[3], y[9] = 1e-20, 1.0

    def change(y):
        y[3], y[9] = 9e-20, 1.5  # the first is many units off and small beside the others

    ((_, text),) = compared((y, None, change))
    assert "1 by more than rounding: number 9 is 1, not 1.5" in text


def test_sums_whose_terms_cancel_may_be_off_by_what_they_move_when_inputs_move_by_a_rounding():
    one, other, *nearby = torch.randn(6, 1000) * 1e-9
    wrong = one.clone()
    wrong[17] = 3e-8
    assert compared((one.clone(), None, lambda y: y.copy_(other)), nearby=nearby) == []
    assert compared((one.clone(), None, lambda y: y.copy_(other)))
    ((_, text),) = compared((wrong, None, lambda y: y.copy_(other)), nearby=nearby)
    assert "1 by more than rounding: number 17 " in text


def test_one_number_that_moves_far_excuses_no_other():
    y, before = torch.randn(1000), torch.zeros(1000)
    moved = y.clone()
    moved[3] += 1

    def change(y):
        y[9] += 1e-3

    moved[9] += 1e-3
    ((_, text),) = compared((y, before, change), nearby=[moved])
    assert "number 9 " in text


def test_a_launch_whose_sums_are_zero_but_for_rounding_has_no_finding():
    x = torch.randn(60, 128)
    x = torch.cat([x, -x[:, torch.randperm(128)]], 1)
    y = torch.full((60,), float("nan"))
    with emulate(checks=True):
        sample_kernels.row_sums[(4,)](x, y, 60, BM=16, D=256)
    assert 0 < y.abs().max() < 1e-4
