"""Verdicts on calls that `npu-offline check` keeps: used again where nothing has changed, and never otherwise."""

import re
import sys
import sysconfig

import npu_tiling
import pytest
from npu_offline.check import execution, load_calls, verdicts
from npu_offline.cli import main
from npu_offline.execute import native

CALLS = """
import sys

import torch
import triton
import triton.language as tl

sys.path.insert(0, FOLDER)
import own_operator

N_ROWS, FACTOR, GRID, WIDTH = 5, 3.0, 2, 128


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, factor, BN: tl.constexpr):
    for i in tl.range(tl.program_id(0), n, tl.num_programs(0)):
        o = i * BN + tl.arange(0, BN)
        tl.store(y_ptr + o, tl.load(x_ptr + o) * factor)


def launch():
    x = own_operator.input_of(N_ROWS, WIDTH)
    scale_kernel[(GRID,)](x, torch.empty_like(x), N_ROWS, FACTOR, BN=WIDTH)


def calls():
    yield "one", launch
"""
OPERATOR = "import torch\n\n\ndef input_of(rows, width):\n    return torch.empty(rows, width) + 1.0\n"


@pytest.fixture
def runtime():
    return native.runtime_path().parent


@pytest.fixture
def package(tmp_path, runtime, empty_cache, monkeypatch):
    (empty_cache / "runtime").symlink_to(runtime)  # to build takes five seconds
    (tmp_path / "package" / "tests").mkdir(parents=True)
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "own_operator.py").write_text(OPERATOR)
    (tmp_path / "package" / "tests" / "ascend_calls.py").write_text(CALLS.replace("FOLDER", repr(str(tmp_path / "beside"))))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "package"
    sys.modules.pop("own_operator", None)


def execute(package, soc="Ascend910B4", toolchain="1.2.0", **options):
    sys.modules.pop("own_operator", None)
    (executed,) = verdicts.execute_package(package, load_calls(package), soc, toolchain, **options)
    return executed


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_verdict_is_used_again_and_is_the_same(package):
    first, second = execute(package), execute(package)
    assert (first.kept, second.kept) == (False, True)
    assert second.launches == first.launches
    assert [(launch.kernel, launch.programs, launch.of) for launch in second.launches] == [("scale_kernel", 2, 2)]
    assert not execute(package, fresh=True).kept
    assert execute(package).kept


def test_chips_that_differ_in_name_alone_share_a_verdict_and_no_others(package):
    execute(package, "Ascend910_9391")
    assert execute(package, "Ascend910_9392").kept
    assert not execute(package, "Ascend910B4").kept


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("* factor)", "* factor + 0.5)"),  # the module
        ("FACTOR, GRID, WIDTH = 5, 3.0, 2, 128", "FACTOR, GRID, WIDTH = 5, 3.5, 2, 128"),  # an argument
        ("FACTOR, GRID, WIDTH = 5, 3.0, 2, 128", "FACTOR, GRID, WIDTH = 5, 3.0, 3, 128"),  # the grid
        ("FACTOR, GRID, WIDTH = 5, 3.0, 2, 128", "FACTOR, GRID, WIDTH = 5, 3.0, 2, 256"),  # the tile
    ],
)
def test_another_launch_is_executed(package, old, new):
    execute(package)
    replace(package / "tests" / "ascend_calls.py", old, new)
    assert not execute(package).kept
    assert execute(package).kept


def test_code_outside_of_the_package_that_makes_the_inputs_is_no_matter_of_chance(package):
    execute(package)
    replace(package.parent / "beside" / "own_operator.py", "+ 1.0", "+ 2.0")
    assert not execute(package).kept


def test_another_compiler_machine_environment_or_seed_is_another_verdict(package, monkeypatch):
    execute(package)
    assert not execute(package, toolchain="1.1.0").kept
    for name in ("_machine_digest", "native_key", "_installed_digest"):
        with monkeypatch.context() as changed:
            changed.setattr(verdicts, name, lambda: "another")
            assert not execute(package).kept, name
    with monkeypatch.context() as changed:
        changed.setattr(verdicts, "SEED", 1)
        assert not execute(package).kept
    assert execute(package).kept


def test_a_key_has_the_code_that_is_loaded_and_reads_no_file_of_a_distribution(package):
    execute(package)
    loaded = {path for _, path in verdicts._loaded(package)}
    files = [package / "tests" / "ascend_calls.py", package.parent / "beside" / "own_operator.py", npu_tiling.__file__]
    assert {str(file) for file in files} <= loaded
    assert not [path for path in loaded if path.startswith(sysconfig.get_path("purelib"))]


def test_all_code_that_executes_a_call_is_part_of_the_key():
    root = verdicts._PACKAGE
    # Nothing that executes a call imports these.
    beside = {"cli.py", "plugin.py", "check/linting.py", "check/bounded.py", "check/culprit.py"}
    files = [path for path in verdicts._machine_files() if path.suffix == ".py"]
    assert root / "execute" / "final" / "machine.c" in verdicts._machine_files()
    assert root / "execute" / "runtime" / "launch.c" in verdicts._machine_files()
    for path in files:
        if str(path.relative_to(root)) not in beside:
            for dots, name in re.findall(r"^ *from (\.+)(\w*)", path.read_text(), re.MULTILINE):
                imported = path.parents[len(dots) - 1] / name
                assert imported.with_suffix(".py") in files or imported / "__init__.py" in files, (path, name)


def test_findings_are_kept_and_what_was_not_executed_whole_is_not(package, monkeypatch):
    finding = verdicts.Finding("race", (1, 0, 0), "two pipes")
    wrong = execution.Executed("one", "1.2.0", [execution.Ran("scale_kernel", "", 2, 2, True, 3, (), (finding,))])
    with monkeypatch.context() as changed:
        changed.setattr(verdicts, "execute_calls", lambda *_: [execution.Executed("one", "1.2.0", [], "no memory")])
        assert execute(package).problem == "no memory"
        changed.setattr(verdicts, "execute_calls", lambda *_: [wrong])
        assert not execute(package).kept
    again = execute(package)
    assert again.kept
    assert again.findings == [("scale_kernel", finding)]


def test_the_command_says_what_is_kept_and_executes_again_when_told(package, capsys):
    command = ["check", str(package), "--soc", npu_tiling.soc("Ascend910B4").name, "--toolchain", "1.2.0", "--jobs", "1"]
    assert main(command) == 0
    assert "kept from before" not in capsys.readouterr().out
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "1 calls executed, 1 launches, 2 of 2 programs, 0 findings" in said
    assert "2 verdicts are kept from before" in said
    assert main([*command, "--fresh"]) == 0
    assert "kept from before" not in capsys.readouterr().out


def test_of_a_compiler_that_makes_several_modules_each_is_executed(package, monkeypatch):
    executed = []
    text, finding = "made by compilation {}", verdicts.Finding("race", (1, 0, 0), "two pipes")

    def compiled(record, soc, toolchain, compilation):
        return text.format(compilation % 2)

    def execute_calls(calls, soc, toolchain, compilation):
        executed.append(compilation)
        findings = (finding,) if compilation == 1 else ()
        ran = execution.Ran("scale_kernel", "", 2, 2, True, 3, (), findings)
        return [execution.Executed("one", toolchain, [ran])]

    monkeypatch.setattr(verdicts, "_described", compiled)
    monkeypatch.setattr(verdicts, "execute_calls", execute_calls)
    ((_, found),) = execute(package, toolchain="1.0.0").findings
    assert executed == [0, 1]
    assert str(found) == f"{finding} (in 1 of 2 modules that the compiler made of this input)"
    assert execute(package, toolchain="1.0.0").kept
    text = "another {}"  # of a compiler that always makes the same
    execute(package, toolchain="1.1.0")
    assert executed == [0, 1, 0]
