"""`run` and `check` on a file of calls: right kernels are called right, and no kernel ends the run of the others."""

import os
import signal
import threading

import pytest
from npu_offline.cli import main
from npu_offline.execute import settings
from npu_offline.execute.meaning import launch as meaning
from npu_offline.timing import program

FILE = """
import torch
import triton
import triton.language as tl


@triton.jit
def add_one(x_ptr, y_ptr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + o) + 1.0)


@triton.jit
def accumulate(x_ptr, sum_ptr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(sum_ptr, tl.sum(tl.load(x_ptr + o), 0))


@triton.jit
def tickets(counter_ptr, y_ptr):
    tl.store(y_ptr + tl.program_id(0), tl.atomic_add(counter_ptr, 1))


@triton.jit
def swap(slot_ptr, y_ptr):
    tl.store(y_ptr + tl.program_id(0), tl.atomic_cas(slot_ptr, 0, 1))


@triton.jit
def exchange(slot_ptr, y_ptr):
    tl.store(y_ptr + tl.program_id(0), tl.atomic_xchg(slot_ptr, tl.program_id(0)))


@triton.jit
def masked_tickets(counter_ptr, y_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y_ptr + tl.program_id(0) * BLOCK + o, tl.atomic_add(counter_ptr + o, 1, mask=o < n))


@triton.jit
def overlap(x_ptr, y_ptr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + tl.program_id(0) * BLOCK + o))


@triton.jit
def wait(x_ptr, y_ptr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    while tl.load(x_ptr) < 1:
        tl.store(y_ptr + o, tl.load(y_ptr + o) + 1.0)


@triton.jit
def count(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    for _ in range(n):
        tl.store(y_ptr + o, tl.load(y_ptr + o) + 1.0)


@triton.jit
def refused(x_ptr):
    tl.store(x_ptr, nothing_of_this_name)


def call(kernel, *shapes, grid=4, dtype=torch.int32, **given):
    tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    kernel[(grid,)](*tensors, **given)
    return tensors


def calls():
    CALLS
"""
LINALG = "--linalg-only"


@pytest.fixture
def run(tmp_path, capsys):
    def go(command, calls, *options):
        path = tmp_path / "kernels.py"
        path.write_text(FILE.replace("CALLS", calls.strip().replace("\n", "\n    ")))
        status = main([command, str(path), *options])
        said = capsys.readouterr()
        return status, " ".join((said.out + said.err).replace("\u2502", " ").split())

    return go


def test_zeros_are_zeros(run):
    status, said = run(
        "run",
        """
def total():
    x = torch.ones(64)
    for made in (torch.zeros(1), torch.zeros_like(x[:1]), x.new_zeros(1)):
        accumulate[(4,)](x, made, BLOCK=16)
        assert made.item() == 64
yield "sum", total
""",
        "--toolchain",
        "1.2.0",
    )
    assert status == 0, said


@pytest.mark.parametrize(
    "launch",
    [
        "call(tickets, 1, 4)",
        "call(swap, 1, 4)",
        "call(exchange, 1, 4)",
        "call(masked_tickets, 8, 32, n=5, BLOCK=8)",
    ],
)
def test_an_atomic_update_whose_old_value_is_used_is_no_race(run, launch):
    status, said = run("run", f'yield "update", lambda: {launch}', LINALG)
    assert status == 0, said


def test_every_ticket_is_given_once(run):
    checked = "assert sorted(call(tickets, 1, 64, grid=64)[1].tolist()) == list(range(64))"
    assert run("run", f'def taken():\n    {checked}\nyield "tickets", taken', LINALG)[0] == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "launch",
    ["call(wait, 1, 64, grid=1, dtype=torch.float32, BLOCK=64)", "call(count, 1, 64, grid=1, n=2**31 - 1, BLOCK=64)"],
)
@pytest.mark.parametrize("command", ["run", "check"])
def test_a_loop_that_does_not_end_is_named(run, monkeypatch, command, launch):
    monkeypatch.setattr(settings, "PROGRAM_SECONDS", 1)
    monkeypatch.setattr(meaning, "SECONDS", 1)
    where = ["--toolchain", "1.2.0", *(["--soc", "Ascend910B4", "--jobs", "1"] if command == "check" else [])]
    status, said = run(command, f'yield "endless", lambda: {launch}', *where)
    assert "program (0, 0, 0): stopped after 1 s of processor time: a loop does not end" in said
    assert ("not run: a loop does not end from Linalg IR" in said) == (command == "run")
    assert status == 1


def test_a_launch_that_takes_long_is_named_and_ends_at_the_limit(run, monkeypatch):
    monkeypatch.setattr(settings, "PROGRESS_SECONDS", 0.5)
    launch = "call(count, 1, 64, grid=1, n=2**31 - 1, BLOCK=64)"
    status, said = run("run", f'yield "endless", lambda: {launch}', LINALG, "--limit", "1.5")
    assert "npu-offline: kernel count, 1 programs: runs for 1 s" in said
    assert "stopped after 1.5 s, the limit: a loop does not end, or waits for another program" in said
    assert status == 1


def test_time_names_a_loop_that_does_not_end(run, monkeypatch):
    monkeypatch.setattr(program, "MOST_TURNS", 1000)
    monkeypatch.setattr(settings, "PROGRAM_SECONDS", 1)  # launches that write integers run before they are timed
    status, said = run("time", 'yield "endless", lambda: call(count, 1, 64, n=2**31 - 1, BLOCK=64)')
    assert "stopped after 1,000 turns of its loops: a loop does not end" in said
    assert status == 1


@pytest.fixture
def interrupt_launches(monkeypatch):
    """Every launch is interrupted a second after it begins."""
    monkeypatch.setattr(meaning, "SECONDS", 1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore interrupts
    made, timers = settings.RunningEmulation.settings, []

    def settings_of_a_launch(*arguments, **options):
        timers.append(threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)))
        timers[-1].start()
        return made(*arguments, **options)

    monkeypatch.setattr(settings.RunningEmulation, "settings", settings_of_a_launch)
    yield
    for timer in timers:
        timer.cancel()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("options", [[LINALG], ["--toolchain", "1.2.0"]])
@pytest.mark.usefixtures("interrupt_launches")
def test_an_interrupt_ends_a_loop_that_does_not(run, options):
    status, said = run("run", 'yield "endless", lambda: call(wait, 1, 64, grid=1, dtype=torch.float32, BLOCK=64)', *options)
    assert "npu-offline: stopped" in said
    assert status == 130


@pytest.mark.parametrize(
    ("command", "options"), [("run", [LINALG]), ("check", ["--soc", "Ascend910B4", "--toolchain", "1.2.0", "--jobs", "1"])]
)
def test_a_refused_kernel_leaves_the_others_to_run(run, command, options):
    status, said = run(
        command,
        """
yield "first", lambda: call(refused, 1)
yield "second", lambda: call(add_one, 64, 64, dtype=torch.float32, BLOCK=16)
""",
        *options,
    )
    assert "first" in said
    assert "nothing_of_this_name is not defined" in said
    assert "1 calls executed" in said if command == "check" else "second" in said
    assert status == 2


def test_a_failed_comparison_is_a_result(run):
    status, said = run(
        "run",
        """
def compared():
    y = call(add_one, 64, 64, dtype=torch.float32, BLOCK=16)[1]
    assert y[0] == 2, "y is not two"
yield "compared", compared
yield "next", lambda: call(add_one, 64, 64, dtype=torch.float32, BLOCK=16)
""",
        LINALG,
    )
    assert "AssertionError: y is not two (kernels.py:" in said
    assert "next" in said
    assert status == 1


def test_what_was_asked_for_and_did_not_run_is_no_success(run):
    """Final modules of the Ascend950 are not run."""
    call = 'yield "add", lambda: call(add_one, 64, 64, dtype=torch.float32, BLOCK=16)'
    assert run("run", call, "--soc", "Ascend950PR_957b", "--toolchain", "1.2.0")[0] == 2
    status, said = run("run", call, "--soc", "Ascend950PR_957b")
    assert "the emulation has no vector functions of Ascend950PR_957b" in said
    assert status == 0


def test_check_looks_for_races_between_programs(run):
    status, said = run(
        "check",
        'yield "overlap", lambda: call(overlap, 64, 16, dtype=torch.float32, BLOCK=16)',
        "--soc",
        "Ascend910B4",
        "--toolchain",
        "1.2.0",
        "--jobs",
        "1",
    )
    assert "programs: kernel overlap, program" in said
    assert status == 1
