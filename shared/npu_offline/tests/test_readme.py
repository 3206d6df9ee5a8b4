"""Every Python block of the README runs as it stands, given the kernel and the operator that it speaks of."""

import re
from pathlib import Path

import npu_offline
import pytest
import torch

TRITON = pytest.importorskip("triton", reason="needs triton-ascend")
TL = pytest.importorskip("triton.language")
BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.S)
pytestmark = pytest.mark.skipif("1.2.0" not in npu_offline.installed(), reason="needs a toolchain (npu-offline fetch 1.2.0)")


@TRITON.jit
def double(x_ptr, y_ptr, n, BLOCK: TL.constexpr):
    o = TL.program_id(0) * BLOCK + TL.arange(0, BLOCK)
    TL.store(y_ptr + o, TL.load(x_ptr + o, mask=o < n) * 2, mask=o < n)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        double[(8,)](x.view(-1), y.view(-1), x.numel(), BLOCK=4096)
        return y

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


def test_there_are_examples():
    assert len(BLOCKS) >= 7


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block, capsys):
    x = torch.ones(4000)
    given = {"x": x, "y": (0 * x.clone().requires_grad_()).clone(), "dy": x, "n": 4000, "kernel": double}
    namespace = {**given, "emulate": npu_offline.emulate, "torch": torch, "my_operator": Doubled.apply}
    exec(compile(block, "README.md", "exec"), namespace)
    if "calls" in namespace:
        label, call = next(iter(namespace["calls"]()))
        with npu_offline.record("Ascend910B4") as launches:
            call()
        assert label == "width 1000"
        assert [launch.name for launch in launches] == ["double"]
    if "y.backward" in block:
        assert "written=16000" in capsys.readouterr().out
