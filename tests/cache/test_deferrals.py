"""The record of visits that were set aside: what it says, how it is kept, and kept whole."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from growcache.cache.cache import Cache
from growcache.cache.check import check, repair
from growcache.cache.deferrals import Deferrals, ShardDeferrals, from_shards, newest
from growcache.cache.directory import clear_cache
from growcache.cache.files import CacheLayout
from growcache.cache.incoming import bytes_to_reserve, write_incoming
from growcache.cache.sidecar import Sidecar
from growcache.errors import CorruptShardError
from tests.cache.making import config, make, opened

# What happens to a cache: a group is committed without some visits, or makes up for others.
steps = st.lists(
    st.one_of(
        st.tuples(st.just("group"), st.sets(st.integers(0, 5))),
        st.tuples(st.just("makeup"), st.integers(1, 8), st.sets(st.integers(0, 7))),
        st.tuples(st.just("holes"), st.integers(0, 30), st.sets(st.integers(0, 5))),
    ),
    max_size=30,
)


def played(script: list[tuple[object, ...]]) -> tuple[Deferrals, int]:
    """The record after these steps, and the next group's number."""
    record, group = Deferrals(), 0
    for what, *rest in script:
        if what == "group":
            record = record.deferring(group, rest[0]) if rest[0] else record  # type: ignore[arg-type]
            group += 1
        elif what == "makeup" and record.pending:
            record = record.making_up(group, record.pending[: int(str(rest[0]))])
            again = rest[1] & set(range(len(record.makeups[group])))  # type: ignore[operator]
            record = record.deferring(group, again) if again else record
            group += 1
        elif what == "holes" and rest[0] < group:  # type: ignore[operator]
            holes = rest[1] - record.left_out(rest[0])  # type: ignore[operator, arg-type]
            if rest[0] in record.makeups:
                holes &= set(range(len(record.makeups[rest[0]])))  # type: ignore[index]
            record = record.retrying(rest[0], holes) if holes else record  # type: ignore[arg-type]
    return record, group


@given(steps)
def test_every_place_that_was_set_aside_is_held_once_or_waits(
    script: list[tuple[object, ...]],
) -> None:
    record, groups = played(script)
    left = {
        (group, place)
        for group in range(groups)
        if group not in record.makeups
        for place in record.left_out(group)
    }
    brought = [
        first
        for number, items in record.makeups.items()
        for at, first in enumerate(items)
        if at not in record.left_out(number)
    ]
    assert len(brought) == len(set(brought)), "no part comes twice"
    assert set(brought) | set(record.pending) == left
    assert not set(brought) & set(record.pending)
    drawn = [g for g in range(groups) if g not in record.makeups]
    assert [record.draw_number(g) for g in drawn] == [*range(len(drawn))]
    assert record.last_drawn(groups) == max(drawn, default=-1)


@given(steps)
def test_the_record_is_the_same_after_it_was_written(script: list[tuple[object, ...]]) -> None:
    record, _ = played(script)
    assert Deferrals.from_values(json.loads(json.dumps(record.to_values()))) == record


@given(steps, st.integers(0, 30))
def test_what_settled_groups_held_can_be_forgotten(
    script: list[tuple[object, ...]], stop: int
) -> None:
    record, _ = played(script)
    less = record.forgetting(stop)
    assert less.pending == record.pending
    assert less.numbers == record.numbers
    assert less.size <= record.size
    kept = {n for n, held in less.makeups.items() if held}
    assert less.deferred.keys() | less.retried.keys() <= kept | {
        group for group in range(100) if group not in record.makeups
    }, "nothing stays of what is forgotten"
    for first in record.pending:
        assert less.renews(first, 1000) == record.renews(first, 1000)
    for number in kept:
        for first in less.makeups[number]:
            assert less.renews(first, number) == record.renews(first, number)


@given(steps, st.sets(st.integers(0, 40)))
@example([("group", set()), ("holes", 0, {0}), ("makeup", 1, {0})], set())
def test_shards_alone_draw_nothing_twice(
    script: list[tuple[object, ...]], gone: set[int]
) -> None:
    record, groups = played(script)
    deferral_notes = [told_by(record, group) for group in range(groups) if group not in gone]
    last = max((group for group in range(groups) if group not in gone), default=-1)
    found = from_shards(deferral_notes, last, groups - 1)
    assert set(found.pending) <= set(record.pending)
    assert found.before(last + 1) == record.before(last + 1), (
        "numbers are known as far as shards"
    )
    if not gone:
        # Shards know of a hole that is tried again only once its makeup group was written.
        known = {p for p in record.pending if not record.renews(p, groups)}
        assert known <= set(found.pending)


def told_by(record: Deferrals, group: int) -> ShardDeferrals:
    """What the shard of a group says; holes were marked only after it was written."""
    made_up = tuple((*f, int(record.renews(f, group))) for f in record.makeups.get(group) or ())
    sidecar, _ = make(group, 0)
    return dataclasses.replace(
        sidecar,
        left_out=tuple(sorted(record.deferred.get(group, ()))),
        makeups=record.before(group),
        made_up=made_up,
    ).deferral_notes


def test_the_newest_record_counts() -> None:
    old = Deferrals().deferring(3, [1])
    new = old.making_up(5, [(3, 1)])
    assert newest([None, old, new]) == new
    assert newest([None, Deferrals()]) is None


@pytest.mark.parametrize("number", [4, 5])
def test_a_makeup_group_is_a_new_one_with_pending_parts(number: int) -> None:
    record = Deferrals().deferring(3, [1, 2]).making_up(5, [(3, 1)])
    with pytest.raises(ValueError, match="cannot make up"):
        record.making_up(number, [(3, 2)])
    with pytest.raises(ValueError, match="cannot make up"):
        record.making_up(6, [(3, 1)])


def test_what_was_a_hole_once_is_read_as_it_is_now_from_then_on() -> None:
    """In the groups before that it was read as it was listed, and is so again."""
    record = Deferrals().deferring(1, [0]).making_up(2, [(1, 0)])
    assert not record.renews((1, 0), 2)
    record = record.retrying(2, [0])
    assert record.pending == ((1, 0),)
    record = record.making_up(4, [(1, 0)])
    assert not record.renews((1, 0), 2)
    assert record.renews((1, 0), 4)


# ---------------------------------------------------------------------------- on disk

RECORD = Deferrals().deferring(1, [0, 2]).making_up(3, [(1, 2)])


def described(number: int, **columns: object) -> Sidecar:
    return dataclasses.replace(make(number, 4)[0], **columns)  # type: ignore[arg-type]


SHARDS = [
    described(0),
    described(1, left_out=(0, 2)),
    described(2),
    described(3, made_up=((1, 2, 0),)),
    described(4, makeups=(3,)),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with opened(tmp_path / "cache") as cache:
        cache.meta.set_deferrals(RECORD)
        for sidecar in SHARDS:
            number = sidecar.number
            cache.meta.issue(number)
            cache.reserve("p", bytes_to_reserve(sidecar))
            files = make(number, 4)[1]
            cache.commit("p", [write_incoming(cache.layout, "p", sidecar, files)])
    return tmp_path / "cache"


def record_of(root: Path) -> Deferrals:
    with Cache.open(root, config(root)) as cache:
        return cache.meta.deferrals


def test_the_record_outlives_the_service_and_counts_as_issued(root: Path) -> None:
    assert record_of(root) == RECORD
    assert not check(root)
    with opened(root) as cache:
        cache.meta.set_deferrals(RECORD.making_up(7, [(1, 0)]))
    with opened(root) as cache:
        assert cache.meta.issued == 7, (
            "its number is taken, whether or not a permit was given out"
        )


@pytest.mark.parametrize("harm", [b"", b"{}", None])
def test_a_record_that_is_lost_is_written_again_from_the_index(
    root: Path, harm: bytes | None
) -> None:
    path = CacheLayout(root).deferrals
    path.unlink() if harm is None else path.write_bytes(harm)
    assert [finding.mendable for finding in check(root)] == [True]
    assert [finding.severity for finding in repair(root)] == ["mended"]
    assert not check(root)
    assert record_of(root) == RECORD


def test_a_lost_index_learns_the_record_from_the_file(root: Path) -> None:
    for path in root.glob("index.sqlite*"):
        path.unlink()
    assert record_of(root) == RECORD
    assert not check(root)


@pytest.mark.parametrize("by_hand", [False, True])
def test_shards_alone_tell_the_record(root: Path, by_hand: bool) -> None:
    for path in (*root.glob("index.sqlite*"), CacheLayout(root).deferrals):
        path.unlink()
    if by_hand:
        repair(root)
    found = record_of(root)
    assert (found.numbers, found.pending) == ((3,), ((1, 0),))
    assert found.left_out(1) == {0, 2}
    assert not check(root)


def test_without_the_makeup_group_what_it_held_is_not_drawn_again(root: Path) -> None:
    for path in (*root.glob("index.sqlite*"), *root.glob("shards/00000003*")):
        path.unlink()
    copy = Path(shutil.copytree(root, root.parent / "copy"))
    CacheLayout(root).deferrals.unlink()
    assert record_of(copy) == RECORD
    assert record_of(root).pending == ()
    assert record_of(root).numbers == (3,)


def test_an_emptied_cache_has_no_record(root: Path) -> None:
    with opened(root) as cache:
        cache.evict(range(5))
    clear_cache(CacheLayout(root))
    assert not CacheLayout(root).deferrals.exists()


@pytest.mark.parametrize(
    "column", [{"left_out": (-1,)}, {"makeups": ("a",)}, {"made_up": ((1, 2, None),)}]
)
def test_a_description_with_odd_places_is_refused(column: dict[str, object]) -> None:
    sidecar = dataclasses.replace(make(3, 1)[0], **column)  # type: ignore[arg-type]
    with pytest.raises(CorruptShardError, match="cannot be read"):
        Sidecar.from_bytes(sidecar.to_bytes())


def test_a_shard_of_which_nothing_was_set_aside_says_nothing_of_it() -> None:
    assert b"makeups" not in make(3, 1)[0].to_bytes()
