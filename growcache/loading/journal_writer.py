"""Append to a journal, in the process whose loop receives the batches.

The content of a batch is in the file before the loop gets it, except that regular batches need
no record. So a kill loses nothing. For power cuts the file is synced with each state that the
user saves. If writing fails, the epoch ends, because missing steps would read as regular ones.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from growcache.cache.files import CacheLayout, fsync_directory
from growcache.cache.locks import close_owned, open_owned, this_process, try_lock
from growcache.cache.side_files import read_deferrals, read_editions, read_identity
from growcache.errors import CachePathError, ConfigError, JournalError
from growcache.loading.journal import session_values
from growcache.loading.journal_frames import (
    CATALOG,
    MAGIC,
    NOTE,
    CatalogPart,
    Damage,
    DeliveredBatch,
    Frame,
    pack_batch,
    pack_catalog,
    pack_note,
    pack_pass,
    read_frames,
    session_tag,
    unpack_catalog,
    unpack_note,
)
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import PassPlan
from growcache.loading.transform import TransformSchema
from growcache.store.catalog import Catalog

_log = logging.getLogger(__name__)

# At most, between two written batches, which show how far a killed run came.
BATCH_SECONDS = 30.0
CATALOG_PART_BYTES = 1 << 20
KEPT_PLANS = 4


class CopiedListing:
    """The listing in the journal, and how much of it was copied."""

    def __init__(self) -> None:
        self.number = 0
        self.nbytes = 0
        self._digest = hashlib.blake2b()

    def add(self, part: CatalogPart) -> None:
        if part.listing != self.number or not part.offset:
            self.number, self.nbytes, self._digest = part.listing, 0, hashlib.blake2b()
        self.nbytes += len(part.data)
        self._digest.update(part.data)

    def begins(self, data: bytes) -> bool:
        """Whether the copied bytes are the start of these bytes."""
        digest = hashlib.blake2b(memoryview(data)[: self.nbytes]).digest()
        return len(data) >= self.nbytes and digest == self._digest.digest()

    def missing_parts(
        self, data: bytes, part_bytes: int = CATALOG_PART_BYTES
    ) -> Iterator[CatalogPart]:
        number, start = self.number, self.nbytes
        if not self.begins(data):
            number, start = number + 1, 0
        for at in range(start, len(data), part_bytes):
            yield CatalogPart(number, at, data[at : at + part_bytes])


class JournalWriter:
    """Writes the journal of one rank, in the thread that iterates."""

    def __init__(self, options: LoaderOptions) -> None:
        path = options.journal_file
        assert path is not None
        self._options = options
        self._path = path
        self._descriptor = -1
        self._end = 0
        self._synced = 0  # bytes that survive a power cut
        self._tag = b""
        self._plans: dict[int, PassPlan] = {}
        self._facts: dict[str, Any] = {}
        self._listing = CopiedListing()
        self._schema = TransformSchema(None)
        self._written: DeliveredBatch | None = None  # latest record of this session
        self._after = 0  # regular batches delivered since then
        self._due = 0.0  # monotonic seconds

    def open(self, step: int) -> None:
        """Start a session with this step as its first batch.

        Raises:
            ConfigError: The file is not a journal, or another loader writes it now.
        """
        if self._descriptor >= 0:
            return
        descriptor = self._descriptor = self._opened()
        # A loader may be dropped without `close`, and its lock with it.
        self._close_file = weakref.finalize(self, _close_in_process, os.getpid(), descriptor)
        try:
            self._continue(self._path.read_bytes())
            session = session_values(self._options)
            self._tag = session_tag(session)
            about = {**this_process(), "path": str(self._options.root)}
            self._append(pack_note({"session": session, "about": about, "step": step}))
        except BaseException:
            self._release()
            raise

    def _opened(self) -> int:
        try:
            descriptor = open_owned(self._path.resolve(), os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(
                f"journal: cannot open {self._path}: {error.strerror}; name a file in an "
                "existing folder",
                code="GC610",
            ) from None
        free = True
        with suppress(CachePathError):  # file systems without locks
            free = try_lock(descriptor)
        if free:
            return descriptor
        close_owned(descriptor)
        raise ConfigError(
            f"journal: another loader writes {self._path}; close it, or name another file",
            code="GC610",
        )

    def _continue(self, data: bytes) -> None:
        """Cut off a torn frame, and find facts that need not be repeated.

        Damaged bytes stay, because a reader finds the frames after them.
        """
        if not data or MAGIC.startswith(data):
            os.ftruncate(self._descriptor, 0)
            self._write(MAGIC, 0)
            self._end = len(MAGIC)
            return
        if not data.startswith(MAGIC):
            raise ConfigError(
                f"journal: {self._path} is not a journal of this version of growcache; name "
                "another file",
                code="GC610",
            )
        self._end, self._facts, self._listing = len(MAGIC), {}, CopiedListing()
        for frame, end in read_frames(data):
            self._end = end
            if isinstance(frame, Damage):
                self._facts = {}  # repeated, because these bytes may have had others
                _log.warning(
                    "journal %s is damaged in bytes %d to %d, so the earlier steps recorded "
                    "there are lost. This run is appended. growcache replay CONFIG %s lists "
                    "the lost steps",
                    *(self._path, frame.start, frame.stop - 1, self._path),
                )
            elif frame.kind == CATALOG:
                self._listing.add(unpack_catalog(frame.body))
            elif frame.kind == NOTE:
                self._facts = unpack_note(frame.body).get("cache", self._facts)
        os.ftruncate(self._descriptor, self._end)

    def begin_pass(self, plan: PassPlan, fingerprint: str | None) -> None:
        """Record a pass before its first batch. ``fingerprint`` is that of its shards."""
        if self._plans.get(plan.number) == plan:
            return  # another stage continues the pass
        if self._options.ranks.leads:
            self._note_cache(fingerprint)
        self.flush()
        self._append(pack_pass(plan, self._tag))
        self._written = None  # the next batch is of this plan
        self._plans = {n: p for n, p in self._plans.items() if n > plan.number - KEPT_PLANS}
        self._plans[plan.number] = plan

    def _note_cache(self, fingerprint: str | None) -> None:
        layout = CacheLayout(self._options.root)
        facts = cache_facts(layout)
        if {name: self._facts.get(name) for name in facts} == facts:
            return
        if facts["identity"] is not None and facts["identity"]["fingerprint"] != fingerprint:
            return  # the cache has changed; earlier facts about these shards stay
        # After the editions, because an edition is written after the objects that it counts.
        catalog = _listing_bytes(layout.catalog)
        for part in self._listing.missing_parts(catalog):
            self._append(pack_catalog(part))
            self._listing.add(part)
        more = {"listing": self._listing.number, "catalog_bytes": len(catalog)}
        self._append(pack_note({"cache": facts | more}))
        self._facts = facts | more

    def deliver(self, batch: DeliveredBatch, transform_schema: TransformSchema) -> None:
        """Record a batch before the loop gets it."""
        if transform_schema != self._schema:
            self._append(pack_note({"transform_schema": transform_schema.transformed}))
            self._schema, self._written = transform_schema, None
        if self._written is None or batch != self._later(self._after + 1):
            self._write_batch(batch)
        else:
            self.follow()

    def follow(self) -> None:
        """Record that the regular successor of the last batch is delivered."""
        self._after += 1
        if time.monotonic() > self._due:
            self.flush()

    def flush(self) -> None:
        """Write the last delivered batch, which shows how far the run came."""
        if self._after and (batch := self._later(self._after)) is not None:
            self._write_batch(batch)

    def _later(self, batches: int) -> DeliveredBatch | None:
        assert self._written is not None
        size = self._options.batch_size
        stride = size * self._options.ranks.local_world_size
        return self._written.after(batches, size, stride)

    def _write_batch(self, batch: DeliveredBatch) -> None:
        self._append(pack_batch(batch._replace(seconds=int(time.time()))))
        self._written, self._after = batch, 0
        self._due = time.monotonic() + BATCH_SECONDS

    def sync(self) -> None:
        """Sync everything written so far, so that it survives a power cut."""
        if self._descriptor < 0 or self._synced == self._end:
            return
        try:
            os.fdatasync(self._descriptor)
            if not self._synced:  # the file may be new
                fsync_directory(self._path.resolve().parent)
        except OSError as error:
            raise self._failed(error) from error
        self._synced = self._end

    def close(self) -> None:
        if self._descriptor < 0:
            return
        try:
            self.flush()
            if self._written is not None:
                self._append(pack_note({"ended": self._written.step + 1}))
            self.sync()
        finally:
            self._release()

    def _release(self) -> None:
        if self._descriptor >= 0:
            self._close_file()
        self._descriptor = -1
        self._plans, self._schema = {}, TransformSchema(None)
        self._written, self._after, self._synced = None, 0, 0

    def _append(self, frame: Frame) -> None:
        data = frame.pack()
        self._write(data, self._end)
        self._end += len(data)

    def _write(self, data: bytes, at: int) -> None:
        rest = memoryview(data)
        try:
            while rest:
                written = os.pwrite(self._descriptor, rest, at)
                rest, at = rest[written:], at + written
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> JournalError:
        with suppress(OSError):
            os.ftruncate(self._descriptor, self._end)
        self._release()
        return JournalError(
            f"cannot write the journal {self._path}: {error.strerror}; free some space, or "
            "resume with a journal on another disk",
            code="GC610",
        )


def _close_in_process(pid: int, descriptor: int) -> None:
    """Close a descriptor, except in a forked child, where the number may be another file's."""
    if pid == os.getpid():
        close_owned(descriptor)


def cache_facts(layout: CacheLayout) -> dict[str, Any]:
    """Return the facts that decide the content of the cache's shards, as JSON, without the listing."""
    identity = read_identity(layout.root)
    editions, deferrals = read_editions(layout) or [], read_deferrals(layout)
    facts = {
        "identity": None if identity is None else identity.to_values(),
        "editions": [[edition.edition, *edition.values] for edition in editions],
        "deferrals": None if deferrals is None else deferrals.to_values(),
    }
    as_read: dict[str, Any] = orjson.loads(orjson.dumps(facts))
    return as_read


def _listing_bytes(path: Path) -> bytes:
    try:
        with Catalog.open(path, readonly=True) as catalog:
            return path.read_bytes()[: catalog.whole_bytes]
    except FileNotFoundError:  # a copy of a cache has none
        return b""
