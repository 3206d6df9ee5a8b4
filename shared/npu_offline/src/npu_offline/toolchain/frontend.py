"""triton-ascend's front end: from a JIT function to the Linalg IR that the Ascend compiler is given.

Options that are not given have triton-ascend's defaults, which are the same for every chip.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from triton._C.libtriton import ir
from triton.backends.ascend.compiler import AscendAttrsDescriptor, NPUOptions, make_ttir, ttir_to_linalg
from triton.compiler import ASTSource

from ..errors import RefusedError, UnsupportedError
from ..module.places import lines_by_operation, places_of
from .helpers import refuse_helpers_of_one_name
from .messages import has_advice, reason

refuse_helpers_of_one_name()

_CONVERTED = (
    "What it converts: addresses that are sums and products of program numbers, ranges, arguments and loaded numbers;"
    " pointers that a loop makes, or moves by one step a turn; masks that compare ranges with numbers. Write the line so"
)


def options_from(given: Mapping[str, Any]) -> NPUOptions:
    """triton-ascend's options: its defaults, overridden by those of `given` that are options."""
    return NPUOptions(**{name: value for name, value in given.items() if name in NPUOptions.__dataclass_fields__})


def changed_options(options: Any) -> dict[str, Any]:
    """Those of triton-ascend's options that are not the defaults."""
    defaults = options_from({}).__dict__
    given = {name: getattr(options, name, default) for name, default in defaults.items()}
    # The JIT keeps metadata as JSON, where tuples become lists.
    return {name: value for name, value in given.items() if value != defaults[name] and not isinstance(value, list)}


def to_linalg(module: Any, options: NPUOptions) -> str:
    """The "ttadapter" text of an optimised TTIR module.

    Raises:
        RefusedError: triton-ascend's converter refused it.
        UnsupportedError: it has assembly in it, or is compiled for debugging.
    """
    if options.debug:
        raise UnsupportedError("TRITON_DEBUG is set, and tl.device_assert cannot be run: unset it")
    try:
        linalg = _converted(str(module), options)
    except subprocess.CalledProcessError as error:
        raw = error.stderr.decode(errors="replace")
        where = _refused_place(str(module), options)
        advice = "" if has_advice(raw) else f"\n{_CONVERTED}"
        raise RefusedError(f"triton-ascend cannot convert the kernel{where}:\n{reason(raw)}{advice}") from None
    if "llvm.inline_asm" in linalg:
        place = next(iter(lines_by_operation(str(module)).get("tt.elementwise_inline_asm", ())), "")
        raise UnsupportedError(
            f"tl.inline_asm_elementwise{f' ({place})' if place else ''} has assembly of another chip: Ascend's assembler"
            " knows none of it"
        )
    return linalg


def _converted(ttir: str, options: NPUOptions) -> str:
    return str(ttir_to_linalg(ttir, dict(options.__dict__), options, named_ops=True))


def _refused_place(ttir: str, options: NPUOptions) -> str:
    """The line of the first statement with which a kernel is refused, by conversions of its first statements alone."""
    head, statements, tail = _statements(ttir)
    converts, refused = 0, len(statements)
    while refused - converts > 1:
        middle = (converts + refused) // 2
        try:
            _converted("\n".join([*head, *sum(statements[:middle], []), "    tt.return", *tail]), options)
            converts = middle
        except subprocess.CalledProcessError:
            refused = middle
    place = re.search(r"loc\((#loc\d*)\)\s*$", statements[refused - 1][-1]) if statements else None
    found = str(places_of(ttir).get(place[1], "")) if place else ""
    return f" ({found}, or what that uses)" if found else ""


def _statements(ttir: str) -> tuple[list[str], list[list[str]], list[str]]:
    """What stands before the statements of a kernel's body, their lines, and what stands behind them.

    A kernel that has several blocks, as one with an early return, has no statements here.
    """
    lines = ttir.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("  tt.func public")), len(lines)) + 1
    end = next((i for i in range(first, len(lines)) if lines[i].startswith(("  }", "  ^"))), len(lines))
    statements: list[list[str]] = []
    for line in lines[first:end]:
        if re.match(r" {4}[^ }]", line):
            statements.append([])
        if statements:
            statements[-1].append(line)
    whole = end < len(lines) and lines[end].startswith("  }")
    return lines[:first], statements if whole else [], lines[end:]


def front_end(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    options: NPUOptions,
    divisible: Sequence[str] = (),
) -> tuple[str, str]:
    """The TTIR and the Linalg IR of a kernel, without the JIT.

    Args:
        kernel: the `triton.JITFunction`.
        signature: type by argument name ("*bf16", "i32"); constexprs may be missing.
        constants: value by argument name.
        options: as `options_from` makes them.
        divisible: arguments that are multiples of 16.
    """
    names = list(kernel.arg_names)
    types = {name: signature.get(name, "constexpr") for name in names}
    ones = {names.index(name): 1 for name, value in constants.items() if types[name].startswith("i") and value == 1}
    attributes = AscendAttrsDescriptor.from_hints({**{names.index(name): 16 for name in divisible}, **ones})
    context = ir.context()
    ir.load_dialects(context)
    source = ASTSource(kernel, types, dict(constants), attributes)
    codegen = {"min_dot_size": lambda left, right: (1, 1, 1)}
    module = make_ttir(source.make_ir(options, codegen, {}, context), dict(options.__dict__), options)
    return str(module), to_linalg(module, options)
