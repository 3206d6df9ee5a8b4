"""Applies the lint rules to every launch of a package's calls, in parallel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from typing import Any

from ..errors import OfflineError, UnsupportedError
from ..lint.engine import examine
from ..lint.rules import Subject, Violation, subject_of
from ..lint.suppressions import suppressions_of
from ..toolchain.compilers import supported
from .calls import Call, launches_of
from .compilation import new_pool


@dataclass(frozen=True)
class Examined:
    """A launch, its findings, those that its source suppresses, or why it could not be examined."""

    subject: Subject
    findings: Sequence[Violation] = ()
    suppressed: Sequence[tuple[Violation, str]] = ()
    problem: str = ""


@dataclass
class Package:
    """All launches of a package: each distinct subject, the kernels by name, and calls that failed, with the reason."""

    subjects: list[Subject] = field(default_factory=list)
    kernels: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def suppressions(self) -> dict[tuple[str, str], str]:
        """The reason by kernel and rule."""
        return {
            (name, rule): reason for name, kernel in self.kernels.items() for rule, reason in suppressions_of(kernel).items()
        }


def load(calls: Sequence[Call], socs: Iterable[str], toolchains: Sequence[str]) -> Package:
    """Record the calls for each chip; toolchains that do not know a chip are left out.

    Raises:
        OfflineError: the calls launched nothing.
    """
    package = Package()
    subjects: dict[Subject, None] = {}
    for soc in socs:
        versions = [version for version in toolchains if supported(soc, version)]
        for launch in launches_of(calls, soc, package.refused):
            package.kernels[launch.name] = launch.kernel
            subjects.update(dict.fromkeys(subject_of(launch, soc, version) for version in versions))
    if not package.kernels and not package.refused:
        raise OfflineError("the calls launched no kernel: CPU tensors must reach the Triton kernels under emulation")
    package.subjects = list(subjects)
    return package


def examine_all(package: Package, workers: int | None = None) -> Iterator[Examined]:
    """Apply the rules to every subject; results come as they are ready."""
    suppressions = package.suppressions()
    for subject, (findings, problem) in _results(package.subjects, workers):
        reasons = [(finding, suppressions.get((finding.kernel, finding.rule))) for finding in findings]
        suppressed = [(finding, reason) for finding, reason in reasons if reason is not None]
        yield Examined(subject, [finding for finding, reason in reasons if reason is None], suppressed, problem)


def _results(subjects: Sequence[Subject], workers: int | None) -> Iterator[tuple[Subject, tuple[list[Violation], str]]]:
    with new_pool(len(subjects), workers) as pool:
        pending = {pool.submit(_examine, subject): subject for subject in subjects}
        for future in as_completed(pending):
            yield pending[future], future.result()


def _examine(subject: Subject) -> tuple[list[Violation], str]:
    try:
        return examine(subject), ""
    except UnsupportedError:
        raise
    except OfflineError as error:
        return [], str(error)


def unused(package: Package, examined: Iterable[Examined]) -> list[str]:
    """A message for each suppression that suppresses no finding."""
    used = {(finding.kernel, finding.rule) for each in examined for finding, _ in each.suppressed}
    return [
        f"kernel {kernel}: the suppression of {rule} suppresses nothing"
        for kernel, rule in package.suppressions()
        if (kernel, rule) not in used
    ]


def as_json(each: Examined) -> dict[str, Any]:
    """A launch and its findings."""
    subject = each.subject
    return {
        "kernel": subject.kernel,
        "tile": subject.tile,
        "soc": subject.soc,
        "toolchain": subject.toolchain,
        "grid": subject.grid,
        "findings": [{"rule": finding.rule, "message": finding.message} for finding in each.findings],
        "suppressed": [
            {"rule": finding.rule, "message": finding.message, "reason": reason} for finding, reason in each.suppressed
        ],
        "problem": each.problem,
    }
