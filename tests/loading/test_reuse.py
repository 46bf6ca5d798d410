"""A job uses a shard up to the limit; a reader that waits for new samples holds nothing."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from growcache.cache.index.reader import IndexView, read_index
from growcache.cache.lease_views import MAPPED, READ, LeaseView, RankNote, read_leases
from growcache.cache.status import write_status
from growcache.cache.status_model import Status
from growcache.config import CacheConfig
from growcache.config_text import load_config
from growcache.errors import CacheError, CacheFullError, ConfigError
from growcache.loading import blocks, bound_check, plan, snapshot_choice, waiting
from growcache.loading.options import LoaderOptions
from growcache.loading.passes import Passes
from growcache.loading.snapshot import Snapshot
from growcache.loading.snapshot_choice import (
    choose_shards,
    reuse_limit,
    shards_at_limit,
    take_snapshot,
)
from growcache.loading.waiting import WaitControl
from growcache.loading.windows import Piece
from growcache.numpy import EpochLoader
from tests.filled import Filled
from tests.sampling.services import make_source, service, wait_until, write_config

MakeCache = Callable[..., Filled]


@pytest.fixture(autouse=True)
def unwarned() -> Iterator[None]:
    snapshot_choice.warned_of_reuse.clear()
    yield
    snapshot_choice.warned_of_reuse.clear()


def test_who_waited_for_room_takes_what_the_index_says_then(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache()
    cache.add(0)
    options = LoaderOptions(path=cache.root, batch_size=1)
    wake = threading.Event()
    choice = choose_shards(options, WaitControl(wake, wake.is_set), read_index(cache.root))
    assert choice.without == frozenset()

    class Full(Snapshot):
        @classmethod
        def take(cls, *arguments: Any, **keywords: Any) -> Snapshot:
            if keywords["view"] is choice.view:
                cache.add(1)
                raise CacheFullError("no room")
            return Snapshot.take(*arguments, **keywords)

    monkeypatch.setattr(snapshot_choice, "Snapshot", Full)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.01)
    snapshot = take_snapshot(options, WaitControl(wake, wake.is_set), choice)
    assert snapshot is not None
    with snapshot:
        assert [row.number for row in snapshot.shards] == [0, 1]


def ids(batches: Any) -> list[int]:
    return sorted(i for batch in batches for i in batch["id"].tolist())


def shards(batches: Any) -> set[int]:
    return {i // 1000 for i in ids(batches)}


def held(root: Path) -> set[int]:
    """The shards that open leases protect."""
    return {n for lease in read_leases(root) if lease.open for n in lease.holding()}


@pytest.mark.mutant(
    23,
    "growcache.config:CacheConfig._uses_can_be_reached",
    "self.max_reuse is not None and self.min_uses > self.max_reuse",
    "False",
)
def test_uses_that_can_never_be_reached_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_uses 3 is more than max_reuse 2"):
        load_config({"source": {"url": "x"}, "cache": {"min_uses": 3, "max_reuse": 2}})
    allowed = load_config({"source": {"url": "x"}, "cache": {"min_uses": 2, "max_reuse": 2}})
    assert (allowed.cache.max_reuse, allowed.cache.on_max_reuse) == (2, "warn")


def lease(name: str, states: bytes, **changes: Any) -> LeaseView:
    values: dict[str, Any] = {
        "name": name,
        "job": "a",
        "host": "h",
        "pid": 1,
        "command": "",
        "created": 0.0,
        "open": True,
        "closed": False,
        "numbers": tuple(range(len(states))),
        **changes,
    }
    return LeaseView(states=states, **values)


def test_uses_are_those_of_finished_leases_and_of_the_others() -> None:
    view = IndexView(uses={0: 1, 1: 2}, counted=frozenset({"counted"}))
    read = bytes([READ, MAPPED, 0])
    note = RankNote("run", 0, 0, 1, 2)

    def found(*leases: LeaseView, own: str = "") -> set[int]:
        return set(shards_at_limit(view, leases, "a", 2, {own: range(3)}))

    assert found() == {1}
    assert found(lease("x", read)) == {0, 1}
    assert found(lease("counted", read)) == {1}
    assert found(lease("x", read, job="b")) == {1}
    assert found(lease("x", read, ranks=note)) == {1}
    assert found(lease("x", bytes(3)), own="x") == {0, 1}  # it will be read
    assert found(lease("x", read), lease("y", read), lease("z", bytes(3)), own="z") == {0, 1}


def test_the_limit_is_in_the_index_and_follows_the_service(make_cache: MakeCache) -> None:
    cache = make_cache(max_reuse=3, on_max_reuse="wait")
    assert reuse_limit(read_index(cache.root)) == (3, True)
    values = {"path": cache.root, "max_bytes": 10**9, "min_free": 0}
    cache.cache.adopt_settings(CacheConfig.model_validate({**values, "max_reuse": 4}))
    assert reuse_limit(read_index(cache.root)) == (4, False)
    cache.cache.adopt_settings(CacheConfig.model_validate(values))
    assert reuse_limit(read_index(cache.root)) is None


@pytest.mark.mutant(
    23,
    "growcache.loading.snapshot:Snapshot.take",
    "row.samples and row.number not in without and _is_wanted(only, row)",
    "row.samples and _is_wanted(only, row)",
)
def test_what_is_used_up_is_left_out_and_when_all_is_it_goes_on_and_says_so_once(
    make_cache: MakeCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(max_reuse=2)
    cache.add(0, 1)
    with EpochLoader(cache.root, batch_size=5, min_samples=1) as loader:
        assert [shards(loader) for _ in range(2)] == [{0, 1}] * 2
        cache.add(2)
        found = [shards(loader) for _ in range(4)]
        # A snapshot may have been taken before the shard came, when all was used up, or as it did.
        found = found[found[0] == {0, 1} :]
        assert found[0] in ({2}, {0, 1, 2})
        assert found[1:3] == [{2}, {0, 1, 2}]
    assert sum("continues with them" in text for text in caplog.messages) == 1
    with EpochLoader(cache.root, batch_size=5, min_samples=1, job="other") as loader:
        assert shards(loader) == {0, 1, 2}


@pytest.mark.mutant(
    23, "growcache.loading.snapshot_choice:choose_shards", "watch.on_long_wait()", "pass"
)
def test_who_waits_for_new_samples_holds_no_shard_and_says_so(
    make_cache: MakeCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(max_reuse=1, on_max_reuse="wait")
    cache.add(0, 1)
    with (
        caplog.at_level(logging.WARNING),
        EpochLoader(cache.root, batch_size=5, min_samples=1) as loader,
        ThreadPoolExecutor(1) as pool,
    ):
        assert ids(loader) == [*range(10), *range(1000, 1010)]
        second = pool.submit(ids, loader)
        wait_until(lambda: not held(cache.root))
        cache.poll()
        assert set(cache.cache.evict([0])) == {0}
        assert not second.done()
        cache.add(2)
        assert second.result(300) == list(range(2000, 2010))
    assert sum("waiting for new samples: job default" in m for m in caplog.messages) >= 1


def test_a_wait_ends_with_the_loader(make_cache: MakeCache) -> None:
    cache = make_cache(max_reuse=1, on_max_reuse="wait")
    cache.add(0)
    loader = EpochLoader(cache.root, batch_size=5, min_samples=1)
    assert shards(loader) == {0}
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(ids, loader)
        wait_until(lambda: not held(cache.root))
        loader.close()
        with pytest.raises(RuntimeError, match="closed"):
            second.result(300)


def test_a_wait_without_an_end_is_an_error(make_cache: MakeCache) -> None:
    cache = make_cache(max_reuse=1, on_max_reuse="wait")
    cache.add(0)
    cache.complete()
    with EpochLoader(cache.root, batch_size=5, min_samples=1) as loader:
        assert shards(loader) == {0}
        with pytest.raises(CacheError, match=r"no more come, because the cache is complete"):
            ids(loader)
    with EpochLoader(cache.root, batch_size=5, min_samples=1, fixed=True) as validation:
        assert [shards(validation) for _ in range(3)] == [{0}] * 3


def test_a_bound_that_holds_less_than_a_batch_of_unused_samples_is_an_error(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here 20 samples of 30 are used up and leave, and the next 20 at once have no room."""
    monkeypatch.setattr(bound_check, "STAYS_FULL_SECONDS", 0.3)
    cache = make_cache(max_reuse=1, on_max_reuse="wait")
    cache.add(0, 1)
    full = Status(state="full", waiting_for="a reader", pid=os.getpid(), samples=20)
    write_status(cache.root, replace(full, updated_at=time.time()))
    with EpochLoader(cache.root, batch_size=20, min_samples=1) as loader:
        assert len(ids(loader)) == 20
        cache.add(2)
        with pytest.raises(
            ConfigError, match=r"needs 20 samples .* room for 10 that it used less"
        ):
            ids(loader)
    assert "its service waits for a reader" in caplog.text


@pytest.mark.parametrize("on_max_reuse", ["warn", "wait"])
@pytest.mark.parametrize("length", [None, 160])
def test_what_an_epoch_that_was_broken_off_did_not_read_is_not_used(
    make_cache: MakeCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    length: int | None,
    on_max_reuse: str,
) -> None:
    monkeypatch.setattr(plan, "WINDOW_BYTES", 1)  # four windows
    monkeypatch.setattr(blocks, "BLOCK_BATCHES", 1)
    cache = make_cache(shape=(130, 128), max_reuse=1, on_max_reuse=on_max_reuse)
    cache.add(*range(16))
    cache.complete()
    with EpochLoader(
        cache.root, batch_size=2, min_samples=1, samples_per_epoch=length
    ) as loader:
        used = shards(itertools.islice(loader, 1))
        epoch = iter(loader)
        second = shards([next(epoch)])
        # Before it ends the next pass starts, which finds no usable shard.
        assert "continues with them" not in caplog.text
        second |= shards(itertools.islice(epoch, 59))
    assert len(second) >= 12
    assert not used & second


def test_what_is_being_copied_counts_as_used(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block takes all windows at once; the next snapshot is asked for before it is copied."""
    monkeypatch.setattr(plan, "WINDOW_BYTES", 1)
    copied = Passes.read

    def slowly(walk: Passes, pieces: list[Piece]) -> None:
        time.sleep(0.3)
        copied(walk, pieces)

    monkeypatch.setattr(Passes, "read", slowly)
    cache = make_cache(max_reuse=1, on_max_reuse="wait")
    cache.add(*range(16))
    with EpochLoader(cache.root, batch_size=5, min_samples=1) as loader:
        assert shards(loader) == {*range(16)}
        cache.add(16)
        assert shards(loader) == {16}


@pytest.mark.parametrize("used_up", [True, False])
def test_ranks_wait_together_and_hold_no_shard(make_cache: MakeCache, used_up: bool) -> None:
    """For samples that may be used, or for a batch for each of them."""
    cache = make_cache(max_reuse=1 if used_up else None, on_max_reuse="wait")
    cache.add(0, 1)
    barrier = threading.Barrier(2, timeout=300)

    def one(rank: int) -> list[list[int]]:
        epochs: list[list[int]] = []
        with EpochLoader(
            cache.root, batch_size=5, min_samples=1, rank=rank, world_size=2
        ) as loader:
            while not epochs or max(epochs[-1]) < 2000:
                found = []
                for batch in loader:
                    barrier.wait()
                    found += batch["id"].tolist()
                epochs.append(found)
            barrier.wait()
        return epochs

    with ThreadPoolExecutor(2) as pool:
        ranks = pool.map(one, range(2))
        wait_until(lambda: len(held(cache.root)) == 2)
        if not used_up:
            cache.retire(0, 1)
        wait_until(lambda: read_leases(cache.root) and not held(cache.root))
        cache.poll()
        if used_up:
            assert set(cache.cache.evict([0])) == {0}
        cache.add(2)
        first, second = ranks
    assert sorted(first[-1] + second[-1]) == list(range(2000, 2010))
    assert len(first[-1]) == len(second[-1])


@pytest.mark.tensorflow
def test_an_endless_dataset_waits_and_holds_no_shard(make_cache: MakeCache) -> None:
    gtf = pytest.importorskip("growcache.tensorflow")
    cache = make_cache(max_reuse=1, on_max_reuse="wait")
    cache.add(0, 1)
    iterator = iter(
        gtf.dataset(cache.root, batch_size=3, min_samples=1, endless=True, shuffle=False)
    )
    # 20 samples make six batches, and two that wait for a third.
    found = [i for _ in range(6) for i in next(iterator)["id"].numpy().tolist()]
    with ThreadPoolExecutor(1) as pool:
        seventh = pool.submit(lambda: next(iterator)["id"].numpy().tolist())
        wait_until(lambda: not held(cache.root))
        cache.poll()
        assert set(cache.cache.evict([0])) == {0}
        assert not seventh.done()
        cache.add(2)
        found += seventh.result(300)
    assert sorted(found[:20]) == [*range(10), *range(1000, 1010)]
    assert found[20] // 1000 == 2


def test_a_full_cache_that_is_used_up_turns_over(tmp_path: Path) -> None:
    url = make_source(tmp_path / "data", 400)
    bound = {"max_bytes": "1400KB", "max_reuse": 1, "on_max_reuse": "wait"}
    config = write_config(tmp_path / "cache.yaml", url, cache=bound)
    seen: Counter[float] = Counter()
    with (
        service(config),
        EpochLoader(tmp_path / "cache", batch_size=8, min_samples=64) as loader,
    ):
        while sum(seen.values()) < 220:
            seen.update(x for batch in loader for x in batch["x"][:, 0, 0].tolist())
        assert read_index(tmp_path / "cache").totals.evicted_samples
    assert set(seen.values()) == {1}


def test_a_wait_for_a_whole_batch_holds_no_shard(make_cache: MakeCache) -> None:
    """Shards that are retired ahead leave less than a batch, and their room only comes free with the lease."""
    cache = make_cache()
    cache.add(0, 1)
    with (
        EpochLoader(cache.root, batch_size=15, min_samples=1) as loader,
        ThreadPoolExecutor(1) as pool,
    ):
        assert len(ids(loader)) == 15
        cache.retire(0)
        second = pool.submit(ids, loader)
        wait_until(lambda: not held(cache.root))
        cache.add(2)
        assert set(second.result(300)) < {*range(1000, 1010), *range(2000, 2010)}
