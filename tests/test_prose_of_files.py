"""Comments of configs, deployments and build files keep to the words of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.prose import ROOT
from tests.test_prose import BANNED
from tests.test_prose_of_docstrings import prose_of

FILES = [
    *(ROOT / "configs").glob("*.yaml"),
    *(ROOT / "examples").glob("*.yaml"),
    *(ROOT / "deploy").rglob("*"),
    *(ROOT / name for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run")),
]
# Lines of comments that follow each other, or a comment behind something.
COMMENT = re.compile(r"(?:^[ \t]*#.*(?:\n|\Z))+|(?<=\s)#+ .*$", re.M)


def comments_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and text of each comment, which may have several lines.

    >>> list(comments_of("# One\\n# two.\\na: 1  # three\\nb: 2#3"))
    [(1, 'One two.'), (3, 'three')]
    """
    for found in COMMENT.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield line, prose_of(re.sub(r"^[ \t]*#+", "", found[0], flags=re.M))


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {
        f"{path.relative_to(ROOT)}:{line}": text
        for path in FILES
        if path.is_file() and path.suffix not in (".py", ".pyc")
        for line, text in comments_of(path.read_text(encoding="utf-8"))
    }


def test_there_are_comments_in_each_kind_of_file(texts: dict[str, str]) -> None:
    for name in ("configs/split.yaml:1", "deploy/Dockerfile:1", "Makefile:1", ".ci/run:1"):
        assert name in texts


@pytest.mark.parametrize("pattern", BANNED)
def test_a_word_is_not_used(pattern: str, texts: dict[str, str]) -> None:
    banned = re.compile(rf"\b(?:{pattern})\b", re.I)
    found = {place: text for place, text in texts.items() if banned.search(text)}
    assert found == {}, f"write instead: {BANNED[pattern]}"
