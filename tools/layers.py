"""The layers of every package, highest first: a module imports from lower layers alone, and nothing of its own layer.

`hatch run imports` fails for a module or folder at the top of a package that is in no layer. A name means the same in every
operator, and an operator has those that it needs.
"""

from __future__ import annotations

OPERATOR = (
    "__main__",
    "kernel_mapping",
    "integrations",
    "explain",
    "patching",
    "distillation",
    "causal_lm | log_probs | module | pipeline | vocab_parallel",
    "api | bank | two_phase",
    "bags | distributions | ngram",
    "operator",
    "qk | sharding",
    "forward | backward | split",
    "columns | lookup | loss",
    "head | writes",
    "checks | decide",
    "reference | sources | tiling | tokens",
    "records",
    "layout",
    "ascend | cuda",
    "device | kernels | wide",
    "formula | matmul | shape",
    "call | rows",
)

CORE = (
    "__main__",
    "explaining | operators",
    "plans",
    "calls",
    "pytorch",
    "launching",
    "budget",
    "chips | installation",
    "device | errors | hooks | places",
)

FOLDERS = {
    "npu_offline": (
        "cli",
        "commands",
        "reporting | tune",
        "plugin",
        "suite",
        "cann | check",
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
