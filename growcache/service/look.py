"""A look at a source, before there is a config: some of the listing, the start of an object."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from growcache.config import SourceConfig
from growcache.errors import ObjectMissingError, TransientStoreError
from growcache.remote.store import Entry, RemoteStore, StoreReader, open_store
from growcache.service.inside import chunks_of, is_zarr, looked_inside, zarr_proposal
from growcache.service.proposal import HEAD_BYTES, Proposal, propose

LISTED_SECONDS = 2.0  # a small source is listed to its end, of a large one a part
SECONDS = 15.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen.

    Attributes:
        objects: how many were listed.
        nbytes: their sizes together.
        all: whether the listing came to its end.
        key: of the object that was looked at.
        size: of that object.
        proposal: what it could be read as.
    """

    objects: int
    nbytes: int
    all: bool
    key: str
    size: int
    proposal: Proposal


def look_at(source: SourceConfig, seconds: float = SECONDS) -> Look:
    """Return what a source looks like, within a time limit.

    Raises:
        ConfigError: a URL or option that cannot be meant.
        ObjectMissingError: nothing matches.
        TransientStoreError: no answer in time.
        StoreError: the store refuses.
    """
    return _within(lambda: _look(source, seconds), seconds)


def _look(source: SourceConfig, seconds: float) -> Look:
    store = open_store(source, concurrency=1, timeout_seconds=seconds / 3)
    try:
        return _looked(source, store)
    finally:
        asyncio.run(store.close())


def _looked(source: SourceConfig, store: RemoteStore) -> Look:
    entries, whole = _some(store.pages())
    filled = [entry for entry in entries if entry.size]
    if not filled:
        what = "only empty objects lie" if entries else "no object lies"
        raise ObjectMissingError(f"{what} at {', '.join(source.url)}")
    entry, proposal = asyncio.run(_proposed(store, filled, whole=whole))
    nbytes = sum(entry.size for entry in entries)
    return Look(len(entries), nbytes, whole, entry.key, entry.size, proposal)


async def _proposed(
    store: RemoteStore, filled: Sequence[Entry], *, whole: bool
) -> tuple[Entry, Proposal]:
    """Return the object that was looked at, and what it could be read as."""
    if is_zarr(filled):
        chunks = chunks_of(filled)
        readers = [StoreReader(store, entry) for entry in chunks]
        return (chunks or filled)[0], await zarr_proposal(readers, filled)
    entry = filled[0]
    head = bytes(memoryview(await store.read(entry, 0, min(entry.size, HEAD_BYTES))))
    folders = {folder_of(entry.key) for entry in filled} if whole else set()
    proposal = propose(entry.key, head, entry.size, sorted(folders))
    return entry, await looked_inside(proposal, StoreReader(store, entry))


def _some(pages: Iterator[list[Entry]]) -> tuple[list[Entry], bool]:
    """Return what is listed in two seconds, at least one page; and whether that is all."""
    end = time.monotonic() + LISTED_SECONDS
    entries: list[Entry] = []
    for page in pages:
        entries += page
        if time.monotonic() > end:
            return entries, False
    return entries, True


def folder_of(key: str) -> str:
    """Return the name of the folder that holds an object; empty where there is none."""
    return key.rpartition("/")[0].rpartition("/")[2]


def _within(work: Callable[[], T], seconds: float) -> T:
    """Return what the work returns, or raise what it raises, unless it takes too long."""
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((work(), None))
        except BaseException as error:  # noqa: BLE001  (raised where it is waited for)
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TransientStoreError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    assert value is not None
    return value
