"""Whose fault it is that a kernel's results are wrong: the kernel's, triton-ascend's, or that of one compiler.

A kernel runs as Triton itself defines its TTIR, from its Linalg IR, and from final modules. The first level that is wrong
names the culprit. What the TTIR means is the kernel; the Linalg IR is what triton-ascend's front end makes of it; a final
module is what a compiler makes of the Linalg IR.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import DoesNotFitError, OfflineError, RaceError
from ..execute.faults import MASK_OR_STRIDE
from ..execute.meaning.compare import undefined, unlike
from ..launches import LaunchRecord
from ..lint.catalogue import RULES
from ..lint.engine import lint_kernel
from ..lint.rules import Compiled, subject_of
from ..toolchain.compilation import front_end_of
from ..toolchain.compilers import VERSIONS
from ..toolchain.messages import CRASHED
from .calls import ttir_of
from .compilation import largest_that_fit
from .execution import LINALG, MEANING, MOVED, RACING
from .run_calls import Outcome, run_whole

CANN = {"1.0.0": "CANN 8.5", "1.1.0": "CANN 9.0", "1.2.0": "about CANN 9.1"}
"""The CANN that has each version of the compiler."""
Moved = Callable[[str], Mapping[str, Tensor]]
Signs = Callable[[str], Mapping[int, str]]
KERNEL, FRONT_END = "your kernel", "triton-ascend's front end"


@dataclass(frozen=True)
class Verdict:
    """What one run of a kernel says.

    Attributes:
        culprit: `KERNEL`, `FRONT_END`, "the compiler of CANN 8.5 (1.0.0)", or nothing if nothing is wrong.
        text: what is wrong, the number of the fault where its sign is in the kernel, and the way round.
        refused: whether nothing that a chip would run could run; the text says why.
    """

    culprit: str
    text: str
    refused: bool = False

    @property
    def is_right(self) -> bool:
        """Whether what ran is as expected."""
        return self.text.startswith("right") and not self.culprit

    @property
    def short(self) -> str:
        """Who is wrong, or what is said where nobody is, up to the first colon or semicolon."""
        return f"{self.culprit} is wrong" if self.culprit else re.split("[:;]", _PLACE.sub("", self.text))[0]

    def __str__(self) -> str:
        return f"{self.culprit} is wrong: {self.text}" if self.culprit else self.text


_PLACE = re.compile(r" \([^)]*\.py:[^)]*\)")
_OF_LANGUAGE = {24}  # faults: what this Triton means is not what later ones do
_OF_FRONT_END = {10, 11, 13, 16, 18, 20, 27, 30, 35, 37}
_OF_BOUNDS = {10, 30}  # faults of the front end that read outside, and leave values right
_OF_COMPILERS = set(range(1, 100)) - _OF_FRONT_END
_MOST = 2  # faults that are named
_IN_ORDER = 4  # times what a kernel's roundings may move: how far its sums may be off in another order
_SIGNS = {  # in a TTIR, of faults that no rule of lint looks for, with the way round, and the compilers that have it
    13: ("tt.mulhiui", "multiply halves of 16 bits; in place of tl.rand and its like load numbers of PyTorch's", VERSIONS),
    16: ("tt.atomic_cas", "compare what it returns with the new value", VERSIONS),
    18: ("boundaryCheck = array<i32: [0-9]>", "check every axis: boundary_check=(0, 1)", VERSIONS),
    38: (
        r"(?s)tt\.load %\w+, %.*tt\.split",
        "load without a mask, or each half of the pairs by itself, `p + 2 * o` and `p + 2 * o + 1`",
        ("1.1.0", "1.2.0"),
    ),
    37: ("tt.descriptor_(load|store)", "mask a load or a store of addresses, or check a block pointer", VERSIONS),
    36: (r"arith\.cmpi [us][lg][te], [^\n]*xi1>", "compute with masks: `~a & b` is a < b, `~a | b` is a <= b", VERSIONS),
    8: ("arith.fptosi .* to .*i8", "cast to int32 between", VERSIONS),
    14: ("tt.atomic_rmw fadd", "store what is summed, and sum it later", ("1.1.0", "1.2.0")),
    33: (r"(?s)arith.remsi [^\n]* tensor.*tt.dot", "mask the columns, in place of a remainder", ("1.1.0",)),
    17: ("tt.dot", "let the tile divide the rows, or select behind the product", VERSIONS),
    9: ("scf.while", "write a for loop", ("1.0.0",)),
    2: ("arith.truncf", "round the bits with integer arithmetic", ("1.0.0",)),
}


def signs_in(record: LaunchRecord, soc: str, toolchain: str) -> dict[int, str]:
    """Numbers of the faults whose sign a kernel has, and for each the line and the way round.

    Args:
        record: a launch of it.
        soc, toolchain: what it is compiled for, and by what; no toolchain: faults of the language alone.
    """
    found: dict[int, str] = {}
    if not toolchain:
        rule = RULES["mask-sum"]
        said = next(rule.check(Compiled(subject_of(record, soc, VERSIONS[-1]))), "")
        return {24: f"{said}. {rule.reason}"} if said else {}
    with contextlib.suppress(OfflineError):  # a kernel that does not compile has the signs in its TTIR
        for finding in lint_kernel(record, soc=soc, toolchain=toolchain):
            about = RULES[finding.rule].reason
            number = re.search(r"compiler fault (\d+)", about)
            if number:
                found.setdefault(int(number[1]), f"{finding.message}. {about}")
    _, ttir, _ = front_end_of(record)
    for fault, (sign, instead, versions) in _SIGNS.items():
        if toolchain in versions and re.search(sign, ttir):
            found.setdefault(fault, instead)
    return found


def front_end_hint(record: LaunchRecord, soc: str, *, values: bool) -> str:
    """The known faults of triton-ascend whose signs a kernel has, behind what says that the front end is wrong.

    Args:
        record: a launch of the kernel.
        soc: the chip.
        values: whether it is wrong in a result, and not in an access.
    """
    faults = _OF_FRONT_END - _OF_BOUNDS if values else _OF_FRONT_END
    return _hint(signs_in(record, soc, VERSIONS[-1]), faults).replace("\n  ", "; ")


def judged(
    label: str,
    functions: Mapping[str, Callable[[], object]],
    outcomes: Sequence[Outcome],
    records: Callable[[], Sequence[LaunchRecord]],
    soc: str,
    *,
    expected: bool,
) -> Iterator[Verdict]:
    """Whose fault it is, as `verdicts_of` says.

    Args:
        label, functions: of the call, as `run_levels` takes them.
        outcomes: of it, at each level.
        records: gives its launches, recorded.
        soc: the chip.
        expected: whether results were compared with an expectation.
    """

    def signs(version: str) -> dict[int, str]:
        found: dict[int, str] = {}
        for record in records():
            with contextlib.suppress(OfflineError):  # it is refused, as its level says
                found |= signs_in(record, soc, version)
        return found

    def again(numbers: str, level: str) -> Outcome:
        return run_whole(label, functions[numbers], soc, level)

    def fitting(version: str) -> str:
        found = dict.fromkeys(largest_that_fit(record, soc, version) for record in records())
        return "".join(f"; {text}" for text in found if text)

    def converts() -> bool:
        return any(re.search("arith.fpto[su]i", text) for text in ttir_of(records()).values())

    yield from verdicts_of(outcomes, functools.cache(signs), again, fitting, converts, expected=expected)


def verdicts_of(
    outcomes: Sequence[Outcome],
    signs: Signs,
    again: Callable[[str, str], Outcome],
    fitting: Callable[[str], str],
    converts: Callable[[], bool],
    *,
    expected: bool,
) -> Iterator[Verdict]:
    """Who is wrong; one verdict without a culprit if nobody is.

    Levels are compared element by element, as `unlike` does: rounding, and the order of sums and products, are no faults.

    Args:
        outcomes: of one call at each level.
        signs: as `signs_in` finds them with a version of the compiler, or none.
        again: runs the call again, given the kind of numbers and a level.
        fitting: what would fit with a version of the compiler, behind what says that the kernel does not.
        converts: whether a kernel makes integers of floats.
        expected: whether results were compared with an expectation.
    """
    by_level = {outcome.level: outcome for outcome in outcomes}
    meaning, linalg = by_level[MEANING], by_level[LINALG]
    moved = functools.cache(lambda numbers: again(numbers, MOVED).results.get("", {}))
    found = list(_of_ir(meaning, linalg, signs, again, moved, converts))
    by_text: dict[str, list[str]] = {}
    too_large: dict[str, list[str]] = {}
    for version, final in by_level.items():
        if isinstance(final.error, DoesNotFitError):
            needed = final.problem.rpartition(": ")[2]
            too_large.setdefault(f"{needed}{fitting(version)}", []).append(version)
        elif version in CANN and not final.refused and not linalg.problem:
            text = _told(final) or _unlike(final, linalg, moved, "Linalg IR")
            if text:
                hint = "" if CRASHED in text else _hint(signs(version), _OF_COMPILERS)
                by_text.setdefault(text + hint, []).append(version)
    for text, versions in too_large.items():
        found.append(Verdict(KERNEL, f"it does not fit with {_named(versions)}: {text}"))
    for text, versions in by_text.items():
        found.append(Verdict(f"the compiler of {_named(versions)}", text))
    if found:
        yield from found
        return
    if all(outcome.refused for outcome in outcomes if outcome.level != MEANING):
        yield Verdict("", _refusal(outcomes), refused=True)
        return
    without = f"; no third opinion: {meaning.problem.splitlines()[0]}" if meaning.refused else ""
    wrong = [outcome for outcome in outcomes if not outcome.ok]
    off = [each for outcome in wrong for each in outcome.differences if each.wrong]
    if off and meaning.is_as_expected and all(each.error <= _IN_ORDER * each.share for each in off):
        text = f"right: its TTIR is as expected, and {_said(wrong[0])} is no further from that than rounding moves it"
    elif wrong:
        text = f"rounding: {_said(wrong[0])}; levels differ by no more than rounding moves this kernel"
    elif expected:
        text = "right: every level that ran is as expected" + _roundings(outcomes)
    else:
        text = "every level that ran computes the same; whether that is right nobody said (--expect)"
    yield Verdict("", text + without)


def _roundings(outcomes: Sequence[Outcome]) -> str:
    """Results that are off by more than the tolerance, and rightly so."""
    found = dict.fromkeys((each.name, each.first) for one in outcomes for each in one.differences if each.rounded)
    said = "".join(f"; {first}" for _, first in list(found)[:1])
    return f"{said}: as the kernel rounds; in fp64 it is as expected" if said else ""


def _refusal(outcomes: Sequence[Outcome]) -> str:
    """Why nothing ran that a chip would run, on one line, where all levels say the same."""
    reasons = {each.problem: each.problem.splitlines() for each in outcomes if each.level != MEANING}
    if len(reasons) > 1:
        return "no verdict: nothing that a chip would run could run here"
    first, *more = next(iter(reasons.values()))
    return " ".join([first, *more[: first.endswith(":")]])


def _named(versions: Sequence[str]) -> str:
    return ", ".join(f"{CANN[version]} ({version})" for version in versions)


def _of_ir(
    meaning: Outcome,
    linalg: Outcome,
    signs: Signs,
    again: Callable[[str, str], Outcome],
    moved: Moved,
    converts: Callable[[], bool],
) -> Iterator[Verdict]:
    """What TTIR and Linalg IR say of the kernel and of the front end."""
    if meaning.endless and linalg.endless:
        place = _PLACE.search(meaning.problem)
        yield Verdict(KERNEL, f"{linalg.problem}{place[0] if place else ''}; its TTIR does not end either")
        return
    if meaning.refused:
        if not linalg.ok:
            yield Verdict(f"{KERNEL}, or {FRONT_END},", _said(linalg))
        return
    is_what_chips_compute = linalg.ok and not linalg.refused  # the expectation
    races = isinstance(linalg.error, RaceError) and isinstance(again(linalg.numbers, RACING).error, RaceError)
    if races and not meaning.problem:
        yield Verdict(KERNEL, f"{linalg.problem}; its TTIR says so, as Triton itself defines it")
    if meaning.problem or not (meaning.ok or is_what_chips_compute):
        said = f"{_said(meaning)}; its TTIR says so, as Triton itself defines it"
        if not meaning.problem:
            said += _hint(signs(""), _OF_LANGUAGE)
            if again(meaning.numbers, MOVED).is_as_expected:
                said += "\n  in fp64 it is as expected: a number overflows, or a sum or a cast in between loses too much"
        yield Verdict(KERNEL, said)
    if linalg.refused or meaning.problem or races:
        return
    if linalg.problem:
        yield Verdict(FRONT_END, f"{_told(linalg)}; its TTIR does not{_hint(signs(VERSIONS[-1]), _OF_FRONT_END)}")
    elif text := converts() and _undefined(meaning, moved):
        yield Verdict(KERNEL, text)
    elif text := _unlike(linalg, meaning, moved, "TTIR"):
        yield Verdict(FRONT_END, f"{text}{_hint(signs(VERSIONS[-1]), _OF_FRONT_END - _OF_BOUNDS)}")


def _told(outcome: Outcome) -> str:
    """What stopped a level whose kernel is right: without the guess that it is not."""
    return outcome.problem.partition(MASK_OR_STRIDE)[0]


def _said(outcome: Outcome) -> str:
    """What is wrong with an outcome."""
    numbers = outcome.numbers and f"{outcome.numbers}: "
    if outcome.problem:
        return numbers + outcome.problem
    wrong = (
        f"{each.wrong} of {each.of} elements of {each.name} are wrong: {each.first}"
        for each in outcome.differences
        if each.wrong
    )
    return numbers + "; ".join(wrong)


def _unlike(outcome: Outcome, before: Outcome, moved: Moved, source: str) -> str:
    """How the results of a level differ from those of the level before, which was made of what `source` names."""
    for numbers, results in outcome.results.items():
        for name, meant in before.results.get(numbers, {}).items():
            said = unlike(name, results[name], meant, functools.partial(_moved, moved, numbers, name, meant))
            if said:
                return f"{numbers and f'{numbers}: '}{said} as its {source} says"
    return ""


def _undefined(meaning: Outcome, moved: Moved) -> str:
    """The first result that Triton does not define."""
    for numbers, results in meaning.results.items():
        for name, meant in results.items():
            said = undefined(name, meant, functools.partial(_moved, moved, numbers, name, meant))
            if said:
                return f"{numbers and f'{numbers}: '}{said}"
    return ""


def _moved(moved: Moved, numbers: str, name: str, meant: Tensor) -> Tensor:
    return moved(numbers).get(name, meant)


def _hint(signs: Mapping[int, str], faults: Container[int]) -> str:
    """The faults of a culprit whose signs a kernel has."""
    found = [(number, text) for number, text in signs.items() if number in faults]
    return "".join(f"\n  perhaps compiler fault {number}: {text}" for number, text in found[:_MOST])
