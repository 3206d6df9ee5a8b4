"""Which CI jobs a change needs, on a made-up workspace and on the real one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from tools import ci_matrix, wheel_test
from tools.ci_matrix import RUN_WITH, affected, change_jobs, changed_files, jobs, newest_jobs, torches
from tools.workspace import ROOT, read_packages, read_versions

VERSIONS = {
    "python": {"packages": ["3.10", "3.11", "3.12"], "ascend": "3.11"},
    "torch": {
        "oldest": "2.1",
        "newest": "2.10",
        "python": {"2.0": ">=3.9", "2.1": "<3.12", "2.5": ">=3.9", "2.10": ">=3.11", "2.11": ">=3.9"},
    },
}


@pytest.fixture
def made_up(tmp_path):
    """core <- tool <- (tests of) operator, core <- operator, and one that depends on nothing."""
    projects = {
        "shared/core": ("npu-core", [], []),
        "shared/tool": ("npu-tool", ["npu-core>=0.1"], []),
        "packages/operator": ("npu-operator", ["npu-core>=0.1,<0.2", "torch>=2"], ["npu-tool"]),
        "packages/alone": ("npu-alone", ["torch>=2"], []),
    }
    for folder, (name, dependencies, group) in projects.items():
        project = f'[project]\nname = "{name}"\nversion = "0.1.0"\nrequires-python = ">=3.11"\n'
        project += f"dependencies = {dependencies}\n[dependency-groups]\ntest = {group}\n"
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pyproject.toml").write_text(project)
    return read_packages(tmp_path)


ALL = {"core", "tool", "operator", "alone"}


@pytest.mark.parametrize(
    ("paths", "changed", "others"),
    [
        (["packages/alone/src/a.py"], {"alone"}, set()),
        (["packages/operator/README.md"], {"operator"}, set()),
        (["shared/tool/src/npu_tool/a.py"], {"tool"}, {"operator"}),
        (["shared/core/pyproject.toml"], {"core"}, {"tool", "operator"}),
        (["shared/core/README.md", "shared/core/tests/test_a.py"], {"core"}, set()),
        (["packages/alone/x", "shared/tool/src/x"], {"alone", "tool"}, {"operator"}),
        (
            ["README.md", ".github/workflows/docs.yml", "tools/docs/mkdocs.yml", "tools/demo/model.py", "tests/a.py"],
            set(),
            set(),
        ),
        (["hatch.toml"], set(), ALL),
        (["testing/ranks.py"], set(), ALL),
        (["packages/alone/src/a.py", "tools/suite.py"], {"alone"}, ALL - {"alone"}),
        (["packages/gone/src/x.py"], set(), ALL),
        (["packages/alonely"], set(), ALL),
        ([], set(), set()),
    ],
)
def test_affected_packages_of_a_made_up_workspace(made_up, paths, changed, others):
    found = affected(paths, made_up)
    assert tuple({package.key for package in packages} for packages in found) == (changed, others)


def test_cycles_end(made_up, tmp_path):
    file = tmp_path / "shared/core/pyproject.toml"
    file.write_text(file.read_text().replace("test = []", 'test = ["npu-tool"]'))
    changed, others = affected(["shared/tool/src/x"], read_packages(tmp_path))
    assert {package.key for package in (*changed, *others)} == {"core", "tool", "operator"}


def test_jobs_are_pythons_that_the_package_allows_times_torch_versions(made_up):
    found = jobs([made_up["alone"]], VERSIONS)
    job, later = (
        {"package": "alone", "python": "3.11", "layer": "ascend"},
        {"package": "alone", "python": "3.12", "layer": "cpu"},
    )
    expected = [{**job, "torch": "2.1"}, {**job, "torch": "2.10"}, {**later, "torch": "2.5"}, {**later, "torch": "2.10"}]
    assert found == {"include": expected}


def test_torch_that_has_no_wheels_for_a_python_is_left_out():
    assert torches("3.10", VERSIONS) == ["2.1", "2.5"]
    assert torches("3.12", VERSIONS) == ["2.5", "2.10"]
    versions = read_versions()
    known = versions["torch"]["python"]
    assert {versions["torch"]["oldest"], versions["torch"]["newest"]} <= set(known)
    assert list(known) == sorted(known, key=Version)
    assert all(torches(python, versions) for python in versions["python"]["packages"])


def test_newest_job_names_no_torch(made_up):
    assert newest_jobs([made_up["alone"]], VERSIONS) == {
        "include": [{"package": "alone", "python": "3.12", "torch": "", "layer": "cpu"}]
    }


def test_a_changed_package_runs_on_the_ends_of_what_is_supported_and_others_once():
    packages, versions = read_packages(), read_versions()
    every = jobs(packages.values(), versions)["include"]
    core = change_jobs(["shared/npu_tiling/src/npu_tiling/budget.py"], packages, versions)["include"]
    assert all(job in every for job in core)
    (oldest, ascend, newest), others = core[:3], core[3:]
    assert (oldest["python"], oldest["torch"]) == (versions["python"]["packages"][0], versions["torch"]["oldest"])
    assert (newest["python"], newest["torch"]) == (versions["python"]["packages"][-1], versions["torch"]["newest"])
    assert {job["layer"] for job in others} == {ascend["layer"]} == {"ascend"}
    assert [job["package"] for job in others] == [key for key in packages if key != "npu_tiling"]
    assert len(change_jobs(["pytest.ini"], packages, versions)["include"]) == len(packages)
    assert change_jobs(["tools/versions.toml", "README.md"], packages, versions)["include"] == every


def test_the_tests_of_every_package_run_with_these_files():
    command = [sys.executable, "-c", "import sys, tools.wheel_test, tools.suite, tools.cpu_plugin; print(*sys.modules)"]
    modules = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = {f"{name.replace('.', '/')}.py" for name in modules if name.startswith("tools.")}
    assert files < RUN_WITH and all((ROOT / file).exists() for file in RUN_WITH)


def test_matrix_of_this_repository_is_what_actions_takes():
    found = jobs(read_packages().values(), read_versions())["include"]
    assert len(found) <= 256
    assert len({tuple(job.items()) for job in found}) == len(found)
    assert {job["python"] for job in found if job["package"] == "npu_offline"} == {"3.11"}
    assert {job["python"] for job in found if job["package"] == "rms_norm"} == {*read_versions()["python"]["packages"]}


def test_command_reads_names_from_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("packages/rms_norm/x\nREADME.md\n"))
    assert ci_matrix.main(["-"]) == 0
    assert {job["package"] for job in json.loads(capsys.readouterr().out)["include"]} == {"rms_norm"}


def test_command_names_the_operators(capsys):
    assert ci_matrix.main(["--operators"]) == 0
    operators = [{"package": key} for key, package in read_packages().items() if package.is_operator]
    assert json.loads(capsys.readouterr().out) == {"include": operators}


def test_base_that_is_no_commit_selects_everything(capsys):
    assert ci_matrix.main(["0" * 40]) == 0
    assert json.loads(capsys.readouterr().out) == jobs(read_packages().values(), read_versions())


def git(folder, *arguments):
    subprocess.run(["git", *arguments], cwd=folder, check=True)


def test_changed_files_are_those_since_the_branch_left(tmp_path: Path):
    for command in (["init", "-q", "-b", "main"], ["config", "user.name", "A"], ["config", "user.email", "a@b"]):
        git(tmp_path, *command)

    def commit(*names):
        for name in names:
            (tmp_path / name).write_text(name)
        git(tmp_path, "add", "--all")
        git(tmp_path, "commit", "-q", "-m", "x")

    commit("old")
    git(tmp_path, "switch", "-q", "-c", "branch")
    git(tmp_path, "mv", "old", "moved")
    commit("new")
    git(tmp_path, "switch", "-q", "main")
    commit("elsewhere")
    assert changed_files("main", "branch", tmp_path) == ["moved", "new", "old"]
    assert changed_files("nothing", "branch", tmp_path) is None
    assert changed_files("HEAD", "HEAD", ROOT) == []


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        (("3.10", "3.11", "3.12"), [("3.11", "2.1"), ("3.11", "2.10"), ("3.12", "2.5"), ("3.12", "2.10")]),
        (("3.12",), [("3.12", "2.5"), ("3.12", "2.10")]),
    ],
)
def test_the_ends_are_the_oldest_and_newest_python_here_with_the_oldest_and_newest_torch_of_each(
    made_up, monkeypatch, here, expected
):
    monkeypatch.setattr(wheel_test, "read_packages", lambda: made_up)
    monkeypatch.setattr(wheel_test.shutil, "which", lambda name: name if name.removeprefix("python") in here else None)
    found = [(python, torch) for _, python, _, torch in wheel_test.ends("operator", VERSIONS)]
    assert found == expected
