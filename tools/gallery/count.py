"""Call operators of other packages as on an NPU, and count what was right: `python -m tools.gallery.count`.

Each call, and its gradients where it has any, runs from Linalg IR, with checks for bounds and races, and from the final
module of the newest compiler, with all checks, and is compared with PyTorch in fp64. Calls that were counted keep
their verdict. The packages, in the environment or in a folder of PYTHONPATH: `pip install --no-deps
liger-kernel==0.8.5 fla-core==0.6.0 flag-gems==5.0.2 cut-cross-entropy==25.1.1 einops==0.8.2 sqlalchemy==2.1.9`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import sys
import traceback
import types
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from npu_offline import VERSIONS
from npu_offline.check.script import npu_on_cpu
from npu_offline.check.stopped import is_refusal, said_of
from npu_offline.errors import CompilationError
from npu_offline.execute.final.findings import WEAK
from torch import Tensor
from torch.nn import functional

from . import references
from .counted import PACKAGES, Counted
from .measure import short
from .sources import SOC

RESULTS = Path(__file__).parent / "results" / "counts.json"
LEVELS = {"Linalg IR": None, VERSIONS[-1]: VERSIONS[-1]}
_SECONDS = 600  # that a call may take
_ALLOWED = 1e-4  # of the largest element: operators in fp32, some of long sums


def main() -> int:
    """Count what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tools.gallery.count", description=__doc__)
    parser.add_argument("packages", nargs="*", choices=[[], *PACKAGES], metavar="PACKAGE", help="(all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only calls with this text")
    parser.add_argument("--again", action="store_true", help="also calls that were counted and not right")
    options = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for package in options.packages or PACKAGES:
        found = kept.setdefault(f"{package} {importlib.metadata.version(package)}", {})
        _load(package)
        for call in PACKAGES[package]:
            known = found.get(call.call, {})
            if options.only not in call.call or (known and not (options.again and set(known.values()) != {"right"})):
                continue
            found[call.call] = {level: verdict_on(call, level) for level in LEVELS}
            print(f"{package}: {call.call}: {found[call.call]}", file=sys.stderr, flush=True)
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


def _load(package: str) -> None:
    """Import the modules of a package's calls here, once, and not in the process of each call."""
    os.environ.setdefault("GEMS_VENDOR", "ascend")
    torch.set_num_threads(1)  # threads would not live on in the processes of calls
    with npu_on_cpu(SOC), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in PACKAGES[package]:
            with contextlib.suppress(Exception):  # the call says what it misses
                _function(call)


def verdict_on(call: Counted, level: str) -> str:
    """The verdict on a call in a process of its own: it may crash or hang."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_verdict, args=(sender, call, level))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(_SECONDS) else f"failed: more than {_SECONDS} s"
    except EOFError:
        return "failed: the process died"
    finally:
        process.kill()
        process.join()


def _send_verdict(sender: Connection, call: Counted, level: str) -> None:
    sender.send(_verdict(call, LEVELS[level]))


def _verdict(call: Counted, toolchain: str | None) -> str:
    wanted = _evaluated(call.expected, {}, torch.float64)
    below_autograd = call.module == "flag_gems"  # its functions are what autograd calls
    try:
        with torch.set_grad_enabled(not below_autograd), npu_on_cpu(SOC, toolchain=toolchain) as emulation:
            got = _evaluated(call.call, _function(call), torch.float32)
    except Exception as error:
        said = short(said_of(error))
        if is_refusal(error):
            return f"refused: {said}"
        if _is_of_compiler(error) or "does not fit" in said:
            return f"not compiled: {said}"
        traceback.print_exc(limit=-4)
        return f"failed: {said}"
    notes = [note for launch in emulation.launches for note in launch.notes if note.kind != WEAK]
    if not emulation.launches:
        return "failed: no kernel was launched"
    if notes:
        return f"finding: {short(str(notes[0]))}"
    return _compared(got, wanted)


def _is_of_compiler(error: BaseException | None) -> bool:
    return error is not None and (
        isinstance(error, CompilationError) or _is_of_compiler(error.__cause__ or error.__context__)
    )


def _function(call: Counted) -> dict[str, Any]:
    """What the first name in a call is: a function of the package, or a namespace with the modules on the way to one."""
    first = next(node for node in ast.walk(ast.parse(call.call)) if isinstance(node, (ast.Attribute, ast.Name)))
    *modules, name = ast.unparse(first).removesuffix(".apply").split(".")
    module = importlib.import_module(".".join([call.module, *modules]))
    found = getattr(module, name, None)
    value = found if callable(found) else getattr(module.ops, name)
    for outer in reversed([*modules, name][1:]):
        value = types.SimpleNamespace(**{outer: value})
    return {[*modules, name][0]: value}


def _evaluated(expression: str, function: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """The tensors that an expression yields, and the gradients of what it is computed from."""
    given = references.tensors(dtype)
    names = {**vars(torch), "functional": functional, **vars(references), **function, **given}
    result = eval(expression, names)
    outputs = [part for part in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(part, Tensor)]
    ends = [output for output in outputs if output.requires_grad and torch.is_grad_enabled()]
    if not ends:
        return outputs
    torch.autograd.backward(ends, [references.numbers(end) for end in ends])
    return [*outputs, *(tensor.grad for tensor in given.values() if tensor.grad is not None)]


def _compared(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    if not got or len(got) > len(wanted):
        return f"WRONG: {len(got)} results, not {len(wanted)}"
    for index, (left, right) in enumerate(zip(got, wanted, strict=False)):
        if left.numel() != right.numel():
            return f"WRONG: result {index} has {left.numel()} elements, not {right.numel()}"
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (left.detach(), right.detach()))
        error = (a.double().flatten() - b.double().flatten()).abs()
        if error.numel() and not float(error.max()) <= _ALLOWED * max(1.0, float(b.double().abs().max())):
            return f"WRONG: result {index} differs by {float(error.max()):.2g}"
    return "right"


if __name__ == "__main__":
    sys.exit(main())
