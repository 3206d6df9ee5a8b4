"""What `explain` says of a call is what the call launches, wherever there are kernels."""

import importlib
from pathlib import Path

import npu_attn_res
import pytest
import torch
from npu_attn_res import attn_res, attn_res_bank, attn_res_merge, attn_res_phase1, explain
from npu_tiling.command import computed

from testing.operators import *  # noqa: F403

pytestmark = pytest.mark.few(2)
BF16 = torch.bfloat16
EXPLAINED = {
    "rows": {"tokens": 96, "width": 512, "blocks": 3},
    "a list": {"tokens": 24, "width": 2048, "blocks": 5, "listed": True},
    "halves": {"tokens": 4, "width": 7168, "blocks": 3},
    "columns": {"tokens": 4, "width": 20000, "blocks": 2, "listed": True},
    "normalised": {"tokens": 24, "width": 1000, "blocks": 2, "normalised": True},
    "bank": {"tokens": 24, "width": 1000, "blocks": 3, "prefix": True, "layer_output": True},
    "append": {"tokens": 24, "width": 1000, "blocks": 2, "prefix": True, "append": True, "layer_output": True},
    "layers": {"tokens": 24, "width": 1024, "blocks": 3, "layers": 4},
    "merge": {"tokens": 24, "width": 1024, "merge": True, "layer_output": True, "normalised": True},
}


def run(place, tokens, width, blocks=8, listed=False, prefix=False, append=False, layers=None, merge=False, **options):
    """The call that `explain` has these options for."""

    def rows(*shape, dtype=BF16):
        return torch.ones(shape, dtype=dtype, device=place.torch, requires_grad=True)

    query, norm, output_norm = (rows(width) for _ in range(3))
    given = [rows(tokens, width) for _ in range(blocks)] if listed else rows(blocks, tokens, width)
    leaves = list(given) if listed else [given]
    more = {"layer_output": rows(tokens, width)} if options.get("layer_output") else {}
    if options.get("normalised"):
        more["output_rms_weight"] = output_norm
    running = rows(tokens, width)
    if merge:
        state = rows(tokens, width, dtype=torch.float32), rows(tokens, dtype=torch.float32)
        results, leaves = attn_res_merge(*state, running, query, norm, **more), [*state, running]
    elif layers is not None:
        query = rows(layers, width, dtype=torch.float32)
        results = attn_res_phase1(query, given, norm)
    elif prefix:
        bank = given.movedim(0, -2)
        if append:
            leaves = [rows(blocks + 1, tokens, width)]
            bank = computed(leaves[0]).movedim(0, -2)
        count = blocks if append else None
        results = attn_res_bank(bank, count, running, query, norm, append=append, **more)
        leaves.append(running)
    else:
        results = attn_res(given, query, norm, **more)
        results = (results,) if isinstance(results, torch.Tensor) else results
    results = [result for result in results if result is not None and result is not running]
    leaves += [query, norm, *more.values()]
    torch.autograd.grad(results, leaves, [torch.ones_like(result) for result in results])


def test_an_appended_block_is_asked_for(monkeypatch):
    module, asked = importlib.import_module("npu_attn_res.explain"), []

    def listing(bank, n_blocks, *arguments, **options):
        asked.append((len(bank.movedim(-2, 0)), n_blocks, options["append"]))
        return attn_res_bank(bank, n_blocks, *arguments, **options)

    monkeypatch.setattr(module, "attn_res_bank", listing)
    explain(tokens=8, width=512, blocks=3, prefix=True, append=True, chip="H200", backward=True)
    assert set(asked) == {(4, 3, True)}


@pytest.mark.parametrize(
    ("chip", "width", "said", "row"),
    [
        ("Ascend910B4", 512, "the fastest way of the table fits", "Way.ROWS"),
        ("Ascend910B4", 5120, "faster ways cannot run (rows share a tile", "Way.ROW"),
        ("H200", 512, "a tile has 4 of 12 sources of 512 columns", "Loop(2048"),
        ("H200", 5120, "a tile has 2 of 12 sources of 5120 columns", "Loop(8192"),
    ],
)
def test_the_reason_names_the_numbers_of_the_call_and_the_row_that_decided(chip, width, said, row):
    forward = explain(tokens=64, width=width, blocks=12, prefix=True, chip=chip).launches[0]
    assert said in forward.why and row in line_of(forward)


def test_the_reason_of_a_backward_in_registers_names_its_row():
    _, backward, *_ = explain(tokens=64, width=512, blocks=12, chip="H200", backward=True).launches
    assert backward.why == "8192 elements a token, padded, are at most 8192" and "InRegisters(8192" in line_of(backward)


def line_of(launch):
    """The line of the source that decided."""
    file, _, line = launch.decided_at.partition(":")
    return Path(npu_attn_res.__file__).parents[1].joinpath(file).read_text().splitlines()[int(line) - 1]


def test_a_call_of_any_size_needs_no_memory():
    found = explain(tokens=2**31, width=4096, blocks=16, listed=True, chip="H200", backward=True)
    assert [launch.way for launch in found.launches][1].startswith("several programs")


def test_options_that_exclude_one_another_are_refused():
    with pytest.raises(ValueError, match="exclude one another"):
        explain(tokens=8, width=64, prefix=True, merge=True, chip="H200")


def test_the_table_of_a_list_is_a_launch_with_its_place():
    table, _ = npu_attn_res.explain(tokens=16, width=64, blocks=3, chip="Ascend910B4", listed=True).launches
    file, line = table.decided_at.split(":")
    assert (table.kernel, table.grid, file) == ("attn_res_table_kernel", 1, "npu_attn_res/sources.py")
    source = Path(npu_attn_res.__file__).with_name("sources.py").read_text().splitlines()
    assert "here()" in source[int(line) - 1]


# (N + 1) T D forward and (2 N + 1) T D backward, two weights, and their gradients.
BYTES = {
    "rows": (
        {"tokens": 1000, "width": 512, "blocks": 8, "chip": "Ascend910B4", "backward": True},
        {"forward": 2 * (9 * 1000 * 512 + 2 * 512), "backward": 2 * (17 * 1000 * 512 + 4 * 512)},
    )
}
