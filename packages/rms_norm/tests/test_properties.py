"""Whatever a caller may hand over, in whatever way: the formula in fp64 (formula.py), wherever the operator runs."""

from __future__ import annotations

import dataclasses
import math

import formula
import pytest
import torch
from hypothesis import strategies as st
from npu_rms_norm import add_rms_norm, rms_norm
from npu_rms_norm.call import CASTING_MODES

from testing import properties
from testing.properties import Example, Layout

pytestmark = pytest.mark.usefixtures("npu_poisoned")

WIDTHS = {
    "cpu": st.integers(1, 300) | st.sampled_from([1024, 4099]),
    "emulated": st.sampled_from([1, 7, 64, 100, 1000]),
    "cuda": st.sampled_from([1, 3, 16, 100, 128, 1000, 1024, 2000, 4096, 8192, 12288, 20000]),
    "npu": st.sampled_from([1, 7, 64, 100, 1000, 4096, 16384, 40000]),
}


@st.composite
def examples(draw, place: str) -> Example:
    """Calls: what x, the residual, the weight and dy are, the options, what trains, and how it is called."""
    dtype = draw(properties.floats(place))
    either = st.sampled_from([dtype, torch.float32])
    width = draw(WIDTHS[place])
    sizes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 33]), max_size=3)
    options = {
        "eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "offset": draw(st.sampled_from([0.0, 1.0, -0.5, 1])),
        "casting_mode": draw(st.sampled_from(tuple(CASTING_MODES))),
        "in_place": draw(st.booleans()),
    }
    return Example(
        seed=draw(st.integers(0, 2**31)),
        leading=tuple(draw(sizes.filter(lambda leading: place != "cpu" or math.prod(leading) * width <= 2**18))),
        width=width,
        dtype=dtype,
        weight_dtype=draw(st.none() | either),
        residual_dtype=draw(either),
        x=draw(properties.drawn()),
        residual=draw(properties.drawn()),
        weight=draw(properties.drawn()),
        dy=draw(properties.drawn()),
        dsum=draw(st.none() | properties.drawn()),
        options=options,
        trains=draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        way=draw(st.sampled_from(properties.WAYS)),
    )


def tensors(example: Example) -> list[torch.Tensor | None]:
    """x, residual, weight, dy and dsum, on the CPU."""
    generator = torch.Generator().manual_seed(example.seed)
    shape = (*example.leading, example.width)
    make = lambda spec, shape, dtype: properties.materialise(spec, shape, dtype, generator)  # noqa: E731
    return [
        make(example.x, shape, example.dtype),
        make(example.residual, shape, example.residual_dtype),
        None if example.weight_dtype is None else make(example.weight, (example.width,), example.weight_dtype),
        make(example.dy, shape, example.dtype),
        None if example.dsum is None else make(example.dsum, shape, example.residual_dtype),
    ]


def case_of(example: Example, x: torch.Tensor, weight: torch.Tensor | None, dy: torch.Tensor) -> formula.Case:
    options = {name: value for name, value in example.options.items() if name != "in_place"}
    weight = None if weight is None else weight.contiguous()
    return formula.Case(x.contiguous(), weight, dy.contiguous(), **options)


def test_rms_norm_is_the_formula_however_it_is_called(device, npu_search):
    def holds(example: Example) -> None:
        x, _, weight, dy, _ = tensors(example)
        trains = (example.trains[0], example.trains[2] and weight is not None)
        found = properties.call(
            example.way,
            lambda x, weight: [rms_norm(x, weight, **example.options)],
            [x, weight],
            trains,
            lambda _: [dy.clone(memory_format=torch.preserve_format) if example.options["in_place"] else dy],
            device.torch,
        )
        assert found.outputs[0].is_contiguous()
        assert found.outputs[0].dtype == example.dtype
        if x.numel():
            dx, dweight = found.gradients or (None, None)
            formula.check(case_of(example, x, weight, dy), (found.outputs[0], dx, dweight))
        assert_shapes(found.gradients, [x, weight], trains)

    npu_search(examples(device.name), holds)


def test_add_rms_norm_is_the_formula_of_the_sum(device, npu_search):
    def holds(example: Example) -> None:
        x, residual, weight, dy, dsum = tensors(example)
        trains = (*example.trains[:2], example.trains[2] and weight is not None)
        found = properties.call(
            example.way,
            lambda x, residual, weight: add_rms_norm(x, residual, weight, **example.options),
            [x, residual, weight],
            trains,
            lambda _: [dy, dsum],
            device.torch,
        )
        y, total = found.outputs
        wide = torch.promote_types(residual.dtype, torch.float32)
        wanted = (x.to(wide) + residual.to(wide)).to(residual.dtype)
        assert torch.equal(total, wanted)
        assert y.dtype == example.dtype
        if x.numel():
            dx, dresidual, dweight = found.gradients or (None, None, None)
            case = case_of(example, wanted, weight, dy)
            through = None if dsum is None else dsum.contiguous()
            formula.check(case, (y, dresidual, dweight), dsum=through)
            formula.check(dataclasses.replace(case), (y, dx, dweight), dsum=through)
        assert_shapes(found.gradients, [x, residual, weight], trains)

    npu_search(examples(device.name), holds)


def assert_shapes(
    gradients: list[torch.Tensor | None] | None, inputs: list[torch.Tensor | None], trains: tuple[bool, ...]
) -> None:
    """A gradient like each input that trains, and none for the others."""
    if gradients is None:
        return
    for gradient, tensor, train in zip(gradients, inputs, trains, strict=True):
        assert (gradient is not None) == train
        if gradient is not None and tensor is not None:
            assert gradient.shape == tensor.shape
            assert gradient.dtype == tensor.dtype


def test_a_layout_gives_the_same_bits_as_a_copy(device):
    """The strategies' layouts themselves: equal values, other strides."""
    x = torch.randn(4, 6, 64)
    for name in properties.tensors.LAYOUTS:
        lies = Layout(name, 1)(x)
        moved = properties.ways.place(lies, device.torch)
        assert moved.stride() == lies.stride()
        assert torch.allclose(rms_norm(moved).cpu(), rms_norm(lies.contiguous().to(device.torch)).cpu(), atol=1e-6)
