"""`npu-offline run -- python FILE`: a program for an NPU, on the CPU, with its launches checked and listed."""

import json
import re
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from npu_offline import emulate
from npu_offline.check.kernel_file import parse, save
from npu_offline.check.recorded import watched
from npu_offline.cli import main
from sample_kernels import cast

from testing import forks


@triton.jit
def cast_to(x, y, TO: tl.constexpr, KIND: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(x + o).to(TO))


COMMAND = ["-c", "import sys; from npu_offline.cli import main; sys.exit(main(sys.argv[1:]))", "run"]
PROGRAM = """
import sys

import torch
import torch_npu
import triton
from torch_npu import npu_rms_norm
import triton.language as tl


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(y + o, tl.load(x + o, mask=o < n) * 2, mask=o < n)
    else:
        tl.store(y + o, tl.load(x + o) * 2)


@triton.jit
def assembly(x, y):
    o = tl.arange(0, 64)
    tl.store(y + o, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(x + o)], tl.float32, True, 1))


from triton.language.extra.cann import libdevice  # the name in triton-ascend's later releases

driver = triton.runtime.driver.active
assert driver.get_current_target().backend == "npu"
assert driver.get_device_interface() is torch.npu
device = torch.device(sys.argv[1])
x = torch.randn(100, device=device).to(device)
x = x.cuda() if device.type == "cuda" else x.npu()
assert x.device.type == "npu" and x.is_npu and not x.is_cpu
assert torch.empty_like(x).isnan().all() and (torch.empty(3, device=device, dtype=torch.int8) == 127).all()
assert not torch.zeros(3, device=device).isnan().any()
counts = torch.histc(torch.tensor([0, 1, 1, 3], device=device, dtype=torch.int32), 4, min=0, max=3)
assert counts.tolist() == [1, 2, 0, 1] and counts.dtype == torch.int32
with torch.autocast(device.type, torch.bfloat16):
    assert (x[None] @ x[:, None]).dtype == torch.bfloat16 and torch.is_autocast_enabled("npu")
for _ in range(2):
    y = torch.compile(torch.empty_like)(x)
    double[(2,)](x, y, 100, BLOCK=64, MASKED=sys.argv[2] != "plain")
torch.npu.synchronize()
if sys.argv[2] == "caught":
    try:
        assembly[(1,)](x, y)
    except Exception:
        pass
if sys.argv[2] == "operator":
    npu_rms_norm(x)
print("equal", torch.equal(y, 2 * x))
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture
def run(tmp_path):
    """In a process of its own: PyTorch keeps the name of a device to the end of its process."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)

    def run(*words, options=(), start=forks.run):
        done = start(*COMMAND, *options, "--", "python", str(path), *words)
        return done.returncode, " ".join((done.stdout + done.stderr).replace("│", " ").split())

    return run


def python(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


@pytest.mark.parametrize(("device", "start"), [("npu:0", python), ("cuda", forks.run)])
def test_a_program_for_an_npu_runs_and_its_launches_are_listed(run, device, start):
    status, said = run(device, "masked", "0", start=start)
    assert "equal True" in said
    row = r"0 double BLOCK=64, MASKED=True, \*fp32 2 4 short-transfer \d\.\d no finding"
    assert re.search(row, said), said
    assert "2 launches, 0 with findings, from Linalg IR" in said
    assert status == 0


def test_patch_knows_the_layers_of_a_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import npu_rms_norm, torch
model = torch.nn.Sequential(torch.nn.RMSNorm(64, eps=1e-6)).to("npu")
print(npu_rms_norm.patch(model))
model(torch.randn(4, 64, device="npu")).sum().backward()
""")
    done = forks.run(*COMMAND, "--linalg-only", "--", "python", program)
    assert "1 module replaced, 0 left" in done.stdout, done.stdout + done.stderr
    assert "3 launches, 0 with findings" in done.stdout


def test_final_modules_of_a_program_run_with_all_checks(run):
    status, said = run("npu", "masked", "0", options=["--toolchain", "1.2.0"])
    assert "2 launches, 0 with findings, from final modules of 1.2.0" in said
    assert status == 0


def test_a_finding_is_named_and_the_program_goes_on(run):
    status, said = run("npu", "plain", "0")
    assert "argument x, outside its storage of 400 bytes (program.py:17:" in said
    assert "2 launches, 2 with findings" in said
    assert status == 1


def test_a_fault_of_the_front_end_is_named_with_its_number(tmp_path):
    program = tmp_path / "program.py"
    text = """
import torch
import triton
import triton.language as tl


@triton.jit
def drop(x, y, seed, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.where(tl.rand(seed, o) > 0.5, tl.load(x + o), 0.0))


x = torch.randn(64, device="cuda")
drop[(1,)](x, torch.empty_like(x), 123, N=64)
"""
    program.write_text(text)
    done = forks.run(*COMMAND, "--linalg-only", "--", "python", str(program))
    assert done.returncode == 1
    assert "triton-ascend's front end is wrong; perhaps compiler fault 13: multiply halves of 16 bits" in done.stdout


def test_temporaries_that_meet_are_no_finding(tmp_path):
    program = tmp_path / "program.py"
    text = """
import torch
import triton
import triton.language as tl


@triton.jit
def chosen(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    b_x = tl.load(x + o * 8)
    tl.store(y + o * 8, tl.where(b_x > 0, b_x, 1.0))  # a loop over elements, with one temporary for all


x = torch.randn(512, device="cuda")
chosen[(1,)](x, torch.zeros_like(x), N=64)
"""
    program.write_text(text)
    done = forks.run(*COMMAND, "--toolchain", "1.2.0", "--", "python", str(program))
    assert done.returncode == 0
    assert "1 launches, 0 with findings, from final modules of 1.2.0" in done.stdout


def test_launches_are_recorded_and_run_again_with_their_arguments(run, tmp_path, capsys, monkeypatch):
    recorded, report = tmp_path / "recorded", tmp_path / "report.json"
    status, said = run("npu", "plain", "0", options=["--record", str(recorded), "--json", str(report)])
    assert "0 double BLOCK=64, MASKED=False, *fp32 2 4" in said
    (kernel,) = json.loads(report.read_text())["kernels"]
    assert (kernel["kernel"], kernel["launches"]) == ("double", 2)
    assert re.fullmatch(
        r"\S*/program.py:17:\d+: kernel double, program .* outside its storage of 400 bytes", kernel["findings"][0]
    )
    assert re.match(r"\S*/program.py:12:1: short-transfer: load of x", kernel["lint"][0])
    assert 0 < kernel["range"][0] < kernel["seconds"]
    monkeypatch.chdir(tmp_path)
    assert main(["run", "recorded::double", "--linalg-only"]) == 1
    said = r"^program.py:17:\d+: your kernel is wrong: kernel double, program \(1, 0, 0\): "
    assert re.search(said, capsys.readouterr().out, re.M)
    more = [
        "MASKED=True",
        "n=50",
        "--grid",
        "cdiv(n,BLOCK)",
        "--linalg-only",
        "--expect",
        "y=torch.where(torch.arange(100)<50,2*x,y)",
    ]
    assert main(["run", "recorded::0", *more]) == 0
    assert "right: every level that ran is as expected" in capsys.readouterr().out
    assert main(["lint", "recorded", "--soc", "Ascend910B4", "--toolchain", "1.2.0", "--jobs", "1"]) == 1
    assert "\nprogram.py:12:1: double: short-transfer: load of x: 256 bytes of rows of 400\n" in capsys.readouterr().out
    assert main(["time", "recorded::triple"]) == 2
    assert "recorded has no launch 'triple'; it has 0 (double)" in capsys.readouterr().err
    (tmp_path / "other").write_text("no launches")
    assert main(["time", "other::0"]) == 2
    assert "other is no file that npu-offline run --record has written" in capsys.readouterr().err


def test_a_recorded_launch_keeps_memory_that_arguments_share():
    memory = torch.arange(16.0)
    with emulate("Ascend910B4") as emulation, watched(emulation) as program:
        cast[(1,)](memory[:8].view(4, 2).T, memory[8:], BN=8)
    (call,) = program.calls.values()
    x, y = (call.arguments()[name] for name in ("x_ptr", "y_ptr"))
    assert torch.equal(x, torch.arange(8.0).view(4, 2).T) and x.stride() == (1, 2)
    assert torch.equal(y, torch.arange(8.0, 16.0)), "as before the launch"
    call.arguments()["y_ptr"].zero_()
    assert torch.equal(call.arguments()["y_ptr"], torch.arange(8.0, 16.0)), "a copy for each launch"
    given = call.arguments()
    assert given["y_ptr"].data_ptr() - given["x_ptr"].data_ptr() == 8 * 4


def test_a_recorded_launch_keeps_dtypes_and_texts(tmp_path):
    with emulate("Ascend910B4") as emulation, watched(emulation) as program:
        cast_to[(1,)](torch.ones(8), torch.empty(8, dtype=torch.int16), TO=tl.int16, KIND="", N=8)
    save(tmp_path / "recorded", list(program.calls.values()))
    (call,) = parse(f"{tmp_path}/recorded::cast_to", [], None)
    given = call.arguments()
    assert (given["TO"], given["KIND"], given["N"], given["x"].tolist()) == (tl.int16, "", 8, [1.0] * 8)


def test_an_operator_of_torch_npu_is_refused_by_its_name(run):
    status, said = run("npu", "operator", "0")
    assert "stopped: torch_npu.npu_rms_norm runs an operator of CANN's, not a Triton kernel" in said
    assert status == 2


def test_a_refused_kernel_is_listed_where_the_program_goes_on_without_it(run):
    status, said = run("npu", "caught", "0")
    assert "equal True" in said
    assert re.search(r"assembly 0 0 tl\.inline_asm_elementwise \(program\.py:\d+:\d+\) has assembly of another chip", said)
    assert "2 launches, 0 with findings, from Linalg IR; kernels that did not launch: 1" in said
    assert status == 2


def test_the_exit_status_of_the_program_counts(run):
    status, said = run("npu", "masked", "3")
    assert "the program's exit status is 3" in said
    assert status == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--", "python", "no.py"], "no.py does not exist"),
        (["run", "--", "ls"], "ls is no Python program"),
        (["run", "--", "python"], "write: npu-offline run -- python FILE"),
        (["run", "--grid", "1", "--", "python", "no.py"], "before -- may stand --soc, --toolchain, --linalg-only"),
        (["run"], "TARGET is missing"),
    ],
)
def test_a_mistake_in_the_call_is_said_before_anything_runs(capsys, words, message):
    assert main(words) == 2
    assert message in capsys.readouterr().err


FOR_CUDA = """
import torch
from torch._C import _cuda_getCurrentRawStream

assert torch.cuda.is_available() and torch.cuda.device_count() == 1
x = torch.randn(8, device="cuda")  # the input
assert x.is_cuda and x.get_device() == 0
with torch.cuda.nvtx.range("first"):
    torch.cuda.nvtx.mark("second")
with torch.cuda._DeviceGuard(x.device.index), torch.cuda.device(x.device), torch.cuda.stream(torch.cuda.Stream()):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0
assert torch.cuda.current_device() == 0 and torch.cuda.get_device_name() == "Ascend910B4"
assert torch.cuda.get_device_properties(x.device).multi_processor_count == 40
assert torch.cuda.get_device_capability() >= (8, 0)
torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
assert torch.cuda.current_stream().cuda_stream == _cuda_getCurrentRawStream(0)
numbers = [torch.rand(4, device="cuda", generator=torch.Generator("cuda").manual_seed(3)) for _ in range(2)]
assert torch.equal(*numbers) and isinstance(torch.default_generator, torch.Generator)
torch.cuda.manual_seed(5)
first = torch.randn(4, device="cuda")
torch.cuda.manual_seed_all(5)
assert torch.equal(first, torch.randn(4, device="cuda"))
assert not which.takes_cuda(x)
torch.cuda.current_blas_handle() if "more" in sys.argv else None
"""


@pytest.mark.parametrize("word", ["", "more"])
def test_a_program_for_cuda_finds_its_device_and_a_library_that_knows_both_does_not(tmp_path, word):
    (tmp_path / "which.py").write_text(
        "import torch\ndef takes_cuda(x):  # or an NPU\n    return torch.cuda.is_available() or x.is_cuda\n"
    )
    (tmp_path / "program.py").write_text(f"import sys\nimport which\n{FOR_CUDA}")
    done = forks.run(*COMMAND, "--", "python", tmp_path / "program.py", word)
    said = " ".join((done.stdout + done.stderr).split())
    assert ("stopped: torch.cuda.current_blas_handle is not emulated" in said) == bool(word), said
    assert word or "stopped" not in said, said
