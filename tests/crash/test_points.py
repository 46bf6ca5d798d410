"""kill -9 at every system call by which a writer or a reader changes the disk."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.cache.making import KINDS
from tests.crash import tracing, work
from tests.crash.tracing import Call, need_strace
from tests.crash.verify import Told, told, verify, verify_dead

SOME = 3  # random points of each record in the everyday suite, by the seed of the session
SLICES = 4  # each slice of a whole record is a test
SECONDS = 900


@pytest.mark.parametrize(("life", "part"), [*work.parts_of_lives(SLICES, SECONDS)])
def test_a_writer_killed_at_a_call(life: str, part: int | None, tmp_path: Path) -> None:
    need_strace()
    lives, kind, max_bytes = work.LIVES[life]
    root = tmp_path / "cache"
    calls = tracing.record(lives, root, kind, log=tmp_path / "log", below=root)
    shutil.rmtree(root)
    points = [call for call in calls if _changes(call)]
    assert len(points) > 100, "the work makes too few calls to be killed at"
    for call in _chosen(points, part):
        marks = tracing.killed(lives, root, kind, at=call, log=tmp_path / "killed")
        verify(root, KINDS[kind], told(marks), f"{life} killed at {call}", max_bytes)
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.parametrize(
    "part", [None, pytest.param(0, marks=[pytest.mark.slow, pytest.mark.timeout(SECONDS)])]
)
def test_a_reader_killed_at_a_call(part: int | None, tmp_path: Path) -> None:
    need_strace()
    kind, root = "tfrecord-fixed", tmp_path / "cache"
    work.filled(tmp_path / "whole", kind)
    shutil.copytree(tmp_path / "whole", root)
    calls = tracing.record(work.reader, root, kind, log=tmp_path / "log", below=root)
    points = [call for call in calls if _changes(call)]
    assert len(points) > 10, "the work makes too few calls to be killed at"
    for call in _chosen(points, part, slices=1):
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "whole", root)
        tracing.killed(work.reader, root, kind, at=call, log=tmp_path / "killed")
        verify(root, KINDS[kind], Told(frozenset(range(4)), 3), f"reader killed at {call}")


def test_a_call_at_whose_entry_one_is_killed_is_not_made(tmp_path: Path) -> None:
    need_strace()
    root = tmp_path / "cache"
    calls = tracing.record(work.direct, root, "tfrecord-fixed", log=tmp_path / "l", below=root)
    shutil.rmtree(root)
    rename = next(
        call
        for call in calls
        if call.name == "renameat" and call.paths[1].endswith("0.tfrecord")
    )
    before, after = map(Path, rename.paths)
    tracing.killed(work.direct, root, "tfrecord-fixed", at=rename, log=tmp_path / "killed")
    assert before.exists()
    assert not after.exists()
    verify_dead(root, Told(issued=0), str(rename), work.DIRECT_MAX_BYTES)


def test_readers_undo_what_a_service_left_while_it_made_or_closed_the_index(
    tmp_path: Path,
) -> None:
    """The index enters and leaves WAL mode by a journal that a reader cannot roll back."""
    need_strace()
    root, kind = tmp_path / "cache", "tfrecord-fixed"
    calls = tracing.record(work.direct, root, kind, log=tmp_path / "log", below=root)
    journal = [
        call
        for call in calls
        if call.name == "unlink" and call.paths[0].endswith("-journal") and call.result == 0
    ]
    assert len(journal) == 2
    for call in journal:
        shutil.rmtree(root)
        marks = tracing.killed(work.direct, root, kind, at=call, log=tmp_path / "killed")
        assert Path(call.paths[0]).exists()
        verify(root, KINDS[kind], told(marks), str(call), work.DIRECT_MAX_BYTES)


def _changes(call: Call) -> bool:
    """Return whether the call changes the disk."""
    return not call.mark and call.result >= 0


def _chosen(points: list[Call], part: int | None, slices: int = SLICES) -> list[Call]:
    """Return a slice of the list, or some random points without `part` (pytest prints the seed)."""
    return random.sample(points, SOME) if part is None else points[part::slices]
