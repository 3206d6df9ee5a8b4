"""What is generated: operations x dtypes x variants, each a kernel, its inputs, and what its results must be.

An operation is defined in PyTorch on exact numbers, int64 or fp64; the result is what Triton 3.2 defines: integers wrap to
the width of their type, truth values are integers of one bit, floats are rounded once. What ends a compiler by a fatal error
of LLVM instead of a message is not generated.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

SIGNED, UNSIGNED = ("int8", "int16", "int32", "int64"), ("uint8", "uint16", "uint32")
INTEGERS = SIGNED + UNSIGNED
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
NUMBERS = (*INTEGERS, *FLOATS)
_ALL, _SOME = ("int1", *NUMBERS), ("int32", "float32")
SIZE = 128  # elements of each input and of the result
FILL = 1  # what a result holds before the launch
_PART = 50  # elements of the variants that take n of them
_LONG = 64  # bits


@dataclass(frozen=True)
class Operation:
    """An operation of Triton's language.

    Attributes:
        name: as tables show it.
        text: in the kernel, of tiles x and w and of c, the number w[0]; AXIS is the last one.
        exact: the same in PyTorch, of x and w.
        dtypes: of x and w.
        result: the dtype of the result; "" for that of x.
        kind: "reduction", "scan" or, for each element, "".
        positive: whether w is above 0, and where it is an amount of a shift below the width.
        ulps: how far a result in floats may be off, in units in its last place.
        largest: x is no larger; 0 for no limit.
        fault: of COMPILER_FAULTS, where no lint rule finds it.
    """

    name: str
    text: str
    exact: Callable[[Tensor, Tensor], Tensor]
    dtypes: tuple[str, ...]
    result: str = ""
    kind: str = ""
    positive: bool = False
    ulps: float = 0
    largest: float = 0
    fault: int = 0


def _function(name: str, ulps: float = 4, largest: float = 0) -> Operation:
    exact = getattr(torch, name)
    return Operation(f"tl.{name}", f"tl.{name}(x)", lambda x, w: exact(x), ("float32",), ulps=ulps, largest=largest)


def _cast(dtype: str) -> Operation:
    sources = tuple(source for source in NUMBERS if source != dtype)
    largest, fault = 100 * (dtype in INTEGERS), 39 * (dtype == "bfloat16")
    return Operation(f"to {dtype}", f"x.to(tl.{dtype})", lambda x, w: x, sources, dtype, largest=largest, fault=fault)


def _extreme(name: str, without: float) -> Operation:
    def exact(x: Tensor, w: Tensor) -> Tensor:
        kept = torch.where(x.isnan(), without, x) if x.is_floating_point() else x
        return getattr(kept, f"a{name}")(-1)

    return Operation(f"tl.{name}", f"tl.{name}(x, AXIS)", exact, (*SIGNED, *FLOATS), kind="reduction", fault=25)


def _xor(x: Tensor, w: Tensor) -> Tensor:
    places = torch.arange(_LONG)
    return (((x[..., None] >> places) & 1).sum(-2) % 2 << places).sum(-1)


OPERATIONS = (
    Operation("+", "x + w", torch.add, NUMBERS),
    Operation("-", "x - w", torch.sub, NUMBERS),
    Operation("*", "x * w", torch.mul, NUMBERS),
    Operation("/", "x / w", torch.div, ("float32",), positive=True),
    Operation("//", "x // w", lambda x, w: x.div(w, rounding_mode="trunc"), INTEGERS, positive=True),
    Operation("%", "x % w", torch.fmod, (*SIGNED, "uint8", "uint16", "float32"), positive=True, fault=23),
    Operation("&", "x & w", torch.bitwise_and, ("int1", *INTEGERS)),
    Operation("|", "x | w", torch.bitwise_or, ("int1", *INTEGERS)),
    Operation("^", "x ^ w", torch.bitwise_xor, ("int1", *INTEGERS)),
    Operation("<<", "x << w", torch.bitwise_left_shift, INTEGERS, positive=True),
    Operation(">>", "x >> w", torch.bitwise_right_shift, INTEGERS, positive=True),
    Operation("~", "~x", lambda x, w: ~x, ("int1", *INTEGERS)),
    Operation("==", "x == w", torch.eq, _ALL, "int1"),
    Operation("<", "x < w", torch.lt, (*SIGNED, "uint8", "uint32", *FLOATS), "int1"),
    Operation("== number", "x == c", lambda x, w: x == w[0], ("int1", *_SOME), "int1"),
    Operation("!= number", "x != c", lambda x, w: x != w[0], ("int1", *_SOME), "int1"),
    Operation("tl.maximum", "tl.maximum(x, w)", lambda x, w: torch.fmax(x, w), NUMBERS),
    Operation("tl.minimum", "tl.minimum(x, w)", lambda x, w: torch.fmin(x, w), NUMBERS),
    Operation("tl.where", "tl.where(x < w, x, w)", lambda x, w: torch.where(x < w, x, w), (*SIGNED, *FLOATS)),
    Operation("tl.abs", "tl.abs(x)", lambda x, w: x.abs(), (*SIGNED, *FLOATS)),
    Operation("tl.fma", "tl.fma(x, x, -(x * x))", lambda x, w: x * x - (x * x).float().double(), ("float32",)),
    *map(_function, ("exp", "log", "log2", "rsqrt", "sigmoid")),
    replace(_function("exp2"), fault=26),
    replace(_function("erf"), fault=25),
    _function("sqrt", 1),
    *(_function(name, 0) for name in ("floor", "ceil")),
    *(_function(name, 4, 10) for name in ("sin", "cos")),
    Operation("tl.sum", "tl.sum(x, AXIS)", lambda x, w: x.sum(-1), _ALL, "", "reduction", ulps=SIZE, largest=4),
    _extreme("max", -torch.inf),
    _extreme("min", torch.inf),
    Operation("tl.xor_sum", "tl.xor_sum(x, AXIS)", _xor, INTEGERS, kind="reduction"),
    Operation("tl.argmax", "tl.argmax(x, AXIS)", lambda x, w: x.argmax(-1), _SOME, "int32", "reduction", largest=4),
    Operation("tl.cumsum", "tl.cumsum(x, 0)", lambda x, w: x.cumsum(-1), _ALL, "", "scan", ulps=SIZE, largest=4),
    *(_cast(dtype) for dtype in (*SIGNED, *FLOATS)),
)  # fmt: skip

# Of each variant the places of a tile, the loop around it, the mask, how many elements it takes, and what has it. All agree.
VARIANTS: Mapping[str, tuple[str, str, str, int, str]] = {
    "one tile": ("tl.arange(0, {size})", "", "", 64, "reduction scan"),
    "plus zero": ("tl.arange(0, 64)", "", "", 64, "reduction scan"),
    "twice the tile": ("tl.arange(0, 128)", "", "", 128, "reduction scan"),
    "rows": ("tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]", "", "", 64, "reduction"),
    "backwards": ("63 - tl.arange(0, 64)", "", "", 64, ""),
    "part of a tile": ("tl.arange(0, 128)", "", "o < n", _PART, ""),
    "loop": ("i * 32 + tl.arange(0, 32)", "tl.range(0, 2)", "", 64, ""),
    "numbers": ("i", "tl.range(0, n)", "", _PART, ""),
}


@dataclass(frozen=True)
class Case:
    """An operation on a dtype; `size` elements of one tile, of inputs without their first `shift` ones."""

    operation: Operation
    dtype: str
    size: int = 64
    shift: int = 0

    @property
    def name(self) -> str:
        """The operation and the dtype."""
        return f"{self.operation.name} of {self.dtype}"

    @property
    def result(self) -> str:
        """The dtype of the result."""
        return self.operation.result or self.dtype

    @property
    def variants(self) -> Iterator[str]:
        """Those that the operation has: a tile of truth values has no zero to add."""
        for variant, (*_, kinds) in VARIANTS.items():
            if self.operation.kind in kinds and not (variant == "plus zero" and self.dtype == "int1"):
                yield variant

    @cached_property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """x and w as exact numbers, int64 or fp64."""
        x, w = self._all_inputs()
        return x.roll(-self.shift), w if " c" in self.operation.text else w.roll(-self.shift)

    def _all_inputs(self) -> tuple[Tensor, Tensor]:
        operation, random = self.operation, torch.Generator().manual_seed(0)
        if self.dtype in FLOATS:
            x, w = torch.randn(2, SIZE, generator=random) * torch.tensor([1.0, 30.0]).repeat(SIZE // 2)
            x[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1e8, 1 + 2.0**-12])
            x = x.nan_to_num(0, 1, -1).clamp(-operation.largest, operation.largest) if operation.largest else x
            w = w.abs().clamp(min=0.125) if operation.positive else w
            x, w = (each.to(FLOATS[self.dtype]).double() for each in (x, w))
            return x, w
        bits = _bits(self.dtype)
        low, stop = (0, 2**bits) if self.dtype not in SIGNED else (1 - 2 ** (bits - 1), 2 ** (bits - 1))
        x, w = torch.randint(low, min(stop, 2**63 - 1), (2, SIZE), generator=random)
        x[:5], w[0] = torch.tensor([0, 1, stop - 1, low, min(50331647, stop - 1)]), 1
        if operation.positive:
            w = w.abs() % min(bits if operation.name in ("<<", ">>") else 100, stop - 1)
            w = w.clamp(min=1)
        return x, w

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """x, w, zero, y and n of the kernel. Unsigned numbers are held as signed ones of the same bits."""
        x, w = (stored(each, self.dtype) for each in self.inputs)
        return x, w, torch.zeros(1, dtype=x.dtype), stored(torch.full((SIZE,), FILL), self.result), _PART

    def expected(self, variant: str) -> Tensor:
        """y after the launch."""
        x, w = (each[: min(VARIANTS[variant][3], self.size if variant == "one tile" else SIZE)] for each in self.inputs)
        if variant == "rows" and self.operation.kind == "reduction":
            x = x.reshape(4, 16)
        y = stored(self.operation.exact(x, w).reshape(-1), self.result)
        return torch.cat((y, stored(torch.full((SIZE - len(y),), FILL), self.result)))

    def source(self, variant: str) -> str:
        """The kernel."""
        o, loop, mask, *_ = VARIANTS[variant]
        if self.dtype == "int1":
            typed = " != 0"
        else:
            typed = f".to(tl.{self.dtype}, bitcast=True)" if self.dtype in UNSIGNED else ""
        load = f"tl.load({{}}, mask={mask}, other=1){typed}" if mask else f"tl.load({{}}){typed}"
        text = self.operation.text.replace("AXIS", "1" if variant == "rows" else "0")
        place = {"reduction": "tl.arange(0, 4)" if variant == "rows" else "0"}.get(self.operation.kind, "o")
        body = [
            f"o = {o.format(size=self.size)}",
            f"x = {load.format('p_x + o')}" + (f" + tl.load(p_zero){typed}" if variant == "plus zero" else ""),
            f"w = {load.format('p_w + o')}",
            f"y = ({text}).to(p_y.dtype.element_ty{', bitcast=True' if self.result in UNSIGNED else ''})",
            f"tl.store(p_y + {place}, y{f', mask={mask}' if mask else ''})",
        ]
        body = [f"for i in {loop}:", *(f"    {line}" for line in body)] if loop else body
        head = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(p_x, p_w, p_zero, p_y, n):\n"
        return head + textwrap.indent("\n".join([f"c = tl.load(p_w){typed}", *body]), "    ") + "\n"

    def wrong(self, seen: Tensor, variant: str) -> list[int]:
        """The elements of y that are not what they must be."""
        expected = self.expected(variant)
        right = (seen == expected) | (seen.isnan() & expected.isnan())
        if self.result in FLOATS:
            least = self.operation.largest if self.operation.largest else torch.finfo(expected.dtype).tiny
            size = expected.double().abs().clamp(min=least)
            allowed = self.operation.ulps * torch.finfo(expected.dtype).eps * size
            right |= (seen.double() - expected.double()).abs() <= allowed
        return (~right).nonzero().flatten().tolist()


def stored(exact: Tensor, dtype: str) -> Tensor:
    """Exact numbers as tensors hold them: wrapped to the width of an integer type, or rounded. Truth values are int32."""
    if dtype in FLOATS:
        return exact.to(FLOATS[dtype])
    bits, whole = _bits(dtype), exact.to(torch.int64)
    if bits == 1:
        return (whole & 1).to(torch.int32)
    if bits < _LONG:
        whole = (whole + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    return whole.to(getattr(torch, f"int{bits}"))


def _bits(dtype: str) -> int:
    return int(dtype.removeprefix("u").removeprefix("int"))


CASES = tuple(Case(operation, dtype) for operation in OPERATIONS for dtype in operation.dtypes)
"""All operations x dtypes."""
