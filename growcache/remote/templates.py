"""URLs with placeholders: which objects of several fields belong together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from growcache.config import PLACEHOLDER


@dataclass(frozen=True)
class Template:
    """A URL such as ``s3://b/train_x_{k}.npy``.

    A placeholder stands for a piece of a folder's or file's name, the same one wherever it
    occurs; so a key follows from the values of all placeholders, and the other way round.

    Attributes:
        folder: the deepest one that holds every match, as it was typed.
        rest: what follows, placeholders and all.
        names: of the placeholders, sorted.
    """

    folder: str
    rest: str
    names: tuple[str, ...]
    pattern: re.Pattern[str]

    @classmethod
    def of(cls, url: str) -> Template:
        """Return the template that a URL of ``source.fields`` is."""
        first = PLACEHOLDER.search(url)
        assert first is not None
        at = url.rfind("/", 0, first.start()) + 1
        rest = url[at:]
        names = tuple(sorted(set(PLACEHOLDER.findall(url))))
        return cls(url[:at], rest, names, re.compile(rf"(?s:(?:.*/)?{_expression(rest)})\Z"))

    @property
    def literal(self) -> int:
        """How many characters of a key it fixes; of two that match, the one with more is meant."""
        return len(PLACEHOLDER.sub("", self.rest))

    def values(self, key: str) -> tuple[str, ...] | None:
        """Return what the placeholders stand for, by their sorted names; None: no match."""
        match = self.pattern.match(key)
        return None if match is None else tuple(match[name] for name in self.names)

    def rendered(self, values: tuple[str, ...]) -> str:
        """Return what follows `folder` in the key with these values."""
        named: Mapping[str, str] = dict(zip(self.names, values, strict=True))
        return PLACEHOLDER.sub(lambda found: named[found[1]], self.rest)


def _expression(rest: str) -> str:
    out, at, seen = "", 0, set()
    for found in PLACEHOLDER.finditer(rest):
        name = found[1]
        again = f"(?P={name})" if name in seen else f"(?P<{name}>[^/]+)"
        out += re.escape(rest[at : found.start()]) + again
        at = found.end()
        seen.add(name)
    return out + re.escape(rest[at:])
