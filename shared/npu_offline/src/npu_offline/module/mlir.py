"""Reading, editing and printing MLIR in its generic form: xDSL holds the IR."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from xdsl.dialects.builtin import ModuleOp, StringAttr, SymbolRefAttr, UnitAttr, UnregisteredOp
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.parser import Parser

from .reader import CONTEXT, Reader

_MAP_ALIAS = re.compile(r"^(#\w+ = )(affine_map<.*>)$", re.MULTILINE)


def parse(generic: str) -> ModuleOp:
    """A module from MLIR's generic form. Only builtin types are known; every other operation is unregistered.

    Affine maps that xDSL cannot represent, those that multiply or divide by a symbol, become strings.
    """

    def representable(alias: re.Match[str]) -> str:
        try:
            Parser(CONTEXT, alias[2]).parse_attribute()
        except NotImplementedError:
            return f'{alias[1]}"{alias[2]}"'
        return alias[0]

    return Reader(_MAP_ALIAS.sub(representable, generic)).parse_module()


def text(op: Operation) -> str:
    """An operation in MLIR's generic form, as xDSL prints it in twice the time: here an attribute is written once."""
    return _Writer().of(op, "")


class _Writer:
    def __init__(self) -> None:
        self._attributes: dict[int, str] = {}
        self._values: dict[SSAValue, str] = {}
        self._blocks: dict[Block, str] = {}

    def of(self, op: Operation, indent: str) -> str:
        results = ", ".join(map(self._value, op.results))
        operands = ", ".join(map(self._value, op.operands))
        parts = [f'{indent}{results}{" = " if results else ""}"{name_of(op)}"({operands})']
        if op.successors:
            parts.append(f"[{', '.join(map(self._block, op.successors))}]")
        if op.properties:
            parts.append(f" <{{{self._named(op.properties)}}}>")
        if op.regions:
            regions = ("{\n" + "".join(self._body(region.blocks, indent)) + f"{indent}}}" for region in op.regions)
            parts.append(f" ({', '.join(regions)})")
        if attributes := self._named({name: value for name, value in op.attributes.items() if name != "op_name__"}):
            parts.append(f" {{{attributes}}}")
        given, made = (", ".join(self._attribute(value.type) for value in values) for values in (op.operands, op.results))
        parts.append(f" : ({given}) -> ({made})")
        return "".join(parts)

    def _body(self, blocks: Iterable[Block], indent: str) -> Iterable[str]:
        for block in blocks:
            arguments = ", ".join(f"{self._value(each)}: {self._attribute(each.type)}" for each in block.args)
            yield f"{indent}{self._block(block)}({arguments}):\n"
            for op in block.ops:
                yield self.of(op, indent + "  ") + "\n"

    def _named(self, attributes: Mapping[str, Attribute]) -> str:
        return ", ".join(
            name if isinstance(value, UnitAttr) else f"{name} = {self._attribute(value)}"
            for name, value in attributes.items()
        )

    def _attribute(self, attribute: Attribute) -> str:
        written = self._attributes.get(id(attribute))
        if written is None:
            written = self._attributes[id(attribute)] = str(attribute)
        return written

    def _value(self, value: SSAValue) -> str:
        return self._values.setdefault(value, f"%{len(self._values)}")

    def _block(self, block: Block) -> str:
        return self._blocks.setdefault(block, f"^bb{len(self._blocks)}")


def parse_attribute(text: str) -> Attribute:
    """An attribute of any dialect."""
    return Parser(CONTEXT, text).parse_attribute()


def name_of(op: Operation) -> str:
    """The operation's name, "memref.copy"."""
    name = op.attributes.get("op_name__")
    return name.data if isinstance(name, StringAttr) else op.name


def make(
    name: str, operands: Sequence[SSAValue] = (), results: Sequence[Attribute] = (), **properties: Attribute
) -> Operation:
    """A new operation of any dialect."""
    return UnregisteredOp.with_name(name).create(operands=list(operands), result_types=list(results), properties=properties)


def property_of(op: Operation, name: str) -> Attribute | None:
    """A property or discardable attribute of an operation, whichever the dialect made it."""
    return op.properties.get(name, op.attributes.get(name))


def symbol_of(op: Operation, name: str) -> str:
    """The text of a symbol name or reference."""
    value = property_of(op, name)
    if isinstance(value, StringAttr):
        return value.data
    return value.root_reference.data if isinstance(value, SymbolRefAttr) else ""
