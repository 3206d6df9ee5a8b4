"""What kernels of other packages need of a command: dtypes as arguments, wide expectations, names of a later Triton."""

import functools
import sys

import pytest
from npu_offline.check.files import load_file
from npu_offline.cli import main

KERNELS = """
import triton
import triton.language as tl


@triton.jit
def packed(x_ptr, y_ptr, OUT: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o).to(OUT)
    tl.store(y_ptr + o, x * 100)


@triton.jit
def merged(x_ptr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, tl.bitonic_merge(tl.load(x_ptr + o)))
"""


@pytest.fixture
def run_file(tmp_path, capsys):
    path = tmp_path / "kernels.py"

    def run_file(text, kernel, *given):
        path.write_text(text)
        status = main(["run", f"{path}::{kernel}", *given, "BLOCK=64", "--grid", "1", "--linalg-only"])
        said = capsys.readouterr()
        return status, " ".join((said.out + said.err).replace("│", " ").split())

    return run_file


@pytest.fixture
def run(run_file):
    return functools.partial(run_file, KERNELS)


@pytest.mark.parametrize(("out", "kind"), [("tl.int32", "i32"), ("tl.int8", "i8")])
def test_expectations_of_integers_are_computed_in_64_bits_and_wrap_around_as_the_kernels_do(run, out, kind):
    status, said = run("packed", "x_ptr=i8:64:100", f"y_ptr={kind}:64", f"OUT={out}", "--expect", "y_ptr=x_ptr*100")
    assert status == 0, said
    assert "as expected" in said


def test_a_function_of_a_later_triton_is_refused_by_name(run):
    status, said = run("merged", "x_ptr=fp32:64")
    assert "Triton refuses the kernel: triton-ascend 3.2.0 has no triton.language.bitonic_merge" in said
    assert status == 2


def test_a_kernel_needs_nothing_of_its_file_that_it_does_not_call(run_file, capsys):
    imports = """
from not_installed.utils import is_cuda, register, Base
from not_installed.more import helper as help_me
if is_cuda():
    raise RuntimeError
@register("a kernel's wrapper")
def wrapper(x):
    return x
class Module(Base):
    pass
"""
    given = ["x_ptr=i8:64", "y_ptr=i32:64", "OUT=tl.int32", "--expect", "y_ptr=x_ptr*100"]
    status, said = run_file(imports + KERNELS, "packed", *given)
    assert "runs without not_installed: not installed" in said
    assert status == 0
    assert not any(name.startswith("not_installed") for name in sys.modules)


def test_a_kernel_that_calls_what_is_not_installed_is_refused(run_file):
    called = "import not_installed\n" + KERNELS.replace("x * 100", "not_installed.scaled(x)")
    status, said = run_file(called, "packed", "x_ptr=i8:64", "y_ptr=i32:64", "OUT=tl.int32")
    assert "Triton refuses the kernel" in said
    assert status == 2


def test_a_file_that_cannot_be_imported_names_all_that_it_misses(run_file):
    wrong = "import not_installed\nimport nor_this\nassert not_installed.version >= (2, 0)\n"
    status, said = run_file(wrong + KERNELS, "packed", "x_ptr=i8:64", "y_ptr=i32:64", "OUT=tl.int32")
    assert "ModuleNotFoundError: not_installed, nor_this: not installed" in said
    assert status == 2


def test_a_file_may_ask_whether_torch_npu_is_installed(tmp_path):
    (tmp_path / "kernels.py").write_text(f"import importlib.util\nimportlib.util.find_spec('torch_npu')\n{KERNELS}")
    assert load_file(tmp_path / "kernels.py").packed


def test_a_file_that_its_package_imports_and_that_cannot_be_imported_twice_is_imported_once(tmp_path, monkeypatch):
    folder = tmp_path / "package_of_a_file"
    folder.mkdir()
    (folder / "__init__.py").write_text("registered = []\nfrom . import kernels\n")
    once = "import package_of_a_file\nassert not package_of_a_file.registered\npackage_of_a_file.registered.append(1)\n"
    (folder / "kernels.py").write_text(once + KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    module = load_file(folder / "kernels.py")
    assert module is sys.modules["package_of_a_file.kernels"]
