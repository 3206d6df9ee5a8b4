"""What the packages say of themselves, and what their wheels and sdists hold; supported versions are the same everywhere."""

from __future__ import annotations

import ast
import configparser
import email
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import readme_renderer.markdown
import yaml
from npu_tiling import doctor
from npu_tiling import doctor as installation
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tools import changelog
from tools.changelog import UNRELEASED
from tools.metadata import fill, read_project
from tools.workspace import CORE, ROOT, read_packages, read_versions, torch_range

PACKAGES = read_packages()
VERSIONS = read_versions()
each = pytest.mark.parametrize("package", PACKAGES.values(), ids=list(PACKAGES))


@pytest.fixture
def wheel(package, built):
    """The package's wheel."""
    with zipfile.ZipFile(built / f"{package.module}-{package.version}-py3-none-any.whl") as archive:
        yield archive


@pytest.fixture
def metadata(package, wheel):
    """The wheel's METADATA: fields by name, the README as its payload."""
    return email.message_from_bytes(wheel.read(f"{package.module}-{package.version}.dist-info/METADATA"))


@each
@pytest.mark.slow
def test_metadata_is_complete(package, metadata):
    folder = ROOT / package.folder
    assert metadata["Name"] == package.name == "npu-" + package.key.removeprefix("npu_").replace("_", "-")
    assert metadata["Version"] == package.version
    assert re.fullmatch(r"\d+\.\d+\.\d+", package.version)
    assert len(metadata["Summary"]) > 40
    assert {"ascend", "npu", "triton"} <= set(metadata["Keywords"].split(","))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    classifiers = metadata.get_all("Classifier")
    assert {"Typing :: Typed", "Intended Audience :: Developers", "Operating System :: POSIX :: Linux"} <= set(classifiers)
    for url in metadata.get_all("Project-URL") or []:
        assert re.fullmatch(r"[A-Z]\w+, https://\S+", url)


@each
def test_readme_renders_on_an_index(metadata):
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert readme_renderer.markdown.render(metadata.get_payload()) is not None


@each
def test_readme_links_nowhere_that_an_index_has_not(metadata):
    """What is beside the README in the repository is not beside it there."""
    text = re.sub(r"```.*?```|`[^`]*`", "", metadata.get_payload(), flags=re.DOTALL)
    assert not re.findall(r"\]\((?!https?://|#)[^)]*\)", text)


def test_files_are_what_the_index_takes(built):
    """With the checks, and the version of twine, that the publishing action has."""
    files = sorted([*built.glob("*.whl"), *built.glob("*.tar.gz")])
    assert len(files) == 2 * len(PACKAGES)
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_builds_and_checks_a_release_changes_when_we_change_it():
    """A newer hatchling may write metadata that the publishing action refuses; tests check with the twine that this has."""
    environments = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]
    named = [{text for text in environments[name]["dependencies"] if "twine" in text} for name in ("ci", "default")]
    assert named[0] == named[1] != set()
    (hatchling,) = (text for text in environments["ci"]["dependencies"] if "hatchling" in text)
    assert re.fullmatch(r"hatchling==[\d.]+", hatchling)


def test_citation_names_the_authors_and_the_license_of_the_packages():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["authors"] == read_project()["authors"]
    licenses = {
        tomllib.loads((ROOT / package.folder / "pyproject.toml").read_text())["project"]["license"]
        for package in PACKAGES.values()
    }
    assert {citation["license"]} == licenses


def test_links_are_written_for_each_package():
    folder = PACKAGES["rms_norm"].folder
    text = (ROOT / folder / "pyproject.toml").read_text()
    urls = {"Repository": "https://example.org/r", "Changelog": "https://example.org/r/{folder}/CHANGELOG.md"}
    project = {**read_project(), "urls": urls}
    filled = fill(text, folder, project)
    written = tomllib.loads(filled)["project"]["urls"]
    assert written == {**urls, "Changelog": "https://example.org/r/packages/rms_norm/CHANGELOG.md"}
    assert fill(filled, folder, project) == filled
    assert fill(filled, folder, {**project, "urls": {}}) == fill(text, folder, {**project, "urls": {}})


@each
def test_version_is_the_changelogs(package):
    log = (ROOT / package.folder / "CHANGELOG.md").read_text()
    titles = list(changelog.sections(log))
    assert UNRELEASED not in titles[1:]
    releases = [Version(title) for title in titles if title != UNRELEASED]
    assert releases == sorted(releases, reverse=True)
    assert str(releases[0]) == package.version
    assert all(changelog.sections(log).values()), "a section says nothing"


@each
def test_dependencies(package, metadata):
    names = {requirement.name for requirement in package.requires}
    if package.is_operator:
        assert names == {CORE, "torch"}
        assert set(metadata.get_all("Provides-Extra")) == {"npu", "cuda"}
        for extra in ("npu", "cuda"):  # which Triton that is, the core says
            assert [str(requirement) for requirement in package.extras[extra]] == [
                f"{CORE}[{extra}]{package.needs(CORE).specifier}"
            ]
    if package.name != "npu-offline":  # the compiler and emulator of Ascend kernels is nothing without them
        assert not names & {"triton", "triton-ascend", "torch-npu"}
    if package.name == CORE:
        ascend, _ = package.extras["npu"]
        assert ascend.specifier == SpecifierSet(installation.TRITON_ASCEND_RANGE)
        assert ascend.specifier.contains(installation.TRITON_ASCEND)
        (cuda,) = package.extras["cuda"]
        tried = [Version(text) for text in VERSIONS["triton"]["tried"]]
        assert tried == sorted(cuda.specifier.filter(tried))
        assert f">={tried[0].major}.{tried[0].minor}" in str(cuda.specifier), "the oldest that is allowed was not tried"
    if core := package.needs(CORE):
        major, minor, *_ = PACKAGES["npu_tiling"].version.split(".")
        assert re.fullmatch(rf"<{major}\.{int(minor) + 1},>={major}\.\d+(\.\d+)?", str(core.specifier))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "riscv64"])
@pytest.mark.parametrize("python", [*VERSIONS["python"]["packages"]])
def test_triton_ascend_is_asked_for_where_it_has_wheels(machine, python, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (*map(int, python.split(".")), 0))
    monkeypatch.setattr("platform.machine", lambda: machine)
    for requirement in PACKAGES["npu_tiling"].extras["npu"]:
        asked = requirement.marker.evaluate({"python_version": python, "platform_machine": machine, "sys_platform": "linux"})
        assert asked == (installation.missing_wheel() is None)


@each
def test_wheel_is_pure_python_and_holds_the_package_alone(package, wheel):
    names = wheel.namelist()
    assert f"{package.module}/py.typed" in names
    information = f"{package.module}-{package.version}.dist-info/"
    assert all(name.startswith((f"{package.module}/", information)) for name in names)
    suffixes = {name.rpartition(".")[2] for name in names if name.startswith(f"{package.module}/")}
    # C, C++: what npu-offline compiles on the user's machine. css, j2: the page that it writes.
    assert suffixes <= {"py", "typed", "c", "cpp", "h", "css", "j2"}
    assert "Root-Is-Purelib: true" in wheel.read(information + "WHEEL").decode()
    assert all(str(ROOT).encode() not in wheel.read(name) for name in names)


@each
def test_sdist_holds_what_belongs(package, built):
    """No tests: they run with folders of the root, which no sdist has."""
    with tarfile.open(built / f"{package.module}-{package.version}.tar.gz") as archive:
        names = [member.name.partition("/")[2] for member in archive.getmembers()]
    files = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert files <= set(names)
    for name in set(names) - files - {".gitignore"}:  # that one the build backend adds, to build the same wheel
        assert re.fullmatch(rf"src/{package.module}/[\w/]+\.(py|typed|c|cpp|h|css|j2)", name), name


def importable(package):
    """Modules that are there where a package and what its tests ask for are installed."""
    ours = {other.name: other for other in PACKAGES.values()}
    found, waiting = {package.module}, [*package.requires, *package.tests]
    while waiting:
        requirement = waiting.pop()
        found.add(
            {"triton-ascend": "triton", "pytest-xdist": "xdist"}.get(requirement.name, requirement.name.replace("-", "_"))
        )
        if other := ours.get(requirement.name):
            waiting += [*other.requires, *(needed for extra in requirement.extras for needed in other.extras[extra])]
    return found


@each
def test_what_tests_import_is_asked_for(package):
    """Their environment on CI has nothing else; a module of kernels is imported, in a function, where there is a Triton."""
    folder = ROOT / package.folder / "tests"
    there = importable(package)
    files = [file for file in folder.glob("*.py") if "triton" in there or not file.stem.endswith("_kernels")]
    there |= sys.stdlib_module_names | {file.stem for file in files} | {"testing"}
    for file in (*files, *ROOT.glob("testing/**/*.py")) if package.is_operator else files:
        nodes = ast.parse(file.read_text()).body  # what a function imports, it may import where it is there
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        assert {name.partition(".")[0] for name in names} <= there, file


@each
def test_supported_versions_are_in_the_metadata(package, metadata):
    pythons = VERSIONS["python"]["packages"] if package.name != "npu-offline" else [VERSIONS["python"]["ascend"]]
    assert [python for python in VERSIONS["python"]["packages"] if package.python.contains(f"{python}.0")] == pythons
    older = f"3.{int(pythons[0].partition('.')[2]) - 1}.0"
    assert not package.python.contains(older)
    prefix = "Programming Language :: Python :: "
    stated = {text.removeprefix(prefix) for text in metadata.get_all("Classifier") if text.startswith(prefix)}
    assert stated == {"3", *pythons}
    if torch := package.needs("torch"):
        assert torch.specifier == SpecifierSet(torch_range(VERSIONS))


@each
def test_source_runs_on_the_oldest_python(package):
    oldest = VERSIONS["python"]["packages"][0] if package.name != "npu-offline" else VERSIONS["python"]["ascend"]
    command = [Path(sys.executable).with_name("vermin"), "--no-tips", "--violations", "--eval-annotations", f"-t={oldest}-"]
    command += ["--processes=1", "--no-parse-comments"]  # of a comment that excludes lines there is none
    done = subprocess.run([*command, str(ROOT / package.folder / "src")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def find_python(version: str) -> str | None:
    """A Python of this version, 3.10, on this machine: one on the path, or one that pyenv has installed."""
    found = shutil.which(f"python{version}")
    for python in [found, *Path(found).parents[1].glob(f"versions/{version}.*/bin/python")] if found else []:
        asked = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True).stdout.strip() == version:  # not a shim that has none
            return str(python)
    return None


@pytest.mark.uncollected(
    "the tests of the packages run with this Python", lambda version: version == "{}.{}".format(*sys.version_info)
)
@pytest.mark.parametrize("version", VERSIONS["python"]["packages"])
def test_every_module_imports_on_every_python(version):
    """A class, a table, a decorator that a Python refuses shows when a module runs, and not before."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine: no module was imported with it")
    sources = [ROOT / one.folder / "src" / one.module for one in PACKAGES.values() if one.python.contains(f"{version}.0")]
    command = [python, "-ISB", ROOT / "tests" / "import_every_module.py", ",".join(sys.stdlib_module_names), *sources]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_doctor_knows_every_package():
    assert set(doctor.OURS) == {package.name for package in PACKAGES.values()}


@each
def test_types_are_checked(package):
    settings = configparser.ConfigParser()
    settings.read(ROOT / ".mypy.ini")
    source = str(package.folder / "src")
    assert source in re.split(r",\s*", settings["mypy"]["files"])
    assert source in settings["mypy"]["mypy_path"].split(":")


def test_supported_versions_are_those_of_the_environment_the_workflows_and_the_text():
    python, torch = VERSIONS["python"], VERSIONS["torch"]
    environment = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["default"]
    assert environment["python"] == python["ascend"]
    assert f"torch=={torch['development']}" in environment["dependencies"]
    assert Version(torch["oldest"]) <= Version(torch["development"]) <= Version(torch["newest"])
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    for stated in (*python["packages"], torch["oldest"], torch["newest"]):
        assert stated.removesuffix(".0") in text
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        document = yaml.safe_load(file.read_text())
        steps = [step for job in document["jobs"].values() for step in job["steps"]]
        for step in steps:
            if "setup-python" in step.get("uses", ""):
                chosen = step["with"]["python-version"].split()
                assert set(chosen) <= {"${{", "matrix.python", "}}", *python["packages"]}, file.name
                assert chosen[-1] == python["ascend"], f"{file.name}: the last one is `python`"
