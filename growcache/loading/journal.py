"""The journal of a loader: the rows of each of its batches, in a few bytes per shard and pass.

The file consists of frames, each with a CRC32C. A *pass* frame has the shards of a pass, which
decide its order. A *batch* frame has the full content of one batch. The batches after it, up to
the next batch frame, follow one another regularly and need no frames. *Notes* are JSON: a
session of a trainer, the transform's schema, and the facts of the cache that decide the content
of its shards. *Catalog* frames are a copy of the cache's listing, so that its shards can be
drawn again elsewhere.

A resumed trainer appends. Steps that are repeated then count as they were delivered last. The
steps that a damaged frame may have described are known. Those are lost, and all others are not.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from growcache.errors import ConfigError, JournalError
from growcache.loading.journal_frames import (
    BATCH,
    CATALOG,
    MAGIC,
    PASS,
    CatalogPart,
    Damage,
    DeliveredBatch,
    highest_shard,
    number_of_pass,
    read_frames,
    rows_of_pass,
    session_tag,
    tag_of_pass,
    unpack_batch,
    unpack_catalog,
    unpack_note,
    unpack_pass,
)
from growcache.loading.options import LoaderOptions, Ranks, rank_file
from growcache.loading.plan import ORDER_VERSION, PassPlan

KEPT_PASSES = 4  # from which a batch may have rows
SHOWN = 5  # places in a message


def session_values(options: LoaderOptions) -> dict[str, Any]:
    """Return the arguments that decide the content of a batch, as JSON values."""
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
            # All rows of the batch belong to this process.
            ranks=Ranks(explicit=self.values["explicit_ranks"]),
            **functions,
        )


@dataclass(slots=True)
class CacheFacts:
    """The facts that decide the content of a cache's shards, besides configuration and objects."""

    values: dict[str, Any]  # identity, editions, deferrals, listing, catalog_bytes
    last_shard: int = 0  # highest number in any pass

    @property
    def cache(self) -> tuple[str, int]:
        """Return the identity of the cache: its fingerprint, and the number of its listing."""
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
    known: int  # first step that may not have been delivered
    stop: int | None = None  # first step after it


class LostSteps(NamedTuple):
    """Steps that are unknown, because bytes are damaged."""

    start: int
    stop: int | None  # None: to the end
    stretches: int  # number of earlier stretches

    def __contains__(self, step: object) -> bool:
        assert isinstance(step, int)
        return self.start <= step and (self.stop is None or step < self.stop)

    def __str__(self) -> str:
        if self.stop is None:
            return f"from {self.start} on"
        return (
            str(self.start)
            if self.stop == self.start + 1
            else f"{self.start} to {self.stop - 1}"
        )


@dataclass(slots=True)
class Journal:
    """The content of a journal."""

    path: Path
    sessions: int = 0
    stretches: list[_Stretch] = field(default_factory=list)
    lost: list[LostSteps] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    parts: list[CatalogPart] = field(default_factory=list)
    facts: list[CacheFacts] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, rank: int = 0) -> Self:
        """Read the journal of a rank.

        Raises:
            ConfigError: The journal does not exist.
            JournalError: It cannot be read.
        """
        file = rank_file(path, rank)
        if not rank and path.is_file():  # of a loader without other ranks
            file = path
        try:
            data = file.read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            raise ConfigError(
                f"there is no journal {file}; name the file that a loader got as journal=, and "
                "choose one of several ranks with --rank",
                code="GC105",
            ) from None
        if data[: len(MAGIC)] != MAGIC:
            raise JournalError(f"{file} is not a journal of this version of growcache")
        journal = cls(file)
        try:
            _Reading(journal).take(data)
        except (ValueError, LookupError, TypeError, struct.error, zlib.error) as error:
            raise JournalError(f"{file} is damaged: {type(error).__name__}: {error}") from None
        return journal

    @property
    def steps(self) -> int:
        """Number of steps that were certainly delivered. A few more may have been."""
        return max((stretch.known for stretch in self.stretches), default=0)

    def find(self, step: int) -> tuple[JournaledBatch, list[DeliveredBatch]]:
        """Return the content of a step, and its earlier contents in runs that were resumed before it.

        Raises:
            ConfigError: The journal does not have the step.
            JournalError: The record of the step is damaged.
        """
        found = [
            (at, hit)
            for at, stretch in enumerate(self.stretches)
            if (hit := _batch_at(stretch, step)) is not None
        ]
        last = found[-1][0] if found else -1
        if any(step in lost and lost.stretches > last for lost in self.lost):
            raise JournalError(
                f"step {step} is lost, because {self.path} is damaged ({self.damage_words}); use a "
                "copy of it, if there is one"
            )
        if not found:
            raise ConfigError(
                f"step {step} is not in {self.path}, which has {self.steps} steps, counted "
                "from 0",
                code="GC105",
            )
        *_, stretch = (self.stretches[at] for at, _ in found)
        return _journaled(self.path, step, found[-1][1], stretch), [
            hit for _, hit in found[:-1]
        ]

    @property
    def damage_words(self) -> str:
        """Return the damaged places of the file, and the steps that are lost."""
        places = ", ".join(f"{one.start} to {one.stop - 1}" for one in self.damage[:SHOWN])
        steps = ", ".join(map(str, self.lost[:SHOWN])) or "none"
        more = " …" if max(len(self.damage), len(self.lost)) > SHOWN else ""
        return f"bytes {places}; lost steps: {steps}{more}"

    def latest(self, facts: CacheFacts) -> CacheFacts:
        """Return the latest facts of the same cache.

        They are also valid for earlier shards, and more complete. If a hole was retried, only
        they record that its group was filled without it.
        """
        same = [one for one in self.facts if one.cache == facts.cache]
        return CacheFacts(same[-1].values, max(one.last_shard for one in same))

    def catalog(self, facts: CacheFacts) -> bytes | None:
        """Return the listing that these facts refer to, or None if it is incomplete."""
        found = bytearray()
        for listing, offset, data in self.parts:
            if listing == facts.values["listing"] and offset == len(found):
                found += data
        wanted = int(facts.values["catalog_bytes"])
        return bytes(found[:wanted]) if len(found) >= wanted else None


def _batch_at(stretch: _Stretch, step: int) -> DeliveredBatch | None:
    first, session = stretch.first, stretch.session
    after = step - first.step
    if after < 0 or (stretch.stop is not None and step >= stretch.stop):
        return None
    batch = first.after(after, session.values["batch_size"], session.stride)
    if batch is None:
        return None
    if after:
        number, _, stop = batch.rows.runs[0]
        if stop > rows_of_pass(stretch.passes[number]):
            return None
    return batch


def _journaled(
    path: Path, step: int, batch: DeliveredBatch, stretch: _Stretch
) -> JournaledBatch:
    if stretch.session.values["order_version"] != ORDER_VERSION:
        raise JournalError(
            f"step {step} of {path} was delivered by a version of growcache that orders passes "
            "differently; use that version"
        )
    plans = {
        run.pass_number: unpack_pass(stretch.passes[run.pass_number]) for run in batch.rows.runs
    }
    return JournaledBatch(
        *(batch, stretch.session, step < stretch.known, plans),
        *(stretch.facts, stretch.transform_schema),
    )


# ------------------------------------------------------------------------------- reading


class _Reading:
    """The state while a journal is read from its start.

    Nothing is guessed about damaged bytes. Their content is unknown until a later frame repeats
    it.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._session: Session | None = None
        self._sessions: dict[bytes, Session] = {}  # by the tags in their passes
        self._schema: list[list[Any]] | None = None
        self._passes: dict[int, bytes] = {}
        self._next_step = 0  # first that no frame has described yet
        self._lost_from: int | None = None

    def take(self, data: bytes) -> None:
        for frame, _ in read_frames(data):
            if isinstance(frame, Damage):
                self._lose(frame)
            elif frame.kind == CATALOG:
                self._journal.parts.append(unpack_catalog(frame.body))
            elif frame.kind == PASS:
                self._begin_pass(frame.body)
            elif frame.kind == BATCH:
                self._deliver(unpack_batch(frame.body))
            else:
                self._note(unpack_note(frame.body))
        if self._lost_from is not None:
            self._lose_until(None)

    def _lose(self, damage: Damage) -> None:
        self._journal.damage.append(damage)
        if damage.kind == CATALOG:
            return
        last = self._journal.stretches[-1] if self._journal.stretches else None
        if last is not None and last.session is self._session and last.stop is None:
            last.stop = last.first.step + 1
        if self._lost_from is None or self._next_step < self._lost_from:
            self._lost_from = self._next_step
        if damage.kind != BATCH:  # a plan with the same number may be another one
            self._passes = {}
        if damage.kind not in (BATCH, PASS):
            self._session = None

    def _lose_until(self, step: int | None) -> None:
        start, self._lost_from = self._lost_from, None
        if start is not None and (step is None or step > start):
            lost = LostSteps(start, step, len(self._journal.stretches))
            self._journal.lost.append(lost)

    def _begin_pass(self, body: bytes) -> None:
        if self._session is None:
            self._session = self._sessions.get(tag_of_pass(body))
        number = number_of_pass(body)
        kept = {n: b for n, b in self._passes.items() if 0 < number - n < KEPT_PASSES}
        self._passes = {**kept, number: body}
        if (facts := self._facts) is not None:
            facts.last_shard = max(facts.last_shard, highest_shard(body))

    @property
    def _facts(self) -> CacheFacts | None:
        return self._journal.facts[-1] if self._journal.facts else None

    def _deliver(self, batch: DeliveredBatch) -> None:
        self._close_stretch(batch)
        self._next_step = batch.step + 1
        session, passes = self._session, self._passes
        if session is None or any(run.pass_number not in passes for run in batch.rows.runs):
            if self._lost_from is None:
                self._lost_from = batch.step
            return
        self._lose_until(batch.step)
        self._journal.stretches.append(
            _Stretch(batch, session, dict(passes), self._facts, self._schema, batch.step + 1)
        )

    def _close_stretch(self, batch: DeliveredBatch) -> None:
        if not self._journal.stretches:
            return
        last = self._journal.stretches[-1]
        # Steps that a resumed run counted were delivered.
        last.known = max(last.known, batch.step)
        if last.session is self._session and last.stop is None:
            last.stop = batch.step

    def _note(self, note: dict[str, Any]) -> None:
        if "session" in note:
            self._journal.sessions += 1
            self._session, self._schema = Session(note["session"]), None
            self._sessions[session_tag(note["session"])] = self._session
            self._next_step = note.get("step", self._next_step)
        self._schema = note.get("transform_schema", self._schema)
        if "cache" in note:
            self._journal.facts.append(CacheFacts(note["cache"]))
        if "ended" in note:
            self._end(note["ended"])

    def _end(self, step: int) -> None:
        if self._lost_from is not None:
            self._lose_until(step)
        else:
            last = self._journal.stretches[-1]
            last.known = last.stop = step
        self._next_step = step
