"""Objects of several fields that are one: found in the listing, in the order it comes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from growcache.config import FieldConfig
from growcache.remote.templates import Template
from growcache.sampling.draws import Ints
from growcache.usercode import short


@dataclass(frozen=True, slots=True)
class Complete:
    """What became whole: an object has a member of each field.

    Attributes:
        members: their ordinals in the catalog; int64 [objects, fields].
        keys: of the first fields' members, and
        stores: theirs.
    """

    members: Ints
    keys: list[str]
    stores: list[int]

    @property
    def lasts(self) -> Ints:
        """The ordinal that made each of them whole; ascending."""
        lasts: Ints = self.members.max(axis=1, initial=-1)
        return lasts


@dataclass(slots=True)
class _Partial:
    members: list[int]  # -1 where none was listed yet
    key: str  # of the first field; of another one until that was listed


class Pairs:
    """The members of objects that are not whole yet, and how they find each other.

    Numbers follow from the catalog alone: an object is whole with its last member.

    Args:
        fields: of the source; a store of the catalog is the place of a field.

    Attributes:
        width: how many fields there are.
        unmatched: listed members that lack a partner.
    """

    def __init__(self, fields: Mapping[str, FieldConfig]) -> None:
        self._names = list(fields)
        self.width = len(self._names)
        self.unmatched = 0
        self._templates = [Template.of(field.url) for field in fields.values()]
        self._rivals = [self._rivals_of(n) for n in range(len(self._templates))]
        self._partial: dict[tuple[str, ...], _Partial] = {}

    def _rivals_of(self, number: int) -> list[Template]:
        """Return the templates that fix more of a key, and so have it where they match it."""
        own = self._templates[number]
        ranked = [(template.literal, -n) for n, template in enumerate(self._templates)]
        return [
            template
            for n, template in enumerate(self._templates)
            if template.folder == own.folder and ranked[n] > ranked[number]
        ]

    def take(self, first: int, stores: Sequence[int], keys: Sequence[str]) -> Complete:
        """Return the objects that become whole with entries of the catalog.

        Args:
            first: ordinal of the first entry.
            stores: of the entries.
            keys: of the entries.
        """
        members: list[list[int]] = []
        names: list[str] = []
        for ordinal, (store, key) in enumerate(zip(stores, keys, strict=True), first):
            values = self._templates[store].values(key)
            if values is None or any(rival.values(key) for rival in self._rivals[store]):
                continue
            found = self._partial.get(values)
            if found is None:
                found = self._partial[values] = _Partial([-1] * self.width, key)
            found.members[store] = ordinal
            self.unmatched += 1
            if store == 0:
                found.key = key
            if -1 not in found.members:
                members.append(found.members)
                names.append(found.key)
                del self._partial[values]
                self.unmatched -= len(found.members)
        rows = np.array(members, np.int64).reshape(-1, self.width)
        return Complete(rows, names, [0] * len(names))

    def complaint(self, shown: int) -> str:
        """Say which objects are not whole.

        Args:
            shown: so many of them are named.
        """
        some = ", ".join(map(self._described, islice(self._partial.values(), shown)))
        return (
            f"source.fields: {len(self._partial):,} of the objects lack a field: {some}. Add what is "
            "missing, narrow the URLs, or leave these out with source.on_missing: skip"
        )

    def _described(self, one: _Partial) -> str:
        members = zip(self._names, one.members, strict=True)
        lacking = [name for name, ordinal in members if ordinal == -1]
        return f"{short(one.key)} (no {', '.join(lacking)})"
