"""What `python -m npu_offline.cann` asks of an environment before it starts a command."""

import npu_offline.cann.__main__ as command
import pytest
from npu_offline.cann import environment
from npu_tiling import doctor

HERE = {"torch": "2.13.0", "torch_npu": "2.13.0.post1"}


@pytest.mark.parametrize(
    ("torch", "cuda", "said"),
    [
        ("2.13.0", True, "torch 2.13.0 is a build with CUDA, into which torch_npu does not load. Cure: pip install --f"),
        ("2.11.0+cpu", False, "torch_npu 2.13.0.post1 is for another torch than 2.11.0+cpu. Cure: pip install torch=="),
    ],
)
def test_a_torch_that_torch_npu_does_not_load_into_is_refused_with_the_cure(monkeypatch, capsys, torch, cuda, said):
    def start(*_):
        raise AssertionError("started")

    monkeypatch.setattr(doctor, "version", {**HERE, "torch": torch}.get)
    monkeypatch.setattr(doctor, "is_cuda_build", lambda: cuda)
    monkeypatch.setattr(environment, "build", start)
    monkeypatch.setattr(command.os, "spawnvpe", start)
    monkeypatch.setattr(command.sys, "argv", ["cann", "python", "train.py"])
    assert command.main() == 2
    assert capsys.readouterr().err.startswith(f"npu-offline: {said}")
