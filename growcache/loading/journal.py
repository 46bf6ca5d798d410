"""The journal of a loader: which rows each of its batches held, in a few bytes a shard and pass.

A file of frames, each with a CRC32C; the first that is torn ends it. A *pass* frame names the shards of a
pass, which decide its order. A *batch* frame says in full what one batch held. The batches after it, up to the next batch
frame, follow one another regularly, so that they need no frame of their own. *Notes* are JSON: a session of a
trainer, the transform's schema, and the facts of the cache that decide what its shards hold. *Catalog* frames are a
copy of the cache's listing, so that its shards can be drawn again elsewhere.

Whoever resumes appends. Steps that come again then count as they came last.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import google_crc32c
import numpy as np
import orjson

from growcache.errors import ConfigError, JournalError
from growcache.loading.delivered_rows import BatchRows, Run, Substitute
from growcache.loading.options import LoaderOptions, Ranks, rank_file
from growcache.loading.plan import ORDER_VERSION, PassPlan, PlannedShard

MAGIC = b"GCJNL\x00\x00\x01"
NOTE, CATALOG, PASS, BATCH = range(1, 5)
KINDS = frozenset({NOTE, CATALOG, PASS, BATCH})
DIGEST_BYTES = 16
KEPT_PASSES = 4  # that a batch may hold rows of

_HEAD = struct.Struct("<IBI")  # bytes of the body, kind, CRC32C of kind and body
_PASS = struct.Struct("<QQIB")  # number, samples of a window, shards, bytes per number
_CATALOG = struct.Struct("<IQ")  # which listing, offset in it
_MOST_NOTE_BYTES = 1 << 28


class Frame(NamedTuple):
    kind: int
    body: bytes

    def pack(self) -> bytes:
        return (
            _HEAD.pack(len(self.body), self.kind, _checksum(self.kind, self.body)) + self.body
        )


def _checksum(kind: int, body: bytes) -> int:
    return int(google_crc32c.extend(google_crc32c.value(bytes([kind])), body))


def read_frames(data: bytes) -> Iterator[tuple[Frame, int]]:
    """Yield the whole frames with their ends; a torn frame ends it. The magic comes first."""
    at = len(MAGIC)
    while at + _HEAD.size <= len(data):
        length, kind, crc = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(body) < length or kind not in KINDS or _checksum(kind, body) != crc:
            return
        at += _HEAD.size + length
        yield Frame(kind, body), at


# ------------------------------------------------------------------------------- bodies


def pack_note(values: dict[str, Any]) -> Frame:
    return Frame(NOTE, zlib.compress(orjson.dumps(values)))


def unpack_note(body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(
        zlib.decompressobj().decompress(body, _MOST_NOTE_BYTES)
    )
    return found


class CatalogPart(NamedTuple):
    """Bytes of a listing; another number is another listing, which began anew."""

    listing: int
    offset: int
    data: bytes


def pack_catalog(part: CatalogPart) -> Frame:
    return Frame(CATALOG, _CATALOG.pack(part.listing, part.offset) + part.data)


def unpack_catalog(body: bytes) -> CatalogPart:
    listing, offset = _CATALOG.unpack_from(body)
    return CatalogPart(listing, offset, body[_CATALOG.size :])


def pack_pass(plan: PassPlan) -> Frame:
    numbers = np.array([shard.number for shard in plan.shards], np.int64)
    samples = np.array([shard.samples for shard in plan.shards], np.int64)
    width = 4 if max([0, *numbers.tolist(), *samples.tolist()]) < 1 << 32 else 8
    columns = [column.astype(f"<u{width}").tobytes() for column in (numbers, samples)]
    digests = bytes.fromhex("".join(shard.digest for shard in plan.shards))
    head = _PASS.pack(plan.number, plan.window_samples, len(plan.shards), width)
    return Frame(PASS, b"".join([head, *columns, digests]))


def unpack_pass(body: bytes) -> PassPlan:
    number, window_samples, count, width = _PASS.unpack_from(body)
    at, columns = _PASS.size, []
    for _ in range(2):
        columns.append(np.frombuffer(body, f"<u{width}", count, at).tolist())
        at += count * width
    ends = range(at, at + count * DIGEST_BYTES, DIGEST_BYTES)
    digests = [body[end : end + DIGEST_BYTES].hex() for end in ends]
    shards = tuple(map(PlannedShard, *columns, digests))
    return PassPlan(number, shards, window_samples)


class DeliveredBatch(NamedTuple):
    step: int  # over all epochs, from 0
    epoch: int
    epoch_step: int  # in its epoch, from 0
    seconds: int  # of the wall clock, for people
    rows: BatchRows

    def after(self, batches: int, batch_size: int, stride: int) -> DeliveredBatch | None:
        """Return a later batch, if all is regular in between; None after an irregular one."""
        rows = self.rows.after(batches, batch_size, stride) if batches else self.rows
        if rows is None:
            return None
        return self._replace(
            step=self.step + batches, epoch_step=self.epoch_step + batches, rows=rows
        )


def pack_batch(batch: DeliveredBatch) -> Frame:
    rows = batch.rows
    numbers = [*batch[:4], rows.padding, len(rows.runs), len(rows.substitutes)]
    for number, start, stop in rows.runs:
        numbers += (number, start, stop - start)
    for substitute in rows.substitutes:
        numbers += substitute
    return Frame(BATCH, b"".join(map(_varint, numbers)))


def unpack_batch(body: bytes) -> DeliveredBatch:
    numbers = _varints(body)
    step, epoch, epoch_step, seconds, padding, runs, substitutes = numbers[:7]
    rest = iter(numbers[7:])
    threes = list(zip(rest, rest, rest, strict=True))
    if len(threes) != runs + substitutes:
        raise ValueError(f"{len(threes)} runs and substitutes, not {runs + substitutes}")
    rows = BatchRows(
        tuple(Run(number, start, start + length) for number, start, length in threes[:runs]),
        tuple(Substitute(*three) for three in threes[runs:]),
        padding,
    )
    return DeliveredBatch(step, epoch, epoch_step, seconds, rows)


def _varint(number: int) -> bytes:
    """Return a number in seven bits a byte, the lowest first.

    >>> _varint(300).hex(), _varints(_varint(300) + _varint(5))
    ('ac02', [300, 5])
    """
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _varints(data: bytes) -> list[int]:
    found, number, shift = [], 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            found.append(number)
            number = shift = 0
    if shift:
        raise ValueError("a number is cut off")
    return found


# ---------------------------------------------------------------------------- what it says


def session_values(options: LoaderOptions) -> dict[str, Any]:
    """Return the arguments that decide what a batch holds, as JSON values."""
    names = ("batch_size", "seed", "shuffle", "drop_last", "fixed", "samples_per_epoch")
    ranks, functions = options.ranks, ("transform", "batch_transform")
    return {
        "order_version": ORDER_VERSION,
        **{name: getattr(options, name) for name in names},
        "fields": options.fields,
        "ragged": options.ragged,
        "ranks": [ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size],
        "explicit_ranks": ranks.explicit,
        **{name: _function_name(getattr(options, name)) for name in functions},
    }


def _function_name(function: object) -> str | None:
    if function is None:
        return None
    return str(getattr(function, "__qualname__", type(function).__qualname__))


@dataclass(frozen=True, slots=True)
class Session:
    """One trainer's part of a journal."""

    values: dict[str, Any]

    @property
    def ranks(self) -> Ranks:
        rank, world, local_rank, local_world = self.values["ranks"]
        return Ranks(rank, world, local_rank, local_world, self.values["explicit_ranks"])

    @property
    def stride(self) -> int:
        """Positions between two batches of a rank."""
        return int(self.values["batch_size"]) * self.ranks.local_world_size

    def options(self, path: Path, **functions: Any) -> LoaderOptions:
        names = ("batch_size", "seed", "shuffle", "drop_last", "fixed", "samples_per_epoch")
        values = {name: self.values[name] for name in names}
        fields = self.values["fields"]
        return LoaderOptions(
            path=path,
            **values,
            fields=None if fields is None else tuple(fields),
            ragged=self.values["ragged"],
            # All rows of the batch are this process's own.
            ranks=Ranks(explicit=self.values["explicit_ranks"]),
            **functions,
        )


@dataclass(slots=True)
class CacheFacts:
    """What decides the content of a cache's shards besides the configuration and the objects."""

    values: dict[str, Any]  # identity, editions, deferrals, listing, catalog_bytes
    last_shard: int = 0  # of all that passes name

    @property
    def cache(self) -> tuple[str, int]:
        """Return what tells caches apart: the fingerprint, and which listing it is."""
        identity = self.values["identity"] or {}
        return identity.get("fingerprint", ""), self.values["listing"]


@dataclass(frozen=True, slots=True)
class JournaledBatch:
    batch: DeliveredBatch
    session: Session
    known: bool  # False: the run may have ended before it
    plans: dict[int, PassPlan]  # of its runs
    facts: CacheFacts | None
    transform_schema: list[list[Any]] | None


@dataclass(slots=True)
class _Stretch:
    """Batches that follow one another regularly."""

    first: DeliveredBatch
    session: Session
    passes: dict[int, bytes]
    facts: CacheFacts | None
    transform_schema: list[list[Any]] | None
    known: int  # the first step that is not known to be delivered
    stop: int | None = None  # the first step that is not in it


@dataclass(slots=True)
class Journal:
    """A journal as it was read."""

    path: Path
    sessions: int = 0
    torn_bytes: int = 0
    stretches: list[_Stretch] = field(default_factory=list)
    parts: list[CatalogPart] = field(default_factory=list)
    facts: list[CacheFacts] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, rank: int = 0) -> Self:
        """Read the journal of a rank; ConfigError: there is none. JournalError: damaged."""
        file = rank_file(path, rank)
        if not rank and path.is_file():  # of a loader that was alone
            file = path
        try:
            data = file.read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            raise ConfigError(
                f"there is no journal {file}; name the one that a loader got as journal=, "
                "and of several ranks one by --rank"
            ) from None
        if data[: len(MAGIC)] != MAGIC:
            raise JournalError(f"{file} is no journal of this version of growcache")
        journal = cls(file)
        try:
            journal._take(data)
        except (ValueError, LookupError, TypeError, struct.error, zlib.error) as error:
            raise JournalError(f"{file} is damaged: {type(error).__name__}: {error}") from None
        return journal

    def _take(self, data: bytes) -> None:
        end, session, schema = len(MAGIC), Session({}), None
        passes: dict[int, bytes] = {}
        for (kind, body), end in read_frames(data):  # noqa: B007 - the last end counts
            if kind == CATALOG:
                self.parts.append(unpack_catalog(body))
            elif kind == PASS:
                number = _PASS.unpack_from(body)[0]
                passes = {n: b for n, b in passes.items() if 0 < number - n < KEPT_PASSES}
                passes[number] = body
                self._note_last_shard(body)
            elif kind == BATCH:
                batch = unpack_batch(body)
                self._close_stretch(batch, session)
                self.stretches.append(
                    _Stretch(
                        batch, session, dict(passes), self._last_facts, schema, batch.step + 1
                    )
                )
            else:
                note = unpack_note(body)
                if "session" in note:
                    self.sessions += 1
                    session, schema = Session(note["session"]), None
                schema = note.get("transform_schema", schema)
                if "cache" in note:
                    self.facts.append(CacheFacts(note["cache"]))
                if "ended" in note:
                    self.stretches[-1].known = self.stretches[-1].stop = note["ended"]
        self.torn_bytes = len(data) - end

    def _note_last_shard(self, body: bytes) -> None:
        _, _, count, width = _PASS.unpack_from(body)
        numbers = np.frombuffer(body, f"<u{width}", count, _PASS.size)
        if (facts := self._last_facts) is not None and count:
            facts.last_shard = max(facts.last_shard, int(numbers.max()))

    @property
    def _last_facts(self) -> CacheFacts | None:
        return self.facts[-1] if self.facts else None

    def _close_stretch(self, batch: DeliveredBatch, session: Session) -> None:
        if not self.stretches:
            return
        last = self.stretches[-1]
        # What a resumed run had counted was delivered.
        last.known = max(last.known, batch.step)
        if last.session is session:
            last.stop = batch.step

    @property
    def steps(self) -> int:
        """The number of steps that are known to be delivered; a few more may have been."""
        return max((stretch.known for stretch in self.stretches), default=0)

    def find(self, step: int) -> tuple[JournaledBatch, list[DeliveredBatch]]:
        """Return what a step held, and what it held before the run was resumed before it.

        Raises:
            ConfigError: the journal does not know the step.
        """
        found = [hit for stretch in self.stretches if (hit := _batch_at(stretch, step))]
        if not found:
            raise ConfigError(
                f"step {step} is not in {self.path}, which knows of {self.steps} steps, "
                "counted from 0"
            )
        *others, (batch, stretch) = found
        if stretch.session.values["order_version"] != ORDER_VERSION:
            raise JournalError(
                f"step {step} of {self.path} was delivered by a growcache that orders passes in "
                "another way; use that version"
            )
        plans = {
            run.pass_number: unpack_pass(stretch.passes[run.pass_number])
            for run in batch.rows.runs
        }
        chosen = JournaledBatch(
            *(batch, stretch.session, step < stretch.known, plans),
            *(stretch.facts, stretch.transform_schema),
        )
        return chosen, [other for other, _ in others]

    def latest(self, facts: CacheFacts) -> CacheFacts:
        """Return the latest facts of the same cache.

        They hold for earlier shards, too, and better: of a hole that was tried again, only
        they say that its group was filled without it.
        """
        same = [one for one in self.facts if one.cache == facts.cache]
        return CacheFacts(same[-1].values, max(one.last_shard for one in same))

    def catalog(self, facts: CacheFacts) -> bytes | None:
        """Return the listing that these facts refer to; None where it is not all here."""
        found = bytearray()
        for listing, offset, data in self.parts:
            if listing == facts.values["listing"] and offset == len(found):
                found += data
        wanted = int(facts.values["catalog_bytes"])
        return bytes(found[:wanted]) if len(found) >= wanted else None


def _batch_at(stretch: _Stretch, step: int) -> tuple[DeliveredBatch, _Stretch] | None:
    first, session = stretch.first, stretch.session
    after = step - first.step
    if after < 0 or (stretch.stop is not None and step >= stretch.stop):
        return None
    batch = first.after(after, session.values["batch_size"], session.stride)
    if batch is None:
        return None
    if after:
        number, _, stop = batch.rows.runs[0]
        if stop > _pass_rows(stretch.passes[number]):
            return None
    return batch, stretch


def _pass_rows(body: bytes) -> int:
    _, _, count, width = _PASS.unpack_from(body)
    samples = np.frombuffer(body, f"<u{width}", count, _PASS.size + count * width)
    return int(samples.sum(dtype=np.int64))
