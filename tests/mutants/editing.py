"""Edits of a module's source that are given as small pieces of Python.

A piece is an expression, one or several statements, or a keyword argument (`daemon=True`). It is
compared with the source as a syntax tree, so layout, comments and docstrings do not matter.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, cast

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Nodes = Sequence[ast.stmt | ast.expr | ast.keyword]  # the parser gives these a position


def edited(source: str, qualname: str, old: str, new: str) -> str:
    """Return the source with `old` replaced by `new` inside one symbol.

    Only the source of the replaced piece changes. An empty `new` removes statements.

    Args:
        source: of the module.
        qualname: of a function, method, class or constant, such as `Class.method` or
            `outer.inner`. Several definitions of one name are searched together.
        old: a piece that occurs there exactly once.
        new: a piece that can stand in its place.

    Raises:
        ValueError: there is no such symbol, the old piece is not there exactly once, or the
            new piece cannot stand there.
    """
    tree = _parsed(source)
    readings = _readings(old, new)
    places = [
        place
        for symbol in _symbols(tree, qualname)
        for was, becomes in readings
        for place in _places(symbol, was, becomes)
    ]
    if len(places) != 1:
        raise ValueError(f"expected {old!r} once in {qualname}, found it {len(places)} times")
    text = _replaced(source, *places[0])
    wanted = _Exchange(*places[0]).visit(tree)
    if not _says(text, wanted):
        raise ValueError(f"{new!r} cannot replace {old!r} in {qualname}")
    return text


def _parsed(text: str) -> ast.Module:
    """Parse source without the docstrings of functions and classes."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _Definition) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return tree


def _piece(text: str) -> list[ast.stmt]:
    try:
        return _parsed(textwrap.dedent(text)).body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no expression or statement: {error}") from error


def _says(text: str, tree: ast.AST) -> bool:
    try:
        return ast.dump(_parsed(text)) == ast.dump(tree)
    except SyntaxError:
        return False


def _readings(old: str, new: str) -> list[tuple[_Nodes, _Nodes]]:
    """Return the nodes that the two pieces can stand for.

    `name=value` can be an assignment or a keyword argument.
    """
    was, becomes = _piece(old), _piece(new)
    match was, becomes:
        case [], _:
            raise ValueError("there is nothing to look for: the old piece is empty")
        case [ast.Expr(before)], [ast.Expr(after)]:
            return [([before], [after])]
        case [ast.Assign([ast.Name(name)], before)], [ast.Assign([ast.Name(other)], after)]:
            keywords = [ast.keyword(name, before)], [ast.keyword(other, after)]
            return [(was, becomes), keywords]
    return [(was, becomes)]


def _symbols(tree: ast.Module, qualname: str) -> list[ast.AST]:
    """Return the definitions of a name.

    Raises:
        ValueError: there is none.
    """
    found: list[ast.AST] = [tree]
    for part in qualname.split("."):
        found = [node for scope in found for name, node in _definitions(scope) if name == part]
    if not found:
        raise ValueError(f"there is no {qualname} in the module")
    return found


def _definitions(scope: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a scope defines, also inside its `if`, `with` and `try` blocks."""
    for node in ast.iter_child_nodes(scope):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                yield name, node
            case ast.stmt() | ast.ExceptHandler() | ast.match_case():
                yield from _definitions(node)


def _places(symbol: ast.AST, was: _Nodes, becomes: _Nodes) -> Iterator[tuple[_Nodes, _Nodes]]:
    """Yield nodes inside the symbol that equal `was`, each with its replacement."""
    wanted = [ast.dump(node) for node in was]
    for parent in ast.walk(symbol):
        for _, value in ast.iter_fields(parent):
            siblings = value if isinstance(value, list) else [value]
            for start in range(len(siblings) - len(was) + 1):
                nodes = siblings[start : start + len(was)]
                if [ast.dump(node) for node in nodes if isinstance(node, ast.AST)] == wanted:
                    empties = not becomes and len(nodes) == len(siblings)
                    yield nodes, [ast.Pass()] if empties else becomes


def _replaced(source: str, nodes: _Nodes, becomes: _Nodes) -> str:
    """Return the source with the nodes written anew.

    Blank lines fill up a replacement that is shorter, so the lines below keep their numbers.
    """
    first, last = nodes[0], nodes[-1]
    row: int = min(node.lineno for node in (first, *getattr(first, "decorator_list", [])))
    end_row = cast(int, last.end_lineno)
    text = "\n".join(map(ast.unparse, becomes))
    text += "\n" * (end_row - row - text.count("\n"))
    if isinstance(first, ast.expr):
        text = f"({text})"
    text = textwrap.indent(text, " " * first.col_offset).lstrip(" ")
    lines = source.encode().splitlines(keepends=True)  # columns count bytes
    before = b"".join(lines[: row - 1]) + lines[row - 1][: first.col_offset]
    after = lines[end_row - 1][last.end_col_offset :] + b"".join(lines[end_row:])
    return before.decode() + text + after.decode()


class _Exchange(ast.NodeTransformer):
    """The same edit of the tree, which the edited source must agree with."""

    def __init__(self, nodes: _Nodes, becomes: _Nodes) -> None:
        first, *others = nodes
        self._becomes = {id(first): becomes} | {id(node): [] for node in others}

    def visit(self, node: ast.AST) -> Any:
        if (becomes := self._becomes.get(id(node))) is None:
            return self.generic_visit(node)
        return becomes[0] if len(becomes) == 1 else becomes
