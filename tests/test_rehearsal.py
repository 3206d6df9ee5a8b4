"""The rehearsal of releases: one package all the way, and what stops it."""

from __future__ import annotations

import shutil
import urllib.request
from pathlib import Path

import pytest

from tools.rehearsal.__main__ import in_order, main
from tools.rehearsal.index import PublishError, serve
from tools.rehearsal.scripts import commands
from tools.rehearsal.workflow import Workflow, WorkflowError
from tools.release import git
from tools.workspace import ROOT, read_packages

WORKFLOW = """
env:
  INDEX: ${{{{ vars.INDEX }}}}
jobs:
  publish:
    needs: build
    environment: release-${{{{ needs.build.outputs.name }}}}
    steps:
      - uses: actions/download-artifact@1
        with: {{name: dist, path: dist}}
      - uses: pypa/gh-action-pypi-publish@1
  build:
    outputs:
      name: ${{{{ steps.name.outputs.name }}}}
    steps:
      - uses: actions/checkout@1
      - id: name
        run: |
          echo "name=$(cat name)-$GITHUB_REF_NAME${{INDEX:-}}" >> "$GITHUB_OUTPUT"
      - env:
          NAME: ${{{{ steps.name.outputs.name }}}}
        run: {command}
      - uses: {action}@1
        with: {{name: dist, path: dist}}
"""
MAKE = 'mkdir dist && echo "$NAME" > dist/file'


@pytest.fixture
def run(tmp_path):
    """Runs a workflow of two jobs for a tag; returns what was published, by environment."""
    remote = tmp_path / "remote"
    remote.mkdir()
    for command in (["init", "--quiet"], ["config", "user.name", "A"], ["config", "user.email", "a@b"]):
        git(remote, *command)
    (remote / "name").write_text("x")
    git(remote, "add", "--all")
    git(remote, "commit", "--quiet", "--message", "x")
    git(remote, "tag", "v1")

    def run(command=MAKE, action="actions/upload-artifact"):
        file = tmp_path / "workflow.yml"
        file.write_text(WORKFLOW.format(command=command, action=action))
        published = {}

        def publish(files, environment):
            published[environment] = [path.read_text() for path in files]

        Workflow(file, remote, "v1", tmp_path / "run", {"PYTHONPATH": ""}, publish, lambda line: None).run()
        return published

    return run


def test_workflow_runs_in_the_order_of_needs_and_hands_on_outputs_and_artifacts(run):
    assert run() == {"release-x-v1": ["x-v1\n"]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"command": "echo why; exit 3"}, "why"),
        ({"command": "echo nothing"}, "dist has nothing to upload"),
        ({"action": "actions/unknown"}, "actions/unknown cannot be played"),
    ],
)
def test_step_that_fails_ends_the_run(run, changed, message):
    with pytest.raises(WorkflowError, match=message):
        run(**changed)


def test_index_has_a_page_for_each_project_and_takes_a_file_once(tmp_path: Path):
    wheel = tmp_path / "npu_tiling-0.1.0-py3-none-any.whl"
    wheel.write_text("x")
    with serve(tmp_path / "index") as index:
        index.publish([wheel])
        (page,) = index.pages()
        assert wheel.name in urllib.request.urlopen(page).read().decode()
        other = shutil.copy(wheel, tmp_path / "npu_other-0.1.0-py3-none-any.whl")
        index.publish([Path(other)])
        assert [page.split("/")[-2] for page in index.pages()] == ["npu-other", "npu-tiling"]
        with pytest.raises(PublishError, match="has been published"):
            index.publish([wheel])
        with pytest.raises(PublishError, match="is no distribution"):
            index.publish([tmp_path / "notes.md"])


def test_packages_come_after_what_they_depend_on():
    order = [package.key for package in in_order(read_packages())]
    assert order[:2] == ["npu_tiling", "npu_offline"]  # the others are tested with it
    assert sorted(order) == sorted(read_packages())


def test_scripts_are_those_of_hatch():
    build, check = commands("ci:build", ["packages/x"], ROOT / "hatch.toml")
    assert build[1:] == ["-m", "build", "--no-isolation", "--outdir", "dist", "packages/x"]
    assert check[1:3] == ["-m", "twine"]


@pytest.mark.slow
def test_core_is_released_published_and_installed(capsys):
    """What is committed, with what is installed here: no other index, no compilers."""
    assert main(["npu_tiling", "--offline"]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "npu-tiling 0.1.0: published, installed by its name, and its example runs" in said
    assert "gh release create" in said
