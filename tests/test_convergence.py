"""Training with our operators stays as close to plain PyTorch as another order of the same data, and a fault does not.

Short runs of a tiny model; `hatch run convergence` makes long ones, of the demo's model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from npu_offline.plugin import why_not
from torch import Tensor, nn

from tools.convergence import runs
from tools.convergence.__main__ import main
from tools.convergence.band import band, leaves
from tools.convergence.runs import EVERY, PRECISIONS, Curve, held_out, train, windows
from tools.demo.blocks import OURS, PLAIN, Blocks
from tools.demo.model import Config
from tools.demo.places import find_place
from tools.demo.training import Setup

CONFIG = Config(layers=2, hidden_size=32, heads=2, mlp_size=64)  # as in test_demo.py: the same kernels are compiled
SETUP = Setup(CONFIG, steps=40, batch=4, context=32, warm_up=10)
CPU = torch.device("cpu")
LICENSE = Path(__file__).parents[1] / "LICENSE"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operations this small lose by sharing the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(blocks: Blocks, precision: str = "fp32", setup: Setup = SETUP, **options: Any) -> Curve:
    return Curve(blocks.name, *train(setup, blocks, CPU, precision, **options))


@pytest.fixture(autouse=True, scope="module")
def text() -> Iterator[Tensor]:
    """The same text whichever Python this is: releases differ in the text of `help()`, and so in what leaves the band."""
    corpus = torch.frombuffer(bytearray(LICENSE.read_bytes()), dtype=torch.uint8)
    with mock.patch.object(runs, "text", lambda: corpus):
        yield corpus


@pytest.fixture(scope="module")
def plain(text: Tensor) -> Callable[[str], tuple[Curve, list[float]]]:
    """The run in plain PyTorch, and the band around it, of each precision."""
    found = {}

    def of(precision: str) -> tuple[Curve, list[float]]:
        if precision not in found:
            curve = run(PLAIN, precision)
            found[precision] = curve, band(curve, run(PLAIN, precision, order=1))
        return found[precision]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_our_operators_stay_within_the_band(plain, precision):
    curve, allowed = plain(precision)
    assert leaves(run(OURS, precision), curve, allowed) is None
    assert curve.held_out[-1] < curve.held_out[0] - 0.5


@pytest.mark.slow
def test_compiled_training_stays_within_the_band(plain):
    curve, allowed = plain("autocast")
    assert leaves(run(OURS, "autocast", backend="aot_eager"), curve, allowed) is None


@pytest.mark.compilers
@pytest.mark.skipif(why_not("emulated") is not None, reason=str(why_not("emulated")))
def test_emulated_kernels_stay_within_the_band():
    short = dataclasses.replace(SETUP, steps=20)
    curve = run(PLAIN, setup=short)
    allowed = band(curve, run(PLAIN, setup=short, order=1))
    with find_place("emulated", None).open() as emulation:
        ours = run(OURS, setup=short)
        assert emulation is not None
        kernels = {"forward_kernel", "gather_rows_kernel", "attn_res_merge_kernel", "cross_entropy_kernel"}
        assert kernels <= {launch.kernel for launch in emulation.launches}
    assert leaves(ours, curve, allowed) is None


class _Scaled(torch.autograd.Function):
    """The identity, with a gradient of another size."""

    @staticmethod
    def forward(ctx, x, factor):  # type: ignore[no-untyped-def]
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return ctx.factor * dy, None


def broken_norm(hidden_size: int) -> nn.Module:
    norm = OURS.norm(hidden_size)
    norm.register_forward_pre_hook(lambda _, inputs: (_Scaled.apply(inputs[0], 1.05),))
    return norm


def broken_embedding(rows: int, hidden_size: int) -> nn.Embedding:
    embedding = OURS.embedding(rows, hidden_size)
    embedding.register_forward_hook(lambda _, __, out: _Scaled.apply(out, 0.5))
    return embedding


def broken_depth(hidden_size: int, n_inputs: int, block_size: int) -> nn.Module:
    depth = OURS.depth(hidden_size, n_inputs, block_size)
    start = depth.start
    depth.start = lambda embedding: _BrokenDepth(start(embedding))  # type: ignore[assignment]
    return depth


class _BrokenDepth:
    """Block AttnRes with a gradient 20 % too large."""

    def __init__(self, depth: Any) -> None:
        self.add, self._depth = depth.add, depth

    def input(self) -> Tensor:
        return _Scaled.apply(self._depth.input(), 1.2)  # type: ignore[no-any-return]


FAULTS = {
    "gradient of a norm 5 % too large": {"norm": broken_norm},
    "gradient of an embedding half as large": {"embedding": broken_embedding},
    "gradient of attn_res 20 % too large": {"depth": broken_depth},
    "gradient of the loss in x 20 % too large": {"loss": lambda x, *others: OURS.loss(_Scaled.apply(x, 1.2), *others)},
    "loss not a number": {"loss": lambda x, head, target: OURS.loss(x, head, target) * float("nan")},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_operator_leaves_the_band(plain, fault):
    curve, allowed = plain("fp32")
    assert leaves(run(dataclasses.replace(OURS, name=fault, **FAULTS[fault])), curve, allowed) is not None


def test_band_is_the_largest_difference_so_far_and_every_later_step_must_stay_in_it():
    plain, other = Curve("plain", held_out=[5.0, 4.0, 3.0, 2.0]), Curve("other", held_out=[5.1, 3.7, 3.0, 2.2])
    allowed = band(plain, other)
    assert allowed == pytest.approx([0.1, 0.3, 0.3, 0.3])
    assert leaves(other, plain, allowed) is None
    assert leaves(Curve("ours", held_out=[5.0, 4.2, 3.4, 2.0]), plain, allowed) == 3 * EVERY
    assert leaves(Curve("ours", held_out=[5.0, float("nan"), 3.0, 2.0]), plain, allowed) == 2 * EVERY


def test_nothing_is_trained_on_that_is_measured(text):
    corpus = bytes(text.tolist())
    trained = max(corpus.find(bytes(window.tolist())) for window in windows(SETUP, order=3).flatten(0, 1))
    measured = min(corpus.rfind(bytes(window.tolist())) for window in held_out(SETUP))
    assert trained + SETUP.context < measured


@pytest.mark.slow
def test_command_saves_curves_and_fails_where_one_leaves_the_band(tmp_path, capsys):
    plot, data = tmp_path / "plots" / "curves.png", tmp_path / "curves.json"
    arguments = ["--device", "cpu", "--steps", "20", "--precision", "fp32", "--no-compile"]
    assert main([*arguments, "--plot", str(plot), "--json", str(data)], SETUP) == 0
    assert "within the band" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(data.read_text())
    assert [len(curve["training"]) for curve in written["curves"]["fp32"]] == [20] * 3
    assert written["setup"]["batch"] == SETUP.batch
    broken = dataclasses.replace(OURS, depth=broken_depth)
    assert main(arguments, SETUP, broken) == 1
    assert "Outside the band: fp32: our operators from step" in " ".join(capsys.readouterr().out.split())


def test_too_few_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--steps", str(EVERY - 1)])
    assert f"must be a whole number of at least {EVERY}" in capsys.readouterr().err
