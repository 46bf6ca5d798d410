"""``growcache demo --notebook``: copies of the tutorials, to run in Jupyter."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import typer

from growcache.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
# The notebooks of an installed package, and those of a clone installed as editable.
HOMES = (PACKAGE / "tutorials", PACKAGE.parent / "docs/tutorials")
PAGE_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)[^)]*\)")


def write_tutorials(folder: Path) -> None:
    found = [path for home in HOMES for path in sorted(home.glob("*.ipynb"))]
    if not found:
        raise ConfigError(
            f"no notebooks in {' or '.join(map(str, HOMES))}; reinstall growcache"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in found:
        text = without_page_links(path.read_text(encoding="utf-8"))
        (folder / path.name).write_text(text, encoding="utf-8")
        typer.echo(folder / path.name)
    typer.echo(f"Open them with: jupyter lab {folder} (pip install jupyterlab)")


def without_page_links(notebook: str) -> str:
    """Name pages of the repository instead of linking them, because a copy is elsewhere."""

    def named(link: re.Match[str]) -> str:
        text, target = link.groups()
        return f"{text} (`{posixpath.normpath(posixpath.join('docs/tutorials', target))}`)"

    return PAGE_LINK.sub(named, notebook)
