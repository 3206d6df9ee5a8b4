"""Stand-ins for Triton, its kernels and a device, as much of them as a launch needs. They compile nothing."""

import contextlib
from collections import namedtuple
from types import SimpleNamespace


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
    """A stand-in for triton-ascend's launcher: a function in C, and Python around it, which names what 3.2.0's does."""

    def __init__(self, launch):
        self.launch, self.wrapped = launch, []
        self.append = self.wrapped.append

    def __call__(self, *arguments):
        self.append(arguments)
        self.launch(*arguments)


class LaterLaunch(Launch):
    """A wrapper that names something else, as that of triton-ascend 3.2.1."""

    def __call__(self, *arguments):
        self.get_backend_func = len(arguments)
        self.append(arguments)
        self.launch(*arguments)


class Wrapped(Compiled):
    def __init__(self, accelerator, launch=Launch):
        super().__init__(accelerator)
        self.run = launch(self.run)


class WrappedLater(Wrapped):
    def __init__(self, accelerator):
        super().__init__(accelerator, LaterLaunch)


class Kernel:
    """A stand-in for a @triton.jit function: `jit` has every launch through it, and `compiled` every kernel it made.

    It compiles as Triton does: for other types, for an integer that is 1, for multiples of 16, for what needs 64 bits.
    """

    def __init__(self, accelerator, plain=(), call=None, pre_run_hooks=(), wrapped=False, stream="the JIT's stream"):
        self.accelerator, self.jit, self.compiled = accelerator, [], {}
        self.made = {False: Compiled, True: Wrapped, "later": WrappedLater}[wrapped]
        self.pre_run_hooks, self.stream = pre_run_hooks, stream
        self.params = [SimpleNamespace(do_not_specialize=name in plain) for name in ("p", "q", "n", "scale", "BLOCK")]
        self.call = call or (lambda compiled, *arguments: compiled.run(*arguments))

    def __getitem__(self, grid):
        def launch(*arguments, **keywords):
            options = {name: keywords.pop(name) for name in list(keywords) if name == "option"}
            self.jit.append((self.accelerator.current, grid, arguments, {**keywords, **options}))
            key = tuple(map(self.specialised, self.params, (*arguments, *keywords.values()))), tuple(options.items())
            compiled = self.compiled.setdefault(key, self.made(self.accelerator))
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
