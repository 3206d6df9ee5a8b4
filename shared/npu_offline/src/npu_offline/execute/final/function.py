"""Translates one function of a final module to C: control flow, scalar code, and the issue of instructions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xdsl.dialects.builtin import MemRefType
from xdsl.ir import Block, SSAValue
from xdsl.ir import Operation as Op

from ...errors import UnsupportedError
from ...module.jumps import jumps_of
from ...module.mlir import name_of, property_of, symbol_of
from ...module.operations import NOTHING, operation_of
from .flags import SYNCHRONISATION
from .instructions import Instruction, instruction_of
from .memory import write_buffer, write_memory
from .scalars import PAIRS, bits_of, c_type, element_type, formula, from_bits
from .state import CHIP_STATE
from .writer import Tables, Writer

_TURN = "npu_offline_turn();"
_REGISTERS = "hivm_regbaseintrins.intr.hivm."
_SILENT = NOTHING | {"annotation.mark", "llvm.intr.assume", "scf.yield", "scf.condition", "func.return"}
_PRINTING = re.compile(r"(?:_mlir_ciface_)?(?:print_|init_debug|finish_debug)\w*")  # what tl.device_print calls
_INTEGERS = re.compile(r"i(8|16|32)")
_TEXTS = {"llvm.mlir.addressof", "llvm.getelementptr"}  # that are printed


class Function(Writer):
    """Writes the device function of one kind of core."""

    def __init__(self, tables: Tables, core: str) -> None:
        super().__init__(tables)
        self.core = core

    def write(self, function: Op) -> str:
        """The C function.

        Raises:
            UnsupportedError: it has an operation that the machine does not know.
        """
        region = function.regions[0]
        entry = region.blocks[0]
        self.lines.append(f"static void {self.core}(const int64_t *slots, int64_t program, int64_t vector_core) {{")
        self.lines.append("  (void)slots, (void)program, (void)vector_core;")
        slot = pointers = 0
        for position, argument in enumerate(entry.args):
            kind = argument.type
            name = self.name(argument)
            if isinstance(kind, MemRefType):
                self.lines.append(f"  view {name};")
                self.lines.append(
                    f"  make_argument(&{name}, slots, {slot}, {pointers}, {element_type(kind.get_element_type())});"
                )
                slot, pointers = slot + 5, pointers + 1
            elif position == 0:
                self.lines.append(f"  const {c_type(kind)} {name} = 0;")
            else:
                self.lines.append(f"  const {c_type(kind)} {name} = {from_bits(kind, f'slots[{slot}]')};")
                slot += 1
            self.lines.append(f"  (void){name};")
        if len(region.blocks) == 1:
            self._body(entry)
        else:
            self._blocks(list(region.blocks))
        return "\n".join([*self.lines, "}"])

    def _blocks(self, blocks: Sequence[Block]) -> None:
        numbers = {block: number for number, block in enumerate(blocks)}
        for block in blocks[1:]:
            for argument in block.args:
                self.declare(argument)
        for block in blocks:
            self.lines.append(f"block{numbers[block]}:;")
            self._body(block)
            targets = jumps_of(block)
            if not targets:
                self.lines.append("return;")
            for number, (target, values) in enumerate(targets):
                condition = (
                    f"if ({self.name(block.last_op.operands[0])}) "
                    if len(targets) > 1 and number == 0 and block.last_op
                    else ""
                )
                self.lines.append(f"{condition}{{")
                self.assign(target.args, values)
                turn = _TURN if numbers[target] <= numbers[block] else ""
                self.lines.append(f"{turn} goto block{numbers[target]}; }}")

    def _body(self, block: Block) -> None:
        for op in block.ops:
            name = name_of(op)
            if name in ("scf.for", "scf.if", "scf.while"):
                getattr(self, name.replace("scf.", "_"))(op)
            elif name not in ("cf.br", "cf.cond_br"):
                self._operation(op, name)

    def _operation(self, op: Op, name: str) -> None:
        if name == "hivm.hir.pointer_cast":
            write_buffer(self, op)
        elif name in ("hivm.hir.get_block_idx", "hivm.hir.get_sub_block_idx"):
            what = "program" if name.endswith("get_block_idx") else "vector_core"
            self.lines.append(f"{self.declare(op.results[0])} = {what};")
        elif (write := SYNCHRONISATION.get(name) or CHIP_STATE.get(name)) is not None:
            write(self, op)
        elif name in _SILENT or name in _TEXTS or _PRINTING.fullmatch(symbol_of(op, "callee")):
            return
        elif name in PAIRS:
            low, high = (self.declare(result) for result in op.results)
            operands = [self.name(operand) for operand in op.operands]
            self.lines.append(f"{PAIRS[name](op).format(*operands, low=low, high=high)}")
        elif name.startswith("memref.") or name == "hivm.hir.bitcast":
            write_memory(self, op, name)
        elif (operation := operation_of(op)) is not None:
            self._issue(op, instruction_of(operation))
        else:
            self._scalar(op, name)

    def _scalar(self, op: Op, name: str) -> None:
        operands = [self.name(operand) for operand in op.operands]
        text = formula(op, operands)
        if text is None:
            callee = symbol_of(op, "callee")
            if callee in self.tables.bodies:
                registers = ", ".join(_of_registers(self.tables.bodies[callee]))
                raise UnsupportedError(f"execution does not know the vector function {callee}, nor its {registers}")
            raise UnsupportedError(f"execution does not know {f'the library function {callee}' if callee else name}")
        self.lines.append(f"{self.declare(op.results[0])} = {text};")

    def _issue(self, op: Op, instruction: Instruction) -> None:
        names = [self._number(operand, op) for operand in instruction.operands]
        operands = ", ".join(f"&{name}" for name in names)
        number = self.tables.add(instruction)
        if instruction.action != "multiply":
            self.lines.append(f"issue(&I[{number}], (const view *const[]){{{operands or '0'}}});")
            return
        for side, position in (("a", 1), ("b", 2)):
            turned = instruction.attributes[position]
            name = f"{instruction.name} ({side})"
            self.tables.add(Instruction(name, "MTE1", f"take_{side}", (), (2, 0, 0), (0, turned, 0, 0, 0, 0, 2)))
        flags = f"(int64_t[]){{{', '.join(self.name(flag) for flag in instruction.flags)}}}" if instruction.flags else "0"
        self.lines.append(f"issue_product(&I[{number}], (const view *const[]){{{operands}}}, {flags});")

    def _number(self, operand: SSAValue, op: Op) -> str:
        """The C variable of a view, of memory or of one number; unsigned where the library function or the cast says so."""
        unsigned = re.findall(r"uint(\d+)_t", symbol_of(op, "callee"))
        kind = operand.type
        if "unsigned" in str(property_of(op, "cast")) and isinstance(kind, MemRefType):
            unsigned = _INTEGERS.findall(str(kind.get_element_type()))
        if isinstance(kind, MemRefType):
            width = re.sub(r"\D", "", str(kind.get_element_type()))
            if width not in unsigned:
                return self.name(operand)
            name = f"u{len(self.lines)}_{self.name(operand)}"
            self.lines.append(f"view {name}; retype(&{name}, &{self.name(operand)}, U{width});")
            return name
        name = f"n{len(self.lines)}_{self.name(operand)}"
        bits = bits_of(kind, self.name(operand))
        self.lines.append(f"view {name}; make_number(&{name}, {element_type(kind)}, {bits});")
        return name

    def _for(self, op: Op) -> None:
        first, last, step, *initial = op.operands
        block = op.regions[0].blocks[0]
        variable, *carried = block.args
        for result in op.results:
            self.declare(result)
        self.lines.append("{")
        for value in carried:
            self.declare(value)
        self.assign(carried, initial)
        kind, name = c_type(variable.type), self.name(variable)
        bounds = f"{kind} {name} = {self.name(first)}; {name} < {self.name(last)}; {name} += {self.name(step)}"
        self.lines.append(f"for ({bounds}) {{ {_TURN}")
        self._body(block)
        self.assign(carried, _yielded(block))
        self.lines.append("}")
        self.assign(op.results, carried)
        self.lines.append("}")

    def _if(self, op: Op) -> None:
        for result in op.results:
            self.declare(result)
        keyword = f"if ({self.name(op.operands[0])})"
        for region in op.regions:
            if region.blocks:
                self.lines.append(f"{keyword} {{")
                self._body(region.blocks[0])
                self.assign(op.results, _yielded(region.blocks[0]))
                self.lines.append("}")
            keyword = "else"

    def _while(self, op: Op) -> None:
        before, after = (region.blocks[0] for region in op.regions)
        for result in op.results:
            self.declare(result)
        self.lines.append("{")
        for value in (*before.args, *after.args):
            self.declare(value)
        self.assign(before.args, op.operands)
        self.lines.append(f"for (;;) {{ {_TURN}")
        self._body(before)
        assert before.last_op is not None
        condition, *passed = before.last_op.operands
        self.lines.append(f"if (!{self.name(condition)}) {{")
        self.assign(op.results, passed)
        self.lines.append("break; }")
        self.assign(after.args, passed)
        self._body(after)
        self.assign(before.args, _yielded(after))
        self.lines.append("} }")


def _of_registers(function: Op) -> list[str]:
    """The instructions on registers that a vector function of the Ascend950 has, without the types in their names.

    The final modules of toolchain 1.1.0 still have MLIR's vectors in their place.
    """
    names = {name_of(op) for op in function.walk()}
    found = {name.removeprefix(_REGISTERS).partition(".")[0] for name in names if name.startswith(_REGISTERS)}
    return sorted(found | {name for name in names if name.startswith("vector.")})


def _yielded(block: Block) -> Sequence[SSAValue]:
    last = block.last_op
    return last.operands if last is not None and name_of(last) == "scf.yield" else []
