"""The demo: a language model trained with our operators follows the one in plain PyTorch, and would notice if not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import npu_rms_norm
import pytest
import torch
from torch import Tensor

from tools.demo import picture
from tools.demo.__main__ import main
from tools.demo.blocks import OURS, PLAIN, Blocks
from tools.demo.model import Config
from tools.demo.places import PlaceError, find_place
from tools.demo.training import Setup, batches, build, loss_of, train

TINY = Setup(Config(layers=2, hidden_size=32, heads=2, mlp_size=64), steps=6, batch=2, context=16, warm_up=2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operations this small lose by sharing the work, most of all where other programs want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def emulation() -> None:
    """Skips where Ascend kernels cannot be emulated."""
    try:
        find_place("emulated", None)
    except PlaceError as error:
        pytest.skip(str(error))


@pytest.fixture
def demo(tmp_path: Path) -> Callable[..., int]:
    """Runs the tiny demo, with its picture in `tmp_path`."""

    def run(*arguments: str, ours: Blocks = OURS) -> int:
        return main([*arguments, "--output", str(tmp_path / "curves" / "loss.png")], TINY, ours)

    return run


def test_the_curves_in_text_fall_and_show_where_they_part() -> None:
    ours, plain = [3.0, 2.0, 1.0], [3.0, 2.0, 2.0]
    first, middle, last, *_ = picture.in_text(ours, plain, width=3, height=3).splitlines()
    assert (first, middle, last) == ("  3.00 |o", "  2.00 | o.", "  1.00 |  o")
    assert "nan" not in picture.in_text([1.0, float("nan")], [1.0, 1.0])


class _WrongGradient(torch.autograd.Function):
    """The identity, with a gradient 1 % too large."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return 1.01 * dy


class _Broken(npu_rms_norm.RMSNorm):
    """A norm that changes its input's gradient, or its output."""

    def __init__(self, hidden_size: int, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__(hidden_size)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.fault(x))


@pytest.mark.compilers
@pytest.mark.usefixtures("emulation")
def test_emulated_training_follows_plain_pytorch_and_reports_every_kernel(demo, capsys, tmp_path):
    assert demo("--device", "emulated") == 0
    said = capsys.readouterr().out
    assert "The curves agree" in said
    for kernel in ("forward", "gather_rows", "sum_rows", "attn_res_forward", "merge", "cross_entropy"):
        assert kernel in said
    assert "of 192" in said
    assert "not known" not in said
    assert (tmp_path / "curves" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.compilers
@pytest.mark.usefixtures("emulation")
def test_kernel_that_does_not_fit_the_chip_is_an_error(demo, capsys, monkeypatch):
    import npu_offline

    def too_large(record: object, *, soc: str, toolchain: str) -> npu_offline.Report:
        usage = npu_offline.Usage(0, 192 * 1024)
        return npu_offline.Report("kernel", soc, toolchain, False, usage, usage, usage, usage, usage, 200 * 1024)

    monkeypatch.setattr(npu_offline, "compile_kernel", too_large)
    assert demo("--device", "emulated", "--steps", "1") == 1
    assert "The tile does not fit Ascend910B4" in capsys.readouterr().out


@pytest.mark.compilers
@pytest.mark.usefixtures("emulation")
def test_kernels_counted_in_a_run_are_those_that_were_compiled():
    import npu_offline

    from tools.demo.kernels import Kernels

    kernels = Kernels(TINY, "Ascend910B4")
    with npu_offline.emulate("Ascend910B4") as emulation:
        train(TINY, OURS, CPU, lambda step, loss: kernels.count(emulation.launches))
    assert list(kernels)
    for use in kernels:
        assert use.launches == use.per_step * TINY.steps
        assert use.report is not None
        assert use.report.fits


def test_model_with_our_operators_on_cpu_equals_plain_pytorch():
    results = []
    for blocks in (OURS, PLAIN):
        model = build(TINY, blocks, CPU)
        loss = loss_of(model, batches(TINY)[0])
        loss.backward()
        results.append((loss, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (loss, gradients), (plain_loss, plain_gradients) = results
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    assert gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}"
        )


def test_training_lowers_the_loss():
    losses = train(TINY, PLAIN, CPU, lambda step, loss: None)
    assert len(losses) == TINY.steps
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "fault",
    [_WrongGradient.apply, lambda x: x.bfloat16().float(), lambda x: x * float("nan")],
    ids=["wrong gradient", "rounded input", "not a number"],
)
def test_broken_norm_is_detected(demo, capsys, fault):
    broken = dataclasses.replace(OURS, name="broken", norm=lambda hidden_size: _Broken(hidden_size, fault))
    assert demo("--device", "cpu", ours=broken) == 1
    assert "do not agree" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--steps", "--seed"])
def test_steps_and_seed_change_the_run(demo, capsys, option):
    assert demo("--device", "cpu", option, "3") == 0
    said = capsys.readouterr().out
    assert {"--steps": "3 steps", "--seed": "seed 3"}[option] in said


def test_soc_is_refused_where_there_is_no_ascend_chip(demo, capsys):
    assert demo("--device", "cpu", "--soc", "Ascend910B4") == 2
    assert "--soc is Ascend910B4" in capsys.readouterr().err


@pytest.mark.compilers
@pytest.mark.usefixtures("emulation")
def test_unknown_soc_is_refused(demo, capsys):
    assert demo("--device", "emulated", "--soc", "Ascend1") == 2
    assert "--soc is Ascend1 and must be one of" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_that_is_not_there_is_refused(demo, capsys):
    assert demo("--device", "cuda") == 2
    assert "torch.cuda finds no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--steps", "0"), ("--seed", "-1"), ("--device", "tpu")])
def test_bad_option_is_refused(demo, arguments):
    with pytest.raises(SystemExit, match="2"):
        demo(*arguments)


def test_picture_format_that_cannot_be_written_is_refused_before_training():
    with pytest.raises(SystemExit, match="2"):
        main(["--output", "loss.doc"], TINY)
