"""Python expressions of sizes as terms of a solver: `cdiv(n, BLOCK)`, `M * N`, `n % 16 == 0`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import z3

from ..errors import OfflineError
from .question import Quotient, Term

_SUMS: dict[type, Callable[[Any, Any], Any]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FORMS = "must be of sizes, numbers, + - * // % **, comparisons, and, or, cdiv(a, b), min(a, b) and max(a, b)"


def term_of(what: str, text: str, sizes: Mapping[str, Term], facts: list[Term], quotients: list[Quotient]) -> Term:
    """An expression's term.

    Args:
        what: whose expression it is, for messages.
        text: the expression.
        sizes: terms by name.
        facts: takes what holds for quotients.
        quotients: those of expressions before; takes this one's.

    Raises:
        OfflineError: it is no such expression, or names another size.
    """
    try:
        return _Reader(sizes, facts, quotients).visit(ast.parse(text, mode="eval").body)
    except (SyntaxError, _WrongExpressionError) as error:
        said = error.args[0] if isinstance(error, _WrongExpressionError) else _FORMS
        raise OfflineError(f"{what} is {text!r}: {said}") from None


class _WrongExpressionError(Exception):
    pass


class _Reader(ast.NodeVisitor):
    def __init__(self, sizes: Mapping[str, Term], facts: list[Term], quotients: list[Quotient]) -> None:
        self._sizes, self._facts, self._quotients = sizes, facts, quotients

    def generic_visit(self, node: ast.AST) -> Term:
        raise _WrongExpressionError(_FORMS)

    def visit_Constant(self, node: ast.Constant) -> Term:
        if type(node.value) is not int:
            raise _WrongExpressionError(_FORMS)
        return z3.IntVal(node.value)

    def visit_Name(self, node: ast.Name) -> Term:
        if node.id not in self._sizes:
            axes = node.id.split("x")
            how = f"a product is {'*'.join(axes)}" if all(each in self._sizes for each in axes) else "write NAME=FIRST..STOP"
            raise _WrongExpressionError(f"{node.id} is no size; there are {', '.join(self._sizes) or 'none'}: {how}")
        return self._sizes[node.id]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Term:
        if not isinstance(node.op, ast.USub):
            raise _WrongExpressionError(_FORMS)
        return -self.visit(node.operand)

    def visit_BinOp(self, node: ast.BinOp) -> Term:
        left, right = self.visit(node.left), self.visit(node.right)
        if type(node.op) in _SUMS:
            return _SUMS[type(node.op)](left, right)
        if isinstance(node.op, ast.FloorDiv):
            return self._divided(left, right)[0]
        if isinstance(node.op, ast.Mod):
            return self._divided(left, right)[1]
        numbers = [z3.simplify(each) for each in (left, right)]
        if isinstance(node.op, ast.Pow) and all(z3.is_int_value(each) and each.as_long() >= 0 for each in numbers):
            return z3.IntVal(numbers[0].as_long() ** numbers[1].as_long())
        raise _WrongExpressionError(_FORMS)

    def visit_Compare(self, node: ast.Compare) -> Term:
        sides = [self.visit(each) for each in (node.left, *node.comparators)]
        if not all(type(each) in _COMPARISONS for each in node.ops):
            raise _WrongExpressionError(_FORMS)
        found = zip(sides, node.ops, sides[1:], strict=False)
        return z3.And(*(_COMPARISONS[type(op)](left, right) for left, op, right in found))

    def visit_BoolOp(self, node: ast.BoolOp) -> Term:
        return (z3.And if isinstance(node.op, ast.And) else z3.Or)(*map(self.visit, node.values))

    def visit_Call(self, node: ast.Call) -> Term:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")  # triton.cdiv
        values = [self.visit(each) for each in node.args]
        if name == "cdiv" and len(values) == 2:
            return self._divided(values[0] + values[1] - 1, values[1])[0]
        if name in ("min", "max") and len(values) == 2:
            left, right = values
            return z3.If((left < right) if name == "min" else (left > right), left, right)
        raise _WrongExpressionError(_FORMS)

    def _divided(self, left: Term, right: Term) -> tuple[Term, Term]:
        """Quotient and remainder, rounded down; the divisor is taken to be positive."""
        left, right = z3.simplify(left), z3.simplify(right)
        for known in self._quotients:
            if known.left.eq(left) and known.right.eq(right):
                return known.quotient, known.rest
        quotient, rest = z3.FreshInt("quotient"), z3.FreshInt("rest")
        self._facts += [right > 0, left == quotient * right + rest, rest >= 0, rest < right]
        self._quotients.append(Quotient(left, right, quotient, rest))
        return quotient, rest
