"""An operator's call, done again for other tensors: what no tape can have, collectives and other threads."""

import threading

import pytest
import torch
import torch.distributed as dist
from npu_tiling.launching import listening
from npu_tiling.launching.direct import DirectCall
from npu_tiling.pytorch import tape
from npu_tiling.pytorch.repetition import Repetition
from npu_tiling.pytorch.tape import record
from taped import Doubling, repeated


@pytest.fixture
def doubling():
    return Doubling()


FOREIGN = torch.ones(3)
REFUSED = {
    "a value is read": (lambda x: x * x.sum().item(), "is random, reads values or is not known"),
    "sizes depend on values": (lambda x: x[x > 0], "is random, reads values or is not known"),
    "random numbers": (lambda x: x + torch.rand_like(x), "is random, reads values or is not known"),
    "a tensor of somebody else": (lambda x: x + FOREIGN, "neither an argument nor made"),
    "a result of somebody else": (lambda x: FOREIGN, "neither an argument nor made"),
    "another device": (lambda x: x.new_empty(3, device="meta"), "returns no tensor on the device"),
    "distances between tensors": (lambda x: listening.refuse("distances") or x + 1, "distances"),
    "columns read as shorts": (lambda x: x.new_empty_strided((2, 2), (4, 1)).view(torch.int16) + 1, "as another dtype"),
    "words that a row has no whole number of": (lambda x: x.new_empty(4, 3).view(-1).view(torch.int64) + 1, "another dtype"),
    "a part of complex numbers": (lambda x: torch.view_as_complex(x.new_zeros(3, 2)).conj() + x, "conjugated"),
    "a dictionary": (lambda x: {"y": x + 1}, "a dict may have tensors"),
    "an element of the memory": (lambda x: x.as_strided((2,), (1,), 1) + 1, "starts at a given element"),
    "too long": (lambda x: [x.add_(1) for _ in range(300)], "long"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_differ_for_other_tensors_is_not_repeated(name):
    run, reason = REFUSED[name]
    given = [torch.randn(3)]
    assert reason in record(run, given, given)[1]


def test_a_call_that_is_not_repeated_launches_with_descriptors(doubling, monkeypatch):
    """Of tensors that are not on the tape: somebody else's, or made after it was found that the call is long."""

    class Described:
        def __init__(self, base):
            self.base = base

    monkeypatch.setattr(tape, "descriptor_type", lambda: Described)
    launched = []

    def launch(tensor):
        launched.append(tensor)
        call = DirectCall(doubling.run, id, (), ())
        listening.here.listener.launched(call, 7, (Described(tensor),), (), doubling.watchers)

    def of_foreign(x):
        launch(FOREIGN)
        return x + 1

    def long(x):
        for _ in range(300):
            x.add_(1)
        made = torch.empty_like(x)
        launch(made)
        listening.call(torch.Tensor.zero_, made)
        return made

    given = [torch.ones(3)]
    assert "neither an argument nor made" in record(of_foreign, given, given)[1]
    found, reason = record(long, given, given)
    assert "long" in reason and torch.equal(found, torch.zeros(3))
    assert len(launched) == 2


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_collective_is_repeated_where_it_is_called_as_a_whole(one_rank):
    def run(x):
        dist.all_reduce(x)
        return x + 1

    given = [torch.ones(3)]
    assert "c10d.allreduce_.default is random, reads values or is not known" in record(run, given, given)[1]
    reduced = []

    def all_reduce(x):
        reduced.append(x.clone())
        dist.all_reduce(x)

    def run_as_a_whole(x):
        total = x * 2
        listening.call(all_reduce, total[1:])
        return total + 1

    assert isinstance(repeated(run_as_a_whole, (3,), times=2), Repetition)
    assert len(reduced) == 2 * 3  # recorded, repeated, and what these are compared with


def test_what_a_collective_launches_is_not_repeated_twice(doubling):
    def gather(x, y):
        doubling.launch(x, y)
        listening.call(doubling.launch, x, y)

    def run(x):
        y = torch.empty_like(x)
        listening.call(gather, x, y)
        return y

    given = [torch.ones(3)]
    _, again = record(run, given, given)
    doubling.launches = 0
    assert torch.equal(again(given), 2 * given[0]) and doubling.launches == 2


def test_a_collective_that_fails_ends_as_it_would():
    def fails(x):
        raise RuntimeError("no peer")

    def run(x):
        try:
            listening.call(fails, x)
        except RuntimeError:
            x = x + 1
        return x * 2

    assert isinstance(repeated(run, (3,)), Repetition)


def test_tensors_on_two_devices_are_not_repeated():
    given = [torch.ones(3), torch.ones(3, device="meta")]
    assert "several devices" in record(lambda x, y: x + 1, given, given)[1]


def test_steps_of_other_threads_are_not_on_the_tape(doubling):
    def run(x):
        other = threading.Thread(target=lambda: doubling.launch(torch.ones(2), torch.empty(2)))
        other.start()
        other.join()
        return x + 1

    given = [torch.ones(3)]
    _, again = record(run, given, given)
    again(given)
    assert doubling.launches == 1
    assert again.source == "def repeat(t0):\n    t1 = c0(t0, 1)\n    return t1\n"
