"""Direct launches against a stock Triton, whichever release is installed: its JIT and its compiler are its own, the driver
under them is made up. `python -m tools.stock_triton` runs this with each release that npu-tiling allows.
"""

import gc
import importlib
import inspect
import itertools
from types import SimpleNamespace

import pytest
import torch
from npu_tiling import Launcher, direct
from npu_tiling import doctor as installation
from npu_tiling.direct import Watchers, specialisation, unspecialised

pytestmark = pytest.mark.slow
INTS = [0, 1, 3, 16, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**31 + 16, 2**63, 2**64 - 16]
NUMBERS = [*INTS, 0.0, 1.0, 16.0, True, False]
LAUNCHES = {
    "as it was": (torch.float32, 0, 40, 64, 2.0),
    "n is 1": (torch.float32, 0, 1, 64, 2.0),
    "n is a multiple of 16": (torch.float32, 0, 48, 64, 2.0),
    "n needs 64 bits": (torch.float32, 0, 2**31, 64, 2.0),
    "the stride is 1": (torch.float32, 0, 40, 1, 2.0),
    "a whole number in a float's place": (torch.float32, 0, 40, 64, 2),
    "1 in a float's place": (torch.float32, 0, 40, 64, 1),
    "another dtype": (torch.bfloat16, 0, 40, 64, 2.0),
    "not aligned": (torch.float32, 4, 40, 64, 2.0),
}


class OnCuda:
    """A stand-in for a tensor of a GPU: an address and a dtype."""

    device, is_cuda = torch.device("cuda", 0), True

    def __init__(self, dtype, address):
        self.dtype, self._address = dtype, address

    def data_ptr(self):
        return self._address


class Driver:
    """A stand-in for CUDA's: kernels are loaded by number, and `calls` has every launch."""

    def __init__(self, target, results):
        self.calls, self._target, self._results, self._numbers = [], target, results, itertools.count()
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 2**17},
            load_binary=self.load,
            unload_module=lambda module: None,
        )

    def load(self, name, binary, shared, device):
        assert len(binary) > 100
        return ("module", next(self._numbers), 32, 0, 1024)[: self._results]

    def launcher_cls(self, source, metadata):
        return lambda *arguments: self.calls.append(arguments)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return "stream"

    def get_current_target(self):
        return self._target


@pytest.fixture
def triton(monkeypatch, tmp_path):
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if installation.version("triton-ascend") is not None:
        pytest.skip("triton-ascend is installed, in the place of a stock Triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return triton


@pytest.fixture
def driver(triton, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel

    five = "n_max_threads" in inspect.getsource(CompiledKernel)
    driver = Driver(GPUTarget("cuda", 90, 32), 5 if five else 4)
    holder = triton.runtime.driver
    monkeypatch.setattr(holder, "_active" if hasattr(holder, "_active") else "active", driver)
    return driver


@pytest.fixture
def kernels(driver):
    """The module of kernels, imported anew: what its functions compile is one test's, and goes before its driver does."""
    import direct_kernels

    yield importlib.reload(direct_kernels)
    names = ("scale_rows", "scale_rows_unspecialised", "add_listed", "copy_block")
    for kernel in (getattr(direct_kernels, name) for name in names):
        getattr(kernel, "device_caches" if hasattr(kernel, "device_caches") else "cache").clear()
    gc.collect()


@pytest.mark.parametrize("name", ["scale_rows", "scale_rows_unspecialised"])
def test_numbers_with_one_key_here_have_one_key_in_the_jit(triton, kernels, name, monkeypatch):
    theirs = []

    def hook(*, key, **_):
        theirs.append(key)
        return True  # nothing is compiled

    if hasattr(triton, "knobs"):
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    else:
        monkeypatch.setattr(triton.runtime.jit.JITFunction, "cache_hook", hook)
    kernel, x, seen = getattr(kernels, name), OnCuda(torch.float32, 256), {}
    for scalars in itertools.product(NUMBERS, NUMBERS, [0.5, 1.0, 2]):
        kernel[(2,)](x, x, *scalars, BLOCK=64)
        here = tuple(specialisation(scalars, unspecialised(kernel)[2:]))
        assert seen.setdefault(here, theirs[-1]) == theirs[-1], scalars
    assert 1 < len(seen) < len(theirs)  # numbers do share kernels
    assert len(set(theirs)) > 1


def addresses(call, marks=6):
    """A launch without its metadata and hooks, which begin at `marks`, its tensors as addresses."""

    def address(value):
        if type(value) is tuple and value and isinstance(value[0], (OnCuda, int)):
            return tuple(map(address, value))
        return value.data_ptr() if isinstance(value, OnCuda) else value

    return [*map(address, [*call[:marks], *call[marks + 3 :]])]


def arguments(name):
    dtype, offset, *scalars = LAUNCHES[name]
    return (OnCuda(dtype, 4096 + offset), OnCuda(dtype, 8192)), tuple(scalars)


def test_every_launch_is_the_jits(driver, kernels):
    launcher, expected = Launcher(kernels.scale_rows), {}
    for name in LAUNCHES:
        tensors, scalars = arguments(name)
        kernels.scale_rows[(2,)](*tensors, *scalars, BLOCK=64, num_warps=2)
        expected[name] = addresses(driver.calls.pop())
    kernels_used = {call[4] for call in expected.values()}
    assert len(kernels_used) == len(LAUNCHES)
    for name in [name for name in LAUNCHES for _ in range(4)] * 2:  # the first of each is direct before the next is met
        launcher(2, *arguments(name), {"BLOCK": 64}, {"num_warps": 2}, "key")
        assert len(driver.calls) == 1, name
        assert addresses(driver.calls.pop()) == expected[name], name


def test_the_third_launch_does_without_the_jit(triton, driver, kernels, monkeypatch):
    if not Watchers(triton, kernels.scale_rows).known:
        pytest.skip(f"Triton {triton.__version__} keeps its hooks where they are not looked for: the JIT launches")
    seen, run = [], type(kernels.scale_rows).run
    monkeypatch.setattr(type(kernels.scale_rows), "run", lambda *given, **named: seen.append(1) or run(*given, **named))
    launcher = Launcher(kernels.scale_rows)
    for _ in range(5):
        launcher(2, *arguments("as it was"), {"BLOCK": 64}, {}, "key")
    assert (len(seen), len(driver.calls)) == (2, 5)


@pytest.mark.parametrize("scratch", [0, 64])
def test_tritons_wrapper_is_left_out_for_kernels_without_scratch_memory(triton, driver, kernels, monkeypatch, scratch):
    from triton.backends.nvidia.driver import CudaLauncher

    if not (Watchers(triton, kernels.scale_rows).known and direct._adds_nothing(CudaLauncher.__new__(CudaLauncher))):
        pytest.skip(f"Triton {triton.__version__} keeps its hooks elsewhere, or its wrapper is one that is not left out")
    launch = lambda *given: driver.calls.append(given)  # noqa: E731

    def make(source, metadata):
        wrapper = CudaLauncher.__new__(CudaLauncher)
        sizes = {"num_ctas": 1, "global_scratch_size": scratch, "global_scratch_align": 1}
        vars(wrapper).update(sizes, profile_scratch_size=0, profile_scratch_align=1, launch=launch)
        vars(wrapper).update(launch_cooperative_grid=False, launch_pdl=False)
        return wrapper

    monkeypatch.setattr(driver, "launcher_cls", make)
    triton.set_allocator(lambda size, alignment, stream: OnCuda(torch.int8, size))
    launcher, (tensors, scalars) = Launcher(kernels.scale_rows), arguments("as it was")
    for _ in range(5):
        launcher(2, tensors, scalars, {"BLOCK": 64}, {}, "key")
    assert len(driver.calls) == 5
    assert addresses(driver.calls[1], 10) == addresses(driver.calls[-1], 10)  # the JIT's, and one without it
    (call,) = launcher._calls.values()
    assert (call.run is launch) == (scratch == 0)


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32] * 3, [torch.float32, torch.bfloat16, torch.float32]])
def test_tuples_of_tensors_are_launched_as_the_jit_launches_them(triton, driver, kernels, dtypes, monkeypatch):
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):
        pytest.skip("Triton chooses among a tuple's pointers from 3.4 on")
    if not Watchers(triton, kernels.add_listed).known:
        pytest.skip(f"Triton {triton.__version__} keeps its hooks where they are not looked for: the JIT launches")
    x, y = OnCuda(torch.float32, 4096), OnCuda(torch.float32, 8192)
    others = tuple(OnCuda(dtype, 256 * (i + 1)) for i, dtype in enumerate(dtypes))
    kernels.add_listed[(2,)](x, others, y, 40, BLOCK=64)
    expected = addresses(driver.calls.pop())
    seen, run = [], type(kernels.add_listed).run
    monkeypatch.setattr(type(kernels.add_listed), "run", lambda *given, **named: seen.append(1) or run(*given, **named))
    launcher = Launcher(kernels.add_listed)
    for _ in range(5):
        launcher(2, (x, others, y), (40,), {"BLOCK": 64}, {}, "key")
        assert addresses(driver.calls.pop()) == expected
    assert len(seen) == 2
    launcher(2, (x, others[:-1] + (OnCuda(torch.float16, 512),), y), (40,), {"BLOCK": 64}, {}, "key")
    assert addresses(driver.calls.pop())[4] != expected[4]  # another dtype in the tuple: another kernel
    assert len(seen) == 3


def test_a_hook_of_triton_sees_every_launch(triton, driver, kernels, monkeypatch):
    if not Watchers(triton, kernels.scale_rows).known:
        pytest.skip(f"Triton {triton.__version__} keeps its hooks where they are not looked for: the JIT launches")
    launcher, tensors = Launcher(kernels.scale_rows), arguments("as it was")
    for _ in range(3):
        launcher(2, *tensors, {"BLOCK": 64}, {}, "key")

    def hook(*_):
        """Triton calls it in its launcher, which is made up here."""

    enter = triton.knobs.runtime.launch_enter_hook
    if hasattr(enter, "add"):
        enter.add(hook)
    else:
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
    launcher(2, *tensors, {"BLOCK": 64}, {}, "key")
    if hasattr(enter, "remove"):
        enter.remove(hook)
    without, watched = driver.calls[-2:]
    assert without[6:9] == (None, None, None)
    assert watched[6] is not None and watched[7] is not None  # launch metadata and the hook, as the JIT hands them on


class MatrixOnCuda(OnCuda):
    """One of which descriptors can be made."""

    shape, dim = torch.Size([8, 64]), lambda self: 2
    ndim = 2

    def stride(self):
        return 64, 1

    def element_size(self):
        return self.dtype.itemsize


def test_descriptors_are_launched_as_the_jit_launches_them(triton, driver, kernels, monkeypatch):
    described = pytest.importorskip("triton.tools.tensor_descriptor", reason="Triton before 3.4 has none").TensorDescriptor
    if not Watchers(triton, kernels.copy_block).known:
        pytest.skip(f"Triton {triton.__version__} keeps its hooks where they are not looked for: the JIT launches")
    x, y = OnCuda(torch.float32, 4096), OnCuda(torch.float32, 8192)

    def blocks(dtype, address, length):
        return described.from_tensor(MatrixOnCuda(dtype, address), [1, length])

    launcher, seen, run = Launcher(kernels.copy_block), [], type(kernels.copy_block).run
    monkeypatch.setattr(type(kernels.copy_block), "run", lambda *given, **named: seen.append(1) or run(*given, **named))

    def launched(block, length=64):
        launcher(2, (x, y, block), (40,), {"BLOCK": length}, {}, length)
        found = driver.calls.pop()
        assert any(value is block for value in found)  # a map of the memory is made of it, at every launch
        return addresses(found)[4]  # the compiled kernel

    first = launched(blocks(torch.float32, 0, 64))
    assert [launched(blocks(torch.float32, 256 * i, 64)) for i in range(4)] == [first] * 4
    assert len(seen) == 2
    assert launched(None) != first and launched(blocks(torch.float16, 0, 64)) != first
    assert launched(blocks(torch.float32, 0, 32), 32) != first
    assert len(seen) == 5
