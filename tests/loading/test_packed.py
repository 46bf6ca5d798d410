"""What a gather process tells of a pass is not made again before the loop asks for it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from growcache.loading.channel import PassStarted
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import LazyPickle, PassPlan
from growcache.loading.report import PassFacts
from growcache.loading.snapshot import Snapshot
from growcache.loading.windows import plan_snapshot
from tests.filled import Filled


class Made:
    """Counts how often one of its kind was made of bytes."""

    count = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, ()


def _made() -> Made:
    Made.count += 1
    return Made()


def test_a_value_is_made_when_it_is_asked_for_and_once() -> None:
    value = Made()
    assert LazyPickle(value).get() is value
    came = pickle.loads(pickle.dumps(LazyPickle(value)))
    came = pickle.loads(pickle.dumps(came))  # and passed on, by who did not look
    before = Made.count
    assert came.get() is came.get()
    assert (before, Made.count) == (0, 1)
    assert isinstance(pickle.loads(pickle.dumps(came)).get(), Made)


def test_a_pass_crosses_over_whole(cache: Filled) -> None:
    cache.add(*range(5))
    with Snapshot.take(cache.root) as snapshot:
        plan = plan_snapshot(LoaderOptions(cache.root, 4), snapshot, 3)
        sent = PassStarted(3, LazyPickle(plan), PassFacts.of(snapshot, 1.5))
    came: PassStarted = pickle.loads(pickle.dumps(sent, protocol=5))
    assert came.plan.get() == plan
    assert isinstance(came.plan.get(), PassPlan)
    for name in ("numbers", "samples", "drawn_at"):
        np.testing.assert_array_equal(getattr(came.facts, name), getattr(sent.facts, name))
    assert came.facts.numbers.tolist() == list(range(5))
    assert came.facts.view == sent.facts.view
    assert (came.number, came.facts.waited_seconds) == (3, 1.5)
