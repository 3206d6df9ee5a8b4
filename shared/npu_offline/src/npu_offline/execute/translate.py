"""A final module in C: its scalar code as it is, its instructions as rows of a table, issued in program order.

Triton's Linalg IR has been through the whole compiler by then: buffers are addresses, pipes have flags. Nothing of that is
decided here again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from xdsl.dialects.builtin import ArrayAttr, DenseArrayBase, FixedBitwidthType, IntegerAttr, MemRefType, ModuleOp
from xdsl.ir import Block, SSAValue
from xdsl.ir import Operation as Op

from ..errors import UnsupportedError
from ..mlir import name_of, property_of, symbol_of
from ..operations import NOTHING, PIPES, operation_of
from ..plan import read_spec
from ..timing.jumps import jumps_of
from ..timing.shapes import mixed, space_of
from .instructions import Instruction, instruction_of
from .scalars import bits_of, c_type, element_type, formula, from_bits

_SPACES = {"ub": "UB", "cbuf": "L1", "ca": "L0A", "cb": "L0B", "cc": "L0C"}
_SIZES = {"UB": "UB_SIZE", "L1": "L1_SIZE", "L0A": "L0A_SIZE", "L0B": "L0B_SIZE", "L0C": "L0C_SIZE"}
_SILENT = NOTHING | {"annotation.mark", "scf.yield", "scf.condition", "func.return"}
_SAME = ("memref.cast", "memref.memory_space_cast")
_ADDED = 3  # parameters that the compiler puts before the kernel's own: of flags between cores, lock, workspace


def translate(module: ModuleOp) -> str:
    """The C source of a shared object with the function `npu_offline_entry(slots, x, y, z)`, as `lowering.lower` makes it.

    Args:
        module: a final module without affine operations, parsed.

    Raises:
        UnsupportedError: it has an operation that the machine does not know.
    """
    functions = [op for op in module.walk() if name_of(op) == "func.func" and op.regions[0].blocks]
    devices = {_core_of(op): op for op in functions if "DEVICE" in str(op.attributes.get("hacc.function_kind"))}
    bodies = {symbol_of(op, "sym_name") for op in functions}
    if not devices or not devices.keys() <= {"AIC", "AIV"}:
        raise UnsupportedError(f"execution does not know a kernel for {', '.join(devices) or 'no core'}")
    tables = _Tables(bodies)
    parts = [_Function(tables, core).write(op) for core, op in sorted(devices.items())]
    spec = read_spec(module)
    sizes = ", ".join(f"[{space}] = {spec[name] // 8}" for space, name in _SIZES.items())
    used = ", ".join(f"[{space}] = {end}" for space, end in tables.used.items())
    buffers = ",\n".join(f'  {{"{text}"}}' for text in tables.buffers)
    rows = ",\n".join(f"  {row.row(number)}" for number, row in enumerate(tables.instructions))
    name = symbol_of(next(iter(devices.values())), "sym_name")
    return "\n".join(
        [
            '#include "machine.h"\n#include "operations.h"\n#include "generated.h"',
            f"static const buffer_name buffers[] = {{\n{buffers or '  {0}'}}};",
            f"static const instruction I[] = {{\n{rows or '  {0}'}}};",
            *parts,
            f'static const module M_ = {{"{name}", I, buffers, {workspace_bytes(module)}, {{{sizes}}}, {{{used or "0"}}},',
            f"  {'AIC' if 'AIC' in devices else 'NULL'}, {'AIV' if 'AIV' in devices else 'NULL'}}};",
            "void npu_offline_entry(const int64_t *slots, int32_t x, int32_t y, int32_t z)",
            "{ execute(&M_, slots, x, y, z); }",
            f"const int64_t npu_offline_workspace = {workspace_bytes(module)};",
        ]
    )


def workspace_bytes(module: ModuleOp) -> int:
    """How much of the workspace in global memory one program has."""
    for op in module.walk():
        if name_of(op) == "func.func" and "infer_workspace_shape_function" in str(op.attributes.get("hacc.host_func_type")):
            last = op.regions[0].blocks[0].last_op
            value = (
                property_of(last.operands[0].owner, "value")
                if last is not None and isinstance(last.operands[0].owner, Op)
                else None
            )
            if not isinstance(value, IntegerAttr):
                raise UnsupportedError("the size of the kernel's workspace is no constant")
            return value.value.data
    return 0


def _core_of(function: Op) -> str:
    found = re.search(r"<(\w+)>", str(function.attributes.get("hivm.func_core_type")))
    return found[1] if found else ""


class _Tables:
    """What all functions of a module share."""

    def __init__(self, bodies: set[str]) -> None:
        self.bodies = bodies
        self.buffers: list[str] = []
        self.instructions: list[Instruction] = []
        self.used: dict[str, int] = {}

    def add(self, *instructions: Instruction) -> int:
        """The number of the first one."""
        self.instructions += instructions
        return len(self.instructions) - len(instructions)


class _Function:
    """Writes one device function."""

    def __init__(self, tables: _Tables, core: str) -> None:
        self._tables, self._core = tables, core
        self._names: dict[SSAValue, str] = {}
        self._lines: list[str] = []

    def write(self, function: Op) -> str:
        region = function.regions[0]
        entry = region.blocks[0]
        self._lines.append(f"static void {self._core}(const int64_t *slots, int64_t program, int64_t vector_core) {{")
        self._lines.append("  (void)slots, (void)program, (void)vector_core;")
        slot = pointers = 0
        for position, argument in enumerate(entry.args):
            kind = argument.type
            name = self._name(argument)
            if isinstance(kind, MemRefType):
                self._lines.append(f"  view {name};")
                self._lines.append(
                    f"  make_argument(&{name}, slots, {slot}, {pointers}, {element_type(kind.get_element_type())});"
                )
                slot, pointers = slot + 5, pointers + 1
            elif position == 0:
                self._lines.append(f"  const {c_type(kind)} {name} = 0;")
            else:
                self._lines.append(f"  const {c_type(kind)} {name} = {from_bits(kind, f'slots[{slot}]')};")
                slot += 1
            self._lines.append(f"  (void){name};")
        if len(region.blocks) == 1:
            self._body(entry)
        else:
            self._blocks(list(region.blocks))
        return "\n".join([*self._lines, "}"])

    def _blocks(self, blocks: Sequence[Block]) -> None:
        numbers = {block: number for number, block in enumerate(blocks)}
        for block in blocks[1:]:
            for argument in block.args:
                self._declare(argument)
        for block in blocks:
            self._lines.append(f"block{numbers[block]}:;")
            self._body(block)
            targets = jumps_of(block)
            if not targets:
                self._lines.append("return;")
            for number, (target, values) in enumerate(targets):
                condition = (
                    f"if ({self._name(block.last_op.operands[0])}) "
                    if len(targets) > 1 and number == 0 and block.last_op
                    else ""
                )
                self._lines.append(f"{condition}{{")
                self._assign(target.args, values)
                self._lines.append(f"goto block{numbers[target]}; }}")

    # ---- values

    def _name(self, value: SSAValue) -> str:
        return self._names.setdefault(value, f"v{len(self._names)}")

    def _declare(self, value: SSAValue) -> str:
        self._lines.append(f"{c_type(value.type)} {self._name(value)};")
        return self._name(value)

    def _assign(self, targets: Sequence[SSAValue], values: Sequence[SSAValue]) -> None:
        pairs = [
            (self._name(target), self._name(value), c_type(target.type))
            for target, value in zip(targets, values, strict=True)
        ]
        if len(pairs) > 1:
            self._lines += [f"{kind} t_{target} = {value};" for target, value, kind in pairs]
            pairs = [(target, f"t_{target}", kind) for target, _, kind in pairs]
        self._lines += [f"{target} = {value};" for target, value, _ in pairs]

    def _array(self, values: Sequence[int | SSAValue]) -> str:
        numbers = ", ".join(str(value) if isinstance(value, int) else self._name(value) for value in values)
        return f"(int64_t[]){{{numbers or '0'}}}"

    # ---- operations

    def _body(self, block: Block) -> None:
        for op in block.ops:
            name = name_of(op)
            if name in ("scf.for", "scf.if", "scf.while"):
                getattr(self, name.replace("scf.", "_"))(op)
            elif name not in ("cf.br", "cf.cond_br"):
                self._operation(op, name)

    def _operation(self, op: Op, name: str) -> None:
        if name == "hivm.hir.pointer_cast":
            self._buffer(op)
        elif name in ("hivm.hir.get_block_idx", "hivm.hir.get_sub_block_idx"):
            what = "program" if name.endswith("get_block_idx") else "vector_core"
            self._lines.append(f"{self._declare(op.results[0])} = {what};")
        elif name in _SILENT:
            return
        elif name.startswith("memref.") or name == "hivm.hir.bitcast":
            self._memory(op, name)
        elif (write := _SYNCHRONISATION.get(name)) is not None:
            write(self, op)
        elif (operation := operation_of(op)) is not None:
            self._issue(op, instruction_of(operation))
        else:
            self._scalar(op, name)

    def _scalar(self, op: Op, name: str) -> None:
        operands = [self._name(operand) for operand in op.operands]
        text = formula(op, operands)
        if text is None:
            callee = symbol_of(op, "callee")
            kind = "the vector function" if callee in self._tables.bodies else "the library function"
            raise UnsupportedError(f"execution does not know {f'{kind} {callee}' if callee else name}")
        self._lines.append(f"{self._declare(op.results[0])} = {text};")

    def _issue(self, op: Op, instruction: Instruction) -> None:
        names = [self._number(operand, op) for operand in instruction.operands]
        operands = ", ".join(f"&{name}" for name in names)
        number = self._tables.add(instruction)
        if instruction.action != "multiply":
            self._lines.append(f"issue(&I[{number}], (const view *const[]){{{operands or '0'}}});")
            return
        for side, position in (("a", 1), ("b", 2)):
            turned = instruction.attributes[position]
            name = f"{instruction.name} ({side})"
            self._tables.add(Instruction(name, "MTE1", f"take_{side}", (), (2, 0, 0), (0, turned, 0, 0, 0, 0, 2)))
        flags = f"(int64_t[]){{{', '.join(self._name(flag) for flag in instruction.flags)}}}" if instruction.flags else "0"
        self._lines.append(f"issue_product(&I[{number}], (const view *const[]){{{operands}}}, {flags});")

    def _number(self, operand: SSAValue, op: Op) -> str:
        """The name of a view: of memory as it is, or made of a number; unsigned where the library function says so."""
        unsigned = re.findall(r"uint(\d+)_t", symbol_of(op, "callee"))
        kind = operand.type
        if isinstance(kind, MemRefType):
            width = re.sub(r"\D", "", str(kind.get_element_type()))
            if width not in unsigned:
                return self._name(operand)
            name = f"u{len(self._lines)}_{self._name(operand)}"
            self._lines.append(f"view {name}; retype(&{name}, &{self._name(operand)}, U{width});")
            return name
        name = f"n{len(self._lines)}_{self._name(operand)}"
        bits = bits_of(kind, self._name(operand))
        self._lines.append(f"view {name}; make_number(&{name}, {element_type(kind)}, {bits});")
        return name

    def _buffer(self, op: Op) -> None:
        kind = op.results[0].type
        assert isinstance(kind, MemRefType)
        space, element, shape = _SPACES.get(space_of(kind) or ""), kind.get_element_type(), kind.get_shape()
        if len(op.operands) > 1:
            places = [_constant_of(operand) for operand in op.operands]
            raise UnsupportedError(f"the module does not say at which of the addresses {places} the buffer {kind} is")
        if space is None or not op.operands or any(size < 0 for size in shape):
            raise UnsupportedError(f"execution does not know a buffer like {op}")
        address = self._name(op.operands[0])
        start = _constant_of(op.operands[0]) or 0
        bits = element.bitwidth if isinstance(element, FixedBitwidthType) else 64
        count = 1
        for size in shape:
            count *= size
        self._tables.used[space] = max(self._tables.used.get(space, 0), start + (count * bits + 7) // 8)
        number = len(self._tables.buffers)
        self._tables.buffers.append(f"buffer {number} ({'x'.join(map(str, [*shape, element]))} at {space} {start})")
        name = self._declare(op.results[0])
        self._lines.append(
            f"make_buffer(&{name}, {space}, {address}, {element_type(element)}, {number}, "
            f"{len(shape)}, {self._array(shape)});"
        )

    def _memory(self, op: Op, name: str) -> None:
        if name in ("memref.load", "memref.store"):
            self._access(op, name)
            return
        if name == "memref.extract_strided_metadata":
            self._metadata(op)
            return
        source = self._name(op.operands[0])
        result = op.results[0]
        if name == "memref.dim":
            self._lines.append(f"{self._declare(result)} = {source}.n[{self._name(op.operands[1])}];")
            return
        if not isinstance(result.type, MemRefType):
            raise UnsupportedError(f"execution does not know {op}")
        target = self._declare(result)
        if name in _SAME:
            self._lines.append(f"{target} = {source};")
        elif name == "hivm.hir.bitcast":
            self._lines.append(f"retype(&{target}, &{source}, {element_type(result.type.get_element_type())});")
        elif name == "memref.subview":
            offsets, sizes, strides = (mixed(op, what) for what in ("offsets", "sizes", "strides"))
            self._lines.append(
                f"subview(&{target}, &{source}, {self._array(offsets)}, {self._array(sizes)}, {self._array(strides)});"
            )
            kept = _kept_axes(op, sizes, result.type)
            if len(kept) != len(sizes):
                axes = ", ".join(map(str, kept))
                self._lines.append(f"keep_axes(&{target}, &{target}, {len(kept)}, (int[]){{{axes or '0'}}});")
        elif name == "memref.reinterpret_cast":
            (offset,), sizes, strides = (mixed(op, what) for what in ("offsets", "sizes", "strides"))
            first = self._array([offset])
            self._lines.append(
                f"reinterpret(&{target}, &{source}, {first}[0], {len(sizes)}, {self._array(sizes)}, {self._array(strides)});"
            )
        elif name in ("memref.collapse_shape", "memref.expand_shape"):
            self._reshape(op, name, target, source)
        elif name == "memref.view":
            given = iter(op.operands[2:])
            whole = [size if size >= 0 else next(given) for size in result.type.get_shape()]
            element = element_type(result.type.get_element_type())
            self._lines.append(
                f"view_bytes(&{target}, &{source}, {self._name(op.operands[1])}, {element}, "
                f"{len(whole)}, {self._array(whole)});"
            )
        else:
            raise UnsupportedError(f"execution does not know {name}")

    def _reshape(self, op: Op, name: str, target: str, source: str) -> None:
        groups = property_of(op, "reassociation")
        assert isinstance(groups, ArrayAttr)
        ends, total = [], 0
        for group in groups:
            total += len(list(group))
            ends.append(total)
        text = f"(int[]){{{', '.join(map(str, ends)) or '0'}}}"
        if name == "memref.collapse_shape":
            self._lines.append(f"collapse(&{target}, &{source}, {len(ends)}, {text});")
            return
        static = property_of(op, "static_output_shape")
        assert isinstance(static, DenseArrayBase)
        given = iter(op.operands[1:])
        sizes = [int(size) if int(size) >= 0 else next(given) for size in static.get_values()]
        self._lines.append(f"expand(&{target}, &{source}, {text}, {len(sizes)}, {self._array(sizes)});")

    def _metadata(self, op: Op) -> None:
        source = self._name(op.operands[0])
        base, offset, *rest = op.results
        rank = len(rest) // 2
        self._lines.append(
            f"{self._declare(base)} = {source}; {self._name(base)}.p = {source}.base; {self._name(base)}.rank = 0;"
        )
        self._lines.append(f"{self._declare(offset)} = elements_before(&{source});")
        for axis in range(rank):
            self._lines.append(f"{self._declare(rest[axis])} = {source}.n[{axis}];")
            self._lines.append(f"{self._declare(rest[rank + axis])} = {source}.s[{axis}];")

    def _access(self, op: Op, name: str) -> None:
        position = 0 if name == "memref.load" else 1
        memory, indices = op.operands[position], op.operands[position + 1 :]
        number = self._tables.add(Instruction(name.removeprefix("memref."), "S", "nothing", (), (0, 0, 0)))
        place = f"&{self._name(memory)}, {self._array(list(indices))}"
        if name == "memref.load":
            kind = op.results[0].type
            self._lines.append(f"{self._declare(op.results[0])} = {from_bits(kind, f'load_bits(&I[{number}], {place})')};")
        else:
            self._lines.append(
                f"store_bits(&I[{number}], {bits_of(op.operands[0].type, self._name(op.operands[0]))}, {place});"
            )

    # ---- control flow

    def _for(self, op: Op) -> None:
        first, last, step, *initial = op.operands
        block = op.regions[0].blocks[0]
        variable, *carried = block.args
        for result in op.results:
            self._declare(result)
        self._lines.append("{")
        for value in carried:
            self._declare(value)
        self._assign(carried, initial)
        kind, name = c_type(variable.type), self._name(variable)
        bounds = f"{kind} {name} = {self._name(first)}; {name} < {self._name(last)}; {name} += {self._name(step)}"
        self._lines.append(f"for ({bounds}) {{")
        self._body(block)
        self._assign(carried, _yielded(block))
        self._lines.append("}")
        self._assign(op.results, carried)
        self._lines.append("}")

    def _if(self, op: Op) -> None:
        for result in op.results:
            self._declare(result)
        keyword = f"if ({self._name(op.operands[0])})"
        for region in op.regions:
            if region.blocks:
                self._lines.append(f"{keyword} {{")
                self._body(region.blocks[0])
                self._assign(op.results, _yielded(region.blocks[0]))
                self._lines.append("}")
            keyword = "else"

    def _while(self, op: Op) -> None:
        before, after = (region.blocks[0] for region in op.regions)
        for result in op.results:
            self._declare(result)
        self._lines.append("{")
        for value in (*before.args, *after.args):
            self._declare(value)
        self._assign(before.args, op.operands)
        self._lines.append("for (;;) {")
        self._body(before)
        assert before.last_op is not None
        condition, *passed = before.last_op.operands
        self._lines.append(f"if (!{self._name(condition)}) {{")
        self._assign(op.results, passed)
        self._lines.append("break; }")
        self._assign(after.args, passed)
        self._body(after)
        self._assign(before.args, _yielded(after))
        self._lines.append("} }")

    # ---- flags

    def set_or_wait(self, op: Op) -> None:
        """A flag between two pipes of a core."""
        event = property_of(op, "static_event_id")
        number = self._name(op.operands[0]) if event is None else str(event).partition("EVENT_ID")[2].strip("<> ")
        verb = name_of(op).removeprefix("hivm.hir.")
        self._lines.append(f"{verb}({_pipe(op, 'set_pipe')}, {_pipe(op, 'wait_pipe')}, {number});")

    def set_or_wait_across(self, op: Op) -> None:
        """A flag between cores of both kinds."""
        flag = property_of(op, "static_flag_id")
        number = self._name(op.operands[0]) if flag is None else str(flag).partition(" ")[0]
        if _pipe(op, "pipe") != "S":
            raise UnsupportedError(f"execution does not know the pipes of {op}")
        if name_of(op).endswith("_set"):
            self._lines.append(f"set_cross_flag({_pipe(op, 'tpipe')}, {number});")
        else:
            self._lines.append(f"wait_cross_flag({number});")

    def barrier(self, op: Op) -> None:
        """A barrier of one pipe, or of all."""
        pipe = _pipe(op, "pipe")
        if pipe != "S":
            self._lines.append(f"barrier({pipe});")


_SYNCHRONISATION: dict[str, Callable[[_Function, Op], None]] = {
    "hivm.hir.set_flag": _Function.set_or_wait,
    "hivm.hir.wait_flag": _Function.set_or_wait,
    "hivm.hir.pipe_barrier": _Function.barrier,
    "hivm.hir.sync_block_set": _Function.set_or_wait_across,
    "hivm.hir.sync_block_wait": _Function.set_or_wait_across,
}


def _constant_of(value: SSAValue) -> int | None:
    number = property_of(value.owner, "value") if isinstance(value.owner, Op) else None
    return number.value.data if isinstance(number, IntegerAttr) else None


def _yielded(block: Block) -> Sequence[SSAValue]:
    last = block.last_op
    return last.operands if last is not None and name_of(last) == "scf.yield" else []


def _pipe(op: Op, name: str) -> str:
    text = str(property_of(op, name)).partition("PIPE_")[2].strip("<> ")
    if text == "ALL":
        return "PIPES"
    if text not in PIPES:
        raise UnsupportedError(f"execution does not know the pipe {text}")
    return text


def _kept_axes(op: Op, sizes: Sequence[int | SSAValue], kind: MemRefType) -> list[int]:
    """The axes of a subview that its type has: it may leave out some whose size is one."""
    wanted = list(kind.get_shape())
    ones = [axis for axis, size in enumerate(sizes) if size == 1]
    dropped = len(sizes) - len(wanted)
    if len(ones) == dropped:
        return [axis for axis in range(len(sizes)) if axis not in ones]
    strides = kind.get_strides() or [None] * len(wanted)
    source = op.operands[0].type
    assert isinstance(source, MemRefType)
    given = source.get_strides() or [None] * len(sizes)
    kept: list[int] = []
    for axis, size in enumerate(sizes):
        left = len(wanted) - len(kept)
        if left == len(sizes) - axis:
            return [*kept, *range(axis, len(sizes))]
        position = len(kept)
        if (
            left
            and size != 1
            or left
            and wanted[position] == 1
            and (strides[position] is None or strides[position] == given[axis])
        ):
            kept.append(axis)
    if len(kept) != len(wanted):
        raise UnsupportedError(f"execution does not know which axes {op} leaves out")
    return kept


SOURCES = tuple(sorted(path.name for path in Path(__file__).parent.glob("*.[ch]")))
"""Files of the machine, in C."""
