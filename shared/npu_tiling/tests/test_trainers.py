"""What `python -m npu_tiling` says of trainers."""

import importlib.util
import os
import re
from pathlib import Path

import pytest
from npu_tiling import doctor
from npu_tiling import doctor as trainers

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


@pytest.mark.parametrize("kernels", ["0.17.2", None])
def test_norms_of_transformers_are_ours_without_the_kernels_that_it_takes(installed, monkeypatch, tmp_path, kernels):
    """`patch` needs none, and `use_kernels` says which it takes, in the words of the error that it raises."""
    installed({"transformers": "5.24.0", "kernels": kernels, "npu-rms-norm": "0.1.0"})
    utils = tmp_path / "transformers" / "utils"
    utils.mkdir(parents=True)
    (utils.parent / "__init__.py").touch()
    (utils / "__init__.py").touch()
    taken = 'KERNELS_MIN_VERSION, KERNELS_MAX_VERSION = "0.18.2", "0.19.0"\ndef is_kernels_available(): return {}\n'
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (utils / "import_utils.py").write_text(taken.format(False))
    lines = trainers.report()
    assert "    norms: ours with npu_rms_norm.patch(model) (not: norms that are not known: patch says which)" in lines
    (marked,) = (line for line in lines if "norms that it marks" in line)
    assert re.search(
        r"not ours, transformers \S+ takes kernels>=0.18.2,<0.19.0, and \S+ is installed: .*patch\(model\)", marked
    )
    (utils / "import_utils.py").write_text(taken.format(True))
    assert "    norms that it marks: ours with npu_rms_norm.use_kernels() and use_kernels=True" in trainers.report()
    (utils / "import_utils.py").write_text("raise RuntimeError('no CANN')")
    assert "    norms that it marks: not ours, RuntimeError: no CANN" in trainers.report()


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
