"""Gates, biases, parameters for each head, dtypes of results, quantised results: however they are called, against fp64."""

from __future__ import annotations

from typing import Any

import formula
import pytest
import torch
from hypothesis import strategies as st
from npu_rms_norm import (
    add_rms_norm,
    add_rms_norm_dynamic_quant,
    gated_rms_norm,
    rms_norm,
    rms_norm_dynamic_quant,
)
from npu_rms_norm.call import CASTING_MODES
from npu_rms_norm.reference import ACTIVATIONS

from testing import properties
from testing.properties import Example

pytestmark = pytest.mark.usefixtures("npu_poisoned")

WIDTHS = {
    "cpu": st.integers(1, 300) | st.sampled_from([1024, 4099]),
    "emulated": st.sampled_from([1, 7, 64, 100, 1000]),
    "cuda": st.sampled_from([1, 16, 64, 100, 128, 256, 1000, 2560, 4096, 20000]),
    "npu": st.sampled_from([1, 7, 64, 100, 1000, 4096, 16384, 40000]),
}
NORMS = ("plain", "add", "gated", "gated first")


@st.composite
def examples(draw, place: str) -> Example:
    """Calls: what its tensors are, the options, what trains, and how it is called."""
    dtype, norm = draw(properties.floats(place)), draw(st.sampled_from(NORMS))
    either = st.sampled_from([dtype, torch.float32])
    options = {
        "eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "offset": draw(st.sampled_from([0.0, 1.0, -0.5])),
        "casting_mode": draw(st.sampled_from(tuple(CASTING_MODES))),
    }
    if "gated" in norm:
        options |= {"activation": draw(st.sampled_from(ACTIVATIONS)), "norm_before_gate": norm == "gated"}
    return Example(
        seed=draw(st.integers(0, 2**31)),
        norm=norm,
        leading=tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 33]), max_size=2))),
        heads=draw(st.none() | st.sampled_from([1, 2, 3, 8])),
        width=draw(WIDTHS[place]),
        dtype=dtype,
        dtypes=(draw(either), draw(st.none() | either), draw(st.none() | either)),
        drawn=tuple(draw(properties.drawn()) for _ in range(6)),
        options=options,
        y_dtype=draw(st.none() | st.sampled_from(properties.tensors.FLOATS)),
        return_fp32=draw(st.booleans()),
        trains=draw(st.tuples(*[st.booleans()] * 4)),
        way=draw(st.sampled_from(properties.WAYS)),
    )


def tensors(example: Example) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """x, residual or gate, weight and bias, and the gradients of y and of what is returned in fp32, on the CPU."""
    generator = torch.Generator().manual_seed(example.seed)
    rows = (*example.leading, *([] if example.heads is None else [example.heads]), example.width)
    parameter = rows[-1:] if example.heads is None else rows[-2:]
    wide = torch.promote_types(example.dtype, torch.float32)
    shapes = (rows, rows, parameter, parameter, rows, rows)
    dtypes = (example.dtype, *example.dtypes, example.y_dtype or example.dtype, wide)
    scales = (1.0, 1.0, 0.1, 0.1, 1.0, 1.0)  # products stay within fp16
    found: list[Any] = [
        None if dtype is None else properties.materialise(spec, shape, dtype, generator, scale)
        for spec, shape, dtype, scale in zip(example.drawn, shapes, dtypes, scales, strict=True)
    ]
    if example.norm == "plain":
        found[1] = None
    return found[:4], found[4:]


def call(example: Example, x, other, weight, bias) -> list[torch.Tensor]:
    """y, the sum and what is in fp32, as far as there are any."""
    options = {**example.options, "bias": bias, "dtype": example.y_dtype, "return_fp32": example.return_fp32}
    if example.norm == "plain":
        found = rms_norm(x, weight, **options)
    else:
        found = (add_rms_norm if example.norm == "add" else gated_rms_norm)(x, other, weight, **options)
    return list(found) if isinstance(found, tuple) else [found]


def definition(example: Example, x, other, weight, bias) -> torch.Tensor:
    act = None
    if "gated" in example.norm:
        act = torch.sigmoid(other) * (other if example.options["activation"] == "silu" else 1)
    u = x if act is None or example.norm == "gated" else x * act
    y = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + example.options["eps"])
    y = y if weight is None else y * (example.options["offset"] + weight)
    y = y if bias is None else y + bias
    return y * act if example.norm == "gated" else y


def sizes(example: Example, x, other, weight, bias, dy) -> list[torch.Tensor | None]:
    """How large what is added is, in y and in the gradients of x, gate, weight and bias."""
    act, slope = torch.ones_like(x), torch.zeros_like(x)
    if "gated" in example.norm:
        sigmoid = torch.sigmoid(other)
        silu = example.options["activation"] == "silu"
        act = sigmoid * other.abs() if silu else sigmoid
        slope = sigmoid * (1 + (other.abs() if silu else 1) * (1 + sigmoid))  # 1 - sigmoid loses digits
    first = example.norm == "gated first"
    u = x.abs() * act if first else x.abs()
    rstd = torch.rsqrt(u.square().mean(-1, keepdim=True) + example.options["eps"])
    n, scale = u * rstd, 1.0 if weight is None else abs(example.options["offset"]) + weight.abs()
    z, upstream = n * scale + (0.0 if bias is None else bias.abs()), dy.abs() if first else dy.abs() * act
    g = upstream * scale
    dx = rstd * (g + n * (g * n).mean(-1, keepdim=True))
    dother = dx * x.abs() * slope if first else dy.abs() * z * slope
    leading = list(range(x.dim() - (1 if example.heads is None else 2)))
    of_columns = [(terms.square().sum(leading) if leading else terms.square()).sqrt() for terms in (upstream * n, upstream)]
    rows = (z if first else z * act, dx * act if first else dx, dother)
    return [*(size.amax(-1, keepdim=True) for size in rows), *of_columns]


def test_every_option_is_the_formula_however_it_is_called(device, npu_search):
    def holds(example: Example) -> None:
        inputs, seeds = tensors(example)
        trains = tuple(train and tensor is not None for train, tensor in zip(example.trains, inputs, strict=True))
        if example.norm == "add":
            trains = (trains[0], False, *trains[2:])

        def upstream(outputs):
            return [seeds[0], *[None] * (example.norm == "add"), *[seeds[1]] * example.return_fp32]

        run = lambda *given: call(example, *given)  # noqa: E731
        found = properties.call(example.way, run, inputs, trains, upstream, device.torch)
        x, other, weight, bias = inputs
        if not x.numel():
            return
        if example.norm == "add":  # of the sum as it is rounded
            wide = torch.promote_types(other.dtype, torch.float32)
            x = (x.to(wide) + other.to(wide)).to(other.dtype)
            assert torch.equal(found.outputs[1], x)
        leaves = [None if each is None else each.double().requires_grad_() for each in (x, other, weight, bias)]
        y = definition(example, *leaves)
        dy = seeds[0].double() + (seeds[1].double() if example.return_fp32 else 0)
        plain = [None if each is None else each.detach() for each in leaves]
        size = sizes(example, *plain, seeds[0].double().abs() + (seeds[1].double().abs() if example.return_fp32 else 0))
        dtypes = [each.dtype for each in (inputs[0], *inputs[1:], seeds[0]) if each is not None]
        coarse = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        rows, width = x[..., 0].numel(), x.shape[-1]
        options = {"roundings": 10, "length": width, "rounded_to": coarse}
        for result in found.outputs[:1] + found.outputs[-1:] * example.return_fp32:
            formula.assert_close(result, y.detach(), scale=size[0], **options)
        if found.gradients is None:
            return
        wanted = [each for each, train in zip(leaves, trains, strict=True) if train]
        exact = iter(torch.autograd.grad(y, wanted, dy))
        for place, (gradient, train) in enumerate(zip(found.gradients, trains, strict=True)):
            assert (gradient is not None) == train
            if train:
                assert (gradient.shape, gradient.dtype) == (inputs[place].shape, inputs[place].dtype)
                length = width + (rows if place > 1 else 0)
                formula.assert_close(gradient, next(exact), scale=size[1 + place], **{**options, "length": length})

    npu_search(examples(device.name), holds)


def test_every_row_is_in_steps_of_its_scale(device, npu_search):
    def holds(example: Example) -> None:
        (x, other, weight, bias), _ = tensors(example)
        options = {name: example.options[name] for name in ("eps", "offset", "casting_mode")}
        if example.dtype.itemsize < torch.float32.itemsize:
            options["casting_mode"] = "gemma"  # which rounds nothing before the result
        place = lambda each: None if each is None else properties.ways.place(each, device.torch)  # noqa: E731
        dtype = torch.float8_e4m3fn if device.name == "cpu" and example.return_fp32 else torch.int8
        if example.norm == "add":
            found = add_rms_norm_dynamic_quant(*map(place, (x, other, weight)), bias=place(bias), dtype=dtype, **options)
            wide = torch.promote_types(other.dtype, torch.float32)
            x = (x.to(wide) + other.to(wide)).to(other.dtype)
            assert torch.equal(found.residual.cpu(), x)
        else:
            found = rms_norm_dynamic_quant(place(x), place(weight), bias=place(bias), dtype=dtype, **options)
        if x.numel():
            plain = Example(**{**vars(example), "norm": "plain"})
            leaves = [None if each is None else each.double() for each in (x, None, weight, bias)]
            formula.check_quantised(found.y.cpu(), found.scale.cpu(), definition(plain, *leaves), dtype)

    npu_search(examples(device.name), holds)
