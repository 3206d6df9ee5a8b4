"""xDSL's parser, faster on what MLIR prints: one operation a line, and thousands of lines that end alike.

A line is split by a regular expression, and what stands behind its operands (properties, attributes, types) is parsed by
xDSL once for all lines that have it. The types of a block's arguments are too. Everything else is xDSL's parser.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.parser import Parser, UnresolvedOperand
from xdsl.utils.lexer import Span
from xdsl.utils.mlir_lexer import MLIRTokenKind

# Results, name, operands, successors, the rest, and whether regions follow.
_LINE = re.compile(r'\s*(?:(%[^"\n=]*) = )?"([\w.]+)"\(([^)\n]*)\)(?:\[([^\]\n]*)\])?([^\n]*?)( \(\{)?\n')
_ARGUMENTS = re.compile(r"\((%[^()\n]*)\):\n")
_ARGUMENT = re.compile(r"%(\w+): (.*?)(?=, %|$)")
_ALIAS = re.compile(r"[#!]\w+\b(?!\.)")  # of an attribute or a type: another in each module
_MOST_KEPT = 20_000


# One for all modules: types of dialects that xDSL does not know are equal within a context alone.
CONTEXT = Context(allow_unregistered=True)
CONTEXT.load_dialect(Builtin)


class _Rest(NamedTuple):
    """What stands behind the operands of an operation without regions, or behind the regions of one that has some."""

    properties: dict[str, Attribute]
    attributes: dict[str, Attribute]
    operand_types: tuple[Attribute, ...]
    result_types: tuple[Attribute, ...]


_kept: dict[str, _Rest] = {}  # those without aliases, of all modules


class Reader(Parser):
    """Reads one module in MLIR's generic form, as `mlir-opt --mlir-print-op-generic` prints it."""

    def __init__(self, generic: str) -> None:
        super().__init__(CONTEXT, generic)
        self._rests: dict[str, _Rest] = {}  # those with aliases

    def parse_operation(self) -> Operation:
        """The operation that begins here."""
        line = _LINE.match(self.lexer.input.content, self._current_token.span.start)
        if line is None:
            return super().parse_operation()
        op, end = self._operation(line)
        self._resume_from(end)
        return op

    def _parse_block_body(self, block: Block) -> None:
        content, end = self.lexer.input.content, self._current_token.span.start
        while (line := _LINE.match(content, end)) is not None:
            op, end = self._operation(line)
            block.add_op(op)
        self._resume_from(end)
        super()._parse_block_body(block)

    def _operation(self, line: re.Match[str]) -> tuple[Operation, int]:
        """The operation of a line and of the regions that begin there, and where it ends."""
        if line[6]:
            properties = self._rest(f"{line[5]} : () -> ()").properties
            self._resume_from(line.start(6))
            regions, tail = self.parse_region_list(), self._current_token.span.start
            end = self.lexer.input.content.find("\n", tail)
            end = self.lexer.input.len if end < 0 else end
            rest = self._rest(self.lexer.input.content[tail:end])
        else:
            rest, regions, end = self._rest(line[5]), [], line.end()
            properties = rest.properties
        place = line.start(3)
        operands = _listed(line[3])
        op = self._get_op_by_name(line[2]).create(
            operands=[self._operand(name, kind, place) for name, kind in zip(operands, rest.operand_types, strict=True)],
            result_types=rest.result_types,
            properties=properties,
            attributes=dict(rest.attributes),
            successors=[self._get_block_from_name(self._span(name, line.end(3))) for name in _listed(line[4])],
            regions=regions,
        )
        first = 0
        for bound in _listed(line[1]):
            name, _, count = bound.partition(":")
            results = op.results[first : first + int(count or 1)]
            self._register_ssa_definition(name[1:], results, self._span(name, line.start(1)))
            first += len(results)
        return op, end

    def _parse_optional_block_arg_list(self, block: Block) -> Block | None:
        listed = _ARGUMENTS.match(self.lexer.input.content, self._current_token.span.start)
        if listed is None:
            return super()._parse_optional_block_arg_list(block)
        for argument in _ARGUMENT.finditer(listed[1]):
            kind = self._rest(f" : () -> {argument[2]}").result_types[0]
            value = block.insert_arg(kind, len(block.args))
            self._register_ssa_definition(argument[1], (value,), self._span(f"%{argument[1]}", listed.start()))
        self._resume_from(listed.end(1) + 1)
        return block

    def _rest(self, text: str) -> _Rest:
        known = _kept.get(text) or self._rests.get(text)
        if known is None:
            known = self._parse_rest(text)
            rests = self._rests if _ALIAS.search(text) else _kept
            if len(rests) >= _MOST_KEPT:
                rests.clear()
            rests[text] = known
        return known

    def _parse_rest(self, text: str) -> _Rest:
        parser = Parser(self.ctx, text)
        parser.attribute_aliases.update(self.attribute_aliases)
        properties, attributes = parser.parse_optional_properties_dict(), parser.parse_optional_attr_dict()
        parser.parse_punctuation(":")
        kind = parser.parse_function_type()
        parser._parse_token(MLIRTokenKind.EOF, "the end of a line")
        return _Rest(properties, attributes, kind.inputs.data, kind.outputs.data)

    def _operand(self, text: str, kind: Attribute, place: int) -> SSAValue:
        name, _, index = text.partition("#")
        values = self.ssa_values.get(name[1:])
        if values is None:  # defined further down
            return self.resolve_operand(UnresolvedOperand(self._span(name, place), int(index or 0)), kind)
        return values[int(index or 0)]

    def _span(self, name: str, place: int) -> Span:
        """The first place of a name from `place` on."""
        start = self.lexer.input.content.index(name, place)
        return Span(start, start + len(name), self.lexer.input)


def _listed(text: str | None) -> list[str]:
    return text.split(", ") if text else []
