"""What is said of an environment's Triton, from files that pip leaves; nothing is installed or imported."""

import base64
import hashlib
import platform
import shutil
import subprocess
import sys

import pytest
from npu_tiling import MissingTritonError, doctor, import_kernels
from npu_tiling import doctor as installation

CURE = ("pip uninstall -y triton", f"pip install --force-reinstall --no-deps triton-ascend=={installation.TRITON_ASCEND}")


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Installs distributions with one file each, in the order given; nothing else is installed."""

    def make(pybind11="3.1.0", **versions):
        if pybind11 is not None:
            (tmp_path / f"pybind11-{pybind11}.dist-info").mkdir()
            (tmp_path / f"pybind11-{pybind11}.dist-info" / "METADATA").write_text(f"Name: pybind11\nVersion: {pybind11}\n")
        for name, version in versions.items():
            file = tmp_path / "triton" / "__init__.py"
            file.parent.mkdir(exist_ok=True)
            data = f"raise ImportError('of {name}')".encode()
            file.write_bytes(data)
            (tmp_path / "triton" / f"of_{name}.py").write_bytes(b"")
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            information = tmp_path / f"{name}-{version}.dist-info"
            information.mkdir()
            (information / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
            (information / "RECORD").write_text(
                f"triton/__init__.py,sha256={digest},{len(data)}\ntriton/of_{name}.py,,\n{information.name}/METADATA,,\n"
            )
        return tmp_path

    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    return make


@pytest.mark.parametrize("names", [("triton", "triton_ascend"), ("triton_ascend", "triton")])
def test_both_are_found_whichever_came_first(environment, names):
    environment(**dict.fromkeys(names, "3.7.1"))
    problem = installation.triton_problem(ascend=True)
    assert problem.what == "triton 3.7.1 and triton-ascend 3.7.1 are both installed, each over files of the other."
    assert problem.cure == CURE
    assert str(problem).endswith(f"Cure: {' && '.join(CURE)}")
    assert "pip uninstall -y triton-ascend" in installation.triton_problem(ascend=False).what


def test_flagtree_over_triton_ascend_is_found(environment):
    """FlagGems installed triton-ascend 3.2.1 over it: `No module named 'triton._C.libtriton.ascend'`."""
    folder = environment(flagtree="0.6.2a1+ascend3.5", triton_ascend="3.2.1")
    problem = installation.triton_problem(ascend=True)
    assert problem.what == (
        "flagtree 0.6.2a1+ascend3.5 and triton-ascend 3.2.1 are both installed, each over files of the other."
    )
    assert problem.cure == ("pip uninstall -y flagtree", CURE[1])
    assert "To keep" not in installation.triton_problem(ascend=False).what
    environment(pybind11=None, triton="3.7.1")
    problem = installation.triton_problem(ascend=True)
    assert "and triton-ascend 3.2.1 are all installed, each over files of the others." in problem.what
    assert problem.cure == ("pip uninstall -y triton flagtree", CURE[1])
    assert "pip uninstall -y flagtree triton-ascend && pip install" in installation.triton_problem(ascend=False).what
    shutil.rmtree(folder / "triton_ascend-3.2.1.dist-info")
    shutil.rmtree(folder / "triton-3.7.1.dist-info")
    assert installation.triton_problem(ascend=True).what.startswith("flagtree 0.6.2a1+ascend3.5 does not compile for Ascend")


def test_a_flagtree_for_ascend_is_said_not_refused(environment, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "import_error", lambda modules: None)
    folder = environment(flagtree="0.6.2a1+ascend3.5")
    with (folder / "flagtree-0.6.2a1+ascend3.5.dist-info" / "RECORD").open("a") as record:
        record.write("triton/backends/ascend/driver.py,,\n")
    assert doctor.main(ascend=True) == 0
    said = capsys.readouterr().out
    assert "Note: flagtree 0.6.2a1+ascend3.5 takes the place of triton-ascend: our kernels were not run with it." in said
    assert "No problem found." in said


@pytest.mark.parametrize(
    ("release", "note"),
    [
        ("3.2.0", None),
        ("3.2.2", "its launcher and its options were read"),
        ("3.6.0", "its launcher and its options were read"),
        ("3.6.0.dev0+git12345678", "its launcher and its options were read"),
        ("3.7.0", "nothing of it was read"),
    ],
)
def test_releases_that_were_not_run_are_said_not_refused(environment, monkeypatch, tmp_path, release, note):
    (tmp_path / "cann-9.1.0").mkdir()
    environment(triton_ascend=release)
    expected = [f"triton-ascend {release}: our kernels were run with 3.2.0 alone; {note}."] if note else []
    assert installation.notes() == expected
    if not release.startswith("3.2"):  # which CANN it is for is not known
        monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann-9.1.0"))
        assert installation.triton_problem(ascend=True) is None


def test_what_others_pin_for_ascend_is_said(environment):
    """As the extra of fla-core 0.6.0 does."""
    folder = environment(triton_ascend="3.2.0", torch="2.10.0+cpu", torch_npu="2.10.0.post4", fla_core="0.6.0")
    with (folder / "fla_core-0.6.0.dist-info" / "METADATA").open("a") as file:
        file.write('Requires-Dist: torch==2.10.0; extra == "npu"\nRequires-Dist: torch_npu==2.10.0.post7; extra == "npu"\n')
        file.write(
            'Requires-Dist: torchvision==0.25.0; extra == "npu"\nRequires-Dist: triton-ascend==3.6.0; extra == "npu"\n'
        )
        file.write('Requires-Dist: torch==2.7.0; extra == "cuda"\n')
    assert installation.notes() == [
        "fla-core 0.6.0 asks in its extra npu for "
        "torch_npu 2.10.0.post7 (here 2.10.0.post4), triton-ascend 3.6.0 (here 3.2.0)."
    ]
    shutil.rmtree(folder / "torch_npu-2.10.0.post4.dist-info")
    assert installation.notes() == []


@pytest.mark.parametrize(
    ("torch", "torch_npu", "fits"),
    [
        ("2.14.0", "2.14.0", True),
        ("2.10.0+cpu", "2.10.0.post7", True),
        ("2.14.1", "2.14.0", False),
        ("2.13.0", "2.14.0", False),
    ],
)
def test_torch_npu_takes_the_torch_of_its_numbers(environment, torch, torch_npu, fits):
    """As its metadata say, `torch==2.14.0.*`."""
    environment(torch=torch, torch_npu=torch_npu)
    numbers = torch_npu.partition(".post")[0]
    assert [problem.cure for problem in installation.torch_npu_problems()] == (
        [] if fits else [(f"pip install torch=={numbers}",)]
    )


def test_one_alone_and_whole_is_fine(environment):
    environment(triton_ascend="3.2.0")
    assert installation.triton_problem(ascend=True) is installation.triton_problem(ascend=False) is None


@pytest.mark.parametrize("what", ["overwritten", "as long", "removed"])
def test_half_of_another_is_found(environment, what):
    file = environment(triton_ascend="3.2.0") / "triton" / "__init__.py"
    if what == "removed":
        file.unlink()
    else:
        file.write_text("pass" if what == "overwritten" else "x" * file.stat().st_size)
    problem = installation.triton_problem()
    assert problem.what == "triton-ascend 3.2.0 is damaged: 1 of its files are missing or another's (triton/__init__.py)."
    assert problem.cure == CURE[1:]


def test_what_triton_ascend_imports_is_part_of_each_cure(environment):
    """Its metadata do not ask for it, and an installation over a stock Triton never had it."""
    folder = environment(pybind11=None, triton="3.7.1")
    assert installation.triton_problem(ascend=True).cure == (*CURE, "pip install pybind11")
    shutil.rmtree(folder / "triton-3.7.1.dist-info")
    environment(pybind11=None, triton_ascend="3.2.0")
    problem = installation.triton_problem()
    assert problem.what == "triton-ascend 3.2.0 imports pybind11, which is not installed."
    assert problem.cure == ("pip install pybind11",)


def test_large_files_are_compared_by_size(environment, monkeypatch):
    file = environment(triton_ascend="3.2.0") / "triton" / "__init__.py"
    monkeypatch.setattr(installation, "_HASHED_BYTES", 0)
    file.write_text("x" * file.stat().st_size)
    assert installation.damaged_files("triton-ascend") == []
    file.write_text("x")
    assert installation.damaged_files("triton-ascend") == ["triton/__init__.py"]


def test_stock_triton_is_wrong_on_ascend_alone(environment):
    folder = environment(triton="3.7.1")
    assert installation.triton_problem() is None
    (folder / "torch_npu-2.13.0.dist-info").mkdir()
    (folder / "torch_npu-2.13.0.dist-info" / "METADATA").write_text("Name: torch-npu\nVersion: 2.13.0\n")
    problem = installation.triton_problem()
    assert problem.what == "triton 3.7.1 does not compile for Ascend, and triton-ascend is not installed."
    assert problem.cure == CURE


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", [(3, 10, 0), (3, 11, 7)])
def test_wheels_there_are(environment, monkeypatch, machine, python):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "version_info", python)
    environment()
    assert installation.missing_wheel() is None
    assert installation.triton_problem(ascend=True).cure == CURE[1:]


@pytest.mark.parametrize(
    ("python", "system", "machine", "said"),
    [
        ((3, 12, 1), "Linux", "aarch64", r"has wheels for Python 3\.9 to 3\.11, and this is Python "),
        ((3, 11, 7), "Linux", "riscv64", r"on Linux \(x86_64, aarch64\), and this is Linux on riscv64\."),
        ((3, 11, 7), "Darwin", "arm64", r"and this is Darwin on arm64\."),
    ],
)
def test_wheels_there_are_not(environment, monkeypatch, python, system, machine, said):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(sys, "version_info", python)
    problem = installation.triton_problem(ascend=True)
    assert problem.cure == ()
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(problem.what)


def test_kernels_that_cannot_be_imported_say_the_cure(environment, monkeypatch):
    folder = environment(triton="3.7.1", triton_ascend="3.2.0")
    (folder / "kernels_of_two.py").write_text("import triton\n")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with pytest.raises(
        MissingTritonError, match=f"npu-x cannot import Triton. .*both installed.*Cure: {CURE[0]} && {CURE[1]}"
    ):
        import_kernels("kernels_of_two", "npu-x")


def test_errors_of_a_whole_triton_are_not_hidden(environment, monkeypatch):
    folder = environment(triton="3.7.1")
    (folder / "kernels_of_one.py").write_text("import triton\n")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with pytest.raises(ImportError, match="of triton"):
        import_kernels("kernels_of_one", "npu-x")


def test_doctor_prints_the_cure_and_fails(environment, capsys):
    environment(triton="3.7.1", triton_ascend="3.2.0", torch="2.13.0", torch_npu="2.9.0.post2")
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert "torch 2.13.0, torch_npu 2.9.0.post2, triton 3.7.1, triton-ascend 3.2.0" in said
    assert [line.strip() for line in said.splitlines() if line.startswith("    ")] == [*CURE, "pip install torch==2.9.0"]


@pytest.mark.parametrize(("cuda", "status"), [("cuda: Optional[str] = '13.2'", 1), ("cuda: Optional[str] = None", 0)])
def test_doctor_sees_a_torch_with_cuda_beside_torch_npu(environment, capsys, monkeypatch, cuda, status):
    """By the file that says it: wheels for aarch64 name what those for x86-64 require."""
    monkeypatch.setattr(doctor, "import_error", lambda modules: None)
    folder = environment(torch="2.13.0", torch_npu="2.13.0", triton_ascend="3.2.0")
    with (folder / "torch-2.13.0.dist-info" / "METADATA").open("a") as file:
        file.write('Requires-Dist: nvidia-nccl-cu13==2.29.7; platform_machine == "x86_64"\n')
    (folder / "torch").mkdir()
    (folder / "torch" / "version.py").write_text(f"debug = False\n{cuda}\nhip: Optional[str] = None\n")
    assert doctor.main() == status
    said = "torch 2.13.0 is a build with CUDA, into which torch_npu does not load." in capsys.readouterr().out
    assert said == bool(status)


def test_doctor_tries_what_looks_right(environment, capsys, monkeypatch):
    environment(triton_ascend="3.2.0")
    monkeypatch.setattr(doctor, "import_error", lambda modules: (modules[-1], "it is not well"))
    assert doctor.main() == 1
    assert "`import triton` fails: it is not well." in capsys.readouterr().out
    monkeypatch.setattr(doctor, "import_error", lambda modules: None)
    assert doctor.main() == 0
    assert "No problem found." in capsys.readouterr().out


def test_doctor_names_what_torch_npu_without_cann_takes(environment, capsys, monkeypatch):
    """torch can be told to leave it out; transformers imports it all the same."""
    environment(torch="2.13.0", torch_npu="2.13.0", triton_ascend="3.2.0")
    monkeypatch.setattr(doctor, "import_error", lambda modules: ("torch_npu", "ImportError: libhccl.so"))
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert "`import torch_npu` fails" in said
    assert "set_env.sh" in said
    assert "pip uninstall -y torch_npu" in said
    monkeypatch.setattr(doctor, "import_error", lambda modules: list(modules) == ["torch", "torch_npu", "triton"] and None)
    assert doctor.main() == 0


def test_doctor_prints_our_versions(environment, capsys):
    environment(npu_tiling="0.1.0", npu_attn_res="0.3.0")
    doctor.main()
    said = capsys.readouterr().out
    assert "npu-tiling 0.1.0, npu-rms-norm not installed" in said
    assert "npu-attn-res 0.3.0" in said


def test_what_an_import_says_is_the_last_line():
    assert doctor.import_error(["json", "csv"]) is None
    said = "ModuleNotFoundError: No module named 'no_such_module'"
    assert doctor.import_error(["json", "no_such_module", "csv"]) == ("no_such_module", said)


@pytest.fixture
def operator(tmp_path, monkeypatch):
    """Makes a package whose device code lies in several folders; one of its modules has `broken` as its last line."""

    def make(broken):
        files = {
            "__init__": "",
            "plain": "",
            "formula": "import triton.language as tl",
            "ascend/__init__": "",
            "ascend/kernels": "import triton",
            "cuda/__init__": "from triton import jit",
            "cuda/kernels": f"import triton\n{broken}",
        }
        for name, code in files.items():
            file = tmp_path / "npu_of_mine" / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(code + "\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        (tmp_path / "triton").mkdir(exist_ok=True)
        (tmp_path / "triton" / "__init__.py").write_text("jit = None\n")
        (tmp_path / "triton" / "language.py").touch()

    return make


def test_pages_of_kernels_that_host_code_imports_are_device_code(tmp_path, monkeypatch):
    files = {"wide": "from npu_tiling.device import tl, triton", "plain": "import npu_tiling.device"}
    for name, code in {"__init__": "", **files}.items():
        file = tmp_path / "npu_of_pages" / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(code + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.device_modules("npu_of_pages") == ["npu_of_pages.wide"]
    assert "npu_tiling.partials" in doctor.device_modules("npu_tiling")


@pytest.mark.slow
def test_doctor_imports_every_module_of_device_code(operator, monkeypatch, capsys):
    """Not those alone that an `__init__` names."""
    monkeypatch.setattr(doctor, "triton_problem", lambda **_: None)
    monkeypatch.setattr(doctor, "torch_npu_problems", list)
    operator(broken="")
    modules = ["ascend.kernels", "cuda", "cuda.kernels", "formula"]
    assert doctor.device_modules("npu_of_mine") == [f"npu_of_mine.{name}" for name in modules]
    assert doctor.command_line(["npu_of_mine"]) == 0
    assert "4 modules of npu_of_mine's kernels were imported." in capsys.readouterr().out
    operator(broken="import no_such_module")
    assert doctor.command_line(["npu_of_mine"]) == 1
    said = "`import npu_of_mine.cuda.kernels` fails: ModuleNotFoundError: No module named 'no_such_module'."
    assert said in capsys.readouterr().out


def test_doctor_imports_no_kernel_where_there_is_no_triton(operator, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "triton_problem", lambda **_: None)
    monkeypatch.setattr(doctor, "version", lambda name: None)
    operator(broken="import no_such_module")
    assert doctor.command_line(["npu_of_mine"]) == 0
    said = "Without a Triton, operators run on CPU tensors alone. No kernels of npu_of_mine were imported."
    assert said in capsys.readouterr().out


def test_doctor_refuses_a_package_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        doctor.command_line(["npu_of_nobody"])
    said = capsys.readouterr()
    assert "there is no package npu_of_nobody" in said.err
    assert said.out == ""


@pytest.mark.slow
def test_doctor_is_a_command_that_imports_neither_torch_nor_triton():
    code = "import sys, npu_tiling.doctor; sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    done = subprocess.run([sys.executable, "-m", "npu_tiling"], capture_output=True, text=True)
    assert f"({sys.executable})" in done.stdout


@pytest.mark.parametrize(("cann", "expected"), [("8.5.0", "3.2.0"), ("9.0.0", "3.2.1"), ("9.1.0", "3.2.2")])
@pytest.mark.parametrize("written", ["toolkit", "runtime", "folder"])
def test_triton_ascend_is_the_one_of_the_cann_that_is_set_up(environment, monkeypatch, tmp_path, cann, expected, written):
    home = tmp_path / (f"cann-{cann}" if written == "folder" else "latest")
    file = {"toolkit": "aarch64-linux/ascend_toolkit_install.info", "runtime": "runtime/version.info"}.get(written)
    if file is None:
        home.mkdir()
    else:
        (home / file).parent.mkdir(parents=True)
        (home / file).write_text(f"package_name=Ascend\nVersion={cann}\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    environment(triton_ascend=expected)
    assert installation.triton_problem(ascend=True) is None
    assert installation.reinstall_ascend()[0].split(" --extra-index-url")[0].endswith(f"triton-ascend=={expected}")


def test_triton_ascend_of_another_cann_is_a_problem(environment, monkeypatch, tmp_path):
    (tmp_path / "cann-9.1.0").mkdir()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann-9.1.0"))
    environment(triton_ascend="3.2.0")
    problem = installation.triton_problem(ascend=True)
    assert problem.what == "triton-ascend 3.2.0 is for another CANN than 9.1, which takes 3.2.2."
    assert "triton-ascend==3.2.2" in problem.cure[0]


def test_a_cann_that_is_not_known_asks_for_nothing(environment, monkeypatch, tmp_path):
    (tmp_path / "cann-12.3.0").mkdir()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann-12.3.0"))
    environment(triton_ascend="3.2.0")
    assert installation.triton_problem(ascend=True) is None
