"""The Ascend compilers: where they are, how they get there, what each can compile for."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import npu_tiling

from ..errors import OfflineError, ToolchainMissingError, UnsupportedError
from .cache import TOOLCHAINS, cache_dir
from .processes import run

VERSIONS = ("1.0.0", "1.1.0", "1.2.0")
"""Versions of the distribution ascendnpu-ir, oldest first: of CANN 8.5, of CANN 9.0, and of about CANN 9.1."""

DEFAULT = "1.2.0"
"""The version that is used unless another is named."""

WHEELS = {
    "1.0.0": {
        "x86_64": "8d51853c50f70d435d7badde1acb901b533b3dcafdd7f958341d958c777b9c06",
        "aarch64": "2bacd8e523b52c7a69df13dc4dd349893800229202d17511e287aa9fbad2f79f",
    },
    "1.1.0": {
        "x86_64": "b1726fe74952b2a6c3c0d8d001c500441db6f4d36239217f5c6809480d1a7318",
        "aarch64": "3a4321110af5cc3aae854a69f2184292016237f09d79944c5e8b552cbc844347",
    },
    "1.2.0": {
        "x86_64": "d4e5bfab877ee4ba7b312885f4f5bf646072fd47c88d5aa96f6a11f67d3e8522",
        "aarch64": "76aaaedd3c4a08148a690f1bdddf2e2668f484989ab261fdb7e19cdba5d0f957",
    },
}
"""SHA-256 of each version's wheel, by machine: nothing else is ever unpacked, or run."""

_TRIES = 4  # compilations of one input: of two modules that are equally likely both are seen in seven cases of eight
_MANIFEST = "manifest.json"
_FETCH_SECONDS = 3600  # 160 MB
_HELP_SECONDS = 120
_OWN = "own-"  # prefix of names that `adopt` gives


def compilations(version: str, linalg: str) -> int:
    """How often to compile one input, to execute each module that a version makes of it.

    1.1.0 makes the same of what always fits, and 1.2.0 of kernels without matrix products. Others order buffers by chance:
    of one input they make modules with the same operations at other addresses, of which one may be wrong. (Near the limit
    of an Ascend950's buffer 1.1.0 refuses a kernel in some compilations, and takes it in others.)
    """
    return 1 if version == "1.1.0" or (version == "1.2.0" and "matmul" not in linalg) else _TRIES


def _folder(version: str) -> Path:
    if version not in VERSIONS:
        raise OfflineError(f"toolchain is {version!r}, must be one of {', '.join(VERSIONS)}")
    return cache_dir() / TOOLCHAINS / version


def fetch(versions: Iterable[str] = VERSIONS) -> list[Path]:
    """Bring the given compiler versions into the cache folder; those that are there and whole are left alone.

    pip downloads the wheel, of which the SHA-256 is in this file, and it is unpacked without running any of it. That happens
    beside its final place, so that processes that fetch at the same time, or are interrupted, never leave half a toolchain.

    Returns:
        The folder of each version.

    Raises:
        OfflineError: there is no wheel for this machine, or pip failed; the message ends with what it said.
    """
    folders = []
    for version in versions:
        folder = _folder(version)
        folders.append(folder)
        if damaged(version) is None:
            continue
        cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.parent.mkdir(exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{version}."))
        try:
            _unpack(_download(version, staging / "wheel"), staging / "new")
            if folder.exists():  # half a toolchain, or one of before there were manifests
                folder.rename(staging / "old")
            try:
                (staging / "new").rename(folder)
            except OSError:
                if damaged(version):  # else another process was faster
                    raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folders


def _download(version: str, folder: Path) -> Path:
    """The wheel of a version, for this machine."""
    machine = platform.machine()
    if machine not in WHEELS[version] or platform.system() != "Linux":
        known = ", ".join(WHEELS[version])
        raise OfflineError(
            f"ascendnpu-ir {version} has wheels for Linux on {known}, and this is {platform.system()} on {machine}"
        )
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"ascendnpu-ir=={version} --hash=sha256:{WHEELS[version][machine]}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "--no-input"]
    options = ["--require-hashes", "--only-binary=:all:", "--dest", str(folder), "--requirement", str(requirements)]
    done = run([*pip, *options], seconds=_FETCH_SECONDS)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise OfflineError(f"pip could not fetch ascendnpu-ir=={version}:\n{done.stderr[-2000:]}")
    if _digest(wheels[0]) != WHEELS[version][machine]:
        raise OfflineError(f"{wheels[0].name} is not the wheel of ascendnpu-ir {version} that this package knows")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> None:
    """Unpack a wheel as pip would: what it keeps under NAME.data/purelib belongs to the top."""
    files = {}
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", member.filename)
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                path.chmod(0o755 if member.external_attr >> 16 & 0o111 else 0o644)
                files[name] = _digest(path)
    (folder / _MANIFEST).write_text(json.dumps({"wheel": _digest(wheel), "files": files}, indent=1))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(version: str) -> dict[str, str] | None:
    """The SHA-256 of each file of a version in the cache, None unless it was made of a wheel that this package knows."""
    try:
        manifest = json.loads((_folder(version) / _MANIFEST).read_text())
        files: dict[str, str] = manifest["files"]
        return files if manifest["wheel"] in WHEELS[version].values() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damaged(version: str) -> str | None:
    """Why a version in the cache cannot be used, None if it is whole: every file is compared with the manifest."""
    files = _manifest(version)
    if files is None:
        return "it has not been fetched"
    for name, digest in files.items():
        path = _folder(version) / name
        if not path.is_file():
            return f"{name} is missing"
        if _digest(path) != digest:
            return f"{name} is not what the wheel has"
    return None


def installed() -> tuple[str, ...]:
    """The versions that are in the cache folder with all of their files, whose content `tool` compares."""
    return tuple(version for version in VERSIONS if _has_all(version))


def _has_all(version: str) -> bool:
    files = _manifest(version)
    return files is not None and all((_folder(version) / name).is_file() for name in files)


def tool(version: str, name: str) -> Path:
    """The path of one program of a toolchain, which is the one of its wheel.

    Raises:
        ToolchainMissingError: the version has not been fetched, or its files are not what was fetched.
        UnsupportedError: the version has no such program.
    """
    own = own_compiler(version)
    if own is not None:
        return _own_tool(own, name)
    folder = _folder(version)
    return _tool(folder, version, name)


def adopt(path: Path) -> str:
    """The name, wherever one of a version is asked for, of a toolchain that is not fetched: an installed CANN's.

    Args:
        path: its bishengir-compile.

    Raises:
        OfflineError: it does not answer `--version`.
    """
    path = path.absolute()
    if not path.is_file():
        raise OfflineError(f"{path} does not exist, must be a bishengir-compile")
    _said_version(path)
    return f"{_OWN}{_digest(path)[:12]}@{path}"


def own_compiler(toolchain: str) -> Path | None:
    """The bishengir-compile of a toolchain that `adopt` named, None of one that is fetched."""
    return Path(toolchain.partition("@")[2]) if toolchain.startswith(_OWN) else None


def describe(toolchain: str) -> str:
    """A toolchain's version; of one that is not fetched, what it says of itself and whether that is one we know."""
    own = own_compiler(toolchain)
    if own is None:
        return toolchain
    said = _said_version(own)
    same = [known for known in installed() if _said_version(tool(known, "bishengir-compile")) == said]
    known = f"the same build as {same[0]}" if same else "an unknown version: nothing here was tried with it"
    return f"{own} ({said}): {known}"


@functools.cache
def _said_version(path: Path) -> str:
    done = run([path, "--version"], seconds=_HELP_SECONDS)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise OfflineError(f"{path} does not say its version: {(done.stdout + done.stderr)[-500:]}")
    return lines[0].strip()


def _own_tool(path: Path, name: str) -> Path:
    """A program beside a compiler; what prints final modules may be that of the newest fetched version."""
    beside = path if name == "bishengir-compile" else path.with_name(name)
    if beside.is_file():
        return beside
    if name != "bishengir-opt" or not installed():
        raise UnsupportedError(f"there is no {name} beside {path}")
    return tool(installed()[-1], name)


@functools.cache
def _tool(folder: Path, version: str, name: str) -> Path:
    files = _manifest(version)
    if files is None or not _has_all(version):
        raise ToolchainMissingError(f"toolchain {version} is not in {folder.parent}: run `npu-offline fetch {version}`")
    program = f"ascendnpuir/bin/{name}"
    if program not in files:
        raise UnsupportedError(f"toolchain {version} has no {name}")
    linked = [each for each in files if each.endswith(".bc")] if name.startswith("bishengir-compile") else []
    for each in (program, *linked):
        if _digest(folder / each) != files[each]:
            raise ToolchainMissingError(f"{folder / each} is not what was fetched: run `npu-offline fetch {version}`")
    return folder / program


@functools.cache
def _targets(path: Path) -> frozenset[str]:
    """The targets that a compiler lists below --target in its help."""
    text = run([path, "--help"], seconds=_HELP_SECONDS).stdout
    section = re.split(r"^ +--", text.partition("--target=")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return frozenset(re.findall(r"^ +=(\S+)", section, flags=re.MULTILINE)) - {"Unknown"}


def compiler(soc: str, toolchain: str) -> Path | None:
    """The program of `toolchain` that compiles for `soc`, None if it has none.

    Ascend950 parts belong to bishengir-compile-a5. The plain compiler lists their names too, but it is not the one that
    knows their vector units.
    """
    name = "bishengir-compile-a5" if is_a5(soc) else "bishengir-compile"
    try:
        path = tool(toolchain, name)
    except UnsupportedError:
        return None
    return path if soc in _targets(path) else None


def printer(soc: str, toolchain: str) -> Path:
    """The program of a toolchain that prints what it compiles for `soc` in MLIR's generic form."""
    return tool(toolchain, "bishengir-opt-a5" if is_a5(soc) else "bishengir-opt")


def is_a5(soc: str) -> bool:
    """True for the Ascend950 family (architecture dav-c310)."""
    return npu_tiling.soc(soc).arch == "dav-c310"


def supported(soc: str, toolchain: str) -> bool:
    """True if that toolchain version can compile for that chip."""
    return compiler(soc, toolchain) is not None
