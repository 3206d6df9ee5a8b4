"""Which norm, loss and embedding of an installed trainer are ours, by which hook, and why the others are not.

The hooks are in `integrations` of the operators' packages; nothing of them or of a trainer is imported here, but by
`refused_kernels`, for which `report` starts a process.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

from .triton import version

NORMS, LOSS, EMBEDDING = "npu-rms-norm", "npu-fused-linear-cross-entropy", "npu-embedding"


class Part(NamedTuple):
    """A part of a trainer.

    Attributes:
        name: what it is.
        package: whose operator takes its place; "" where none does.
        how: what makes it ours; without a package, why it is not.
        rest: what stays with the trainer all the same.
        refused: says why the hook cannot be used here, "" where it can.
        off: a variable of the environment and the value that turns the hook off.
    """

    name: str
    package: str
    how: str
    rest: str = ""
    refused: Callable[[], str] = str
    off: tuple[str, str] | None = None


class Trainer(NamedTuple):
    """A trainer: the name to install it by, the releases that tests run with ("" without a hook), its parts."""

    distribution: str
    seen: str
    parts: tuple[Part, ...]


def _register(module: str) -> str:
    return f"{module}.register()"


def refused_kernels() -> str:
    """Why transformers' `use_kernels` takes no kernels here, and what to do; "" where it takes them.

    Raises:
        ImportError: transformers cannot be imported.
    """
    import_utils = importlib.import_module("transformers.utils.import_utils")

    if import_utils.is_kernels_available():
        return ""
    found = version("kernels")
    wanted = f"kernels>={import_utils.KERNELS_MIN_VERSION}"
    if hasattr(import_utils, "KERNELS_MAX_VERSION"):
        wanted += f",<{import_utils.KERNELS_MAX_VERSION}"
    return (
        f"transformers {version('transformers')} takes {wanted}, and {found or 'none'} is installed: "
        f"pip install '{wanted}', or replace the norms of a model with npu_rms_norm.patch(model)"
    )


def _asked(function: Callable[[], str]) -> Callable[[], str]:
    """What a function of this module says in a process of its own, where it may import what cannot be imported."""

    def ask() -> str:
        code = f"from {__name__} import {function.__name__}\nprint({function.__name__}())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        said = done.stderr.strip().splitlines()[-1:] if done.returncode else done.stdout.split("\n")[:1]
        return "".join(said)

    return ask


_HEADS, _NORMS = "npu_fused_linear_cross_entropy.integrations", "npu_rms_norm.integrations"
_OF_TRANSFORMERS = "its models are those of transformers: see there"
_NO_HOOK = "it has no hook for it"

TRAINERS = (
    Trainer(
        "verl",
        "0.9.1",
        (
            Part(
                "scores of the policy",
                LOSS,
                "by itself: verl loads npu_fused_linear_cross_entropy.integrations.verl_plugin",
                off=("VERL_USE_EXTERNAL_PLUGINS", "none"),
            ),
            Part("norms, embedding", "", _OF_TRANSFORMERS),
        ),
    ),
    Trainer(
        "transformers",
        "5.22.2 (register), 5.23.0 (patch)",
        (
            Part("norms", NORMS, "npu_rms_norm.patch(model)", "norms that are not known: patch says which"),
            Part(
                "norms that it marks",
                NORMS,
                "npu_rms_norm.use_kernels() and use_kernels=True",
                refused=_asked(refused_kernels),
            ),
            Part("loss", LOSS, "npu_fused_linear_cross_entropy.patch(model)", "models that are not known: patch says which"),
            Part("embedding", EMBEDDING, "npu_embedding.patch(model)"),
        ),
    ),
    Trainer(
        "trl",
        "1.16.0",
        (
            Part(
                "fused head",
                LOSS,
                _register(f"{_HEADS}.trl"),
                "a head that ZeRO-3 splits",
            ),
            Part("norms, embedding", "", _OF_TRANSFORMERS),
        ),
    ),
    Trainer(
        "liger-kernel",
        "0.8.5",
        (
            Part("norms", NORMS, _register(f"{_NORMS}.liger")),
            Part("fused loss", LOSS, _register(f"{_HEADS}.liger")),
            Part("other kernels", "", "there is no operator of ours"),
        ),
    ),
    Trainer(
        "veomni",
        "0.1.12",
        (
            Part("norms", NORMS, _register(f"{_NORMS}.veomni"), "those of other backends than npu; gated norms"),
            Part("loss, scores", LOSS, _register(f"{_HEADS}.veomni"), "distillation; the backends eager and liger_kernel"),
            Part("embedding", "", _NO_HOOK),
        ),
    ),
    Trainer(
        "torchtitan",
        "0.3.0",
        (
            Part("norms", NORMS, f"--override.imports {_NORMS}.torchtitan.rms_norm"),
            Part("chunked loss", LOSS, f"--override.imports {_HEADS}.torchtitan.loss", "heads under tensor parallelism"),
            Part("embedding", "", "there is no hook of ours"),
        ),
    ),
    Trainer(
        "ms-swift",
        "4.6.0",
        (
            Part("norms", NORMS, f"{_register(f'{_NORMS}.ms_swift')} in a file of --external_plugins"),
            Part(
                "loss of fine-tuning",
                LOSS,
                f"{_register(f'{_HEADS}.ms_swift')} in a file of --external_plugins",
                "preference training; losses that it computes from logits; Megatron",
            ),
            Part("embedding", "", _NO_HOOK),
        ),
    ),
    Trainer(
        "llamafactory",
        "0.9.5",
        (
            Part("norms", NORMS, f"{_register(f'{_NORMS}.llamafactory')} and use_v1_kernels: npu_fused_rmsnorm"),
            Part("loss of fine-tuning", LOSS, _register(f"{_HEADS}.llamafactory"), "preference training; version 1"),
            Part("embedding", "", _NO_HOOK),
        ),
    ),
    Trainer("xtuner", "", (Part("norms, loss", "", "there is no hook of ours; where it uses Liger, see there"),)),
    Trainer("megatron-core", "", (Part("norms, loss, embedding", "", "there is no hook of ours"),)),
)


def report() -> list[str]:
    """Lines that say, for every trainer that is installed, what is ours; nothing where none is."""
    lines = []
    for trainer in TRAINERS:
        installed = version(trainer.distribution)
        if installed is None:
            continue
        tested = f", tested with {trainer.seen}" if trainer.seen not in ("", installed) else ""
        lines.append(f"{trainer.distribution} {installed}{tested}")
        lines += [f"    {part.name}: {_said(part)}" for part in trainer.parts]
    return ["", "Trainers:", *lines] if lines else []


def _said(part: Part) -> str:
    if not part.package:
        return f"not ours, {part.how}"
    if version(part.package) is None:
        return f"not ours, {part.package} is not installed"
    reason = part.refused()
    if reason:
        return f"not ours, {reason}"
    if part.off is not None and os.environ.get(part.off[0]) == part.off[1]:
        return f"not ours, {part.off[0]} is {part.off[1]}"
    how = part.how if part.how.startswith("by itself") else f"with {part.how}"
    return f"ours {how}" + (f" (not: {part.rest})" if part.rest else "")
