"""Docstrings, comments and help texts of the package and of the examples keep to the words of the documentation."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.prose import ROOT
from tests.test_prose import BANNED

FOLDERS = ("growcache", "examples", "deploy", "benchmarks", "tools")
HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CODE_SPAN = re.compile(r"`+[^`]*`+")


def docstrings_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring.

    >>> list(docstrings_of('def f():\\n    "One.\\\\n\\\\n    Two."'))
    [(2, 'One.\\n\\nTwo.')]
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, HAS_DOCSTRING) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def comments_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the last line and text of each comment, which may have several lines.

    >>> list(comments_of("# One\\n# two.\\na = 1  # three"))
    [(2, 'One two.'), (3, 'three')]
    """
    texts: list[str] = []
    last = (-1, -1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if texts and token.start != (last[0] + 1, last[1]):
            yield last[0], " ".join(texts)
            texts = []
        texts.append(token.string.lstrip("# "))
        last = token.start
    if texts:
        yield last[0], " ".join(texts)


def help_texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each help text of a parser.

    >>> list(help_texts_of('parser.add_argument("url", help="objects")'))
    [(1, 'objects')]
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.keyword(arg="help" | "description", value=ast.Constant(value=str(text))):
                yield node.value.lineno, text


def prose_of(text: str) -> str:
    """Return a text in one line, without code."""
    return " ".join(CODE_SPAN.sub("`", text).split())


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {
        f"{path.relative_to(ROOT)}:{line}": prose_of(text)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for find in (docstrings_of, comments_of, help_texts_of)
        for line, text in find(path.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize("pattern", BANNED)
def test_a_word_is_not_used(pattern: str, texts: dict[str, str]) -> None:
    banned = re.compile(rf"\b(?:{pattern})\b", re.I)
    found = {place: text for place, text in texts.items() if banned.search(text)}
    assert found == {}, f"write instead: {BANNED[pattern]}"
