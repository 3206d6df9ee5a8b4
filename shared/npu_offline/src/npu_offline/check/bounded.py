"""A kernel with ranges of sizes: `FILE::kernel n=1..2**20 x=fp32:n BLOCK=1024`, as `npu-offline bounds` takes it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import npu_tiling

from ..bounds.subject import Subject
from ..errors import OfflineError
from ..launches import LaunchRecord
from .files import configurations, heuristics, jit_function
from .kernel_file import asks_for_programs, find
from .values import DTYPES, number_of

FORMS = """an argument is NAME=VALUE, and VALUE one of
    1..2**20    a size: every number from 1 to 2**20 - 1; an argument of the kernel, or a name that expressions use
    fp32:M*N    a tensor of so many elements: an expression of sizes, or 512x1000 (fp64, fp32, fp16, bf16, i64 ... i1)
    i64:T:V     a tensor of integers below V and not below 0; 5..V for the integers from 5
    1000, 2*N   an integer, or an expression of sizes
    1e-5, True, None, silu    a number, a flag, no argument, a name"""
_TENSOR = re.compile(rf"(?:{'|'.join(DTYPES)}):.+")
_AXES = re.compile(r"\d+(x\d+)+")
_I32 = 2**31
_I64 = 2**63


@dataclass
class _Given:
    """Arguments as they are read."""

    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    extents: dict[str, str] = field(default_factory=dict)
    contents: dict[str, tuple[str, str]] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)


def subject_of(target: str, given: Sequence[str], grid: str | None, conditions: Sequence[str]) -> Subject:
    """What a command line describes.

    Args:
        target: `FILE::kernel`.
        given: arguments and sizes as NAME=VALUE.
        grid: programs in x, y and z; None for one, where all programs would do the same.
        conditions: comparisons that hold for the sizes.

    Raises:
        OfflineError: a part of it is missing or wrong.
    """
    if "::" not in target:
        raise OfflineError(f"{target} names no kernel: write FILE::KERNEL")
    _, _, decorated = find(target)
    kernel, found = jit_function(decorated), _Given()
    if grid is None and asks_for_programs(kernel):
        raise OfflineError("--grid is missing: expressions of the programs in x, y and z, such as --grid 'cdiv(n, BLOCK)'")
    grid = "1" if grid is None else grid
    constant = {each.name for each in kernel.params if each.is_constexpr}
    annotated = {each.name: each.annotation_type for each in kernel.params if each.annotation_type}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or not value:
            raise OfflineError(f"{text!r} is no argument; {FORMS}")
        _read(found, name, value, name in constant, annotated.get(name, ""), name in kernel.arg_names)
    _complete(found, decorated)
    signature = {name: found.types.get(name, "constexpr") for name in kernel.arg_names}
    record = LaunchRecord(kernel, kernel.__name__, signature, found.constants, (1, 1, 1))
    try:
        programs = [ast.unparse(each) for each in ast.parse(f"({grid},)", mode="eval").body.elts]  # type: ignore[attr-defined]
    except SyntaxError:
        programs = []
    if not 1 <= len(programs) <= 3:
        raise OfflineError(f"--grid is {grid!r}, must be one to three expressions of sizes")
    ranges = found.ranges | _cores(f"{grid} {' '.join(conditions)}", found.ranges)
    return Subject(record, ranges, found.numbers, found.extents, programs, found.contents, conditions)


def _read(found: _Given, name: str, value: str, is_constant: bool, annotated: str, is_argument: bool) -> None:
    """Read one argument."""
    if _TENSOR.fullmatch(value):
        _read_tensor(found, name, value)
    elif is_constant:
        found.constants[name] = number_of(value)
    elif ".." in value:
        found.ranges[name] = _range(name, value)
        if is_argument:
            found.numbers[name] = name
            found.types[name] = annotated or _type_of(name, *found.ranges[name])
        return
    elif _is_expression(value):
        found.numbers[name] = value
        number = number_of(value)
        found.types[name] = annotated or _type_of(name, number, number + 1 if type(number) is int else 0)
    else:
        constant = number_of(value)
        if isinstance(constant, float):
            found.types[name] = "fp32"
        else:
            found.constants[name] = constant
    if not is_argument:
        raise OfflineError(f"{name} is {value!r}: the kernel has no argument {name}, and a size is a range: 1..1000")


def _read_tensor(found: _Given, name: str, value: str) -> None:
    kind, extent, *rest = value.split(":")
    found.types[name] = f"*{kind}"
    found.extents[name] = extent.replace("x", "*") if _AXES.fullmatch(extent) else extent
    content = {"zeros": "0..1", "ones": "1..2"}.get(*rest, *rest) if rest else ""
    if content and kind.startswith(("i", "u")):
        first, dots, stop = content.rpartition("..")
        found.contents[name] = (first if dots else "0", stop)


def _range(name: str, text: str) -> tuple[int, int]:
    """The first number and the one behind the last, which are written as numbers or powers."""
    numbers = [re.fullmatch(r"(-?\d+)(?:\*\*(\d+))?", end) for end in text.split("..")]
    if len(numbers) != 2 or not all(numbers):
        raise OfflineError(f"{name} is {text!r}, must be two numbers, such as 1..65536 or 1..2**31")
    first, stop = (int(each[1]) ** int(each[2] or 1) for each in numbers if each)
    if not first < stop:
        raise OfflineError(f"{name} is {text!r}, must have a number: the second is behind the last")
    return first, stop


def _type_of(name: str, first: Any, stop: int) -> str:
    """The type that Triton gives an integer argument: i32 where it fits."""
    if type(first) is not int or (first >= -_I32 and stop <= _I32):
        return "i32"
    if first >= _I32 and stop <= _I64:
        return "i64"
    raise OfflineError(f"{name} may be below 2**31, an i32, or not, an i64: check {first}..2**31 and 2**31..{stop} apart")


def _is_expression(value: str) -> bool:
    """Whether an argument's value is of sizes: no float, flag or None."""
    if value in ("True", "False", "None"):
        return False
    try:
        tree = ast.parse(value, mode="eval")
    except SyntaxError:
        return False
    return not any(isinstance(node, ast.Constant) and type(node.value) is not int for node in ast.walk(tree))


def _complete(found: _Given, decorated: Any) -> None:
    """Add what autotuning, heuristics and defaults give; refuse what is missing."""
    kernel = jit_function(decorated)
    tuned = next(iter(configurations(decorated)), {})
    for name, value in {**tuned, **{each.name: each.default for each in kernel.params if each.has_default}}.items():
        if name in kernel.arg_names and name not in found.types and name not in found.constants:
            found.constants[name] = value
    for name, compute in heuristics(decorated).items():
        if name not in found.constants:
            try:
                found.constants[name] = compute(dict.fromkeys(kernel.arg_names) | found.constants)
            except Exception:
                raise OfflineError(f"{name} is computed by @triton.heuristics from sizes: give {name}=VALUE") from None
    missing = [name for name in kernel.arg_names if name not in found.types and name not in found.constants]
    if missing:
        raise OfflineError(f"kernel {kernel.__name__} also needs {', '.join(missing)}; {FORMS}")


def _cores(text: str, ranges: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The numbers of cores that chips have, where expressions name them."""
    named = {node for node in re.findall(r"\b(?:cube_)?cores\b", text) if node not in ranges}
    kinds = {"cores": "vector_cores", "cube_cores": "cube_cores"}
    counts = {name: [getattr(chip, kinds[name]) for chip in npu_tiling.SOCS.values()] for name in named}
    return {name: (min(each), max(each) + 1) for name, each in counts.items()}
