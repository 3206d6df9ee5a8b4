"""Plans that are listed, and their explanation; no Triton and no memory is needed."""

import re
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import pytest
import torch
from npu_tiling import GPUS, SOCS, device_for, dry_run, soc, watch_launches
from npu_tiling.calls import Empty
from npu_tiling.command import Dtype, chosen_chip, gradients, leaf, main, nbytes
from npu_tiling.dispatch import OperatorLibrary
from npu_tiling.explaining import Explanation, explain, explained, repeated
from npu_tiling.launch import Kernels
from npu_tiling.operators import Operator
from npu_tiling.plans import Plan
from torch import Tensor

B4 = soc("Ascend910B4")
LIBRARY = OperatorLibrary("npu_tiling_test_explain")


@dataclass(frozen=True)
class Tiling:
    block: int
    way = "rows"
    why = "8 was measured to be faster"
    decided_at = "package_of_mine/tiling.py:7"
    ub_bytes = 4096
    options = {"multibuffer": True}

    @property
    def constants(self):
        return {"BLOCK_N": self.block, "N": 7, "EXACT": True}

    def smaller(self):
        return replace(self, block=self.block // 2) if self.block > 4 else None


def scale_kernel(p_x, p_y, factor, BLOCK_N: int, N: int, EXACT: int):
    """y = factor x."""


def other_kernel(p_x, p_y, factor, BLOCK_N: int, N: int, EXACT: int):
    pass


def last_kernel(p_partials, p_sum, n, BLOCK_N: int, N: int, EXACT: int):
    """Adds."""


class Call(NamedTuple):
    x: Tensor
    block: int
    adds: str

    def results(self):
        return {"y": Empty(self.x.shape, self.x.dtype)}


def plan(p: Plan, call: Call):
    """A kernel with a fallback, and one that adds its partial sums."""
    tile = p.decide("scale", Tiling(call.block))
    kernel = other_kernel if call.adds == "another kernel" and tile.block < call.block else scale_kernel
    y = p.new(call.results()["y"])
    p.launch(kernel, "scale", 5, reads={"p_x": call.x}, writes={"p_y": y}, sizes={"factor": 2.0})
    if call.adds == "kernel":
        p.decide("sum", Tiling(4))
        total = p.new(Empty((1,), torch.float32))
        p.launch(last_kernel, "sum", 1, reads={"p_partials": y}, writes={"p_sum": total}, sizes={"n": 1})
    elif call.adds == "sum":
        copied = p.torch(torch.Tensor.contiguous, y, makes=call.results()["y"])
        p.torch(torch.sum, copied, 0, makes=Empty((), torch.float32))
    elif call.adds == "maximum":
        p.torch(torch.amax, y, 0, makes=Empty((), torch.float32))
    elif call.adds == "PyTorch" and tile.block < call.block:
        p.steps.pop()
        p.torch(torch.mul, call.x, 2.0, makes=call.results()["y"])
    elif call.adds == "decision":
        p.decide("all of it", Tiling(64))
    return (y,)


OPERATOR = Operator(LIBRARY, "scale", Call, ["y"], plan=plan, reference=lambda call: (call.x * 2,))


def scale(x, block=8, adds="kernel"):
    return OPERATOR(Call(x, block, adds))


def test_a_dry_run_lists_plans_of_any_size():
    x = torch.empty(2**40, device="meta")
    with dry_run(B4) as calls:
        assert device_for(x.device) is B4
        assert scale(x).shape == x.shape
    (call,) = calls
    first, second = call.launches
    assert (first.full_module, first.kernel, first.grid) == (__name__, "scale_kernel", 5)
    assert first.slots[0].shape == (2**40,) and first.slots[0].dtype is torch.float32 and first.numbers == (2.0,)
    assert first.slots[1].base == second.slots[0].base != first.slots[0].base
    assert first.decision.constants["BLOCK_N"] == 8 and call.direction == "forward"
    assert "test_explain.py:" in first.origin.place and first.origin.function == "plan"
    assert device_for(torch.device("cpu")) is None


def test_watched_launches_are_made(monkeypatch):
    made = []
    monkeypatch.setattr(Kernels, "launch", lambda self, module, kernel, decision, grid, *_: made.append((kernel, grid)))
    x = torch.empty(1)
    with dry_run(B4) as calls:
        scale(x)
    assert made == []
    with watch_launches() as calls:
        assert scale(x) == 2 * x  # no chip, and so no plan
    assert calls == []
    monkeypatch.setattr("npu_tiling.operators.device_for", lambda device: B4)
    with watch_launches() as calls:
        scale(x)
    assert made == [(launch.kernel, launch.grid) for call in calls for launch in call.launches] and len(made) == 2
    scale(x)
    assert len(made) == 4 and len(calls) == 1


def test_a_launch_is_explained():
    with dry_run(B4) as calls:
        scale(torch.empty(1, device="meta"))
    first, second = explained(calls)
    lines = [scale_kernel.__code__.co_firstlineno, last_kernel.__code__.co_firstlineno]
    assert [int(each.defined_at.partition("test_explain.py:")[2]) for each in (first, second)] == lines
    assert first.summary == "y = factor x." and second.summary == "Adds."
    assert first.blocks == {"BLOCK_N": 8} and first.flags == {"N": 7, "EXACT": True}
    assert first.partials_added_by == "last_kernel" and second.partials_added_by == ""
    assert first.memory == 4096 and first.way == "rows" and first.why == "8 was measured to be faster"
    assert first.decided_at == "package_of_mine/tiling.py:7"


@pytest.mark.parametrize(
    ("block", "adds", "said"),
    [
        (8, "kernel", [["itself with BLOCK_N=4"], []]),
        (4, "kernel", [[], []]),
        (8, "another kernel", [["other_kernel with BLOCK_N=4"]]),
        (8, "PyTorch", [["PyTorch's operators"]]),
    ],
)
def test_a_fallback_is_what_runs_where_the_tile_does_not_fit(block, adds, said):
    x = torch.empty(3, device="meta")
    found = explain("call", lambda: {"forward": scale(x, block, adds).numel()}, B4)
    found_by = [[str(each) for each in launch.fallback] for launch in found.launches]
    assert [[re.sub(r" \(.*test_explain.py:\d+\)", "", each) for each in launch] for launch in found_by] == said
    with dry_run(B4) as calls:  # nothing of it is remembered
        scale(x, block, adds)
    assert calls[0].launches[0].decision.constants["BLOCK_N"] == block


@pytest.mark.parametrize(("adds", "by"), [("sum", "PyTorch's sum"), ("maximum", "")])
def test_pytorchs_sum_of_what_a_launch_wrote_adds_its_partial_sums(adds, by):
    x = torch.empty(4, device="meta")
    (found,) = explain("call", lambda: {"forward": scale(x, 4, adds).numel()}, B4).launches
    assert found.partials_added_by.partition(" (")[0] == by


def test_functions_of_pytorch_are_explained_in_order():
    x = torch.empty(8, device="meta")

    def run():
        for _ in range(2):
            scale(x, 4, "sum")
        return {"forward": 0}

    found = explain("call", run, B4)
    assert [(call.name, call.sizes) for call in found.calls[:2]] == [("copy", "fp32 [8]"), ("sum", "fp32 [8] -> fp32 []")]
    assert "forward: 2 launches and 4 operators by PyTorch" in found.text
    assert "order          2 times (1, 2)" in found.text and "2. PyTorch's operators, 2 times" in found.text


def test_memory_that_is_no_longer_used_is_not_counted():
    """y, its copy and the sum are alive at a time."""
    x = torch.empty(8, device="meta")
    assert explain("call", lambda: {"forward": scale(x, 4, "sum").numel()}, B4).peak == 2 * 32 + 4


def test_a_decision_about_several_launches_is_described():
    x = torch.empty(8, device="meta")
    found = explain(
        "call", lambda: {"forward": scale(x, 4, "decision").numel()}, B4, describe=lambda tiling: {"all": str(tiling.block)}
    )
    assert found.decisions == [("forward", {"all": "64"})] and "all            64" in found.text


def command(
    *, tokens: int, chip: str | None = None, backward: bool = False, kind: Literal["a", "b"] = "a", factor: float = 2.0
) -> Explanation:
    """Explains a call.

    Args:
        tokens: rows.
        kind: of the call,
            in two lines.
    """
    x = leaf(tokens, 4, dtype="bf16", gradient=backward)

    def run():
        y = x * factor
        return {"forward": nbytes((x, y)), **({"backward": nbytes(gradients((y,), (x,)))} if backward else {})}

    return explain(f"{kind} of {tokens}", run, chosen_chip(chip))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("1 2 3 4 3 4 3 4 5 5 6", "1; 2; 3 times (3, 4); 2 times (5); 6"),
        ("1 2 3 1 2 3", "2 times (1, 2, 3)"),
        ("", ""),
        ("1 2", "1; 2"),
    ],
)
def test_what_repeats_is_said_once(names, said):
    assert repeated(names.split()) == said


def test_a_command_line_has_the_options_of_its_function(capsys):
    given = ["explain", "--rows", "3", "--chip", "H200", "--backward", "--kind", "b"]
    assert main("mine", command, [*given, "--all"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("b of 3 on H200 (sm_90, 132 streaming multiprocessors)\n")
    assert "forward: 0 launches; at least 48 bytes" in said
    assert "backward: 0 launches; at least 24 bytes" in said and " us at" not in said
    assert main("mine", command, given) == 0
    facts = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith(" ")]
    longer = ["time", "that of the launches, which take longer than the bytes"]
    none = ["runs", "0 launches"]
    assert facts == [none, ["bytes", "at least 48"], longer, none, ["bytes", "at least 24"], longer]
    with pytest.raises(SystemExit):
        main("mine", command, ["explain", "--chips"])
    said = capsys.readouterr().out.replace(",", "").split()
    assert {*SOCS, *GPUS} <= {*said}
    with pytest.raises(SystemExit):
        main("mine", command, ["explain", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "of the call, in two lines (default: a)" in said and "--tokens N, --rows N" in said and "--factor NUMBER" in said
    assert main("mine", command, ["explain", "--indices", "3", "--chip", "H200"], tokens="indices") == 0


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_a_command_line_takes_torchs_names_of_dtypes_too(capsys, name):
    def command(*, dtype: Dtype = "bf16") -> Explanation:
        """Explains a tensor."""
        x = leaf(3, dtype=dtype)
        assert x.dtype is getattr(torch, name)
        return explain("tensor", lambda: {"forward": nbytes((x,))}, GPUS["H200"])

    assert main("mine", command, ["explain", "--dtype", name]) == 0
    assert "tensor on H200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["--tokens", "3", "--chip", "Ascend1"], "chip 'Ascend1' is neither in npu_tiling.SOCS"),
        (["--chip", "H200"], "required: --tokens"),
        (["--tokens", "3", "--kind", "c"], "invalid choice: 'c'"),
    ],
)
def test_what_cannot_be_explained_is_refused_in_words(capsys, given, error):
    with pytest.raises(SystemExit) as raised:
        main("mine", command, ["explain", *given])
    assert raised.value.code == 2 and error in capsys.readouterr().err


@pytest.mark.parametrize("chip", [B4, GPUS["H200"]])
def test_four_lines_come_first(chip):
    x = torch.empty(8, device="meta")
    found = explain("call", lambda: {"forward": 10**9 + scale(x).numel()}, chip)
    facts = [line.split(maxsplit=1) for line in found.brief.splitlines()[3:]]
    assert found.brief.splitlines()[1:3] == ["", "forward:"]
    assert facts == [
        ["way", "rows: 8 was measured to be faster"],
        ["runs", "2 launches: scale_kernel, last_kernel"],
        ["bytes", "at least 1,000,000,008"],
        ["time", f"at least {(10**9 + 8) / chip.bandwidth * 1e6:,.1f} us, for the bytes"],
    ]
    products = replace(found, flops={"forward": 10**15})
    assert products.brief.endswith(f"at least {1e15 / chip.matrix_flops * 1e6:,.1f} us, for the matrix products")
    said = {"way": "ALL: at once", "sums": "in fp32", "chunks": "one", "why these": "it fits"}
    decided = replace(found, decisions=[("forward", said)]).brief
    assert "    way            ALL: at once\n    chunks         one\n    why these      it fits\n    runs " in decided
    without_way = replace(found, steps=[replace(each, way="") for each in found.steps]).brief
    assert "    why            8 was measured to be faster\n" in without_way and "    way " not in without_way


def test_a_launch_without_a_smaller_tile_has_no_line_of_what_it_falls_back_to():
    x = torch.empty(8, device="meta")
    text = explain("call", lambda: {"forward": scale(x).numel()}, B4).text
    first, second = text.partition("2. last_kernel")[::2]
    assert "falls back to  " in first and "falls back to" not in second


def test_a_long_name_does_not_run_into_what_it_is():
    found = explain("call", lambda: {"forward": 1}, B4)
    assert "    TEACHER_SOFTCAP capped" in replace(found, decisions=[("forward", {"TEACHER_SOFTCAP": "capped"})]).text


def test_gpus_are_known_by_name():
    assert {chip.arch for chip in GPUS.values()} == {"sm_80", "sm_90", "sm_100"}
    assert all(chip.name == name and chip.kind == "cuda" and chip.bandwidth for name, chip in GPUS.items())
    assert chosen_chip("A100").ub_bytes == 166912
