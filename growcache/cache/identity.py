"""What makes a cache this cache: the fingerprint, and what was measured once and then kept."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from growcache.cache.files import Layout, write_atomic
from growcache.cache.guarded import guarded, unguarded
from growcache.errors import CacheError
from growcache.schema import Schema

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a cache.

    Attributes:
        fingerprint: hash of all that can change a byte of a shard.
        parts: what was hashed, by dotted key of the configuration; JSON values.
        schema: of every sample.
        sizes: what was measured on the first readable object (bytes of a part, of a
            sample, samples of a shard, …), by name.
    """

    fingerprint: str
    parts: dict[str, Any]
    schema: Schema
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def cache_format(self) -> str:
        """The format of the shards."""
        return str(self.parts.get("cache.format", "tfrecord"))

    def to_json(self) -> bytes:
        """Return the bytes of ``identity.json``."""
        return guarded(self.to_values())

    @classmethod
    def from_json(cls, data: bytes) -> Identity:
        """Return what `to_json` wrote.

        Raises:
            ValueError: the bytes are others.
        """
        return cls.from_values(unguarded(data))

    def to_values(self) -> dict[str, Any]:
        """Return it as JSON values; the index has a copy."""
        return {
            "fingerprint": self.fingerprint,
            "parts": self.parts,
            "schema": self.schema.to_json(),
            "sizes": self.sizes,
        }

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Identity:
        """Return what `to_values` gave."""
        schema = Schema.from_json(values["schema"])
        parts, sizes = values["parts"], values["sizes"]
        if not (type(parts) is dict and type(sizes) is dict):
            raise TypeError("parts and sizes are mappings")
        return cls(str(values["fingerprint"]), parts, schema, sizes)

    def differing(self, other: Identity) -> list[str]:
        """Return the keys whose values differ, each with both values, in order."""
        return describe_differences(other.parts, self.parts)


def describe_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the keys whose values differ, each with the old and the new value.

    >>> describe_differences({"seed": 0, "a": 1}, {"seed": 1, "a": 1})
    ['seed (0 → 1)']
    """
    return [
        f"{key} ({_show(old.get(key, _MISSING))} → {_show(new.get(key, _MISSING))})"
        for key in sorted({*old, *new})
        if old.get(key, _MISSING) != new.get(key, _MISSING)
    ]


def _show(value: object) -> str:
    return "unset" if value is _MISSING else repr(value)[:60]


def read_identity(root: str | os.PathLike[str]) -> Identity | None:
    """Return the cache's identity; None where no sample was ever measured.

    Raises:
        CacheError: the file is damaged.
    """
    path = Layout(root).identity
    try:
        return Identity.from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(
            f"{path} is damaged ({error}); mend it with: growcache check {path.parent} --repair"
        ) from None


def write_identity(root: str | os.PathLike[str], identity: Identity) -> None:
    """Write the identity durably, at once or not at all."""
    write_atomic(Layout(root).identity, identity.to_json())
