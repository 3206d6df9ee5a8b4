"""Which results keep their bits where something else changes: every cell of the tables of the page "The same bits"."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from npu_attn_res import attn_res
from npu_embedding import embedding
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_log_probs
from npu_offline import emulate
from npu_offline.plugin import why_not
from npu_rms_norm import rms_norm
from torch import Tensor

from tools.workspace import ROOT

PAGE = ROOT / "tools" / "docs" / "pages" / "operators" / "bits.md"
ROWS = 300
FEW, ONE = slice(17, 58), slice(40, 41)  # of the rows; neither ends where a tile does
Results = dict[str, Tensor]


@dataclass
class Operator:
    """A function of rows and of parameters.

    Attributes:
        run: takes `rows`, then `parameters`.
        rows: tensors [ROWS, ...]; the first is trained where it is floating.
        padding: what rows of padding are, of each of `rows`.
        parameters: whose gradients are sums over rows.
        upstream: [ROWS, ...], the gradient of the output.
    """

    run: Callable[..., Tensor]
    rows: list[Tensor]
    padding: list[float]
    parameters: list[Tensor]
    upstream: Tensor

    def results(self, parts: list[list[Tensor]], with_gradients: bool = True) -> Results:
        """The output and gradients of [*rows, upstream] in parts; autograd adds up the parameters' gradients."""
        parameters = [each.clone().requires_grad_(with_gradients) for each in self.parameters]
        outputs, gradients = [], []
        for first, *rest, upstream in parts:
            leaf = first.clone().requires_grad_(with_gradients and first.is_floating_point())
            output = self.run(leaf, *rest, *parameters)
            outputs.append(output.detach())
            if with_gradients:
                output.backward(upstream)
                gradients.append(leaf.grad)
        found = {"output": torch.cat(outputs)}
        if with_gradients and gradients[0] is not None:
            found["gradient of rows"] = torch.cat(gradients)
        if with_gradients:
            found["gradients of parameters"] = torch.cat([each.grad.flatten() for each in parameters])
        return found

    def part(self, rows: slice) -> list[Tensor]:
        return [each[rows] for each in (*self.rows, self.upstream)]

    def padded(self, rows: slice) -> list[Tensor]:
        """These rows, and padding to ROWS."""
        given = zip(self.part(rows), (*self.padding, 0.0), strict=True)
        lacking = ROWS - (rows.stop - rows.start)
        return [torch.cat((each, each.new_full((lacking, *each.shape[1:]), value))) for each, value in given]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(*shape: int, below: int, seed: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def head(run: Callable[..., Tensor], width: int, vocabulary: int) -> Operator:
    rows = [normal(ROWS, width, seed=0), whole(ROWS, below=vocabulary, seed=1)]
    return Operator(run, rows, [0.0, -100], [normal(vocabulary, width, seed=2)], normal(ROWS, seed=3))


def over_depth(values: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    return attn_res(values.transpose(0, 1).contiguous(), query, weight)


def invariant(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return linear_log_probs(x, weight, target, batch_invariant=True, chunk_tokens=64)


def unreduced(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return fused_linear_cross_entropy(x, weight, target, reduction="none")


def operators() -> dict[str, Operator]:
    """By the title of the operator's table."""
    x, upstream, weight = normal(ROWS, 96, seed=0), normal(ROWS, 96, seed=1), normal(96, seed=2)
    values, query = normal(ROWS, 4, 96, seed=3), 0.1 * normal(96, seed=4)
    ids, table = whole(ROWS, below=40, seed=5), normal(40, 96, seed=6)
    return {
        "RMSNorm": Operator(rms_norm, [x], [1.0], [weight], upstream),
        "Embedding": Operator(embedding, [ids], [0], [table], upstream),
        "Attention Residuals": Operator(over_depth, [values], [1.0], [query, weight], upstream),
        "Log-probabilities with `batch_invariant`": head(invariant, 96, 520),
        OF_A_LIBRARY: head(unreduced, 1024, 2000),
    }


def rows_of(found: Results, rows: slice) -> Results:
    return {name: each if name == "gradients of parameters" else each[rows] for name, each in found.items()}


def once_more(operator: Operator, found: Results) -> tuple[Results, Results]:
    return operator.results([operator.part(slice(None))]), found


def among_others(operator: Operator, found: Results) -> tuple[Results, Results]:
    alone = operator.results([operator.part(FEW)])
    del alone["gradients of parameters"]  # a sum of other rows
    return alone, rows_of(found, FEW)


def before_padding(operator: Operator, found: Results) -> tuple[Results, Results]:
    padded = operator.results([operator.padded(FEW)])
    return operator.results([operator.part(FEW)]), rows_of(padded, slice(FEW.stop - FEW.start))


def in_parts(operator: Operator, found: Results) -> tuple[Results, Results]:
    return operator.results([operator.part(slice(0, 128)), operator.part(slice(128, ROWS))]), found


def in_a_rollout(operator: Operator, found: Results) -> tuple[Results, Results]:
    return operator.results([operator.part(ONE)], with_gradients=False), rows_of(found, ONE)


@functools.cache
def of_all_rows(title: str, place: str) -> Results:
    """The results that others are compared with; `place` is where the caller is."""
    operator = operators()[title]
    return operator.results([operator.part(slice(None))])


CHANGES = {
    "the same call again": once_more,
    "other rows beside it": among_others,
    "rows of padding behind it": before_padding,
    "the rows in two calls": in_parts,
    "one row without gradients, as in a rollout": in_a_rollout,
}
OF_A_LIBRARY = "Linear cross entropy and log-probabilities"  # its products: whether their bits differ depends on the machine
COLUMNS = ("output", "gradient of rows", "gradients of parameters")


def tables() -> dict[str, dict[str, dict[str, str]]]:
    """The cells of the page's tables of results, by title, row and column."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        lines = [
            [cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines() if line.startswith("|")
        ]
        if lines and tuple(lines[0][1 : 1 + len(COLUMNS)]) == COLUMNS:
            found[title] = {line[0]: dict(zip(COLUMNS, line[1:], strict=False)) for line in lines[2:]}
    return found


def test_there_is_a_table_for_each_operator_with_a_row_for_each_change():
    found = {
        title: {row for row in rows if "ranks" not in row} for title, rows in tables().items()
    }  # those are of other tests
    assert found == dict.fromkeys(operators(), set(CHANGES))


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("title", operators())
def test_a_cell_says_which_bits_stay(title, change):
    """ "yes": at each place. "no": not at all of them. "-": there is no such result, or it is of other rows."""
    places = {"cpu": contextlib.nullcontext()}
    if not why_not("emulated"):
        places["emulated"] = emulate("Ascend910B4")
    equal: dict[str, list[bool]] = {}
    for name, place in places.items():
        with place:
            one, other = CHANGES[change](operators()[title], of_all_rows(title, name))
        for result, values in one.items():
            equal.setdefault(result, []).append(torch.equal(values, other[result]))
    cells = {name: cell for name, cell in tables()[title][change].items() if cell != "-"}
    assert cells.keys() == equal.keys()
    kept = {name for name, each in equal.items() if all(each)}
    promised = {name for name, cell in cells.items() if cell == "yes"}
    assert promised <= kept if title == OF_A_LIBRARY else promised == kept
