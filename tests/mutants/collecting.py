"""Finding the mutants: the markers on the tests tell, as they stand in the source.

To have pytest collect the tests would import every framework there is, for half a minute.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from tests.mutants import ROOT, Mutant

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def collect() -> list[Mutant]:
    """Return all mutants in the order of their rules.

    Raises:
        ValueError: a marker is not on a test, or its arguments are no plain texts.
    """
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [mutant for file in files for mutant in read(file.read_text("utf-8"), file)]
    return sorted(found, key=lambda mutant: (mutant.rule, mutant.test))


def read(text: str, file: Path) -> Iterator[Mutant]:
    """Yield the mutants of one file of tests.

    Raises:
        ValueError: as `collect` does.
    """
    if "mark.mutant" not in text:
        return
    tree = ast.parse(text)
    lost = {id(node): node.lineno for node in ast.walk(tree) if _is_marker(node)}
    for names, test in _functions(tree, ()):
        for marker in test.decorator_list:
            if not _is_marker(marker):
                continue
            del lost[id(marker)]
            rule, symbol, old, new = map(ast.literal_eval, marker.args)
            where = "::".join([str(file.relative_to(ROOT)), *names, test.name])
            yield Mutant(rule, symbol, old, new, where)
    for line in lost.values():
        raise ValueError(f"{file}:{line}: expected the marker of a mutant on a test")


def _functions(
    tree: ast.AST, names: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], _Function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Function) and node.name.startswith("test"):
            yield names, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, (*names, node.name))


def _is_marker(node: ast.AST) -> TypeGuard[ast.Call]:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "mutant"
    )
