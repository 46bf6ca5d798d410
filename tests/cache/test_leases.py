from __future__ import annotations

import dataclasses
import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.directory import adopt
from growcache.cache.files import CacheLayout
from growcache.cache.lease_views import (
    BEGUN,
    COUNTERS_AT,
    COUNTERS_BYTES,
    DROPPED,
    HELD,
    MAPPED,
    READ,
    WAIT_BUCKETS,
    LeaseCounters,
    LeaseView,
    protected_shards,
    read_leases,
    remove_torn_leases,
)
from growcache.cache.locks import FileLock, is_locked
from growcache.cache.reader_lease import Lease
from growcache.errors import CacheError, CacheFullError, LeasesFullError
from tests.forked import fork


@pytest.fixture
def layout(tmp_path: Path) -> CacheLayout:
    layout = CacheLayout(tmp_path / "cache")
    adopt(layout)
    return layout


def only(layout: CacheLayout) -> LeaseView:
    (view,) = read_leases(layout.root)
    return view


def test_a_lease_is_seen_as_its_reader_moves_on(layout: CacheLayout) -> None:
    with (
        FileLock.acquire(layout.supervisor_lock),
        Lease.create(layout.root, "train", [9, 3, 4, 5]) as lease,
    ):
        view = only(layout)
        assert (view.job, view.pid, view.open, view.closed) == (
            "train",
            os.getpid(),
            True,
            False,
        )
        assert view.numbers == lease.numbers == (3, 4, 5, 9)
        lease.drop([9])
        lease.mark_read(4, mapped=True)
        lease.mark_read(3, mapped=False)
        view = only(layout)
        assert list(view.states) == [READ, MAPPED, HELD, DROPPED]
        assert (view.holding(), view.used(), view.unread()) == ((4, 5), (3, 4), (5,))
        lease.mark_read(4, mapped=False)
        assert only(layout).holding() == (5,)
    view = only(layout)
    assert (view.open, view.closed, view.used()) == (False, True, (3, 4))
    assert protected_shards(view, resumable=True) == ()


def test_what_was_read_in_part_is_a_use_and_kept_for_a_reader_that_comes_back(
    layout: CacheLayout,
) -> None:
    with (
        FileLock.acquire(layout.supervisor_lock),
        Lease.create(layout.root, "train", [1, 2, 3]) as lease,
    ):
        lease.mark_begun(1)
        lease.mark_begun(2)
        lease.mark_read(2, mapped=True)
        view = only(layout)
        assert (view.holding(), view.used(), view.unread()) == ((1, 2, 3), (1, 2), (3,))
        dead = dataclasses.replace(view, open=False)
        assert protected_shards(dead, resumable=True) == (1, 3)
        assert protected_shards(dead, resumable=False) == ()


def test_without_a_supervisor_a_closed_lease_is_gone(layout: CacheLayout) -> None:
    lease = Lease.create(layout.root, "train", [1])
    lease.close()
    lease.close()
    assert lease.closed
    assert list(layout.leases.iterdir()) == []


def test_a_forgotten_lease_is_closed(layout: CacheLayout) -> None:
    lease = Lease.create(layout.root, "train", [1])
    del lease
    gc.collect()
    assert list(layout.leases.iterdir()) == []


@given(st.sets(st.integers(0, 200)))
def test_the_numbers_come_back(numbers: set[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as root:
        layout = CacheLayout(root)
        adopt(layout)
        with Lease.create(root, "train", numbers):
            assert only(layout).numbers == tuple(sorted(numbers))


@pytest.mark.parametrize(
    ("code", "expected"), [(errno.EIO, CacheError), (errno.ENOSPC, CacheFullError)]
)
def test_only_a_full_disk_is_waited_for(
    layout: CacheLayout, monkeypatch: pytest.MonkeyPatch, code: int, expected: type[CacheError]
) -> None:
    """A loader tries again for ever where there is no room for its lease."""

    def refused(path: Path, target: Path) -> Path:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(expected) as caught:
        Lease.create(layout.root, "train", [1])
    assert type(caught.value) is expected
    assert list(layout.leases.iterdir()) == []


def test_what_never_changes_is_read_once(layout: CacheLayout) -> None:
    """A supervisor looks ten times a second, and each lease may name ten thousand shards."""
    with Lease.create(layout.root, "train", range(9), wishes={9: "nine"}) as lease:
        first = only(layout)
        lease.mark_read(3, mapped=True)
        second = only(layout)
    assert first.states != second.states
    assert first.numbers is second.numbers
    assert first.wishes is second.wishes


@given(st.lists(st.sampled_from((HELD, MAPPED, READ, DROPPED, BEGUN)), max_size=4))
def test_a_lease_that_holds_nothing_says_so(states: list[int]) -> None:
    numbers = tuple(range(len(states)))
    view = LeaseView(
        "a", "train", "here", 1, "python", 0.0, True, False, numbers, bytes(states)
    )
    assert view.holds == bool(view.holding())


@pytest.mark.mutant(
    17,
    "growcache.cache.reader_lease:_make_lease",
    "try_lock(descriptor)",
    "hidden = hidden.rename(path)\ntry_lock(descriptor)",
)
def test_rule_17_a_lease_is_locked_and_whole_when_it_is_first_seen(
    layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that looks right after the rename takes it for that of a dead reader, and unlinks it."""
    seen: list[LeaseView] = []
    rename = Path.rename

    def watched(path: Path, target: Path) -> Path:
        assert read_leases(layout.root) == seen, "it was there before"
        moved = rename(path, target)
        seen.extend(read_leases(layout.root))
        return moved

    monkeypatch.setattr(Path, "rename", watched)
    with Lease.create(layout.root, "train", [1, 2], wishes={3: "three"}):
        assert [(view.open, view.numbers, view.wishes) for view in seen] == [
            (True, (1, 2, 3), {3: "three"})
        ]


def test_whoever_goes_over_to_another_lease_is_seen_with_one_of_them(
    layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is not in the directory when it is listed, the old one is over when it is read."""
    leases, scandir = [Lease.create(layout.root, "train", [1])], os.scandir

    def watched(path: Path) -> Any:
        entries = list(scandir(path))
        if len(leases) < 4:
            leases.append(Lease.create(layout.root, "train", [1]))
            leases[-2].close()
        return nullcontext(entries)

    with FileLock.acquire(layout.supervisor_lock):  # or what is over would leave no file
        monkeypatch.setattr(os, "scandir", watched)
        seen = read_leases(layout.root)
    assert [lease.numbers for lease in seen if lease.open] == [(1,)]
    leases[-1].close()


def test_rule_17_a_header_that_names_a_trillion_shards_is_no_lease(layout: CacheLayout) -> None:
    with Lease.create(layout.root, "train", [7]) as lease:
        data = lease.path.read_bytes()
        lease.path.with_name("odd.lease").write_bytes(data.replace(b"[[7,1]]", b"[[7,9**"))
        forged = data[12:].replace(b"[[7,1]]", b"[[7,1000000000000]]")
        length = (int.from_bytes(data[8:12], "little") + 12).to_bytes(4, "little")
        lease.path.with_name("huge.lease").write_bytes(data[:8] + length + forged)
        assert [view.name for view in read_leases(layout.root)] == [lease.path.stem]


def test_a_large_lease_takes_one_block(layout: CacheLayout) -> None:
    with Lease.create(layout.root, "train", range(3000)) as lease:
        assert lease.path.stat().st_blocks * 512 <= 4096


@pytest.mark.mutant(
    20,
    "growcache.cache.locks:_close_owned_in_child",
    "for descriptor in _owned_descriptors:\n    os.close(descriptor)",
    "",
)
def test_a_forked_child_neither_holds_nor_ends_the_lease(layout: CacheLayout) -> None:
    """The child outlives the parent's lease, and its copy of the object does nothing."""
    lease = Lease.create(layout.root, "train", [1, 2])
    ready, go = os.pipe(), os.pipe()
    child = fork()
    if child == 0:  # pragma: no cover
        lease.mark_read(1, mapped=False)
        lease.close()
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        view = only(layout)
        assert (view.open, view.closed, view.used()) == (True, False, ())
        with FileLock.acquire(layout.supervisor_lock):
            lease.close()
            view = only(layout)
            assert (view.open, view.closed) == (False, True), "the child keeps the lock"
        assert not is_locked(layout.supervisor_lock), "the child has the supervisor's lock"
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for descriptor in (*ready, *go):
            os.close(descriptor)


READER = """
import sys, time
from growcache.cache.reader_lease import Lease
lease = Lease.create(sys.argv[1], "train", [1, 2, 3])
lease.mark_read(1, mapped=True)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_reader_keeps_only_what_it_had_not_read(layout: CacheLayout) -> None:
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(layout.root)], stdout=subprocess.PIPE, text=True
    )
    with reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        assert only(layout).pid == reader.pid
        assert protected_shards(only(layout), resumable=True) == (1, 2, 3)
        reader.send_signal(signal.SIGKILL)
    view = only(layout)
    assert (view.open, view.closed) == (False, False)
    assert protected_shards(view, resumable=True) == (2, 3)
    assert protected_shards(view, resumable=False) == ()
    assert view.used() == (1,)


@pytest.mark.parametrize("data", [b"", b"GCLEASE1", b"GCLEASE1\xff\xff\xff\xff{}", b"x" * 99])
def test_what_is_no_lease_is_left_out(layout: CacheLayout, data: bytes) -> None:
    (layout.leases / "odd.lease").write_bytes(data)
    (layout.leases / ".hidden.tmp").write_bytes(data)
    assert read_leases(layout.root) == []


def test_a_probe_does_not_look_like_a_holder(layout: CacheLayout) -> None:
    assert not is_locked(layout.supervisor_lock)
    with FileLock.acquire(layout.supervisor_lock):
        assert is_locked(layout.supervisor_lock)
    with FileLock.acquire(layout.supervisor_lock, shared=True):
        assert not is_locked(layout.supervisor_lock)


@pytest.mark.parametrize("data", [b"", bytes(200)])
def test_a_start_removes_what_a_power_cut_left_of_a_lease(
    layout: CacheLayout, data: bytes
) -> None:
    torn = layout.leases / f"{'f' * 32}.lease"
    torn.write_bytes(data)
    with Lease.create(layout.root, "job", [1]) as lease:
        remove_torn_leases(layout)
        assert set(layout.leases.iterdir()) == {lease.path}


def of_the_first_version(lease: Lease) -> bytes:
    """What an earlier growcache would have written: no counters, nor their length."""
    data = lease.path.read_bytes()
    return b"GCLEASE1" + data[8:12] + data[COUNTERS_AT + COUNTERS_BYTES :]


def test_a_lease_of_the_first_version_protects_as_it_did(layout: CacheLayout) -> None:
    with Lease.create(layout.root, "train", [1, 2, 3]) as lease:
        lease.mark_read(1, mapped=True)
        old = lease.path.with_name("old.lease")
        old.write_bytes(of_the_first_version(lease))
        with old.open() as reader:
            fcntl.flock(reader, fcntl.LOCK_EX)
            (view,) = (one for one in read_leases(layout.root) if one.name == "old")
            assert (view.open, view.holding(), view.used()) == (True, (1, 2, 3), (1,))
            assert view.delivered is None
        (view,) = (one for one in read_leases(layout.root) if one.name == "old")
        assert not view.open
        assert view.resumable, "whether it gave a state nobody knows"


def test_a_service_that_would_not_heed_this_version_is_refused(layout: CacheLayout) -> None:
    with FileLock.acquire(layout.supervisor_lock):
        layout.supervisor_lock.write_text('{"pid": 7, "host": "here", "command": "growcache"}')
        with pytest.raises(CacheError, match="earlier growcache"):
            Lease.create(layout.root, "train", [1])
        assert list(layout.leases.iterdir()) == []
    Lease.create(layout.root, "train", [1]).close()


def test_counters_are_noted_in_place_and_at_the_end(layout: CacheLayout) -> None:
    with FileLock.acquire(layout.supervisor_lock):
        lease = Lease.create(layout.root, "train", [1], counters=LeaseCounters(counts=True))
        assert only(layout).delivered == 0
        lease.count(5)
        lease.count(7)
        lease.close()
        assert only(layout).delivered == 12


@given(
    st.builds(
        LeaseCounters,
        *(st.booleans(), st.booleans(), st.floats(0, 1e12)),
        *[st.integers(0, 2**40)] * 5,
        st.floats(0, 1e12),
        st.lists(st.integers(0, 2**40), min_size=WAIT_BUCKETS, max_size=WAIT_BUCKETS),
    )
)
def test_counters_come_back(counters: LeaseCounters) -> None:
    assert LeaseCounters.unpack(counters.pack()) == counters
    assert LeaseCounters.unpack(counters.pack().ljust(COUNTERS_BYTES, b"\0")) == counters


@given(st.binary(max_size=COUNTERS_BYTES))
def test_counters_of_any_bytes_are_sound_or_refused(data: bytes) -> None:
    try:
        found = LeaseCounters.unpack(data)
    except ValueError:
        return
    assert 0 <= found.delivered < 2**53
    assert found.wait_seconds >= 0


def test_leases_keep_to_their_room(layout: CacheLayout) -> None:
    made = [Lease.create(layout.root, "train", [1], max_bytes=8192) for _ in range(2)]
    with pytest.raises(LeasesFullError, match="2 snapshots are held"):
        Lease.create(layout.root, "train", [1], max_bytes=8192)
    made.pop().close()
    Lease.create(layout.root, "train", [1], max_bytes=8192).close()
    made.pop().close()


def test_more_refetches_than_all_leases_have_room_for_are_refused(layout: CacheLayout) -> None:
    """To wait for other readers would not help."""
    wishes = dict.fromkeys(range(300), "f" * 32)
    with pytest.raises(
        CacheError, match=r"asks for 300 shards .* raise cache.max_bytes, or continue"
    ):
        Lease.create(layout.root, "train", [], wishes=wishes, max_bytes=8192)
    Lease.create(layout.root, "train", [], wishes=wishes, max_bytes=16384).close()
