"""An operator's call, done again for other tensors: what is on the tape."""

import weakref

import pytest
import torch
from npu_tiling.launching import listening
from npu_tiling.launching.direct import DirectCall
from npu_tiling.pytorch.repetition import Names, Place, Repetition, Step
from npu_tiling.pytorch.tape import record
from taped import Doubling, repeated
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture
def doubling():
    return Doubling()


def test_launches_memory_and_operators_are_done_again_for_other_tensors(doubling):
    def run(x, weight):
        twice = torch.empty_like(x)
        doubling.launch(x, twice)
        product = twice @ weight.T
        product[1:].mul_(3)
        half = x.new_empty(2, 4)
        half.copy_(product[:, ::2])
        four_times = torch.empty_like(twice[0])
        doubling.launch(twice[1], four_times)
        return [product.t(), None, (half, half[1]), four_times, 3]

    again = repeated(run, (2, 4), (8, 4))
    assert isinstance(again, Repetition) and again.is_possible()
    assert doubling.launches == 2 * (1 + 1 + 3 * 2)
    doubling.watchers.hooks.append(print)
    assert not again.is_possible()


def test_arguments_may_be_views_with_any_start_and_results_may_be_arguments(doubling):
    def run(x):
        y = torch.empty_like(x[1])
        doubling.launch(x[1], y)
        x[0].copy_(y)
        return x, x[1:], y

    memory = torch.randn(64)
    given = [memory[:8].view(2, 4)]
    _, again = record(run, given, given)
    x = memory[20:28].view(2, 4)
    whole, part, y = again([x])
    assert whole is x and part.data_ptr() == x[1:].data_ptr() and torch.equal(y, 2 * x[1]) and torch.equal(x[0], y)


class Alive(TorchDispatchMode):
    """Counts the tensors that PyTorch's operators return and that are alive at once."""

    def __init__(self):
        super().__init__()
        self.most, self._made = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self._made = [made for made in (*self._made, weakref.ref(results)) if made() is not None]
        self.most = max(self.most, len(self._made))
        return results


def test_what_nothing_reads_is_not_done_and_memory_is_given_back(monkeypatch):
    made = []
    allocate = torch.empty_strided
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu", raising=False)
    monkeypatch.setattr(torch, "empty_strided", lambda *facts, **named: made.append(facts) or allocate(*facts, **named))

    def run(x):
        x.new_empty(1000)
        torch.ones(3) + 1
        return x.new_empty(3).copy_(x.new_empty(7).fill_(2)[:3])

    repeated(run, (3,))
    assert [facts[0] for facts in made] == [(3,), (7,)] * 3

    def chain(x):
        for _ in range(20):
            x = x + 1
        return x

    given = [torch.zeros(4)]
    _, again = record(chain, given, given)
    with Alive() as alive:
        last = again(given)
    assert last[0] == 20 and alive.most == 2  # what one step reads and makes


def test_recording_keeps_no_memory_longer_than_the_call_does():
    alive = []

    def run(x):
        for _ in range(5):
            x = x + 1
            alive.append(weakref.ref(x))
        assert sum(each() is not None for each in alive) == 1
        return x

    given = [torch.zeros(4)]
    assert isinstance(record(run, given, given)[1], Repetition)


def test_a_tensor_is_read_as_another_dtype():
    def run(x):
        words = x.view(torch.int32)[1:]
        return torch.empty_like(words).copy_(words).view(torch.float32), words + 1

    assert isinstance(repeated(run, (4, 6)), Repetition)


def test_columns_are_read_as_another_dtype_of_their_size():
    def run(x):
        words = x.view(torch.int32)[1:, ::2]
        return torch.empty_like(words).copy_(words).view(torch.float32), words + 1

    given = [torch.randn(4, 9)[:, 1:7]]
    _, again = record(run, given, given)
    columns = torch.randn(5, 9)[1:, 2:8]
    assert all(map(torch.equal, again([columns]), run(columns)))


def test_what_may_hide_tensors_is_no_argument_of_a_launch(doubling):
    class Hidden(tuple):
        pass

    def run(x):
        listening.here.listener.launched(DirectCall(print, id, (), ()), 7, (Hidden((x,)),), (), doubling.watchers)
        return x + 1

    given = [torch.ones(3)]
    assert "a Hidden may have tensors" in record(run, given, given)[1]


def test_a_line_names_the_tensors_whose_addresses_it_takes():
    names = Names()
    view, whole = Place(3, 1, 128), Place(2, 2, 0)
    assert names.spell([view, (whole, None)]) == "c0((t3, (t2, None, ), ))" and names.constants["c0"] is list
    line = names.spell_address((view, whole, 7, 2.5))
    assert line == "(t1.data_ptr() + 128, t2.data_ptr(), 7, c1, )" and Step(line, (), has_effect=True).numbers() == {1, 2}


def test_a_view_that_is_returned_may_be_changed_in_place():
    """With a parameter, where nothing that was given requires a gradient."""
    factor = torch.nn.Parameter(torch.ones(2))

    def run(x):
        return (x + 1).view(2, 2)

    given = [torch.ones(4)]
    found, again = record(run, given, given)
    for view in (found, again([torch.ones(4)])):
        view.mul_(factor)
        assert view.requires_grad
    assert not again([torch.ones(4, requires_grad=True)]).requires_grad


def test_autocast_casts_once():
    def run(x, weight):
        return x @ weight

    given = [torch.randn(4, 4), torch.randn(4, 4)]
    _, again = record(run, given, given)
    with torch.autocast("cpu", torch.bfloat16):
        assert again(given).dtype == torch.float32
        _, cast = record(run, given, given)
        assert cast(given).dtype == torch.bfloat16
    assert cast(given).dtype == torch.bfloat16
