import functools
import subprocess
import sys
from dataclasses import dataclass

import pytest
from npu_tiling import GPUResourcesError, LaunchSpec, UnifiedBufferError, is_ub_overflow, launch_with_fallback
from npu_tiling.launching import fallback

SAID = b"error: ub overflow, requires 1966592 bits while 1572864 bits available!"


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch):
    monkeypatch.setattr(fallback, "_replaced", {})


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


@functools.cache
def spec(block):
    return LaunchSpec.of(Tiling(block), {"FLAG": True})


def halve(tiling):
    return Tiling(tiling.block // 2) if tiling.block > 1 else None


def block_of(spec):
    """What a launch returns here."""
    assert spec.flags == {"FLAG": True}
    return spec.constants["BLOCK"]


def test_smaller_plan_runs_is_remembered_and_warned_of_once():
    tried = []

    def run(spec):
        tried.append(block_of(spec))
        if tried[-1] > 2:
            overflow()
        return f"ran {tried[-1]}"

    with pytest.warns(RuntimeWarning, match="kernel: .* overflows the Unified Buffer") as warned:
        assert launch_with_fallback("kernel", spec(8), run, halve) == "ran 2"
    assert tried == [8, 4, 2]
    assert len(warned) == 2  # 8 to 4, 4 to 2
    tried.clear()
    assert (
        launch_with_fallback("kernel", spec(8), run, halve) == "ran 2"
    )  # pytest turns no warning into an error: see the record
    assert tried == [2]


@pytest.mark.filterwarnings("error")
def test_a_remembered_plan_does_not_warn_again():
    fallback._replaced["kernel", spec(8)] = spec(2)
    assert launch_with_fallback("kernel", spec(8), block_of, halve) == 2


@pytest.mark.filterwarnings("error")
def test_plans_that_fit_are_left_alone():
    assert launch_with_fallback("kernel", spec(8), block_of, halve) == 8
    assert fallback._replaced == {}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nothing_smaller_is_an_error_with_its_cause():
    sentence = r"not even its smallest tile runs: Tiling\(block=1\) .* 245824 bytes of 196608\)\. Take a CANN .*8\.5"
    with pytest.raises(UnifiedBufferError, match=sentence) as raised:
        launch_with_fallback("kernel", spec(2), lambda spec: overflow(), halve)
    assert SAID in raised.value.__cause__.stderr


def test_other_errors_pass_through():
    def run(spec):
        raise KeyError("something else")

    with pytest.raises(KeyError):
        launch_with_fallback("kernel", spec(8), run, halve)


def test_overflow_is_recognised_through_its_causes():
    try:
        try:
            overflow()
        except subprocess.CalledProcessError as error:
            raise RuntimeError("compilation failed") from error
    except RuntimeError as error:
        assert is_ub_overflow(error)
    assert not is_ub_overflow(ValueError("L1 overflow"))
    assert not is_ub_overflow(None)


def test_a_note_of_an_overflow_before_another_trial_is_no_overflow():
    """Compiler 1.2.0 says this and tries again without; what it fails with then may be anything."""
    note = "[NOTE] Ub overflow detected; automatically set enable-code-motion to false and retrying compilation."
    assert not is_ub_overflow(RuntimeError(f"{note}\nerror: failed to run the pass pipeline"))
    assert is_ub_overflow(RuntimeError(f"{note}\n{SAID.decode()}"))


class OutOfResources(Exception):  # noqa: N818
    """As Triton's, which is no error of a compiler."""

    def __str__(self):
        return "out of resource: shared memory, Required: 262208, Hardware limit: 232448."


def test_a_kernel_that_a_device_has_no_room_for_runs_smaller():
    tried = []

    def run(spec):
        tried.append(block_of(spec))
        if tried[-1] > 2:
            raise OutOfResources
        return tried[-1]

    with pytest.warns(
        RuntimeWarning, match=r"kernel: Tiling\(block=4\) needs more than this GPU has .*Required: 262208"
    ) as warned:
        assert launch_with_fallback("kernel", spec(4), run, halve) == 2
    assert len(warned) == 1
    assert launch_with_fallback("kernel", spec(4), run, halve) == 2
    assert tried == [4, 2, 2]


def test_an_error_of_another_kind_is_raised():
    with pytest.raises(RuntimeError, match="illegal"):
        launch_with_fallback("kernel", spec(8), lambda spec: illegal(), halve)


def illegal():
    raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")


def test_nothing_smaller_on_a_device_is_an_error_with_its_cause():
    def run(spec):
        raise OutOfResources

    sentence = r"not even its smallest tile runs: Tiling\(block=1\) .*shared memory, Required: 262208"
    with pytest.raises(GPUResourcesError, match=sentence) as raised:
        launch_with_fallback("kernel", spec(1), run, halve)
    assert not isinstance(raised.value, UnifiedBufferError)
    assert isinstance(raised.value.__cause__, OutOfResources)
