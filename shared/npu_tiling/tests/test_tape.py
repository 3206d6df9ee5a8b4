"""An operator's call, done again for other tensors: what is on the tape, and what no tape can have."""

import ctypes
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from npu_tiling.launching import listening
from npu_tiling.launching.direct import DirectCall
from npu_tiling.pytorch import tape
from npu_tiling.pytorch.repetition import Names, Place, Repetition, Step
from npu_tiling.pytorch.tape import record
from torch.utils._python_dispatch import TorchDispatchMode


class Watching:
    """A stand-in for `Watchers`."""

    def __init__(self):
        self.hooks = []

    def __bool__(self):
        return bool(self.hooks)


class Doubling:
    """A stand-in for a kernel that is called without the JIT: y = 2 x, of contiguous fp32 tensors."""

    def __init__(self):
        self.launches, self.watchers = 0, Watching()

    def run(self, grid, _, __, stream, handle, x, y, count, rest):
        assert (grid, stream, handle, rest) == (7, "the stream", "handle", "rest")
        self.launches += 1
        source, to = ((ctypes.c_float * count).from_address(tensor.data_ptr()) for tensor in (x, y))
        to[:] = [2 * each for each in source]

    def launch(self, x, y):
        call = DirectCall(self.run, lambda index: "the stream", ("handle",), ("rest",))
        call.launch(0, 7, (x, y), (x.numel(),))
        if listening.here.listener is not None:
            listening.here.listener.launched(call, 7, (x, y), (x.numel(),), self.watchers)


@pytest.fixture
def doubling():
    return Doubling()


def repeated(run, *shapes, times=3):
    """Compares a recorded call with the call itself for other tensors; returns its tape."""
    given = [torch.randn(shape) for shape in shapes]
    found, again = record(run, given, given)
    torch.testing.assert_close(found, run(*given), rtol=0, atol=0)
    for _ in range(times if isinstance(again, Repetition) else 0):
        given = [torch.randn(shape) for shape in shapes]
        torch.testing.assert_close(again(given), run(*given), rtol=0, atol=0)
    return again


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


FOREIGN = torch.ones(3)
REFUSED = {
    "a value is read": (lambda x: x * x.sum().item(), "is random, reads values or is not known"),
    "sizes depend on values": (lambda x: x[x > 0], "is random, reads values or is not known"),
    "random numbers": (lambda x: x + torch.rand_like(x), "is random, reads values or is not known"),
    "a tensor of somebody else": (lambda x: x + FOREIGN, "neither an argument nor made"),
    "a result of somebody else": (lambda x: FOREIGN, "neither an argument nor made"),
    "another device": (lambda x: x.new_empty(3, device="meta"), "returns no tensor on the device"),
    "distances between tensors": (lambda x: listening.refuse("distances") or x + 1, "distances"),
    "a column read as integers": (lambda x: x.new_empty_strided((2, 2), (4, 1)).view(torch.int32) + 1, "as another dtype"),
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
