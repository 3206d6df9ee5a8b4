"""triton-ascend's front end: from a JIT function to the Linalg IR that the Ascend compiler is given.

Options that are not given have triton-ascend's defaults, which are the same for every chip.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from triton._C.libtriton import ir
from triton.backends.ascend.compiler import AscendAttrsDescriptor, NPUOptions, make_ttir, ttir_to_linalg
from triton.compiler import ASTSource

from ..errors import CompilationError, UnsupportedError
from .helpers import refuse_helpers_of_one_name
from .messages import reason

refuse_helpers_of_one_name()


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
        CompilationError: triton-ascend's converter refused it.
        UnsupportedError: it has assembly in it, or is compiled for debugging.
    """
    if options.debug:
        raise UnsupportedError("TRITON_DEBUG is set, and tl.device_assert cannot be run: unset it")
    try:
        linalg = str(ttir_to_linalg(module, dict(options.__dict__), options, named_ops=True))
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace")
        raise CompilationError(f"triton-adapter-opt failed:\n{reason(said)}") from None
    if "llvm.inline_asm" in linalg:
        raise UnsupportedError("tl.inline_asm_elementwise has assembly of another chip: Ascend's assembler knows none of it")
    return linalg


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
