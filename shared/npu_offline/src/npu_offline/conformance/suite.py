"""Runs the generated kernels through every compiler, and writes down what is wrong: a table, and drafts of reports."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OfflineError, reason_of
from ..execute.emulation import emulate
from ..execute.recording import record
from ..launches import LaunchRecord
from ..lint import RULES
from ..lint.rules import Compiled, subject_of
from ..module.mlir import name_of
from ..toolchain.cache import private_folder
from ..toolchain.compilation import compile_linalg, front_end_of
from ..toolchain.compilers import DEFAULT, VERSIONS, compilations
from .grammar import CASES, OPERATIONS, VARIANTS, Case

SOC = "Ascend910B4"
FRONT_END = "Linalg IR"
LEVELS = (FRONT_END, *VERSIONS)
_BESIDE = {"tt.splat", "tt.bitcast", "tt.reduce.return"}
_KNOWN = re.compile(r"compiler\s+fault (\d+)")


CHIP_LEVEL = "1.1.0"  # CANN 9.0, which the chips of the reports had
_RIGHT = (
    "+ - * / == < tl.where tl.abs tl.exp tl.exp2 tl.log tl.rsqrt tl.sqrt tl.sin tl.cos tl.erf tl.sigmoid tl.floor tl.ceil"
    " tl.sum tl.max tl.min tl.argmax tl.cumsum tl.minimum"
)
ON_CHIPS = {  # what was seen on chips, by where it is reported: cases and verdicts
    "triton-ascend #2290": [("!= number of int1", "wrong")],
    "triton-ascend #2334": [("tl.cumsum of int1", "refused")],
    "FlagTree #1121": [(">> of uint8", "right"), (">> of uint16", "wrong"), (">> of uint32", "wrong")],
    # Of its 390 operators of FlagGems those that are one operation here; right within 2e-2.
    "Torch-FL #64": [
        *((f"{name} of float32", "right") for name in _RIGHT.split()),
        ("% of float32", "refused"),  # fmod
        ("// of int32", "refused"),  # floor_divide of two tensors
        *((f"{name} of int32", "refused") for name in ("&", "|", "~")),  # "runtime error"
    ],
}


@dataclass(frozen=True)
class Outcome:
    """What a kernel does at a level.

    Attributes:
        case, variant, level: which kernel, where.
        verdict: "right", "wrong" or "refused".
        text: the first wrong element, or why it is refused.
        pattern: of a wrong one, the operations of its IR and on what: equal patterns are one fault.
        module: of a wrong one, the instructions that it is compiled to.
        faults: numbers of COMPILER_FAULTS that lint finds in the kernel.
    """

    case: Case
    variant: str
    level: str
    verdict: str
    text: str = ""
    pattern: str = ""
    module: str = ""
    faults: tuple[int, ...] = ()


def run(limit: float, cases: Sequence[Case] = CASES) -> Iterator[Outcome]:
    """Every kernel at every level: one variant of all cases first, then the others, until the time is over.

    Args:
        limit: seconds; a kernel that was begun is finished.
        cases: of `CASES`.
    """
    end = time.monotonic() + limit
    for variant in VARIANTS:
        for case in cases:
            if variant in case.variants:
                if time.monotonic() > end:
                    return
                yield from outcomes(case, variant)


def outcomes(case: Case, variant: str) -> Iterator[Outcome]:
    """What one kernel does at each level. Where a compiler makes several modules of it, every one is executed."""
    kernel = _kernel(case.source(variant))
    try:
        with record(SOC) as launches:
            kernel[(1,)](*case.arguments())
        _, _, linalg = front_end_of(launches[0])
    except Exception as error:
        yield from (Outcome(case, variant, level, "refused", _short(error)) for level in LEVELS)
        return
    for level in LEVELS:
        found = [_outcome(case, variant, level, kernel, launches[0], each) for each in _modules(launches[0], level)]
        yield min(found, key=lambda each: ("wrong", "refused", "right").index(each.verdict))


def _modules(launch: LaunchRecord, level: str) -> Iterable[int]:
    """The compilations that give different modules of one input."""
    name, ttir, linalg = front_end_of(launch)
    if level == FRONT_END or compilations(level, linalg) == 1:
        return (0,)
    found: dict[str, int] = {}
    with contextlib.suppress(OfflineError):  # refused: said where it is run
        for each in range(compilations(level, linalg)):
            found.setdefault(
                compile_linalg(name, ttir, linalg, dict(launch.options), SOC, level, each).stages["final"], each
            )
    return list(found.values()) or (0,)


def _outcome(case: Case, variant: str, level: str, kernel: Any, launch: LaunchRecord, compilation: int = 0) -> Outcome:
    is_final = level != FRONT_END
    arguments = case.arguments()
    try:
        with emulate(SOC, toolchain=level if is_final else DEFAULT, final=is_final, threads=1, compilation=compilation):
            kernel[(1,)](*arguments)
    except Exception as error:
        return Outcome(case, variant, level, "refused", _short(error))
    wrong = case.wrong(arguments[3], variant)
    if not wrong:
        return Outcome(case, variant, level, "right")
    x, w, _, y, _ = arguments
    first, expected = wrong[0], case.expected(variant)
    of = f" of x {x[first].item()} and w {w[first].item()}" if not case.operation.kind else ""
    text = f"y[{first}] is {y[first].item()}, must be {expected[first].item()}{of}"
    return Outcome(case, variant, level, "wrong", text, *_described(case, variant, launch, level))


def _described(case: Case, variant: str, launch: LaunchRecord, level: str) -> tuple[str, str, tuple[int, ...]]:
    """Of a wrong kernel its pattern, the instructions of its module, and the faults that lint finds in it."""
    compiled = Compiled(subject_of(launch, SOC, DEFAULT if level == FRONT_END else level))
    line = f".py:{1 + [text.strip()[:4] for text in case.source(variant).splitlines()].index('y = ')}:"
    reductions = [op for op, _ in compiled.triton if name_of(op) in ("tt.reduce", "tt.scan")]
    inside = {op for reduction in reductions for op in reduction.walk()}
    used = (name_of(op) for op, place in compiled.triton if line in place or op in inside)
    names = dict.fromkeys(name for name in used if name not in _BESIDE)
    kind = "truth values" if case.dtype == "int1" else case.dtype.rstrip("0123456789").removeprefix("b")
    pattern = f"{FRONT_END if level == FRONT_END else 'module'}: {' '.join(names)} of {kind}"
    final = compiled.report.stages["final"] if level != FRONT_END else ""
    module = dict.fromkeys(re.findall(r"call @([\w.]*(?:v|reduce|cum)\w*)|hivm\.hir\.(v\w+)", final))
    rules = (rule for rule in RULES.values() if _KNOWN.search(rule.reason) and any(rule.check(compiled)))
    faults = {int(_KNOWN.findall(rule.reason)[0]) for rule in rules} or {case.operation.fault} - {0}
    return pattern, " ".join(call or operation for call, operation in module), tuple(sorted(faults))


def _short(error: Exception) -> str:
    """Why a kernel is refused, in a line."""
    lines = [line.strip() for line in reason_of(error).splitlines() if line.strip()]
    named = [line for line in lines if "error:" in line] or lines[-1:]
    return re.sub(r"^.*error: ", "", named[0] if named else type(error).__name__)[:200]


def _kernel(source: str) -> Any:
    """The kernel of a generated source, which Triton reads from a file."""
    path = private_folder("conformance") / f"k{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OfflineError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def minimal(outcome: Outcome) -> tuple[str, str]:
    """The smallest kernel of one tile that is wrong at the same level, and what it gives; else the kernel itself."""
    first = int(re.findall(r"y\[(\d+)\]", outcome.text)[0]) if not outcome.case.operation.kind else 0
    for size in (2, 8, 16, 32) if outcome.variant == "one tile" else ():
        case = replace(outcome.case, size=size, shift=first)
        kernel = _kernel(case.source(outcome.variant))
        try:
            with record(SOC) as launches:
                kernel[(1,)](*case.arguments())
        except Exception:  # noqa: S112 - too small for the language
            continue
        found = _outcome(case, outcome.variant, outcome.level, kernel, launches[0])
        if found.verdict == "wrong":
            return case.source(outcome.variant), found.text
    return outcome.case.source(outcome.variant), outcome.text


def groups(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Wrong outcomes by the pattern of their IR, most first."""
    found: dict[str, list[Outcome]] = defaultdict(list)
    for each in outcomes:
        if each.verdict == "wrong":
            found[each.pattern].append(each)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def verdicts(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], str]:
    """By case and level: wrong where a variant is, refused where the first one is, else right."""
    found: dict[tuple[str, str], str] = {}
    for each in outcomes:
        key = each.case.name, each.level
        if each.verdict == "wrong" or key not in found:
            found[key] = each.verdict
    return found


def page(found: Sequence[Outcome], seconds: float) -> str:
    """The results as Markdown: counts, operations by level, patterns without a number, and what was seen on chips."""
    seen = verdicts(found)
    cases = {each.case.name: each.case for each in found}
    kernels = len({(each.case.name, each.variant) for each in found})
    whole = sum(len([*case.variants]) for case in CASES)
    lines = [
        f"{len(cases)} of {len(CASES)} operations x dtypes, {kernels} of {whole} kernels, in {seconds / 60:.0f} minutes.",
        "",
    ]
    lines += ["| of operations x dtypes | right | wrong | refused |", "|---|---|---|---|"]
    for level in LEVELS:
        counts = Counter(verdict for (_, at), verdict in seen.items() if at == level)
        lines.append(f"| {_titled(level)} | {' | '.join(str(counts[each]) for each in ('right', 'wrong', 'refused'))} |")
    cells: dict[str, tuple[str, ...]] = {}
    for operation in OPERATIONS:
        of = {case.dtype: name for name, case in cases.items() if case.operation == operation}
        cells[_quoted(operation.name)] = tuple(
            _cell({dtype: seen[name, level] for dtype, name in of.items()}) for level in LEVELS
        )
    right = [name for name, each in cells.items() if set(each) == {"right"}]
    rest = {name: each for name, each in cells.items() if name not in right}
    columns: dict[tuple[str, ...], list[str]] = defaultdict(list)  # levels whose verdicts are the same
    for level, column in zip(LEVELS, zip(*rest.values(), strict=True), strict=False):
        columns[column].append(level)
    if right:
        lines += ["", f"Right at every level: {', '.join(right)}."]
    if rest:
        wrong = [each for each in found if each.verdict == "wrong"]
        faults = {_quoted(each.case.operation.name): set[str]() for each in wrong}
        for each in wrong:
            faults[_quoted(each.case.operation.name)] |= set(map(str, each.faults)) or {"new"}
        lines += ["", f"| operation | {' | '.join(map(_all_titled, columns.values()))} | fault |"]
        lines += [f"|---|{'---|' * len(columns)}---|"]
        lines += [
            f"| {' | '.join(row)} | {', '.join(sorted(faults.get(row[0], ())))} |"
            for row in zip(rest, *columns, strict=True)
        ]
    new = {pattern: each for pattern, each in groups(found).items() if not each[0].faults}
    if new:
        lines += ["", "| what is new | of | on |", "|---|---|---|"]
    for pattern, group in new.items():
        levels = _all_titled(list(dict.fromkeys(one.level for one in group)))
        lines.append(f"| {pattern.partition(': ')[2]} | {_by_dtype(one.case.name for one in group)} | {levels} |")
    odd = Counter(one.variant for one in found if one.verdict == "refused" and seen[one.case.name, one.level] != "refused")
    if odd:
        lines += [
            "",
            f"Refused in a variant alone: {', '.join(f'{count} of {variant!r}' for variant, count in odd.items())}.",
        ]
    return "\n".join([*lines, "", *_scores(seen)]) + "\n"


def _scores(seen: dict[tuple[str, str], str]) -> Iterator[str]:
    """How the verdicts for the compiler that chips had compare with what was reported from them."""
    compared = [
        (name, label, seen.get((name, CHIP_LEVEL)), source) for source, names in ON_CHIPS.items() for name, label in names
    ]
    known = [each for each in compared if each[2]]
    hits = sum(label == verdict for _, label, verdict, _ in known)
    yield f"{hits} of {len(known)} verdicts for {_titled(CHIP_LEVEL)} are what a chip did."
    yield from ("", "| on a chip | reported | here |", "|---|---|---|")
    for source in ON_CHIPS:
        of = [each for each in known if each[3] == source]
        for kinds in dict.fromkeys((label, verdict) for _, label, verdict, _ in of):
            names = _by_dtype(name for name, label, verdict, _ in of if (label, verdict) == kinds)
            yield f"| {source}: {names} | {kinds[0]} | {kinds[1]}{'' if kinds[0] == kinds[1] else ': missed'} |"


def reports(found: Sequence[Outcome]) -> Iterator[tuple[str, str]]:
    """A draft of a report for each pattern: a name, and Markdown with the smallest kernel."""
    for pattern, each in groups(found).items():
        first = min(
            each, key=lambda one: (tuple(VARIANTS).index(one.variant), one.case.dtype != "int32", len(one.case.dtype))
        )
        source, text = minimal(first)
        levels = dict.fromkeys(one.level for one in each)
        title = f"{first.case.operation.name} of {first.case.dtype}: silent wrong result"
        body = [
            f"# {title}",
            "",
            f"IR pattern: {pattern}. Known: {', '.join(f'compiler fault {n}' for n in first.faults) or 'no'}.",
        ]
        body += ["", f"triton-ascend 3.2.0; wrong in {', '.join(map(_titled, levels))}. No chip: executed from the IR.", ""]
        body += [
            "```python",
            source.rstrip(),
            "```",
            "",
            f"{text}.",
            "",
            f"Compiled to ({_titled(first.level)}): {first.module or 'see the Linalg IR'}",
            "",
        ]
        body += ["Also wrong: " + ", ".join(dict.fromkeys(f"{one.case.name} ({one.variant})" for one in each)) + "."]
        yield re.sub(r"\W+", "-", pattern).strip("-"), "\n".join(body) + "\n"


def _titled(level: str) -> str:
    return level if level == FRONT_END else f"module of {level}"


def _all_titled(levels: Sequence[str]) -> str:
    modules = [level for level in levels if level != FRONT_END]
    named = [f"module{'s' * (len(modules) > 1)} of {', '.join(modules)}"] if modules else []
    return ", ".join([FRONT_END] * (FRONT_END in levels) + named)


def _quoted(name: str) -> str:
    return f"`{name}`".replace("|", "\\|")


def _by_dtype(names: Iterable[str]) -> str:
    """Cases by name: the operations of each dtype together."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        operation, _, dtype = name.rpartition(" of ")
        found[dtype].append(_quoted(operation))
    return ", ".join(f"{', '.join(operations)} of {dtype}" for dtype, operations in found.items())


def _cell(verdicts: dict[str, str]) -> str:
    """The dtypes that are not right."""
    parts = []
    for verdict in ("wrong", "refused"):
        if dtypes := [dtype for dtype, seen in verdicts.items() if seen == verdict]:
            every = len(dtypes) == len(verdicts) > 1
            parts.append(f"{verdict}: {f'all {len(dtypes)}' if every else ', '.join(dtypes)}")
    return "; ".join(parts) or ("right" if verdicts else "not run")
