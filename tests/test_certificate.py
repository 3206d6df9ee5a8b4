"""`npu-offline model`: what is right is called right, and a planted mistake is wrong by the name of its layer or kernel."""

import json
import re
import sys

import pytest
from npu_offline import VERSIONS
from npu_offline.cli import main

from testing import forks

pytestmark = pytest.mark.compilers

PROGRAM = """
import sys

import npu_embedding
import npu_rms_norm
import torch
import triton
import triton.language as tl
from npu_rms_norm import ascend
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.norms = nn.ModuleList(nn.RMSNorm(64, eps=1e-6) for _ in range(3))
        self.between = nn.Linear(64, 64)

    def forward(self, ids):
        x = self.embed(ids)
        for norm in self.norms:
            x = x + self.between(norm(x))
        return x


class Steeper(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.0001 * gradient


@triton.jit
def inverse_rms(b_squares, eps, N):
    return tl.math.rsqrt(tl.sum(b_squares, 1) / (N + 1) + eps)


@triton.jit
def half(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, (tl.load(x + o).to(tl.uint32, bitcast=True) >> 1).to(tl.int32, bitcast=True))


torch.manual_seed(0)
model = Model().to("npu")
for package in (npu_rms_norm, npu_embedding):
    assert package.patch(model).replaced
if "eps" in sys.argv:

    class Wrong(type(model.norms[1])):
        def forward(self, x):
            self.eps = 1e-5
            y = super().forward(x)
            self.eps = 1e-6
            return y

    model.norms[1].__class__ = Wrong
if "gradient" in sys.argv:
    norm = type(model.norms[2])
    model.norms[2].__class__ = type("Steep", (norm,), {"forward": lambda self, x: norm.forward(self, Steeper.apply(x))})
if "table" in sys.argv:
    known = type(model.embed)
    model.embed.__class__ = type("Other", (known,), {"forward": lambda self, ids: known.forward(self, ids.flip(-1))})
if "formula" in sys.argv:
    ascend.inverse_rms = inverse_rms
if "compiler" in sys.argv:
    half[(1,)](torch.full((64,), -8, dtype=torch.int32), torch.empty(64, dtype=torch.int32), N=64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.arange(12, device="npu")).square().mean().backward()
    optimizer.step()
"""


def certificate(folder, *words):
    """The exit status, the JSON file, the page and the output: in a process of its own, as PyTorch keeps a device's name."""
    code = "import sys; from npu_offline.cli import main; sys.exit(main(sys.argv[1:]))"
    done = forks.run("-c", code, "model", "--output", folder / "out", *words)
    written = folder / "out" / "certificate.json"
    assert written.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(written.read_text()), (folder / "out" / "index.html").read_text(), done.stdout


@pytest.fixture
def judged(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return lambda *planted: certificate(tmp_path, "--toolchain", "1.2.0", "--", "python", str(program), *planted)


def wrong(rows, name):
    return {row[name] for row in rows if row["verdict"] == "wrong"}


@pytest.mark.slow
def test_a_right_step_is_right_and_each_kernel_has_its_digests(judged):
    status, found, page, said = judged()
    assert (wrong(found["layers"], "layer"), wrong(found["kernels"], "kernel"), status) == (set(), set(), 0), said
    assert {row["layer"]: row["calls"] for row in found["layers"]} == {"embed": 2, "norms.0": 2, "norms.1": 2, "norms.2": 2}
    assert all(row["verdict"] == "right" and row["kernels"] and 0 < row["share"] < 1 for row in found["layers"][1:])
    kernels = {row["kernel"]: row for row in found["kernels"]}
    assert kernels["forward_kernel"]["launches"] == 6 and kernels["forward_kernel"]["package"] == "npu_rms_norm"
    for row in kernels.values():
        assert all(re.fullmatch("[0-9a-f]{64}", row["hashes"][each]) for each in ("kernel", "module", "inputs")), row
        assert row["kernel"] in page and row["hashes"]["module"] in page
    assert not re.search(r'(src|href)="(?!#)', page), "nothing beside itself"


@pytest.mark.slow
def test_each_planted_mistake_is_wrong_by_its_name_and_nothing_else_is(judged):
    status, found, page, said = judged("eps", "gradient", "table", "compiler")
    assert wrong(found["layers"], "layer") == {"norms.1", "norms.2", "embed"}, "each layer's error is its own"
    (why,) = (row["why"] for row in found["layers"] if row["layer"] == "norms.2")
    assert len(why) == 1 and re.match(r"the gradient of its argument \[0\]: off by 0.0001 of its norm", why[0])
    assert wrong(found["kernels"], "kernel") == {"half"}
    assert re.search(r"^norms.1, 1.2.0: wrong: its result: off by \S+ of its norm, \S+ is allowed", said, re.M)
    assert re.search(r"^half, 1.2.0: wrong: (?:.*; )?the compiler of about CANN 9.1 \(1.2.0\) is wrong: ", said, re.M)
    assert "its result: off by" in page
    assert status == 1


@pytest.mark.nightly
def test_a_wrong_formula_is_right_as_a_kernel_and_wrong_as_a_layer(judged):
    before = {row["kernel"]: row["hashes"] for row in judged()[1]["kernels"]}
    _, found, _, _ = judged("formula")
    assert wrong(found["layers"], "layer") == {"norms.0", "norms.1", "norms.2"}
    assert wrong(found["kernels"], "kernel") == set(), "final modules compute what the text says"
    after = {row["kernel"]: row["hashes"] for row in found["kernels"]}
    differ = {kernel for kernel in before if before[kernel]["kernel"] != after[kernel]["kernel"]}
    assert differ == {"forward_kernel"} and before["forward_kernel"]["module"] != after["forward_kernel"]["module"]


OTHERS = ["qwen3", "gemma3", "qwen3-next", "mixtral", "t5", "inkling2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "versions"),
    [("llama", ["1.2.0"]), *(pytest.param(model, VERSIONS, marks=pytest.mark.nightly) for model in ["llama", *OTHERS])],
)
def test_every_kernel_and_layer_of_a_model_of_transformers_is_right(model, versions, tmp_path):
    pytest.importorskip("transformers", minversion="5.0")
    status, found, _, said = certificate(tmp_path, model, *(word for each in versions for word in ("--toolchain", each)))
    assert {row["verdict"] for each in ("kernels", "layers") for row in found[each]} == {"right"}, said
    assert {row["toolchain"] for row in found["layers"]} == set(versions)
    of_model = next(row for row in found["layers"] if row["layer"] == row["class"])
    assert {"cross_entropy_kernel", "cross_entropy_losses_kernel"} <= set(of_model["kernels"]), "the head"
    assert status == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such_model"], "'no_such_model' is neither a file nor a type of language models of transformers"),
        (["llama", "hidden_size"], "'hidden_size' is no size of a model, must be NAME=VALUE"),
        (["llama", "vocab_size=1000000"], "make one of {'vocab_size': 1000000} smaller, as in vocab_size=64"),
        (["no.py"], "no.py does not exist"),
        ([], "write: npu-offline model MODEL"),
        (["llama", "--soc", "Ascend950PR_9589"], "the emulation has none of its vector functions"),
    ],
)
def test_a_mistake_in_the_call_is_said(words, message, capsys, tmp_path):
    if "transformers" in message:
        pytest.importorskip("transformers", minversion="5.0")
    assert main(["model", "--output", str(tmp_path), "--toolchain", "1.2.0", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_transformers_the_error_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["model", "llama", "--output", str(tmp_path), "--toolchain", "1.2.0"]) == 2
    assert "'llama' is a model of transformers, which is not installed" in capsys.readouterr().err
