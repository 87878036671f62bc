"""Compare the lines of the tables of hostile inputs without their sizes and seeds.

    normal form of a name         every number becomes its class: 0, below 0, a fraction or any other number; units of
                                  bytes are left out
    normal form of an expression  numbers from 256, powers, factors, and the arguments of the names in `_SIZES` become
                                  their class; a smaller number can be a code of a format, such as a colour type

Two lines of the same kind with the same normal form of the name or of the expression are the same attack.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path

__all__ = ["Line", "alike", "expression_form", "lines", "name_form"]

_FOLDER = Path(__file__).parent
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\d,]*(?:\.\d+)?(?:e-?\d+|\*\*\d+)?)(?:-bit)?")
_UNIT = re.compile(r"\b(?:(?:[kMG]i?)?B|bytes?|[kMGT]iB|million|thousand|a|an|the)\b")
_SIZES = {"count", "levels", "length", "rows", "seed", "size", "width", "height"}
_SMALLEST_SIZE = 256
Line = tuple[str, str, str]
"""Kind, name, and source of the expression of a line."""


def name_form(name: str) -> str:
    """Return the name with each number as its class, and without units and articles."""
    text = _UNIT.sub("", _NUMBER.sub(lambda match: f" {_class_of(match[0])} ", name))
    return " ".join(text.split())


def _class_of(number: str) -> str:
    digits = number.removesuffix("-bit").replace(",", "")
    if digits.startswith("-"):
        return "BELOW-0"
    if digits.strip("0") in ("", "."):
        return "0"
    return "FRACTION" if "." in digits else "N"


class _Normal(ast.NodeTransformer):
    """Replace sizes by their class."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, int | float) and not isinstance(node.value, bool):
            large = abs(node.value) >= _SMALLEST_SIZE
            return ast.Name("N") if large else node
        if isinstance(node.value, str):
            return ast.Constant(name_form(node.value))
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        if isinstance(node.op, ast.Pow):
            return ast.Name("N")
        if isinstance(node.op, ast.Mult):
            return ast.BinOp(self._size(node.left), node.op, self._size(node.right))
        return ast.BinOp(self.visit(node.left), node.op, self.visit(node.right))

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        value = self._size(node.value) if node.arg in _SIZES else self.visit(node.value)
        return ast.keyword(node.arg, value)

    def _size(self, node: ast.expr) -> ast.expr:
        is_number = isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value > 0
        return ast.Name("N") if is_number else self.visit(node)


def expression_form(source: str) -> str:
    """Return the expression with each size as its class."""
    return ast.unparse(ast.fix_missing_locations(_Normal().visit(ast.parse(source, mode="eval"))))


def lines() -> list[Line]:
    """Return the lines of all tables: the dictionaries with texts as keys at the top of the modules in this folder."""
    kinds = {"checkpoints": "checkpoint", "bundles": "bundle", "graphs": "bundle", "images": "image"}
    kinds |= {"http_requests": "http", "grpc_requests": "grpc"}
    return [
        (kind, name, source)
        for module, kind in kinds.items()
        for name, source in _entries((_FOLDER / f"{module}.py").read_text(encoding="utf-8"))
    ]


def _entries(module: str) -> Iterator[tuple[str, str]]:
    for statement in ast.parse(module).body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Dict):
            for key, value in zip(statement.value.keys, statement.value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, ast.unparse(value)


def alike(table: Iterable[Line]) -> list[tuple[str, str]]:
    """Return the pairs of lines of the same kind that differ in sizes or seeds alone."""
    forms = [(kind, name, name_form(name), expression_form(source)) for kind, name, source in table]
    return [
        (f"{first[0]}: {first[1]}", f"{second[0]}: {second[1]}")
        for first, second in combinations(forms, 2)
        if first[0] == second[0] and (first[2] == second[2] or first[3] == second[3])
    ]
