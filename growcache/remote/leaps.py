"""Which stretches of a sorted listing hold no match of a glob, so that nobody reads them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from growcache.remote.odd_keys import is_odd
from growcache.remote.urls import MAGIC, component_pattern

AFTER_SLASH = chr(ord("/") + 1)
_LAST = "~"  # sorts behind what names of ASCII begin with


@dataclass(frozen=True, slots=True)
class _Level:
    """One component of a glob: what its matches begin with, and their test."""

    head: str
    exact: bool
    any_depth: bool
    matches: Callable[[str], object]


class Leaps:
    """The keys that a pattern means, as far as their order tells.

    Args:
        pattern: a glob, or what keys begin with.
        is_glob: which of the two.

    Attributes:
        fixed: what all matches begin with.
    """

    def __init__(self, pattern: str, *, is_glob: bool) -> None:
        found = MAGIC.search(pattern) if is_glob else None
        self.fixed = pattern[: found.start()] if found else pattern
        self._levels = [_level(part) for part in pattern.split("/")] if is_glob else []

    def over(self, key: str) -> str | None:
        """Return where the next match may be: no match lies in [key, there).

        None where no match is as great as the key.

        >>> leaps = Leaps("a/*/b_*.npy", is_glob=True)
        >>> leaps.over(""), leaps.over("a/x/a_1"), leaps.over("a/x/c"), leaps.over("b")
        ('a/', 'a/x/b_', 'a/x0', None)
        """
        if not key.startswith(self.fixed):
            return max(key, self.fixed) if key < self.fixed else None
        base, rest = "", key
        for number, level in enumerate(self._levels):
            last = number == len(self._levels) - 1
            if level.any_depth:
                return key
            need = level.head + ("/" if level.exact and not last else "")
            if rest <= need:
                return base + need
            if not rest.startswith(need) or (level.exact and last):
                return self._beyond(base)
            name, slash, deeper = rest.partition("/")
            if not slash:
                return key
            if last or not level.matches(name):
                return self._beyond(f"{base}{name}/")
            base, rest = f"{base}{name}/", deeper
        return key

    def _beyond(self, folder: str) -> str | None:
        return self.over(folder[:-1] + AFTER_SLASH) if folder else None


def _level(part: str) -> _Level:
    found = MAGIC.search(part)
    head = part[: found.start()] if found else part
    if part == "**":
        return _Level("", exact=False, any_depth=True, matches=bool)
    matches = re.compile(component_pattern(part)).fullmatch
    return _Level(head, exact=found is None, any_depth=False, matches=matches)


def just_before(key: str) -> str | None:
    """Return a name shortly before a key, to list what comes after; None: from the start.

    >>> just_before("a/x0"), just_before("a/x/b_"), just_before("a/ "), just_before("a/")
    ('a/x/~', 'a/x/b^~', 'a', 'a')
    """
    if not key or key.endswith("/"):
        return key[:-1] or None
    before = key[:-1] + chr(max(0, ord(key[-1]) - 1)) + _LAST
    if is_odd(before) or not _is_text(before):
        before = key[:-1].rpartition("/")[0]
    return before or None


def _is_text(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False
