"""`python -m npu_rms_norm explain --rows 32768 --width 4096 --chip H200`: a command line made from a function's signature.

Every parameter of the function is keyword-only and becomes an option: `norm_before_gate: bool` is --norm-before-gate, and a
`Literal` lists its choices. What the parameters' names mean is the same in all packages, and so is the help.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from . import arguments
from .budget import TileTooLargeError
from .chips import GPUS, SOCS, Device, UnknownDeviceError, device_for
from .chips import chip as chip_named
from .explaining import Explanation

Dtype = Literal["fp32", "bf16", "fp16", "float32", "bfloat16", "float16"]
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def check_sizes(**sizes: int | None) -> None:
    """Raises ValueError where one of these is given and is not a whole number of at least 1."""
    for name, size in sizes.items():
        if size is not None:
            arguments.whole(name, size, least=1)


def leaf(*shape: int, dtype: str, gradient: bool = True) -> Tensor:
    """A tensor on the meta device that needs a gradient, or none.

    Raises:
        ValueError: `dtype` is not a key of `DTYPES`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r} and must be one of {', '.join(DTYPES)}.")
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta", requires_grad=gradient)


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        return gradient[0]


def computed(tensor: Tensor) -> Tensor:
    """The same memory as something computed of the tensor, which may be written to where the tensor needs a gradient."""
    result: Tensor = _Computed.apply(tensor)
    return result


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the elements of all tensors; None has none."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)


def gradients(results: Iterable[Tensor | None], leaves: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Run the backward of the results that have one; returns the gradients of the leaves that need one."""
    recorded = [result for result in results if result is not None and result.requires_grad]
    inputs = [each for each in leaves if each is not None and each.requires_grad]
    return torch.autograd.grad(recorded, inputs, [torch.empty_like(result) for result in recorded])


def chosen_chip(name: str | Device | None) -> Device:
    """The chip itself, the chip of that name, or, for None, the one in this machine.

    Raises:
        UnknownDeviceError: there is no such chip, or none in this machine.
    """
    if isinstance(name, Device):
        return name
    if name is not None:
        return chip_named(name)
    found = None
    if torch.cuda.is_available():
        found = device_for(torch.device("cuda", torch.cuda.current_device()))
    elif hasattr(torch, "npu") and torch.npu.is_available():
        found = device_for(torch.device("npu", torch.npu.current_device()))
    if found is None:
        how = "as --chip Ascend910B4 or chip='Ascend910B4'"
        raise UnknownDeviceError(f"chip must be named, {how}: this machine has neither an NPU nor a GPU.")
    return found


HELP = {
    "width": "hidden size: elements of a row",
    "vocabulary": "rows of the table or of the head",
    "dtype": "of the inputs",
    "chip": "as Ascend910B4 or H200; --chips lists them",
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
    command.add_argument(
        "--all", action="store_true", help="each launch with its tile, its reason, and what runs if it does not fit"
    )
    command.add_argument("--chips", action=_Chips, nargs=0, default=argparse.SUPPRESS, help="list the chips")
    options = vars(parser.parse_args(arguments))
    shows_all = options.pop("all")
    try:
        found = explain(**options)
        print(found.text if shows_all else f"{found.brief}\n\n--all: each launch with its tile, and why")
    except (UnknownDeviceError, TileTooLargeError, TypeError, ValueError) as error:
        command.error(str(error))
    return 0


class _Chips(argparse.Action):
    """Prints the chips' names."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        kinds = {soc: chip_named(soc) for soc in SOCS}
        for arch in dict.fromkeys(chip.arch for chip in kinds.values()):
            print(f"{arch}:", ", ".join(name for name, chip in kinds.items() if chip.arch == arch))
        print("CUDA:", ", ".join(GPUS))
        parser.exit()


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
