"""Direct launches against triton-ascend itself: its key of a launch, and its kernels where torch_npu has a device."""

import itertools
import sys

import pytest
import torch
from npu_tiling import Launcher
from npu_tiling.direct import _adds_nothing, always_specialised, specialisation, unspecialised

INTS = [0, 1, 3, 16, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**31 + 16, 2**63, 2**64 - 16]
NUMBERS = [*INTS, 0.0, 1.0, 16.0, True, False]


@pytest.fixture
def kernels():
    pytest.importorskip("triton", reason="triton is not installed")
    import direct_kernels

    return direct_kernels


def key_of_the_jit(kernel):
    """What triton-ascend 3.2 looks a compiled kernel up by, as a function of the kernel's arguments."""
    jit = sys.modules["triton.runtime.jit"]
    if not hasattr(jit, "compute_spec_key"):
        pytest.skip("this Triton computes its keys in another way than triton-ascend 3.2")
    from triton.backends.ascend.compiler import AscendBackend
    from triton.backends.compiler import GPUTarget

    backend = AscendBackend(GPUTarget("npu", "Ascend910B4", 0))
    binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    return lambda *arguments: binder(*arguments, 64)[1]


@pytest.mark.parametrize("name", ["scale_rows", "scale_rows_unspecialised", "scale_rows_typed"])
def test_numbers_with_one_key_here_have_one_key_in_triton_ascend(kernels, name):
    kernel = getattr(kernels, name)
    key = key_of_the_jit(kernel)
    x, seen = torch.ones(16), {}
    for n, stride, scale in itertools.product(NUMBERS, NUMBERS, [0.5, 1.0, 2]):
        scalars = (n, stride, scale)
        here = tuple(specialisation(scalars, unspecialised(kernel)[2:] or always_specialised(3)))
        theirs = key(x, x, *scalars)
        assert seen.setdefault(here, theirs) == theirs, scalars
    assert len(seen) < len(NUMBERS) ** 2 * 3  # numbers do share kernels


def test_the_wrapper_of_triton_ascend_3_2_0_is_known():
    driver = pytest.importorskip("triton.backends.ascend.driver", reason="triton-ascend is not installed")
    assert _adds_nothing(driver.NPULauncher.__new__(driver.NPULauncher))


@pytest.fixture
def on_npu(npu_place, kernels):
    if npu_place.name != "npu":
        pytest.skip("direct launches are of kernels on a device, and of torch_npu's here")
    return npu_place


@pytest.fixture
def through_the_jit(kernels, monkeypatch):
    """A list with an entry for each launch that went through the JIT."""
    seen = []
    run = type(kernels.scale_rows).run

    def counted(self, *arguments, **keywords):
        seen.append(self)
        return run(self, *arguments, **keywords)

    monkeypatch.setattr(type(kernels.scale_rows), "run", counted)
    return seen


def launch(launcher, x, n, stride, scale, y=None):
    y = torch.full_like(x, float("nan")) if y is None else y
    launcher(2, (x, y), (n, stride, scale), {"BLOCK": 64}, {}, "key")
    rows = torch.arange(2, device="cpu")[:, None] * stride + torch.arange(64)
    inside = torch.arange(64).expand(2, 64) < n
    taken = rows[inside]
    assert torch.equal(y.cpu().flatten()[taken], (x.cpu().float().flatten()[taken] * scale).to(x.dtype))
    untouched = torch.ones(x.numel(), dtype=torch.bool)
    untouched[taken] = False
    assert torch.isnan(y.cpu().flatten()[untouched]).all()


def test_the_third_launch_is_direct_and_does_the_same_to_other_tensors(on_npu, kernels, through_the_jit):
    launcher = Launcher(kernels.scale_rows)
    for i in range(6):
        launch(launcher, torch.randn(4, 64, device="npu"), 40, 64, 0.5 + i)
    assert len(through_the_jit) == 2


VARIANTS = {
    "as it was": lambda x: (x, 40, 64, 2.0),
    "n is 1": lambda x: (x, 1, 64, 2.0),
    "n is a multiple of 16": lambda x: (x, 48, 64, 2.0),
    "the stride is 1": lambda x: (x, 40, 1, 2.0),
    "the stride is no multiple of 16": lambda x: (x, 40, 71, 2.0),
    "a whole number in a float's place": lambda x: (x, 40, 64, 2),
    "1 in a float's place": lambda x: (x, 40, 64, 1),
    "another dtype": lambda x: (x.to(torch.bfloat16), 40, 64, 2.0),
    "not aligned": lambda x: (x.flatten()[1:193], 40, 64, 2.0),
}


@pytest.mark.nightly
def test_every_kind_of_argument_takes_the_kernel_that_triton_ascend_takes_for_it(on_npu, kernels, through_the_jit):
    launcher = Launcher(kernels.scale_rows)
    for _ in range(4):  # the last two of each with all the others' kernels remembered
        for arguments in VARIANTS.values():
            launch(launcher, *arguments(torch.randn(4, 64, device="npu")))
    assert len(through_the_jit) == 2 * (len(VARIANTS) - 1) + 4  # what is not aligned goes through it


def test_a_kernel_remembered_for_other_arguments_is_not_called(on_npu, kernels):
    launcher = Launcher(kernels.scale_rows)
    for _ in range(3):
        launch(launcher, *VARIANTS["as it was"](torch.randn(4, 64, device="npu")))

    def poison(*_):
        raise AssertionError("the remembered kernel was called")

    ((slot, call),) = launcher._calls.items()
    launcher._calls[slot] = call._replace(run=poison)
    for name, arguments in VARIANTS.items():
        x = torch.randn(4, 64, device="npu")
        if name == "as it was":
            with pytest.raises(AssertionError, match="remembered"):
                launch(launcher, *arguments(x))
        else:
            launch(launcher, *arguments(x))


def test_a_direct_launch_is_on_the_current_stream_and_on_its_tensors_device(on_npu, kernels, through_the_jit):
    launcher = Launcher(kernels.scale_rows)
    x, y = (torch.randn(4, 64, device="npu") for _ in range(2))
    side = torch.npu.Stream()
    for _ in range(3):
        launch(launcher, x, 40, 64, 0.5)
    torch.npu.synchronize()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        launcher(2, (x, y), (40, 64, 0.5), {"BLOCK": 64}, {}, "key")
        event = side.record_event()
    torch.npu.current_stream().wait_event(event)  # without the event, the work is not done here
    assert torch.equal(y[:2, :40].cpu(), x[:2, :40].cpu() * 0.5)
    for _ in range(3):
        launch(launcher, torch.randn(4, 64, device="npu:1"), 40, 64, 0.5)
    assert torch.npu.current_device() == 0
    assert len(through_the_jit) == 4  # two on each device


def test_a_hook_of_triton_sees_every_launch(on_npu, kernels, through_the_jit, monkeypatch):
    launcher = Launcher(kernels.scale_rows)
    for _ in range(3):
        launch(launcher, torch.randn(4, 64, device="npu"), 40, 64, 0.5)
    seen = []
    compiled = pytest.importorskip("triton.compiler").CompiledKernel
    monkeypatch.setattr(compiled, "launch_enter_hook", lambda *_: seen.append(1))
    for _ in range(3):
        launch(launcher, torch.randn(4, 64, device="npu"), 40, 64, 0.5)
    assert len(seen) == 3 and len(through_the_jit) == 2 + 3


@pytest.mark.parametrize("shapes", [True, False])
def test_while_cann_profiles_every_launch_is_done_once_and_its_tensors_shapes_are_told(on_npu, kernels, shapes):
    cann = pytest.importorskip("npu_offline.cann", reason="npu-offline is not installed")
    launcher = Launcher(kernels.add_in_place)
    x, y = torch.ones(64, device="npu"), torch.zeros(64, device="npu")

    def launch(times):
        for _ in range(times):
            launcher(1, (x, y), (64,), {"BLOCK": 64}, {}, "key")
        torch.npu.synchronize()

    launch(3)
    with cann.profiling(shapes=shapes) as told:
        launch(4)
    launch(2)
    assert torch.equal(y.cpu(), torch.full((64,), 9.0))
    assert told == ([3] * 4 if shapes else [])  # y counts twice: it is read and written
