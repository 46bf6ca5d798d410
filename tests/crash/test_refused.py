"""Every call by which a writer changes the disk fails once; a full disk stays full."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from growcache.cache.index.reader import read_index
from tests.cache.making import KINDS
from tests.crash import tracing, work
from tests.crash.tracing import Call, need_strace
from tests.crash.verify import Told, told, verify

SOME = 2
SECONDS = 1200
ERRORS = ("EIO", "ENOSPC", "ENOSPC+")
ALL = ("tfrecord-fixed", "npy-ragged")
SYNCS = ("fsync", "fdatasync")


def _cases() -> Iterator[Any]:
    for error in ERRORS:
        yield pytest.param("npy-ragged", error, SOME, id=f"{error}-some")
        for kind in ALL:
            marks = [pytest.mark.slow, pytest.mark.timeout(SECONDS)]
            yield pytest.param(kind, error, None, marks=marks, id=f"{error}-{kind}")


@pytest.mark.parametrize(("kind", "error", "some"), [*_cases()])
def test_a_call_is_refused(kind: str, error: str, some: int | None, tmp_path: Path) -> None:
    need_strace()
    root, log = tmp_path / "cache", tmp_path / "log"
    calls = tracing.record(work.stubborn, root, kind, False, log=log, below=root)
    points = [call for call in calls if _may_fail(call)]
    for call in points if some is None else random.sample(points, some):
        for dies in (False, True) if call.name in SYNCS and error == "EIO" else (False,):
            shutil.rmtree(root)
            code, found = tracing.refused(
                work.stubborn, root, kind, dies, at=call, error=error, log=log, below=root
            )
            marks = [each.mark for each in found if each.mark]
            where = f"{error} at {call}, dies={dies}: {marks}"
            assert code in (0, work.ENDED) or (dies and tracing.died(code)), where
            assert not _believed(found), where
            verify(root, KINDS[kind], told(marks), where)


def test_a_shard_stays_whose_row_may_be_kept(tmp_path: Path) -> None:
    """A log whose sync failed may hold the row all the same; then its files must be there."""
    need_strace()
    root, log, kind = tmp_path / "cache", tmp_path / "log", "tfrecord-fixed"
    calls = tracing.record(work.stubborn, root, kind, True, log=log, below=root)
    told_at = next(place for place, call in enumerate(calls) if call.mark == "committed 1")
    at = [call for call in calls[:told_at] if call.name == "fdatasync"][-1]
    assert at.paths[0].endswith("-wal")
    shutil.rmtree(root)
    code, _ = tracing.refused(
        work.stubborn, root, kind, True, at=at, error="EIO", log=log, below=root
    )
    assert tracing.died(code)
    assert 1 in {row.number for row in read_index(root).shards}, "the log does not hold the row"
    verify(root, KINDS[kind], Told(frozenset({0}), 1), str(at))


def _may_fail(call: Call) -> bool:
    return not call.mark and call.result >= 0 and call.name != "flock"


def _believed(calls: list[Call]) -> list[str]:
    """Return the files whose sync failed and was then believed, unwritten, at a second try.

    What could not be written is not written by a second sync, which says nothing of it.
    Not asked of the index: SQLite syncs the log again before it moves what was in it before
    into the database, and writes the database's pages anew.
    """
    failed: set[str] = set()
    found = []
    for call in calls:
        path = call.paths[0]
        if call.name not in SYNCS:
            failed.discard(path)
        elif call.result < 0:
            failed.add(path)
        elif path in failed and "index.sqlite" not in path:
            found.append(path)
    return [path for path in found if not Path(path).is_dir()]
