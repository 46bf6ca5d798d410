"""Parts that are set aside come later, once, under new numbers: whatever is set aside when."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from growcache.cache.cache import Cache
from growcache.cache.deferrals import Deferrals
from growcache.config import Config
from growcache.config_text import load_config
from growcache.sampling.draw_sequence import DrawSequence
from growcache.sampling.draws import GroupDraw
from growcache.sampling.objects import Objects
from growcache.sampling.sizing import Sizing
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry

SIZING = Sizing(1, 1000.0, 0, whole=False, shard_samples=64)
KINDS: dict[str, dict[str, Any]] = {
    "one source": {"source": {"url": "s3://b/**"}},
    "with replacement": {"source": {"url": "s3://b/**"}, "sampling": {"order": "replacement"}},
    "second of two nodes": {
        "source": {"url": "s3://b/**"},
        "sampling": {"node": 1, "nodes": 2},
    },
    "by strata": {
        "source": {"url": "s3://b/**"},
        "sampling": {"strata": {"by": r"(?P<stratum>[ab])/", "weights": "balanced"}},
    },
}


class Play:
    """A service's draws, on a cache that is a record and editions only."""

    def __init__(self, path: Path, kind: str) -> None:
        self.config: Config = load_config(KINDS[kind])
        self.catalog = Catalog.open(path)
        self.cache = SimpleNamespace(
            meta=SimpleNamespace(editions=[], deferrals=Deferrals(), draw_notes=None),
            space=SimpleNamespace(budget=SimpleNamespace(deferred=10_000)),
            layout=SimpleNamespace(root=path),
        )
        self.cache.meta.add_edition = self.cache.meta.editions.append
        self.groups = self.round = 0
        self.seen: dict[int, list[tuple[Any, ...]]] = {}
        self.drawing = self.made()

    def made(self) -> DrawSequence:
        """The draws as a service that starts now has them."""
        objects = Objects(self.catalog)
        return DrawSequence(self.config, cast(Cache, self.cache), self.catalog, objects, SIZING)

    def lists(self, count: int) -> None:
        at = len(self.catalog)
        self.catalog.append(
            [Entry(f"{'ab'[n % 2]}/{n}", 3000, None, None) for n in range(at, at + count)]
        )

    def visits(self, drawing: DrawSequence, draw: GroupDraw) -> list[tuple[Any, ...]]:
        visits = drawing.population.visits(draw)
        rounds = [draw.round if visit.round is None else visit.round for visit in visits]
        return [
            (visit.entry.key, visit.part, round_, visit.weight)
            for visit, round_ in zip(visits, rounds, strict=True)
        ]

    def draw(self, left_out: set[int]) -> None:
        draw = self.drawing.next(self.groups, self.round)
        if draw is None:
            return
        self.round = draw.round
        self.commit(draw, left_out)

    def make_up(self, count: int, left_out: set[int]) -> None:
        record = self.cache.meta.deferrals
        if record.pending:
            self.cache.meta.deferrals = record.making_up(self.groups, record.pending[:count])
            draw = self.drawing.again(self.groups)
            assert draw is not None
            self.commit(draw, left_out)

    def commit(self, draw: GroupDraw, left_out: set[int]) -> None:
        assert draw.group == self.groups
        left = left_out & set(range(len(draw.parts)))
        if left:
            self.cache.meta.deferrals = self.cache.meta.deferrals.deferring(draw.group, left)
        self.seen[draw.group] = self.visits(self.drawing, draw)
        self.groups += 1

    def brought(self) -> list[tuple[Any, ...]]:
        """What shards hold, and what is set aside."""
        record = self.cache.meta.deferrals
        held = [
            visit
            for group, visits in self.seen.items()
            for place, visit in enumerate(visits)
            if place not in record.left_out(group)
        ]
        return held + [self.seen[group][place] for group, place in record.pending]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("lists"), st.integers(1, 40)),
        st.tuples(st.just("draw"), st.sets(st.integers(0, 9), max_size=4)),
        st.tuples(st.just("draw"), st.just(set[int]())),
        st.tuples(
            st.just("make_up"), st.integers(1, 9), st.sets(st.integers(0, 9), max_size=3)
        ),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=steps, data=st.data())
def test_a_part_comes_as_often_as_without_anything_set_aside(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    script: list[tuple[Any, ...]],
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("play")
    play, plain = Play(folder / "play", kind), Play(folder / "plain", kind)
    for one in (play, plain):
        one.lists(30)
        one.catalog.complete = kind == "by strata"
    for what, *rest in script:
        if what == "lists" and kind == "by strata":
            continue
        getattr(play, what)(*rest)
        if what == "lists":
            plain.lists(*rest)
        elif what == "draw":
            plain.draw(set())
    assert Counter(play.brought()) == Counter(plain.brought())
    if "replacement" not in kind and "strata" not in kind:
        assert max(Counter(play.brought()).values(), default=1) == 1, "once in each pass"
    again = play.made()
    for group, visits in play.seen.items():
        draw = again.again(group)
        assert draw is not None
        assert play.visits(again, draw) == visits, "a service that starts anew fills it alike"
    play.catalog.close()
    plain.catalog.close()


def test_a_new_edition_begins_at_the_same_draw(tmp_path: Path) -> None:
    """It is recorded for a number that a makeup group takes then."""
    play = Play(tmp_path / "c", "one source")
    play.lists(10)
    play.draw({0})
    play.lists(40)
    assert play.drawing.next(play.groups, 0) is not None
    assert [edition.first_group for edition in play.cache.meta.editions] == [0, 1]
    play.make_up(1, set())
    play.draw(set())
    play.make_up(1, set())
    expected = {e.key for e in play.catalog.entries(np.arange(50))}
    for _ in range(30):
        play.draw(set())
        if play.round:
            break
    keys = [visit[:2] for visit in play.brought() if visit[2] == 0]
    assert Counter(keys) == Counter((key, part) for key in expected for part in range(3))
    play.catalog.close()
