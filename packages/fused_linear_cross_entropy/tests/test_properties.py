"""Whatever a caller may hand over, in whatever way: the loss of whole logits in fp64 (losses.py), wherever it runs."""

from __future__ import annotations

import dataclasses
import random
from math import ceil

import losses
import pytest
import torch
from hypothesis import strategies as st
from npu_fused_linear_cross_entropy import (
    LinearCrossEntropyOutput,
    causal_lm_loss,
    fused_linear_cross_entropy,
    linear_log_probs,
    matmul,
)
from torch import Tensor

from testing import properties
from testing.properties import Drawn, Example

pytestmark = pytest.mark.usefixtures("npu_poisoned")

VOCABULARIES = {
    "cpu": st.integers(1, 300) | st.sampled_from([1000, 2049]),
    "emulated": st.sampled_from([1, 7, 123, 1000]),
    "cuda": st.sampled_from([1, 3, 123, 512, 1000, 4096, 8192, 9000, 20000]),
    "npu": st.sampled_from([1, 7, 123, 1000, 9000, 32000]),
}
OUTPUTS = ("loss", "z_loss", "token_accuracy", "predicted_tokens", "lse", "entropy")


@st.composite
def examples(draw, place: str) -> Example:
    """Calls: x, the weight, targets and what else there is, the options, what trains, and how it is called."""
    dtype = draw(properties.floats(place))
    either = st.sampled_from([dtype, torch.float32])
    x, weight = draw(properties.drawn()), draw(properties.drawn())
    distinct = "repeated" not in x.layout.name + weight.layout.name and {x.kind, weight.kind} <= {"normal", "large", "small"}
    distinct &= "one number" not in (x.layout.name, weight.layout.name)
    flag = st.booleans()
    rarely = st.sampled_from([False, False, True])
    softcap = draw(st.sampled_from([None, None, 5.0, 30, 1]))
    options = {
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 1.0, 1])),
        "lse_square_scale": draw(st.sampled_from([0.0, 0.0, 0.1, 1])),
        "softcap": softcap,
        "logit_scale": draw(st.sampled_from([1.0, 1.0, 0.5, -1.0, 2, 1])),
        "token_scaling": draw(rarely),
        "return_z_loss": draw(rarely),
        "return_lse": draw(rarely),
        "return_entropy": draw(rarely),
        # Which of equal logits is the largest hangs on how each was rounded.
        "return_token_accuracy": draw(rarely) and distinct and softcap is None,
        "return_predicted_tokens": draw(rarely) and distinct,
        "accum_dtype": draw(st.sampled_from([None, None, torch.float32])),
        "chunk_tokens": draw(st.sampled_from([None, None, 1, 5, 1000])),
        "memory_budget": draw(st.sampled_from([None, None, 2**12, 2**16])),
        "ignore_index": draw(st.sampled_from([-100, 0, 2**40])),
    }
    return Example(
        seed=draw(st.integers(0, 2**31)),
        leading=tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 21]), max_size=2))),
        width=draw(st.sampled_from([1, 2, 8, 16, 33, 100])),
        vocabulary=draw(VOCABULARIES[place]),
        dtype=dtype,
        weight_dtype=draw(either),
        bias_dtype=draw(st.none() | either),
        target_dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        x=x,
        weight=weight,
        bias=draw(properties.drawn()),
        target=draw(properties.layouts()),
        class_weight=draw(st.none() | st.none() | properties.layouts()),
        ignored=draw(st.sampled_from([0.0, 0.3, 1.0])),
        dloss=draw(properties.drawn()),
        dentropy=draw(st.none() | properties.drawn()),
        options=options,
        trains=draw(st.tuples(flag, flag, flag)),
        way=draw(st.sampled_from(properties.WAYS)),
    )


def make(example: Example) -> tuple[losses.Case, torch.Generator]:
    """The problem, its tensors as they lie in memory, and the generator for gradients."""
    generator = torch.Generator().manual_seed(example.seed)
    draw = lambda spec, shape, dtype, scale: properties.materialise(spec, shape, dtype, generator, scale)  # noqa: E731
    mild = lambda spec: Drawn("normal" if spec.kind == "large" else spec.kind, spec.layout)  # noqa: E731
    width, vocabulary, options = example.width, example.vocabulary, dict(example.options)
    x = draw(example.x, (*example.leading, width), example.dtype, 0.03 if example.x.kind == "large" else 1.0)
    weight = draw(mild(example.weight), (vocabulary, width), example.weight_dtype, 2 * width**-0.5)
    bias = None if example.bias_dtype is None else draw(mild(example.bias), (vocabulary,), example.bias_dtype, 1.0)
    target = torch.randint(0, vocabulary, example.leading, generator=generator)
    if torch.iinfo(example.target_dtype).max >= options["ignore_index"]:
        target = torch.where(
            torch.rand(example.leading, generator=generator) < example.ignored, options["ignore_index"], target
        )
    class_weight = None
    if example.class_weight is not None:
        class_weight = example.class_weight(torch.rand(vocabulary, generator=generator) + 0.1)
    return losses.Case(x, weight, example.target(target.to(example.target_dtype)), bias, class_weight, options), generator


def compare(example: Example, case: losses.Case, function, place, generator: torch.Generator, divisor: float = 1.0) -> None:
    """`function` of x, weight and bias, called as the example says, with the case's outputs, against fp64.

    divisor: what it divides the losses of the case by.
    """
    held: dict[str, Tensor] = {}
    asked = [name for name in OUTPUTS if name == "loss" or case.options.get(f"return_{name}")]

    def upstream(outputs: list[Tensor]) -> list[Tensor | None]:
        held.clear()
        given = {"loss": example.dloss, "entropy": example.dentropy}
        made: list[Tensor | None] = []
        for name, output in zip(asked, outputs, strict=True):
            spec = given.get(name)
            seed = None if spec is None else properties.materialise(spec, tuple(output.shape), output.dtype, generator)
            if seed is not None:
                held[name] = seed
            made.append(seed)
        return made

    inputs = [case.x, case.weight, case.bias]
    trains = [train and tensor is not None for train, tensor in zip(example.trains, inputs, strict=True)]
    found = properties.call(example.way, function, inputs, trains, upstream, place.torch)
    if "loss" not in held and "entropy" not in held:  # nothing was differentiated
        held["loss"] = torch.ones_like(found.outputs[0])
    casts = example.way == "autocast" and found.gradients is not None and example.dtype != torch.float64
    dtype = torch.bfloat16 if casts else example.dtype
    cast = lambda t: None if t is None else t.contiguous().to(dtype if casts else t.dtype)  # noqa: E731
    plain = dataclasses.replace(
        case,
        x=cast(case.x),
        weight=cast(case.weight),
        bias=cast(case.bias),
        target=case.target.contiguous().long(),
        class_weight=None if case.class_weight is None else case.class_weight.contiguous(),
        seeds={name: seed / divisor if name == "loss" else seed for name, seed in held.items()},
    )
    outputs = dict.fromkeys(OUTPUTS) | dict(zip(asked, found.outputs, strict=True))
    for name in ("loss", "z_loss"):
        outputs[name] = None if outputs[name] is None else outputs[name] * divisor
    if outputs["predicted_tokens"] is not None:
        outputs["predicted_tokens"] = as_good(plain, outputs["predicted_tokens"])
    gradients = {}
    for name, gradient, tensor, train in zip(
        ("x", "weight", "bias"), found.gradients or [None] * 3, inputs, trains, strict=True
    ):
        if gradient is not None and tensor is not None:
            assert gradient.dtype == tensor.dtype
            assert gradient.shape == tensor.shape
            gradients[name] = gradient
        assert found.gradients is None or (gradient is not None) == train, f"gradient of {name}"
    chunks = max(1, ceil(case.target.numel() / (case.options["chunk_tokens"] or 128)))
    logits = torch.float32 if matmul.writes_fp32(place.torch, dtype) else dtype
    kept = dtype if case.options["memory_budget"] is not None else None
    losses.check(plain, losses.Results(outputs, gradients), roundings=2 + chunks, logits=logits, kept=kept)


def as_good(case: losses.Case, predicted: Tensor) -> Tensor:
    """The first largest logit wherever what was predicted is as large to within fp32; a softcap makes many so."""
    z = case.x.double().reshape(-1, case.x.shape[-1]) @ case.weight.to(case.x.dtype).double().t()
    z = (z if case.bias is None else z + case.bias.double()) * case.options["logit_scale"]
    if case.options["softcap"] is not None:
        z = torch.tanh(z / case.options["softcap"])
    chosen = z.gather(1, predicted.reshape(-1, 1).clamp_min(0)).view(predicted.shape)
    largest, place = (found.view(predicted.shape) for found in z.max(1))
    near = chosen >= largest - 1e-6 * (1 + z.abs().amax(1).view(predicted.shape))
    return torch.where((predicted >= 0) & near, place, predicted)


def test_the_loss_is_that_of_whole_logits(device, npu_search):
    def holds(example: Example) -> None:
        case, generator = make(example)
        target = properties.ways.place(case.target, device.torch)
        class_weight = None if case.class_weight is None else properties.ways.place(case.class_weight, device.torch)

        def function(x, weight, bias):
            found = fused_linear_cross_entropy(x, weight, target, bias, class_weight=class_weight, **case.options)
            return [found] if isinstance(found, Tensor) else [value for value in found if value is not None]

        compare(example, case, function, device, generator)

    npu_search(examples(device.name), holds)


@pytest.mark.few(1)
def test_log_probabilities_are_those_of_whole_logits(device, npu_search):
    shared = ("softcap", "logit_scale", "return_entropy", "accum_dtype", "chunk_tokens", "memory_budget", "ignore_index")

    def holds(example: Example) -> None:
        case, generator = make(example)
        options = {name: case.options[name] for name in shared}
        case = dataclasses.replace(case, options={**options, "reduction": "none"}, class_weight=None)
        target = properties.ways.place(case.target, device.torch)

        def function(x, weight, bias):
            found = linear_log_probs(x, weight, target, bias, **options)
            return [-found] if isinstance(found, Tensor) else [-found.log_probs, found.entropy]

        compare(example, case, function, device, generator)

    npu_search(examples(device.name), holds)


def test_the_loss_of_a_causal_model_is_that_of_the_next_token(device, npu_search):
    def holds(example: Example) -> None:
        options = {**example.options, "reduction": "mean"}
        drawn = random.Random(example.seed)
        items = drawn.choice([None, 7, 2.5, torch.tensor(3), torch.tensor(11.0)])
        shift = drawn.choice([True, False, "labels"])
        example = Example(**vars(example) | {"leading": example.leading or (3,), "options": options})
        case, generator = make(example)
        labels = properties.ways.place(case.target, device.torch)
        target = case.target.contiguous().long()
        if shift is True:
            end = torch.full((*target.shape[:-1], 1), options["ignore_index"])
            target = torch.cat((target, end), -1)[..., 1:]
        if items is not None:
            options = {**options, "reduction": "sum"}
        case = dataclasses.replace(case, target=target, options=options)
        class_weight = None if case.class_weight is None else properties.ways.place(case.class_weight, device.torch)
        asked = {name: value for name, value in options.items() if name != "reduction"}
        number = items.to(device.torch) if isinstance(items, Tensor) else items

        def function(x, weight, bias):
            given = labels if shift == "labels" else shift
            found = causal_lm_loss(x, weight, labels, number, given, bias=bias, class_weight=class_weight, **asked)
            return [found] if isinstance(found, Tensor) else [value for value in found if value is not None]

        compare(example, case, function, device, generator, divisor=1.0 if items is None else float(items))

    npu_search(examples(device.name), holds)


def test_the_outputs_have_the_order_that_these_tests_take():
    assert LinearCrossEntropyOutput._fields == OUTPUTS == losses.OUTPUTS
