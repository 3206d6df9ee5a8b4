"""The C source of a final module with a switch for every defect that `mutants` plants in it."""

from __future__ import annotations

from collections import defaultdict
from unittest import mock

import npu_offline.execute.final.translate
from mutants import ACROSS, BARRIER, FIRST, FLAGS, MOVED, RENUMBERED, STATE, is_set, passed, short
from npu_offline.execute.final.function import Function
from npu_offline.module.mlir import name_of
from xdsl.dialects.builtin import MemRefType, ModuleOp
from xdsl.ir import Operation

_FIRST_LINE = '#include "generated.h"'


def switched(module: ModuleOp) -> str:
    """What `translate` returns, with a global array `planted`: a number for each operation, all zero at first."""
    operations = list(module.walk())
    switch = {operation: f"planted[{position}]" for position, operation in enumerate(operations)}
    moved = defaultdict(list)
    for operation in operations:
        moved[passed(operation)].append(operation)

    class Switched(Function):
        def _operation(self, op: Operation, name: str) -> None:
            if short(op) in (*FLAGS, *ACROSS, BARRIER, *STATE):
                self._guarded(op, f"!{switch[op]}")
                if short(op) in (*FLAGS, *ACROSS):
                    self._guarded(op, f"{switch[op]} == {RENUMBERED}", renumbered=True)
                return
            for other in moved[op]:
                if is_set(other):
                    self._guarded(other, f"{switch[other]} == {MOVED}")
            super()._operation(op, name)
            for other in moved[op]:
                if not is_set(other):
                    self._guarded(other, f"{switch[other]} == {MOVED}")
            if name == "arith.select" and isinstance(op.results[0].type, MemRefType):
                self.lines.append(f"if ({switch[op]} == {FIRST}) {self.name(op.results[0])} = {self.name(op.operands[1])};")
            elif name == "hivm.hir.pointer_cast":
                address = self.name(op.operands[0])
                before, after = self.lines[-1].split(f", {address}, ")
                self.lines[-1] = f"{before}, {switch[op]} ? {switch[op]} - 1 : {address}, {after}"

        def _guarded(self, op: Operation, condition: str, *, renumbered: bool = False) -> None:
            """A flag, a barrier or a state where a condition holds; of another number with the same bits but the last."""
            first = len(self.lines)
            super()._operation(op, name_of(op))
            lines = [line.replace(");", " ^ 1);") for line in self.lines[first:]] if renumbered else self.lines[first:]
            self.lines[first:] = [f"if ({condition}) {{", *lines, "}"]

    with mock.patch.object(npu_offline.execute.final.translate, "Function", Switched):
        source = npu_offline.execute.final.translate.translate(module)
    return source.replace(_FIRST_LINE, f"{_FIRST_LINE}\nint64_t planted[{len(switch)}];")
