"""Each wheel in a fresh environment: alone, all together, and beside other versions of the core. No network, no triton."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tools import wheels
from tools.workspace import CORE, ROOT, Package, of_others, read_packages

PACKAGES = read_packages()
OPERATORS = [package for package in PACKAGES.values() if package.is_operator]
ALONE = [*OPERATORS, PACKAGES["npu_tiling"]]
pytestmark = pytest.mark.slow
ABSENT = ("triton", "torch_npu", "npu_offline", "npu_bench")


@pytest.fixture
def fresh(tmp_path):
    """Makes a fresh environment that sees what packages need from others, and nothing of ours."""

    def make(*packages: Package) -> wheels.Environment:
        environment = wheels.Environment(tmp_path / "environment")
        needed = [requirement for package in packages for requirement in of_others(package.requires, PACKAGES.values())]
        environment.show(needed, tmp_path / "links")
        return environment

    return make


def example(package: Package) -> str:
    """The README's Python blocks, which run a forward and, in an operator's, a backward."""
    blocks = wheels.readme_blocks(package)
    assert blocks
    if package.is_operator:
        assert any("backward()" in block for block in blocks), f"{package.key}/README.md shows no backward"
    return "\n".join(blocks)


def absent(*modules: str) -> str:
    """A program's first lines: these modules cannot be imported."""
    return f"""
import importlib
for name in {modules}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name == name, error
    else:
        raise SystemExit(f"{{name}} can be imported here, and must not be")
"""


@pytest.mark.parametrize(
    "package",
    [pytest.param(each, marks=() if each.key == "rms_norm" else pytest.mark.nightly, id=each.key) for each in ALONE],
)
def test_wheel_alone_runs_its_example_without_triton(package, built, fresh):
    environment = fresh(package)
    environment.install(package.name, find=built)
    others = [other.module for other in OPERATORS if other is not package]
    where = f"\nimport {package.module} as installed; print(installed.__file__)"
    said = environment.run(absent(*ABSENT, *others) + example(package) + where)
    assert Path(said.splitlines()[-1]).is_relative_to(environment.site_packages)


@pytest.mark.parametrize("key", ["npu_bench", "npu_offline"])
def test_development_package_imports_alone(key, built, fresh):
    package = PACKAGES[key]
    environment = fresh(package)
    environment.install(package.name, find=built)
    others = [other.module for other in OPERATORS]
    environment.run(absent("torch_npu", *others) + f"import {package.module}")


def test_all_operators_run_together(built, fresh):
    environment = fresh(*OPERATORS)
    environment.install(*(package.name for package in OPERATORS), find=built)
    examples = [f"exec({example(package)!r}, {{}})" for package in OPERATORS]
    environment.run(absent(*ABSENT) + "\n".join(examples))


def rebuilt(package: Package, folder: Path, *changes: tuple[str, str]) -> Path:
    """A wheel of a package whose pyproject.toml was changed, as a later release would."""
    root = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__", "results")
    shutil.copytree(ROOT / package.folder, root / package.folder, ignore=ignore)
    file = root / package.folder / "pyproject.toml"
    for old, new in changes:
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    return wheels.build(read_packages(root)[package.key], folder / "wheels", root)


def test_operators_built_for_two_patch_versions_of_the_core_run_side_by_side(built, fresh, tmp_path):
    """The second asks for a later core than the first was installed with: pip replaces it, and both run."""
    core, (first, second) = PACKAGES["npu_tiling"], OPERATORS[:2]
    later = ".".join([*core.version.split(".")[:2], "99"])
    rebuilt(core, tmp_path, (f'version = "{core.version}"', f'version = "{later}"'))
    needed = str(second.needs(CORE).specifier)
    lowest = re.search(r">=[\d.]+", needed)[0]
    wheel = rebuilt(second, tmp_path, (f"npu-tiling{lowest}", f"npu-tiling>={later}"))
    environment = fresh(first, second)
    say_version = "from importlib.metadata import version; print(version('npu-tiling'))\n"
    environment.install(first.name, find=built)
    assert environment.run(say_version).strip() == core.version
    environment.install(wheel, find=tmp_path / "wheels")
    examples = [f"exec({example(package)!r}, {{'__name__': '__main__'}})\n" for package in (first, second)]
    assert environment.run(say_version + "".join(examples)).splitlines()[0] == later


def test_core_outside_the_bounds_is_refused(built, fresh, tmp_path):
    core, operator = PACKAGES["npu_tiling"], OPERATORS[0]
    major, minor, _ = core.version.split(".")
    breaking = f"{major}.{int(minor) + 1}.0" if major == "0" else f"{int(major) + 1}.0.0"
    rebuilt(core, tmp_path, (f'version = "{core.version}"', f'version = "{breaking}"'))
    environment = fresh(operator)
    wheel = next(built.glob(f"{operator.module}-*.whl"))
    with pytest.raises(RuntimeError, match="npu-tiling"):
        environment.install(wheel, find=tmp_path / "wheels")
