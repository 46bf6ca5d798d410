"""Tables in the documentation that tests write, and hold to afterwards.

A test records what it observed; with ``pytest --write-tables`` the table is written into the
page, otherwise the row that stands there must be the one that was observed. A table is
between two comments::

    <!-- table: bad usage -->
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
END = "<!-- end -->"


@dataclass
class Table:
    """One table of one page.

    Attributes:
        page: below ``docs/``; made where it is missing, with the title.
        name: of the table, in its comment.
        columns: headings; the first column names the row.
        order: the rows' names, as they are to stand.
        title: of a new page.
    """

    page: str
    name: str
    columns: tuple[str, ...]
    order: Sequence[str]
    title: str = ""
    writes: bool = False
    rows: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def open(self, *, writes: bool) -> Iterator[Table]:
        """Record rows within the block; then write them, if that was asked for."""
        self.writes = writes
        self.rows = {}
        yield self
        if writes:
            self._write()

    def record(self, name: str, *cells: str) -> None:
        """Take up what was observed, or compare it with what the page says."""
        row = _row((name, *cells))
        self.rows[name] = row
        if not self.writes:
            written = self._written().get(name)
            assert written == row, (
                f"docs/{self.page} says of {name!r}:\n{written}\nobserved:\n{row}\n"
                "if that is meant, write the table anew with: pytest --write-tables"
            )

    def _written(self) -> dict[str, str]:
        path = DOCS / self.page
        if not path.exists():
            return {}
        lines = self._split(path.read_text(encoding="utf-8"))[1].splitlines()
        found = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
        return {name: found[_cell(name)] for name in self.order if _cell(name) in found}

    def _split(self, text: str) -> tuple[str, str, str]:
        begin = f"<!-- table: {self.name} -->\n"
        head, found, rest = text.partition(begin)
        if not found:
            return f"{text.rstrip()}\n\n{begin}", "", f"{END}\n"
        table, _, tail = rest.partition(END)
        return head + begin, table, END + tail

    def _write(self) -> None:
        path = DOCS / self.page
        text = path.read_text(encoding="utf-8") if path.exists() else f"# {self.title}\n"
        known = self._written() | self.rows  # what was not run now stays as it is
        head, _, tail = self._split(text)
        rule = "| " + " | ".join("---" for _ in self.columns) + " |"
        rows = [known[name] for name in self.order if name in known]
        table = "\n".join([_row(self.columns), rule, *rows])
        path.write_text(f"{head}{table}\n{tail}", encoding="utf-8")


def code(text: str) -> str:
    """Return a text as code in a cell, a line break where it has one."""
    return "<br>".join(f"`{line}`" for line in text.splitlines())


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", r"\|")
