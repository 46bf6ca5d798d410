"""The writer is killed at every step it makes; what readers and the next start find is right."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from growcache.cache.check import check
from growcache.cache.files import Layout, allocated_tree, number_of
from growcache.cache.formats import open_shard
from growcache.cache.identity import Identity
from growcache.cache.index import Index, read_index
from growcache.cache.leases import Lease
from growcache.cache.locks import is_held
from growcache.cache.status import read_status
from tests.cache.making import KINDS, MAX_BYTES, add, equal, opened, samples_of, write

# Four hundred steps of the largest kind: each test takes one of so many, the others are slow.
EVERY = 6

# Hundreds of forks, and a fork takes as long as its parent is large: this process has grown
# by all tests before.
LEAN = multiprocessing.get_context("forkserver")
LEAN.set_forkserver_preload([__name__])


class _Fuse:
    """Kills this process at the n-th step."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def burn(self) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)

    def before_and_after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            self.burn()
            result = function(*arguments, **named)
            self.burn()
            return result

        return step


def _lay(fuse: _Fuse) -> None:
    """Let the fuse burn at every change to the disk, and around every transaction."""
    # A kill loses nothing that was written, synced or not.
    os.fsync = fuse.before_and_after(lambda descriptor: None)
    for name in ("rename", "unlink", "mkdir", "rmdir"):
        setattr(Path, name, fuse.before_and_after(getattr(Path, name)))
    transaction = Index.transaction

    @contextmanager
    def fused(self: Index) -> Iterator[None]:
        with transaction(self):
            yield
            fuse.burn()
        fuse.burn()

    Index.transaction = fused  # type: ignore[method-assign]


def _work(root: Path, kind: Identity) -> None:
    cache = opened(root, kind)
    for number in range(3):
        add(cache, number)
    held = Lease.create(root, "job", [1])
    read = Lease.create(root, "job", [0, 2])
    read.mark_read(0, mapped=False)
    read.close()
    cache.poll_leases(1.0)
    cache.evict([0, 1])
    held.close()
    cache.poll_leases(2.0)
    cache.issue(4)
    written = [write(cache.layout, "p", n, count, kind) for n, count in ((3, 8), (4, 0))]
    cache.commit("p", written)
    cache.maintain()
    cache.close()


def _attempt(step: int, root: Path, kind: Identity) -> None:
    _lay(_Fuse(step))
    _work(root, kind)


def _killed_at(step: int, root: Path, kind: Identity) -> bool:
    """Do the work in a process of its own; False when it got to its end."""
    child = LEAN.Process(target=_attempt, args=(step, root, kind))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def _verify_dead(root: Path, where: str) -> None:
    """What readers see of the service that died is true, whatever lies about."""
    layout = Layout(root)
    assert allocated_tree(root) <= MAX_BYTES, where
    assert not is_held(layout.supervisor_lock), where
    if not layout.index.exists():
        return
    assert read_status(root).state == "stopped", where
    assert not [f for f in check(root) if f.severity == "error"], where
    _verify_shards(root)


def _verify_shards(root: Path) -> None:
    view = read_index(root)
    for row in view.shards:
        if row.samples:
            assert view.schema is not None
            shard = open_shard(
                Layout(root), row.number, row.samples, view.schema, view.cache_format
            )
            assert shard.digest() == row.digest
            assert all(map(equal, shard, samples_of(row.number, row.samples, view.schema)))
            shard.close()


def _verify_next(root: Path, kind: Identity, where: str) -> None:
    """The next service goes on where the dead one was."""
    began = time.monotonic()
    with opened(root, kind, resume_seconds=0) as cache:
        assert time.monotonic() - began < 2, "the next start must be quick"
        layout, view, totals = cache.layout, read_index(root), cache.totals()
        live = {row.number for row in view.shards}
        assert {number_of(p) for p in layout.shards.iterdir()} == live, where
        assert not list(layout.incoming.iterdir()), where
        assert not list(root.glob(".*.tmp")), where
        assert not list(layout.leases.glob("*.lease")) or cache.leases, where
        unfinished = cache.unfinished(cache.issued + 1, 1)
        assert totals.drawn_shards + len(unfinished) == cache.issued + 1, where
        assert totals.drawn == totals.samples + totals.evicted_samples, where
        assert not live & set(unfinished), where
        assert totals.lost_shards == 0, where
        assert totals.delivered in (0, 8), where
        assert allocated_tree(root) <= MAX_BYTES, where
        for number in [*unfinished, 50]:
            add(cache, number)
        assert {50, *unfinished} <= {row.number for row in read_index(root).shards}
        _verify_shards(root)
    assert not check(root), where


def _cases() -> Iterator[Any]:
    for place, kind in enumerate(KINDS):
        for first in range(1, EVERY + 1):
            usual = first == place + 1
            yield pytest.param(first, kind, marks=[] if usual else pytest.mark.slow)


@pytest.mark.parametrize(("first", "kind"), [*_cases()])
def test_killed_at_every_step(first: int, kind: str, tmp_path: Path) -> None:
    step, identity = first, KINDS[kind]
    while _killed_at(step, tmp_path / f"{step}", identity):
        _verify_dead(tmp_path / f"{step}", f"{kind} killed at step {step}")
        _verify_next(tmp_path / f"{step}", identity, f"{kind} killed at step {step}")
        step += EVERY
    assert step > 60, "the work must have that many steps at which to die"


def test_a_start_takes_no_time_in_a_large_cache(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with opened(root, max_bytes=100_000_000) as cache:
        for first in range(0, 300, 50):
            written = [write(cache.layout, "p", n, 1) for n in range(first, first + 50)]
            cache.commit("p", written)
    began = time.monotonic()
    opened(root, max_bytes=100_000_000).close()
    assert time.monotonic() - began < 2
