"""A tool for `rollout.tools`: the schema comes from type hints and docstring. See docs/tools.md."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
_MAX_CHARACTERS = 200


def calculate(expression: str) -> str:
    """Calculate exactly with whole numbers and fractions.

    Args:
        expression: Numbers with + - * / and parentheses, such as (3 + 4) * 5 / 2.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"longer than {_MAX_CHARACTERS} characters")
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed")
