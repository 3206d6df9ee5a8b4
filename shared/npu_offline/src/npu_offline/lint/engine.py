"""Applies every rule to a launch. Findings are cached on disk until the code of a rule changes."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import reported
from ..launches import LaunchRecord
from ..toolchain.cache import cache_dir, checked, source_digest
from ..toolchain.compilation import SOURCES, as_record
from ..toolchain.compilers import DEFAULT
from . import arithmetic, language, loops, rules, transfers, view
from .catalogue import RULES
from .rules import Compiled, Subject, Violation, subject_of
from .suppressions import suppressions_of

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction


@reported
def examine(subject: Subject) -> list[Violation]:
    """The findings of all rules for one launch, suppressed or not. Equal messages are given once."""
    key = f"{_digest()}{source_digest('module/operations.py', 'module/places.py', *SOURCES)}{subject!r}"
    path = cache_dir() / "lint" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def apply() -> bytes:
        compiled = Compiled(subject)
        found = {
            Violation(rule.name, subject.kernel, message): None
            for rule in RULES.values()
            for message in rule.check(compiled)
        }
        return json.dumps([[f.rule, f.kernel, f.message] for f in found]).encode()

    return [Violation(*values) for values in json.loads(checked(path, apply))]


def lint_kernel(
    kernel: JITFunction | LaunchRecord,
    signature: Mapping[str, str] | None = None,
    constants: Mapping[str, object] | None = None,
    *,
    soc: str = "Ascend910B4",
    toolchain: str = DEFAULT,
) -> list[Violation]:
    """The findings of all rules in a kernel, without those that its source suppresses.

    Args:
        kernel: a `LaunchRecord`, or a `@triton.jit` function, whose launch is then taken to be of one program.
        signature, constants: as `compile_kernel` takes them.
        soc: a name of `npu_tiling.SOCS`.
        toolchain: a version that `fetch` installed.

    Returns:
        One finding for each distinct message.

    Raises:
        OfflineError: a suppression in the kernel's source names no rule or no reason, or the kernel cannot be compiled.
    """
    launch = kernel if isinstance(kernel, LaunchRecord) else as_record(kernel, signature, constants, None)
    suppressed = suppressions_of(launch.kernel)
    return [finding for finding in examine(subject_of(launch, soc, toolchain)) if finding.rule not in suppressed]


@functools.cache
def _digest() -> str:
    """Of the rules' sources."""
    digest = hashlib.sha256()
    for module in (arithmetic, language, loops, transfers, rules, view):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()
