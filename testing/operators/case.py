"""A case of an operator: a public call, its inputs, and what is known of it; and which cases a test is asked of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..properties.ways import place

DEVICES = ("cpu", "cuda", "npu")  # for `only_at`: tracing and autograd are the same where kernels are emulated
Shape = tuple[int, ...]
Function = Callable[..., Any]
Test = TypeVar("Test", bound=Callable[..., object])


@dataclass(frozen=True)
class Input:
    """An input that is no trained tensor of normally distributed numbers.

    Attributes:
        shape: of it.
        below: integers from 0 to below - 1; None: floating point.
        trained: whether it has a gradient.
        dtype: the narrowest it has; None: the case's.
        of: what is made of the numbers that are drawn.
    """

    shape: Shape
    below: int | None = None
    trained: bool = False
    dtype: torch.dtype | None = None
    of: Callable[[Tensor], Tensor] = lambda numbers: numbers


def integers(below: int, *shape: int) -> Input:
    """Integers from 0 to below - 1."""
    return Input(shape, below)


@dataclass(frozen=True)
class Case:
    """One public call.

    Attributes:
        name: the test's.
        function: takes the inputs; returns a tensor, or a tuple of tensors and None.
        inputs: of a number of tokens: the shape of each trained input, an `Input`, or the tensor itself.
        definition: the same in PyTorch's own operators, of the trained inputs and the others, for fp64.
        tangents: whether it has forward-mode derivatives; they are refused by name otherwise.
        cast: positions of inputs that autocast casts, as of a linear layer's.
        saved: how many elements the tensors have that are saved for the backward, ascending, of 3 tokens; None: not asked.
        dtype: of inputs.
        tokens: how many, where a test does not depend on it.
        option: whether another case calls the same function. Then this one is not asked what depends on the function alone.
        without: names of tests that this case is not asked.
    """

    name: str
    function: Function
    inputs: Callable[[int], Sequence[Shape | Input | Tensor]]
    definition: Function | None = None
    tangents: bool = True
    cast: tuple[int, ...] = ()
    saved: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    tokens: int = 3
    option: bool = False
    without: frozenset[str] = frozenset()

    def draw(
        self,
        device: torch.device | str = "cpu",
        tokens: int | None = None,
        dtype: torch.dtype | None = None,
        *,
        seed: int = 0,
        strided: bool = False,
    ) -> Call:
        """The call with inputs made from a seed, the same on every device; `strided`: at strides of another order."""
        generator = torch.Generator().manual_seed(seed)
        places: list[int] = []
        tensors: list[Tensor] = []
        for given in self.inputs(self.tokens if tokens is None else tokens):
            if isinstance(given, Tensor):
                tensors.append(given.to(device, copy=True))
                continue
            spec = given if isinstance(given, Input) else Input(given, trained=True)
            if spec.below is not None:
                tensors.append(spec.of(torch.randint(0, spec.below, spec.shape, generator=generator)).to(device))
                continue
            numbers = spec.of(torch.randn(spec.shape, generator=generator, dtype=torch.float64))
            drawn = dtype or self.dtype
            tensors.append(numbers.to(device, torch.promote_types(drawn, spec.dtype) if spec.dtype else drawn))
            if spec.trained:
                places.append(len(tensors) - 1)
        if strided:
            tensors = [transposed(tensor) for tensor in tensors]
        return Call(self, tensors, places, strided)

    def token_dims(self) -> list[int | None]:
        """Of each input, the dimension whose length is the number of tokens, or grows with it."""
        return [differing(*pair) for pair in zip(self.draw(tokens=3).tensors, self.draw(tokens=5).tensors, strict=True)]

    @property
    def trains(self) -> bool:
        """Whether there is a gradient."""
        return bool(self.draw().trained)


def differing(one: Tensor, other: Tensor) -> int | None:
    """The first dimension in which two tensors' lengths differ."""
    lengths = zip(one.shape, other.shape, strict=True)
    return next((dim for dim, (a, b) in enumerate(lengths) if a != b), None)


class Call(NamedTuple):
    """A case with inputs."""

    case: Case
    tensors: list[Tensor]
    places: list[int]  # of the trained inputs among all
    strided: bool = False

    @property
    def trained(self) -> list[Tensor]:
        """The inputs that are differentiated."""
        return [self.tensors[at] for at in self.places]

    def given(self, trained: Sequence[Tensor]) -> list[Tensor]:
        """All inputs, with these for the trained ones."""
        tensors = list(self.tensors)
        for at, tensor in zip(self.places, trained, strict=True):
            tensors[at] = tensor
        return tensors

    def leaves(self) -> list[Tensor]:
        """Copies of the trained inputs that ask for gradients."""
        copied = transposed if self.strided else torch.clone
        return [copied(tensor.detach()).requires_grad_() for tensor in self.trained]

    def outputs(self, *trained: Tensor, function: Function | None = None) -> list[Tensor]:
        """The tensors that the function returns for these trained inputs."""
        return tensors_of((function or self.case.function)(*self.given(trained)))

    def floats(self, *trained: Tensor, function: Function | None = None) -> Tensor:
        """All results of floating point in one vector."""
        return joined(self.outputs(*trained, function=function))

    def scalar(self, *trained: Tensor, function: Function | None = None) -> Tensor:
        """A number whose gradient for each result is a different one."""
        return torch.sin(self.floats(*trained, function=function)).sum()

    def gradients(self, leaves: Sequence[Tensor], function: Function | None = None) -> list[Tensor]:
        """Of `scalar`, for leaves."""
        return [dense(one) for one in _gradients(self.scalar(*leaves, function=function), leaves)]

    def results(self, function: Function | None = None, leaves: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Results, and gradients of `scalar` for leaves; None: for fresh ones."""
        leaves = self.leaves() if leaves is None else leaves
        outputs = self.outputs(*leaves, function=function)
        found = [output.detach() for output in outputs]
        if leaves:
            found += map(dense, _gradients(torch.sin(joined(outputs)).sum(), leaves))
        return found

    @property
    def every(self) -> tuple[int, ...]:
        """`argnums` of torch.func.grad."""
        return tuple(range(len(self.trained)))


def tensors_of(found: object) -> list[Tensor]:
    """The tensors among a function's results."""
    results = found if isinstance(found, (tuple, list)) else (found,)
    return [result for result in results if isinstance(result, Tensor)]


def joined(outputs: Sequence[Tensor]) -> Tensor:
    """All that are of floating point in one vector, in fp32 at least."""
    floats = [output.reshape(-1) for output in outputs if output.is_floating_point()]
    wide = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in floats]
    return wide[0] if len(wide) == 1 else torch.cat(wide)


def _gradients(value: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, list(leaves), allow_unused=True, materialize_grads=True)


def dense(tensor: Tensor) -> Tensor:
    """A gradient that is not sparse."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def close(found: Sequence[Tensor], expected: Sequence[Tensor], within: float = 1e-5) -> None:
    """Equal in number, shape and dtype, and near each other."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=within, atol=within, equal_nan=True)


class Recorded(NamedTuple):
    """An operator's call that a case made, with copies of its arguments."""

    operator: Any
    arguments: tuple[Any, ...]

    def on(self, device: torch.device) -> tuple[Any, ...]:
        """The arguments, on a device."""

        def move(leaf: Any) -> Any:
            return place(leaf.detach(), device).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

        return tuple(tree_map(move, self.arguments))

    @property
    def kind(self) -> str:
        """What tells it from other calls: all but the numbers in its tensors."""
        described = tree_map(
            lambda leaf: (leaf.dtype, leaf.shape, leaf.stride(), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf,
            self.arguments,
        )
        return f"{self.operator}{described}"


def record(case: Case, tokens: int | None = None, dtype: torch.dtype | None = None, strided: bool = False) -> list[Recorded]:
    """The operators that a case calls on a CPU, forward and backward, each kind of call once.

    Args:
        tokens, dtype: of the case, where they are not its own.
        strided: inputs and upstream gradients lie in memory in another order than their dimensions.
    """
    heard: list[Recorded] = []
    call = case.draw(tokens=tokens, dtype=dtype, strided=strided)
    leaves = call.leaves()
    with _Calls(heard):
        outputs = call.outputs(*leaves)
    roots = [output for output in outputs if output.requires_grad]
    with _CallsBelow(heard):
        if roots:
            upstream = [transposed(root.detach().cos()) if strided else root.detach().cos() for root in roots]
            torch.autograd.grad(roots, leaves, upstream, allow_unused=True)
    return list({each.kind: each for each in heard}.values())


def is_ours(operator: Any) -> bool:
    """Whether an operator is of one of our packages, whose namespaces are npu_ and a name."""
    return isinstance(operator, torch._ops.OpOverload) and operator.namespace.startswith("npu_")


class _Calls(TorchFunctionMode):
    """Hears operators above autograd, where a program calls them."""

    def __init__(self, heard: list[Recorded]) -> None:
        self.heard = heard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_ours(func):
            self.heard.append(_copied(func, args, torch.is_grad_enabled()))
            composite = torch._C.DispatchKey.CompositeImplicitAutograd
            if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite):
                with _CallsBelow(self.heard):
                    return func(*args)
        return func(*args, **(kwargs or {}))


class _CallsBelow(TorchDispatchMode):
    """Hears operators below autograd: those of a backward."""

    def __init__(self, heard: list[Recorded]) -> None:
        super().__init__()
        self.heard = heard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_ours(func):
            self.heard.append(_copied(func, args, False))
        return func(*args, **(kwargs or {}))


def _copied(operator: Any, arguments: Any, gradients: bool) -> Recorded:
    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return place(leaf.detach(), leaf.device).requires_grad_(gradients and leaf.requires_grad)

    return Recorded(operator, tuple(tree_map(keep, arguments)))


def transposed(tensor: Tensor) -> Tensor:
    """The same numbers with the first two dimensions in the other order in memory; a vector with gaps."""
    if tensor.dim() > 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    return tensor.repeat_interleave(2)[::2] if tensor.dim() else tensor


@dataclass(frozen=True)
class Asked:
    """Which cases a test is asked of.

    Attributes:
        where: whether it is asked of a case.
        table: the name of the cases' table in the test's module. Where there is none, the test is not collected.
        rows: the cases of a table, each of which has a name, or is one.
        fixture: the test's parameter.
    """

    where: Callable[[Any], bool]
    table: str
    rows: Callable[[Any], Iterable[Any]]
    fixture: str

    def cases(self, test: Any, module: Any) -> list[Any]:
        """Those of a module's table that the test is asked of."""
        rows = self.rows(getattr(module, self.table))
        return [case for case in rows if test.__name__ not in getattr(case, "without", ()) and self.where(case)]


def only_at(*places: str) -> pytest.MarkDecorator:
    """Marks a test with the fixture `npu_place`: it is collected at these places alone."""
    said = f"asked at {' and '.join(places)} alone"
    return pytest.mark.uncollected(said, lambda place: (place or "cpu") not in places)


def of_function(case: Case) -> bool:
    """For `asked`: one case of each function."""
    return not case.option


def of_gradient(case: Case) -> bool:
    """For `asked`: one case of each function that is differentiated."""
    return not case.option and case.trains


def asked(
    where: Callable[[Any], bool] = lambda case: True,
    table: str = "CASES",
    rows: Callable[[Any], Iterable[Any]] = tuple,
    fixture: str = "case",
) -> Callable[[Test], Test]:
    """Mark a test as one of the suite: its fixture is each case of the module's table that the question is for."""

    def mark(test: Test) -> Test:
        test.asked = Asked(where, table, rows, fixture)  # type: ignore[attr-defined]
        return test

    return mark
