"""What the Ascend compilers make of the kernels, and how many bytes they move: no chip, and no time, involved."""

from functools import partial

import depth
import npu_offline
import pytest
import torch
from carried import carried_in_the_same_bytes
from npu_attn_res import attn_res, attn_res_bank, attn_res_phase1

from testing.ascend import *  # noqa: F403
from testing.ascend import Batches, Computed, launches, moved

launches_of = partial(launches, __file__)

TILES = ("bfloat16 4096, list", "bfloat16 7168, normalised merge", "bfloat16 16384", "bfloat16 1024, 5 layers")
TILES += ("bfloat16 1000, bank", "bfloat16 7168, bank")


def may_lose_a_buffer(record, soc, toolchain):
    """For rows beside those of several layers."""
    return (record.name, soc, toolchain) == ("attn_res_products_kernel", "Ascend950PR_957b", "1.1.0")


def of_a_list(n_blocks, tokens):
    inputs = [torch.empty(tokens, 512, requires_grad=True) for _ in range(n_blocks)]
    weights = [torch.empty(512, requires_grad=True) for _ in range(2)]
    attn_res(inputs, *weights).backward(torch.empty(tokens, 512))


def computed(name, *sizes, listed=True):
    case = depth.make(*sizes)
    return Computed(name, lambda: depth.run(case, "cpu", listed), lambda found: depth.check(case, found), tensors=6)


# The table of offsets, forward, backward, sums.
INDEPENDENT = (Batches("a list", of_a_list, ((2, 2), (3, 64), (8, 1000), (33, 4097)), 4),)
ON_OTHER_CHIPS = (computed("1000", 3, 50, 1000, torch.bfloat16),)
IN_ANY_ORDER = (computed("512", 3, 300, 512, torch.bfloat16),)
GUARDED = tuple(computed(f"{width}", 3, 37, width, torch.float32) for width in (123, 512, 16384))


@pytest.mark.few(1)
@pytest.mark.parametrize("toolchain", ["1.1.0", "1.2.0"])
@pytest.mark.parametrize("label", ["bfloat16 4096", "bfloat16 7168, normalised", "float32 123"])
def test_what_a_loop_carries_has_bytes_of_its_own_on_the_ascend950(label, toolchain):
    """Its final modules are not executed. Compilers keep a sum where the next block is loaded if both began as one value."""
    for record in launches_of(label, "Ascend950PR_957b"):
        report = npu_offline.compile_kernel(record, soc="Ascend950PR_957b", toolchain=toolchain)
        assert not list(carried_in_the_same_bytes(report))


def emulated(case, listed=False, frozen=()):
    given, *weights = case.leaves("cpu", listed)
    for i in frozen:
        given[i].requires_grad_(False)
    with npu_offline.emulate("Ascend910B4") as emulation:
        attn_res(given if listed else given[0], *weights).backward(case.dh)
    return {launch.kernel: launch for launch in emulation.launches}


@pytest.mark.parametrize(("n_blocks", "width", "listed"), [(8, 4096, False), (16, 7168, True), (8, 1000, True)])
def test_memory_traffic_is_the_minimum(n_blocks, width, listed):
    tokens = 400
    found = emulated(depth.make(n_blocks, tokens, width, torch.bfloat16), listed)
    row = tokens * width * 2
    forward = found["attn_res_forward_prefetch_kernel"]
    backward = found["attn_res_backward_kernel" if width == 1000 else "attn_res_backward_row_kernel"]
    weights = 40 * width * 2 * 2  # every core reads both
    assert (n_blocks + 1) * row <= moved(forward) <= 1.05 * (n_blocks + 1) * row + weights
    # The second sweep over a token's blocks finds them in L2: 2N + 1 rows come from memory, 3N + 1 pass through the core.
    through = (3 * n_blocks + 1) * row
    assert through <= moved(backward) <= 1.05 * through + weights + 40 * width * 4
    assert backward.arguments["p_v"].read == 2 * n_blocks * row
    for moving in (forward, backward):
        assert all(traffic.scalars == 0 or "table" in name for name, traffic in moving.arguments.items())
        assert all(traffic.atomics == 0 for traffic in moving.arguments.values())
        # Bytes; of 7168 columns backward a transfer is half a row.
        least = width if moving is backward and width == 7168 else min(8192, 6 * width)
        assert moving.arguments["p_v"].read / moving.arguments["p_v"].transfers >= least


@pytest.mark.parametrize("trained", [False, True], ids=["no gradients", "gradients"])
def test_a_bank_moves_the_bytes_of_its_blocks_and_its_prefix_once(trained):
    """What lies behind the blocks, and what does not change, stays where it is."""
    tokens, width, n_blocks = 100, 1000, 3
    row = tokens * width * 2
    bank = torch.randn(tokens, 6, width).bfloat16()
    prefix, x = (torch.randn(tokens, width).bfloat16() for _ in range(2))
    weights = [(torch.randn(width) / width**0.5).bfloat16().requires_grad_(trained) for _ in range(3)]
    count = torch.tensor(n_blocks, dtype=torch.int32)
    with npu_offline.emulate("Ascend910B4") as emulation, torch.autograd.profiler.profile() as profile:
        attn_res_bank(bank, count, prefix, *weights, layer_output=x, append=True, in_place=True)
    (launch,) = emulation.launches
    assert not {event.name for event in profile.function_events} & {"aten::copy_", "aten::clone", "aten::add", "aten::add_"}
    arguments = launch.arguments
    assert arguments["p_v"].read == n_blocks * row
    assert arguments["p_prefix"].read == arguments["p_x"].read == row
    assert arguments["p_new_prefix"].written == arguments["p_append"].written == arguments["p_h"].written == row
    assert moved(launch) <= 1.05 * (n_blocks + 6) * row + 40 * width * 2 * 3


def test_one_sweep_where_nothing_was_rounded():
    tokens, width, n_blocks = 400, 2048, 8
    backward = emulated(depth.make(n_blocks, tokens, width, torch.float32))["attn_res_backward_kernel"]
    row = tokens * width * 4
    least = (2 * n_blocks + 2) * row
    assert least <= moved(backward) <= 1.05 * least + 40 * width * 3 * 4


def test_frozen_blocks_cost_no_gradient():
    case = depth.make(4, 100, 512, torch.bfloat16)
    written = emulated(case, True, frozen=(0, 2))["attn_res_backward_kernel"].arguments["p_dv"].written
    assert written == 2 * 100 * 512 * 2


@pytest.mark.parametrize(("n_blocks", "launches"), [(8, 5), (33, 11)])
def test_a_launch_writes_sixteen_entries_of_tables(n_blocks, launches):
    """Of the sources alone forwards, of their gradients too backwards."""
    generator = torch.Generator().manual_seed(n_blocks)
    block_list = [torch.randn(5, 64, generator=generator).requires_grad_() for _ in range(n_blocks)]
    weights = [torch.randn(64, generator=generator).requires_grad_() for _ in range(2)]

    def results():
        h = attn_res(block_list, *weights)
        dh = torch.arange(h.numel()).view(h.shape) / h.numel()
        return [h.detach(), *torch.autograd.grad(h, [*weights, *block_list], dh)]

    expected = results()
    with npu_offline.emulate("Ascend910B4") as emulation:
        found = results()
    assert len(emulation.launches) == launches
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_layers", [2, 12])
def test_blocks_are_read_twice_for_any_number_of_layers(n_layers):
    case = depth.make(4, 100, 1024, torch.bfloat16)
    with npu_offline.emulate("Ascend910B4") as emulation:
        attn_res_phase1(torch.randn(n_layers, 1024), case.blocks, case.rms_weight)
    read = sum(launch.arguments["p_v"].read for launch in emulation.launches)
    assert read == 2 * case.blocks.numel() * 2
