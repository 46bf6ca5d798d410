"""What is lost with damaged shards is counted when the loop goes past it, once, by whomever."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from growcache.loading import blocks, plan
from growcache.numpy import EpochLoader
from tests.filled import Filled
from tests.loading.test_choice import after, eager
from tests.loading.test_process import gatherers

__all__ = ["eager"]  # a fixture

SHARDS, ROWS = 13, 10
DAMAGED = (0, 3, 4, 9)
LOST = ROWS * len(DAMAGED)

windows = pytest.mark.parametrize("window_shards", [1, 3, SHARDS])


@pytest.fixture
def damaged(
    request: Any, make_cache: Callable[..., Filled], monkeypatch: pytest.MonkeyPatch
) -> Filled:
    """Windows of a shard are lost as a whole."""
    shards = request.node.callspec.params.get("window_shards", 3)
    monkeypatch.setattr(plan, "WINDOW_BYTES", 1)
    monkeypatch.setattr(plan, "MIN_WINDOW_SHARDS", shards)
    return _damaged(make_cache())


@pytest.fixture
def large(make_cache: Callable[..., Filled]) -> Filled:
    """One batch a block."""
    return _damaged(make_cache(shape=(130, 128)))


def _damaged(cache: Filled) -> Filled:
    cache.add(*range(SHARDS), samples=ROWS)
    for number in DAMAGED:
        cache.damage(number)
    return cache


def loader(cache: Filled, **options: Any) -> EpochLoader:
    return EpochLoader(cache.root, **{"batch_size": 7, "min_samples": 1, **options})


def past(made: EpochLoader) -> int:
    """How many planned rows the loop has gone past, of all passes."""
    at = made.state_dict()["pass"]
    return int(at["number"] * SHARDS * ROWS + at["position"])


@windows
@pytest.mark.parametrize("drop_last", [True, False])
def test_it_is_counted_as_the_loop_goes_past_it(
    damaged: Filled, window_shards: int, drop_last: bool
) -> None:
    with loader(damaged, drop_last=drop_last) as made:
        for epoch in range(3):
            delivered = epoch * (SHARDS * ROWS - LOST)
            for batch in made:
                delivered += len(batch["id"])
                assert delivered + made.report.skipped == past(made)
            assert made.report.skipped == (epoch + 1) * LOST


@windows
def test_epochs_of_a_length_go_on_counting(damaged: Filled, window_shards: int) -> None:
    with loader(damaged, samples_per_epoch=35) as made:
        delivered = 0
        for _ in range(9):
            for batch in made:
                delivered += len(batch["id"])
                assert delivered + made.report.skipped == past(made)
            assert delivered + made.report.skipped == past(made)


def counted(made: EpochLoader, *steps: int | None) -> dict[int, int]:
    """The loss that each batch added, by its end, of epochs left after `batches`; None: all."""
    found, before = {}, 0
    for most in steps:
        for _batch in itertools.islice(made, most):
            found[past(made)] = made.report.skipped - before
            before = made.report.skipped
        before = made.report.skipped  # what lay behind the last batch of a pass
    return found


@windows
@pytest.mark.parametrize("length", [None, 63])
def test_what_nobody_reaches_is_not_counted(
    damaged: Filled, window_shards: int, length: int | None
) -> None:
    with loader(damaged, samples_per_epoch=length) as whole:
        each = counted(whole, *[None] * 5)
    with loader(damaged, samples_per_epoch=length) as made:
        found = counted(made, 1, 3, 8, 1, None)
    assert found.items() <= each.items()
    assert max(found) == max(each)


@windows
@pytest.mark.parametrize("length", [None, 63])
def test_who_goes_on_counts_what_is_left(
    damaged: Filled, window_shards: int, length: int | None
) -> None:
    options = {"samples_per_epoch": length, "drop_last": length is not None}
    with loader(damaged, **options) as whole:
        states, counted = [], []
        for _batch in whole:
            states.append(whole.state_dict())
            counted.append(whole.report.skipped)
        total = whole.report.skipped
    for state, before in list(zip(states, counted, strict=True))[:-1]:
        with loader(damaged, **options) as resumed:
            resumed.load_state_dict(state)
            for _batch in resumed:
                pass
            assert before + resumed.report.skipped == total


def test_a_process_that_is_replaced_has_its_losses_counted_once(large: Filled) -> None:
    delivered = 0
    with loader(large, gather="process", drop_last=False) as made:
        for step, batch in enumerate(made):
            delivered += len(batch["id"])
            assert delivered + made.report.skipped == past(made)
            if step == 4:
                gatherers()[0].kill()
        assert made.report.skipped == LOST


def test_the_change_to_a_process_counts_nothing_twice(
    large: Filled, eager: pytest.MonkeyPatch
) -> None:
    eager.setattr(blocks, "BLOCK_BATCHES", 2)
    crossed, delivered = after("thread", "process"), 0
    kinds: list[str] = []
    with loader(large, gather="auto", samples_per_epoch=70) as made:
        while not (kinds and crossed(kinds)):
            for batch in made:
                delivered += len(batch["id"])
                kinds.append(made.report.gather)
                assert delivered + made.report.skipped == past(made)


def test_each_rank_counts_what_others_stand_in_for(cache: Filled) -> None:
    cache.add(0, 1, 2)
    cache.damage(1)

    def one(rank: int) -> list[tuple[int, int]]:
        found, standing_in = [], 0
        options = {"rank": rank, "world_size": 2, "drop_last": False, "seed": 1}
        with loader(cache, batch_size=4, **options) as made:
            for batch in made:
                standing_in += int((~batch["_valid"]).sum())
                found.append((made.report.skipped, standing_in))
        return found

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(one, range(2)))
    assert all(skipped == standing_in for found in both for skipped, standing_in in found)
    assert sum(found[-1][0] for found in both) == ROWS
    assert np.shape(both) == (2, 4, 2)
