"""The layers of every package, highest first: a module imports from lower layers, and from its own where a colon stands.

`hatch run imports` fails for a module or folder at the top of a package that is in no layer. A name means the same in every
operator, and an operator has those that it needs.
"""

from __future__ import annotations

OPERATOR = (
    "__main__ : integrations : explain",
    "patching : distillation : log_probs : module : vocab_parallel : pipeline",
    "api : bank : keys : two_phase : bags : ngram : distributions",
    "operator : split",
    "plans : qk : lookup : loss : sources",
    "reference : records : checks : head : decide : tokens",
    "ascend : cuda : kernels : wide : tiling : shape : matmul",
    "formula",
    "call : rows",
)

CORE = (
    "__main__ | command",
    "explaining",
    "dtensor | operators | partials",
    "plans",
    "calls | collectives | launch | models",
    "arguments | rows",
    "dispatch",
    "budget",
    "chips",
    "device | direct | doctor",
)

FOLDERS = {
    "npu_offline": (
        "cli",
        "commands",
        "reporting | tune",
        "plugin",
        "suite",
        "cann | check | conformance",
        "bounds | execute | lint | timing",
        "toolchain",
        "module",
        "launches | reports | source_comments",
        "errors",
    ),
    "npu_offline.execute": (
        "recording",
        "emulation",
        "backend | launcher",
        "meaning",
        "final | linalg",
        "loading",
        "faults | idle | native | races | settings | storage",
        "source_lines",
        "c_compiler",
    ),
    "npu_offline.bounds": (
        "kernel",
        "proof | walk",
        "loops | results",
        "arithmetic | expressions | movement | origins | pointers",
        "question | subject | types",
    ),
    "npu_bench": (
        "__main__",
        "cli",
        "brief | export | history | plots | scripts | stages | traffic",
        "compare | report",
        "records | scaling",
        "host",
        "runner",
        "ceilings | graphs | launches",
        "checks | timing",
        "modes",
        "declaration | devices | environment | progress | tables",
        "errors",
    ),
}
"""By package, or folder of one, beside the core and the operators."""
