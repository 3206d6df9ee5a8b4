"""Run a workflow of GitHub Actions on this machine, as far as the release workflow goes.

Commands run in bash as they stand in the file. Of actions, those that the release workflow uses are played: a checkout is a
clone at the tag, artifacts are folders, publishing goes to the index on this machine. Anything else is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

# Done for the rehearsal as a whole.
_LEFT_OUT_ACTIONS = {"actions/setup-python"}
_LEFT_OUT_COMMANDS = {"pip install hatch"}


class WorkflowError(Exception):
    """A step failed, or is none that can be played."""


@dataclass
class Workflow:
    """One run of a workflow for a tag.

    Attributes:
        file: the workflow.
        remote: the repository that is checked out.
        tag: what was pushed.
        folder: of this run alone; it does not exist.
        variables: the environment of commands.
        publish: called with the files to publish and the job's environment.
        log: every step, as it is begun.
    """

    file: Path
    remote: Path
    tag: str
    folder: Path
    variables: Mapping[str, str]
    publish: Callable[[list[Path], str], None]
    log: Callable[[str], None]
    _values: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """All jobs, each after those that it needs; a WorkflowError at the first step that fails."""
        document = yaml.safe_load(self.file.read_text())
        self._values |= {"github.ref_name": self.tag, "github.token": "none", "github.repository": "here/here"}
        waiting, done = dict(document["jobs"]), set[str]()
        while waiting:
            name = next(name for name, job in waiting.items() if set(_list(job.get("needs", []))) <= done)
            self._run_job(name, waiting.pop(name), document.get("env", {}))
            done.add(name)

    def _run_job(self, name: str, job: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        place = self.folder / name
        place.mkdir(parents=True)
        environment = job.get("environment", "")
        for step in job["steps"]:
            self.log(f"{self.tag}: {name}: {step.get('uses', step.get('run', '')).strip().partition(chr(10))[0]}")
            if "uses" in step:
                self._play(step, place, self._evaluate(environment))
            else:
                self._command(step, place, {**variables, **job.get("env", {}), **step.get("env", {})})
        for output, expression in job.get("outputs", {}).items():
            self._values[f"needs.{name}.outputs.{output}"] = self._evaluate(expression)
        for key in [key for key in self._values if key.startswith("steps.")]:
            del self._values[key]  # steps of another job are not seen

    def _play(self, step: Mapping[str, Any], place: Path, environment: str) -> None:
        action = step["uses"].partition("@")[0]
        options = {key: self._evaluate(str(value)) for key, value in step.get("with", {}).items()}
        if action == "actions/checkout":
            clone = ["git", "clone", "--quiet", "--branch", self.tag, str(self.remote), str(place)]
            call(clone, self.folder, self.variables)
        elif action == "actions/upload-artifact":
            source = place / options["path"]
            files = sorted(source.glob("*")) if source.is_dir() else [source] * source.exists()
            if not files:
                raise WorkflowError(f"{options['path']} has nothing to upload")
            target = self.folder / "artifacts" / options["name"]
            target.mkdir(parents=True)
            for file in files:
                shutil.copy(file, target)
        elif action == "actions/download-artifact":
            shutil.copytree(self.folder / "artifacts" / options["name"], place / options["path"], dirs_exist_ok=True)
        elif action == "pypa/gh-action-pypi-publish":
            self.publish(sorted((place / options.get("packages-dir", "dist")).iterdir()), environment)
        elif action not in _LEFT_OUT_ACTIONS:
            raise WorkflowError(f"{action} cannot be played")

    def _command(self, step: Mapping[str, Any], place: Path, variables: Mapping[str, str]) -> None:
        if step["run"].strip() in _LEFT_OUT_COMMANDS:
            return
        outputs = self.folder / "outputs.txt"
        outputs.write_text("")
        known = {"GITHUB_REF_NAME": self.tag, "GITHUB_OUTPUT": str(outputs)}
        given = {key: value for key, text in variables.items() if (value := self._evaluate(str(text)))}
        call(["bash", "-e", "-o", "pipefail", "-c", step["run"]], place, {**given, **self.variables, **known})
        for line in outputs.read_text().splitlines():
            key, _, value = line.partition("=")
            self._values[f"steps.{step['id']}.outputs.{key}"] = value

    def _evaluate(self, text: str) -> str:
        """A text with its expressions replaced; variables of the repository are empty."""

        def value(found: re.Match[str]) -> str:
            name = found[1]
            if name.startswith("vars."):
                return ""
            if name not in self._values:
                raise WorkflowError(f"{name} has no value here")
            return self._values[name]

        return re.sub(r"\$\{\{\s*(.*?)\s*\}\}", value, text)


def _list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def call(command: list[str], place: Path, variables: Mapping[str, str]) -> None:
    """Run a command; a WorkflowError with what it said where it fails."""
    done = subprocess.run(command, cwd=place, env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode:
        raise WorkflowError(f"{command[-1]} failed:\n{done.stdout}{done.stderr}")
