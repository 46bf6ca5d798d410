"""Words that the documentation does not use, because a reader stumbles over them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main
from click import Command

from growcache.cli.cli import app
from growcache.cli.init_text import TEMPLATE
from tests.prose import CODE, DOCS, ROOT, markdown_of

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *DOCS.rglob("*.md"),
    *DOCS.rglob("*.ipynb"),
]
# Each with a better choice.
BANNED = {
    r"so many": "a number, or `as many as`",
    r"so often": "how often, in numbers",
    r"nobody|no one": "the component that does not do it",
    r"lies|lie": "is, stands",
    r"(?:is|are|was|were|be) told(?! apart)": "gets, learns, is given",
    r"begun": "started",
    r"how-?manieth": "number",
    r"thereof|whereof|thereby": "of it, by it",
    r"for so long": "for this time, or a number",
    r"(?:process|loader|service|sampler|node|rank|reader)s? who": "which, that",
    r"(?<!`)beside(?![`:])": "next to, besides, compared with",
    # At the start of a statement. Questions, headings and titles in links may have it.
    r"(?<![#|] )(?<![*\[])(?-i:What)(?![^.?]*\?)": "the thing itself, as the subject",
    r"(?<=[,;] )for (?!example|instance)(?:(?!that|which|who)[\w`'-]+ ){1,3}"
    r"(?:is|are|was|were|has|have|had|does|do|can|cannot|may|must|would|will"
    r"|needs?|takes?|gives?|makes?|comes?|reads?|checks?|holds?|knows?)": "because",
}


def prose_of(page: Path) -> str:
    """Return its text without code and without the targets of links, whose titles stay in brackets."""
    return re.sub(r"\]\([^)]*\)", "]", CODE.sub("", markdown_of(page)))


def help_texts() -> dict[str, str]:
    commands: dict[str, Command] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {
        f"growcache {name} --help": " ".join(
            [command.help or "", *(getattr(one, "help", None) or "" for one in command.params)]
        )
        for name, command in commands.items()
    }


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    pages = {str(page.relative_to(ROOT)): prose_of(page) for page in PAGES}
    return pages | help_texts() | {TEMPLATE.name: TEMPLATE.read_text(encoding="utf-8")}


@pytest.mark.parametrize("pattern", BANNED)
def test_a_word_is_not_used(pattern: str, texts: dict[str, str]) -> None:
    banned = re.compile(rf"\b(?:{pattern})\b", re.I)
    found = {name: found for name, text in texts.items() if (found := banned.findall(text))}
    assert found == {}, f"write instead: {BANNED[pattern]}"
