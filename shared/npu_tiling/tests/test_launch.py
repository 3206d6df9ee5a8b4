"""Launches on stand-ins for Triton: which of them go through its JIT, and which call the compiled kernel."""

import sys
from types import SimpleNamespace

import fake_triton
import pytest
import torch
from npu_tiling import Launcher

ASCEND = {"wrapped": True, "stream": "stream of 0"}  # how a Kernel is there


@pytest.fixture
def ascend(launch, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", fake_triton.triton_ascend())
    return sys.modules["triton"].compiler.CompiledKernel


@pytest.fixture
def launch(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", fake_triton.triton())
    monkeypatch.setattr("npu_tiling.dispatch.current_cuda_device", lambda: torch.cuda.current_device())  # of a stand-in

    def launch(*tensors, times=1, scalars=((3, 0.5),), options=({"option": 1},), grid=7, **kernel_has):
        accelerator = fake_triton.Accelerator()
        monkeypatch.setattr(torch, tensors[0].device.type, accelerator, raising=False)
        kernel = fake_triton.Kernel(accelerator, **kernel_has)
        launcher = Launcher(kernel)
        for _ in range(times):
            for numbers in scalars:
                for option in options:
                    launcher(grid, (*tensors, None)[:2], numbers, {"BLOCK": 64}, option, tuple(option.items()))
        assert accelerator.current == 0
        return kernel

    return launch


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_kernels_run_on_the_device_of_their_tensors(launch, kind):
    tensor = fake_triton.tensor_on(kind, 1)
    assert launch(tensor).jit == [(1, (7,), (tensor, None, 3, 0.5), {"BLOCK": 64, "option": 1})]


def test_a_compiled_cuda_kernel_is_called_directly_with_its_constants_once_the_jit_was_watched(launch):
    tensor = fake_triton.tensor_on("cuda", 0)
    kernel = launch(tensor, times=4)
    (compiled,) = kernel.compiled.values()
    assert len(kernel.jit) == 2
    of_the_jit = (7, 1, 1, "the JIT's stream", "function", "packed metadata", None, "enter hook", "leave hook")
    direct = (7, 1, 1, "stream of 0", "function", "packed metadata", None, None, None)
    assert compiled.calls == [(0, (*of_the_jit, tensor, None, 3, 0.5, 64))] * 2 + [(0, (*direct, 256, None, 3, 0.5, 64))] * 2


def test_a_compiled_ascend_kernel_is_called_directly_with_its_tensors(launch, ascend):
    tensor = fake_triton.tensor_on("npu", 0)
    kernel = launch(tensor, times=4, call=no_constants, **ASCEND)
    (compiled,) = kernel.compiled.values()
    assert len(kernel.jit) == 2
    direct = (7, 1, 1, "stream of 0", "function", "packed metadata", None, None, None, tensor, None, 3, 0.5)
    assert [values for _, values in compiled.calls[2:]] == [direct] * 2
    assert len(compiled.run.wrapped) == 2  # by the JIT: a direct call leaves the Python around it out


def test_a_wrapper_that_is_not_known_is_called_as_the_jit_calls_it(launch, ascend):
    """Nobody has seen what it does besides, as 3.2.1's."""
    later = {**ASCEND, "wrapped": "later"}
    kernel = launch(fake_triton.tensor_on("npu", 0), times=4, call=no_constants, **later)
    (compiled,) = kernel.compiled.values()
    assert len(kernel.jit) == 2
    assert compiled.run.wrapped == [values for _, values in compiled.calls] and len(compiled.calls) == 4


def test_a_triton_ascend_of_triton_3_6_is_called_with_its_constants(launch):
    """It keeps hooks where Triton does, passes constants on, and its wrapper names what 3.2.0's does not."""
    tensor = fake_triton.tensor_on("npu", 0)
    kernel = launch(tensor, times=4, wrapped="later", stream="stream of 0")
    (compiled,) = kernel.compiled.values()
    assert len(kernel.jit) == 2
    direct = (7, 1, 1, "stream of 0", "function", "packed metadata", None, None, None, tensor, None, 3, 0.5, 64)
    assert compiled.run.wrapped[2:] == [values for _, values in compiled.calls[2:]] == [direct] * 2


def test_an_ascend_kernel_of_another_device_is_called_there(launch, ascend):
    kernel = launch(fake_triton.tensor_on("npu", 1), times=4, call=no_constants, wrapped=True, stream="stream of 1")
    (compiled,) = kernel.compiled.values()
    assert len(kernel.jit) == 2 and [device for device, _ in compiled.calls] == [1] * 4
    assert compiled.calls[-1][1][3] == "stream of 1"


def test_where_the_current_stream_is_not_the_one_that_the_jit_takes_every_launch_goes_through_it(launch, ascend):
    assert len(launch(fake_triton.tensor_on("npu", 0), times=5, wrapped=True, stream="another").jit) == 5


def test_grids_that_triton_ascend_refuses_are_left_to_it(launch, ascend):
    assert len(launch(fake_triton.tensor_on("npu", 0), times=5, grid=65536, **ASCEND).jit) == 5


def test_a_cuda_kernel_of_more_programs_than_triton_ascend_takes_is_called_directly(launch):
    assert len(launch(fake_triton.tensor_on("cuda", 0), times=5, grid=65536).jit) == 2


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_of_triton_ascend_sees_every_launch(launch, ascend, hook):
    setattr(ascend, hook, print)
    assert len(launch(fake_triton.tensor_on("npu", 0), times=5, **ASCEND).jit) == 5


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_what_runs_before_a_kernel_runs_before_every_launch(launch, kind):
    assert len(launch(fake_triton.tensor_on(kind, 0), times=5, pre_run_hooks=[print], stream="stream of 0").jit) == 5


KINDS = [
    *((3, 0.5), (1, 0.5), (1.0, 0.5), (True, 0.5), (False, 0.5), (16, 0.5), (2**31, 0.5), (2**31 + 3, 0.5), (0, 0.5)),
    *((3, 1), (3, 0)),
]


def test_a_direct_call_is_of_the_kernel_that_the_jit_would_call(launch):
    kernel = launch(fake_triton.tensor_on("cuda", 0), times=4, scalars=KINDS)
    calls = [(compiled, values[9:]) for compiled in kernel.compiled.values() for _, values in compiled.calls]
    assert len(calls) == 4 * len(KINDS)
    keys = {compiled: key for key, compiled in kernel.compiled.items()}
    for compiled, (_, _, *scalars, block) in calls:
        of_scalars = tuple(map(kernel.specialised, kernel.params[2:], (*scalars, block)))
        assert keys[compiled][0][2:] == of_scalars, scalars
    assert len(kernel.jit) < len(calls)


def test_numbers_that_are_not_specialised_share_a_kernel(launch):
    numbers = [(3, 0.5), (1, 0.5), (16, 0.5)]
    assert len(launch(fake_triton.tensor_on("cuda", 0), times=4, scalars=numbers, plain=("n",)).jit) == 2
    assert len(launch(fake_triton.tensor_on("cuda", 0), times=4, scalars=[*numbers, (2**31, 0.5)], plain=("n",)).jit) == 4


def test_other_dtypes_and_options_are_other_kernels(launch, monkeypatch):
    options = ({"option": 1}, {"option": 2})
    assert len(launch(fake_triton.tensor_on("cuda", 0), times=4, options=options).jit) == 4
    accelerator = fake_triton.Accelerator()
    monkeypatch.setattr(torch, "cuda", accelerator)
    kernel = fake_triton.Kernel(accelerator)
    launcher = Launcher(kernel)
    for dtype in ("fp32", "bf16") * 3:
        launcher(7, (fake_triton.tensor_on("cuda", 0, dtype=dtype), None), (3, 0.5), {"BLOCK": 64}, {}, "k")
    assert len(kernel.jit) == 4 and [len(compiled.calls) for compiled in kernel.compiled.values()] == [3, 3]


def no_constants(compiled, *values):
    compiled.run(*values[:-1])


def other_arguments(compiled, *values):
    compiled.run(*values[:9], "descriptor", *values[10:])


def no_address(compiled, *values):
    if not hasattr(compiled, "wrapped"):
        compiled.wrapped, run = True, compiled.run

        def checked(*values):
            if isinstance(values[9], int):
                raise TypeError("Pointer argument must have data_ptr method")
            run(*values)

        compiled.run = checked
    compiled.run(*values)


@pytest.mark.parametrize("call", [other_arguments, no_address])
def test_where_triton_calls_its_kernels_in_another_way_every_launch_goes_through_it(launch, call):
    assert len(launch(fake_triton.tensor_on("cuda", 0), times=5, call=call).jit) == 5


def test_where_triton_leaves_constants_out_a_direct_call_does(launch):
    kernel = launch(fake_triton.tensor_on("cuda", 0), times=4, call=no_constants)
    (compiled,) = kernel.compiled.values()
    assert len(kernel.jit) == 2 and compiled.calls[-1][1][9:] == (256, None, 3, 0.5)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("watch", [lambda *_: None, SimpleNamespace(calls=[print])], ids=["function", "chain"])
def test_a_profiler_sees_every_launch(launch, hook, watch):
    setattr(sys.modules["triton"].knobs.runtime, hook, watch)
    assert len(launch(fake_triton.tensor_on("cuda", 0), times=3).jit) == 3


def test_a_tensor_elsewhere_is_left_to_the_jit_to_refuse(launch):
    assert len(launch(fake_triton.tensor_on("cuda", 0), fake_triton.tensor_on("cpu", None), times=3).jit) == 3


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_pointers_that_are_not_aligned_go_through_the_jit(launch, kind):
    assert len(launch(fake_triton.tensor_on(kind, 0, address=264), times=3, stream="stream of 0").jit) == 3


@pytest.mark.parametrize("missing", ["knobs", "runtime"])
def test_a_triton_without_what_a_direct_call_needs_goes_through_the_jit(launch, monkeypatch, missing):
    monkeypatch.delattr(sys.modules["triton"], missing)
    assert len(launch(fake_triton.tensor_on("cuda", 0), times=4).jit) == 4
