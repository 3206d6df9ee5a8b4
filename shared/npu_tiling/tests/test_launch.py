import contextlib
import sys
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from npu_tiling import Kernels, Launcher, MissingTritonError, Recipe, import_kernels


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


class Accelerator:
    """A stand-in for torch.npu or torch.cuda with two devices, of which the first is current."""

    def __init__(self):
        self.current = 0

    def current_device(self):
        return self.current

    @contextlib.contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        yield
        self.current = before


class Compiled:
    """A stand-in for a compiled kernel, that notes how it is called."""

    function, packed_metadata = "function", "packed metadata"

    def __init__(self, accelerator):
        self.calls = []
        self.run = lambda *arguments: self.calls.append((accelerator.current, arguments))


class Launch:
    """A stand-in for triton-ascend's launcher: a function in C, and Python around it."""

    def __init__(self, launch):
        self.launch, self.wrapped = launch, 0

    def __call__(self, *arguments):
        self.wrapped += 1
        self.launch(*arguments)


class Wrapped(Compiled):
    def __init__(self, accelerator):
        super().__init__(accelerator)
        self.run = Launch(self.run)


class Kernel:
    """A stand-in for a @triton.jit function: `jit` has every launch through it, and `compiled` every kernel it made.

    It compiles as Triton does: for other types, for an integer that is 1, for multiples of 16, for what needs 64 bits.
    """

    def __init__(self, accelerator, plain=(), call=None, pre_run_hooks=(), wrapped=False, stream="the JIT's stream"):
        self.accelerator, self.jit, self.compiled = accelerator, [], {}
        self.pre_run_hooks, self.wrapped, self.stream = pre_run_hooks, wrapped, stream
        self.params = [SimpleNamespace(do_not_specialize=name in plain) for name in ("p", "q", "n", "scale", "BLOCK")]
        self.call = call or (lambda compiled, *arguments: compiled.run(*arguments))

    def __getitem__(self, grid):
        def launch(*arguments, **keywords):
            options = {name: keywords.pop(name) for name in list(keywords) if name == "option"}
            self.jit.append((self.accelerator.current, grid, arguments, {**keywords, **options}))
            key = tuple(map(self.specialised, self.params, (*arguments, *keywords.values()))), tuple(options.items())
            compiled = self.compiled.setdefault(key, (Wrapped if self.wrapped else Compiled)(self.accelerator))
            marks = (None, "enter hook", "leave hook")
            handles = (compiled.function, compiled.packed_metadata)
            self.call(compiled, *grid, 1, 1, self.stream, *handles, *marks, *arguments, *keywords.values())
            return compiled

        return launch

    def specialised(self, parameter, value):
        if isinstance(value, SimpleNamespace):
            return value.dtype
        if type(value) is not int:
            return type(value)
        if parameter.do_not_specialize:
            return abs(value) >= 2**31
        return 1 if value == 1 else (value % 16 == 0, abs(value) >= 2**31)


Device = namedtuple("Device", "type index")


def tensor_on(kind, index, address=256, dtype="fp32"):
    device = Device(kind, index)
    return SimpleNamespace(device=device, data_ptr=lambda: address, is_cuda=kind == "cuda", dtype=dtype)


def triton():
    """A stand-in for the module, as much of it as a direct call needs."""
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[]))
    active = SimpleNamespace(get_current_stream=lambda index: f"stream of {index}")
    return SimpleNamespace(
        knobs=SimpleNamespace(runtime=hooks),
        runtime=SimpleNamespace(driver=SimpleNamespace(active=active)),
    )


def triton_ascend():
    """The same for triton-ascend 3.2, which keeps hooks elsewhere."""
    hooks = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    return SimpleNamespace(
        backends=SimpleNamespace(backends={"ascend": None}),
        compiler=SimpleNamespace(CompiledKernel=hooks),
        runtime=triton().runtime,
    )


ASCEND = {"wrapped": True, "stream": "stream of 0"}  # how a Kernel is there


@pytest.fixture
def ascend(launch, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", triton_ascend())
    return sys.modules["triton"].compiler.CompiledKernel


@pytest.fixture
def launch(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", triton())

    def launch(*tensors, times=1, scalars=((3, 0.5),), options=({"option": 1},), grid=7, **kernel_has):
        accelerator = Accelerator()
        monkeypatch.setattr(torch, tensors[0].device.type, accelerator, raising=False)
        kernel = Kernel(accelerator, **kernel_has)
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
    tensor = tensor_on(kind, 1)
    assert launch(tensor).jit == [(1, (7,), (tensor, None, 3, 0.5), {"BLOCK": 64, "option": 1})]


def test_a_compiled_cuda_kernel_is_called_directly_with_its_constants_once_the_jit_was_watched(launch):
    tensor = tensor_on("cuda", 0)
    kernel = launch(tensor, times=4)
    (compiled,) = kernel.compiled.values()
    assert len(kernel.jit) == 2
    of_the_jit = (7, 1, 1, "the JIT's stream", "function", "packed metadata", None, "enter hook", "leave hook")
    direct = (7, 1, 1, "stream of 0", "function", "packed metadata", None, None, None)
    assert compiled.calls == [(0, (*of_the_jit, tensor, None, 3, 0.5, 64))] * 2 + [(0, (*direct, 256, None, 3, 0.5, 64))] * 2


def test_a_compiled_ascend_kernel_is_called_directly_with_its_tensors(launch, ascend):
    tensor = tensor_on("npu", 0)
    kernel = launch(tensor, times=4, call=no_constants, **ASCEND)
    (compiled,) = kernel.compiled.values()
    assert len(kernel.jit) == 2
    direct = (7, 1, 1, "stream of 0", "function", "packed metadata", None, None, None, tensor, None, 3, 0.5)
    assert [values for _, values in compiled.calls[2:]] == [direct] * 2
    assert compiled.run.wrapped == 2  # by the JIT: a direct call leaves the Python around it out


def test_an_ascend_kernel_of_another_device_is_called_there(launch, ascend):
    kernel = launch(tensor_on("npu", 1), times=4, call=no_constants, wrapped=True, stream="stream of 1")
    (compiled,) = kernel.compiled.values()
    assert len(kernel.jit) == 2 and [device for device, _ in compiled.calls] == [1] * 4
    assert compiled.calls[-1][1][3] == "stream of 1"


def test_where_the_current_stream_is_not_the_one_that_the_jit_takes_every_launch_goes_through_it(launch, ascend):
    assert len(launch(tensor_on("npu", 0), times=5, wrapped=True, stream="another").jit) == 5


def test_grids_that_triton_ascend_refuses_are_left_to_it(launch, ascend):
    assert len(launch(tensor_on("npu", 0), times=5, grid=65536, **ASCEND).jit) == 5


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_of_triton_ascend_sees_every_launch(launch, ascend, hook):
    setattr(ascend, hook, print)
    assert len(launch(tensor_on("npu", 0), times=5, **ASCEND).jit) == 5


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_what_runs_before_a_kernel_runs_before_every_launch(launch, kind):
    assert len(launch(tensor_on(kind, 0), times=5, pre_run_hooks=[print], stream="stream of 0").jit) == 5


KINDS = [
    *((3, 0.5), (1, 0.5), (1.0, 0.5), (True, 0.5), (False, 0.5), (16, 0.5), (2**31, 0.5), (2**31 + 3, 0.5), (0, 0.5)),
    *((3, 1), (3, 0)),
]


def test_a_direct_call_is_of_the_kernel_that_the_jit_would_call(launch):
    kernel = launch(tensor_on("cuda", 0), times=4, scalars=KINDS)
    calls = [(compiled, values[9:]) for compiled in kernel.compiled.values() for _, values in compiled.calls]
    assert len(calls) == 4 * len(KINDS)
    keys = {compiled: key for key, compiled in kernel.compiled.items()}
    for compiled, (_, _, *scalars, block) in calls:
        of_scalars = tuple(map(kernel.specialised, kernel.params[2:], (*scalars, block)))
        assert keys[compiled][0][2:] == of_scalars, scalars
    assert len(kernel.jit) < len(calls)


def test_numbers_that_are_not_specialised_share_a_kernel(launch):
    numbers = [(3, 0.5), (1, 0.5), (16, 0.5)]
    assert len(launch(tensor_on("cuda", 0), times=4, scalars=numbers, plain=("n",)).jit) == 2
    assert len(launch(tensor_on("cuda", 0), times=4, scalars=[*numbers, (2**31, 0.5)], plain=("n",)).jit) == 4


def test_other_dtypes_and_options_are_other_kernels(launch, monkeypatch):
    options = ({"option": 1}, {"option": 2})
    assert len(launch(tensor_on("cuda", 0), times=4, options=options).jit) == 4
    accelerator = Accelerator()
    monkeypatch.setattr(torch, "cuda", accelerator)
    kernel = Kernel(accelerator)
    launcher = Launcher(kernel)
    for dtype in ("fp32", "bf16") * 3:
        launcher(7, (tensor_on("cuda", 0, dtype=dtype), None), (3, 0.5), {"BLOCK": 64}, {}, "k")
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
    assert len(launch(tensor_on("cuda", 0), times=5, call=call).jit) == 5


def test_where_triton_leaves_constants_out_a_direct_call_does(launch):
    kernel = launch(tensor_on("cuda", 0), times=4, call=no_constants)
    (compiled,) = kernel.compiled.values()
    assert len(kernel.jit) == 2 and compiled.calls[-1][1][9:] == (256, None, 3, 0.5)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("watch", [lambda *_: None, SimpleNamespace(calls=[print])], ids=["function", "chain"])
def test_a_profiler_sees_every_launch(launch, hook, watch):
    setattr(sys.modules["triton"].knobs.runtime, hook, watch)
    assert len(launch(tensor_on("cuda", 0), times=3).jit) == 3


def test_a_tensor_elsewhere_is_left_to_the_jit_to_refuse(launch):
    assert len(launch(tensor_on("cuda", 0), tensor_on("cpu", None), times=3).jit) == 3


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_pointers_that_are_not_aligned_go_through_the_jit(launch, kind):
    assert len(launch(tensor_on(kind, 0, address=264), times=3, stream="stream of 0").jit) == 3


@pytest.mark.parametrize("missing", ["knobs", "runtime"])
def test_a_triton_without_what_a_direct_call_needs_goes_through_the_jit(launch, monkeypatch, missing):
    monkeypatch.delattr(sys.modules["triton"], missing)
    assert len(launch(tensor_on("cuda", 0), times=4).jit) == 4


@dataclass(frozen=True)
class Rows:
    """A tiling's result, as a package has it."""

    block: int

    @property
    def constants(self):
        return {"BLOCK": self.block}

    @property
    def options(self):
        return {"num_warps": 4}


def halved(launch):
    return Rows(launch.block // 2) if launch.block > 1 else None


def test_a_recipe_keeps_its_modes_when_it_shrinks():
    recipe = Recipe.of(Rows(2), {"MODE": True})
    smaller = recipe.smaller(halved)
    assert recipe.constants == {"BLOCK": 2, "MODE": True} and smaller.constants == {"BLOCK": 1, "MODE": True}
    assert smaller.smaller(halved) is None


def test_recipes_share_a_compiled_kernel_only_if_all_is_equal():
    recipes = [Recipe.of(Rows(block), {"MODE": mode}) for block in (1, 2) for mode in (0, 1, True, 1.0)]
    assert len({recipe.key for recipe in recipes}) == len(recipes)
    assert Recipe.of(Rows(2), {"MODE": 1}).key == recipes[5].key != Recipe.of(Rows(2), {"OTHER": 1}).key


def test_kernels_are_imported_at_their_first_launch(monkeypatch, tmp_path):
    package = tmp_path / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kernels.py").write_text("launched = []\nkernel = {(3,): lambda *a, **k: launched.append((a, k))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    kernels = Kernels("package_of_mine", "mine")
    assert "package_of_mine.kernels" not in sys.modules
    x = torch.ones(1)
    for _ in range(2):
        kernels.launch("kernels", "kernel", Recipe.of(Rows(2), {"MODE": 1}), 3, (x, None), (7,))
    launched = sys.modules["package_of_mine.kernels"].launched
    assert launched == [((x, None, 7), {"BLOCK": 2, "MODE": 1, "num_warps": 4})] * 2
