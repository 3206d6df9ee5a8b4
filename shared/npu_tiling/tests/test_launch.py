import contextlib
import sys
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


class Kernel:
    """A stand-in for a @triton.jit function; what it returns can be launched like a compiled kernel."""

    function, packed_metadata = "function", "packed metadata"

    def __init__(self, accelerator):
        self.accelerator, self.jit, self.direct = accelerator, [], []

    def __getitem__(self, grid):
        def launch(*arguments, **keywords):
            self.jit.append((self.accelerator.current, grid, arguments, keywords))
            return self

        return launch

    def run(self, *arguments):
        self.direct.append((self.accelerator.current, arguments))


def tensor_on(kind, index, address=256):
    device = SimpleNamespace(type=kind, index=index)
    return SimpleNamespace(device=device, data_ptr=lambda: address, is_cuda=kind == "cuda")


def triton_of(version):
    """A stand-in for the module, as much of it as a direct call needs."""
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[]))
    active = SimpleNamespace(get_current_stream=lambda index: f"stream of {index}")
    return SimpleNamespace(
        __version__=version,
        knobs=SimpleNamespace(runtime=hooks),
        runtime=SimpleNamespace(driver=SimpleNamespace(active=active)),
    )


@pytest.fixture
def launch(request, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", triton_of(getattr(request, "param", "3.6.0")))

    def launch(*tensors, key="k", times=1):
        accelerator = Accelerator()
        monkeypatch.setattr(torch, tensors[0].device.type, accelerator, raising=False)
        kernel = Kernel(accelerator)
        launcher = Launcher(kernel)
        for _ in range(times):
            launcher(7, (*tensors, None), (3, 0.5), {"BLOCK": 64}, {"option": 1}, key)
        assert accelerator.current == 0
        return kernel

    return launch


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_kernels_run_on_the_device_of_their_tensors(launch, kind):
    tensor = tensor_on(kind, 1)
    assert launch(tensor).jit == [(1, (7,), (tensor, None, 3, 0.5), {"BLOCK": 64, "option": 1})]


def test_a_compiled_cuda_kernel_is_called_directly_with_its_constants(launch):
    tensor = tensor_on("cuda", 0)
    kernel = launch(tensor, times=3)
    assert len(kernel.jit) == 1
    compiled = (7, 1, 1, "stream of 0", "function", "packed metadata", None, None, None)
    assert kernel.direct == [(0, (*compiled, 256, None, 3, 0.5, 64))] * 2


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("watch", [lambda *_: None, SimpleNamespace(calls=[print])], ids=["function", "chain"])
def test_a_profiler_sees_every_launch(launch, hook, watch):
    setattr(sys.modules["triton"].knobs.runtime, hook, watch)
    assert len(launch(tensor_on("cuda", 0), times=3).jit) == 3


def test_a_tensor_elsewhere_is_left_to_the_jit_to_refuse(launch):
    assert len(launch(tensor_on("cuda", 0), tensor_on("cpu", None), times=3).jit) == 3


@pytest.mark.parametrize("tensor", [tensor_on("cuda", 0, address=264), tensor_on("npu", 0)], ids=["unaligned", "npu"])
def test_what_needs_the_jit_goes_through_it(launch, tensor):
    assert len(launch(tensor, times=3).jit) == 3


@pytest.mark.parametrize("launch", ["3.2.0", "3.8.0"], indirect=True)
def test_other_releases_of_triton_go_through_the_jit(launch):
    assert len(launch(tensor_on("cuda", 0), times=3).jit) == 3


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
    recipe = Recipe.of(Rows(2), {"MODE": True}, ("fp32",))
    smaller = recipe.smaller(halved)
    assert recipe.constants == {"BLOCK": 2, "MODE": True} and smaller.constants == {"BLOCK": 1, "MODE": True}
    assert smaller.smaller(halved) is None


def test_recipes_share_a_compiled_kernel_only_if_all_is_equal():
    keys = {
        Recipe.of(Rows(block), {"MODE": mode}, (dtype,)).key
        for block in (1, 2)
        for mode in (0, 1)
        for dtype in ("fp32", "bf16")
    }
    assert len(keys) == 8
    assert Recipe.of(Rows(2), {"MODE": 1}, ("fp32",)).key in keys


def test_kernels_are_imported_at_their_first_launch(monkeypatch, tmp_path):
    package = tmp_path / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kernels.py").write_text("launched = []\nkernel = {(3,): lambda *a, **k: launched.append((a, k))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.2.0"))
    kernels = Kernels("package_of_mine", "mine")
    assert "package_of_mine.kernels" not in sys.modules
    x = torch.ones(1)
    for _ in range(2):
        kernels.launch("kernels", "kernel", Recipe.of(Rows(2), {"MODE": 1}, ()), 3, (x, None), (7,))
    launched = sys.modules["package_of_mine.kernels"].launched
    assert launched == [((x, None, 7), {"BLOCK": 2, "MODE": 1, "num_warps": 4})] * 2
