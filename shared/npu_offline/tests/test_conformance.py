"""The conformance suite: what it generates, what it finds, and the page of a whole run."""

import re
from pathlib import Path

import npu_offline
import pytest
import torch
from npu_offline.cli import main
from npu_offline.conformance import suite
from npu_offline.conformance.grammar import CASES, FILL, OPERATIONS, VARIANTS, Case

PAGE = Path(__file__).parents[3] / "tools/docs/pages/tools/conformance.md"
REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
compiled = pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)


def case(name):
    return next(each for each in CASES if each.name == name)


@pytest.mark.parametrize(
    ("name", "x", "w", "y"),
    [
        (">> of uint16", 0xFFFF, 1, 0x7FFF),
        (">> of int16", -3, 1, -2),
        ("// of int32", -7, 2, -3),
        ("% of int32", -7, 2, -1),
        ("+ of int8", 127, 1, -128),
        ("* of uint32", 2**31 + 1, 2, 2),
        ("tl.maximum of uint32", 2**32 - 1, 1, -1),
        ("tl.maximum of float32", torch.nan, 1.0, 1.0),
        ("to float16 of float32", 1e8, 0.0, torch.inf),
        ("!= number of int1", 1, 1, 0),
    ],
)
def test_an_operation_is_what_triton_defines(monkeypatch, name, x, w, y):
    of = case(name)
    monkeypatch.setattr(Case, "inputs", tuple(torch.full((128,), each) for each in (x, w)))
    seen = of.expected("one tile")
    assert (seen[:64] == y).all() and (seen[64:] == FILL).all()
    assert of.wrong(seen, "one tile") == []
    seen[3] += 1 if y != torch.inf else -torch.inf
    assert of.wrong(seen, "one tile") == [3]


def test_every_variant_of_an_operation_takes_the_same_elements():
    for each in CASES:
        variants = list(each.variants)
        assert variants[0] == "one tile"
        if not each.operation.kind:
            whole = each.expected("one tile")
            for variant in variants:
                size = min(VARIANTS[variant][3], 64)
                assert torch.equal(each.expected(variant)[:size].nan_to_num(), whole[:size].nan_to_num())


def outcome(name, variant, level, verdict, **more):
    return suite.Outcome(case(name), variant, level, verdict, **more)


def test_a_variant_that_is_wrong_makes_its_operation_wrong_and_one_that_is_refused_does_not():
    found = [
        outcome("+ of int8", "one tile", "1.2.0", "right"),
        outcome("+ of int8", "loop", "1.2.0", "wrong", text="y[0] is 1, must be 2", pattern="module: arith.addi of int"),
        outcome("- of int8", "one tile", "1.2.0", "right"),
        outcome("- of int8", "loop", "1.2.0", "refused"),
        outcome("* of int8", "one tile", "1.2.0", "refused"),
    ]
    assert suite.verdicts(found) == {
        ("+ of int8", "1.2.0"): "wrong",
        ("- of int8", "1.2.0"): "right",
        ("* of int8", "1.2.0"): "refused",
    }


def test_a_page_has_a_row_for_what_is_not_right_and_a_column_for_equal_levels():
    levels = suite.LEVELS
    right = [outcome(name, "one tile", level, "right") for name in ("+ of int8", "| of int8") for level in levels]
    wrong = [
        outcome(
            "- of int8", "one tile", level, "wrong" if level == "1.2.0" else "right", pattern="module: arith.subi of int"
        )
        for level in levels
    ]
    both = [
        outcome(
            f"{name} of {dtype}",
            "one tile",
            level,
            "right" if level == levels[0] else "wrong",
            pattern="module: arith.extui of uint",
            faults=() if level == levels[0] else (22,),
        )
        for name in ("to int32", ">>")
        for dtype in ("uint16", "uint8")
        for level in levels
    ]
    text = suite.page([*right, *wrong], 60)
    assert "Right at every level: `+`, `\\|`." in text
    assert "| operation | Linalg IR, modules of 1.0.0, 1.1.0 | module of 1.2.0 | fault |" in text
    assert "| `-` | right | wrong: int8 | new |" in text
    assert "| what is new | of | on |\n|---|---|---|\n| arith.subi of int | `-` of int8 | module of 1.2.0 |" in text
    text = suite.page(both, 60)
    assert "| operation | Linalg IR | modules of 1.0.0, 1.1.0, 1.2.0 | fault |" in text
    assert "| `to int32` | right | wrong: all 2 | 22 |" in text
    assert "what is new" not in text


@pytest.mark.compilers
@compiled
def test_the_command_finds_a_fault_and_writes_its_smallest_kernel(tmp_path, capsys):
    assert main(["conformance", "--operation", "!= number", "--limit", "0.001", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("!= number of int1, one tile, 1.") == 3
    assert "must be" in said
    (report,) = tmp_path.glob("module-*.md")
    text = report.read_text()
    assert "o = tl.arange(0, 2)\n" in text
    assert "Known: compiler fault 21" in text


def test_the_command_refuses_an_operation_that_there_is_not(capsys):
    assert main(["conformance", "--operation", "tl.nothing"]) == 2
    assert "--operation is 'tl.nothing', must be one of" in capsys.readouterr().err


def test_the_page_has_every_operation_and_counts_all_that_ran():
    text = PAGE.read_text()
    names = re.findall(r"`(.*?)`", re.findall(r"^Right at every level: .*", text, re.M)[0])
    names += re.findall(r"^\| `(.*?)` \|", text, re.M)
    assert sorted(name.replace("\\|", "|") for name in names) == sorted(each.name for each in OPERATIONS)
    (ran,) = re.findall(rf"^(\d+) of {len(CASES)} operations x dtypes", text, re.M)
    counts = re.findall(r"^\| (?:Linalg IR|module of \S+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)
    assert [sum(map(int, each)) for each in counts] == [int(ran)] * 4


@pytest.mark.nightly
@pytest.mark.compilers
@compiled
def test_whatever_is_wrong_has_a_number(capsys):
    assert main(["conformance", "--limit", "7200"]) == 0, capsys.readouterr().out
