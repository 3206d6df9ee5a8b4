"""What `python -m npu_tiling` says of trainers."""

import importlib.util
import re
from pathlib import Path

import pytest
from npu_tiling.installation import doctor, trainers

OURS = re.compile(r"\b(npu_\w+(?:\.\w+)+)")


@pytest.fixture
def installed(monkeypatch):
    """Makes exactly these versions installed."""
    monkeypatch.delenv("VERL_USE_EXTERNAL_PLUGINS", raising=False)

    def make(versions):
        monkeypatch.setattr(trainers, "version", versions.get)

    return make


def test_nothing_is_said_where_there_is_no_trainer(installed):
    installed({"npu-rms-norm": "0.1.0"})
    assert trainers.report() == []


def test_a_part_is_ours_with_its_hook(installed):
    installed({"veomni": "0.1.12", "npu-rms-norm": "0.1.0"})
    lines = trainers.report()
    assert "veomni 0.1.12" in lines
    norms = "ours with npu_rms_norm.integrations.veomni.register() (not: those of other backends than npu; gated norms)"
    assert f"    norms: {norms}" in lines
    assert "    loss, scores: not ours, npu-fused-linear-cross-entropy is not installed" in lines


def test_a_hook_that_needs_another_package_says_so(installed):
    installed({"transformers": "5.22.2", "npu-rms-norm": "0.1.0"})
    assert "    norms: not ours, kernels is not installed" in trainers.report()


@pytest.mark.parametrize("off", [False, True])
def test_a_plugin_that_loads_by_itself_can_be_off(installed, monkeypatch, off):
    installed({"verl": "0.9.1", trainers.LOSS: "0.1.0"})
    if off:
        monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    (scores,) = (line for line in trainers.report() if "scores" in line)
    assert scores.partition(": ")[2].startswith("not ours, VERL" if off else "ours by itself")


def test_another_release_is_named(installed):
    installed({"trl": "2.0.0"})
    assert "trl 2.0.0, tested with 1.16.0" in trainers.report()


def test_doctor_prints_it(installed, monkeypatch, capsys):
    installed({"trl": "1.16.0", trainers.LOSS: "0.1.0"})
    monkeypatch.setattr(doctor, "problems", lambda *arguments, **named: [])
    assert doctor.main() == 0
    assert "fused head: ours with npu_fused_linear_cross_entropy.integrations.trl.register()" in capsys.readouterr().out


@pytest.mark.parametrize("trainer", trainers.TRAINERS, ids=lambda trainer: trainer.distribution)
def test_every_hook_that_is_named_is_there(trainer):
    for part in trainer.parts:
        assert part.package in ("", trainers.NORMS, trainers.LOSS, trainers.EMBEDDING)
        for name in OURS.findall(part.how):
            module, _, last = name.rpartition(".")
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                pytest.skip(f"{module} is not installed")
            file = Path(importlib.util.find_spec(module).origin)
            assert (file.parent / f"{last}.py").exists() or re.search(rf"\b{last}\b", file.read_text())
