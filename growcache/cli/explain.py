"""The pages about error codes: read from the package, printed, and joined for the docs."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import typer

from growcache.errors import ConfigError

PARTS = ("**Why.**", "**What to do.**", "**Example.**")
_HEADING = re.compile(r"^## (GC\d{3}): (.+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Explanation:
    code: str
    title: str
    body: str

    @property
    def markdown(self) -> str:
        return f"## {self.code}: {self.title}\n\n{self.body}"


@dataclass(frozen=True, slots=True)
class Area:
    title: str
    about: str
    explanations: tuple[Explanation, ...]


@cache
def areas() -> tuple[Area, ...]:
    """Return the areas in the order of their codes. Each is a file of the package."""
    folder = files("growcache.cli").joinpath("explanations")
    pages = sorted(
        (page for page in folder.iterdir() if page.name.endswith(".md")),
        key=lambda page: page.name,
    )
    return tuple(parse_area(page.read_text(encoding="utf-8")) for page in pages)


def parse_area(text: str) -> Area:
    r"""Return an area from its file.

    >>> area = parse_area("# Disk\n\nAbout.\n\n## GC411: It is full\n\nNo room.\n")
    >>> area.title, area.about, area.explanations[0].markdown
    ('Disk', 'About.', '## GC411: It is full\n\nNo room.')
    """
    head, *rest = _HEADING.split(text)
    title, _, about = head.removeprefix("# ").partition("\n")
    found = zip(rest[::3], rest[1::3], rest[2::3], strict=True)
    explanations = (Explanation(code, name, body.strip()) for code, name, body in found)
    return Area(title, about.strip(), tuple(explanations))


def explanations() -> Mapping[str, Explanation]:
    return {one.code: one for area in areas() for one in area.explanations}


def explain_code(code: str | None) -> None:
    if code is None:
        _print_list()
        return
    known = explanations()
    wanted = code.strip("().;, ").upper()
    wanted = f"GC{wanted}" if wanted.isdigit() else wanted
    if wanted not in known:
        raise ConfigError(
            f"there is no error code {code!r}; growcache explain lists all codes", code="GC105"
        )
    _print_markdown(known[wanted].markdown)


def _print_markdown(text: str) -> None:
    if not sys.stdout.isatty():
        typer.echo(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))


def _print_list() -> None:
    for area in areas():
        typer.echo(f"{area.title}")
        for one in area.explanations:
            typer.echo(f"  {one.code}  {one.title}")
    typer.echo("growcache explain CODE says why an error happens and what to do about it.")


def reference_page() -> str:
    """Return all explanations as one page of the documentation."""
    parts = [
        "# Errors\n\nThe message of an error ends with its code, as in `(GC401; growcache explain GC401)`, and "
        "`growcache explain GC401`\nprints its section of this page. `error.code` has it in Python. A code keeps its "
        "meaning in later versions.\n\n"
        "<!-- Made from growcache/cli/explanations by: pytest --write-tables tests/cli/test_explain.py -->"
    ]
    for area in areas():
        listed = "\n".join(
            f"| [{one.code}](#{anchor(one)}) | {one.title} |" for one in area.explanations
        )
        parts.append(
            f"## {area.title}\n\n{area.about}\n\n| code | means |\n| --- | --- |\n{listed}"
        )
        parts += [f"#{one.markdown}" for one in area.explanations]
    return "\n\n".join(parts) + "\n"


def anchor(one: Explanation) -> str:
    """Return the anchor of a heading.

    >>> anchor(Explanation("GC108", "Your function has other parameters, too", ""))
    'gc108-your-function-has-other-parameters-too'
    """
    words = re.sub(r"[^\w\s-]", "", f"{one.code} {one.title}".lower())
    return words.replace(" ", "-")
