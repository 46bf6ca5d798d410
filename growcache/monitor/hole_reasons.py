"""Holes grouped by their reasons, which are equal if only objects and numbers differ. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from growcache.cache.index.inspection import HoleRow
from growcache.usercode import printable

EXAMPLES = 5
MOST_GROUPS = 50
SHOWN_CHARACTERS = 400

_NUMBER = re.compile(r"\d[\d,._]*")
_QUOTED = re.compile(r"b?'[^']*'|\"[^\"]*\"")


@dataclass(slots=True)
class HoleGroup:
    reason: str  # of its first hole
    count: int = 0
    examples: list[dict[str, str | int]] = field(default_factory=list)  # latest holes


def common_reason(reason: str, key: str) -> str:
    """Return a reason without the parts that differ between objects.

    >>> common_reason("a/7.npy: expected 128 bytes, found 64", "a/7.npy")
    '…: expected # bytes, found #'
    """
    named = reason.replace(key, "…") if key else reason
    return _NUMBER.sub("#", _QUOTED.sub("'…'", named))


def group_holes(holes: Iterable[HoleRow]) -> list[HoleGroup]:
    """Return the groups, those with most holes first."""
    groups: dict[str, HoleGroup] = {}
    for hole in holes:
        name = common_reason(hole.reason, hole.key)
        group = groups.setdefault(name, HoleGroup(printable(hole.reason)[:SHOWN_CHARACTERS]))
        group.count += 1
        example: dict[str, str | int] = {
            "key": printable(hole.key),
            "part": hole.part,
            "shard": hole.shard,
        }
        group.examples = [example, *group.examples][:EXAMPLES]
    return sorted(groups.values(), key=lambda group: -group.count)[:MOST_GROUPS]
