"""Whatever a caller may hand over, in whatever way: the look-up and its gradient as lookup.py has them, wherever it runs."""

from __future__ import annotations

from typing import Any

import lookup
import pytest
import torch
from hypothesis import strategies as st
from npu_embedding import embedding

from testing import properties
from testing.properties import Example

pytestmark = pytest.mark.usefixtures("npu_poisoned")

WIDTHS = {
    "cpu": st.integers(0, 200) | st.sampled_from([1000, 4099]),
    "emulated": st.sampled_from([0, 1, 7, 64, 100]),
    "cuda": st.sampled_from([0, 1, 3, 16, 100, 128, 1000, 1024, 2048, 4096, 5000, 8192, 16411]),
    "npu": st.sampled_from([0, 1, 7, 64, 100, 1000, 4096, 16411]),
}


@st.composite
def examples(draw, place: str) -> Example:
    """Calls: indices and how they lie, the table, dy, the options, and how it is called."""
    rows = draw(st.sampled_from([1, 2, 5, 40, 300]))
    options: dict[str, Any] = {"scale_grad_by_freq": draw(st.booleans()), "sparse": draw(st.booleans())}
    sharded = draw(st.sampled_from([False, False, True]))
    first = draw(st.sampled_from([0, 3, rows])) if sharded else 0
    total = first + rows + draw(st.sampled_from([0, 4])) if sharded else rows
    if sharded:
        options["vocab_range"] = (first, first + rows)
        if draw(st.booleans()):
            options["num_embeddings"] = total
            options["padding_idx"] = draw(st.none() | st.integers(-total, total - 1))
        else:
            options["padding_idx"] = draw(st.none() | st.integers(0, total - 1))
    else:
        options["padding_idx"] = draw(st.none() | st.integers(-rows, rows - 1))
    if draw(st.sampled_from([False, False, True])):
        options |= {
            "max_norm": draw(st.sampled_from([0.0, 1.0, 5.0])),
            "norm_type": draw(st.sampled_from([1.0, 2.0, 2, 3.5])),
        }
    return Example(
        seed=draw(st.integers(0, 2**31)),
        leading=tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 7, 60]), max_size=2))),
        rows=rows,
        width=draw(WIDTHS[place]),
        dtype=draw(properties.floats(place)),
        index_dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        kind=draw(st.sampled_from(["uniform", "zipf", "equal"])),
        indices=draw(properties.layouts()),
        weight=draw(properties.drawn()),
        dy=draw(properties.drawn()),
        options=options,
        trains=draw(st.sampled_from([True, True, True, False])),
        way=draw(st.sampled_from(properties.WAYS)),
    )


def tensors(example: Example) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """indices, weight and dy, on the CPU."""
    generator = torch.Generator().manual_seed(example.seed)
    first, last = example.options.get("vocab_range", (0, example.rows))
    end = example.options.get("num_embeddings", last)
    n = torch.Size(example.leading).numel()
    begin = max(0, first - 2)
    values = begin + lookup.draw(example.kind, n, end - begin, generator)
    indices = example.indices(values.view(example.leading).to(example.index_dtype))
    weight = properties.materialise(example.weight, (example.rows, example.width), example.dtype, generator)
    if "max_norm" in example.options and 0 in weight.stride():
        weight = weight.clone(memory_format=torch.contiguous_format)  # it is written to
    dy = properties.materialise(example.dy, (*example.leading, example.width), example.dtype, generator)
    return indices, weight, dy


def test_it_is_the_look_up_however_it_is_called(device, npu_search):
    def holds(example: Example) -> None:
        indices, weight, dy = tensors(example)
        options, way = dict(example.options), example.way
        max_norm = options.pop("max_norm", None)
        norm_type = options.pop("norm_type", 2.0)
        if max_norm is not None and ("checkpoint" in way or way == "torch.func"):
            way = "plain"  # it writes to the table: once more in a recomputation, and not at all to a dual number
        if options["sparse"] and way in ("torch.func", "views of leaves"):
            way = "plain"  # neither PyTorch's transforms nor its views take a sparse gradient
        held = indices.to(device.torch) if indices.is_contiguous() else properties.ways.place(indices, device.torch)
        norms = {} if max_norm is None else {"max_norm": max_norm, "norm_type": norm_type}
        found = properties.call(
            way,
            lambda weight: [embedding(held, weight, **options, **norms)],
            [weight],
            [example.trains],
            lambda _: [dy],
            device.torch,
        )
        kept = {
            name: value for name, value in options.items() if name in ("padding_idx", "scale_grad_by_freq", "vocab_range")
        }
        if kept["padding_idx"] is not None and kept["padding_idx"] < 0 and "num_embeddings" in options:
            kept["padding_idx"] += options["num_embeddings"]
        case = lookup.Case(indices.contiguous(), weight.contiguous(), dy.contiguous(), **kept)
        if max_norm is not None:
            case.weight = lookup.renormalised(case, max_norm, norm_type)
        out, dweight, added = lookup.expected(case)
        assert found.outputs[0].is_contiguous()
        if max_norm is None:
            assert torch.equal(found.outputs[0], out)
        else:
            assert torch.allclose(
                found.outputs[0].double(), out.double(), rtol=2 * torch.finfo(case.weight.dtype).eps, atol=1e-6
            )
        if found.gradients is not None:
            gradient = found.gradients[0]
            assert gradient is not None
            assert gradient.dtype == example.dtype
            assert gradient.is_sparse == options["sparse"]
            lookup.check_gradient(gradient.to_dense(), dweight, added, indices.numel())

    npu_search(examples(device.name), holds)
