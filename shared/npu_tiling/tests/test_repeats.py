"""Which calls of an operator are repeated, and which are decided."""

import threading
import weakref

import npu_tiling
import pytest
import torch
from npu_tiling.chips.detection import plain_pytorch
from npu_tiling.launching import listening
from npu_tiling.pytorch import repeats
from npu_tiling.pytorch.repeats import Repeats
from npu_tiling.pytorch.tape import record
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture(params=[True, False], ids=["recognised", "listed"])
def counted(monkeypatch, request):
    """`Repeats` of an implementation, on the host, that counts its calls; which equal calls are recognised, or not."""
    monkeypatch.setattr(repeats, "CAN_RECOGNISE", request.param)
    monkeypatch.setattr(repeats, "_index_of", lambda tensor: 0)

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
        (x, (other,), 2.0, "a"),
        (x, [other], 3.0, "a"),
        (x, [other], 2.0, "b"),
        (torch.ones(17)[1:].view(4, 4), [other], 2.0, "a"),  # not aligned
        (x.as_subclass(type("Other", (torch.Tensor,), {})), [other], 2.0, "a"),
    ]:
        before = operator.calls
        operator(*arguments)
        assert operator.calls == before + 1, arguments


def test_one_thread_at_a_time_records(counted):
    """Another decides once more: PyTorch's modes keep flags of the process."""
    other, x = counted(lambda x: x + 1), torch.ones(4)
    for _ in range(3):
        other(x)

    def run(x):
        if operator.calls == 4:
            thread = threading.Thread(target=other, args=(x,))
            thread.start()
            thread.join()
        return x * 2

    operator = counted(run)
    assert calls_until_repeated(operator, x) == 4
    assert other.calls == 4
    assert calls_until_repeated(other, x) == 5


@pytest.mark.skipif(not repeats.CAN_RECOGNISE, reason="this PyTorch has no TensorGuards")
def test_a_recognised_call_lists_nothing(counted, monkeypatch):
    monkeypatch.setattr(repeats, "CAN_RECOGNISE", True)
    monkeypatch.setattr(repeats, "_MOST_ALIKE", 5)
    operator = counted(lambda x, weight, others, scale: [x * scale if weight is None else x * weight, *others])
    x, other, trained = torch.ones(4), torch.ones(2), torch.ones(4, requires_grad=True)
    calls = [(x, None, [other, None], 0.0), (x, None, [other, other.clone()], 0.0), (x, x + 2, [other], 1.0)]
    calls += [(trained, None, [], 1.0), (x, x, [other, other], 1.0)]
    for call in calls:
        calls_until_repeated(operator, *call)
    monkeypatch.setattr(repeats, "_list_facts", lambda *_: pytest.fail("facts are listed"))
    before = operator.calls
    for call in calls:
        with torch.no_grad():
            for found, expected in zip(operator(*call), operator.counted(*call), strict=True):
                assert found is expected is None or torch.equal(found, expected)
    assert operator.calls == before
    for call in [
        (x, None, [other, None], -0.0),
        (x, None, [other, None], 0),
        (x, None, (other, None), 0.0),
        (x, None, [None, other], 0.0),
        (x, x, [other], 1.0),
        (x, x, [other, other.clone()], 1.0),
        (x, x + 2, [other, other], 1.0),
        (x, x + 2, [other[:1]], 1.0),
        (x, x.bool(), [other], 1.0),
        (x[::2], None, [], 1.0),
        (x, None, [other, None], 0.0, None),
        (x, None, [other, None]),
        (x, None, [x, None], 0.0),
    ]:
        with pytest.raises(pytest.fail.Exception):
            operator(*call)


def test_one_tensor_twice_is_another_call_than_two(counted):
    operator = counted(lambda x, y: (x + y, y * 2))
    x, y = torch.ones(4), torch.full((4,), 3.0)
    assert calls_until_repeated(operator, x, x) == 4
    assert calls_until_repeated(operator, x, y) == 8
    assert torch.equal(torch.stack(operator(y, y)), torch.full((2, 4), 6.0))
    assert torch.equal(torch.stack(operator(y, x)), torch.tensor([[4.0] * 4, [2.0] * 4])) and operator.calls == 8


PAIRS = [(0.0, -0.0), (1, True), (1, 1.0), (0, False)]


@pytest.mark.parametrize("pair", [*PAIRS, *(pair[::-1] for pair in PAIRS)], ids=str)
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


def test_calls_of_many_sizes_are_all_recognised(counted, monkeypatch):
    """Each shape, and each length of a list or a tuple, with flags of one length beside them, in turns."""
    monkeypatch.setattr(repeats, "CAN_RECOGNISE", True)
    operator = counted(lambda x, flags, others, factor: [x * factor, *(others or ())])
    given = [
        (torch.ones(4, width), [True, False], kind([torch.ones(2)] * length), 2.0)
        for width in range(1, 4)
        for length in range(1, 7)
        for kind in (list, tuple)
    ]
    given += [(torch.ones(4, width), [True, False], None, 2.0) for width in range(1, 4)]
    for _ in range(7):
        for arguments in given:
            operator(*arguments)
    assert all(operator.find(arguments) is not None for arguments in given)
    assert operator.find(given[0][:3]) is None and operator.find(()) is None
    assert operator.find((torch.ones(4, 1), [True, False], torch.ones(2), 2.0)) is None


def test_no_more_is_written_for_calls_than_are_recognised(counted, monkeypatch):
    monkeypatch.setattr(repeats, "CAN_RECOGNISE", True)
    written = []
    equal_calls = repeats.EqualCalls
    monkeypatch.setattr(repeats, "EqualCalls", lambda *given: written.append(given) or equal_calls(*given))
    operator = counted(lambda x, factor: x * factor)
    for _ in range(8):
        for factor in range(20):
            assert operator(torch.ones(4), factor).sum() == 4 * factor
    assert len(written) == repeats._MOST_ALIKE


def test_no_tensor_of_a_call_is_kept(counted):
    operator = counted(lambda x, others: [x + 1, *others])
    x, other = torch.ones(4), torch.ones(4)
    assert calls_until_repeated(operator, x, [other]) == 4
    gone = weakref.ref(x), weakref.ref(other)
    del x, other
    assert [one() for one in gone] == [None, None]


def test_lists_in_lists_are_not_repeated(counted):
    operator = counted(lambda x, lists: x * lists[0][0])
    assert calls_until_repeated(operator, torch.ones(4), [[2.0]]) == 10


def test_a_tensor_on_the_host_may_be_read_there(counted, monkeypatch):
    operator, host = counted(lambda x, sizes: x * sizes.tolist()[0]), torch.ones(1)
    monkeypatch.setattr(repeats, "_index_of", lambda tensor: -1 if tensor is host else 0)
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
