"""The texts of the program, such as errors, logs and hints, keep to the words of the documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.prose import ROOT
from tests.test_prose import BANNED

LEAST_WORDS = 4  # fewer are a name or a setting
HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def texts_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each string that is no docstring; of an f-string with … for its values.

    >>> list(texts_of(ast.parse('raise ValueError(f"expected a cache, found {path}")')))
    [(1, 'expected a cache, found …')]
    """
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, HAS_DOCSTRING) and node.body and isinstance(node.body[0], ast.Expr)
    }
    f_strings = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    skipped = docstrings | {id(piece) for node in f_strings for piece in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(map(_piece, node.values))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            yield node.lineno, node.value


def _piece(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "…"


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {
        f"{path.relative_to(ROOT)}:{line}": text
        for path in sorted((ROOT / "growcache").rglob("*.py"))
        for line, text in texts_of(ast.parse(path.read_text(encoding="utf-8")))
        if len(text.split()) >= LEAST_WORDS
    }


@pytest.mark.parametrize("pattern", BANNED)
def test_a_word_is_not_printed(pattern: str, texts: dict[str, str]) -> None:
    banned = re.compile(rf"\b(?:{pattern})\b", re.I)
    found = {place: text for place, text in texts.items() if banned.search(text)}
    assert found == {}, f"write instead: {BANNED[pattern]}"
