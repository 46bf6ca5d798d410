"""Messages between supervisor and samplers: one JSON object per line of a pipe.

    supervisor -> sampler   setup, budget, reads, probe, permit, booked, cut, grant, revoke, storage
    sampler -> supervisor   ready, refused, probed, book, unread, progress, called, setback, need, written, failed

The end of the pipe is a message, too: its reader stops.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import orjson

from growcache.cache.side_files import EditionValues, Identity
from growcache.config import Config
from growcache.config_text import to_json_value
from growcache.errors import (
    ConfigError,
    GrowcacheError,
    SamplingError,
    StoreRefusedError,
)
from growcache.store.contract import Entry
from growcache.usercode import printable, short_key

TRANSFORM = "the transform's source"
FORMAT = "the format's source"
LABELS = "the rows of source.labels"
# Keys among the sizes of an identity.
FOLDER_CLASSES = "folder_classes"
AS_FOUND = "as_found"  # whether a transform gets all fields that formats find now


Message = dict[str, Any]
LabelValues: TypeAlias = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True)
class PartVisit:
    entry: Entry
    part: int = 0
    parts: int = 1
    round: int | None = None  # None: the permit's
    weight: float | None = None  # of its samples; None: equal weights
    joined: LabelValues = field(default_factory=dict)  # fields from labels
    partners: tuple[Entry, ...] = ()  # the objects of the other fields
    renewed: bool = False  # read the current version instead of the listed one

    @property
    def keys(self) -> list[str]:
        return [self.entry.key, *(partner.key for partner in self.partners)]

    def to_values(self) -> list[Any]:
        """Return a short JSON value, because a permit may have thousands of visits."""
        more: dict[str, Any] = {}
        if self.round is not None:
            more |= {"round": self.round, "weight": self.weight}
        if self.joined:
            more["joined"] = {name: _json_value(value) for name, value in self.joined.items()}
        if self.partners:
            more["partners"] = [entry_values(entry) for entry in self.partners]
        if self.renewed:
            more["renewed"] = True
        values = [*entry_values(self.entry), self.part, self.parts]
        return [*values, more] if more else values

    @classmethod
    def from_values(cls, values: list[Any]) -> Self:
        *entry, part, parts = values[:7]
        more = dict(values[7]) if len(values) > 7 else {}
        if "joined" in more:
            joined = more["joined"].items()
            more["joined"] = {name: _from_json_value(value) for name, value in joined}
        if "partners" in more:
            more["partners"] = tuple(Entry(*partner) for partner in more["partners"])
        return cls(Entry(*entry), part, parts, **more)


def stored_bytes(visit: PartVisit) -> float:
    size = visit.entry.size
    if visit.partners:
        size += sum(partner.size for partner in visit.partners)
    return size / visit.parts


def entry_values(entry: Entry) -> list[Any]:
    return [entry.key, entry.size, entry.etag, entry.mtime, entry.store]


def _json_value(value: float | str) -> Any:
    """Return the value for JSON, which has no infinity and no NaN."""
    plain = not isinstance(value, float) or math.isfinite(value)
    return value if plain else [repr(value)]


def _from_json_value(value: Any) -> int | float | str:
    found: int | float | str = float(value[0]) if isinstance(value, list) else value
    return found


@dataclass(frozen=True, slots=True)
class Permit:
    """The right to fill one group of shards, with everything that a sampler needs for it."""

    id: str  # of this attempt; part of the names of files and reports
    group: int
    edition: int
    round: int
    shards: tuple[int, ...]  # their numbers
    visits: tuple[PartVisit, ...]  # their order decides the shard of each sample
    take: int | None = None  # random samples of each object; None: all of the part
    editions: tuple[EditionValues, ...] = ()  # up to the group's own
    write: tuple[int, ...] | None = None  # shards to write, ascending; None: all
    left_out: tuple[int, ...] = ()  # places of visits that were set aside
    defers: bool = False  # more visits may be set aside, because no shard was ever committed
    makeups: tuple[int, ...] = ()  # earlier makeup groups
    # For a makeup group: where each visit was first drawn, and 1 if it was a hole.
    made_up: tuple[tuple[int, int, int], ...] = ()
    # Objects for probing the store, if all visits are to one object.
    others: tuple[Entry, ...] = ()
    purged: tuple[int, ...] = ()  # places of visits to purged objects, which yield nothing

    @property
    def written(self) -> tuple[int, ...]:
        return self.shards if self.write is None else self.write

    def to_message(self) -> Message:
        head = {"type": "permit", "id": self.id, "group": self.group, "edition": self.edition}
        return {
            **head,
            "round": self.round,
            "shards": self.shards,
            "take": self.take,
            "editions": self.editions,
            "write": self.write,
            "left_out": self.left_out,
            "defers": self.defers,
            "makeups": self.makeups,
            "made_up": self.made_up,
            "others": [entry_values(entry) for entry in self.others],
            "purged": self.purged,
            "visits": [visit.to_values() for visit in self.visits],
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Permit:
        return cls(
            message["id"],
            message["group"],
            message["edition"],
            message["round"],
            tuple(message["shards"]),
            tuple(map(PartVisit.from_values, message["visits"])),
            message["take"],
            tuple(map(tuple, message["editions"])),
            None if message["write"] is None else tuple(message["write"]),
            tuple(message["left_out"]),
            message["defers"],
            tuple(message["makeups"]),
            tuple((group, place, hole) for group, place, hole in message["made_up"]),
            tuple(Entry(*values) for values in message["others"]),
            tuple(message["purged"]),
        )


def setup_message(config: Config) -> Message:
    return {"type": "setup", "config": to_json_value(config.model_dump())}


def budget_message(config: Config) -> Message:
    limits = (config.sampling.max_egress, config.sampling.max_bytes_per_second)
    return {"type": "budget", "is_limited": any(one is not None for one in limits)}


def storage_message(config: Config) -> Message:
    options = [source.storage_options for source in config.sources]
    return {"type": "storage", "options": to_json_value(options)}


def identity_message(identity: Identity) -> Message:
    return {
        "type": "identity",
        "schema": identity.schema.to_json(),
        "fingerprint": identity.fingerprint,
        "group_limit_bytes": identity.sizes.get("group_limit_bytes"),
        "group_most_bytes": identity.sizes.get("group_most_bytes"),
        "follow": fields_to_follow(identity),
    }


def fields_to_follow(identity: Identity) -> list[str] | None:
    """Return the fields that formats should keep to, or None if they find them themselves.

    A transform makes fields of its own, so the schema does not contain the fields that it got.
    Caches of earlier versions do not record them either, and get the fields that these versions
    found.
    """
    if identity.parts.get("sampling.transform") is None:
        return list(identity.schema.names)
    return None if identity.sizes.get(AS_FOUND) else []


def pack(message: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(message) + b"\n"
    except TypeError:  # local file names may be invalid Unicode, which orjson refuses
        return json.dumps(message).encode() + b"\n"


def unpack(line: bytes) -> Message:
    try:
        found: Message = orjson.loads(line)
    except orjson.JSONDecodeError:
        found = json.loads(line)
    return found


MAX_REASON = 600  # characters, because the index keeps the reason of a hole


def hole_reason(key: str, why: object) -> str:
    """Return one line with the object's name and the error's code.

    The name occurs once, because most errors contain it already.

    >>> hole_reason("a.npy", "a.npy: expected an .npy file")
    'a.npy: expected an .npy file'
    >>> hole_reason("a.npy", "it holds no sample")
    'a.npy: it holds no sample'
    >>> from growcache.errors import FormatError
    >>> hole_reason("a.npy", FormatError("a.npy: expected an .npy file"))
    'a.npy: expected an .npy file (GC301)'
    """
    name = short_key(key)
    text = printable(str(why) if name == key else str(why).replace(key, name))
    if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text):
        text = f"{name}: {text}"
    text = text if len(text) <= MAX_REASON else text[: MAX_REASON - 1] + "…"
    return f"{text} ({why.code})" if isinstance(why, GrowcacheError) else text


def refusal_message(error: GrowcacheError) -> Message:
    """Return an error as the message of a process that gives up."""
    return {
        "type": "refused",
        "error": str(error),
        "exit_code": error.exit_code,
        "code": error.code,
    }


def refusal_error(message: Message) -> GrowcacheError:
    """Return the error of a process that gave up.

    >>> refusal_error(refusal_message(ConfigError("unknown key a", code="GC102"))).code
    'GC102'
    """
    kind = ConfigError if message["exit_code"] == ConfigError.exit_code else SamplingError
    return kind(message["error"], code=message["code"])


def awaited_event(error: BaseException) -> str:
    """Return the event that a failed request waits for, in words.

    >>> from growcache.errors import CredentialsError, TransientStoreError
    >>> awaited_event(CredentialsError("s3://b: the credentials have expired; renew them"))
    'credentials (s3://b: the credentials have expired; renew them)'
    >>> awaited_event(TransientStoreError("s3://b/x: connection refused by 127.0.0.1:9"))
    'the store to answer (s3://b/x: connection refused by 127.0.0.1:9)'
    """
    wanted = error.wanted if isinstance(error, StoreRefusedError) else "the store to answer"
    return f"{wanted} ({error})"
