"""Emulated kernels compute what the chip's own IR says, safely, whatever the order of their programs."""

import importlib
import re

import pytest
import torch
from npu_offline import OfflineError, OutOfBoundsError, UnsupportedError, emulate, record
from npu_offline.check.stopped import is_refusal
from npu_offline.check.stopped import said_of as said_of_stopped
from npu_offline.execute.linalg import loops
from sample_kernels import (
    add_narrow,
    cast,
    copy_strided,
    expf,
    fill_scalar,
    functions,
    ids,
    integer_arithmetic,
    matmul,
    maximum,
    method_of_a_tensor,
    order,
    reshape_in_a_loop,
    rms_norm,
    running_sum,
    scale_by_rounded,
    store_addresses,
    store_at_ticket,
    store_every_third,
    transpose,
    typed_scalars,
)


def _rms_norm(x, w, **options):
    y = torch.full_like(x, float("nan"))
    with emulate(**options) as emulation:
        rms_norm[(40,)](x, w, y, x.shape[0], 1e-6, D=x.shape[1], BM=8)
    return y, emulation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_matches_torch(dtype):
    x, w = torch.randn(509, 96).to(dtype), torch.randn(96).to(dtype)
    y, _ = _rms_norm(x, w)
    want = torch.nn.functional.rms_norm(x.double(), (96,), w.double(), 1e-6)
    torch.testing.assert_close(y.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("options", [{"threads": 2}, {"shuffle": 0}, {"shuffle": 7, "threads": 2}])
def test_order_of_programs_changes_no_bit(options):
    x, w = torch.randn(509, 96).bfloat16(), torch.randn(96).bfloat16()
    in_order, _ = _rms_norm(x, w, threads=1)
    other, _ = _rms_norm(x, w, **options)
    assert torch.equal(in_order.view(torch.int16), other.view(torch.int16))


def test_shuffle_is_a_permutation_that_the_seed_decides():
    def run(shuffle):
        log, counter = torch.full((64,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        with emulate(threads=1, shuffle=shuffle):
            order[(64,)](log, counter)
        return log.tolist()

    assert run(None) == list(range(64))
    assert run(3) == run(3) != run(4)
    assert sorted(run(3)) == list(range(64)) != run(3)


def test_three_dimensional_and_callable_grids():
    y = torch.full((4, 3, 2), -1, dtype=torch.int32)
    with emulate() as emulation:
        ids[lambda meta: (2, 3, 4)](y)
    z, j, i = torch.meshgrid(torch.arange(4), torch.arange(3), torch.arange(2), indexing="ij")
    assert torch.equal(y, (i + 10 * j + 100 * z).int())
    assert emulation.launches[0].grid == (2, 3, 4)


@pytest.mark.parametrize("grid", [(65536,), (256, 257)])
def test_grid_above_the_chips_limit_is_refused(grid, monkeypatch):
    monkeypatch.setenv("TRITON_ALL_BLOCKS_PARALLEL", "1")  # triton-ascend's own check, which this turns off
    with emulate(), pytest.raises(OfflineError, match="must be at most 65535"):
        ids[grid](torch.zeros(65536 * 2, dtype=torch.int32))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_rounding_to_narrow_floats_is_to_nearest_even(narrow):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(narrow).float()
    up = torch.nextafter(every, torch.tensor(float("inf")))
    down = torch.nextafter(every, torch.tensor(float("-inf")))
    step = torch.roll(every, -1)
    x = torch.cat([every, up, down, (every + step) / 2])  # exact values, their neighbours, and ties
    y = torch.empty_like(x, dtype=narrow)
    with emulate():
        cast[(x.numel() // 4096,)](x, y, BN=4096)
    want = x.to(narrow)
    assert torch.equal(y.isnan(), want.isnan())
    bits = [t.masked_fill(want.isnan(), 0).view(torch.int16) for t in (y, want)]
    assert torch.equal(*bits)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_widening_and_narrow_arithmetic_are_exact(narrow):
    x, y = (torch.randn(1024).mul(100).to(narrow) for _ in range(2))
    z, wide = torch.empty_like(x), torch.empty(1024)
    with emulate():
        add_narrow[(1,)](x, y, z, BN=1024)
        cast[(1,)](x, wide, BN=1024)
    assert torch.equal(z, x + y)
    assert torch.equal(wide, x.float())


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8])
def test_integer_pointers_have_their_width(dtype):
    x = torch.randint(0, 100, (256,)).to(dtype)
    y = torch.zeros(256, dtype=dtype)
    with emulate():
        cast[(1,)](x, y, BN=256)
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, 0.1), (torch.int64, 2**40 + 3), (torch.int32, -7), (torch.float32, 1.0)]
)
def test_scalars_keep_their_value(dtype, value):
    y = torch.zeros(32, dtype=dtype)
    with emulate():
        fill_scalar[(1,)](y, value, BN=32)
    assert torch.equal(y, torch.full((32,), value, dtype=dtype))


@pytest.mark.parametrize("flag", [True, False])
def test_annotated_scalars_flags_none_and_one(flag):
    y = torch.zeros(1, dtype=torch.int64)
    with emulate():
        typed_scalars[(1,)](y, 2**40, -5, 200, 2**31 + 1, flag, None, 1)
    assert y.item() == 2**40 - 5 + 200 + 2**31 + 1 + 1 + 1000 * flag


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("final", [False, True])
def test_terms_of_a_product_are_added_one_after_another(dtype, final):
    a, b, c = torch.randn(40, 70).to(dtype), torch.randn(70, 33).to(dtype), torch.empty(40, 33)
    with emulate(final=final):
        matmul[(2, 2)](a, b, c, 40, 33, 70, BM=32, BN=32, BK=32)
    expected = torch.zeros(40, 33)
    for k in range(70):
        expected = expected + a[:, k : k + 1].float() * b[k : k + 1].float()
    assert torch.equal(c, expected)


def test_matmul():
    a, b, c = torch.randn(50, 70).bfloat16(), torch.randn(70, 40).bfloat16(), torch.full((50, 40), float("nan"))
    with emulate():
        matmul[(4, 3)](a, b, c, 50, 40, 70, BM=16, BN=16, BK=32)
    torch.testing.assert_close(c, a.float() @ b.float())


def test_functions():
    x, y = torch.randn(64), torch.empty(64)
    with emulate():
        functions[(1,)](x, y, BN=64)
    want = x.exp() + (x.abs() + 1).log() + (x * x + 1).rsqrt() + x.sigmoid() + x.erf() + x.tanh() + x.argmax()
    torch.testing.assert_close(y, want)


def test_transposed_tile():
    x, y = torch.randn(8, 16), torch.empty(16, 8)
    with emulate():
        transpose[(1,)](x, y, BM=8, BN=16)
    assert torch.equal(y, x.T)


def test_integer_arithmetic():
    x, y = torch.randint(0, 1000, (64,), dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    with emulate():
        integer_arithmetic[(1,)](x, y, BN=64)
    assert torch.equal(y, x // 3 * 2 + x % 5 + x.clamp(max=7))


def test_while_loop_and_atomic_maximum():
    x, y = torch.randn(100), torch.full((1,), -1e9)
    with emulate():
        maximum[(7,)](x, y, 100)
    assert y.item() == x.max().item()


def test_empty_tensors_and_empty_grids():
    nothing = torch.empty(0)
    with emulate() as emulation:
        maximum[(4,)](nothing, nothing, 0)
        maximum[(0,)](nothing, nothing, 0)
    assert all(traffic.read == traffic.written == 0 for traffic in emulation.traffic()["maximum"].values())


def test_operation_that_only_the_chip_has_is_named(monkeypatch):
    monkeypatch.delitem(loops._WRITERS, "triton_cumsum")
    with emulate(), pytest.raises(Exception, match="the emulator has no triton_cumsum"):
        running_sum[(1,)](torch.randn(48), torch.empty(48), BN=48)  # a size of which Triton's cache has no kernel
    assert issubclass(UnsupportedError, OfflineError)


def test_kernel_may_be_called_like_a_function_of_the_c_library():
    x, y = torch.randn(256), torch.zeros(256)
    with emulate():
        expf[(1,)](x, y, BN=256)
    torch.testing.assert_close(y, x.exp())


@pytest.mark.parametrize("threads", [1, 2])
def test_read_outside_the_storage_names_kernel_and_argument(threads):
    x, y = torch.randn(100), torch.zeros(128)
    with emulate(threads=threads), pytest.raises(OutOfBoundsError, match=r"cast.*read.*byte 256 of argument x_ptr"):
        cast[(2,)](x, y, BN=64)


def test_write_outside_the_storage_changes_nothing():
    buffer = torch.zeros(200)
    y = buffer.untyped_storage()[: 100 * 4]
    small = torch.empty(0).set_(y) if y.nbytes() == 400 else None
    assert small is not None
    with emulate(), pytest.raises(OutOfBoundsError, match=r"write.*argument y_ptr"):
        cast[(1,)](torch.ones(128), small, BN=128)
    assert not buffer.any()


def test_scalar_access_outside_the_storage_is_found():
    with emulate(), pytest.raises(OutOfBoundsError, match="log_ptr"):
        order[(5,)](torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))


def test_emulation_goes_on_after_a_fault():
    x, y = torch.randn(100), torch.zeros(128)
    with emulate():
        with pytest.raises(OutOfBoundsError):
            cast[(2,)](x, y, BN=64)
        cast[(1,)](x, y, BN=64)
    assert torch.equal(y[:64], x[:64])


@pytest.mark.parametrize("options", [{"threads": 0}, {"toolchain": "9.9.9"}])
def test_wrong_options_are_refused(options):
    with pytest.raises(OfflineError, match="must be"), emulate(**options):
        pass


def test_record_notes_launches_and_runs_nothing():
    x, y = torch.randn(16, 96), torch.zeros(16, 96)
    with record("Ascend910B1") as launches:
        rms_norm[(48,)](x, x[0], y, 16, 1e-6, D=96, BM=8, multibuffer=False)
    assert not y.any()
    (launch,) = launches
    assert launch.name == "rms_norm"
    assert launch.grid == (48, 1, 1)
    assert launch.constants == {"D": 96, "BM": 8}
    assert launch.signature["x_ptr"] == "*fp32"
    assert launch.signature["eps"] == "fp32"
    assert launch.options == {"multibuffer": False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_argument_is_rounded_to_a_tiles_dtype(dtype):
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(dtype)
    for factor in (0.1, -3.14159, 1e-3, 1e30 if dtype == torch.bfloat16 else 7.7):
        y = torch.empty(100, dtype=dtype)
        with emulate():
            scale_by_rounded[(2,)](x, y, 100, factor, BN=64)
        assert torch.equal(y, x * torch.tensor(factor, dtype=dtype))


class Pointer:
    """What Triton takes for a pointer: an address in a tensor, and a dtype."""

    def __init__(self, tensor, *, keeps=True):
        self.address, self.dtype = tensor.data_ptr(), tensor.dtype
        self.kept = tensor if keeps else None

    def data_ptr(self):
        return self.address


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("options", [{}, {"races": True, "ledgers": True}, {"checks": True}], ids=str)
def test_an_object_with_an_address_and_a_dtype_is_a_pointer(options, keeps):
    memory, y = torch.arange(100.0), torch.zeros(36)
    with emulate(**options) as emulation:
        scale_by_rounded[(1,)](Pointer(memory[64:], keeps=keeps), Pointer(y, keeps=keeps), 36, 2.0, BN=64)
        assert torch.equal(y, 2 * memory[64:])
        assert emulation.launches[0].arguments["y_ptr"].written == 144
        with pytest.raises(OfflineError, match="of 400 bytes|which has 400"):
            scale_by_rounded[(1,)](Pointer(memory[64:], keeps=keeps), Pointer(y, keeps=keeps), 37, 2.0, BN=64)
    with record() as launches:
        scale_by_rounded[(1,)](Pointer(memory), Pointer(y), 36, 2.0, BN=64)
    assert launches[0].arguments["x_ptr"].nbytes == 400


def test_an_object_whose_address_is_in_no_tensor_is_named():
    pointer = Pointer(torch.zeros(8))
    pointer.address = 4096
    with (
        emulate(),
        pytest.raises(OfflineError, match="argument of type Pointer points to 0x1000, which is in no CPU tensor"),
    ):
        scale_by_rounded[(1,)](pointer, torch.zeros(8), 8, 2.0, BN=64)


def said_of(launch, **options):
    with emulate(**options), pytest.raises(OfflineError) as caught:
        launch()
    return str(caught.value)


def test_a_masked_store_that_reads_is_named_as_the_store_that_it_is():
    said = said_of(lambda: store_every_third[(2,)](torch.ones(100), torch.zeros(300), 100, BN=64))
    assert re.search(
        r"read of \d+ bytes .* argument y_ptr.*; the kernel does not read y_ptr: triton-ascend does not keep", said
    )
    assert re.search(r"the mask of its store \(sample_kernels.py:\d+:\d+\), which became load, select and store", said)


def test_an_access_out_of_bounds_says_how_the_argument_lies_in_memory():
    def launch(x, stride):
        copy_strided[(1,)](x, torch.empty(8, 100), 8, 100, stride, BM=8, BN=128)

    said = said_of(lambda: launch(torch.ones(1).expand(8, 100), 100))
    assert "x_ptr has shape (8, 100) and strides (0, 0): an expanded view, whose elements share memory" in said
    said = said_of(lambda: launch(torch.ones(8, 100), 128))
    assert "its mask or a stride is wrong: x_ptr has shape (8, 100) and strides (100, 1)" in said
    assert "fault 10" not in said
    assert "x_ptr has shape (8, 100) and strides (1, 8)" in said_of(lambda: launch(torch.ones(100, 8).T, 128))


def test_findings_of_a_final_module_name_the_argument_and_its_line():
    said = said_of(
        lambda: copy_strided[(1,)](torch.ones(8, 100), torch.empty(8, 100), 8, 100, 128, BM=8, BN=128), checks=True
    )
    assert re.search(r"reads bytes .* of argument x_ptr, which has 3200 \(sample_kernels.py:\d+:\d+\)", said)


def test_of_equal_kernels_in_two_files_each_names_its_own(tmp_path, monkeypatch):
    text = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef over(x_ptr, BN: tl.constexpr):\n"
    text += "    tl.store(x_ptr + tl.arange(0, BN), 1.0)\n"
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("first_of_two", "second_of_two"):
        (tmp_path / f"{name}.py").write_text(text)
        kernel = importlib.import_module(name).over
        assert f"({name}.py:7:" in said_of(lambda kernel=kernel: kernel[(1,)](torch.ones(8), BN=64))


def test_a_kernel_that_the_front_end_cannot_convert_is_refused_with_the_line():
    with emulate(), pytest.raises(Exception) as caught:
        store_at_ticket[(1,)](*torch.zeros(2, 8, dtype=torch.int32))
    line = store_at_ticket.fn.__code__.co_firstlineno + 4  # the last one
    said = said_of_stopped(caught.value)
    assert f"cannot convert the kernel (sample_kernels.py:{line}:30, or what that uses):" in said
    assert "unresolved materialization" in said
    assert "What it converts: addresses" in said
    assert is_refusal(caught.value)


def test_a_refused_kernel_has_the_advice_of_its_mistake_alone():
    x = torch.zeros(32)
    said = {}
    for kernel in (store_addresses, reshape_in_a_loop, method_of_a_tensor):
        with emulate(), pytest.raises(Exception) as caught:
            kernel[(1,)](x, x.clone(), 3, 32)
        said[kernel] = said_of_stopped(caught.value)
        assert is_refusal(caught.value)
    assert "to <[32], fp32>'): these are addresses: tl.load reads what is there\n" in said[store_addresses]
    assert "Please make sure that the type stays consistent.')\n" in said[reshape_in_a_loop]
    assert 'scope of a kernel"): Triton 3.2 has no methods: tl.sum(x, 0), not x.sum(0)\n' in said[method_of_a_tensor]


def test_the_advice_on_arguments_that_a_chip_ignores_is_said_once(capfd):
    x, y = torch.randn(256), torch.empty(256)
    with emulate("Ascend910B4"):
        for warps in (2, 4, 8):
            cast[(1,)](x, y, BN=256, num_warps=warps)
    out, err = capfd.readouterr()
    assert "DO NOT tune" not in out
    assert err.count("DO NOT tune") <= 1
