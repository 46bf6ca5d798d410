"""The processes that are killed: a writer with everything it does to a cache, and a reader."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from growcache.cache.cache import Cache
from growcache.cache.incoming import write_incoming
from growcache.cache.index.reader import read_index
from growcache.cache.reader_lease import Lease
from growcache.errors import CacheFullError, GrowcacheError
from tests.cache.making import KINDS, MAX_BYTES, add, make, need, opened, permit_of, write

DIRECT_SAMPLES = 560  # of 2 kB: a shard so large that it is written past the page cache
DIRECT_MAX_BYTES = 24_000_000
ENDED = 3  # the exit code of a service that says why it ends
TRIES = 3

_told = os.open("/dev/null", os.O_WRONLY)


def tell(what: str) -> None:
    """Leave a mark in the record: from now on somebody relies on this."""
    with suppress(OSError):  # refused like any other write, it stands in the record
        os.write(_told, what.encode())


def writer(root: Path, kind: str) -> None:
    """A life of a cache: shards come, are read, retire and go; some come together."""
    identity = KINDS[kind]
    cache = opened(root, identity)
    for number in range(3):
        commit(cache, [number])
    held = Lease.create(root, "job", [1])
    read = Lease.create(root, "job", [0, 2])
    read.mark_read(0, mapped=False)
    read.close()
    cache.poll_leases(1.0)
    evict(cache, [0, 1])
    held.close()
    cache.poll_leases(2.0)
    commit(cache, [3, 4], empty=[4])
    cache.maintain()
    evict(cache, [2])
    commit(cache, [5])
    cache.close()


def direct(root: Path, kind: str) -> None:
    """A shard that is written past the page cache."""
    cache = opened(root, KINDS[kind], max_bytes=DIRECT_MAX_BYTES)
    commit(cache, [0])
    cache.meta.issue(1)
    tell("issued 1")
    sidecar, files = make(1, DIRECT_SAMPLES, identity=KINDS[kind])
    permit = permit_of(1)
    assert cache.reserve(permit, need(1, DIRECT_SAMPLES, KINDS[kind]))
    cache.commit(permit, [write_incoming(cache.layout, permit, sidecar, files, direct=True)])
    tell("committed 1")
    evict(cache, [0])
    cache.close()


def stubborn(root: Path, kind: str, dies: bool) -> None:
    """The writer's life on a disk that refuses calls: a full one it waits for, as the service.

    Whatever else is refused ends it, in good order, or, if it ``dies``, by SIGKILL just then.
    """
    try:
        _persist(root, kind, dies=dies)
    except (GrowcacheError, OSError) as error:
        tell(f"ended {error}"[:200])
        os._exit(ENDED)  # an orderly end writes to pipes, which may be refused as well


def _persist(root: Path, kind: str, *, dies: bool) -> None:
    with opened(root, KINDS[kind]) as cache:
        for step in _steps(cache):
            for _ in range(TRIES):
                try:
                    step()
                    break
                except (GrowcacheError, OSError) as error:
                    if not _full(error):
                        if dies:
                            os.kill(os.getpid(), signal.SIGKILL)
                        raise
                    tell(f"waits {error}"[:200])
            else:
                return  # it stays full, and somebody stops the service


def _steps(cache: Cache) -> Iterator[Callable[[], object]]:
    for number in range(3):
        yield partial(commit, cache, [number])
    yield partial(_read, cache, 0)
    yield partial(cache.poll_leases, 1.0)
    yield partial(evict, cache, [0, 1])
    yield partial(commit, cache, [3, 4], empty=[4])
    yield cache.maintain


def _read(cache: Cache, number: int) -> None:
    with Lease.create(cache.layout.root, "job", [number]) as lease:
        lease.mark_read(number, mapped=False)


def _full(error: Exception) -> bool:
    return isinstance(error, CacheFullError) or getattr(error, "errno", 0) == errno.ENOSPC


def reader(root: Path, kind: str) -> None:
    """A reader's leases without a service: it reads, marks, releases, and sweeps its own."""
    numbers = [row.number for row in read_index(root).shards]
    with Lease.create(root, "reader", numbers) as lease:
        live = {row.number for row in read_index(root).shards}
        lease.drop(set(numbers) - live)
        lease.mark_read(numbers[0], mapped=True)
        lease.mark_read(numbers[0], mapped=False)
        with Lease.create(root, "reader", numbers[1:]) as following:
            following.mark_read(numbers[1], mapped=False)


def commit(cache: Cache, numbers: Sequence[int], *, empty: Sequence[int] = ()) -> None:
    """Issue groups and fill them, as supervisor and sampler do, with one commit for all."""
    identity = cache.meta.identity
    assert identity is not None
    counts = {number: 0 if number in empty else 8 for number in numbers}
    cache.meta.issue(numbers[-1])
    tell(f"issued {numbers[-1]}")
    permit = permit_of(numbers[0])
    wanted = sum(need(number, count, identity) for number, count in counts.items())
    assert cache.reserve(permit, wanted), "no room"
    try:
        written = [
            write(cache.layout, permit, number, count, identity)
            for number, count in counts.items()
        ]
        cache.commit(permit, written)
    except OSError:  # what the service does when a sampler says so
        cache.discard(permit, numbers)
        raise
    tell("committed " + " ".join(map(str, numbers)))


def evict(cache: Cache, numbers: Sequence[int]) -> None:
    """Retire and delete; what is retired may be gone from here on."""
    tell("evicting " + " ".join(map(str, numbers)))
    cache.evict(numbers)


def filled(root: Path, kind: str) -> None:
    """A stopped cache with four shards, for readers."""
    with opened(root, KINDS[kind]) as cache:
        for number in range(4):
            add(cache, number)


# Who dies, as what kind of cache, of what bound.
LIVES = {f"writer-{kind}": (writer, kind, MAX_BYTES) for kind in KINDS}
LIVES["direct"] = (direct, "tfrecord-fixed", DIRECT_MAX_BYTES)


def parts_of_lives(slices: int, seconds: float) -> Iterator[Any]:
    """Each life: some of its calls every day (None), all of them in slow tests."""
    for life in LIVES:
        yield pytest.param(life, None, id=f"{life}-some")
        for part in range(slices):
            marks = [pytest.mark.slow, pytest.mark.timeout(seconds)]
            yield pytest.param(life, part, marks=marks, id=f"{life}-{part}")
