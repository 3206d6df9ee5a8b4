"""Values of a kernel's arguments from their text: numbers, tensors that are made, tensors of files."""

from __future__ import annotations

import ast
import itertools
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OfflineError

if TYPE_CHECKING:
    import torch

DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "i1": "bool",
}
_BELOW = 2
"""Random integers of a tensor are below this number, unless the argument says otherwise."""
_RANGE = re.compile(r"(.+)\.\.(.+)")
_FILES = (".npy", ".safetensors")
_LEAST = 2.0**-10  # of the numbers of a positive tensor

FORMS = """an argument is NAME=VALUE, and VALUE one of
    bf16:512x1000    a tensor of random numbers (fp64, fp32, fp16, bf16, i64, i32, i16, i8, u8, i1)
    fp32:512:positive    of positive ones; also zeros, ones, and 0..1 for numbers between
    i64:512:32000    a tensor of random integers below 32000 (2 if it is left out); 5..9 for 5, 6, 7 and 8
    x.npy, model.safetensors:lm_head.weight    a tensor of a file
    1000, 1e-5, True, None, tl.int32    a number, a flag, no argument, a dtype
    128,64,256    sizes that `tune` compares; other commands use the first"""


def value_of(name: str, text: str) -> Any:
    """The value of an argument; floating-point tensors without a third part are empty.

    Raises:
        OfflineError: the text is none of `FORMS`.
    """
    file, _, key = text.partition(":")
    if is_file(text):
        return _of_file(name, Path(file), key)
    kind, colon, rest = text.partition(":")
    return _tensor(name, text, kind, *rest.split(":")) if colon else number_of(text)


def is_file(text: str) -> bool:
    """Whether the text names a tensor of a file."""
    return text.partition(":")[0].endswith(_FILES)


def is_float(kind: str) -> bool:
    """Whether a dtype of `DTYPES` has floating-point numbers."""
    return kind.startswith(("fp", "bf"))


def names_contents(text: str) -> bool:
    """Whether the text of a tensor says what its elements are."""
    return text.count(":") > 1 or is_file(text)


def number_of(text: str) -> Any:
    """A number, a flag or None as in Python, or a dtype; other text stands for itself, as some kernels take names."""
    if text.startswith("tl."):
        import triton.language

        return getattr(triton.language, text[3:], text)
    try:
        return float(text) if text in ("inf", "-inf", "nan") else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _tensor(name: str, text: str, kind: str, shape: str, content: str = "", *more: str) -> torch.Tensor:
    import torch

    dtype = getattr(torch, DTYPES.get(kind, kind), None)
    try:
        sizes = [int(size) for size in shape.split("x")]
    except ValueError:
        sizes = []
    if not isinstance(dtype, torch.dtype) or not sizes or min(sizes) < 0 or more:
        raise OfflineError(f"{name} is {text!r}; {FORMS}")
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # tensors of one shape differ
    if content in ("zeros", "ones"):
        return torch.full(sizes, int(content == "ones"), dtype=dtype)
    if content == "positive" and dtype.is_floating_point:
        return torch.randn(sizes, generator=random).abs().add(_LEAST).to(dtype)
    try:
        between = _RANGE.fullmatch(content)
        if dtype.is_floating_point:
            low, high = (float(end) for end in between.groups()) if between else (0.0, 0.0)
            if between:
                return torch.rand(sizes, generator=random).mul(high - low).add(low).to(dtype)
            if not content:
                return torch.empty(sizes, dtype=dtype)
        else:
            first, last = (int(end) for end in between.groups()) if between else (0, int(content or _BELOW))
            if last > first:
                return torch.randint(first, last, sizes, generator=random).to(dtype)
    except ValueError:
        pass
    raise OfflineError(f"{name} is {text!r}; {FORMS}")


def _of_file(name: str, path: Path, key: str) -> torch.Tensor:
    if not path.is_file():
        raise OfflineError(f"{name} is {path}, which does not exist")
    try:
        if path.suffix == ".npy":
            import numpy
            import torch

            return torch.from_numpy(numpy.load(path))
        from safetensors import safe_open
    except ImportError as error:
        raise OfflineError(f"{name} is {path}: pip install {error.name}") from None
    with safe_open(path, framework="pt") as file:
        if key not in file.keys():  # noqa: SIM118 - not a dictionary
            raise OfflineError(f"{name} is {path}:{key}; the file has {', '.join(file.keys())}")
        tensor: torch.Tensor = file.get_tensor(key)
        return tensor


def combinations(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values that each name may have."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
