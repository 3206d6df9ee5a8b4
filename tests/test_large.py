"""The program that tries operators on tensors of more than 2^31 elements, on small ones."""

import sys

import npu_rms_norm
import pytest
import torch

from tools.large import __main__ as large


@pytest.mark.parametrize("operator", large.OPERATORS)
@pytest.mark.slow
def test_it_finds_nothing_wrong_with_small_tensors(operator, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["large", "--device", "cpu", "--elements", str(2**16), "--only", operator])
    assert large.main() == 0
    assert "ok" in capsys.readouterr().out


def test_it_finds_a_wrong_row(capsys, monkeypatch):
    from tools.large import rows

    def off(x, *arguments, **options):
        y = npu_rms_norm.rms_norm(x, *arguments, **options)
        return torch.cat((y[:-1], y[-1:] * 1.05))

    monkeypatch.setattr(rows, "rms_norm", off)
    monkeypatch.setattr(sys, "argv", ["large", "--device", "cpu", "--elements", str(2**16), "--only", "rms_norm"])
    assert large.main() == 1
    assert "WRONG rms_norm" in capsys.readouterr().out
