"""Launches that are listed in place of being made, and their explanation; what the device code imports is not there."""

import functools
import sys
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from npu_tiling import GPUS, Kernels, LaunchSpec, device_for, dry_run, launch_with_fallback, soc, watch_launches
from npu_tiling.explaining.command import main
from npu_tiling.explaining.explanation import Explanation, explain
from npu_tiling.explaining.inputs import Dtype, chosen_chip, gradients, leaf, nbytes
from npu_tiling.explaining.launches import explained
from npu_tiling.explaining.order import repeated

B4 = soc("Ascend910B4")
SOURCE = "import no_such_triton\n\n\ndef scale_kernel(p_x):\n    pass\n\n\ndef last_kernel(p_partials):\n    '''Adds.'''\n"


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


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    folder = tmp_path / "package_of_mine"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "device_code.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield Kernels("package_of_mine", "mine")
    sys.modules.pop("package_of_mine", None)


def halve(tiling):
    return replace(tiling, block=tiling.block // 2) if tiling.block > 4 else None


@functools.cache
def spec_of(block):
    return LaunchSpec.of(Tiling(block), {})


def launch(kernels, x, block=8):
    """A kernel with a fallback, and one that adds its partial sums."""
    partials = torch.empty(3, device=x.device)

    def run(spec):
        kernels.launch("device_code", "scale_kernel", spec, 5, (x, partials), (2.0,))

    launch_with_fallback("scale", spec_of(block), run, halve)
    kernels.launch("device_code", "last_kernel", LaunchSpec.of(Tiling(4), {}), 1, (partials,), ())


def test_a_dry_run_lists_launches_and_imports_no_device_code(kernels):
    x = torch.empty(2**40, device="meta")
    with dry_run(B4) as launches:
        assert device_for(x.device) is B4
        launch(kernels, x)
    first, second = launches
    assert (first.module, first.kernel, first.grid) == ("package_of_mine.device_code", "scale_kernel", 5)
    assert first.arguments[0].shape == (2**40,) and first.arguments[0].dtype == "float32" and first.arguments[2] == 2.0
    assert first.arguments[1].memory == second.arguments[0].memory != first.arguments[0].memory
    assert first.constants["BLOCK_N"] == 8 and first.attempt == ("scale", spec_of(8)) and second.attempt is None
    assert "test_explaining.py:" in first.called_from and first.caller == "launch"
    assert "package_of_mine.device_code" not in sys.modules
    assert device_for(torch.device("cpu")) is None


def test_watched_launches_are_made(kernels, monkeypatch):
    made = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **named: made.append((grid, len(arguments), named["BLOCK_N"]))

    monkeypatch.setattr(Kernels, "_import", lambda *_: Kernel())
    monkeypatch.setattr("npu_tiling.launching.kernels.Launcher", JitLauncher)
    with watch_launches() as launches:
        launch(kernels, torch.empty(1))
    assert made == [((5,), 3, 8), ((1,), 1, 4)] and len(launches) == 2
    launch(kernels, torch.empty(1))
    assert len(made) == 4 and len(launches) == 2


class JitLauncher:
    def __init__(self, kernel):
        self._kernel = kernel

    def __call__(self, grid, tensors, scalars, constants, options, key):
        self._kernel[(grid,)](*tensors, *scalars, **constants, **options)


def test_a_launch_is_explained(kernels):
    with dry_run(B4) as launches:
        launch(kernels, torch.empty(1, device="meta"))
    first, second = explained(launches)
    assert first.defined_at == "package_of_mine/device_code.py:4" and second.defined_at.endswith(":8")
    assert first.summary == "" and second.summary == "Adds."
    assert first.blocks == {"BLOCK_N": 8} and first.flags == {"N": 7, "EXACT": True}
    assert first.partials_added_by == "last_kernel" and second.partials_added_by == ""
    assert first.memory == 4096 and first.way == "rows" and first.why == "8 was measured to be faster"
    assert first.decided_at == "package_of_mine/tiling.py:7"


def fallbacks(run):
    """What an explanation says of each launch's fallback."""
    found = explain("call", lambda: run() or {"forward": 0}, B4)
    return [[str(each) for each in launch.fallback] for launch in found.launches]


def test_a_fallback_is_what_runs_where_the_tile_does_not_fit(kernels):
    x = torch.empty(3, device="meta")
    assert fallbacks(lambda: launch(kernels, x)) == [["itself with BLOCK_N=4"], []]
    assert fallbacks(lambda: launch(kernels, x, block=4)) == [[], []]

    def run(spec):
        if spec.launch.block == 8:
            kernels.launch("device_code", "scale_kernel", spec, 5, (x,), ())
        return spec.launch.block == 8

    def by_another_kernel():
        if not launch_with_fallback("scale", spec_of(8), run, halve):
            kernels.launch("device_code", "last_kernel", spec_of(16), 1, (x,), ())
        kernels.launch("device_code", "last_kernel", spec_of(4), 1, (x,), ())

    def by_pytorch():
        if not launch_with_fallback("scale", spec_of(8), run, halve):
            x.mul(2)

    assert fallbacks(by_another_kernel)[0] == ["last_kernel (package_of_mine/device_code.py:8) with BLOCK_N=16"]
    assert fallbacks(by_pytorch) == [["PyTorch's operators"]]
    with dry_run(B4) as launches:  # nothing of it is remembered
        launch(kernels, x)
    assert launches[0].constants["BLOCK_N"] == 8


@pytest.mark.parametrize(
    ("add", "by"),
    [
        (lambda partials: partials.sum(0), "PyTorch's sum"),
        (lambda partials: partials.movedim(0, -1).contiguous().sum(-1), "PyTorch's sum"),
        (lambda partials: partials.amax(0), ""),
        (lambda partials: (partials.sum(0), partials @ partials), ""),
    ],
)
def test_pytorchs_sum_of_what_a_launch_wrote_adds_its_partial_sums(kernels, add, by):
    def run():
        partials = torch.empty(4, 4, device="meta")
        kernels.launch("device_code", "scale_kernel", spec_of(4), 1, (partials,), ())
        add(partials)
        return {"forward": 0}

    (found,) = explain("call", run, B4).launches
    assert found.partials_added_by.partition(" (")[0] == by


def test_pytorchs_operators_are_explained_in_order(kernels):
    """Those that compute something: no view, and no memory that is only asked for."""
    x = torch.empty(8, 4, device="meta")

    def run():
        for _ in range(2):
            kernels.launch("device_code", "scale_kernel", spec_of(4), 1, (x,), ())
            torch.empty_like(x).zero_()
            torch.sort(x.t()[0].double(), stable=True)
        return {"forward": 0}

    found = explain("call", run, B4)
    assert [(call.name, call.after, call.sizes) for call in found.calls[:3]] == [
        ("zeros", 1, "fp32 [8, 4]"),
        ("copy", 1, "fp32 [8] -> float64 [8]"),
        ("sort", 1, "float64 [8] -> float64 [8], int64 [8]"),
    ]
    assert "forward: 2 launches and 6 operators by PyTorch" in found.text
    assert "order          2 times (1, 2)" in found.text and "2. PyTorch's operators, 2 times" in found.text


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


def test_products_and_memory_of_pytorch_are_explained():
    """Two products of which the second adds, in 6 + 3 numbers that are alive at a time, of a result and a temporary."""
    a, b = torch.empty(2, 5, device="meta"), torch.empty(5, 3, device="meta")

    def run():
        result = torch.mm(a, b)
        result.view(-1)[:3].add_(torch.empty(3, device="meta"))
        torch.addmm(result, a, b, out=result)
        return {"forward": 4}

    found = explain("call", run, GPUS["H200"], flops={"forward": 2**40})
    assert [(each.left, each.right, each.adds, each.flops) for each in found.products] == [
        ((2, 5), (5, 3), False, 60),
        ((2, 5), (5, 3), True, 60),
    ]
    assert found.peak == 36 and found.floor("forward") == 2**40 / 989e12
    assert "0 launches, 2 matrix products and 1 other operator by PyTorch; at least 4 bytes" in found.text
    assert "results and gradients: at most 36 bytes" in found.text and "fp32 [2, 5] @ [5, 3]" in found.text


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
    assert main("mine", command, ["explain", "--rows", "3", "--chip", "H200", "--backward", "--kind", "b"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("b of 3 on H200 (sm_90, 132 streaming multiprocessors)\n")
    assert "forward: 0 launches and 1 operator by PyTorch; at least 48 bytes" in said
    assert "backward: 0 launches and 1 operator by PyTorch; at least 24 bytes" in said
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


def test_gpus_are_known_by_name():
    assert {chip.arch for chip in GPUS.values()} == {"sm_80", "sm_90", "sm_100"}
    assert all(chip.name == name and chip.kind == "cuda" and chip.bandwidth for name, chip in GPUS.items())
    assert chosen_chip("A100").ub_bytes == 166912
