"""What a package needs where Triton is missing: its tilings and its plans are plain arithmetic."""

from __future__ import annotations

import pytest

from .. import forks
from .case import asked

_PROGRAM = """
import importlib, pkgutil, sys
import {module} as package
assert "triton" not in sys.modules, "the package looks at Triton"
sys.modules["triton"] = None  # to import it is an ImportError
import npu_tiling, torch
from {module} import *
for each in pkgutil.walk_packages(package.__path__, "{module}."):
    if "integrations" not in each.name and "__main__" not in each.name:
        importlib.import_module(each.name)
assert explain({sizes}, chip="H200", backward=True).launches
for chip, extra in (npu_tiling.GPUS["H200"], "cuda"), (npu_tiling.soc("Ascend910B4"), "npu"):
    with npu_tiling.use_device(chip, emulated=True):
        try:
            {call}
        except npu_tiling.MissingTritonError as error:
            assert f"pip install '{distribution}[{{extra}}]'" in str(error), error
        else:
            raise AssertionError("no error")
"""


@asked(table="WITHOUT_TRITON")
def test_every_page_is_imported_without_triton_and_a_launch_says_what_to_install(request: pytest.FixtureRequest) -> None:
    """WITHOUT_TRITON: the package's module, sizes of a call that is explained, and a call that launches."""
    module, sizes, call = request.module.WITHOUT_TRITON
    code = _PROGRAM.format(module=module, sizes=sizes, call=call, distribution=module.replace("_", "-"))
    done = forks.run("-c", code)
    assert done.returncode == 0, done.stderr
