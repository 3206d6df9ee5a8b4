"""`python -m npu_rms_norm explain --rows 32768 --width 4096 --chip H200`: a command line made from a function's signature.

Every parameter of the function is keyword-only and becomes an option: `norm_before_gate: bool` is --norm-before-gate, and a
`Literal` lists its choices. What the parameters' names mean is the same in all packages, and so is the help.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..chips.devices import GPUS
from ..errors import TileTooLargeError, UnknownDeviceError
from .explanation import Explanation

HELP = {
    "width": "hidden size: elements of a row",
    "vocabulary": "rows of the table or of the head",
    "dtype": "of the inputs",
    "chip": f"an Ascend SoC, as Ascend910B4, or one of {', '.join(GPUS)}",
    "backward": "the backward too",
}


def main(
    package: str, explain: Callable[..., Explanation], arguments: Sequence[str] | None = None, *, tokens: str = "rows"
) -> int:
    """The command line of a package; prints an explanation and returns the exit status.

    Args:
        package: its import name.
        explain: makes the explanation; its docstring's first line describes the command, and its `Args` those options that
            `HELP` does not have.
        arguments: None: those of the process.
        tokens: another name of the option --tokens.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {package}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    summary = (inspect.getdoc(explain) or "").partition("\n")[0]
    command = commands.add_parser("explain", help=summary, description=summary)
    hints = get_type_hints(explain)
    for name, parameter in inspect.signature(explain).parameters.items():
        text = HELP.get(name) or _documented(explain, name)
        _add_option(command, [name, tokens] if name == "tokens" else [name], hints[name], parameter.default, text)
    options = vars(parser.parse_args(arguments))
    try:
        print(explain(**options).text)
    except (UnknownDeviceError, TileTooLargeError, TypeError, ValueError) as error:
        command.error(str(error))
    return 0


def _add_option(command: argparse.ArgumentParser, names: Sequence[str], hint: Any, default: Any, text: str) -> None:
    flags = [f"--{name.replace('_', '-')}" for name in names]
    required = default is inspect.Parameter.empty
    given: dict[str, Any] = {"dest": names[0], "required": required, "help": text}
    if not required:
        given["default"] = default
        given["help"] = text if default in (None, False) else f"{text} (default: {default})"
    kind = get_args(hint)[0] if type(None) in get_args(hint) else hint  # of `int | None`, int
    if kind is bool:
        given["action"] = argparse.BooleanOptionalAction if default is True else "store_true"
        del given["required"]
    elif get_origin(kind) is Literal:
        given["choices"] = get_args(kind)
    else:
        given["type"] = kind
        given["metavar"] = {int: "N", float: "NUMBER"}.get(kind, "NAME")
    command.add_argument(*flags, **given)


def _documented(explain: Callable[..., Any], name: str) -> str:
    """What the docstring's section `Args` says of a parameter."""
    lines = iter((inspect.getdoc(explain) or "").splitlines())
    said: list[str] = []
    for line in lines:
        if said and not line.startswith("        "):
            break
        if said or line.strip().startswith(f"{name}: "):
            said.append(line.strip().removeprefix(f"{name}: "))
    return " ".join(said).rstrip(".")
