"""The plan of a pass: every sample once, windows of equal size, orders that depend on seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.loading.plan import (
    MAX_WINDOW_SHARDS,
    MIN_WINDOW_SHARDS,
    WINDOW_BYTES,
    WINDOW_SAMPLES,
    Window,
    locate_samples,
    window_samples,
)
from tests.planned import plan_pass

shard_sets = st.dictionaries(st.integers(0, 10_000), st.integers(0, 300), max_size=60)
targets = st.integers(1, 3000)


def visited(windows: tuple[Window, ...]) -> list[tuple[int, int]]:
    found = []
    for window in windows:
        places, rows = locate_samples(window.order(), window.starts())
        numbers = np.asarray(window.numbers)[places]
        found += list(zip(numbers.tolist(), rows.tolist(), strict=True))
    return found


@given(shard_sets, targets, st.integers(0, 5), st.booleans())
def test_every_sample_is_visited_exactly_once(
    shards: dict[int, int], target: int, seed: int, shuffle: bool
) -> None:
    windows = plan_pass(
        shards.items(), seed=seed, pass_number=3, target_samples=target, shuffle=shuffle
    )
    expected = [(number, row) for number, n in sorted(shards.items()) for row in range(n)]
    assert sorted(visited(windows)) == expected
    if not shuffle:
        assert visited(windows) == expected


@given(shard_sets, targets)
def test_windows_are_equal_to_within_a_shard(shards: dict[int, int], target: int) -> None:
    windows = plan_pass(shards.items(), seed=0, pass_number=0, target_samples=target)
    total, largest = sum(shards.values()), max(shards.values(), default=0)
    for window in windows:
        assert abs(len(window) - total / len(windows)) <= largest + 1e-6
    assert [w.first for w in windows] == [
        sum(len(w) for w in windows[:i]) for i in range(len(windows))
    ]
    filled = sum(1 for n in shards.values() if n)
    assert len(windows) <= max(1, filled // MIN_WINDOW_SHARDS)


@given(shard_sets, targets)
def test_a_plan_depends_on_the_set_alone(shards: dict[int, int], target: int) -> None:
    forward = plan_pass(shards.items(), seed=1, pass_number=0, target_samples=target)
    backward = plan_pass(reversed(shards.items()), seed=1, pass_number=0, target_samples=target)
    assert forward == backward


@pytest.mark.parametrize(("seed", "pass_number"), [(8, 0), (7, 1)])
def test_other_seeds_and_passes_give_other_orders(seed: int, pass_number: int) -> None:
    shards = [(n, 50) for n in range(16)]
    first = plan_pass(shards, target_samples=200, seed=7, pass_number=0)
    again = plan_pass(shards, target_samples=200, seed=7, pass_number=0)
    other = plan_pass(shards, target_samples=200, seed=seed, pass_number=pass_number)
    assert visited(first) == visited(again)
    assert visited(first) != visited(other)
    assert {w.numbers for w in first} != {w.numbers for w in other}


def test_windows_of_one_pass_are_permuted_differently() -> None:
    shards = [(n, 50) for n in range(16)]
    windows = plan_pass(shards, seed=0, pass_number=0, target_samples=200)
    assert len(windows) == 4
    orders = {tuple(w.order().tolist()) for w in windows}
    assert len(orders) == 4


def test_a_window_mixes_its_shards() -> None:
    (window,) = plan_pass(
        [(n, 100) for n in range(4)], seed=0, pass_number=0, target_samples=400
    )
    places, _ = locate_samples(window.order(), window.starts())
    head = np.bincount(places[:100], minlength=4)
    assert head.min() > 10


def test_windows_hold_about_a_quarter_gigabyte() -> None:
    assert window_samples(1_000_000) == 256
    assert window_samples(0) > 1
    assert window_samples(10**10) == 1


@given(st.integers(0, 10**10), st.floats(1, 1e9), st.integers(1, 10_000))
def test_windows_are_limited_in_bytes_samples_and_shards(
    sample_bytes: int, shard_samples: float, shards: int
) -> None:
    target = window_samples(sample_bytes, shard_samples)
    assert 1 <= target <= WINDOW_SAMPLES
    assert target == 1 or target * sample_bytes <= WINDOW_BYTES
    assert target == 1 or target <= MAX_WINDOW_SHARDS * shard_samples
    each = max(1, round(shard_samples))
    windows = plan_pass(
        [(n, each) for n in range(min(shards, 500))],
        seed=0,
        pass_number=0,
        target_samples=window_samples(sample_bytes, each),
    )
    # Half as much more where the pass is cut into so few that they cannot come nearer.
    assert all(len(w.numbers) <= 1.5 * MAX_WINDOW_SHARDS + 1 for w in windows)
