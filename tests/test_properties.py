"""The search for an example that a property does not hold for; what is drawn, how it is called and compared."""

import pytest
import torch
from hypothesis import strategies as st

from testing import properties
from testing.properties import Layout, Search


def test_a_search_finds_what_does_not_hold_and_names_the_smallest():
    def holds(number):
        assert number < 1000

    told = []
    with pytest.raises(AssertionError) as caught:
        Search("cpu", "long", 1, 3600.0, told.append)(st.integers(0, 10**6), holds)
    assert any("number" in note or "1000" in note or "1_000" in note for note in caught.value.__notes__)
    assert told[0] > 0


def test_equal_seeds_try_equal_examples():
    def tried(seed):
        found = []
        Search("cpu", "short", seed)(st.integers(), found.append)
        return found

    assert tried(3) == tried(3) != tried(4)
    assert len(tried(3)) == properties.PROFILES["short"].examples["cpu"]


def test_a_long_search_ends_when_its_time_is_up():
    told = []
    Search("emulated", "long", 1, 0.5, told.append)(st.integers(), lambda number: None)
    assert 0 < told[0] < properties.PROFILES["long"].examples["emulated"]


def test_one_example_is_tried_on_a_machine_that_has_no_time():
    told = []
    Search("emulated", "long", 1, -1.0, told.append)(st.integers(), lambda number: None)
    assert told == [1]


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (4, 6), (2, 3, 5), (2, 0, 3), (1, 1)])
@pytest.mark.parametrize("name", properties.tensors.LAYOUTS)
def test_layouts_keep_the_shape_and_move_as_they_are(name, shape):
    values = torch.randn(shape)
    lies = Layout(name, 3)(values)
    assert lies.shape == values.shape
    assert torch.isfinite(lies).all()
    if "repeated" not in name and name != "one number":
        assert torch.equal(lies, values)
    moved = properties.ways.place(lies, torch.device("cpu"))
    assert torch.equal(moved, lies)
    assert moved.stride() == lies.stride()
    assert not moved.numel() or moved.data_ptr() != lies.data_ptr()


def square(x, y):
    return [x * x * y]


@pytest.mark.parametrize("way", sorted(set(properties.WAYS)))
def test_every_way_gives_outputs_and_gradients(way):
    x, y, upstream = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3)
    found = properties.call(way, square, [x, y], [True, False], lambda _: [upstream], torch.device("cpu"))
    assert torch.equal(found.outputs[0], x * x * y)
    if way in ("no_grad", "inference_mode"):
        assert found.gradients is None
    else:
        assert found.gradients is not None
        assert found.gradients[1] is None
        assert torch.allclose(found.gradients[0], 2 * x * y * upstream)


@pytest.mark.parametrize("off", [0.0, 1e-4])
def test_a_result_is_as_close_as_its_dtype_and_its_sums_allow(off):
    x, w = torch.randn(8, 500), torch.randn(500, 6)
    expected = properties.expect(lambda x, w: [x @ w], [x, w], [True, False], [torch.ones(8, 6)])
    x.requires_grad_()
    y = x @ w
    y.backward(torch.ones_like(y))
    found = properties.Results([(y * (1 + off)).detach()], [x.grad, None])
    if not off:
        properties.check(expected, found, length=500)
        return
    with pytest.raises(AssertionError, match="output 0 is off by"):
        properties.check(expected, found, length=500)
