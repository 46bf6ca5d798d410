"""Between the record of what was set aside and the groups that make up for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from growcache.cache.cache import Cache
from growcache.cache.deferrals import Deferrals
from growcache.sampling.failed_visits import Makeups
from growcache.sampling.fill import none_came
from growcache.sampling.messages import PartVisit, Permit
from growcache.sampling.sampler_memory import VisitResult
from growcache.store.contract import Entry
from tests.sampling.test_made_up import SIZING, Play


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    found = Play(tmp_path / "c", "one source")

    def set_deferrals(record: Deferrals, *, retried: int = 0) -> None:
        found.cache.meta.deferrals = record

    found.cache.meta.set_deferrals = set_deferrals
    found.lists(60)
    yield found
    found.catalog.close()


def made(play: Play, most_makeups: int = 9) -> Makeups:
    cache = cast(Cache, play.cache)
    return Makeups(cache, play.drawing, SIZING, (), 10, most_makeups)


def make_up(play: Play, found: Makeups) -> None:
    """Issue the next makeup group, and commit it."""
    draw = found.next(play.groups, idle=True)
    assert draw is not None
    found.record(draw)
    play.commit(draw, set())
    visits = play.drawing.population.visits(draw)
    found.committed(Permit("p", draw.group, 0, 0, (draw.group,), visits, None))


def test_a_makeup_group_that_is_recorded_and_not_issued_is_issued_later(play: Play) -> None:
    """As where the disk fills up between the two: its number is taken."""
    play.draw({0, 1})
    play.draw(set())
    found = made(play)
    draw = found.next(play.groups, idle=True)
    assert draw is not None
    found.record(draw)
    play.cache.meta.deferrals = play.cache.meta.deferrals.deferring(1, [0])
    later = found.next(play.groups)
    assert later is not None
    found.record(later)
    assert (later.group, list(later.parts)) == (draw.group, list(draw.parts))
    assert play.cache.meta.deferrals.numbers == (draw.group,)


def test_what_is_pending_comes_when_nothing_more_may_be_set_aside(play: Play) -> None:
    """A run until all is cached would never end else."""
    play.draw({0, 1})
    found = made(play, most_makeups=1)
    assert found.may_defer
    make_up(play, found)
    play.draw({0})  # it was given out before the last one was made up for
    found = made(play, most_makeups=1)
    assert not found.may_defer
    make_up(play, found)
    assert not found.missing


def test_no_more_is_kept_of_objects_than_waits(play: Play) -> None:
    found = made(play)
    for _ in range(5):
        group = play.groups
        play.draw(set())
        draw = play.drawing.again(group)
        assert draw is not None
        found.retry(group, play.drawing.population.visits(draw), [0])
        make_up(play, found)
    assert not play.cache.meta.deferrals.pending
    assert not vars(found)["_names"]


def permit_of(*left_out: int) -> Permit:
    visits = tuple(PartVisit(Entry(str(number), 1, None, None)) for number in range(2))
    return Permit("p", 3, 0, 0, (3,), visits, None, left_out=left_out)


def test_a_makeup_group_is_tried_again_at_once_where_its_objects_fail_no_more(
    play: Play,
) -> None:
    assert made(play).failed_again(permit_of()) <= time.monotonic()


@pytest.mark.parametrize(
    ("recorded", "left", "expected"),
    [((), (0, 1), True), ((), (0,), False), ((0,), (0, 1), True), ((0, 1), (0, 1), False)],
)
def test_a_group_without_what_was_left_out_of_it_before_is_no_failure(
    recorded: tuple[int, ...], left: tuple[int, ...], expected: bool
) -> None:
    visited = [VisitResult(left_out=place in left) for place in range(2)]
    assert none_came(permit_of(*recorded), visited) is expected
