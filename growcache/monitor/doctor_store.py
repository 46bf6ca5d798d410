"""Measure a store as a service would use it, for a few seconds and a limited number of bytes."""

from __future__ import annotations

import asyncio
import os
import random
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from statistics import median
from typing import Any

import numpy as np

from growcache.config import Config
from growcache.config_source import SourceConfig
from growcache.errors import (
    AccessError,
    FormatError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from growcache.formats import is_user_format, open_source
from growcache.formats.base import ObjectFormat, Visit, measure_object, read_partly
from growcache.monitor.doctor_facts import StoreFacts, StoreTrouble
from growcache.monitor.store_address import store_address
from growcache.sampling.sizing import Partitioning
from growcache.sampling.sources import open_listings
from growcache.schema import sample_bytes
from growcache.store.contract import Entry, StoredObject
from growcache.store.opening import open_store
from growcache.store.store import RemoteStore
from growcache.store.urls import parse_url
from growcache.threads import DaemonThread

WINDOW_SECONDS = 4.0
GRACE_SECONDS = 4.0  # for the reads in flight at its end
MOST_BYTES = 256_000_000
MOST_WHOLE_BYTES = 64_000_000  # of an object that is read whole; larger ones are read in pieces
LISTING_SECONDS = 10.0  # to the first page
MORE_LISTING_SECONDS = 1.0
MOST_LISTED = 20_000
TIMEOUT_SECONDS = 5.0  # without progress, which is less than a service waits
DATE_SECONDS = 5.0
READS_ALONE = 4
MOST_FAILURES = 20
LEAST_PIECE_BYTES, PIECE_BYTES = 1 << 14, 1 << 20


@dataclass
class _Counts:
    """Reports of the store's client during the measurement."""

    nbytes: int = 0
    refused: int = 0

    def add_bytes(self, nbytes: int) -> None:
        self.nbytes += nbytes

    def note_retry(self, error: BaseException) -> None:
        self.refused += is_refusal(error)


def measure_store(config: Config, source: SourceConfig, share: float = 1.0) -> StoreFacts:
    """Return the facts about a store, including its errors."""
    facts = StoreFacts(", ".join(parse_url(url).url for url in source.url[:2]), share)
    if source.dataset is not None:
        return replace(facts, message="a Dataset reads by itself: its store is not measured")
    # A wrong option is a ConfigError, rather than a finding.
    object_format = open_source(source)
    thread = DaemonThread("doctor")
    measured = thread.submit(lambda: _measure(config, source, object_format, facts))
    thread.close(wait=False)
    if measured.wait(LISTING_SECONDS + 4 * (WINDOW_SECONDS + GRACE_SECONDS)):
        return measured.result()
    return replace(facts, trouble="unreachable", message="no answer in time")


def _measure(
    config: Config, source: SourceConfig, object_format: ObjectFormat, facts: StoreFacts
) -> StoreFacts:
    counts = _Counts()
    skew = _clock_skew(source)
    facts = replace(facts, clock_skew_seconds=skew)
    try:
        entries, seconds = _list_some(source, counts)
        filled = [entry for entry in entries if entry.size]
        facts = replace(facts, listing_seconds=seconds, objects=len(entries))
        if not filled:
            found = "found only empty objects" if entries else "found no object"
            return replace(facts, trouble="empty", message=f"{found} at {facts.url}")
        store = open_store(
            source,
            concurrency=config.sampling.samplers * config.sampling.concurrency,
            timeout_seconds=min(config.sampling.timeout_seconds, TIMEOUT_SECONDS),
            on_retry=counts.note_retry,
            on_bytes=counts.add_bytes,
        )
        return asyncio.run(_StoreProbe(config, store, object_format, filled, counts).run(facts))
    except (StoreError, FormatError) as error:
        return replace(facts, **trouble_of(error, counts.refused))


def is_refusal(error: BaseException) -> bool:
    """Whether a store answered that it is overloaded, even for a read that failed permanently."""
    last = error.__cause__ or error
    return isinstance(last, TransientStoreError) and last.throttled and last.status is not None


def trouble_of(error: Exception, refused: int = 0) -> dict[str, Any]:
    """Return the kind of an error and its message, as fields of `StoreFacts`."""
    kind: StoreTrouble = "unreadable"
    if isinstance(error, ObjectMissingError):
        kind = "missing"
    elif isinstance(error, AccessError):
        kind = "refused"
    elif isinstance(error, TransientStoreError):
        kind = "throttled" if refused or is_refusal(error) else "unreachable"
    return {"trouble": kind, "message": str(error), "throttled": refused}


def _list_some(source: SourceConfig, counts: _Counts) -> tuple[list[Entry], float]:
    """Return some objects and the seconds to the first page."""
    listings = open_listings(
        (source,), timeout_seconds=TIMEOUT_SECONDS, on_retry=counts.note_retry
    )
    entries: list[Entry] = []
    began, first = time.monotonic(), None
    for page in listings.pages():
        now = time.monotonic()
        first = now if first is None else first
        entries += page
        if now - first > MORE_LISTING_SECONDS or len(entries) >= MOST_LISTED:
            break
    return entries, (time.monotonic() if first is None else first) - began


@dataclass
class _Window:
    """Reads that are in flight together, and their counts."""

    ends: float
    reads: int = 0
    samples: int = 0
    seconds: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    unanswered: Counter[str] = field(default_factory=Counter)
    last_read: float = 0.0
    _named: dict[type, str] = field(default_factory=dict)

    def fail(self, error: Exception) -> None:
        if is_refusal(error):
            return  # the store counts its refusals
        counts = self.unanswered if isinstance(error, TransientStoreError) else self.failures
        counts[self._named.setdefault(type(error), str(error))] += 1

    def count(self, samples: int, began: float) -> None:
        self.reads += 1
        self.samples += samples
        self.last_read = time.monotonic()
        self.seconds.append(self.last_read - began)


@dataclass(frozen=True)
class _Reading:
    """A way to read objects: visits of the format, or pieces of bytes if visits are impossible."""

    cut: Partitioning | None  # None: pieces
    piece_bytes: int = PIECE_BYTES
    samples_per_byte: float | None = None  # of pieces
    sample_bytes: float | None = None
    samples: float = 1.0  # of one read
    nbytes: int = 0  # of one read
    seconds: float = 0.0  # of one read alone


class _StoreProbe:
    def __init__(
        self,
        config: Config,
        store: RemoteStore,
        object_format: ObjectFormat,
        entries: Sequence[Entry],
        counts: _Counts,
    ) -> None:
        self._config = config
        self._store = store
        self._format = object_format
        self._entries = entries
        self._counts = counts
        self._random = random.Random(0)
        self._concurrency = config.sampling.samplers * config.sampling.concurrency

    async def run(self, facts: StoreFacts) -> StoreFacts:
        try:
            first_byte = await self._first_byte_seconds()
            facts = replace(facts, first_byte_seconds=first_byte)
            reading = self._fitting(await self._read_alone(), first_byte)
            return await self._read_together(facts, reading)
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._store.close()

    async def _first_byte_seconds(self) -> float:
        """Return the latency of one byte.

        The first read opens the connection and does not count.
        """
        found = []
        for _ in range(READS_ALONE + 1):
            began = time.monotonic()
            await self._store.read(self._any(), 0, 1)
            found.append(time.monotonic() - began)
        return median(found[1:])

    def _any(self) -> Entry:
        return self._random.choice(self._entries)

    async def _read_alone(self) -> _Reading:
        """Read a few visits one after another, or pieces if visits are impossible."""
        if not self._can_visit():
            return await self._read_piece_alone()
        entry = self._any()
        reader = StoredObject(self._store, entry)
        measure = await measure_object(self._format, reader)
        setting = self._config.sampling.samples_per_object
        together = max(1, measure.together) if setting == "auto" else setting
        whole = self._format.reads_whole(entry)
        cut = Partitioning(together, measure.stride_bytes, measure.overhead_bytes, whole)
        window, before = _Window(0.0), self._counts.nbytes
        sizes: list[int] = []
        for _ in range(READS_ALONE):
            sizes += await self._visit(cut, window)
        if not window.reads:
            raise FormatError(next(iter(window.failures), "it yields no sample"))
        return _Reading(
            cut,
            samples_per_byte=window.samples / max(1, self._counts.nbytes - before),
            sample_bytes=sum(sizes) / len(sizes) if sizes else None,
            samples=window.samples / window.reads,
            nbytes=(self._counts.nbytes - before) // window.reads,
            seconds=median(window.seconds),
        )

    def _can_visit(self) -> bool:
        source = self._store.source
        if source.fields or is_user_format(source.format) or not self._format.listed:
            return False
        largest = max(self._entries, key=lambda entry: entry.size)
        return not self._format.reads_whole(largest) or largest.size <= MOST_WHOLE_BYTES

    async def _read_piece_alone(self) -> _Reading:
        found = []
        for _ in range(READS_ALONE):
            began = time.monotonic()
            data = await self._store.read(self._any(), 0, PIECE_BYTES)
            found.append((time.monotonic() - began, memoryview(data).nbytes))
        seconds, nbytes = median(one[0] for one in found), int(median(one[1] for one in found))
        return _Reading(None, nbytes, nbytes=nbytes, seconds=seconds)

    def _fitting(self, reading: _Reading, first_byte: float) -> _Reading:
        """Return reads that end within the window on any link, with smaller pieces if needed."""
        link = reading.nbytes / max(reading.seconds - first_byte, 0.001)
        small = reading.nbytes <= LEAST_PIECE_BYTES
        if small or reading.nbytes * self._concurrency <= link * WINDOW_SECONDS:
            return reading
        piece = int(link * WINDOW_SECONDS / (2 * self._concurrency))
        piece = max(LEAST_PIECE_BYTES, min(piece, PIECE_BYTES, reading.nbytes))
        return replace(reading, cut=None, piece_bytes=piece)

    async def _visit(self, cut: Partitioning, window: _Window) -> list[int]:
        """Read one visit of a random object; return the bytes of its samples."""
        entry = self._any()
        parts = int(cut.parts(np.array([entry.size]))[0])
        visit = Visit(self._random.randrange(parts), parts, 0, self._random.getrandbits(32))
        began = time.monotonic()
        try:
            found, _ = await read_partly(self._format, StoredObject(self._store, entry), visit)
        except (StoreError, FormatError) as error:
            window.fail(error)
            return []
        window.count(len(found), began)
        return [sample_bytes(sample) for sample, _, _ in found[:8]]

    async def _piece(self, nbytes: int, window: _Window) -> None:
        entry = self._any()
        start = self._random.randrange(max(1, entry.size - nbytes + 1))
        began = time.monotonic()
        try:
            await self._store.read(entry, start, start + nbytes)
        except StoreError as error:
            window.fail(error)
        else:
            window.count(0, began)

    async def _read_together(self, facts: StoreFacts, reading: _Reading) -> StoreFacts:
        self._store.take_answers()
        began, cpu, before = time.monotonic(), time.process_time(), self._counts.nbytes
        window = _Window(began + WINDOW_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(WINDOW_SECONDS + GRACE_SECONDS):
                await asyncio.gather(
                    *(self._keep_reading(reading, window) for _ in range(self._concurrency))
                )
        elapsed = max((window.last_read or time.monotonic()) - began, 1e-6)
        if not window.reads and not window.failures and not self._counts.refused:
            window.unanswered[f"none ended within {elapsed:.0f} s"] += self._concurrency
        nbytes = self._counts.nbytes - before
        samples: float | None = window.samples
        if reading.cut is None:
            per_byte = reading.samples_per_byte
            samples = None if per_byte is None else nbytes * per_byte
        return replace(
            facts,
            read_seconds=reading.seconds,
            loaded_read_seconds=median(window.seconds) if window.seconds else None,
            concurrency=self._concurrency,
            reads=window.reads,
            bytes=nbytes,
            seconds=elapsed,
            samples=samples,
            sample_bytes=reading.sample_bytes,
            read_bytes=reading.nbytes,
            samples_per_read=reading.samples,
            cpu_share=min(1.0, (time.process_time() - cpu) / elapsed),
            throttled=self._store.take_answers()[1],
            failures=dict(window.failures),
            unanswered=dict(window.unanswered),
        )

    async def _keep_reading(self, reading: _Reading, window: _Window) -> None:
        most = self._counts.nbytes + MOST_BYTES
        while time.monotonic() < window.ends and self._counts.nbytes < most:
            if window.failures.total() + window.unanswered.total() >= MOST_FAILURES:
                return
            if reading.cut is None:
                await self._piece(reading.piece_bytes, window)
            else:
                await self._visit(reading.cut, window)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect, because every answer has a date."""


def _clock_skew(source: SourceConfig) -> float | None:
    """Return the store's clock minus this machine's, or None.

    It comes from the Date of an answer to a request without credentials.
    """
    address = store_address(parse_url(source.url[0]), source.storage_options, os.environ)
    if address is None or not address.startswith(("http://", "https://")):
        return None
    request = urllib.request.Request(address, method="HEAD")
    before = time.time()
    try:
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=DATE_SECONDS) as answer:
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:  # a refusal has a date, too
        date = error.headers.get("Date")
        error.close()
    except (OSError, ValueError):  # the reads show the cause
        return None
    return skew_of(date, before, time.time())


def skew_of(date: str | None, before: float, after: float) -> float | None:
    """Return the difference of a clock. A Date has whole seconds, so less than one counts as 0.

    >>> skew_of("Thu, 01 Jan 1970 00:01:40 GMT", 100.2, 100.4), skew_of("soon", 0, 0)
    (0.0, None)
    """
    try:
        there = parsedate_to_datetime(date or "").timestamp()
    except (ValueError, OverflowError):
        return None
    if before - 1 <= there <= after + 1:
        return 0.0
    return there + 0.5 - (before + after) / 2
