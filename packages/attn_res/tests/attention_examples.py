"""Examples of attention over depth, with tensors in every layout, and their comparison with fp64."""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st
from torch import Tensor

from testing import properties
from testing.properties import Drawn, Example, blurred, expect

WIDTHS = {
    "cpu": st.integers(1, 200) | st.sampled_from([1000, 4099]),
    "emulated": st.sampled_from([1, 7, 64, 100, 1000]),
    "cuda": st.sampled_from([1, 3, 16, 100, 128, 1000, 2048, 4096, 8192, 12288, 20000]),
    "npu": st.sampled_from([1, 7, 64, 100, 1000, 4096, 16384, 20000]),
}


@st.composite
def examples(draw, place: str) -> Example:
    """Calls: blocks, the weights and what else there is, which of them train, and how it is called."""
    dtype = draw(properties.floats(place))
    flag = st.booleans()
    some = st.sampled_from([1, 2, 3, 4, 5, 9, 17]) if place != "emulated" else st.sampled_from([1, 2, 3, 5])
    upstream = st.none() | properties.drawn()
    return Example(
        seed=draw(st.integers(0, 2**31)),
        leading=tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 21]), max_size=2))),
        width=draw(WIDTHS[place]),
        n_blocks=draw(some),
        n_layers=draw(st.sampled_from([1, 2, 3, 5])),
        listed=draw(flag),
        same_twice=draw(st.sampled_from([False, False, True])),
        dtype=dtype,
        weight_dtype=draw(st.sampled_from([dtype, torch.float32])),
        blocks=draw(st.tuples(*[properties.drawn()] * 3)),
        weights=draw(st.tuples(*[properties.drawn()] * 3)),
        more=draw(st.tuples(*[properties.drawn()] * 3)),
        upstream=(draw(properties.drawn()), *draw(st.tuples(upstream, upstream))),
        normalised=draw(flag),
        added=draw(flag),
        return_weights=draw(flag),
        norm_per_layer=draw(flag),
        eps=draw(st.sampled_from([1e-6, 1e-3])),
        output_rms_eps=draw(st.sampled_from([1e-6, 1e-3])),
        trains=draw(st.tuples(*[flag] * 24)),
        way=draw(st.sampled_from(properties.WAYS)),
    )


class Maker:
    """Tensors of an example, one after the other."""

    def __init__(self, example: Example) -> None:
        self._example, self._generator = example, torch.Generator().manual_seed(example.seed)

    def __call__(self, spec: Drawn, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return properties.materialise(spec, shape, dtype, self._generator, scale)

    def weights(self, *leading: int) -> tuple[Tensor, Tensor, Tensor]:
        """query of scores of about one, rms_weight and output_rms_weight."""
        example = self._example
        query, norm, other = example.weights
        # Scores are exponents: weights of a hundred would leave one block's alone, whose neighbours' are below any unit.
        mild = {"large": "normal"}
        query, norm = (Drawn(mild.get(spec.kind, spec.kind), spec.layout) for spec in (query, norm))
        width, dtype = example.width, example.weight_dtype
        return self(query, (*leading, width), dtype, width**-0.5), self(norm, (width,), dtype), self(other, (width,), dtype)

    def blocks(self) -> list[Tensor]:
        """One tensor [N, ..., D], or N of them."""
        example = self._example
        shape = (*example.leading, example.width)
        if not example.listed:
            return [self(example.blocks[0], (example.n_blocks, *shape), example.dtype)]
        return [self(example.blocks[i % 3], shape, example.dtype) for i in range(example.n_blocks)]

    def upstream(self, outputs: list[Tensor]) -> list[Tensor | None]:
        """A gradient for each output, or none."""
        given = self._example.upstream
        specs = itertools.cycle(given)
        return [
            None if spec is None else self(spec, tuple(o.shape), o.dtype) for o, spec in zip(outputs, specs, strict=False)
        ]


def through(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to a dtype, which passes gradients as they are."""
    return exact + (exact.detach().to(dtype).double() - exact.detach())


def scores(blocks: Tensor, query: Tensor, rms_weight: Tensor, eps: float) -> Tensor:
    return blurred((unit_rows(blocks, eps) * (query * rms_weight)).sum(-1))


def normalise(h: Tensor, weight: Tensor, eps: float) -> Tensor:
    return unit_rows(h, eps) * weight


def unit_rows(rows: Tensor, eps: float) -> Tensor:
    return blurred(blurred(rows) * blurred(torch.rsqrt(blurred(rows).square().mean(-1, keepdim=True) + eps)))


def compare(
    example: Example,
    function,
    exact,
    inputs: list[Tensor | None],
    device,
    constant: int = 0,
    row_roundings: int | None = None,
) -> None:
    """`function` called as the example says against `exact`; its last `constant` outputs have no gradients."""
    trains = [train and tensor is not None for tensor, train in zip(inputs, example.trains, strict=False)]
    held: list[list[Tensor | None]] = []

    def upstream(outputs: list[Tensor]) -> list[Tensor | None]:
        made = Maker(example).upstream([output.detach() for output in outputs])
        made = made[: len(outputs) - constant] + [None] * constant
        held.append(made)
        return made

    found = properties.call(example.way, function, inputs, trains, upstream, device.torch)
    if not held:
        held.append([None] * len(found.outputs))
    expected = expect(exact, inputs, trains, held[0], example.seed)
    if found.gradients is not None and any(value is None for value in expected.gradients):
        # Where no output that was differentiated depends on an input, zeros are as good as none.
        pairs = zip(found.gradients, expected.gradients, strict=True)
        gradients = [None if wanted is None and got is not None and not got.any() else got for got, wanted in pairs]
        found = found._replace(gradients=gradients)
    expected = expected._replace(
        gradients=[None if got is None and (want is None or not want.any()) else want
                   for got, want in zip(found.gradients or expected.gradients, expected.gradients, strict=True)],
    )  # fmt: skip
    tokens = max(1, torch.Size(example.leading).numel())
    rounds = row_roundings if row_roundings is not None else 2 if example.normalised or example.added else 0
    properties.check(expected, found, length=example.width + tokens * example.n_blocks, row_roundings=rounds)
