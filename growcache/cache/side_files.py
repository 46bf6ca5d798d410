"""The small checksummed files of a cache, from which a lost index is rebuilt.

The supervisor writes each before the change that it records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from growcache.cache.deferrals import Deferrals
from growcache.cache.files import CacheLayout, checksummed_json, verified_json, write_atomic
from growcache.errors import CacheError

if TYPE_CHECKING:
    from growcache.schema import Schema


def identity_notes(identity: Identity) -> dict[str, object]:
    return {"fingerprint": identity.fingerprint, "identity": identity.to_values()}


_UNSET = object()


@dataclass(frozen=True)
class Identity:
    fingerprint: str  # hash of all settings that can change a byte of a shard
    parts: dict[str, Any]  # the hashed values, by dotted key of the configuration
    schema_json: list[list[Any]]  # of every sample, as from Schema.to_json
    sizes: dict[str, Any] = field(default_factory=dict)  # measured in the first readable object
    # Other fingerprints of the same samples, each with the parts by which it differs.
    aliases: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def fingerprints(self) -> frozenset[str]:
        return frozenset((self.fingerprint, *self.aliases))

    def yields_same_samples(self, other: Identity) -> bool:
        return not self.fingerprints.isdisjoint(other.fingerprints)

    def known_as(self, fingerprint: str) -> Identity | None:
        """Return the identity under another fingerprint of the same samples, or None.

        >>> new = Identity("new", {"code": "s"}, [], aliases={"old": {"code": "t"}})
        >>> (old := new.known_as("old")).parts, old.known_as("new") == new, new.known_as("x")
        ({'code': 't'}, True, None)
        """
        if fingerprint == self.fingerprint:
            return self
        other = self.aliases.get(fingerprint)
        if other is None:
            return None
        mine = {name: self.parts.get(name) for name in other}
        aliases = {self.fingerprint: mine}
        return replace(self, fingerprint=fingerprint, parts=self.parts | other, aliases=aliases)

    @cached_property
    def schema(self) -> Schema:
        """The schema of every sample, made at first use, because only it needs NumPy."""
        from growcache.schema import Schema

        return Schema.from_json(self.schema_json)

    @property
    def cache_format(self) -> str:
        return str(self.parts.get("cache.format", "tfrecord"))

    def to_json(self) -> bytes:
        return checksummed_json(self.to_values())

    @classmethod
    def from_json(cls, data: bytes) -> Identity:
        return cls.from_values(verified_json(data))

    def to_values(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "parts": self.parts,
            "schema": self.schema_json,
            "sizes": self.sizes,
            "aliases": self.aliases,
        }

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Identity:
        parts, schema, sizes = values["parts"], values["schema"], values["sizes"]
        aliases = values.get("aliases", {})  # earlier versions have none
        if not (type(parts) is dict and type(schema) is list and type(sizes) is dict):
            raise TypeError("parts and sizes are mappings, a schema is a list")
        if type(aliases) is not dict or any(type(a) is not dict for a in aliases.values()):
            raise TypeError("aliases are mappings of parts")
        return cls(str(values["fingerprint"]), parts, schema, sizes, aliases)

    def differing(self, other: Identity) -> list[str]:
        return describe_differences(other.parts, self.parts)


def describe_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the keys whose values differ, each with the old and the new value.

    >>> describe_differences({"seed": 0, "a": 1}, {"seed": 1, "a": 1})
    ['seed (0 → 1)']
    """
    return [
        f"{key} ({_shown_value(old.get(key, _UNSET))} → {_shown_value(new.get(key, _UNSET))})"
        for key in sorted({*old, *new})
        if old.get(key, _UNSET) != new.get(key, _UNSET)
    ]


def _shown_value(value: object) -> str:
    return "unset" if value is _UNSET else repr(value)[:60]


def read_identity(root: str | os.PathLike[str]) -> Identity | None:
    """Return the cache's identity, or None before the first sample is measured.

    May raise CacheError.
    """
    path = CacheLayout(root).identity
    try:
        return Identity.from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(
            f"{path} is damaged ({error}); repair it with: growcache check {path.parent} "
            "--repair",
            code="GC416",
        ) from None


def write_identity(root: str | os.PathLike[str], identity: Identity) -> None:
    write_atomic(CacheLayout(root).identity, identity.to_json())


EDITIONS, ISSUED, DEFERRALS = "editions", "issued", "deferrals"
_Value = TypeVar("_Value")


def _read(
    path: Path, key: str, parse: Callable[[Any], _Value], missing: _Value
) -> _Value | None:
    """Return a value of a side file: ``missing`` without the file, and None if it is damaged."""
    try:
        return parse(verified_json(path.read_bytes())[key])
    except FileNotFoundError:
        return missing
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def write_editions(layout: CacheLayout, editions: Iterable[Edition]) -> None:
    rows = [[e.edition, *e.values] for e in editions]
    write_atomic(layout.editions, checksummed_json({EDITIONS: rows}))


def read_editions(layout: CacheLayout) -> list[Edition] | None:
    return _read(layout.editions, EDITIONS, _parse_editions, list[Edition]())


def _parse_editions(rows: Any) -> list[Edition]:
    return [Edition(*row) for row in rows]


def write_issued(layout: CacheLayout, group: int) -> None:
    write_atomic(layout.issued, checksummed_json({ISSUED: group}))


def read_issued(layout: CacheLayout) -> int | None:
    """Return the highest group with a permit: -1 if there is none, and None if the file is damaged."""
    return _read(layout.issued, ISSUED, int, -1)


def write_deferrals(layout: CacheLayout, deferrals: Deferrals) -> None:
    write_atomic(layout.deferrals, checksummed_json({DEFERRALS: deferrals.to_values()}))


def read_deferrals(layout: CacheLayout) -> Deferrals | None:
    return _read(layout.deferrals, DEFERRALS, Deferrals.from_values, Deferrals())


def deferrals_in_index(meta: Mapping[str, Any]) -> Deferrals:
    values = meta.get(DEFERRALS)
    return Deferrals() if values is None else Deferrals.from_values(values)


def editions_in_sidecar(table: Sequence[Sequence[Any]]) -> list[Edition]:
    return [
        Edition(number, int(objects), str(digest), int(first), *map(str, lanes))
        for number, (objects, digest, first, *lanes) in enumerate(table)
    ]


def longest_editions(tables: Iterable[Sequence[Edition]]) -> list[Edition]:
    """Return the longest table that agrees with all earlier ones. Earlier tables win.

    >>> a, b = Edition(0, 9, "a", 0), Edition(1, 18, "b", 4)
    >>> longest_editions([[a], [a, b], [b]]) == [a, b]
    True
    """
    best: list[Edition] = []
    for table in tables:
        if len(table) > len(best) and list(table[: len(best)]) == best:
            best = list(table)
    return best


EditionValues: TypeAlias = tuple[int, str, int] | tuple[int, str, int, str]


@dataclass(frozen=True, slots=True)
class Edition:
    """The first ``objects`` keys of the catalog.

    Groups from ``first_group`` on are drawn from them.
    """

    edition: int
    objects: int
    digest: str
    first_group: int  # without makeup groups, see Deferrals.draw_number
    lanes: str | None = None  # of this node, as `sampling.lanes` writes them; None: all

    @property
    def values(self) -> EditionValues:
        """The values without the number, as sidecars have them."""
        values = (self.objects, self.digest, self.first_group)
        return values if self.lanes is None else (*values, self.lanes)
