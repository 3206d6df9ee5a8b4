"""How packages find their kernels, and what tells apart the kernels that are compiled of one."""

import sys
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from npu_tiling import Decision, Kernels, MissingTritonError, import_kernels


def test_missing_triton_is_an_error_with_the_command(monkeypatch, tmp_path):
    (tmp_path / "kernels_of_mine.py").write_text("import triton\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kernels_of_mine", raising=False)
    with pytest.raises(MissingTritonError, match=r"pip install 'npu-x\[npu\]'"):
        try:
            import_kernels("kernels_of_mine", "npu-x")
        finally:
            sys.modules.pop("kernels_of_mine", None)


def test_other_import_errors_are_not_hidden(monkeypatch, tmp_path):
    (tmp_path / "broken_kernels.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_kernels("broken_kernels", "npu-x")


def test_module_is_imported_once(monkeypatch, tmp_path):
    (tmp_path / "fine_kernels.py").write_text("calls = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_kernels("fine_kernels", "npu-x") is import_kernels("fine_kernels", "npu-x")


def test_a_module_that_another_thread_imports_is_waited_for(monkeypatch, tmp_path):
    (tmp_path / "slow_kernels.py").write_text("import time\nbegun = True\ntime.sleep(0.3)\nkernel = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    first = threading.Thread(target=import_kernels, args=("slow_kernels", "npu-x"))
    first.start()
    while not hasattr(sys.modules.get("slow_kernels"), "begun"):
        time.sleep(0.001)
    assert import_kernels("slow_kernels", "npu-x").kernel == 1
    first.join()


@dataclass(frozen=True)
class Rows:
    """A tiling's result, as a package has it."""

    block: int

    @property
    def constants(self):
        return {"BLOCK": self.block}

    @property
    def options(self):
        return {"num_warps": 4}


def test_recipes_share_a_compiled_kernel_only_if_all_is_equal():
    decisions = [Decision.of("rows", Rows(block), {"FLAG": mode}) for block in (1, 2) for mode in (0, 1, True, 1.0)]
    assert len({decision.key for decision in decisions}) == len(decisions)
    assert (
        Decision.of("rows", Rows(2), {"FLAG": 1}).key == decisions[5].key != Decision.of("rows", Rows(2), {"OTHER": 1}).key
    )


def test_kernels_are_imported_at_their_first_launch(monkeypatch, tmp_path):
    package = tmp_path / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kernels.py").write_text("launched = []\nkernel = {(3,): lambda *a, **k: launched.append((a, k))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    kernels = Kernels("package_of_mine", "mine")
    assert "package_of_mine.kernels" not in sys.modules
    x = torch.ones(1)
    for _ in range(2):
        kernels.launch("kernels", "kernel", Decision.of("rows", Rows(2), {"FLAG": 1}), 3, (x, None), (7,))
    launched = sys.modules["package_of_mine.kernels"].launched
    assert launched == [((x, None, 7), {"BLOCK": 2, "FLAG": 1, "num_warps": 4})] * 2
