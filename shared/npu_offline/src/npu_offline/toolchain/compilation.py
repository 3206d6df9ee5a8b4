"""`compile_kernel`: compiles a kernel with the real Ascend compiler, up to its last step, `hivmc`, which only CANN has."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import npu_tiling

from ..errors import CompilationError, UnsupportedError, reported
from ..launches import LaunchRecord
from ..reports import SPACES, Report, Usage
from .cache import cache_dir, checked, source_digest
from .compilers import DEFAULT, compiler
from .messages import reason
from .processes import run
from .triton_ascend import require_triton_ascend

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

# Called in place of CANN's hivmc: keeps the final module and makes the files that its caller expects.
HIVMC = """#!/bin/sh
[ "$1" = --version ] && { echo "hivmc 1.2.0"; exit 0; }
out=; last=
for word in "$@"; do [ "$last" = -o ] && out=$word; last=$word; done
cp "$1" "$NPU_OFFLINE_FINAL" && : > "$out" && : > "$out.o"
"""
_FLAGS = {  # triton-ascend's option, the compiler's
    "multibuffer": "enable-auto-multi-buffer",
    "enable_auto_bind_sub_block": "enable-auto-bind-sub-block",
    "enable_hivm_auto_cv_balance": "enable-hivm-auto-cv-balance",
    "sync_solver": "enable-hivm-graph-sync-solver",
    "unit_flag": "enable-hivm-unit-flag-sync",
    "inject_barrier_all": "enable-hivm-inject-barrier-all-sync",
    "inject_block_all": "enable-hivm-inject-block-all-sync",
    "limit_auto_multi_buffer_only_for_local_buffer": "limit-auto-multi-buffer-only-for-local-buffer",
    "set_workspace_multibuffer": "set-workspace-multibuffer",
    "tile_mix_vector_loop": "tile-mix-vector-loop",
    "tile_mix_cube_loop": "tile-mix-cube-loop",
    "limit_auto_multi_buffer_of_local_buffer": "limit-auto-multi-buffer-of-local-buffer",
    "disable_auto_inject_block_sync": "disable-auto-inject-block-sync",
}
SOURCES = (
    "module/mlir.py",
    "module/reader.py",
    "module/plan.py",
    "module/shapes.py",
    "reports.py",
    "toolchain/cache.py",
    "toolchain/compilation.py",
    "toolchain/compilers.py",
    "toolchain/frontend.py",
    "toolchain/messages.py",
    "toolchain/opt.py",
)
"""Files of this package that a result depends on."""
_OVERFLOW = re.compile(r"(\w+) overflow, requires (\d+) bits while (\d+) bits available")


def compile_kernel(
    kernel: JITFunction | LaunchRecord,
    signature: Mapping[str, str] | None = None,
    constants: Mapping[str, object] | None = None,
    *,
    soc: str = "Ascend910B4",
    toolchain: str = DEFAULT,
    options: Mapping[str, object] | None = None,
) -> Report:
    """Compile a kernel as triton-ascend does for a chip; results are kept on disk.

    Args:
        kernel: a `@triton.jit` function, or a `LaunchRecord`, which has all of the next two and the options.
        signature: Triton type by argument name, constants aside: {"x_ptr": "*bf16", "n": "i32"}.
        constants: value by name of constexpr arguments.
        soc: a name of `npu_tiling.SOCS`.
        toolchain: a version that `fetch` installed.
        options: triton-ascend's compiler options, such as {"multibuffer": False}.

    Returns:
        What the compiler said: whether the kernel fits, what it uses of each memory, and the IR of each stage.

    Raises:
        UnsupportedError: the toolchain has no such target.
        ToolchainMissingError: the toolchain has not been fetched, or triton-ascend is missing.
        CompilationError: the compiler refused the kernel for another reason than a buffer that is too small.
    """
    require_triton_ascend()
    record = as_record(kernel, signature, constants, options)
    name, ttir, linalg = front_end_of(record)
    return compile_linalg(name, ttir, linalg, dict(record.options), soc, toolchain)


def as_record(
    kernel: JITFunction | LaunchRecord,
    signature: Mapping[str, str] | None,
    constants: Mapping[str, object] | None,
    options: Mapping[str, object] | None,
) -> LaunchRecord:
    """A record of a launch of one program of a `@triton.jit` function; a `LaunchRecord` with more options."""
    if not isinstance(kernel, LaunchRecord):
        return LaunchRecord(kernel, kernel.__name__, signature or {}, constants or {}, (1, 1, 1), options or {})
    if signature is not None or constants is not None:
        raise TypeError("signature and constants must be left out when kernel is a LaunchRecord, which has them")
    merged = {**kernel.options, **(options or {})}
    return LaunchRecord(
        kernel.kernel, kernel.name, kernel.signature, kernel.constants, kernel.grid, merged, kernel.divisible
    )


def front_end_of(record: LaunchRecord) -> tuple[str, str, str]:
    """The kernel's name, TTIR and Linalg IR: the same for every chip and toolchain version."""
    from .frontend import front_end, options_from

    kernel = record.kernel
    source = kernel.cache_key  # also finds the globals that the kernel uses
    used = sorted((key[0], repr(value[0])) for key, value in kernel.used_global_vals.items())
    file = kernel.fn.__code__.co_filename  # which lines are named of; another one may hold the same text
    parts = (file, source, used, sorted(record.signature.items()), sorted(record.constants.items(), key=str))
    versions = (importlib.metadata.version("triton-ascend"), sorted(record.divisible), sorted(record.options.items()))

    def build() -> str:
        options = options_from(record.options)
        return json.dumps(front_end(kernel, record.signature, record.constants, options, record.divisible))

    ttir, linalg = json.loads(_cached("linalg", repr((parts, versions)), build))
    return record.name, ttir, linalg


@reported
def compile_linalg(
    name: str, ttir: str, linalg: str, options: Mapping[str, object], soc: str, toolchain: str, compilation: int = 0
) -> Report:
    """Compile Linalg IR. Needs no Triton; arguments and result can be pickled.

    Args:
        name, ttir: of the kernel.
        linalg, options, soc, toolchain: what is compiled, for what, by what.
        compilation: another number compiles again, where a toolchain may make another module (`compilations`).

    Raises:
        UnsupportedError: the toolchain has no such target.
        CompilationError: the compiler refused it for another reason than a buffer that is too small.
    """
    program = compiler(soc, toolchain)
    if program is None:
        raise UnsupportedError(f"toolchain {toolchain} cannot compile for {soc}")
    flags = _flags(options)

    def build() -> str:
        return _run(program, name, {"linalg": linalg}, flags, soc, toolchain).to_json()

    again = (compilation,) if compilation else ()
    report = Report.from_json(_cached("reports", repr((name, linalg, flags, soc, toolchain, *again)), build))
    return dataclasses.replace(report, stages={"ttir": ttir, **report.stages})


def _cached(folder: str, key: str, build: Callable[[], str]) -> str:
    digest = hashlib.sha256(f"{source_digest(*SOURCES)}\n{key}".encode()).hexdigest()
    return checked(cache_dir() / folder / f"{digest}.json", lambda: build().encode()).decode()


def _flags(options: Mapping[str, object]) -> list[str]:
    """The compiler's options as triton-ascend passes them."""
    values = {"multibuffer": True, "enable_auto_bind_sub_block": True, **options}
    given = [f"--{flag}={values[name]}" for name, flag in _FLAGS.items() if values.get(name) is not None]
    fixed = ["--enable-hfusion-compile=true", "--enable-hivm-compile=true", "--enable-triton-kernel-compile=true"]
    return given + fixed


def _run(program: Path, name: str, stages: dict[str, str], flags: Sequence[str], soc: str, toolchain: str) -> Report:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for hivmc in ("hivmc", "hivmc-a5"):
            (folder / hivmc).write_text(HIVMC)
            (folder / hivmc).chmod(0o755)
        final = folder / "final.mlir"
        # triton-ascend takes this attribute out before it calls the compiler.
        (folder / "kernel.mlir").write_text(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", stages["linalg"]))
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        # bishengir-compile-a5 1.1.0 ends with "unexpected temp folder created outside of /tmp" where TMPDIR is elsewhere.
        environment = {**os.environ, "PATH": path, "NPU_OFFLINE_FINAL": str(final), "TMPDIR": "/tmp"}
        command = [str(program), str(folder / "kernel.mlir"), f"--target={soc}", *flags, "-o", str(folder / "kernel.bin")]
        done = run(command, env=environment)
        said = (done.stdout + done.stderr).replace(f"{folder}{os.sep}", "")
        text = final.read_text() if final.exists() else ""
    overflow = _OVERFLOW.findall(said)
    device = npu_tiling.soc(soc)
    if done.returncode == 0 and text:
        return _fitting(name, soc, toolchain, {**stages, "final": text}, said, device)
    if not overflow:
        raise CompilationError(f"{program.name} {toolchain} cannot compile {name} for {soc}:\n{reason(said)}")
    buffer, required, available = overflow[-1]
    usages: dict[str, Any] = {space: Usage(0, getattr(device, f"{space}_bytes")) for space in SPACES}
    return Report(
        name,
        soc,
        toolchain,
        fits=False,
        **usages,
        required_ub_bytes=-(-int(required) // 8) if buffer == "ub" else None,
        message=f"{buffer} overflow, requires {required} bits while {available} bits available",
        stages=stages,
    )


def _fitting(name: str, soc: str, toolchain: str, stages: dict[str, str], said: str, device: npu_tiling.Device) -> Report:
    from ..module.plan import read_plan, read_spec  # xDSL may be missing where only the plugin is used
    from .opt import parse_stage

    module = parse_stage(stages["final"], soc, toolchain)
    if read_spec(module)["UB_SIZE"] <= 0:
        raise UnsupportedError(f"toolchain {toolchain} accepts the name {soc} but does not know the chip")
    plan = read_plan(module)
    usages: dict[str, Any] = {space: Usage(plan.used[space], getattr(device, f"{space}_bytes")) for space in SPACES}
    notes = [line for line in said.splitlines() if line.startswith("[NOTE]")]
    return Report(
        name,
        soc,
        toolchain,
        fits=True,
        **usages,
        double_buffered=plan.double_buffered,
        message="\n".join(notes),
        stages=stages,
    )
