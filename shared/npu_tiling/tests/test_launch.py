import sys

import pytest
from npu_tiling import MissingTritonError, import_kernels


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
