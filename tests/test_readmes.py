"""Every Python block of the READMEs that users read first, and of the documentation's pages, runs as it stands."""

import re
import runpy
import tomllib
from pathlib import Path

import npu_offline
import pytest

from tools.install_lines import install_lines

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]


PAGES = sorted((ROOT / "tools" / "docs" / "pages").rglob("*.md"))
PROGRAMS = [file for file in [*READMES, *PAGES] if "```python\n" in file.read_text()]


def marked(file):
    """A page that compiles kernels needs the compilers."""
    if "from npu_offline import" not in file.read_text():
        return file
    missing = pytest.mark.skipif(
        set(npu_offline.installed()) != set(npu_offline.VERSIONS), reason="needs all toolchains (npu-offline fetch)"
    )
    return pytest.param(file, marks=[pytest.mark.compilers, pytest.mark.slow, missing])


@pytest.mark.parametrize("page", list(map(marked, PROGRAMS)), ids=[str(file.relative_to(ROOT)) for file in PROGRAMS])
def test_code_blocks_run(page, tmp_path, capsys):
    """All blocks of a page are one program: a later one may use what an earlier one has defined."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    program = tmp_path / "page.py"  # Triton reads a kernel's source from its file
    program.write_text("\n".join(blocks))
    runpy.run_path(str(program))
    printed = capsys.readouterr().out.splitlines()
    assert printed
    promised = re.findall(r"^print\(.*\)  # (.*)$", program.read_text(), re.M)
    assert printed == promised or len(promised) < program.read_text().count("print(")
    rest = iter(printed)
    assert all(line in rest for line in promised), (promised, printed)  # in this order


def test_every_readme_and_quickstart_has_a_program():
    assert set(READMES) < set(PROGRAMS)
    assert {file.name for file in PROGRAMS if file.parent.name == "start"} == {
        "ascend.md",
        "cuda.md",
        "kernel.md",
        "porting.md",
    }


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
    files = [
        *READMES,
        *PAGES,
        *ROOT.glob("shared/*/README.md"),
        ROOT / ".github" / "CONTRIBUTING.md",
        *ROOT.glob("tools/**/*.py"),
    ]
    named = {(file.name, found) for file in files for found in re.findall(r"hatch run ([\w:-]+)", file.read_text())}
    assert len(named) > 20
    for file, command in named:
        environment, _, script = command.rpartition(":")
        assert script in environments[environment or "default"]["scripts"], (file, command)
