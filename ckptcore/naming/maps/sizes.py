"""Compute sizes from a model's numbers: ``heads / kv_heads``, with exact division only."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_NODES = (
    ast.Expression,
    ast.BinOp,
    ast.Compare,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.Div,
    *_BINARY,
    *_COMPARE,
)


class UnknownNumber(Exception):
    """An expression names a number that is not known."""


def names_in(expression: str) -> frozenset[str]:
    """Return the numbers that an expression names.

    Raises:
        ValueError: The text is not an expression.
    """
    return frozenset(
        node.id for node in ast.walk(_parsed_expression(expression)) if isinstance(node, ast.Name)
    )


def value_of(expression: str, numbers: Mapping[str, Any]) -> Any:
    """Evaluate an expression over integers, or over int64 arrays.

    Args:
        expression: With ``+ - * / // %``, comparisons, ``and``, ``or``; ``/`` is exact.
        numbers: By name.

    Raises:
        UnknownNumber: A name is not among the numbers.
        ValueError: A division is not exact, or by 0.

    >>> value_of("heads / kv_heads + 2", {"heads": 32, "kv_heads": 8})
    6
    """
    return _evaluated(_parsed_expression(expression).body, numbers)


@lru_cache(maxsize=4096)
def _parsed_expression(expression: str) -> ast.Expression:
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: it nests too deep
        raise ValueError(f"{expression!r} is not an expression") from error
    for node in ast.walk(tree):
        if not isinstance(node, _NODES) or (isinstance(node, ast.Constant) and type(node.value) is not int):
            raise ValueError(f"{expression!r}: {type(node).__name__} is not part of an expression")
    return tree


def _evaluated(node: ast.expr, numbers: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        if numbers.get(node.id) is None:
            raise UnknownNumber(node.id)
        return numbers[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _evaluated(node.left, numbers), _evaluated(node.right, numbers)
        if isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)) and np.any(np.equal(right, 0)):
            raise ValueError("division by 0")
        if isinstance(node.op, ast.Div):
            if np.any(np.not_equal(left % right, 0)):
                raise ValueError(f"{left} is not a multiple of {right}")
            return left // right
        return _BINARY[type(node.op)](left, right)
    if isinstance(node, ast.Compare):
        result: Any = True
        left = _evaluated(node.left, numbers)
        for op, operand in zip(node.ops, node.comparators, strict=True):
            right = _evaluated(operand, numbers)
            result = np.logical_and(result, _COMPARE[type(op)](left, right))
            left = right
        return result
    assert isinstance(node, ast.BoolOp)  # `_parsed_expression` lets nothing else through
    is_and = isinstance(node.op, ast.And)
    result = is_and
    for operand in node.values:
        result = (np.logical_and if is_and else np.logical_or)(result, _evaluated(operand, numbers))
    return result
