"""What readers see of the index: one fresh look each time, in the order of commits."""

from __future__ import annotations

import socket
import sqlite3
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from growcache.cache import commit
from growcache.cache.cache import Cache
from growcache.cache.files import CacheLayout
from growcache.cache.index import connection as index_connection
from growcache.cache.index.reader import read_index
from growcache.errors import CacheError
from tests.cache.making import add, opened
from tests.forked import ended, exits_with, fork


@pytest.mark.mutant(
    15,
    "growcache.cache.index.connection:reading_index",
    "with fork_lock(), closing(connect_read_only(layout)) as connection:\n    yield connection",
    "for connection in [connect_read_only(layout)]:\n    yield connection",
)
def test_every_look_has_a_connection_of_its_own_that_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that stays open keeps its picture, and keeps the log from being cut."""
    connect, made = index_connection.connect_read_only, []

    def noted(layout: CacheLayout) -> sqlite3.Connection:
        made.append(connect(layout))
        return made[-1]

    monkeypatch.setattr(index_connection, "connect_read_only", noted)
    with opened(tmp_path / "cache") as cache:
        add(cache, 0)
        add(cache, 1)
        assert [row.number for row in read_index(tmp_path / "cache").shards] == [0, 1]
        cache.retire([0])
        assert [row.number for row in read_index(tmp_path / "cache").shards] == [1]
        assert len(made) == 2
        for connection in made:
            with pytest.raises(sqlite3.ProgrammingError, match="closed"):
                connection.execute("SELECT 1")
        assert cache.index_writer.index.checkpoint(), "nobody keeps the log"


@pytest.mark.mutant(16, "growcache.cache.index.reader:_SEQ", '"seq"', '"drawn_at"')
def test_the_oldest_is_who_was_committed_first_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks are set back; by wall time the newest shard would be evicted first."""
    now = [5_000_000.0]
    monkeypatch.setattr(commit, "time", SimpleNamespace(time=lambda: now[0]))
    with opened(tmp_path / "cache") as cache:
        for number in (4, 2, 3):
            add(cache, number)
            now[0] -= 3600
        rows = read_index(tmp_path / "cache").shards
        assert [row.number for row in rows] == [4, 2, 3]
        assert [row.drawn_at for row in rows] == sorted(
            (row.drawn_at for row in rows), reverse=True
        )
        assert [candidate.number for candidate in cache.candidates()] == [4, 2, 3]
    with opened(tmp_path / "cache") as cache:
        assert [candidate.number for candidate in cache.candidates()] == [4, 2, 3]


def test_a_child_that_is_forked_beside_a_read_can_read(tmp_path: Path) -> None:
    """SQLite's own locks are copied as they are: without turns every second child hung."""
    stop = threading.Event()

    def reads() -> None:
        while not stop.is_set():
            read_index(tmp_path / "cache")

    with opened(tmp_path / "cache") as cache:
        add(cache, 0)
        threads = [threading.Thread(target=reads) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                child = fork()
                if child == 0:
                    exits_with(lambda: len(read_index(tmp_path / "cache").shards) != 1)
                assert ended(child)
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_what_is_missing_is_told_without_a_list_of_all_that_was_drawn(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as cache:
        for number in (0, 1, 3, 4, 8):
            add(cache, number)
        expected = [range(2, 3), range(5, 8), range(9, 12)]
        for step in (lambda: None, lambda: cache.evict([1, 3]), lambda: prune(cache)):
            step()
            assert cache.index_writer.index.unknown(12) == expected
            assert cache.index_writer.index.unknown(4) == [range(2, 3)]
            assert cache.index_writer.index.unknown(0) == []
            assert cache.never_committed([0, 2, 3, 5, 8, 10**9]) == [2, 5, 10**9]
            assert cache.unfinished(6, 2) == [1, 2, 3, 4, 5]
            assert cache.unfinished(4, 3) == [0, 1, 2, 3]
            assert cache.unfinished(5, 1) == [2]
        cache.meta.issue(10**9)  # as of a service that has drawn for years
        assert cache.index_writer.index.unknown(10**9)[-1] == range(9, 10**9)


def prune(cache: Cache) -> None:
    cache.index_writer.write(lambda: cache.index_writer.index.prune_deleted(0))


@pytest.fixture
def closed_index(short_path: Path) -> Path:
    """A cache whose index cannot be opened, as if the writer had not given it to the group yet."""
    with opened(short_path / "cache") as cache:
        add(cache, 0)
    index = CacheLayout(short_path / "cache").index
    index.rename(short_path / "saved")
    with socket.socket(
        socket.AF_UNIX
    ) as in_the_way:  # not a mode, because root opens every file
        in_the_way.bind(str(index))
    return index


def test_an_index_that_cannot_be_opened_yet_is_waited_for(closed_index: Path) -> None:
    saved = closed_index.parent.with_name("saved")
    comes = threading.Timer(0.3, saved.replace, [closed_index])
    comes.start()
    assert [row.number for row in read_index(closed_index.parent).shards] == [0]
    comes.join()


def test_an_index_that_cannot_be_opened_at_all_is_an_error(
    closed_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_connection, "OPENING_SECONDS", 0.05)
    with pytest.raises(CacheError, match="unable to open"):
        read_index(closed_index.parent)
