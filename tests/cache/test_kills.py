"""The writer is killed at every step it makes; what readers and the next start find is right.

The steps are those of Python, and need nothing of the machine; `tests/crash` does the same
at every system call.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from growcache.cache.index.database import IndexFile
from growcache.cache.index.writer import IndexDatabase
from growcache.cache.reader_lease import Lease
from growcache.cache.side_files import Identity
from tests.cache.making import KINDS, add, opened, permit_of, write
from tests.crash.tracing import LEAN
from tests.crash.verify import Told, verify

# Four hundred steps of the largest kind: each test takes one of so many, the others are slow.
EVERY = 6
USUAL = ("tfrecord-ragged",)


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
        setattr(os, name, fuse.before_and_after(getattr(os, name)))  # pathlib calls these
    transaction = IndexDatabase.transaction

    @contextmanager
    def fused(self: IndexFile) -> Iterator[None]:
        with transaction(self):
            yield
            fuse.burn()
        fuse.burn()

    IndexDatabase.transaction = fused  # type: ignore[method-assign]


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
    cache.meta.issue(4)
    permit = permit_of(4)
    written = [write(cache.layout, permit, n, count, kind) for n, count in ((3, 8), (4, 0))]
    cache.commit(permit, written)
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


def _cases() -> Iterator[Any]:
    for place, kind in enumerate(KINDS):
        for first in range(1, EVERY + 1):
            usual = first == place + 1 and kind in USUAL
            yield pytest.param(first, kind, marks=[] if usual else pytest.mark.slow)


@pytest.mark.parametrize(("first", "kind"), [*_cases()])
def test_killed_at_every_step(first: int, kind: str, tmp_path: Path) -> None:
    step, identity = first, KINDS[kind]
    while _killed_at(step, tmp_path / f"{step}", identity):
        where = f"{kind} killed at step {step}"
        verify(tmp_path / f"{step}", identity, Told(), where)
        step += EVERY
    assert step > 60, "the work must have that many steps at which to die"


def test_a_start_takes_no_time_in_a_large_cache(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with opened(root, max_bytes=100_000_000) as cache:
        for first in range(0, 300, 50):
            written = [write(cache.layout, "p", n, 1) for n in range(first, first + 50)]
            cache.commit("p", written)
    began = time.process_time()
    opened(root, max_bytes=100_000_000).close()
    assert time.process_time() - began < 2
