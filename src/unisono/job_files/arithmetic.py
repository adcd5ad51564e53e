"""Values of the arithmetic of shell scripts, without running them."""

from __future__ import annotations

import ast
import operator

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def value_of(text: str) -> str | None:
    """Returns the whole number of an expression; None if it is another expression.

    >>> value_of("8 * (4 + 4) / 2"), value_of("NODES * 8"), value_of("1 / 0")
    ('32', None, None)
    """
    try:
        return str(_number(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def flags_of_layers(text: str) -> list[int] | None:
    """Returns the list of an expression such as "[0]*3+[1]*58"; None if it is another one.

    >>> flags_of_layers("([0]*1+[1]*2)")
    [0, 1, 1]
    """
    try:
        found = _list(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        return None
    return found


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_number(node.left), _number(node.right)))
    raise ValueError("no arithmetic of whole numbers")


def _list(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List):
        return [_number(each) for each in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        count = _number(node.right)
        if count > 10_000:
            raise ValueError("too many layers")
        return _list(node.left) * count
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _list(node.left) + _list(node.right)
    raise ValueError("no list of layers")
