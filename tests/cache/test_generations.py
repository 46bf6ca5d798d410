"""A replacement is killed at every step by which it changes the disk; the next start goes on by itself."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from growcache.cache.cache import Cache
from growcache.cache.check import check
from growcache.cache.files import allocated_tree, generation_numbers
from growcache.cache.generations import begin_generation, makes_room_for_next
from growcache.cache.index.reader import read_index
from growcache.cache.lease_views import LeaseCounters, read_leases
from growcache.cache.reader_lease import Lease
from growcache.cache.side_files import Edition
from growcache.cache.status import read_status
from growcache.cli.clear import release_readers
from growcache.cli.export import export_cache
from growcache.cli.peek import peek_cache
from growcache.errors import CacheMissingError
from growcache.loading.snapshot import Snapshot
from growcache.loading.waiting import chosen_generation
from growcache.sampling.replacement import run_replacing
from tests.cache.making import (
    MAX_BYTES,
    OTHER,
    SCHEMA,
    add,
    config,
    equal,
    opened,
    samples_of,
)
from tests.cache.test_kills import _Fuse, _lay
from tests.crash.tracing import LEAN

OLD, NEW = (0, 1, 2), (10, 11)  # shards
BOUND = 2 * MAX_BYTES
EVERY = 7


def filled(root: Path) -> None:
    with opened(root, max_bytes=BOUND) as cache:
        for number in OLD:
            add(cache, number)


def replace(root: Path) -> None:
    """Replace the samples to the end, or go on with that, as the service does."""

    def run_on(cache: Cache) -> bool:
        cache.set_identity(OTHER)
        if not cache.meta.editions:
            cache.meta.add_edition(Edition(0, 100, "digest", 0))
        for number in NEW:
            if number not in cache.shards.live:
                add(cache, number)
        cache.older.give_way(BOUND)
        cache.older.poll(time.monotonic())
        cache.older.end_empty()
        cache.count_older()
        return True

    assert run_replacing(config(root, max_bytes=BOUND), run_on, lambda cache: None)


def _attempt(step: int, root: Path) -> None:
    _lay(_Fuse(step))
    replace(root)


def _killed_at(step: int, root: Path) -> bool:
    child = LEAN.Process(target=_attempt, args=(step, root))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def read_by_a_loader(root: Path) -> list[int]:
    """Return the shards that a loader finds, every sample of which is right."""
    with Snapshot.take(chosen_generation(root, 1, 1, running=False)) as snapshot:
        numbers = [row.number for row in snapshot.shards]
        expected = [sample for n in numbers for sample in samples_of(n, 8, SCHEMA)]
        found = [snapshot[i] for i in range(len(snapshot))]
        assert all(equal(a, b) for a, b in zip(found, expected, strict=True))
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    range(1, EVERY + 1),
)
def test_killed_at_every_step_of_a_replacement(first: int, tmp_path: Path) -> None:
    step = first
    while True:
        root = tmp_path / f"{step}"
        filled(root)
        if not _killed_at(step, root):
            break
        where = f"killed at step {step}"
        assert allocated_tree(root) <= BOUND, where
        assert read_status(root).state == "stopped", where
        numbers = read_by_a_loader(root)
        assert set(numbers) <= set(OLD) or set(numbers) <= set(NEW), where
        began = time.monotonic()
        replace(root)
        assert time.monotonic() - began < 10, where  # five times the goal
        assert generation_numbers(root) == [1], where
        assert sorted(read_by_a_loader(root)) == [*NEW], where
        assert [one for one in check(root) if one.severity == "error"] == [], where
        assert not list((root / "shards").iterdir()), where
        step += EVERY
    assert step > 60, "a replacement must have that many steps at which to die"


# --- what commands look at while there are two generations ---


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A cache whose new generation has a marker, but neither index nor sample yet."""
    root = tmp_path / "cache"
    filled(root)
    begin_generation(root, any_owner=False)
    return root


@pytest.mark.mutant(4, "growcache.cache.files:_resolved_root", "(p / INDEX).exists()", "True")
def test_a_generation_without_an_index_is_not_looked_at_yet(two: Path) -> None:
    assert generation_numbers(two) == [0, 1]
    assert read_status(two).samples == 24
    assert len(read_index(two).shards) == 3


def begin_next(root: Path) -> Cache:
    cache = Cache.open(root / "generation-1", config(root, max_bytes=BOUND))
    cache.set_identity(OTHER)
    return cache


def _die_with_leases(root: Path) -> None:
    """Leave leases of a reader that gave a state, as kill -9 does."""
    paths = (root / "generation-0", root / "generation-1")
    gave = LeaseCounters(gave_state=True)
    kept = [Lease.create(path, "job", OLD, counters=gave) for path in paths]
    os.kill(os.getpid(), signal.SIGKILL)
    assert kept


def test_leases_of_all_generations_are_listed_and_released(two: Path) -> None:
    with begin_next(two):
        pass
    child = LEAN.Process(target=_die_with_leases, args=(two,))
    child.start()
    child.join()
    assert sorted(lease.generation for lease in read_status(two).leases) == [0, 1]
    text, code = release_readers(two, None)
    assert (code, "6 shards that 2 dead readers" in text) == (0, True)
    for path in (two / "generation-0", two / "generation-1"):
        assert not any(lease.holds and not lease.closed for lease in read_leases(path))


def test_peek_and_export_show_what_a_loader_would_take(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with begin_next(two) as cache:
        peek_cache(two, None, json=True)
        shown = json.loads(capsys.readouterr().out)
        assert (shown["generation"], shown["samples"]) == (0, 24)
        text = export_cache(two, two.parent / "old")
        assert text.endswith(f"This is generation 0; another one is {two / 'generation-1'}.")
        add(cache, 10)
        peek_cache(two, None, json=True)
        shown = json.loads(capsys.readouterr().out)
        assert (shown["generation"], shown["samples"]) == (1, 8)
    assert len(read_index(two.parent / "old").shards) == 3


# --- room for the next generation ---


def test_room_for_the_next_generation_comes_when_readers_let_go(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    filled(root)
    with opened(root, max_bytes=BOUND) as cache, Snapshot.take(root) as held:
        need = BOUND - cache.bytes_used + 1
        assert not makes_room_for_next(cache, need)
        assert not makes_room_for_next(cache, need)
        held.close()
        while not makes_room_for_next(cache, need):
            cache.poll_leases(time.monotonic())
        assert not cache.totals().retired_shards


def test_an_index_of_one_generation_takes_no_snapshot_of_the_next(tmp_path: Path) -> None:
    """The path of a cache led to its first generation when the index was read."""
    filled(tmp_path)
    view = read_index(tmp_path)
    second = begin_generation(tmp_path, any_owner=False)
    with Snapshot.take(tmp_path, view=view) as snapshot:  # the second has no index yet
        assert len(snapshot.shards) == len(OLD)
    with opened(second.root, max_bytes=BOUND) as cache:
        for number in OLD:
            add(cache, number)
    with pytest.raises(CacheMissingError, match="replaced"):
        Snapshot.take(tmp_path, view=view)
