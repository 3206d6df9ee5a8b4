"""Reading, editing and printing MLIR in its generic form: xDSL holds the IR."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xdsl.dialects.builtin import ModuleOp, StringAttr, SymbolRefAttr, UnregisteredOp
from xdsl.ir import Attribute, Operation, SSAValue
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


def parse_attribute(text: str) -> Attribute:
    """An attribute of any dialect."""
    return Parser(CONTEXT, text).parse_attribute()


def name_of(op: Operation) -> str:
    """The operation's name, "memref.copy"."""
    return op.op_name.data if isinstance(op, UnregisteredOp) else op.name


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
