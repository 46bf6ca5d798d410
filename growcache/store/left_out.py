"""Files that are not data: those that systems, Spark and editors leave in folders. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from growcache.store.urls import WILDCARD, Location, component_regex

LeftOutName: TypeAlias = Callable[[str, int], str | None]

EMPTY, HIDDEN = "empty", "hidden"
_OF_SYSTEMS = (".DS_Store", "._*", "Thumbs.db", "desktop.ini")
_OF_WRITERS = ("_SUCCESS", "_committed_*", "_started_*", "*.crc")
_OF_PARQUET = ("_metadata", "_common_metadata")  # footers of other files
_FOLDERS = ("_temporary", "__MACOSX", "_delta_log")
# Matches every name that a rule could match. Most keys have none, and there may be millions.
_SUSPICIOUS = re.compile(r"(?:\A|/)(?:[._]|Thumbs\.db\Z|desktop\.ini\Z)|\.crc\Z").search
# Formats whose objects may be empty, or hidden by name, as an array's `.zarray`.
UNKNOWN_FORMAT = ""
_TAKE_EMPTY = ("bytes", "zarr", UNKNOWN_FORMAT)
_TAKE_HIDDEN = ("zarr", UNKNOWN_FORMAT)


class _Rule(NamedTuple):
    name: str  # as it is counted
    matches: Callable[[str], object]


@lru_cache(maxsize=256)
def left_out_by(location: Location, form: str) -> LeftOutName:
    """Return a function of a listed key and its size.

    The function returns the name under which the object is left out, or None. Names that the
    glob spells out, such as ``*.crc`` or ``.cache/*``, are not left out.

    >>> from growcache.store.urls import parse_url
    >>> why = left_out_by(parse_url("s3://b/data/**"), "npy")
    >>> [why(f"data/{name}", 9) for name in ("a.npy", "x/.DS_Store", ".git/a.npy", "_SUCCESS")]
    [None, '.DS_Store', 'hidden', '_SUCCESS']
    """
    prefix = location.prefix
    rest = location.pattern.removeprefix(prefix) if location.is_glob else "**"
    *folders, last = rest.split("/")
    files, tops = _file_rules(last, form), _folder_rules(folders, form)
    takes_empty = form in _TAKE_EMPTY or ":" in form

    def name_of(key: str, size: int) -> str | None:
        below = key.removeprefix(prefix)
        if (size or takes_empty) and not _SUSPICIOUS(below):
            return None
        *above, name = below.split("/")
        found = next((rule.name for rule in files if rule.matches(name)), None)
        if found is None and above:
            found = next((r.name for part in above for r in tops if r.matches(part)), None)
        return found or (EMPTY if not size and not takes_empty else None)

    return name_of


def _file_rules(last: str, form: str) -> list[_Rule]:
    if form in _TAKE_HIDDEN:
        return _rules(_OF_SYSTEMS)
    of_form = _OF_PARQUET if form == "parquet" else ()
    rules = [*_rules((*_OF_SYSTEMS, *_OF_WRITERS, *of_form)), _hidden()]
    return [rule for rule in rules if not _spells(last, rule.name)]


def _folder_rules(folders: Sequence[str], form: str) -> list[_Rule]:
    if form in _TAKE_HIDDEN:
        return _rules(_FOLDERS)
    rules = [*_rules(_FOLDERS), _hidden()]
    return [r for r in rules if not any(_spells(part, r.name) for part in folders)]


def _rules(patterns: Sequence[str]) -> list[_Rule]:
    return [_Rule(name, re.compile(component_regex(name)).fullmatch) for name in patterns]


def _hidden() -> _Rule:
    return _Rule(HIDDEN, lambda name: name[:1] == "." and name[1:2] not in ("", "."))


def _spells(component: str, rule: str) -> bool:
    """Whether the fixed start or end of a glob's component names such files.

    >>> _spells("*.crc", "*.crc"), _spells(".x*", "hidden"), _spells("_S*", "_SUCCESS"), _spells("*", "*.crc")
    (True, True, True, False)
    """
    parts = WILDCARD.split(component)
    head, tail = parts[0], component.rpartition("*")[2]
    if rule.startswith("*"):
        return bool(tail) and tail.endswith(rule[1:])
    first = "." if rule == HIDDEN else rule[0]
    return (head.startswith(first) and first in "._") or head.startswith(rule)
