"""Every Python block of the READMEs that users read first runs as it stands."""

import re
import tomllib
from pathlib import Path

import pytest

from tools.install_lines import install_lines

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks_run(readme, capsys):
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), re.S)
    assert blocks
    namespace = {}  # a later block may use what an earlier one has defined
    for block in blocks:
        exec(compile(block, str(readme), "exec"), namespace)
    printed = capsys.readouterr().out.splitlines()
    assert printed
    promised = re.findall(r"^print\(.*\)  # (.*)$", "\n".join(blocks), re.M)
    assert not promised or printed == promised


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_that_install_are_those_that_were_tried(readme):
    package = "rms_norm" if readme.parent == ROOT else readme.parent.name
    assert install_lines(f"npu-{package.replace('_', '-')}") in readme.read_text()


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(readme):
    for target in re.findall(r"\]\((?!http)([^)#]+)", readme.read_text()):
        assert (readme.parent / target).exists(), target


def test_commands_of_hatch_are_there():
    environments = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]
    files = [*READMES, *ROOT.glob("shared/*/README.md"), ROOT / ".github" / "CONTRIBUTING.md", *ROOT.glob("tools/**/*.py")]
    named = {(file.name, found) for file in files for found in re.findall(r"hatch run ([\w:-]+)", file.read_text())}
    assert len(named) > 20
    for file, command in named:
        environment, _, script = command.rpartition(":")
        assert script in environments[environment or "default"]["scripts"], (file, command)
