"""What may shrink and not grow without a word: files and lines of packages, parameters of kernels, private names of PyTorch.

Who has to raise a number here says why in the commit.
"""

from __future__ import annotations

import ast
import re

import pytest

from tools.workspace import ROOT, read_packages

# Of the sources of a package: files, lines, and of an operator the share of its lines that is device code, in hundredths.
MOST = {
    "npu_tiling": (20, 5878, 0),
    "rms_norm": (23, 5024, 18),
    "embedding": (22, 5313, 27),
    "attn_res": (29, 7137, 23),
    "fused_linear_cross_entropy": (41, 10199, 15),
}
MOST_PARAMETERS = 35  # of a kernel, or of a function that kernels call
WANTED_PARAMETERS, MOST_ABOVE = 26, 13  # how many functions have more
PRIVATE = re.compile(r"\b(?:torch|dist)\.(?:\w+\.)*_\w+|from torch\b[\w.]* import .*\b_\w+")
WITH_PRIVATE_NAMES = {"npu_tiling.dispatch"}


def sources(package):
    return sorted((ROOT / package.folder / "src").rglob("*.py"))


def kernels(file):
    """The functions of a page that Triton compiles."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
            yield node


@pytest.mark.parametrize("name", MOST)
def test_a_package_does_not_grow_without_a_word(name):
    files, (most_files, most_lines, share) = sources(read_packages()[name]), MOST[name]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    device = sum(node.end_lineno - node.lineno + 1 for file in files for node in kernels(file))
    assert len(files) <= most_files
    assert lines <= most_lines
    assert 100 * device >= share * lines, f"{device} of {lines} lines"


def test_kernels_have_no_more_parameters():
    packages = [package for name, package in read_packages().items() if name in MOST]
    found = [(len(node.args.args), node.name) for each in packages for file in sources(each) for node in kernels(file)]
    assert max(found)[0] <= MOST_PARAMETERS, max(found)
    above = [each for each in found if each[0] > WANTED_PARAMETERS]
    assert len(above) <= MOST_ABOVE, sorted(above)


def test_private_names_of_pytorch_stand_in_one_page_of_the_core():
    packages = [package for name, package in read_packages().items() if name in MOST]
    found = {f"{each.module}.{file.stem}" for each in packages for file in sources(each) if PRIVATE.search(file.read_text())}
    assert found == WITH_PRIVATE_NAMES
