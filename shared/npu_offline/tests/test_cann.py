"""The stand-in of CANN under the real torch_npu, where there is one: `hatch run npu:test shared/npu_offline`."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))  # cann_kernels.py, which pytest's importlib mode leaves out

pytestmark = pytest.mark.skipif(
    "NPU_OFFLINE_CANN_RUNTIME" not in os.environ, reason="not under `python -m npu_offline.cann`, which needs torch_npu"
)


@pytest.fixture(scope="module")
def triton():
    return pytest.importorskip("triton")


def kernels():
    import cann_kernels

    return cann_kernels


def run(code, **variables):
    here = os.pathsep.join([os.path.dirname(__file__), os.environ["PYTHONPATH"]])
    variables = {**os.environ, "PYTHONPATH": here, **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=variables)


def library():
    return ctypes.CDLL("libruntime.so")


def ones(n=64, device="npu"):
    return torch.full((n,), 1.0, device=device)


def test_work_is_late_so_that_a_missing_wait_shows():
    x = ones()
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        y = x * 2  # the current stream has not filled x yet, and nobody told this one to wait for it
    side.synchronize()
    assert not torch.equal(y.cpu(), torch.full((64,), 2.0))


def test_a_stream_that_waits_for_another_sees_what_it_did():
    x = ones()
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x * 2
    torch.npu.current_stream().wait_stream(side)
    assert torch.equal((y + 1).cpu(), torch.full((64,), 3.0))


@pytest.mark.parametrize("waits", [False, True])
def test_a_kernel_sees_what_another_stream_computed_if_its_stream_waits(waits, triton):
    x, y = torch.empty(64, device="npu"), torch.empty(64, device="npu")
    torch.npu.synchronize()
    kernels().double[(1,)](ones(), x, 64, BLOCK=64)
    side = torch.npu.Stream()
    if waits:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        kernels().double[(1,)](x, y, 64, BLOCK=64)
    side.synchronize()
    assert torch.equal(y.cpu(), torch.full((64,), 4.0)) == waits


@pytest.mark.nightly
@pytest.mark.parametrize("waits", [False, True])
def test_a_random_order_of_streams_finds_a_missing_wait(waits):
    done = run(
        "import torch, torch_npu; side, wrong = torch.npu.Stream(), 0\n"
        "for i in range(30):\n"
        "    x = torch.full((64,), float(i), device='npu')\n"
        f"    if {waits}: side.wait_stream(torch.npu.current_stream())\n"
        "    with torch.npu.stream(side): y = x * 2\n"
        "    side.synchronize()\n"
        "    wrong += not torch.equal(y.cpu(), torch.full((64,), 2.0 * i))\n"
        "print('wrong', wrong)",
        NPU_OFFLINE_CANN_STREAMS="1",
    )
    wrong = int(done.stdout.partition("wrong ")[2])
    assert (wrong == 0) == waits


def test_an_event_holds_a_stream_until_what_came_before_it_is_done():
    first, last = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    side = torch.npu.Stream()
    first.record()
    x = ones() * 3
    last.record()
    side.wait_event(last)
    with torch.npu.stream(side):
        y = x + 1
    side.synchronize()
    assert torch.equal(y.cpu(), torch.full((64,), 4.0))
    assert first.query()
    assert first.elapsed_time(last) >= 0


def test_waiting_is_an_error_where_the_program_says_so():
    x = ones()
    torch.npu.set_sync_debug_mode("error")
    try:
        y = x * 2 + 1
        with pytest.raises(RuntimeError, match="synchroni"):
            y.sum().item()
    finally:
        torch.npu.set_sync_debug_mode("default")
    assert y.sum().item() == 192


@pytest.mark.nightly
def test_a_copy_is_of_its_streams_device():
    done = run(
        "import ctypes, torch, torch_npu; x, y = (torch.full((64,), 1.0, device='npu:1') for _ in range(2))\n"
        "torch.npu.synchronize(1); torch.npu.synchronize(0)\n"
        "size, stream = ctypes.c_size_t(256), ctypes.c_void_p(torch.npu.current_stream(0).npu_stream)\n"
        "runtime = ctypes.CDLL('libruntime.so')\n"
        "runtime.aclrtMemcpyAsync(ctypes.c_void_p(x.data_ptr()), size, ctypes.c_void_p(y.data_ptr()), size, 3, stream)\n"
        "print('error', runtime.aclrtSynchronizeStream(stream))"  # which the device has once it gets there
    )
    assert int(done.stdout.partition("error ")[2]), done.stderr


FAILING = (
    "import ctypes; cann = ctypes.CDLL('libruntime.so')\n"
    "cann.aclrtSetDevice(0)\n"
    "stream, other, event = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()\n"
    "for one in (stream, other): cann.aclrtCreateStream(ctypes.byref(one))\n"
    "cann.aclrtSetStreamFailureMode(stream, ctypes.c_uint64({stops}))\n"
    "cann.aclrtCreateEventWithFlag(ctypes.byref(event), 1)\n"
    "host, size = (ctypes.c_char * 8)(), ctypes.c_size_t(8)\n"
    "did = []; work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: did.append(1))\n"
    "call = lambda on: cann.aclrtLaunchHostFunc(on, work, None)\n"
    "cann.aclrtMemcpyAsync(ctypes.c_void_p(64), size, host, size, 1, stream)\n"  # to where no device has memory
    "call(stream); cann.aclrtRecordEvent(event, stream); cann.aclrtStreamWaitEvent(other, event); call(other)\n"
    "said = [cann.aclrtSynchronizeStream(one) for one in (stream, stream, other, other)]\n"
    "said += [cann.aclrtSynchronizeEvent(event), call(stream), call(other), cann.aclrtSynchronizeDevice()]\n"
    "print('said', *map(int, map(bool, said)), len(did))"
)


def test_a_stream_that_stops_at_a_failure_has_it_for_good_and_so_have_those_that_wait_for_it():
    """As torch_npu's do: no later work is done or taken, and every wait says so."""
    done = run(FAILING.format(stops=1))
    assert done.stdout.strip() == "said 1 1 1 1 1 1 1 1 0", done.stderr


def test_a_stream_that_goes_on_after_a_failure_tells_it_once():
    done = run(FAILING.format(stops=0))
    assert done.stdout.strip() == "said 1 0 0 0 0 0 0 0 4", done.stderr


def test_after_a_kernel_failed_every_wait_of_torch_npu_is_an_error(triton):
    done = run(
        "import torch, torch_npu, cann_kernels; x = torch.ones(64, device='npu'); y = torch.empty(64, device='npu')\n"
        "cann_kernels.double[(1,)](x, y, 4096, BLOCK=4096)\n"
        "for wait in (torch.npu.synchronize, torch.npu.current_stream().synchronize, x.cpu):\n"
        "    try: wait()\n"
        "    except RuntimeError: print('refused')",
        PYTORCH_NO_NPU_MEMORY_CACHING="1",
    )
    assert done.stdout.split() == ["refused"] * 3, done.stderr


def test_an_event_is_reached_when_what_came_before_it_is_done():
    event = torch.npu.Event()
    x = ones() * 3
    event.record()
    assert not event.query()  # each question lets the stream do one more piece of work
    event.synchronize()
    assert event.query()
    assert x.cpu()[0] == 3


def test_a_kernel_runs_once_its_stream_does(triton):
    x, y = ones(), torch.empty(64, device="npu")
    before = library().standin_launches()
    kernels().double[(1,)](x, y, 64, BLOCK=64)
    torch.npu.synchronize()  # torch_npu has a queue of its own before the stream
    assert library().standin_launches() == before + 1
    assert torch.equal(y.cpu(), torch.full((64,), 2.0))


@pytest.mark.nightly
def test_a_kernel_takes_no_tensor_of_another_device(triton):
    """In a process of its own: torch_npu takes an error of a launch for one of the device, for good."""
    done = run(
        "import torch, torch_npu, cann_kernels; x = torch.ones(64, device='npu:1'); torch.npu.synchronize(1)\n"
        "y = torch.empty(64, device='npu:0'); cann_kernels.double[(1,)](x, y, 64, BLOCK=64); torch.npu.synchronize()"
    )
    assert done.returncode
    assert "is in the memory of device 1, the stream is of device 0" in done.stderr


def test_two_devices_keep_their_tensors_apart(triton):
    results = []
    for device in ("npu:0", "npu:1"):
        with torch.npu.device(device):
            x, y = ones(device=device) * 3, torch.empty(64, device=device)
            kernels().double[(1,)](x, y, 64, BLOCK=64)
            results.append(y.cpu())
    assert torch.equal(*results)
    assert results[0][0] == 6


def test_a_graph_runs_again_with_what_its_input_holds_then(triton):
    x, y = ones(), torch.empty(64, device="npu")
    kernels().double[(1,)](x, y, 64, BLOCK=64)  # compiled before the capture
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        kernels().double[(1,)](x, y, 64, BLOCK=64)
        z = y + 1
    x.fill_(5)
    graph.replay()
    assert torch.equal(z.cpu(), torch.full((64,), 11.0))


@pytest.mark.nightly
def test_a_host_that_waits_during_a_capture_is_refused():
    done = run(
        "import torch, torch_npu; x = torch.ones(4, device='npu'); torch.npu.synchronize(); g = torch.npu.NPUGraph()\n"
        "with torch.npu.graph(g): x.sum().item()"
    )
    assert done.returncode
    assert "is waited for while it is captured" in done.stderr


@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_read_past_a_tensor_is_found_without_the_caching_allocator(exact, triton):
    """The allocator asks for 2 MiB at a time: only without it are the bounds the tensor's, and 32 bytes of padding."""
    code = "import torch, torch_npu, cann_kernels; x = torch.ones(64, device='npu'); y = torch.empty(64, device='npu')\n"
    code += "cann_kernels.double[(1,)](x, y, 4096, BLOCK=4096); torch.npu.synchronize()"
    done = run(code, **({"PYTORCH_NO_NPU_MEMORY_CACHING": "1"} if exact else {}))
    assert (done.returncode != 0) == exact, done.stderr
    assert ("which is outside" in done.stderr) == exact


def test_a_view_is_the_memory_that_it_is_of():
    x = ones()
    x.unsqueeze(0).add_(1)
    x.view(8, 8)[2:].squeeze().mul_(3)
    y = x.detach()
    y.as_strided_((), (), 1).fill_(5)
    assert y.cpu().item() == 5
    assert x.cpu().tolist() == [2.0, 5.0] + [2.0] * 14 + [6.0] * 48


@pytest.mark.parametrize("operator", ["mm", "addmm", "index_select", "sort", "cumsum", "where", "index_put", "sum"])
def test_an_operator_gives_what_it_gives_on_a_cpu(operator):
    torch.manual_seed(0)
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    index = torch.tensor([3, 1, 3])

    def run(device):
        x, y, i = a.to(device), b.to(device), index.to(device)
        return {
            "mm": lambda: x @ y,
            "addmm": lambda: torch.addmm(x, x, y, beta=0.5),
            "index_select": lambda: x.index_select(0, i),
            "sort": lambda: torch.stack(tuple(t.float() for t in x.sort(dim=1, stable=True))),
            "cumsum": lambda: x.cumsum(0),
            "where": lambda: torch.where(x > 0, x, 0.5),
            "index_put": lambda: x.index_put((i,), y[:3], accumulate=True),
            "sum": lambda: x.sum(dim=1, keepdim=True, dtype=torch.float64),
        }[operator]()

    assert torch.equal(run("npu").cpu(), run("cpu"))


def test_launches_and_operators_are_counted_and_kernels_can_be_told_to_do_nothing(triton):
    from npu_offline import cann

    x, y = ones(), ones()
    torch.npu.synchronize()
    before = cann.launched()
    with cann.kernels_do_nothing():
        kernels().double[(1,)](x, y, 64, BLOCK=64)
        torch.npu.synchronize()
    assert cann.launched() == before + 1
    assert torch.equal(y.cpu(), torch.full((64,), 1.0))
    kernels().double[(1,)](x, y, 64, BLOCK=64)
    assert torch.equal(y.cpu(), torch.full((64,), 2.0))
    torch.npu.synchronize()
    before = cann.launched()
    x + y
    torch.npu.synchronize()
    assert cann.launched() == before + 1
