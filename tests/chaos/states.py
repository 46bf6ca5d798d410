"""The states of files at a moment, as seen in the directory, the index and the status."""

from __future__ import annotations

import ctypes
import os
import select
import sqlite3
import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from growcache.cache.files import CacheLayout, shard_number
from growcache.cache.index.schema import ShardState
from growcache.cache.status_model import Status

# In the order of a shard's life. "installing": renamed, but without a row. "deleting": the row
# says retired, and the file is gone.
STATES = ("reserved", "incoming", "installing", "live", "retired", "deleting", "deleted")

_EVENTS = {"incoming": 0x100, "installing": 0x80, "deleting": 0x200}  # CREATE, MOVED_TO, DELETE


@dataclass(frozen=True, slots=True)
class Observation:
    """The files, and the states that the index gives.

    Attributes:
        reserved_bytes: Reserved bytes in the last status.
        incoming: The number of files that samplers have written or are writing.
        numbers: Shards with a file in the shards directory.
        states: The state of each shard in the index; None if it could not be read.
    """

    reserved_bytes: int
    incoming: int
    numbers: frozenset[int]
    states: dict[int, int] | None


def current(seen: Observation) -> tuple[str, ...]:
    """Return the states that some file was in."""
    found = set()
    if seen.incoming:
        found.add("incoming")
    elif seen.reserved_bytes:
        found.add("reserved")
    if seen.states is not None:
        kept = {n: s for n, s in seen.states.items() if s != ShardState.DELETED}
        retired = {n for n, s in kept.items() if s == ShardState.RETIRED}
        found |= {"installing"} if seen.numbers - kept.keys() else set()
        found |= {"live"} if len(kept) > len(retired) else set()
        found |= {"retired"} if retired & seen.numbers else set()
        found |= {"deleting"} if retired - seen.numbers else set()
        found |= {"deleted"} if len(kept) < len(seen.states) else set()
    return tuple(state for state in STATES if state in found)


def observe(root: Path) -> Observation:
    """Return the present state of the cache's files."""
    layout = CacheLayout(root)
    try:
        reserved = Status.from_json(layout.status.read_bytes()).reserved_bytes
    except (OSError, ValueError, TypeError):
        reserved = 0
    return Observation(
        reserved_bytes=reserved,
        incoming=len(_names(layout.incoming)),
        numbers=frozenset(
            n for p in _names(layout.shards) if (n := shard_number(p)) is not None
        ),
        states=_states(layout),
    )


def _names(directory: Path) -> list[Path]:
    try:
        return [Path(name) for name in os.listdir(directory)]  # noqa: PTH208 - of names only
    except FileNotFoundError:
        return []


def _states(layout: CacheLayout) -> dict[int, int] | None:
    uri = f"file:{quote(str(layout.index))}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=0.2)) as connection:
            return dict(connection.execute("SELECT number, state FROM shards").fetchall())
    except sqlite3.Error:
        return None


@contextmanager
def _watching(directory: Path, mask: int) -> Iterator[int]:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_CLOEXEC)
    try:
        libc.inotify_add_watch(descriptor, os.fsencode(directory), ctypes.c_uint32(mask))
        yield descriptor
    finally:
        os.close(descriptor)


def wait_for_moment(root: Path, aim: str, seconds: float) -> bool:
    """Wait until a file enters the given state; return False if none did in time."""
    layout = CacheLayout(root)
    if aim == "reserved":
        return _wait_for_reservation(layout, seconds)
    if aim not in _EVENTS:
        return True
    directory = layout.incoming if aim == "incoming" else layout.shards
    with _watching(directory, _EVENTS[aim]) as descriptor:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([descriptor], [], [], left)[0]:
                data = os.read(descriptor, 4096)
                # A struct of four integers and a name; events of shards have a name.
                (length,) = struct.unpack_from("I", data, 12)
                if length:
                    return True
    return False


def _wait_for_reservation(layout: CacheLayout, seconds: float) -> bool:
    """Wait until space is reserved while nothing is written: the sampler is stopped."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen = observe(layout.root)
        if seen.reserved_bytes and not seen.incoming:
            return True
        time.sleep(0.02)
    return False
