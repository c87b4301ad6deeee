"""Formulas over whole numbers, for the shapes in a wire contract."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from potluck.errors import MessageError

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def formula_value(formula: str, symbols: Mapping[str, int]) -> int:
    """The value of a formula of whole numbers, symbols, + - * // and brackets.

    >>> formula_value("C * (d + 1)", {"C": 10, "d": 512})
    5130
    """

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if name in symbols:
                return symbols[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
        raise ValueError(ast.unparse(node))

    try:
        return value(ast.parse(formula.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        known = ", ".join(symbols)
        raise MessageError(f"the shape formula {formula!r} is not understood; known: {known}") from error
