"""Purge: no shard on disk holds a purged sample, whatever was cut short, and no reader loses a shard."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.cache import Cache
from growcache.cache.check import check
from growcache.cache.files import CacheLayout
from growcache.cache.generations import OlderGenerations, begin_generation
from growcache.cache.incoming import encode_shard
from growcache.cache.index.reader import read_index
from growcache.cache.index.schema import CacheTotals
from growcache.cache.index.writer import IndexDatabase, IndexWriter
from growcache.cache.lease_views import LeaseCounters
from growcache.cache.purge import without_purged
from growcache.cache.purge_list import (
    PurgedObject,
    append_to_list,
    is_purged,
    key_hash,
    keys_of_object,
    line_of,
    named_objects,
    names_purged,
    parse_line,
    read_purge_list,
)
from growcache.cache.reader_lease import Lease
from growcache.cache.shard_refetches import PurgeProgress, purge_progress, refetch_outcomes
from growcache.cache.shard_removal import ShardRemover
from growcache.cache.sidecar import Hole, Origins, SampleOrigin, Sidecar
from growcache.cache.status import write_status
from growcache.cache.status_model import Status
from growcache.cli.cli import main
from growcache.errors import CacheError
from growcache.loading.snapshot import Snapshot
from growcache.schema import Sample
from tests.cache.making import IDENTITY, KINDS, add, equal, make, opened, samples_of
from tests.forked import exits_with, fork

KEYS = ("sub-1/a.npy", "sub-1/b.npy", "sub-2/a.npy", "\udce9.npy")


def record(layout: CacheLayout, *keys: str) -> int:
    return append_to_list(layout, [PurgedObject(key_hash(key), 1) for key in keys])


def finish(cache: Cache) -> list[int]:
    """Purge as far as readers allow; return the shards that were lost."""
    cache.poll_leases(time.monotonic())
    cache.purger.look()
    lost = []
    while cache.purger.busy:
        lost += cache.purger.step(time.monotonic())
    return lost


def keys_on_disk(layout: CacheLayout) -> set[str]:
    found: set[str] = set()
    for path in layout.shards.glob("*.json"):
        sidecar = Sidecar.from_bytes(path.read_bytes())
        found.update(sidecar.origins.keys, (hole.key for hole in sidecar.holes))
    return found


Said = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def purge(capfdbinary: pytest.CaptureFixture[bytes]) -> Said:
    def command(cache: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
        capfdbinary.readouterr()
        code = main(["purge", str(cache), *arguments, "--json"])
        return code, json.loads(capfdbinary.readouterr().out)

    return command


def live(root: Path) -> dict[int, str]:
    return {row.number: row.digest for row in read_index(root).shards}


# The list


@given(st.sets(st.text(min_size=1)), st.integers(0, 2**40))
def test_a_line_is_read_as_it_was_written(keys: set[str], at: int) -> None:
    for key in keys:
        purged = PurgedObject("ab" * 32 if not key.isprintable() else key_hash(key), at)
        assert parse_line(line_of(purged).rstrip(b"\n")) == purged


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_line_with_another_byte_is_no_line(place: int, change: int) -> None:
    line = bytearray(line_of(PurgedObject(key_hash("a"), 7)).rstrip(b"\n"))
    line[place % len(line)] ^= change
    assert parse_line(bytes(line)) is None


def test_the_list_grows_by_what_is_new(tmp_path: Path) -> None:
    layout = CacheLayout(tmp_path)
    assert record(layout, *KEYS[:2]) == 2
    before = layout.purged.read_bytes()
    assert record(layout, *KEYS) == 2
    assert record(layout, *KEYS) == 0
    assert layout.purged.read_bytes().startswith(before)
    assert read_purge_list(layout).hashes == {*map(key_hash, KEYS)}
    assert not any(
        key.encode("utf-8", "surrogateescape") in layout.purged.read_bytes() for key in KEYS
    )


def test_a_line_that_was_cut_short_is_cut_away(tmp_path: Path) -> None:
    layout = CacheLayout(tmp_path)
    record(layout, KEYS[0])
    with layout.purged.open("ab") as stream:
        stream.write(b'{"sha256":"ab')
    assert read_purge_list(layout).hashes == {key_hash(KEYS[0])}
    record(layout, KEYS[1])
    assert read_purge_list(layout).hashes == {*map(key_hash, KEYS[:2])}


def test_a_damaged_list_stops_the_service(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        record(cache.layout, *KEYS)
    data = bytearray(cache.layout.purged.read_bytes())
    data[20] ^= 1
    cache.layout.purged.write_bytes(data)
    with pytest.raises(CacheError, match="line 1 is damaged"):
        opened(tmp_path)


def test_objects_are_named_by_key_by_url_and_by_lines_of_another_list() -> None:
    other = line_of(PurgedObject(key_hash("b"), 7)).decode()
    found = named_objects(["s3://bucket/x/a.npy", other, "", "c\r\n", "{a}"], 9)
    assert found == {
        PurgedObject(key_hash("x/a.npy"), 9): "x/a.npy",
        PurgedObject(key_hash("b"), 7): None,
        PurgedObject(key_hash("c"), 9): "c",
        PurgedObject(key_hash("{a}"), 9): "{a}",
    }


def test_an_object_of_another_field_is_found_by_the_first_field(tmp_path: Path) -> None:
    urls = ("s3://b/in/x_{k}.npy", "s3://b/out/y_{k}.npy")
    keys = keys_of_object(
        {"source.fields": [["x", urls[0], None, None], ["y", urls[1], None, None]]}
    )
    assert [*keys("in/x_7.npy")] == ["in/x_7.npy", "out/y_7.npy"]
    assert [*keys("another.npy")] == ["another.npy"]


JOINED = replace(
    IDENTITY,
    parts={
        "source.fields": [
            ["x", "s3://b/k/{n}/{k}", None, None],
            ["y", "s3://b/y/{n}/{k}", None, None],
        ]
    },
)


@pytest.mark.mutant(
    31,
    "growcache.cache.index.reader:known_identity",
    "return _identity_copy(layout)",
    "return None",
)
def test_objects_of_every_field_are_known_without_the_identity(tmp_path: Path) -> None:
    """The index has a copy; if that is lost too, nothing passes as not purged."""
    with opened(tmp_path, JOINED) as cache:
        add(cache, 0)
        record(cache.layout, "y/0/3")
        layout = cache.layout
    keys = keys_of_object(JOINED.parts)("k/0/3")
    assert [*keys] == ["k/0/3", "y/0/3"]
    layout.identity.unlink()
    assert is_purged(layout)("k/0/3")
    assert not is_purged(layout)("k/0/4")
    layout.identity.write_text("{")
    assert is_purged(layout)("k/0/3")
    layout.identity.unlink()
    remove_index(tmp_path)
    with pytest.raises(CacheError, match=r"identity.json is missing"):
        is_purged(layout)
    assert is_purged(layout, identity=JOINED)("k/0/3")


def remove_index(root: Path) -> None:
    for path in root.glob("index.sqlite*"):
        path.unlink()


# A shard


def shard_of(kind: str, keys: list[str], holes: list[str]) -> Sidecar:
    origins = [
        SampleOrigin(k, None, 9, 1.5, 0, 1, i, i + 1, 3, i % 2) for i, k in enumerate(keys)
    ]
    sidecar, _ = make(1, 0, identity=KINDS[kind])
    return replace(
        sidecar,
        origins=Origins.pack(origins),
        holes=tuple(Hole(key, 0, f"{key}: 404") for key in holes),
        **encode_shard(kind.split("-")[0], KINDS[kind].schema, contents(kind, len(keys))).facts,
    )


def contents(kind: str, count: int) -> list[Sample]:
    return samples_of(1, count, KINDS[kind].schema)


@pytest.mark.parametrize("kind", KINDS)
@given(
    keys=st.lists(st.sampled_from(KEYS), max_size=12),
    holes=st.lists(st.sampled_from(KEYS), max_size=3),
    purged=st.sets(st.sampled_from(KEYS)),
)
def test_a_shard_without_purged_samples_is_one_that_never_had_them(
    kind: str, keys: list[str], holes: list[str], purged: set[str]
) -> None:
    schema, samples = KINDS[kind].schema, contents(kind, len(keys))
    sidecar = shard_of(kind, keys, holes)
    found, files = without_purged(sidecar, samples, purged.__contains__)
    kept = [(k, s) for k, s in zip(keys, samples, strict=True) if k not in purged]
    expected = encode_shard(kind.split("-")[0], schema, [s for _, s in kept])
    assert [b"".join(map(bytes, f.pieces)) for f in files] == [
        b"".join(map(bytes, f.pieces)) for f in expected.files
    ]
    rows = [row for row in sidecar.origins.rows() if row.key not in purged]
    assert found == replace(
        sidecar,
        origins=Origins.pack(rows),
        holes=tuple(h for h in sidecar.holes if h.key not in purged),
        **expected.facts,
    )
    assert not names_purged(found, purged.__contains__)


@given(st.lists(st.sampled_from(KEYS), max_size=12), st.booleans())
def test_origins_are_the_rows_that_were_packed(keys: list[str], rounds: bool) -> None:
    rows = [
        SampleOrigin(k, "e", i, None, i, 9, i, i + 1, i if rounds else None, i % 2)
        for i, k in enumerate(keys)
    ]
    assert [*Origins.pack(rows).rows()] == rows


# A cache


def sums(totals: CacheTotals) -> tuple[int, int, int]:
    return totals.drawn, totals.samples, totals.evicted_samples


@pytest.mark.parametrize("kind", KINDS)
def test_samples_go_and_their_neighbours_stay(tmp_path: Path, kind: str) -> None:
    with opened(tmp_path, KINDS[kind]) as cache:
        for number in range(4):
            add(cache, number)
        before = live(tmp_path)
        record(cache.layout, "k/1/0", "k/1/7", "k/2/3", "elsewhere")
        assert finish(cache) == []
        assert {n for n, digest in live(tmp_path).items() if digest != before[n]} == {1, 2}
        assert sums(cache.totals()) == (29, 29, 0)
        assert keys_on_disk(cache.layout).isdisjoint({"k/1/0", "k/1/7", "k/2/3"})
        with Snapshot.take(tmp_path) as snapshot:
            expected = [
                (n, i)
                for n in range(4)
                for i in range(8)
                if (n, i) not in {(1, 0), (1, 7), (2, 3)}
            ]
            for at, (n, i) in enumerate(expected):
                assert snapshot.origin(at).key == f"k/{n}/{i}"
                assert equal(snapshot[at], samples_of(n, 8, KINDS[kind].schema)[i])
    assert check(tmp_path) == []


def test_a_shard_of_nothing_else_is_empty(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        add(cache, 0)
        add(cache, 1, 0)
        record(cache.layout, *(f"k/0/{i}" for i in range(8)), "gone")
        assert finish(cache) == []
        assert keys_on_disk(cache.layout) == set()
        assert cache.holes() == []
        assert (sums(cache.totals()), cache.totals().drawn_shards) == ((0, 0, 0), 2)
        assert cache.totals().holes == 0
    assert check(tmp_path) == []
    with opened(tmp_path) as cache:
        assert cache.totals().shards == 2


@pytest.mark.mutant(
    31,
    "growcache.cache.shard_removal:ShardRemover.delete_unheld",
    "held |= self.purging.rewrite",
    "",
)
def test_a_reader_keeps_the_shard_that_it_holds_and_no_new_one_has_it(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        for number in range(3):
            add(cache, number)
        with Snapshot.take(tmp_path) as snapshot:
            record(cache.layout, "k/1/0")
            assert finish(cache) == []
            assert not cache.purger.busy
            assert live(tmp_path).keys() == {0, 2}
            assert cache.returning_samples == 8
            with Snapshot.take(tmp_path) as later:
                assert len(later) == 16
            assert equal(snapshot[8], samples_of(1, 8)[0])
            cache.poll_leases(time.monotonic())
            assert equal(snapshot[9], samples_of(1, 8)[1])
        cache.poll_leases(time.monotonic())
        assert cache.purger.busy
        assert finish(cache) == []
        assert sums(cache.totals()) == (23, 23, 0)
        assert [*live(tmp_path)] == [0, 1, 2]  # its age is the same
        assert cache.returning_samples == 0


def test_what_was_evicted_with_purged_samples_is_deleted(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        add(cache, 0)
        with Snapshot.take(tmp_path):
            cache.evict([0])
            record(cache.layout, "k/0/0")
            assert finish(cache) == []
            assert cache.remover.purging.drop == {0}
        finish(cache)
        assert not cache.remover.purging.numbers
        assert keys_on_disk(cache.layout) == set()
        assert sums(cache.totals()) == (8, 0, 8)


@pytest.mark.mutant(
    31,
    "growcache.cache.shard_refetches:RefetchQueue._wants",
    "row.number in self.purging or row.number not in self.wanted",
    "row.number not in self.wanted",
)
def test_a_checkpoint_does_not_bring_purged_samples_back(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        add(cache, 0)
        add(cache, 1)
        digests = live(tmp_path)
        with Snapshot.take(tmp_path):
            record(cache.layout, "k/0/0")
            finish(cache)
            resumed = Lease.create(tmp_path, "job", [0], wishes={0: digests[0]})
            cache.poll_leases(time.monotonic())
            assert live(tmp_path).keys() == {1}
            outcome = refetch_outcomes(read_index(tmp_path), {0: digests[0]})[0]
            assert outcome.state == "refused"
            assert "purged" in outcome.reason
            resumed.close()
        finish(cache)
        assert live(tmp_path).keys() == {0, 1}


def die_with_a_lease(root: Path) -> int:
    counters = LeaseCounters(gave_state=True)
    lease = Lease.create(root, "job", [0], counters=counters)
    lease.settle()
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def test_a_dead_reader_keeps_no_purged_sample(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        add(cache, 0)
        child = fork()
        if not child:
            exits_with(lambda: die_with_a_lease(tmp_path))
        os.waitpid(child, 0)
        cache.poll_leases(time.monotonic())
        assert cache.lease_table.kept == {0}
        record(cache.layout, "k/0/0")
        finish(cache)
        assert not cache.remover.purging.numbers
        assert keys_on_disk(cache.layout) == {f"k/0/{i}" for i in range(1, 8)}


def test_a_cache_without_room_for_a_copy(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        number = 0
        while cache.bytes_left() > 120_000:
            add(cache, number)
            number += 1
        assert cache.reserve("0badcafe-99999999-0-beef", cache.bytes_left())
        record(cache.layout, *(f"k/{n}/0" for n in range(number)))
        lost = finish(cache)
        assert len(lost) <= number
        assert not any(key.endswith("/0") for key in keys_on_disk(cache.layout))
        assert cache.totals().shards + len(lost) == number
    assert check(tmp_path) == []
    with opened(tmp_path) as cache:
        assert cache.unfinished(number, 1) == sorted(lost)


def test_a_damaged_shard_is_dropped_and_drawn_again(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        add(cache, 0)
        path = cache.layout.shard(0)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        record(cache.layout, "k/0/0")
        assert finish(cache) == [0]
        assert cache.unfinished(1, 1) == [0]
        assert sums(cache.totals()) == (0, 0, 0)


@pytest.mark.mutant(
    31,
    "growcache.cache.recovery:rebuild_index",
    "_without_purged(layout, remade, identity)",
    "remade",
)
def test_a_lost_index_is_purged_again(tmp_path: Path) -> None:
    """G8: the list and the shards are enough, and no reader gets a purged shard meanwhile."""
    with opened(tmp_path) as cache:
        add(cache, 0)
        add(cache, 1)
        record(cache.layout, "k/0/0")
    remove_index(tmp_path)
    with opened(tmp_path) as cache:
        assert [*live(tmp_path)] == [1]
        finish(cache)
        assert "k/0/0" not in keys_on_disk(cache.layout)


def killed_before(step: int, work: Callable[[], int]) -> bool:
    """Run work in a child that dies before its n-th change of a file; False if it got to its end."""
    child = fork()
    if not child:
        left = step

        def fuse(owner: object, name: str) -> None:
            call = getattr(owner, name)

            def fused(*arguments: object, **named: object) -> object:
                nonlocal left
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **named)

            setattr(owner, name, fused)

        for name in ("unlink", "rename", "fsync", "ftruncate", "posix_fallocate"):
            fuse(os, name)
        fuse(IndexDatabase, "checkpoint")
        fuse(IndexDatabase, "set_meta")  # as it is written last, all else of a change is undone
        fuse(IndexWriter, "write")
        exits_with(work)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["tfrecord-ragged", pytest.param("npy-fixed", marks=pytest.mark.slow)]
)
def test_killed_at_every_step(tmp_path: Path, kind: str) -> None:
    """Each purge goes on, and ends as one that was not cut short."""

    def work(root: Path) -> int:
        with opened(root, KINDS[kind]) as cache:
            record(cache.layout, "k/0/0", "k/1/1")
            return len(finish(cache))

    filled, step, killed = tmp_path / "filled", 1, True
    with opened(filled, KINDS[kind]) as cache:
        add(cache, 0)
        add(cache, 1)
    before, whole = shard_files(filled), tmp_path / "whole"
    shutil.copytree(filled, whole)
    assert work(whole) == 0
    purged = shard_files(whole)
    while killed:
        root = tmp_path / f"{step}"
        shutil.copytree(filled, root)

        killed = killed_before(step, functools.partial(work, root))
        with opened(root, KINDS[kind]) as cache:
            recorded = len(cache.purger.list.hashes)
            lost = {*finish(cache), *cache.unfinished(2, 1)}
            keys = keys_on_disk(cache.layout)
            assert recorded in (0, 2)
            assert keys.isdisjoint({"k/0/0", "k/1/1"} if recorded else ())
            assert len(lost) <= 1
            found = shard_files(root)
            assert found.items() <= (purged if recorded else before).items()
            assert {*range(2)} - {int(name[:8]) for name in found} == lost
            assert cache.totals().samples + 7 * len(lost) == (14 if recorded else 16)
            assert cache.totals().drawn == cache.totals().samples
        assert check(root) == []
        step += 1
    assert step > 24


def shard_files(root: Path) -> dict[str, bytes]:
    shards = CacheLayout(root).shards
    found = (path for path in shards.rglob("*") if path.is_file())
    return {str(path.relative_to(shards)): path.read_bytes() for path in found}


@pytest.mark.mutant(
    31,
    "growcache.cache.generations:OlderGenerations.poll",
    "self._purge(cache, now + PURGE_SECONDS)",
    "",
)
def test_a_generation_that_is_replaced_is_purged_and_gets_empty(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        for number in range(3):
            add(cache, number)
        with Snapshot.take(tmp_path):
            record(cache.layout, "k/1/0")
            finish(cache)
            assert cache.remover.purging.rewrite == {1}
    begin_generation(tmp_path, any_owner=False)
    first, second = tmp_path / "generation-0", tmp_path / "generation-1"
    with opened(second) as newest, opened(first) as old:
        older = OlderGenerations(tmp_path, [old])
        older.follow_list(newest.layout)
        older.poll(time.monotonic())
        assert live(old.layout.root).keys() == {0, 2}
        assert "k/1/0" not in keys_on_disk(old.layout)
        record(newest.layout, "k/2/0")
        older.follow_list(newest.layout)
        record(old.layout, "k/0/0")  # by a command that began before
        while live(old.layout.root):
            older.poll(time.monotonic())
        assert read_purge_list(newest.layout).holds(["k/0/0"])
        older.end_empty()
        assert not older


def test_the_command_purges_all_generations(tmp_path: Path, purge: Said) -> None:
    """Shards of the older one are dropped, because they only give way."""
    with opened(tmp_path) as cache:
        for number in range(3):
            add(cache, number)
    begin_generation(tmp_path, any_owner=False)
    with opened(tmp_path / "generation-1") as newest:
        add(newest, 1)
    old, new = (CacheLayout(tmp_path / f"generation-{n}") for n in range(2))
    with Snapshot.take(old.root):
        code, said = purge(tmp_path, "k/1/0")
        assert (code, said["generations"], said["recorded"]) == (1, 2, 1)
        assert (said["rewritten"], said["dropped"], said["held"]) == ([1], [], [1])
        assert len(said["holders"]) == 1
    code, said = purge(tmp_path)
    assert (code, said["rewritten"], said["dropped"], said["held"]) == (0, [], [1], [])
    assert keys_on_disk(old) == {f"k/{n}/{i}" for n in (0, 2) for i in range(8)}
    assert keys_on_disk(new) == {f"k/1/{i}" for i in range(1, 8)}
    assert read_purge_list(old).hashes == read_purge_list(new).hashes == {key_hash("k/1/0")}
    third = begin_generation(tmp_path, any_owner=False)
    assert read_purge_list(third).hashes == {key_hash("k/1/0")}
    record(new, "k/1/1")  # by a command that was cut short
    assert purge(tmp_path)[0] == 0
    assert read_purge_list(third).hashes == read_purge_list(old).hashes == {
        key_hash("k/1/0"), key_hash("k/1/1")
    }  # fmt: skip


def test_what_could_not_be_looked_at_is_named(tmp_path: Path, purge: Said) -> None:
    with opened(tmp_path) as cache:
        add(cache, 0)
        add(cache, 1)
    remove_index(tmp_path)
    code, said = purge(tmp_path, "k/0/0")  # the index is made again
    assert (code, said["samples"], said["rewritten"], said["unread"]) == (0, 1, [0], [])
    remove_index(tmp_path)
    cache.layout.identity.unlink()
    code, said = purge(tmp_path, "k/1/0")
    assert (code, said["samples"], said["unread"]) == (1, 0, [0, 1])
    with opened(tmp_path) as cache:  # whose configuration is that of the shards
        finish(cache)
        assert keys_on_disk(cache.layout).isdisjoint({"k/0/0", "k/1/0"})
    code, said = purge(tmp_path)
    assert (code, said["held"], said["unread"]) == (0, [], [])


@pytest.mark.mutant(
    31,
    "growcache.cli.purge:_record",
    "append_to_list(layout, asked)",
    "append_to_list(CacheLayout(root), asked)",
)
def test_a_service_that_hangs_is_not_awaited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each generation has what was asked before anybody waits."""
    with opened(tmp_path) as cache:
        add(cache, 0)
    begin_generation(tmp_path, any_owner=False)
    with opened(tmp_path / "generation-1") as newest, opened(tmp_path / "generation-0") as old:
        told = Status(pid=os.getpid(), host=socket.gethostname(), updated_at=time.time() - 60)
        write_status(tmp_path, told)
        capsys.readouterr()
        assert main(["purge", str(tmp_path), "k/0/0"]) == 1
        text = " ".join(capsys.readouterr().err.split())
        assert "has been silent for 6" in text
        assert "are purged once the service continues" in text
        for layout in (newest.layout, old.layout):
            assert read_purge_list(layout).holds(["k/0/0"])


def test_what_was_done_is_noted_for_many_shards_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note names all that are left, so a note per shard would take bytes by their square."""
    notes, write = list[PurgeProgress](), ShardRemover.write_purging

    def noted(remover: ShardRemover, purging: PurgeProgress, *change: Any) -> None:
        notes.append(purging)
        write(remover, purging, *change)

    with opened(tmp_path) as cache:
        for number in range(12):
            add(cache, number, 2)
        record(cache.layout, *(f"k/{n}/0" for n in range(12)))
        cache.purger.look()
        monkeypatch.setattr(ShardRemover, "write_purging", noted)
        while cache.purger.busy:
            cache.purger.step(time.monotonic() + 60)
        assert not any(key.endswith("/0") for key in keys_on_disk(cache.layout))
        assert len(notes) <= 3
        assert not read_index(tmp_path).meta["purging"]["rewrite"]


@pytest.mark.mutant(
    31,
    "growcache.cache.purge:Purger._rewrite_some",
    "done, lost = (set(purging.numbers - retired.keys()), list[int]())",
    "done, lost = (set(purging.numbers - retired.keys()), list[int]())\n"
    "self._remover.write_purging(replace(purging, rewrite=frozenset()))",
)
def test_a_purge_is_said_to_be_done_once_the_last_shard_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command returns then, and whoever stops the service loses no shard."""
    seen, write = [], IndexWriter.write

    def look(writer: IndexWriter, change: Callable[[], None]) -> None:
        write(writer, change)
        view = read_index(tmp_path)
        progress = purge_progress(view.meta)
        if progress.size and not progress.numbers:
            seen.append({row.number for row in view.shards})

    with opened(tmp_path) as cache:
        add(cache, 0)
        add(cache, 1)
        record(cache.layout, "k/0/0", "k/1/1")
        monkeypatch.setattr(IndexWriter, "write", look)
        finish(cache)
    assert seen
    assert all(numbers == {0, 1} for numbers in seen)
