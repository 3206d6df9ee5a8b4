"""Pictures of the Unified Buffer over time: what is drawn, and which buffers a finding marks."""

import npu_offline
import pytest
import sample_kernels
import torch
from npu_offline import Finding, OfflineError, emulate
from npu_offline.cli import main
from npu_offline.launches import Access, Launch
from npu_offline.module.mlir import name_of, property_of
from npu_offline.reporting import buffers

MARK = "#d11f2f"
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < n) * 2, mask=o < n)
"""
needs_compiler = pytest.mark.skipif("1.2.0" not in npu_offline.installed(), reason="needs npu-offline fetch 1.2.0")


def launch_of(*accesses, notes=()):
    """A launch whose accesses are (step, instruction, buffer, whether it writes)."""
    found = [
        Access(step, name, "V", 0, f"buffer {n} (8xf32)", 32 * n, 32 * n + 32, writes) for step, name, n, writes in accesses
    ]
    return Launch("kernel", (1, 1, 1), {}, {}, notes=notes, accesses=tuple(found))


def test_a_buffer_that_is_written_after_it_was_read_begins_another_life():
    found = buffers.lives(
        launch_of((0, "load#0", 0, True), (1, "vexp#1", 0, False), (1, "vexp#1", 1, True), (2, "load#0", 0, True))
    )
    assert [(life.buffer[:8], life.first, life.last) for life in found] == [
        ("buffer 0", 0, 1),
        ("buffer 1", 1, 1),
        ("buffer 0", 2, 2),
    ]


def test_an_instruction_in_place_begins_no_life():
    (life,) = buffers.lives(launch_of((0, "load#0", 0, True), (1, "vexp#1", 0, False), (1, "vexp#1", 0, True)))
    assert life.instructions == ["load#0", "vexp#1"]


def test_a_finding_marks_the_buffers_that_it_names():
    note = Finding("race", (0, 0, 0), "RAW: vexp#1 on V reads UB of buffer 0 (8xf32) [0, +32), which load#0 wrote")
    launch = launch_of((0, "load#0", 0, True), (1, "vexp#1", 0, False), (1, "vexp#1", 1, True), notes=(note,))
    assert [life.findings for life in buffers.lives(launch)] == [[1], []]
    assert buffers.draw(launch).count(MARK) == 1
    assert buffers.draw(launch_of((0, "load#0", 0, True))).count(MARK) == 0


@pytest.mark.compilers
@needs_compiler
def test_a_race_of_a_final_module_is_marked():
    def mutate(module):
        for op in list(module.walk()):
            if name_of(op) in ("hivm.hir.set_flag", "hivm.hir.wait_flag") and "MTE2" in str(property_of(op, "set_pipe")):
                op.detach()

    with emulate(checks=True, accesses=True, keep_going=True, mutate=mutate) as emulation:
        sample_kernels.cast[(1,)](torch.randn(128).bfloat16(), torch.empty(128), BN=128)
    (launch,) = emulation.launches
    assert {access.pipe for access in launch.accesses} == {"MTE2", "V", "MTE3"}
    assert any(life.findings for life in buffers.lives(launch))
    page = buffers.page([("one", launch)])
    assert MARK in page
    assert "race" in page
    assert "vcast" in page


def test_accesses_are_of_checks():
    with pytest.raises(OfflineError, match="accesses is True without checks"), emulate(final=True, accesses=True):
        pass


@pytest.mark.compilers
@needs_compiler
def test_run_writes_a_page_and_a_picture_of_each_launch(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels.py").write_text(KERNEL)
    given = ["x=fp32:1000", "y=fp32:1000", "n=1000", "BLOCK=256", "--grid", "4", "--toolchain", "1.2.0"]
    assert main(["run", "kernels.py::double", *given, "--picture", "pictures"]) == 0
    (picture,) = (tmp_path / "pictures").glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "pictures" / "index.html").read_text()
    assert "pictures/index.html" in capsys.readouterr().out
