"""A journal says which rows every step held: however they came, whatever was damaged, wherever it was cut."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from growcache.cache.lease_views import read_leases
from growcache.errors import ConfigError, JournalError
from growcache.loading import journal_writer, plan
from growcache.loading.delivered_rows import BatchRows, Run, Substitute, places_of
from growcache.loading.journal import CacheFacts, Journal
from growcache.loading.journal_frames import (
    BATCH,
    MAGIC,
    NOTE,
    PASS,
    CatalogPart,
    Damage,
    DeliveredBatch,
    Frame,
    pack_batch,
    pack_catalog,
    pack_note,
    pack_pass,
    read_frames,
    unpack_batch,
    unpack_catalog,
    unpack_note,
    unpack_pass,
)
from growcache.loading.journal_writer import CopiedListing
from growcache.loading.plan import PassPlan, PlannedShard
from growcache.numpy import EpochLoader
from tests.disks import small_disk
from tests.filled import Filled

MakeCache = Callable[..., Filled]
gatherers = pytest.mark.parametrize("gather", ["thread", "process"])
SHARDS, ROWS = 13, 10

numbers = st.integers(0, 2**62)
runs = st.builds(
    lambda n, start, length: Run(n, start, start + length),
    numbers,
    numbers,
    st.integers(1, 999),
)
batches = st.builds(
    DeliveredBatch,
    *(numbers, numbers, numbers, numbers),
    st.builds(
        BatchRows,
        st.lists(runs, max_size=4).map(tuple),
        st.lists(st.builds(Substitute, numbers, numbers, numbers), max_size=4).map(tuple),
        st.integers(0, 9),
    ),
)
shards = st.builds(
    PlannedShard,
    numbers,
    st.integers(0, 2**40),
    st.binary(min_size=16, max_size=16).map(bytes.hex),
)
plans = st.builds(PassPlan, numbers, st.lists(shards, max_size=5).map(tuple), numbers)
frames = st.one_of(
    st.builds(pack_batch, batches),
    st.builds(pack_pass, plans),
    st.builds(pack_note, st.dictionaries(st.text(), st.integers(0, 99), max_size=3)),
    st.builds(
        pack_catalog, st.builds(CatalogPart, st.integers(0, 9), numbers, st.binary(max_size=99))
    ),
)


@given(batches, plans)
def test_batches_and_passes_come_back(batch: DeliveredBatch, one: PassPlan) -> None:
    assert unpack_batch(pack_batch(batch).body) == batch
    assert unpack_pass(pack_pass(one).body) == one


@given(st.integers(0, 9), numbers, st.binary(max_size=99))
def test_parts_of_a_listing_come_back(listing: int, offset: int, data: bytes) -> None:
    part = CatalogPart(listing, offset, data)
    assert unpack_catalog(pack_catalog(part).body) == part


@given(st.lists(frames, max_size=6), st.data())
def test_what_is_before_a_torn_or_damaged_frame_is_read(written: list[Any], data: Any) -> None:
    packed = [frame.pack() for frame in written]
    whole = MAGIC + b"".join(packed)
    ends = [*itertools.accumulate(map(len, packed), initial=len(MAGIC))]
    cut = data.draw(st.integers(len(MAGIC), len(whole)))
    kept = sum(end <= cut for end in ends) - 1
    assert [frame for frame, _ in read_frames(whole[:cut])] == written[:kept]
    if cut < len(whole):
        flipped = bytearray(whole)
        flipped[cut] ^= 1 << data.draw(st.integers(0, 7))
        found = [frame for frame, _ in read_frames(bytes(flipped))]
        lost = written[kept]
        assert found[:kept] == written[:kept]
        if len(found) > kept:  # of a damaged length or kind all is known
            start, stop = ends[kept], ends[kept + 1]
            assert found[kept] in (lost, Damage(start, stop, lost.kind))
            assert found[kept + 1 :] == written[kept + 1 :]
        else:  # the last one, which could be torn
            assert kept == len(written) - 1


@given(st.lists(frames, max_size=6), st.data())
@settings(max_examples=60)
def test_frames_behind_many_damaged_bytes_are_found(written: list[Any], data: Any) -> None:
    packed = [frame.pack() for frame in written]
    whole = bytearray(MAGIC + b"".join(packed))
    ends = [*itertools.accumulate(map(len, packed), initial=len(MAGIC))]
    start, stop = sorted(data.draw(st.integers(len(MAGIC), len(whole))) for _ in range(2))
    whole[start:stop] = bytes(stop - start)
    found = [frame for frame, _ in read_frames(bytes(whole)) if isinstance(frame, Frame)]
    before = sum(end <= start for end in ends) - 1
    behind = sum(begin >= stop for begin in ends[:-1])
    assert found[:before] == written[:before]
    assert found[len(found) - behind :] == written[len(written) - behind :]


@given(
    st.lists(st.tuples(st.binary(max_size=30), st.booleans()), max_size=6), st.integers(1, 9)
)
def test_each_state_of_a_listing_can_be_read_again(
    steps: list[tuple[bytes, bool]], part_bytes: int
) -> None:
    """A listing grows, or is made anew, which may begin as the one before did."""
    copied, data = CopiedListing(), b""
    journal = Journal(Path("x"))
    states = []
    for more, anew in steps:
        data = more if anew else data + more
        for part in copied.missing_parts(data, part_bytes):
            journal.parts.append(unpack_catalog(pack_catalog(part).body))
            copied.add(part)
        states.append(({"listing": copied.number, "catalog_bytes": len(data)}, data))
    for facts, expected in states:
        assert journal.catalog(CacheFacts(facts)) == expected


def test_a_note_is_json() -> None:
    assert unpack_note(pack_note({"session": {"a": [1, None]}}).body) == {
        "session": {"a": [1, None]}
    }


# --- what loaders write ---


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "WINDOW_BYTES", 1)


@pytest.fixture
def filled(make_cache: MakeCache) -> Filled:
    cache = make_cache()
    cache.add(*range(SHARDS), samples=ROWS)
    return cache


def loader(cache: Filled, file: Path, **options: Any) -> EpochLoader:
    given = {"batch_size": 7, "min_samples": 1, "journal": file, **options}
    return EpochLoader(cache.root, **given)


def delivered(made: EpochLoader, epochs: int = 3) -> Iterator[np.ndarray[Any, Any]]:
    for _ in range(epochs):
        for batch in made:
            yield batch["id"].copy()


def said(file: Path, step: int, rank: int = 0) -> list[int]:
    """The names of a step's samples, as the journal has them."""
    return said_by(Journal.read(file, rank), step, file.parent)


def said_by(journal: Journal, step: int, folder: Path) -> list[int]:
    found, _ = journal.find(step)
    rows = places_of(found.batch.rows, found.plans, found.session.options(folder))
    return [int(name) for name in 1000 * rows.shards + rows.rows]


WAYS: dict[str, dict[str, Any]] = {
    "whole passes": {},
    "all of them": {"drop_last": False},
    "parts of passes": {"samples_per_epoch": 50},
    "more than a pass": {"samples_per_epoch": 151, "drop_last": False},
    "in order": {"shuffle": False},
}


@pytest.mark.parametrize("way", WAYS)
@gatherers
def test_every_step_is_said_as_it_was(
    way: str, gather: Any, filled: Filled, tmp_path: Path, small_windows: None
) -> None:
    file = tmp_path / "a.journal"
    with loader(filled, file, gather=gather, **WAYS[way]) as made:
        seen = [batch.tolist() for batch in delivered(made)]
        assert made.global_step == len(seen)
    assert Journal.read(file).steps == len(seen)
    assert [said(file, step) for step in range(len(seen))] == seen
    assert Journal.read(file).find(len(seen) - 1)[0].known
    with pytest.raises(ConfigError, match=f"step {len(seen)} is not in"):
        Journal.read(file).find(len(seen))


@pytest.mark.torch
def test_the_loader_of_torch_has_one_too(filled: Filled, tmp_path: Path) -> None:
    torch = pytest.importorskip("growcache.torch")
    file = tmp_path / "a.journal"
    options = {"batch_size": 7, "min_samples": 1, "journal": file}
    with torch.EpochLoader(filled.root, **options) as made:
        seen = [batch["id"].tolist() for batch in made]
    assert [said(file, step) for step in range(len(seen))] == seen


def test_it_takes_at_most_fifty_bytes_a_shard_and_pass(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    cache, file, passes = make_cache(), tmp_path / "a.journal", 5
    cache.add(*range(100), samples=4)
    with loader(cache, file) as made:
        list(delivered(made, 1))
        before = file.stat().st_size
        list(delivered(made, passes))
    assert (file.stat().st_size - before) / (100 * passes) < 30


@pytest.mark.mutant(
    32,
    "growcache.loading.journal_writer:JournalWriter.deliver",
    "self._written is None or batch != self._later(self._after + 1)",
    "self._written is None",
)
@gatherers
def test_damaged_shards_are_left_out_of_what_it_says(
    gather: Any, filled: Filled, tmp_path: Path, small_windows: None
) -> None:
    file = tmp_path / "a.journal"
    for number in (0, 3, 4, 9):
        filled.damage(number)
    with loader(filled, file, gather=gather, drop_last=False) as made:
        seen = [batch.tolist() for batch in delivered(made)]
    assert [said(file, step) for step in range(len(seen))] == seen


@pytest.mark.parametrize("samples_per_epoch", [None, 90])
@pytest.mark.parametrize("damaged", [(), (0, 3, 4, 9)])
def test_each_rank_has_a_journal_of_its_own(
    samples_per_epoch: int | None,
    damaged: tuple[int, ...],
    filled: Filled,
    tmp_path: Path,
    small_windows: None,
) -> None:
    file = tmp_path / "a.journal"
    for number in damaged:
        filled.damage(number)

    def read(rank: int) -> list[list[int]]:
        options = {"rank": rank, "world_size": 2, "samples_per_epoch": samples_per_epoch}
        with loader(filled, file, drop_last=False, **options) as made:
            return [batch.tolist() for batch in delivered(made)]

    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(read, range(2)))
    for rank, seen in enumerate(both):
        assert [said(file, step, rank) for step in range(len(seen))] == seen
    found, _ = Journal.read(file, 1).find(0)
    assert found.session.ranks.rank == 1


def test_a_resumed_loader_appends_and_its_steps_count(filled: Filled, tmp_path: Path) -> None:
    file = tmp_path / "a.journal"
    with loader(filled, file) as made:
        steps = delivered(made)
        first = [next(steps).tolist() for _ in range(20)]
        state = made.state_dict()
        first += [next(steps).tolist() for _ in range(9)]
    with file.open("ab") as stream:
        stream.write(b"half a frame")  # as a crash leaves it
    filled.add(100)  # the next pass is another one than before
    with loader(filled, file) as made:
        made.load_state_dict(state)
        second = [batch.tolist() for batch in itertools.islice(delivered(made), 30)]
        assert made.global_step == 50
    assert second[:9] == first[20:]
    seen = first[:20] + second
    assert [said(file, step) for step in range(50)] == seen
    _, others = Journal.read(file).find(25)
    assert len(others) == 1
    assert Journal.read(file).sessions == 2


def written_frames(file: Path) -> list[tuple[int, int, int]]:
    """Kind, start and stop of each frame."""
    found, start = list[tuple[int, int, int]](), len(MAGIC)
    for frame, stop in read_frames(file.read_bytes()):
        assert isinstance(frame, Frame)
        found.append((frame.kind, start, stop))
        start = stop
    return found


def agree(file: Path, seen: list[list[int]]) -> tuple[int, int]:
    """Hold what is said against what was seen; return how many steps are said, and lost."""
    journal, lost = Journal.read(file), 0
    for step, rows in enumerate(seen):
        try:
            assert said_by(journal, step, file.parent) == rows
        except JournalError as error:
            assert f"step {step} is lost" in str(error)  # noqa: PT017
            lost += 1
    return len(seen) - lost, lost


@pytest.mark.parametrize("kind", [NOTE, PASS, BATCH])
@pytest.mark.parametrize("damaged", [(), (0, 3, 4, 9)])
def test_a_damaged_frame_loses_its_own_steps_only(
    kind: int,
    damaged: tuple[int, ...],
    filled: Filled,
    tmp_path: Path,
    small_windows: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sessions of several passes; the second resumes in the middle of the first."""
    file, other, seen = tmp_path / "a.journal", tmp_path / "b.journal", list[list[int]]()
    for number in damaged:
        filled.damage(number)
    monkeypatch.setattr(journal_writer, "BATCH_SECONDS", 0.0)
    with loader(filled, file) as made:
        steps = delivered(made, 9)
        seen += [next(steps).tolist() for _ in range(30)]
        state = made.state_dict()
        seen += [next(steps).tolist() for _ in range(9)]
    with loader(filled, file) as made:
        made.load_state_dict(state)
        seen[30:] = [batch.tolist() for batch in itertools.islice(delivered(made, 9), 30)]
    whole = file.read_bytes()
    some = [one for one in written_frames(file) if one[0] == kind]
    for _, start, stop in (some[1], some[len(some) // 2], some[-2]):
        other.write_bytes(whole[: stop - 1] + bytes([whole[stop - 1] ^ 4]) + whole[stop:])
        most = {NOTE: 18, PASS: 18, BATCH: 1}[kind]
        assert agree(other, seen)[1] <= most, (start, stop)


class Journaled(NamedTuple):
    file: Path
    data: bytes
    seen: list[list[int]]


@pytest.fixture
def journaled(filled: Filled, tmp_path: Path, small_windows: None) -> Journaled:
    """Three sessions, two of them with another order."""
    file, seen = tmp_path / "a.journal", list[list[int]]()
    filled.damage(3)
    for seed in (0, 1, 0):
        with loader(filled, file, seed=seed) as made:
            made.load_state_dict(made.state_dict() | {"global_step": len(seen)})
            seen += [batch.tolist() for batch in itertools.islice(delivered(made), 25)]
    return Journaled(tmp_path / "b.journal", file.read_bytes(), seen)


@given(data=st.data())
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_damaged_bytes_never_give_a_step_other_rows(journaled: Journaled, data: Any) -> None:
    whole = bytearray(journaled.data)
    start = data.draw(st.integers(len(MAGIC), len(whole) - 1))
    stop = min(len(whole), start + data.draw(st.sampled_from([1, 2, 9, 60, 400, 2000])))
    whole[start:stop] = bytes(byte ^ 0x55 for byte in whole[start:stop])
    journaled.file.write_bytes(whole)
    journal = Journal.read(journaled.file)
    for step in range(0, len(journaled.seen), 3):
        with suppress(JournalError, ConfigError):
            assert said_by(journal, step, journaled.file.parent) == journaled.seen[step]


def test_who_resumes_goes_on_behind_damaged_bytes(
    filled: Filled, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.journal"
    with loader(filled, file) as made:
        first = [batch.tolist() for batch in delivered(made)]
        state = made.state_dict()
    data = bytearray(file.read_bytes())
    *_, (_, start, stop) = (one for one in written_frames(file) if one[0] == PASS)
    data[stop - 9] ^= 1
    file.write_bytes(data)
    with loader(filled, file) as made:
        made.load_state_dict(state)
        second = [batch.tolist() for batch in delivered(made, 1)]
    assert file.read_bytes().startswith(data)
    assert f"damaged in bytes {start} to {stop - 1}" in caplog.text
    read = Journal.read(file)
    assert [(one.start, one.stop) for one in read.lost] == [(36, 54)]
    seen = first + second
    assert agree(file, seen) == (len(seen) - 18, 18)


KILLED = """
import sys
from growcache.loading import plan
from growcache.numpy import EpochLoader
plan.WINDOW_BYTES = 1
with EpochLoader(sys.argv[1], batch_size=7, min_samples=1, journal=sys.argv[2]) as made:
    for _ in range(3):
        for batch in made:
            print(*batch["id"], flush=True)
"""


@pytest.mark.mutant(
    32,
    "growcache.loading.consumer:Consumer._begin_pass",
    "self._journal.begin_pass(item.plan.get(), fingerprint)",
    "pass",
)
def test_a_kill_loses_nothing_of_what_a_step_saw(
    filled: Filled, tmp_path: Path, small_windows: None
) -> None:
    file = tmp_path / "a.journal"
    command = [sys.executable, "-c", KILLED, str(filled.root), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [next(process.stdout).split() for _ in range(25)]
        os.kill(process.pid, signal.SIGKILL)
    assert [said(file, step) for step in range(25)] == [list(map(int, ids)) for ids in seen]


def test_regular_steps_between_two_frames_are_not_known_until_the_next(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.journal"
    with loader(filled, file) as made:
        steps = delivered(made)
        for _ in range(10):
            next(steps)
        assert Journal.read(file).steps == 1
        assert not Journal.read(file).find(5)[0].known
        monkeypatch.setattr(journal_writer, "BATCH_SECONDS", 0.0)
        made.load_state_dict(made.state_dict())
    assert Journal.read(file).steps == 10
    assert Journal.read(file).find(5)[0].known


def test_a_file_that_is_no_journal_stays_as_it_is(filled: Filled, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("my notes about this run")
    with loader(filled, file) as made, pytest.raises(ConfigError, match="is not a journal"):
        next(iter(made))
    assert file.read_text() == "my notes about this run"
    with pytest.raises(JournalError, match="is not a journal"):
        Journal.read(file)
    with (
        loader(filled, tmp_path / "no" / "a") as made,
        pytest.raises(ConfigError, match="folder"),
    ):
        next(iter(made))


def test_two_loaders_do_not_write_one_journal(filled: Filled, tmp_path: Path) -> None:
    file = tmp_path / "a.journal"
    with loader(filled, file) as one, loader(filled, file) as other:
        next(iter(one))
        with pytest.raises(ConfigError, match="another loader writes"):
            next(iter(other))
        one.close()
        next(iter(other))


def test_a_loader_that_is_dropped_unlocks_its_journal(filled: Filled, tmp_path: Path) -> None:
    next(iter(loader(filled, tmp_path / "a.journal")))
    gc.collect()
    with loader(filled, tmp_path / "a.journal") as other:
        next(iter(other))


def test_no_batch_comes_that_the_journal_has_no_room_for(
    filled: Filled, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 16_384) as disk:
        made = loader(filled, disk / "a.journal", drop_last=False)
        seen: list[list[int]] = []
        with made, pytest.raises(JournalError, match="free some space"):
            seen.extend(batch.tolist() for batch in delivered(made, 1000))
        found = [said(disk / "a.journal", step) for step in range(len(seen))]
    assert seen
    assert found == seen
    assert made.global_step == len(seen)  # a state that is saved now leaves none out


@pytest.mark.mutant(
    32,
    "growcache.loading.consumer:Consumer._end_epoch",
    "with self._closed_on_error():\n    self._journal.flush()",
    "self._journal.flush()",
)
def test_a_loader_whose_journal_fails_at_the_end_of_an_epoch_holds_nothing(
    filled: Filled, tmp_path: Path
) -> None:
    file = tmp_path / "a.journal"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    made = loader(filled, file)
    batches = iter(made)
    seen = [next(batches) for _ in range(18)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size, limits[1]))
    try:
        with pytest.raises(JournalError, match="cannot write the journal"):
            seen += batches
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(seen) == 18
    assert not any(lease.open for lease in read_leases(filled.root))


@pytest.mark.mutant(
    32,
    "growcache.loading.consumer:Consumer.note_state",
    "self._journal.sync()",
    "pass",
)
def test_a_state_syncs_what_was_written_before_it(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, synced, sync = tmp_path / "a.journal", list[int](), os.fdatasync

    def watched(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", watched)
    with loader(filled, file) as made:
        steps = delivered(made)
        for _ in range(10):  # regular ones, of which nothing is written
            next(steps)
            made.state_dict()
        assert synced == [file.stat().st_size]
    assert synced[1:] == [file.stat().st_size]
