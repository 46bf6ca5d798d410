"""How many reads may be in flight: fewer where a store refuses some, all again once it does not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bad_store import bad_store
from growcache.sampling.engines.child import EngineProcess
from growcache.sampling.read_limits import (
    TOLERATED_SHARE,
    WINDOW_SECONDS,
    Answers,
    ReadLimit,
    ReadLimits,
    shares,
)
from growcache.sampling.sampler_pool import SamplerSlot
from tests.sampling.services import run, write_config

REPORT_SECONDS = 0.2
answers = st.builds(Answers, st.integers(0, 200), st.integers(0, 200))


@given(st.lists(st.tuples(answers, st.floats(0, 10)), max_size=50), st.integers(1, 8))
def test_the_limit_stays_within_its_bounds(
    reports: list[tuple[Answers, float]], least: int
) -> None:
    limit, now = ReadLimit(64.0), 0.0
    for found, seconds in reports:
        now += seconds
        after = limit.after(found, now, least, 64)
        assert least <= after.reads <= 64
        if after.reads < limit.reads:  # at most once in a window
            assert now - limit.since >= WINDOW_SECONDS
        limit = after


@given(st.integers(100, 1000), st.floats(0.5, 5))
def test_a_refusal_now_and_then_says_nothing(served: int, seconds: float) -> None:
    limit = ReadLimit(20.0)
    few = Answers(served, int(served * TOLERATED_SHARE))
    assert limit.after(few, seconds, 1, 32).reads > 20


class Store:
    """A store that serves some requests at a time, each for 44 ms; refused ones come again after about 0.1 s."""

    def __init__(self, takes: int) -> None:
        self.takes = takes
        self.dice = random.Random(0)

    def answers(self, reads: int) -> Answers:
        served = min(reads, self.takes) * REPORT_SECONDS / 0.044
        refused = max(0, reads - self.takes) * REPORT_SECONDS / 0.144
        return Answers(int(served), int(refused + self.dice.random()))


def followed(store: Store, limit: ReadLimit, began: float, seconds: float) -> list[ReadLimit]:
    found = [limit]
    for step in range(round(seconds / REPORT_SECONDS)):
        now = began + (step + 1) * REPORT_SECONDS
        found.append(found[-1].after(store.answers(int(found[-1].reads)), now, 2, 32))
    return found


@pytest.mark.parametrize("share", [0.03, 0.05, 0.08])
@pytest.mark.parametrize("seed", range(5))
def test_refusals_at_random_do_not_bring_the_reads_down(share: float, seed: int) -> None:
    """One bad gateway of many refuses however few reads there are: a smaller limit would not help."""
    dice = random.Random(seed)
    limit, reads = ReadLimit(32.0), []
    for step in range(600):
        total = int(limit.reads * REPORT_SECONDS / 0.05)
        refused = sum(dice.random() < share for _ in range(total))
        limit = limit.after(
            Answers(total - refused, refused), REPORT_SECONDS * (step + 1), 2, 32
        )
        reads.append(limit.reads)
    assert sum(reads[100:]) / len(reads[100:]) > 0.8 * 32


@pytest.mark.parametrize("takes", [4, 8, 20])
def test_a_store_that_takes_some_at_a_time_is_asked_for_as_many(takes: int) -> None:
    store = Store(takes)
    settled = followed(store, ReadLimit(32.0), 0, 120)[50:]  # after 10 s
    mean = sum(min(takes, int(limit.reads)) for limit in settled) / len(settled)
    assert mean >= 0.95 * takes
    found = [store.answers(int(limit.reads)) for limit in settled]
    assert sum(one.refused for one in found) < 0.05 * sum(one.total for one in found)


def test_all_reads_are_back_soon_after_a_storm() -> None:
    store = Store(0)
    storm = followed(store, ReadLimit(32.0), 0, 60)
    assert storm[-1].reads == 2
    store.takes = 1000
    after = followed(store, storm[-1], 60, 15)
    assert after[-1].reads == 32


@given(st.integers(1, 500), st.integers(1, 40))
def test_samplers_share_the_limit(reads: int, samplers: int) -> None:
    found = shares(reads, samplers)
    assert sum(found) == max(reads, samplers)
    assert max(found) - min(found) <= 1


class Told(EngineProcess):
    """A sampler that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def send(self, message: dict[str, object]) -> None:
        self.told.append(message["limits"])


def test_samplers_are_told_their_shares_once() -> None:
    slots = [SamplerSlot(n, process=Told(), ready=n == 0) for n in range(2)]
    limits = ReadLimits(sources=2, workers=2, concurrency=8)
    for _ in range(2):
        limits.hand_out(slots)
    limits.answered([(0, 0), (50, 50)], now=1.0)
    slots[1].ready = True
    limits.hand_out(slots)
    assert [slot.process.told for slot in slots if isinstance(slot.process, Told)] == [
        [[8, 8], [8, 4]],
        [[8, 4]],
    ]


@pytest.mark.slow
def test_a_store_that_takes_three_at_a_time_refuses_few(tmp_path: Path) -> None:
    """Without a limit 16 reads were in flight, and most of them refused."""
    with bad_store(objects=900, object_bytes=4096, latency_seconds=0.02, takes=3) as store:
        config = write_config(
            tmp_path / "cache.yaml",
            store.url,
            source={"storage_options": store.storage_options},
            sampling={"workers": 2, "concurrency": 8, "shard_samples": 32},
        )
        assert run(config, "--until-full")[0] == 0
        counts = store.counts()
    assert counts.served >= 900
    assert counts.refused < 0.25 * counts.requests
