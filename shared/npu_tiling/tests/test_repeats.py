"""An operator's call, done again for other tensors: what is on the tape, and what no tape can have."""

import ctypes
import threading
import weakref

import npu_tiling
import pytest
import torch
import torch.distributed as dist
from npu_tiling.chips.detection import plain_pytorch
from npu_tiling.launching import listening
from npu_tiling.launching.direct import DirectCall
from npu_tiling.pytorch import repeats
from npu_tiling.pytorch.repeats import Repeats
from npu_tiling.pytorch.tape import Repetition, record
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
    most = 0
    steps = again._steps

    def counting(run):
        def step(values):
            nonlocal most
            run(values)
            most = max(most, sum(value is not None for value in values))

        return step

    again._steps = tuple((counting(run), ended) for run, ended in steps)
    assert again(given)[0] == 20 and most == 3  # the argument, and what one step reads and makes


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
        listening.here.listener.launched(None, 7, (Hidden((x,)),), (), doubling.watchers)
        return x + 1

    given = [torch.ones(3)]
    assert "a Hidden may have tensors" in record(run, given, given)[1]


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
    "a value is read": (lambda x: x * x.sum().item(), "something else the next time"),
    "sizes depend on values": (lambda x: x[x > 0], "something else the next time"),
    "random numbers": (lambda x: x + torch.rand_like(x), "something else the next time"),
    "a tensor of somebody else": (lambda x: x + FOREIGN, "neither an argument nor made"),
    "a result of somebody else": (lambda x: FOREIGN, "neither an argument nor made"),
    "another device": (lambda x: x.new_empty(3, device="meta"), "returns no tensor on the device"),
    "distances between tensors": (lambda x: listening.refuse("distances") or x + 1, "distances"),
    "a column read as integers": (lambda x: x.new_empty_strided((2, 2), (4, 1)).view(torch.int32) + 1, "as another dtype"),
    "words that a row has no whole number of": (lambda x: x.new_empty(4, 3).view(-1).view(torch.int64) + 1, "another dtype"),
    "an element of the memory": (lambda x: x.as_strided((2,), (1,), 1) + 1, "starts at a given element"),
    "too long": (lambda x: [x.add_(1) for _ in range(300)], "long"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_differ_for_other_tensors_is_not_repeated(name):
    run, reason = REFUSED[name]
    given = [torch.randn(3)]
    assert reason in record(run, given, given)[1]


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
    assert "c10d.allreduce_.default may do something else" in record(run, given, given)[1]
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


@pytest.fixture
def counted(monkeypatch):
    """`Repeats` of an implementation, on the host, that counts its calls."""
    monkeypatch.setattr(repeats, "_is_on_host", lambda tensor: False)

    class Counted(Repeats):
        def __init__(self, implementation):
            super().__init__(self.count)
            self.calls, self.counted = 0, implementation

        def count(self, *arguments):
            self.calls += 1
            return self.counted(*arguments)

    return Counted


def calls_until_repeated(operator, *arguments):
    for _ in range(10):
        operator(*arguments)
    return operator.calls


def test_a_call_is_repeated_for_equal_facts_alone(counted):
    operator = counted(lambda x, others, scale, name: [x * scale, *others])
    x, other = torch.ones(4, 4), torch.ones(2)
    assert calls_until_repeated(operator, x, [other], 2.0, "a") == 4  # three, and the one on the tape
    assert operator(x + 1, [other], 2.0, "a")[0][0, 0] == 4 and operator.calls == 4
    for arguments in [
        (torch.ones(4, 5), [other], 2.0, "a"),
        (x.t().contiguous().t(), [other], 2.0, "a"),
        (x.double(), [other], 2.0, "a"),
        (x, [other, other.clone()], 2.0, "a"),
        (x, [None], 2.0, "a"),
        (x, [other], 3.0, "a"),
        (x, [other], 2.0, "b"),
        (torch.ones(17)[1:].view(4, 4), [other], 2.0, "a"),  # not aligned
        (x.as_subclass(type("Other", (torch.Tensor,), {})), [other], 2.0, "a"),
    ]:
        before = operator.calls
        operator(*arguments)
        assert operator.calls == before + 1, arguments


def test_one_tensor_twice_is_another_call_than_two(counted):
    operator = counted(lambda x, y: (x + y, y * 2))
    x, y = torch.ones(4), torch.full((4,), 3.0)
    assert calls_until_repeated(operator, x, x) == 4
    assert calls_until_repeated(operator, x, y) == 8
    assert torch.equal(torch.stack(operator(y, y)), torch.full((2, 4), 6.0))
    assert torch.equal(torch.stack(operator(y, x)), torch.tensor([[4.0] * 4, [2.0] * 4])) and operator.calls == 8


@pytest.mark.parametrize("pair", [(0.0, -0.0), (1, True), (1, 1.0), (0, False)], ids=str)
def test_equal_numbers_may_be_different_options(counted, pair):
    operator = counted(lambda x, option: x * option if type(option) is float else x + 5 * (type(option) is bool))
    one, other = pair
    x = -torch.ones(2)
    assert calls_until_repeated(operator, x, one) == 4
    operator(x, other)
    assert operator.calls == 5


def test_a_call_under_autocast_is_another_one(counted):
    operator = counted(lambda x, weight: x @ weight)
    given = torch.randn(4, 4), torch.randn(4, 4)
    assert calls_until_repeated(operator, *given) == 4
    with torch.autocast("cpu", torch.bfloat16):
        assert operator(*given).dtype == torch.bfloat16 and calls_until_repeated(operator, *given) == 8
    assert operator(*given).dtype == torch.float32 and operator.calls == 8
    with torch.autocast("cpu", torch.float16):
        assert operator(*given).dtype == torch.float16 and operator.calls == 9


def test_a_tensor_on_the_host_may_be_read_there(counted, monkeypatch):
    operator, host = counted(lambda x, sizes: x * sizes.tolist()[0]), torch.ones(1)
    monkeypatch.setattr(repeats, "_is_on_host", lambda tensor: tensor is host)
    assert calls_until_repeated(operator, torch.ones(4), host) == 10


def test_gradients_are_not_recorded_again(counted):
    def run(x):
        with torch.no_grad():
            return x.mul_(2).clone()

    operator = counted(run)
    x = torch.ones(4, requires_grad=True)
    assert calls_until_repeated(operator, x) == 4
    assert not operator(x).requires_grad and x[0] == 2**11


def test_a_call_that_cannot_be_repeated_is_recorded_once(counted, monkeypatch):
    operator, recorded = counted(lambda x: x * x.sum().item()), []
    monkeypatch.setattr(repeats, "record", lambda *given: recorded.append(given) or record(*given))
    assert calls_until_repeated(operator, torch.ones(4)) == 10 and len(recorded) == 1


def test_who_wants_to_see_what_a_call_does_sees_it(counted):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    operator = counted(lambda x: x + 1)
    x = torch.ones(4)
    assert calls_until_repeated(operator, x) == 4
    chip = npu_tiling.GPUS["H200"]
    for context in (
        npu_tiling.watch_launches(),
        npu_tiling.use_device(chip),
        npu_tiling.dry_run(chip),
        plain_pytorch(),
        Mode(),
    ):
        before = operator.calls
        with context:
            operator(x)
        assert operator.calls == before + 1, context
    operator(x)
    assert operator.calls == before + 1


def test_an_error_of_a_recorded_call_is_the_caller_s(counted):
    fails = True

    def run(x):
        if operator.calls == 4 and fails:
            raise MemoryError
        return x + 1

    operator = counted(run)
    x = torch.ones(4)
    for _ in range(3):
        operator(x)
    with pytest.raises(MemoryError):
        operator(x)
    assert listening.here.listener is None
    fails = False
    assert calls_until_repeated(operator, x) == 5


def test_few_calls_are_remembered(counted, monkeypatch):
    monkeypatch.setattr(repeats, "_MOST_KEYS", 3)
    operator = counted(lambda x: x + 1)
    for size in range(20):
        operator(torch.ones(size))
    assert len(operator._known) <= 3


def test_steps_of_other_threads_are_not_on_the_tape(doubling):
    def run(x):
        other = threading.Thread(target=lambda: doubling.launch(torch.ones(2), torch.empty(2)))
        other.start()
        other.join()
        return x + 1

    given = [torch.ones(3)]
    _, again = record(run, given, given)
    again(given)
    assert doubling.launches == 1 and len(again._steps) == 1
