import importlib.util
import json
import shutil
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from npu_bench import main
from npu_bench.environment import describe
from npu_bench.plots import draw

SCRIPT = """
    import torch
    from npu_bench import Benchmark, Case, Stage, Sweep

    def inputs(case, device):
        return {"x": torch.randn(case["n"], 8, device=device, requires_grad=case["n"] != 3)}

    def ours(case, device):
        return launches

    def launches(x):
        return x.sin()

    BENCHMARK = Benchmark(
        name="toy",
        distribution="toy-op",
        cases=[Case("tiny", {"n": 2}), Case("small", {"n": 16}), Case("huge", {"n": 2**24}), Case("constant", {"n": 3})],
        inputs=inputs,
        providers={"ours": ours, "peer": lambda c, d: torch.sin, "wrong": lambda c, d: torch.cos},
        reference=torch.sin,
        traffic=lambda case, mode: 64 * case["n"] * (3 if mode == "backward" else 2),
        sweeps={"tokens": Sweep("tokens", "tokens", [Case(str(n), {"n": n}, n) for n in (2, 4)])},
        host_cases=[Case("tiny", {"n": 2})],
        host_stages=lambda d: [Stage("outer", lambda: None, ["inner"]), Stage("inner", lambda: None)],
    )
"""


@pytest.fixture
def repository(tmp_path, monkeypatch, cpu):
    """A repository with one package, and a current folder inside it."""
    git(tmp_path, "init", "--quiet")
    folder = tmp_path / "packages" / "toy" / "benchmarks"
    folder.mkdir(parents=True)
    (folder / "toy.py").write_text(textwrap.dedent(SCRIPT))
    (folder.parent / "pyproject.toml").write_text('[project]\nname = "toy-op"\nversion = "1.2.3"\n')
    (tmp_path / ".gitignore").write_text("__pycache__/\n")  # Python writes there as the benchmark is loaded
    commit(tmp_path)
    monkeypatch.chdir(folder)
    return tmp_path


def git(root, *arguments):
    identity = ["-c", "user.name=A", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(root):
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "x")
    return "g" + git(root, "rev-parse", "--short", "HEAD")


def bench(*arguments):
    return main(["toy", "--device", "cpu", "--budget", "0.001", *arguments])


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_run_writes_records_markdown_and_plot(repository, capsys):
    revision = "g" + git(repository, "rev-parse", "--short", "HEAD")
    json_file, document, picture = (repository / "results" / name for name in ("h.json", "t.md", "p.png"))
    options = ["--cases", "tiny,small", "--modes", "forward,backward"]
    outputs = ["--json", str(json_file), "--markdown", str(document), "--plot", str(picture)]
    assert bench(*options, *outputs) == 0
    assert bench(*options, "--label", "second", "--json", str(json_file)) == 0
    records = json.loads(json_file.read_text())
    assert {record["kernel_provider"] for record in records} == {"ours", "peer"}
    assert {record["version"] for record in records} == {f"1.2.3+{revision}", f"1.2.3+{revision}.second"}
    assert len(records) == 2 * 2 * 2 * 3  # runs, providers, modes, metrics; a CPU counts no memory
    assert document.read_text().count("| wrong | WRONG: ") == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "WRONG" in capsys.readouterr().out
    assert main(["compare", f"{json_file}@1.2.3+{revision}", str(json_file)]) == 0
    assert f"1.2.3+{revision} -> 1.2.3+{revision}.second" in capsys.readouterr().out


def test_a_case_without_a_gradient_is_no_failure(repository, capsys):
    assert bench("--cases", "constant", "--modes", "forward,backward", "--providers", "ours") == 0
    assert "nothing in this case has a gradient" in " ".join(capsys.readouterr().out.split())


def test_records_that_no_commit_can_be_repeated_from_are_refused(repository, capsys):
    """Before anything is measured; other outputs than records are written."""
    path = repository / "h.json"
    options = ["--cases", "tiny", "--modes", "forward", "--providers", "ours"]
    (repository / "packages" / "toy" / "new.py").write_text("")
    assert bench(*options, "--json", str(path)) == 2
    assert "files differ from the last commit" in capsys.readouterr().err
    assert bench(*options, "--markdown", str(repository / "t.md")) == 0
    assert bench(*options, "--json", str(path), "--allow-dirty") == 0
    (version,) = {record["version"] for record in json.loads(path.read_text())}
    assert version.endswith(".dirty")
    path.unlink()
    (repository / "t.md").unlink()
    revision = commit(repository)
    assert bench(*options, "--json", str(path)) == 0  # and then there is a file that is in no commit
    assert {record["version"] for record in json.loads(path.read_text())} == {f"1.2.3+{revision}"}
    shutil.rmtree(repository / ".git")
    assert bench(*options, "--json", str(path)) == 2
    assert "is in no git repository" in capsys.readouterr().err
    path.unlink()
    assert bench(*options, "--json", str(path), "--allow-dirty") == 0
    assert {record["version"] for record in json.loads(path.read_text())} == {"1.2.3+unversioned"}


def test_sweep_runs_its_own_cases(repository):
    path = repository / "h.json"
    assert bench("--sweep", "tokens", "--providers", "ours", "--modes", "full", "--json", str(path)) == 0
    assert [record["x_values"] for record in json.loads(path.read_text())] == [[2, 4]] * 3


def test_exit_code_tells_that_ours_is_wrong(repository):
    script = repository / "packages/toy/benchmarks/toy.py"
    script.write_text(script.read_text().replace("return x.sin()", "return x.sin() + 1"))
    assert bench("--cases", "tiny", "--modes", "forward") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toy", "--device", "cpu", "--cases", "tiny,none"], "cases has none and must be among tiny, small, huge, constant"),
        (["toy", "--device", "cpu", "--modes", "sideways"], "modes has sideways"),
        (["toy", "--device", "cpu", "--providers", "nobody"], "providers has nobody"),
        (["toy", "--device", "cpu", "--sweep", "colour"], "must be one of tokens"),
        (["toy", "--device", "cpu", "--soc", "Ascend910B4"], "--soc is for --device emulated"),
        (["toy", "--device", "emulated", "--plot", "p.png"], "--plot is about times"),
        (["toy", "--device", "emulated", "--json", "h.json"], "--json is about times"),
        (["toy", "--device", "emulated", "--case-seconds", "3"], "--case-seconds is about times"),
        (["other"], "must be one of toy"),
        (["host", "other"], "must be one of toy"),
        (["host", "--providers", "nobody"], "providers has nobody"),
        (["none/other.py"], "there is no such file"),
        (["compare", "none.json", "none.json"], "none.json is no history"),
    ],
)
def test_bad_request_is_one_sentence(repository, capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_stages_prints_a_line_a_stage(repository, capsys):
    assert main(["stages", "toy", "--device", "cpu", "--budget", "0.001"]) == 0
    printed = capsys.readouterr().out
    assert "outer" in printed
    assert "inner" in printed


def test_host_is_one_table_of_every_operator_and_its_peers(repository):
    """A second operator without a peer; right results alone have times, and nobody counts launches on a CPU."""
    text = (repository / "packages/toy/benchmarks/toy.py").read_text().replace('name="toy"', 'name="second"')
    other = repository / "packages/second/benchmarks/second.py"
    other.parent.mkdir(parents=True)
    other.write_text(text.replace(', "peer": lambda c, d: torch.sin', ""))
    revision = commit(repository)
    json_file, document = (repository / "results" / name for name in ("h.json", "t.md"))
    options = ["host", "--device", "cpu", "--budget", "0.001", "--json", str(json_file), "--markdown", str(document)]
    assert main(options) == 0
    rows = [line.split(" | ") for line in document.read_text().splitlines() if " tiny | " in line]
    called = [
        ("second tiny", "ours"),
        ("second tiny", "wrong"),
        ("toy tiny", "ours"),
        ("toy tiny", "peer"),
        ("toy tiny", "wrong"),
    ]
    assert [(row[0].removeprefix("| "), row[1]) for row in rows] == called
    for row in rows:
        timed = row[1] != "wrong"
        assert row[2].startswith("ok" if timed else "WRONG")
        assert [cell != "-" for cell in row[3:9]] == [timed, False, timed] * 2
    records = json.loads(json_file.read_text())
    found = {(r["kernel_name"], r["kernel_provider"], r["kernel_operation_mode"], r["metric_name"]) for r in records}
    right = [("second", "ours"), ("toy", "ours"), ("toy", "peer")]
    assert found == {(*one, mode, "host") for one in right for mode in ("forward", "full")}
    assert {r["version"] for r in records} <= {f"1.2.3+{revision}", f"unknown+{revision}"}


def test_host_records_nothing_that_no_commit_can_repeat_and_ours_must_be_right(repository, capsys):
    script = repository / "packages/toy/benchmarks/toy.py"
    script.write_text(script.read_text().replace("return x.sin()", "return x.sin() + 1"))
    options = ["host", "toy", "--device", "cpu", "--budget", "0.001", "--providers", "ours"]
    assert main([*options, "--json", str(repository / "h.json")]) == 2
    assert "files differ from the last commit" in capsys.readouterr().err
    assert main(options) == 1


def test_host_needs_small_calls(repository, capsys):
    script = repository / "packages/toy/benchmarks/toy.py"
    script.write_text(script.read_text().replace('host_cases=[Case("tiny", {"n": 2})],', ""))
    assert main(["host", "--device", "cpu"]) == 2
    assert "benchmark toy declares no host_cases" in capsys.readouterr().err


def test_emulation_reports_bytes_against_the_formula_and_no_times(repository, monkeypatch, capsys):
    emulation = SimpleNamespace(launches=[])
    moved = SimpleNamespace(read=128, written=192)
    emulation.traffic = lambda: {"kernel": {"p_x": moved}} if emulation.launches else {}

    @contextmanager
    def emulate(soc):
        assert soc == "Ascend910B1"
        sine = torch.Tensor.sin
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "sin", lambda x: emulation.launches.append(1) or sine(x))
            yield emulation

    stand_in = ModuleType("npu_offline")
    stand_in.emulate, stand_in.OfflineError = emulate, RuntimeError
    core = ModuleType("npu_tiling")  # npu-bench does not depend on it: npu-offline brings it
    core.UnknownDeviceError = LookupError
    for module in (stand_in, core):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    document = repository / "t.md"
    options = ["--soc", "Ascend910B1", "--modes", "forward,backward", "--providers", "ours,peer"]
    options += ["--markdown", str(document)]
    assert main(["toy", "--device", "emulated", *options]) == 0
    text = document.read_text()
    assert "| tiny | forward | ours | kernel: p_x |  | 128 | 192 |  |  |" in text
    assert "| 128 | 192 | 256 | 1.250 |" in text  # tiny moves 320 bytes, its formula says 256
    assert "| tiny | forward | peer | all | launches no Triton kernel | 0 | 0 | 256 | - |" in text
    assert "huge" not in text.partition("Too large")[0].replace("npu-bench", "")
    assert "--cases: huge" in text
    assert " ms" not in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize("sweep", [None, "tokens"])
def test_plot_draws_ceiling_floor_and_right_providers_alone(toy, measure, npu, sweep):
    run = measure(toy("product", "one_wrong_row"), npu, sweep=sweep)
    figure = draw(run)
    assert len(figure.axes) == 3 * 2  # time, rate and memory; forward and full
    time_axis, rate_axis = figure.axes[0], figure.axes[2]
    drawn = [{text.get_text() for text in axis.get_legend().get_texts()} for axis in (time_axis, rate_axis)]
    assert drawn == [{"product", "floor"}, {"product", "ceiling, GB/s"}]
    assert any(set(line.get_ydata()) == {run.ceilings.copy_gbs} for line in rate_axis.lines)
    assert "one_wrong_row" in figure.get_suptitle()


def test_the_recorded_command_names_no_files_of_results():
    command = ["toy", "--json", "/a/b.json", "--modes", "full", "--plot=c.png", "--markdown", "d.md", "--label", "x"]
    found = describe("chip", "npu-bench", Path(__file__), [], command, None)
    assert found.command == "npu-bench toy --modes full --label x"


def test_script_imports_from_its_own_folder(repository, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = repository / "packages" / "toy" / "benchmarks"
    (folder / "toy_parts").mkdir()
    (folder / "toy_parts" / "peers.py").write_text("def peer(case, device):\n    return lambda x: x.sin()\n")
    script = folder / "toy.py"
    script.write_text("from toy_parts.peers import peer\n" + script.read_text().replace("lambda c, d: torch.sin", "peer"))
    assert bench("--cases", "tiny", "--modes", "forward", "--providers", "ours,peer") == 0


def test_case_that_there_was_no_time_for_is_no_failure(repository, capsys):
    assert bench("--cases", "tiny", "--modes", "forward", "--providers", "ours", "--case-seconds", "1e-9") == 0
    assert "left out: the time for this case was over" in capsys.readouterr().out
