"""The words of the documentation: how many there are, how long sentences are, which are not to be used.

``python -m tests.prose`` (`make docs-words`) prints a line for each page and chapter. Code is left out; cells
of tables count as words, and only paragraphs and lists have sentences.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LOOKED_UP = "reference"  # the chapter that is not read from one end to the other
CODE = re.compile(r"^ *(```+|:::+).*?^ *\1|<!--.*?-->", re.M | re.S)
END_OF_SENTENCE = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[A-Z`\"'(\[*]|growcache\b)")


class Count(NamedTuple):
    """How much there is to read on a page or in a chapter."""

    words: int
    lengths: tuple[int, ...]  # words of each sentence

    def __add__(self, other: object) -> Count:
        assert isinstance(other, Count)
        return Count(self.words + other.words, self.lengths + other.lengths)


NOTHING = Count(0, ())


def markdown_of(page: Path) -> str:
    """Return a page's Markdown; of a notebook, that of its cells of text."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def without_code(markdown: str) -> str:
    """Leave out blocks of code and comments, and the targets of links.

    >>> without_code("See [it](there.md).\\n```sh\\nls\\n```\\n")
    'See it.\\n\\n'
    """
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", CODE.sub("", markdown))


def count_words(markdown: str) -> Count:
    """Count the words of all text, and of each sentence of paragraphs and lists.

    >>> count_words("# A title\\n\\nOne two three. `Four` five!\\n\\n| six | seven |\\n")
    Count(words=9, lengths=(3, 2))
    """
    text = without_code(markdown)
    sentences = [
        sentence for block in _paragraphs(text) for sentence in END_OF_SENTENCE.split(block)
    ]
    lengths = tuple(len(found) for one in sentences if (found := words_in(one)))
    return Count(len(words_in(text)), lengths)


def words_in(text: str) -> list[str]:
    return [word for word in text.split() if re.search(r"\w", word)]


def _paragraphs(text: str) -> Iterator[str]:
    """Yield each paragraph and each item of a list, without headings and tables."""
    lines = [line for line in text.splitlines() if not re.match(r" *(#|\|)", line)]
    for block in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", "\n".join(lines)):
        if block.strip():
            yield " ".join(block.split())


def counts() -> dict[str, Count]:
    """Return the count of each page of docs/ and of the README, by its path."""
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    return {
        str(page.relative_to(ROOT)): count_words(markdown_of(page)) for page in sorted(pages)
    }


def chapter_of(page: str) -> str:
    return "/".join(page.split("/")[1:-1]) or "."


def main() -> None:
    """Print the table."""
    found = counts()
    for page, count in found.items():
        print(_line(page, count))
    print()
    chapters: dict[str, Count] = {}
    for page, count in found.items():
        chapters[chapter_of(page)] = chapters.get(chapter_of(page), NOTHING) + count
    for chapter, count in sorted(chapters.items()):
        print(_line(chapter, count))
    to_read = [count for page, count in found.items() if chapter_of(page) != LOOKED_UP]
    print(_line(f"all but {LOOKED_UP}", sum(to_read, start=NOTHING)))


def _line(name: str, count: Count) -> str:
    middle = f"{median(count.lengths):g}" if count.lengths else "-"
    longest = max(count.lengths, default=0)
    return (
        f"{name:42} {count.words:7,} words · sentences: median {middle:>4}, longest {longest:3}"
    )


if __name__ == "__main__":
    main()
