"""What kernels run from under the stand-in of CANN, and the memory that a launch has beside its arguments."""

import os
import subprocess
import sys

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))  # the kernels, which pytest's importlib mode leaves out

if "NPU_OFFLINE_CANN_RUNTIME" not in os.environ:
    pytest.skip("not under `python -m npu_offline.cann`, which needs torch_npu", allow_module_level=True)

import cann_kernels
import fault_kernels
import timing_kernels

FINAL = pytest.mark.skipif(os.environ["NPU_OFFLINE_CANN_KERNELS"] != "final", reason="kernels run from Linalg IR")


def run(code, **variables):
    here = os.pathsep.join([os.path.dirname(__file__), os.environ["PYTHONPATH"]])
    variables = {**os.environ, "PYTHONPATH": here, **variables}
    code = f"import torch, torch_npu, cann_kernels, timing_kernels\n{code}\ntorch.npu.synchronize()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=variables)


def product(device="npu"):
    a, b = (
        torch.linspace(-1, 1, 128 * 64).view(128, 64).bfloat16(),
        torch.linspace(-0.5, 0.5, 64 * 64).view(64, 64).bfloat16(),
    )
    c = torch.full((128, 64), float("nan"), dtype=torch.bfloat16, device=device)
    kernel = timing_kernels.exp_of_matmul[(2,)](a.to(device), b.to(device), c, 64, B=64)
    return kernel, c.cpu(), (a.double() @ b.double()).exp()


@FINAL
def test_kernels_run_from_the_final_module():
    x, y = torch.ones(64, device="npu"), torch.empty(64, device="npu")
    kernel = cann_kernels.double[(1,)](x, y, 64, BLOCK=64)
    assert torch.equal(y.cpu(), torch.full((64,), 2.0))
    assert b"npu_offline_workspace" in kernel.asm["npubin"]  # a symbol of what final modules are compiled to


LAUNCHES = {
    "emulated": """
y = torch.empty(64)
with npu_offline.emulate():
    cann_kernels.double[(1,)](torch.ones(64), y, 64, BLOCK=64)
assert y.eq(2).all()
""",
    "npu": """
y = torch.empty(64, device="npu")
cann_kernels.double[(1,)](torch.ones(64, device="npu"), y, 64, BLOCK=64)
assert y.cpu().eq(2).all()
""",
}


@pytest.mark.parametrize(
    "order",
    [pytest.param(("emulated", "npu"), marks=pytest.mark.nightly), ("npu", "emulated")],
    ids=lambda order: order[0],
)
def test_emulation_runs_in_one_process_with_the_stand_in(order, empty_cache):
    """Each has a runtime library in a cache folder of its own: the process uses the first for both."""
    done = run("import npu_offline" + "".join(LAUNCHES[place] for place in order))
    assert done.returncode == 0, done.stderr


def test_a_kernel_of_both_kinds_of_cores_gets_the_workspace_that_its_final_module_names():
    kernel, c, expected = product()
    assert kernel.metadata.workspace_size == 64 * 64 * 4  # of each program: the product in fp32
    assert kernel.metadata.mix_mode == "mix"
    assert torch.allclose(c.double(), expected, rtol=2**-7, atol=0)


def test_a_workspace_that_is_too_small_is_an_error():
    """As with a launcher that reserves it for one program, not for each."""
    done = run(
        "from triton.runtime.driver import driver\n"
        "names = driver.active.launcher_cls.__init__.__globals__\n"
        "write = names['generate_npu_wrapper_src']\n"
        "names['generate_npu_wrapper_src'] = lambda *a: write(*a).replace('* blockNum4Workspace;', ';')\n"
        "a, b, c = (torch.zeros(n, 64, dtype=torch.bfloat16, device='npu') for n in (128, 64, 128))\n"
        "timing_kernels.exp_of_matmul[(2,)](a, b, c, 64, B=64)",
        PYTORCH_NO_NPU_MEMORY_CACHING="1",
    )
    # Not the exit status: torch_npu waits where it frees the workspace, and may make a warning of the error there.
    assert "exp_of_matmul: the workspace needs 32768 bytes and has 164" in done.stderr


def test_programs_that_take_turns_get_the_locks_that_their_final_module_names():
    x, y = torch.arange(4 * 128, dtype=torch.int32, device="npu"), torch.zeros(128, dtype=torch.int32, device="npu")
    kernel = cann_kernels.exchange[(4,)](x, y, BLOCK=128)
    assert kernel.metadata.lock_num == 8
    assert y.cpu().tolist() in x.cpu().view(4, 128).tolist()


@FINAL
def test_a_final_module_that_cannot_run_here_is_replaced_by_its_linalg_ir_and_named(capfd):
    x, y = torch.randn(13, 256).bfloat16(), torch.empty(3, 256, device="npu")
    fault_kernels.shared_buffer_kernel[(1,)](x.to("npu"), y, 3, 4, BLOCK=256)
    b = x.double()
    expected = []
    carried = b[0]
    for i in range(3):
        total, carried = carried, b[4 * i + 1]
        for j in range(1, 4):
            total = total + carried**2
            carried = b[4 * i + 1 + j]
        expected.append(total)
    assert torch.allclose(y.cpu().double(), torch.stack(expected), rtol=1e-5, atol=1e-5)
    said = capfd.readouterr().err
    assert "shared_buffer_kernel runs from its Linalg IR: the module does not say at which of the addresses" in said
