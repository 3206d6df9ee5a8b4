"""Each rule finds the kernel that breaks it and leaves alone the one that keeps it."""

import json
import re
from pathlib import Path

import pytest
import torch
import triton.language as tl
from culprit_kernels import joined
from fault_kernels import (
    byte_sum_kernel,
    carried_range_kernel,
    compared_mask_kernel,
    composed_operation_kernel,
    larger_number_kernel,
    lost_rest_kernel,
    lost_start_kernel,
    ordered_masks_kernel,
    pairs_kernel,
    plain_return_kernel,
    remainder_rows_kernel,
    rounded_division_kernel,
    rounded_numbers_kernel,
    summed_mask_kernel,
    unbounded_descriptor_kernel,
    unsigned_kernel,
)
from lint_kernels import (
    add_wide,
    below_by_floats,
    below_by_integers,
    copy_rows,
    count_atomically,
    gather_elements,
    gather_rows,
    halve_until_small,
    matmul,
    square_narrow,
    square_suppressed,
    square_wide,
    store_clamped,
    store_positive,
    sum_atomically,
    sum_rows,
    suppressed_without_reason,
    suppressed_without_rule,
    take_by_exchange,
    take_by_or,
    take_upper_half,
    transpose_in_memory,
    transpose_on_chip,
    wait_for_turn,
)
from npu_offline import OfflineError, record
from npu_offline.cli import main
from npu_offline.lint import RULES, lint_kernel
from npu_offline.toolchain.compilation import front_end_of

F32, BF16 = torch.float32, torch.bfloat16


def launched(kernel, *arguments, programs=1, soc="Ascend910B4", **constants):
    with record(soc) as launches:
        kernel[(programs,)](*arguments, **constants)
    return launches[0]


def e(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype)


def index(n):
    return torch.zeros(n, dtype=torch.int32)


LONG = 4096  # elements of fp32: 16 KiB
CASES = {
    "scalar-loop": (
        lambda: launched(gather_elements, index(LONG), e(LONG), e(LONG), D=1, BN=LONG),
        lambda: launched(gather_rows, index(8), e(99, LONG), e(8, LONG), D=LONG, BN=8),
    ),
    "integer-arithmetic": (
        lambda: launched(below_by_integers, e(LONG), e(LONG), 9, BN=LONG),
        lambda: launched(below_by_floats, e(LONG), e(LONG), 9, BN=LONG),
    ),
    "bf16-arithmetic": (
        lambda: launched(square_narrow, e(LONG, dtype=BF16), e(LONG, dtype=BF16), BN=LONG),
        lambda: launched(square_wide, e(LONG, dtype=BF16), e(LONG, dtype=BF16), BN=LONG),
    ),
    "masked-store": (
        lambda: launched(store_positive, e(LONG), e(LONG), BN=LONG),
        lambda: launched(store_clamped, e(LONG), e(LONG), BN=LONG),
    ),
    "strided-transfer": (
        lambda: launched(transpose_in_memory, e(64, 64), e(64, 64), BM=64, BN=64),
        lambda: launched(transpose_on_chip, e(64, 64), e(64, 64), BM=64, BN=64),
    ),
    "unaligned-rows": (
        lambda: launched(copy_rows, e(99, 123), e(99, 123), 99, D=123, BM=32, BN=123),
        lambda: launched(copy_rows, e(99, 120), e(99, 120), 99, D=120, BM=32, BN=120),
    ),
    "short-transfer": (
        lambda: launched(copy_rows, e(99, 8192), e(99, 8192), 99, D=8192, BM=1, BN=1024),
        lambda: launched(copy_rows, e(99, 1024), e(99, 1024), 99, D=1024, BM=1, BN=1024),
    ),
    "float-atomic": (
        lambda: launched(sum_atomically, e(9, LONG), e(LONG), D=LONG, programs=9),
        lambda: launched(count_atomically, index(9 * LONG).view(9, LONG), index(LONG), D=LONG, programs=9),
    ),
    "lost-exchange": (
        lambda: launched(take_by_exchange, index(1), index(1)),
        lambda: launched(take_by_or, index(1), index(1)),
    ),
    "lost-wait": (
        lambda: launched(wait_for_turn, index(1), index(1)),
        lambda: launched(halve_until_small, index(1), index(1)),
    ),
    "fill-in-loop": (
        lambda: launched(copy_rows, e(99, 1000), e(99, 1000), 99, D=1000, BM=4, BN=1024),
        lambda: launched(copy_rows, e(99, 1000), e(99, 1000), 99, D=1000, BM=4, BN=1000),
    ),
    "scalar-reduction": (
        lambda: launched(sum_rows, e(99, LONG), e(99), 99, D=LONG, BM=1),
        lambda: launched(sum_rows, e(99, LONG), e(99), 99, D=LONG, BM=2),
    ),
    "single-buffer": (
        lambda: launched(copy_rows, e(99, 4096), e(99, 4096), 99, D=4096, BM=8, BN=4096),
        lambda: launched(copy_rows, e(99, 4096), e(99, 4096), 99, D=4096, BM=2, BN=4096),
    ),
    "cube-pipelining": (
        lambda: launched(matmul, e(64, 4096, dtype=BF16), e(4096, 64, dtype=BF16), e(64, 64), 4096, B=64, BK=64,
                         multibuffer=False),
        lambda: launched(matmul, e(64, 4096, dtype=BF16), e(4096, 64, dtype=BF16), e(64, 64), 4096, B=64, BK=64),
    ),
    "grid": (
        lambda: launched(sum_rows, e(99, LONG), e(99), 99, D=LONG, BM=2, programs=41),
        lambda: launched(sum_rows, e(99, LONG), e(99), 99, D=LONG, BM=2, programs=40),
    ),
    "boolean-comparison": (
        lambda: launched(compared_mask_kernel, e(64), e(1), index(64), BLOCK=64, OPERATION="== True"),
        lambda: launched(compared_mask_kernel, e(64), e(1), index(64), BLOCK=64, OPERATION="^"),
    ),
    "ordered-masks": (
        lambda: launched(ordered_masks_kernel, e(64), e(64), index(64), BLOCK=64, OPERATION="<="),
        lambda: launched(ordered_masks_kernel, e(64), e(64), index(64), BLOCK=64, OPERATION="~ &"),
    ),
    "unsigned-arithmetic": (
        lambda: launched(unsigned_kernel, index(64), index(64), BLOCK=64, DTYPE=tl.uint32, OPERATION=">>"),
        lambda: launched(unsigned_kernel, index(64), index(64), BLOCK=64, DTYPE=tl.uint32, OPERATION="masked >>"),
    ),
    "byte-sum": (
        lambda: launched(byte_sum_kernel, e(64, dtype=torch.int8), index(64).long(), BLOCK=64, DTYPE=tl.int8, WIDE=False),
        lambda: launched(byte_sum_kernel, e(64, dtype=torch.int8), index(64).long(), BLOCK=64, DTYPE=tl.int8, WIDE=True),
    ),
    "rounded-division": (
        lambda: launched(rounded_division_kernel, index(64), index(64), 3, BLOCK=64, OPERATION="//"),
        lambda: launched(rounded_division_kernel, index(64), index(64), 3, BLOCK=64, OPERATION="range //"),
    ),
    "mask-sum": (
        lambda: launched(summed_mask_kernel, e(64), index(1), BLOCK=64, DTYPE=tl.int1, RUNNING=False),
        lambda: launched(summed_mask_kernel, e(64), index(1), BLOCK=64, DTYPE=tl.int32, RUNNING=False),
    ),
    "nan-maximum": (
        lambda: launched(larger_number_kernel, e(128), e(128), e(1), BLOCK=128, ALL=False),
        lambda: launched(larger_number_kernel, e(128), e(128), e(1), BLOCK=128, ALL=True),
    ),
    "composed-operation": (
        lambda: launched(composed_operation_kernel, e(64), e(64), BLOCK=64, OPERATION="exp2"),
        lambda: launched(composed_operation_kernel, e(64), e(64), BLOCK=64, OPERATION="exp"),
    ),
    "lost-start": (
        lambda: launched(lost_start_kernel, index(16), e(64), e(16), START=24, BLOCK=16, APART=False),
        lambda: launched(lost_start_kernel, index(16), e(64), e(16), START=24, BLOCK=16, APART=True),
    ),
    "dropped-mask": (
        lambda: launched(remainder_rows_kernel, e(5, 24), e(16, 32), 5, 24, BLOCK_M=16, BLOCK_N=32, CUT=False),
        lambda: launched(remainder_rows_kernel, e(5, 24), e(16, 32), 5, 24, BLOCK_M=16, BLOCK_N=32, CUT=True),
    ),
    "carried-mask": (
        lambda: launched(carried_range_kernel, e(100), e(100), N=100, BLOCK=64, COUNTED=False),
        lambda: launched(carried_range_kernel, e(100), e(100), N=100, BLOCK=64, COUNTED=True),
    ),
    "lost-rest": (
        lambda: launched(lost_rest_kernel, index(1), e(100), e(100), 100, BLOCK=64, NESTED=True),
        lambda: launched(plain_return_kernel, index(1), e(100), e(100), 100, BLOCK=64),
    ),
    "unchecked-shape": (
        lambda: launched(unbounded_descriptor_kernel, e(20, 25), e(20, 25), 20, 25, BLOCK_M=16, BLOCK_N=32),
        lambda: launched(copy_rows, e(99, 4096), e(99, 4096), 99, D=4096, BM=2, BN=4096),
    ),
    "split-load": (
        lambda: launched(pairs_kernel, e(512), e(16), e(256), 500, ROWS=16, COLUMNS=32, MASKED=True),
        lambda: launched(pairs_kernel, e(512), e(16), e(256), 500, ROWS=16, COLUMNS=32, MASKED=False),
    ),
    "rounded-number": (
        lambda: launched(rounded_numbers_kernel, e(64), e(64, dtype=BF16), 64),
        lambda: launched(square_wide, e(8192, dtype=BF16), e(8192, dtype=BF16), BN=8192),
    ),
}  # fmt: skip
LINES = {
    "boolean-comparison": "b_m = b_m == True",
    "unsigned-arithmetic": "b_y = b_x >> 1",
    "byte-sum": "(b_x + b_x).to(tl.int64)",
    "rounded-division": "b_y = b_x // n",
    "mask-sum": "tl.sum(b_m, 0)",
    "nan-maximum": "tl.maximum(b_x, 0.0))",
    "composed-operation": "tl.exp2(b_x)",
    "lost-start": "else tl.arange(START",
    "dropped-mask": "(o_row % n_rows)[:, None] * n_cols",
    "carried-mask": "b_x = tl.load(p_x + o, mask=o < N)",
    "lost-rest": "b_x = tl.load(p_x + o, mask=o < n)",
    "ordered-masks": "b_y = b_m <= b_other",
    "split-load": "tl.reshape(b_x, (ROWS, COLUMNS // 2, 2)).split()",
    "rounded-number": "tl.load(p_x + i).to(tl.bfloat16))",
}  # by rule on the language, the line that its first kernel is named for
OLDEST = {"toolchain": "1.0.0"}
WHERE = {"ordered-masks": OLDEST, "rounded-number": OLDEST}  # 1.2.0 refuses the one, and rounds as the other should be


def rules(launch, **where):
    return {finding.rule for finding in lint_kernel(launch, **where)}


def test_every_rule_has_a_case_and_a_reason():
    assert set(CASES) == set(RULES)
    assert all(len(rule.reason) > 100 for rule in RULES.values())


def test_the_readme_has_a_line_for_every_rule():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    table = text.partition("| rule | finds |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([a-z0-9-]+) \|", table, re.MULTILINE) == list(RULES)


@pytest.mark.parametrize("rule", CASES)
def test_a_kernel_that_breaks_the_rule_is_found(rule):
    assert rule in rules(CASES[rule][0](), **WHERE.get(rule, {}))


@pytest.mark.parametrize("rule", CASES)
def test_a_kernel_that_keeps_the_rule_is_left_alone(rule):
    assert rule not in rules(CASES[rule][1](), **WHERE.get(rule, {}))


@pytest.mark.parametrize("rule", LINES)
def test_a_rule_on_the_language_names_the_line(rule):
    launch = CASES[rule][0]()
    source = Path(launch.kernel.fn.__code__.co_filename)
    (line,) = [number for number, text in enumerate(source.read_text().splitlines(), 1) if LINES[rule] in text]
    found = [finding.message for finding in lint_kernel(launch, **WHERE.get(rule, {})) if finding.rule == rule]
    assert [message.rpartition(":")[0].endswith(f"(fault_kernels.py:{line}") for message in found] == [True]


def test_a_mask_of_elements_that_are_loaded_one_by_one_is_dropped():
    launch = launched(joined, e(100, 8), e(100, 16), e(100, 24), 2400, N=512)
    found = [each.message.partition(":")[0] for each in lint_kernel(launch) if each.rule == "dropped-mask"]
    assert found == ["load of x", "load of w"]


@pytest.mark.parametrize(("given", "said"), [(tl.int8, "tl.sum of int8 ("), (tl.int16, "tl.sum of int16 (")])
def test_sums_of_narrow_integers_are_named(given, said):
    launch = launched(summed_mask_kernel, e(64), index(1), BLOCK=64, DTYPE=given, RUNNING=False)
    assert [each.message.startswith(said) for each in lint_kernel(launch) if each.rule == "mask-sum"] == [True]
    launch = launched(summed_mask_kernel, e(64), index(64), BLOCK=64, DTYPE=given, RUNNING=True)
    assert "mask-sum" not in rules(launch)


@pytest.mark.parametrize(("given", "found"), [(tl.uint8, False), (tl.uint16, True)])
def test_unsigned_bytes_are_left_alone(given, found):
    x = torch.empty(64, dtype=torch.int8 if given == tl.uint8 else torch.int16)
    launch = launched(unsigned_kernel, x, x, BLOCK=64, DTYPE=given, OPERATION="maximum")
    assert ("unsigned-arithmetic" in rules(launch)) == found


def test_a_shift_whose_sign_bits_are_cut_off_is_left_alone():
    launch = launched(take_upper_half, torch.zeros(64, dtype=torch.int64), index(64), BN=64)
    assert "arith.shrui" in front_end_of(launch)[1]
    assert "unsigned-arithmetic" not in rules(launch)


def test_wide_integers_are_found_in_sums_too():
    x = torch.empty(LONG, dtype=torch.int64)
    (finding,) = [f for f in lint_kernel(launched(add_wide, x, x, 9, BN=LONG)) if f.rule == "integer-arithmetic"]
    assert finding.message == "addi on a tensor of 4096 i64"
    assert "integer-arithmetic" not in rules(launched(add_wide, index(LONG), index(LONG), 9, BN=LONG))


def test_lost_double_buffering_is_found_where_it_is_hidden_and_where_it_is_not_asked_for_left_alone():
    lost = CASES["single-buffer"][0]()
    (finding,) = [f for f in lint_kernel(lost, toolchain="1.2.0") if f.rule == "single-buffer"]
    assert "[NOTE]" in finding.message
    unasked = launched(copy_rows, e(99, 4096), e(99, 4096), 99, D=4096, BM=2, BN=4096, multibuffer=False)
    assert "single-buffer" not in rules(unasked)


def test_a_suppression_with_a_reason_suppresses_its_rule_alone():
    narrow = e(512, dtype=BF16), e(600, dtype=BF16)
    assert rules(launched(square_narrow, *narrow, BN=512)) == {"bf16-arithmetic", "short-transfer"}
    assert rules(launched(square_suppressed, *narrow, BN=512)) == {"short-transfer"}


@pytest.mark.parametrize(
    ("kernel", "message"),
    [(suppressed_without_reason, "RULE: REASON"), (suppressed_without_rule, "must be of a rule: scalar-loop")],
)
def test_a_suppression_without_rule_or_reason_is_an_error(kernel, message):
    with pytest.raises(OfflineError, match=message):
        lint_kernel(launched(kernel, e(64), e(64), BN=64))


CALLS = """
import sys
sys.path.insert(0, {folder!r})
import torch
from lint_kernels import {kernel}


def calls():
    x, y = (torch.empty({n}, dtype=torch.{dtype}) for _ in range(2))
    yield "one", lambda: {kernel}[(1,)](x, y, BN={n})
"""


@pytest.mark.parametrize(
    ("kernel", "dtype", "status", "said"),
    [
        ("square_wide", "bfloat16", 0, "5 launches, 30 rules, 0 findings"),
        ("square_narrow", "bfloat16", 1, "mulf on a tensor of 8192 bf16"),
        ("square_suppressed", "bfloat16", 0, "a test of suppressions"),
        (
            "square_suppressed",
            "float32",
            1,
            "kernel square_suppressed: the suppression of bf16-arithmetic suppresses nothing",
        ),
    ],
)
def test_the_command_line_lints_a_package(tmp_path, capsys, kernel, dtype, status, said):
    (tmp_path / "tests").mkdir()
    text = CALLS.format(folder=str(Path(__file__).parent), kernel=kernel, dtype=dtype, n=8192)
    (tmp_path / "tests" / "ascend_calls.py").write_text(text)
    report = tmp_path / "lint.json"
    assert main(["lint", str(tmp_path), "--jobs", "1", "--json", str(report)]) == status
    assert said in capsys.readouterr().out
    found = json.loads(report.read_text())
    assert {launch["kernel"] for launch in found["launches"]} == {kernel}
    assert found["refused"] == []
    assert [line for line in found["unused"] if said in line] == [said] * (said.endswith("suppresses nothing"))
