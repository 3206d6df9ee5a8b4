"""The workflows of GitHub Actions: well-formed, pinned, and running what a person runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tools.workspace import ROOT

FILES = {file.stem: file for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
WORKFLOWS = {name: yaml.safe_load(file.read_text()) for name, file in FILES.items()}
ANNOUNCE = 'gh release create "$GITHUB_REF_NAME" dist/* --verify-tag --title "$GITHUB_REF_NAME" --notes-file notes.md'
PINNED = "pip install --require-hashes --requirement .github/hatch.txt"
PLAIN_COMMANDS = ("pip install hatch", PINNED, "exit 1", '.ci/run -m ""', ANNOUNCE)
each = pytest.mark.parametrize("name", WORKFLOWS)


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def hatch_scripts(text):
    """The scripts, environment:name, that `hatch run` is given in a text."""
    names = re.findall(r"hatch run ([\w:-]+)", text)
    return {name if ":" in name else f"default:{name}" for name in names}


def test_the_workflows_are_there():
    assert set(WORKFLOWS) == {"ci", "docs", "nightly", "release"}


def test_they_follow_the_schema():
    checker = Path(sys.executable).with_name("check-jsonschema")
    command = [checker, "--builtin-schema", "vendor.github-workflows", *FILES.values()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_actionlint_finds_nothing():
    checker = Path(sys.executable).with_name("actionlint")
    done = subprocess.run([checker, *FILES.values()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@each
def test_actions_are_pinned_by_commit(name):
    lines = re.findall(r"^\s*(?:- )?uses: (.*)$", FILES[name].read_text(), re.MULTILINE)
    assert len(lines) == sum("uses" in step for step in steps(WORKFLOWS[name])) > 0
    for line in lines:
        assert re.fullmatch(r"[\w-]+/[\w-]+(/[\w-]+)?@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_one_action_has_one_pin():
    pins = {pin for workflow in WORKFLOWS.values() for step in steps(workflow) if (pin := step.get("uses"))}
    assert len(pins) == len({pin.partition("@")[0] for pin in pins})


@each
def test_steps_run_hatch_scripts_that_exist(name):
    environments = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]
    defined = {f"{env}:{script}" for env, table in environments.items() for script in table["scripts"]}
    for step in steps(WORKFLOWS[name]):
        for line in filter(None, step.get("run", "").splitlines()):
            assert hatch_scripts(line) or line in PLAIN_COMMANDS or "GITHUB_OUTPUT" in line, line
            assert "${{" not in line, f"text from outside becomes part of a command: {line}"
    used = hatch_scripts(FILES[name].read_text())
    assert used <= defined


def test_ci_runs_what_the_ci_script_runs():
    assert hatch_scripts((ROOT / ".ci" / "run").read_text()) <= hatch_scripts(FILES["ci"].read_text())


@each
def test_only_publishing_may_do_more_than_read(name):
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    more = {key: job["permissions"] for key, job in workflow["jobs"].items() if "permissions" in job}
    release = {"publish": {"id-token": "write"}, "announce": {"contents": "write"}}
    writing = {"release": release, "docs": {"publish": {"pages": "write", "id-token": "write"}}}
    assert more == writing.get(name, {})
    for step in steps(workflow):
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    assert not re.search(r"\b(secrets|vars)\.", FILES[name].read_text()), "a pull request from a fork sees none"


def test_what_is_published_was_tested_with_the_torch_that_is_named():
    jobs = WORKFLOWS["release"]["jobs"]
    step = jobs["test"]["steps"][-1]
    assert '--torch "$TORCH"' in step["run"]
    assert step["env"]["TORCH"] == "${{ needs.build.outputs.torch }}"
    assert jobs["publish"]["environment"] == "release-${{ needs.build.outputs.name }}"
    assert jobs["announce"]["needs"] == ["build", "publish"]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.dependabot", ".github/dependabot.yml"),
        ("vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/*.yml"),
        ("vendor.citation-file-format", "CITATION.cff"),
    ],
)
def test_what_github_reads_follows_its_schema(schema, files):
    checker = Path(sys.executable).with_name("check-jsonschema")
    found = list(ROOT.glob(files))
    assert found
    command = [checker, "--builtin-schema", schema, *found]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_publishing_has_the_artifact_and_nothing_else():
    jobs = WORKFLOWS["release"]["jobs"]
    assert set(jobs["publish"]["needs"]) == {"build", "test"}
    actions = [shlex.split(step["uses"])[0].partition("@")[0] for step in jobs["publish"]["steps"]]
    assert actions == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    assert not any("run" in step for step in jobs["publish"]["steps"])


def test_the_documentation_is_built_for_every_change_and_published_from_main():
    assert WORKFLOWS["docs"][True] == {"push": {"branches": ["main"]}}  # YAML reads `on` as True
    build, publish = (WORKFLOWS["docs"]["jobs"][name]["steps"] for name in ("build", "publish"))
    assert [step["uses"].partition("@")[0] for step in publish] == ["actions/deploy-pages"]
    configured = yaml.safe_load((ROOT / "tools" / "docs" / "mkdocs.yml").read_text())["site_dir"]
    assert (ROOT / "tools" / "docs" / configured).resolve() == ROOT / build[-1]["with"]["path"]
    assert {"run": "hatch run docs:build"} in build
    assert {"run": "hatch run docs:build"} in WORKFLOWS["ci"]["jobs"]["together"]["steps"]


def test_change_of_documents_alone_is_tested_and_required():
    """No package is affected: the jobs for packages are skipped, and the tests of the root run all the same."""
    jobs = WORKFLOWS["ci"]["jobs"]
    assert jobs["package"]["if"] == "${{ fromJSON(needs.plan.outputs.matrix).include[0] != null }}"
    assert jobs["together"]["if"] == "${{ !failure() && !cancelled() }}"  # without it, a skipped job skips this one
    fails = jobs["required"]["steps"][0]["if"]
    for wrong in (
        "contains(needs.*.result, 'failure')",
        "contains(needs.*.result, 'cancelled')",
        "together.result != 'success'",
    ):
        assert wrong in fails


def test_every_commit_on_main_has_a_run_to_its_end():
    concurrency = WORKFLOWS["ci"]["concurrency"]
    assert concurrency["cancel-in-progress"] == "${{ github.event_name == 'pull_request' }}"
    assert "github.sha" in concurrency["group"]


def test_jobs_that_compile_take_the_compilers_from_the_cache():
    compiling = {"ci": ["package", "together"], "nightly": ["package", "newest", "compile", "all", "together"]}
    keys = set()
    for name, jobs in compiling.items():
        for job in jobs:
            caches = [
                step["with"] for step in WORKFLOWS[name]["jobs"][job]["steps"] if "actions/cache" in step.get("uses", "")
            ]
            (compilers,) = (cache for cache in caches if cache["path"] == "~/.cache/npu-offline/toolchains")
            keys.add(compilers["key"])
    (key,) = keys  # fetched by one job, taken by all
    (pattern,) = re.findall(r"hashFiles\('(.*)'\)", key)
    assert list(ROOT.glob(pattern)), "which versions they are is in this file"


def test_pull_requests_write_no_cache_but_the_compilers():
    every = [
        step for job in WORKFLOWS["ci"]["jobs"].values() for step in job["steps"] if "actions/cache" in step.get("uses", "")
    ]
    for step in every:
        action = step["uses"].partition("@")[0]
        if action == "actions/cache":
            assert step["with"]["path"] == "~/.cache/npu-offline/toolchains"
        elif action == "actions/cache/save":
            assert "github.event_name == 'push'" in step["if"]
    assert {step["uses"].partition("@")[0] for step in every} == {
        f"actions/cache{kind}" for kind in ("", "/restore", "/save")
    }


def test_one_required_check_waits_for_every_job():
    jobs = WORKFLOWS["ci"]["jobs"]
    assert set(jobs["required"]["needs"]) == set(jobs) - {"required"}
    assert jobs["required"]["if"] == "${{ always() }}"
