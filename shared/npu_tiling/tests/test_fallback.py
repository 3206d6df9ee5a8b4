"""What follows where a compiler or a device has no room for a tile."""

import subprocess
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch
from npu_tiling import GPUResourcesError, UnifiedBufferError, launch, soc
from npu_tiling.plans import Plan, run_plan

SAID = b"error: ub overflow, requires 1966592 bits while 1572864 bits available!"


def overflow():
    """The error as Triton raises it: a compiler that failed, its complaint on stderr."""
    code = f"import sys; sys.stderr.write({SAID.decode()!r}); sys.exit(1)"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@dataclass(frozen=True)
class Tiling:
    """Of a kernel with one block."""

    block: int
    options = {}

    @property
    def constants(self):
        return {"BLOCK": self.block}

    def smaller(self):
        return Tiling(self.block // 2) if self.block > 1 else None


def one_kernel(p_x, BLOCK: int):
    """A kernel."""


@pytest.fixture
def run(monkeypatch):
    """run(block, attempt) runs a plan of one launch, which calls attempt(block); returns the blocks that were tried."""
    monkeypatch.setattr(launch, "replaced", {})

    def run(block, attempt):
        tried = []

        def launched(self, module, kernel, decision, *rest):
            tried.append(decision.constants["BLOCK"])
            attempt(tried[-1])

        def planned(replaced):
            p = Plan(soc("Ascend910B4"), {}, replaced)
            x = p.argument(torch.empty(4))
            p.decide("kernel", Tiling(block))
            p.launch(one_kernel, "kernel", 1, reads={"p_x": x}, writes={}, sizes={})
            return p

        monkeypatch.setattr(launch.Kernels, "launch", launched)
        run_plan(planned(launch.replaced), [torch.empty(4)], planned)
        return tried

    return run


def fits(most, error):
    """An attempt that fails for larger blocks."""

    def attempt(block):
        if block > most:
            error()

    return attempt


def test_a_smaller_tile_runs_is_remembered_and_warned_of_once(run):
    with pytest.warns(RuntimeWarning, match="kernel: .* overflows the Unified Buffer") as warned:
        assert run(8, fits(2, overflow)) == [8, 4, 2]
    assert len(warned) == 2  # 8 to 4, 4 to 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(8, fits(2, overflow)) == [2]


@pytest.mark.filterwarnings("error")
def test_tiles_that_fit_are_left_alone(run):
    assert run(8, fits(8, overflow)) == [8]
    assert launch.replaced == {}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nothing_smaller_is_an_error_with_its_cause(run):
    sentence = r"not even its smallest tile runs: Tiling\(block=1\) .* 245824 bytes of 196608\)\. Take a CANN .*8\.5"
    with pytest.raises(UnifiedBufferError, match=sentence) as raised:
        run(2, fits(0, overflow))
    assert SAID in raised.value.__cause__.stderr


@pytest.mark.parametrize("error", [KeyError("something else"), RuntimeError("an illegal memory access")])
def test_other_errors_pass_through(run, error):
    def attempt(block):
        raise error

    with pytest.raises(type(error)) as raised:
        run(8, attempt)
    assert raised.value is error


def test_overflow_is_recognised_through_its_causes():
    try:
        try:
            overflow()
        except subprocess.CalledProcessError as error:
            raise RuntimeError("compilation failed") from error
    except RuntimeError as error:
        assert launch.refusal(error).error is UnifiedBufferError
    assert launch.refusal(ValueError("L1 overflow")) is None


def test_a_note_of_an_overflow_before_another_trial_is_no_overflow():
    """Compiler 1.2.0 says this and tries again without; what it fails with then may be anything."""
    note = "[NOTE] Ub overflow detected; automatically set enable-code-motion to false and retrying compilation."
    assert launch.refusal(RuntimeError(f"{note}\nerror: failed to run the pass pipeline")) is None
    assert launch.refusal(RuntimeError(f"{note}\n{SAID.decode()}")).error is UnifiedBufferError


class OutOfResources(Exception):  # noqa: N818
    """As Triton's, which is no error of a compiler."""

    def __str__(self):
        return "out of resource: shared memory, Required: 262208, Hardware limit: 232448."


def out_of_resources():
    raise OutOfResources


def test_a_kernel_that_a_device_has_no_room_for_runs_smaller(run):
    sentence = r"kernel: Tiling\(block=4\) needs more than this GPU has .*Required: 262208"
    with pytest.warns(RuntimeWarning, match=sentence) as warned:
        assert run(4, fits(2, out_of_resources)) == [4, 2]
    assert len(warned) == 1
    assert run(4, fits(2, out_of_resources)) == [2]


def test_nothing_smaller_on_a_device_is_an_error_with_its_cause(run):
    sentence = r"not even its smallest tile runs: Tiling\(block=1\) .*shared memory, Required: 262208"
    with pytest.raises(GPUResourcesError, match=sentence) as raised:
        run(1, fits(0, out_of_resources))
    assert not isinstance(raised.value, UnifiedBufferError)
    assert isinstance(raised.value.__cause__, OutOfResources)
