"""Runs calls whole: every program, from Linalg IR with checks for races, and from each compiler's final module."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import EndlessLoopError, OfflineError, ours
from ..execute.emulation import emulate
from ..launches import Launch
from .execution import LINALG, MEANING, MOVED, RACING, SEED, random_values
from .kernel_file import KernelCall
from .stopped import is_refusal, said_of
from .values import is_file, is_float, names_contents, value_of


@dataclass(frozen=True)
class Difference:
    """How a result differs from what was expected.

    Attributes:
        name: the argument.
        error: the largest absolute difference; NaN where an element was not written, or only one of both is NaN.
        wrong: elements that differ by more than the tolerance.
        of: all elements.
        first: the first such element, of those that are off by more than `share` if there are any, what it is and must be,
            and how much it may differ.
        share: of the largest element, how far the kernel's own roundings may move a result; 0 where a tolerance was given.
        rounded: elements that differ by more than the tolerance, which the kernel's own roundings explain.
    """

    name: str
    error: float
    wrong: int
    of: int
    first: str = ""
    share: float = 0.0
    rounded: int = 0


class Differences(list[Difference]):
    """All results of a call that were compared.

    Attributes:
        results: the tensors among the arguments after the launch, by name.
    """

    def __init__(self, found: Iterable[Difference] = (), results: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(found)
        self.results = results or {}


@dataclass(frozen=True)
class Outcome:
    """A call that was run.

    Attributes:
        label: of the call.
        level: the toolchain whose final modules ran, `LINALG` for Linalg IR, `MEANING` for what the TTIR means.
        launches: what ran, with traffic.
        differences: results that were compared.
        problem: why it stopped.
        refused: whether it did not run, which says nothing of its results: Triton or the emulation refuses or fails.
        endless: whether a program of it did not end.
        numbers: what it ran with, other than what its arguments say and normally distributed numbers.
        error: what stopped it.
        results: for each kind of numbers the tensors after the launch, by name; empty where a file launches its kernels.
    """

    label: str
    level: str
    launches: Sequence[Launch]
    differences: Sequence[Difference] = ()
    problem: str = ""
    refused: bool = False
    endless: bool = False
    numbers: str = ""
    error: BaseException | None = None
    results: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return (not self.problem or self.refused) and not any(difference.wrong for difference in self.differences)

    @property
    def is_as_expected(self) -> bool:
        """Whether its results were compared, and are right."""
        return self.ok and not self.refused and bool(self.differences)


def run_levels(label: str, calls: Mapping[str, Callable[[], object]], soc: str, levels: Sequence[str]) -> Iterator[Outcome]:
    """Run a call at each level, as `run_whole` does; one that does not end from Linalg IR at no level behind it.

    Where the same call in fp64, without the kernel's roundings, is as expected, results may be off by a share of the largest
    element (1e-5 in fp32, .002 in fp16, .016 in bf16), and with other numbers than the first by any finite number.

    Args:
        label: of the call.
        calls: by the numbers that it is run with, the call; the later ones run where those before found nothing wrong.
        soc, levels: the chip; toolchains, `LINALG` and `MEANING`.
    """
    exact = functools.cache(lambda numbers: run_whole(label, calls[numbers], soc, MOVED))
    endless = False
    for level in levels:
        if endless:
            yield Outcome(label, level, (), problem="a loop does not end from Linalg IR", refused=True)
            continue
        outcome, *more = _until_wrong(label, calls, soc, level, exact)
        for other in more:
            outcome = _worse(outcome, other)
        endless = outcome.endless and level == LINALG
        yield outcome


def _until_wrong(
    label: str, calls: Mapping[str, Callable[[], object]], soc: str, level: str, exact: Callable[[str], Outcome]
) -> Iterator[Outcome]:
    for numbers, call in calls.items():
        outcome = run_whole(label, call, soc, level)
        if not outcome.ok and not outcome.problem and exact(numbers).is_as_expected:
            outcome = dataclasses.replace(outcome, differences=[_rounded(each, numbers) for each in outcome.differences])
        outcome = dataclasses.replace(
            outcome, numbers=numbers, results={numbers: outcome.results[""]} if outcome.results else {}
        )
        yield outcome
        if not outcome.ok or outcome.refused:
            return


def _rounded(difference: Difference, numbers: str) -> Difference:
    """A difference whose wrong elements are rounded ones, where it is small enough for that."""
    most = math.inf if numbers and difference.share else difference.share
    if not (math.isfinite(difference.error) and difference.error <= most):
        return difference
    return dataclasses.replace(difference, wrong=0, rounded=difference.wrong)


def _worse(first: Outcome, other: Outcome) -> Outcome:
    """One outcome of a call that ran with two kinds of numbers: what is wrong with the second, else the first."""
    results = {**first.results, **other.results}
    if not other.ok or other.refused:
        return dataclasses.replace(other, launches=first.launches, results=results)
    return dataclasses.replace(first, results=results)


def run_whole(label: str, call: Callable[[], object], soc: str, level: str) -> Outcome:
    """Run a call once.

    Args:
        label, call: what to run; what it returns is looked at if it is `Differences`.
        soc: the chip.
        level: a toolchain, whose final modules run; `LINALG`: then races of programs are errors, and bytes are counted;
            `MEANING`, `MOVED` or `RACING`: then no compiler takes part, and a launch that takes too long is refused.
    """
    of_ttir = level in (MEANING, MOVED, RACING)
    chosen: dict[str, Any] = {"meaning": level} if of_ttir else {"toolchain": level, "final": True}
    if level == LINALG:
        chosen = {"races": True, "ledgers": True}
    with emulate(soc, **chosen) as emulation:
        try:
            with torch.random.fork_rng(devices=[], device_type="cpu"), random_values():
                torch.manual_seed(SEED)
                compared = call()
        except Exception as error:
            endless = isinstance(ours(error), EndlessLoopError)
            refused = is_refusal(error) or (of_ttir and endless)
            said = said_of(error)
            return Outcome(
                label, level, emulation.launches, problem=said, refused=refused, endless=endless, error=ours(error)
            )
    if not isinstance(compared, Differences):
        return Outcome(label, level, emulation.launches)
    return Outcome(label, level, emulation.launches, compared, results={"": compared.results})


def run_with_accesses(call: Callable[[], object], soc: str, toolchain: str) -> list[Launch]:
    """The launches of a call, run from final modules with all checks, whose first programs access the Unified Buffer."""
    options: dict[str, Any] = {"checks": True, "keep_going": True, "accesses": True}
    stopped = contextlib.suppress(Exception)  # `run_whole` says why
    with (
        emulate(soc, toolchain=toolchain, **options) as emulation,
        stopped,
        torch.random.fork_rng(devices=[], device_type="cpu"),
        random_values(),
    ):
        torch.manual_seed(SEED)
        call()
    return [launch for launch in emulation.launches if launch.accesses]


def compared(
    call: KernelCall, expected: Sequence[str], rtol: float | None, atol: float | None
) -> Mapping[str, Callable[[], Differences]]:
    """Functions that launch a kernel and compare results with what expressions say, by the numbers that they take.

    Where results are compared, tensors of random numbers have normally distributed ones first, then numbers below
    zero, then large ones above.

    Args:
        call: the launch.
        expected: `NAME = EXPRESSION` of the arguments' values before the launch, in fp64 and int64, or `NAME = FILE` with
            the tensor that is expected, whose inputs then come from files as well. An argument
            that no expression reads, and whose text does not say what it holds, is full of NaN before.
        rtol, atol: tolerances; None for those of `torch.testing.assert_close` for the dtype, the absolute one as a share of
            the largest element where that is above 1.

    Raises:
        OfflineError: an expression cannot be computed, or has another shape than its argument.
    """
    rules = [_rule(text, call) for text in expected]
    read = {name for _, code in rules if not isinstance(code, str) for name in code.co_names}
    random = [name for name, texts in call.given.items() if _is_random(texts[0]) and name in read]
    kinds = {"": 0} | ({"with numbers below zero": -1, "with numbers above zero, up to 200": 1} if random else {})
    return {numbers: _comparison(call, rules, read, rtol, atol, sign) for numbers, sign in kinds.items()}


def _comparison(
    call: KernelCall,
    rules: Sequence[tuple[str, Any]],
    read: Container[str],
    rtol: float | None,
    atol: float | None,
    sign: int,
) -> Callable[[], Differences]:
    def arguments() -> dict[str, Any]:
        with random_values(sign=sign):  # the same at each level
            return call.arguments()

    given = arguments()
    names = {"torch": torch, "F": torch.nn.functional, **call.names, **{name: _wide(value) for name, value in given.items()}}
    wanted = {name: _evaluated(name, code, names, given[name]) for name, code in rules}
    unread = [name for name in wanted if name not in read and not names_contents(call.given[name][0])]

    def run() -> Differences:
        made = arguments()
        for name in unread:
            if made[name].is_floating_point():
                _bits(made[name]).fill_(_NOBODYS[made[name].dtype])
        before = {name: made[name].clone() for name in wanted}
        call.launch_on(made)
        results = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        return Differences(
            (_difference(name, before[name], made[name], value, rtol, atol) for name, value in wanted.items()), results
        )

    return run


def _is_random(text: str) -> bool:
    """Whether an argument is a tensor of random floats."""
    kind, colon, _ = text.partition(":")
    return bool(colon) and not names_contents(text) and is_float(kind)


def _rule(text: str, call: KernelCall) -> tuple[str, Any]:
    name, equals, expression = text.partition("=")
    name = name.strip()
    if not equals or name not in call.given or not isinstance(call.arguments()[name], Tensor):
        tensors = [key for key, value in call.arguments().items() if isinstance(value, Tensor)]
        raise OfflineError(f"--expect is {text!r}, must be TENSOR=EXPRESSION, TENSOR one of {', '.join(tensors)}")
    if is_file(expression.strip()):
        return name, expression.strip()
    try:
        return name, compile(expression.strip(), f"--expect {name}", "eval")
    except SyntaxError as error:
        raise OfflineError(f"--expect is {text!r}: {error}") from None


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bool:
        return value.clone()
    return value.double() if value.is_floating_point() else value.long()


def _evaluated(name: str, code: Any, names: Mapping[str, Any], like: Tensor) -> Tensor:
    if isinstance(code, str):
        wanted = value_of(f"--expect {name}", code)
    else:
        try:
            wanted = torch.as_tensor(eval(code, dict(names)))
        except Exception as error:
            raise OfflineError(f"--expect {name}: {type(error).__name__}: {error}") from None
    if _long_axes(wanted) == _long_axes(like):
        wanted = wanted.reshape(like.shape)
    else:
        raise OfflineError(f"--expect {name} has shape {tuple(wanted.shape)}, must be {tuple(like.shape)}")
    integers = not wanted.is_floating_point() and not like.is_floating_point()
    return wanted.to(like.dtype) if integers else wanted  # as the kernel's integers wrap around


def _long_axes(tensor: Tensor) -> list[int]:
    """Its sizes but those of 1, which an expectation may leave out, as `x.sum()` does."""
    return [size for size in tensor.shape if size != 1]


def _bits(floats: Tensor) -> Tensor:
    return floats.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[floats.dtype.itemsize])


def _difference(
    name: str, before: Tensor, got: Tensor, wanted: Tensor, rtol: float | None, atol: float | None
) -> Difference:
    if not got.is_floating_point() and not wanted.is_floating_point():
        return _unequal(name, before, got, wanted)
    default = _TOLERANCES.get(got.dtype, (0.0, 0.0))
    relative, absolute = default[0] if rtol is None else rtol, default[1] if atol is None else atol
    left, right = got.double(), wanted.double()
    if atol is None:  # a sum's rounding is of the size of what was summed, where the sum itself is small
        absolute *= max(1.0, float(right[right.isfinite()].abs().max())) if right.isfinite().any() else 1.0
    largest = torch.finfo(got.dtype).max if got.is_floating_point() else math.inf
    overflows = left.isinf() & (right * left.sign() >= largest * (1 - relative))  # no number of the dtype is right
    good = torch.isclose(left, right, rtol=relative, atol=absolute, equal_nan=True) | overflows
    error = (left - right).abs()
    error = torch.where(left.isnan() & right.isnan() | (left == right) | overflows, 0.0, error)
    share = 0.0
    if rtol is None and atol is None and right.isfinite().any():
        share = _SHARES.get(got.dtype, 0.0) * max(1.0, float(right[right.isfinite()].abs().max()))
    first = ""
    if not good.all():
        far = ~good & ~(error <= share)  # no rounding, as one that is first may be
        at = tuple((far if far.any() else ~good).nonzero()[0].tolist())
        within = absolute + relative * abs(wanted[at].item())
        place = f"{name}[{', '.join(map(str, at))}]"
        nobodys = got.dtype in _NOBODYS and int(_bits(got)[at]) == _NOBODYS[got.dtype]
        is_now = (
            "was not written, or read before that" if nobodys else f"is {got[at].item():.6g}{_as_before(before, got, at)}"
        )
        first = f"{place} {is_now}, must be {wanted[at].item():.6g} within {within:.2g}"
    return Difference(name, float(error.max()) if error.numel() else 0.0, int((~good).sum()), got.numel(), first, share)


def _as_before(before: Tensor, got: Tensor, at: tuple[int, ...]) -> str:
    """Said of a wrong element that no program seems to have written."""
    return ", as before the launch" if torch.equal(before[at], got[at]) else ""


def _unequal(name: str, before: Tensor, got: Tensor, wanted: Tensor) -> Difference:
    """Integers have no tolerance; their differences are fp64, and at least 1 where they are not equal."""
    wrong = got.long() != wanted.long()
    error = torch.where(wrong, (got.double() - wanted.double()).abs().clamp_min(1.0), 0.0)
    first = ""
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        first = (
            f"{name}[{', '.join(map(str, at))}] is {int(got[at])}{_as_before(before, got, at)}, must be {int(wanted[at])}"
        )
    return Difference(name, float(error.max()) if error.numel() else 0.0, int(wrong.sum()), got.numel(), first)


_TOLERANCES = {  # those of torch.testing.assert_close
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
}
_SHARES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_NOBODYS = {  # bits of the NaN that stands in a result before a launch
    torch.float64: 0x7FF8_0000_0BAD_F00D,
    torch.float32: 0x7FC0_F00D,
    torch.float16: 0x7E0D,
    torch.bfloat16: 0x7FCD,
}
