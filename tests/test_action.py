"""npu-offline as a step of anybody's workflow: the action's steps run as bash for an example repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import npu_offline
import pytest
import yaml
from npu_tiling.doctor import TRITON_ASCEND

from tools.workspace import ROOT

FOLDER = ROOT / "shared" / "npu_offline"
ACTION = yaml.safe_load((FOLDER / "action.yml").read_text())
README = (FOLDER / "README.md").read_text()
STEPS = {step["id"]: step for step in ACTION["runs"]["steps"] if "id" in step}
RIGHT = "run kernels.py::double x=fp32:1000 y=fp32:1000 n=1000 BLOCK=256 --grid 4 --linalg-only --expect 'y=2*x'"
WRONG = "bounds kernels.py::no_mask n=1..1000 x=fp32:n y=fp32:n BLOCK=256 --grid 'cdiv(n,BLOCK)'"
compilers = pytest.mark.skipif(not npu_offline.installed(), reason="needs a toolchain (npu-offline fetch 1.2.0)")


@pytest.fixture
def repository(tmp_path):
    """A user's repository: the README's kernels, and a workflow with the README's lines."""
    folder = tmp_path / "repository"
    workflow = folder / ".github" / "workflows" / "kernels.yml"
    workflow.parent.mkdir(parents=True)
    (folder / "kernels.py").write_text(re.findall(r"```python\n(.*?)```", README, re.S)[0])
    (lines,) = re.findall(r"```yaml\n(.*?)```", README, re.S)
    head = "on: push\njobs:\n  kernels:\n    runs-on: ubuntu-24.04\n    steps:\n      - uses: actions/checkout@v6\n"
    workflow.write_text(head + lines)
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    subprocess.run(["git", "-C", folder, "add", "."], check=True)
    return folder


def used_in(repository):
    """The step of the repository's workflow that uses the action."""
    (file,) = subprocess.run(
        ["git", "-C", repository, "ls-files", ".github"], check=True, capture_output=True, text=True
    ).stdout.split()
    (job,) = yaml.safe_load((repository / file).read_text())["jobs"].values()
    return job["steps"][-1]


def run_step(name, repository, given, **outputs):
    """Run one step of the action as GitHub does: its inputs are variables, and it is in the repository's folder."""
    inputs = {key: value.get("default", "") for key, value in ACTION["inputs"].items()} | given
    values = {f"inputs.{key}": value for key, value in inputs.items()} | outputs
    step, temporary = STEPS[name], repository.parent
    written = {key: re.sub(r"\$\{\{ (\S+) \}\}", lambda found: values[found[1]], text) for key, text in step["env"].items()}
    written.pop("PIP_EXTRA_INDEX_URL", None)  # where packages come from is this machine's business
    path = f"{temporary / 'npu-offline' / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    github = {name: str(temporary / name) for name in ("GITHUB_OUTPUT", "GITHUB_PATH")}
    variables = {
        **os.environ,
        **written,
        **github,
        "RUNNER_TEMP": str(temporary),
        "GITHUB_ACTION_PATH": str(FOLDER),
        "PATH": path,
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    return subprocess.run(command, cwd=repository, env=variables, capture_output=True, text=True)


def test_it_follows_the_schema():
    checker = Path(sys.executable).with_name("check-jsonschema")
    command = [checker, "--builtin-schema", "vendor.github-actions", FOLDER / "action.yml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_its_steps_are_sound_shell_and_take_text_from_outside_as_variables():
    checker = Path(sys.executable).with_name("shellcheck")
    for step in ACTION["runs"]["steps"]:
        if "run" in step:
            assert "${{" not in step["run"]
            done = subprocess.run([checker, "--shell=bash", "-"], input=step["run"], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout


def test_it_uses_the_pins_of_the_workflows_and_the_release_of_triton_ascend_that_is_driven():
    pins = {step["uses"] for step in ACTION["runs"]["steps"] if "uses" in step}
    known = "".join(file.read_text() for file in (ROOT / ".github" / "workflows").glob("*.yml"))
    assert pins
    assert all(f"uses: {pin} # v" in known for pin in pins)
    assert f"triton-ascend=={TRITON_ASCEND}\n" in STEPS["install"]["run"]


def test_the_lines_of_the_readme_use_it(repository):
    step = used_in(repository)
    place = step["uses"].partition("@")[0].removeprefix("OWNER/REPOSITORY/")
    assert (ROOT / place / "action.yml").is_file()
    assert set(step["with"]) <= set(ACTION["inputs"])
    assert {name for name, value in ACTION["inputs"].items() if value.get("required")} <= set(step["with"])
    assert len(re.findall(r"```yaml\n(.*?)```", README, re.S)[0].splitlines()) == 3


@pytest.mark.compilers
@compilers
def test_the_example_repository_is_checked(repository):
    done = run_step("commands", repository, used_in(repository)["with"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as expected" in done.stdout


@pytest.mark.compilers
@compilers
def test_one_wrong_kernel_of_several_fails_the_step_and_leaves_the_others_to_run(repository):
    pytest.importorskip("z3", reason="needs z3-solver")
    done = run_step("commands", repository, {"commands": f"{WRONG}\n\n{RIGHT}\n"})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "out of bounds for n=1" in done.stdout
    assert done.stdout.count("::error") == 1
    assert f"exit status 1: npu-offline {WRONG}" in done.stdout
    assert "as expected" in done.stdout


@pytest.mark.nightly  # installs torch and triton-ascend: minutes
@pytest.mark.compilers
@compilers
def test_it_installs_itself_into_an_environment_of_its_own(repository, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    done = run_step("install", repository, {"install": "einops"}, **{"steps.python.outputs.python-path": sys.executable})
    assert done.returncode == 0, done.stdout + done.stderr
    bin_folder = repository.parent / "npu-offline" / "bin"
    assert (repository.parent / "GITHUB_PATH").read_text() == f"{bin_folder}\n"
    assert subprocess.run([bin_folder / "python", "-c", "import einops, z3"]).returncode == 0
    done = run_step("commands", repository, {"commands": RIGHT})
    assert done.returncode == 0, done.stdout + done.stderr
