"""Ranks of one job: equal steps, disjoint samples, one snapshot, and no wait for a dead rank."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.index.reader import read_index
from growcache.errors import CacheError, ConfigError
from growcache.loading import rank_sync
from growcache.loading.options import (
    ALONE,
    LoaderOptions,
    Ranks,
    find_ranks,
    launch_id,
    rank_share,
)
from growcache.loading.plan import substitute_rows
from growcache.loading.rank_sync import next_rank_note, rank_group
from growcache.loading.snapshot import Snapshot
from growcache.loading.waiting import WaitControl
from growcache.numpy import EpochLoader
from tests.filled import Filled, open_leases
from tests.sampling.services import make_source, service, wait_until, write_config

HERE = Path(__file__).parent
MakeCache = Callable[..., Filled]

# --- which process is which rank ---


@pytest.mark.parametrize(
    ("rank", "size", "distributed", "environment", "expected"),
    [
        (None, None, None, {}, ALONE),
        (None, None, None, {"RANK": "1"}, ALONE),
        (1, 2, None, {}, Ranks(1, 2, 1, 2, True)),
        (None, None, (1, 2), {"RANK": "3", "WORLD_SIZE": "4"}, Ranks(1, 2, 1, 2, True, True)),
        (None, None, None, {"RANK": "3", "WORLD_SIZE": "4"}, Ranks(3, 4, 3, 4, True)),
        (
            *(None, None, None),
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            Ranks(3, 4, 1, 2, True),
        ),
        (  # a group of its own, whatever the launcher's is
            *(0, 1, None),
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            Ranks(0, 1, 0, 1, True),
        ),
    ],
)
def test_the_rank_is_the_argument_then_torchs_then_the_environments(
    rank: int | None,
    size: int | None,
    distributed: tuple[int, int] | None,
    environment: dict[str, str],
    expected: Ranks,
) -> None:
    assert find_ranks(rank, size, distributed, environment) == expected


@pytest.mark.parametrize(
    ("rank", "size", "environment", "said"),
    [
        (0, None, {}, "both or neither"),
        (2, 2, {}, "from 0 to world_size - 1, found 2 of 2"),
        (None, None, {"RANK": "x", "WORLD_SIZE": "2"}, "whole numbers in RANK"),
        (0, 2, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, "unset it"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(
    rank: int | None, size: int | None, environment: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        find_ranks(rank, size, None, environment)


def test_a_restart_is_another_run_and_ranks_of_one_start_are_not() -> None:
    launched = {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}
    first = {**launched, "TORCHELASTIC_RESTART_COUNT": "0"}
    again = {**launched, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert launch_id({**first, "RANK": "0"}, 1) == launch_id({**first, "RANK": "1"}, 2)
    assert launch_id(first, 1) != launch_id(again, 1)
    assert launch_id({}, 1) != launch_id({}, 2)


def test_several_machines_need_samples_per_epoch_and_whole_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="set samples_per_epoch"):
        EpochLoader("nowhere", batch_size=8)
    with pytest.raises(ConfigError, match="world_size within its own machine"):
        EpochLoader("nowhere", batch_size=8, fixed=True)
    validation = EpochLoader("nowhere", batch_size=8, fixed=True, rank=1, world_size=2)
    assert validation.options.ranks.local_rank == 1
    with pytest.raises(ConfigError, match=r"samples_per_epoch 31 .* world_size 4"):
        EpochLoader("nowhere", batch_size=8, samples_per_epoch=31)
    loader = EpochLoader("nowhere", batch_size=8, samples_per_epoch=100)
    assert len(loader) == 3
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert pickle.loads(pickle.dumps(loader)).options.ranks.local_rank == 0


# --- dealing ---

worlds = st.tuples(st.integers(1, 4), st.integers(1, 4))  # machines, ranks on each


@given(st.integers(0, 400), st.integers(1, 9), worlds, st.booleans())
def test_ranks_make_equal_steps_of_all_that_is_dealt(
    samples: int, batch: int, world: tuple[int, int], keeps_last: bool
) -> None:
    machines, here = world
    size = machines * here
    dealt: list[int] = []
    for machine in range(machines):
        shares = [
            rank_share(
                samples, batch, Ranks(machine * here + i, size, i, here), keeps_last=keeps_last
            )
            for i in range(here)
        ]
        assert len({(d.rows, d.steps) for d in shares}) == 1
        mine = [[row for a, b in d.mine(0, d.rows) for row in range(a, b)] for d in shares]
        rows = sorted(row for each in mine for row in each)
        assert rows == list(range(len(rows)))  # each row of this machine to one rank
        assert len({len(m) + d.padding for m, d in zip(mine, shares, strict=True)}) == 1
        # A machine whose ranks are all padded walks one row more, to repeat it.
        only_padded = len(rows) == shares[0].whole_rows and all(d.padding for d in shares)
        assert len(rows) == shares[0].rows - only_padded
        steps = -(-(len(mine[0]) + shares[0].padding) // batch)
        assert steps == shares[0].steps
        dealt.append(len(rows))
    whole = samples - samples % (batch * size)
    assert sum(dealt) == (samples if keeps_last else whole)


@given(
    st.integers(0, 300),
    st.integers(1, 7),
    st.integers(1, 4),
    st.lists(st.integers(1, 40), min_size=1),
)
def test_who_gets_a_row_does_not_depend_on_how_the_walk_is_cut(
    samples: int, batch: int, size: int, cuts: list[int]
) -> None:
    for rank in range(size):
        one = rank_share(samples, batch, Ranks(rank, size, rank, size), keeps_last=True)
        whole = [row for a, b in one.mine(0, one.rows) for row in range(a, b)]
        edges = sorted({0, one.rows, *(c for c in np.cumsum(cuts).tolist() if c < one.rows)})
        pieces = [
            row
            for first, stop in pairwise(edges)
            for a, b in one.mine(first, stop)
            for row in range(a, b)
        ]
        assert pieces == whole


@given(st.lists(st.booleans(), min_size=1).filter(any))
def test_good_rows_stand_in_for_bad_ones(good: list[bool]) -> None:
    chosen = substitute_rows(np.array(good))
    assert all(good[i] for i in chosen)
    assert all(chosen[i] == i for i in range(len(good)) if good[i])


# --- ranks that are threads of one process: a barrier is their all-reduce ---


def train(cache: Filled, ranks: int, epochs: int, **options: Any) -> list[list[Any]]:
    """Return per rank and epoch the batches; every step waits for all ranks."""
    barrier = threading.Barrier(ranks, timeout=300)
    options = {"batch_size": 4, "min_samples": 1, **options}

    def one(rank: int) -> list[Any]:
        done = []
        with EpochLoader(cache.root, rank=rank, world_size=ranks, **options) as loader:
            for _ in range(epochs):
                batches = []
                for batch in loader:
                    barrier.wait()
                    batches.append(batch)
                done.append(batches)
                barrier.wait()  # a rank with a step more or less ends here with an error
        return done

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def ids(batches: list[Any]) -> list[int]:
    return [i for batch in batches for i in batch["id"].tolist()]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_together_deliver_what_one_process_would(cache: Filled, ranks: int) -> None:
    cache.add(*range(7))
    found = train(cache, ranks, 3)
    with EpochLoader(cache.root, batch_size=4 * ranks, min_samples=1) as alone:
        for epoch in range(3):
            together = [one[epoch] for one in found]
            steps = zip(*together, strict=True)
            for expected, step in zip(alone, steps, strict=True):
                joined = [i for batch in step for i in batch["id"].tolist()]
                assert joined == expected["id"].tolist()
    assert len({tuple(ids(batches)) for batches in found[0]}) == 3  # an order of its own each


def test_a_last_step_is_of_equal_batches_and_padding_is_marked(cache: Filled) -> None:
    cache.add(0, 1, samples=7)
    cache.complete()
    found = train(cache, 3, 2, batch_size=2, fixed=True)
    for epoch in range(2):
        batches = [one[epoch] for one in found]
        assert [[len(b["id"]) for b in one] for one in batches] == [[2, 2, 1]] * 3
        assert all(b["_valid"].dtype == np.bool_ for one in batches for b in one)
        valid = [
            i
            for one in batches
            for b in one
            for i, v in zip(b["id"].tolist(), b["_valid"].tolist(), strict=True)
            if v
        ]
        assert sorted(valid) == [*range(7), *range(1000, 1007)]
        assert sum(int((~b["_valid"]).sum()) for one in batches for b in one) == 1


def test_epochs_of_a_length_span_passes_alike(cache: Filled) -> None:
    cache.add(0, 1, 2)
    found = train(cache, 2, 5, samples_per_epoch=22)
    assert [[len(b["id"]) for b in epoch] for epoch in found[0]] == [[4, 4]] * 5
    delivered = [i for epoch in range(5) for one in found for i in ids(one[epoch])]
    assert len(delivered) == 5 * 16
    assert {delivered.count(i) for i in delivered} <= {2, 3}  # 80 of 30 samples


@pytest.mark.mutant(
    26,
    "growcache.loading.windows:_without_missing",
    "_substitute_missing(options, window, there)",
    "window.chosen(np.flatnonzero(there))",
)
def test_a_damaged_shard_makes_no_rank_shorter(cache: Filled) -> None:
    cache.add(0, 1, 2)
    cache.damage(1)
    reports = []

    def keep(batch: Any) -> Any:
        reports.append(batch["_valid"].tolist())
        return batch

    found = train(cache, 2, 1, drop_last=False, batch_transform=keep)
    assert [len(ids(one[0])) for one in found] == [15, 15]
    together = [i for one in found for i in ids(one[0])]
    assert {i // 1000 for i in together} == {0, 2}
    assert set(together) == {*range(10), *range(2000, 2010)}
    assert sum(valid.count(False) for valid in reports) == 10


def test_a_window_without_a_whole_shard_borrows_one(
    cache: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    from growcache.loading import plan

    monkeypatch.setattr(plan, "WINDOW_BYTES", 1)
    monkeypatch.setattr(plan, "MIN_WINDOW_SHARDS", 1)
    cache.add(0, 1, 2)
    cache.damage(1)
    found = train(cache, 2, 2)
    assert [[len(batch["id"]) for batch in epoch] for epoch in found[0]] == [[4, 4, 4]] * 2
    assert {i // 1000 for one in found for epoch in one for i in ids(epoch)} == {0, 2}


def test_where_every_shard_is_damaged_every_rank_says_so(cache: Filled) -> None:
    cache.add(0, 1)
    cache.damage(0)
    cache.damage(1)
    with pytest.raises(CacheError, match="every shard"):
        train(cache, 2, 1)


@pytest.mark.parametrize(("shuffle", "damaged"), [(True, 2), (False, 3)])
def test_ranks_resume_where_they_stood(cache: Filled, shuffle: bool, damaged: int) -> None:
    cache.add(*range(5))
    cache.damage(damaged)
    settings: dict[str, Any] = {"batch_size": 4, "min_samples": 1, "seed": 3}
    settings["shuffle"] = shuffle
    expected = [ids(one[0])[3 * 4 :] for one in train(cache, 2, 1, **settings)]
    barrier = threading.Barrier(2, timeout=300)

    def stopped(rank: int) -> Any:
        with EpochLoader(cache.root, rank=rank, world_size=2, **settings) as loader:
            epoch = iter(loader)
            for _ in range(3):
                next(epoch)
            barrier.wait()
            return loader.state_dict()

    def resumed(rank: int, state: Any) -> list[int]:
        with EpochLoader(cache.root, rank=rank, world_size=2, **settings) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            rest = ids(list(loader))
            barrier.wait()
            assert sum(1 for _ in loader) == 6  # and on, into the next pass
            barrier.wait()
            return rest

    with ThreadPoolExecutor(2) as pool:
        states = list(pool.map(stopped, range(2)))
        assert states[0]["pass"] == states[1]["pass"]
        assert states[0]["pass"]["position"] == 3 * 2 * 4
        assert list(pool.map(resumed, range(2), [states[1]] * 2)) == expected


def test_ranks_choose_the_same_substitutes_whatever_comes_meanwhile(cache: Filled) -> None:
    """Rank 0 chooses among all shards, the others among those that it took."""
    cache.add(*range(6))
    settings: dict[str, Any] = {"batch_size": 4, "min_samples": 1, "drop_last": False}
    with EpochLoader(cache.root, rank=0, world_size=1, **settings) as alone:
        next(iter(alone))
        state = alone.state_dict()
    cache.cache.evict([0, 1, 2, 3])
    cache.poll()
    cache.add(10, samples=9)
    cache.add(11, 12, samples=14)

    def resumed(rank: int) -> tuple[Any, list[int]]:
        with EpochLoader(cache.root, rank=rank, world_size=2, **settings) as loader:
            loader.load_state_dict(state, missing="substitute")
            batches = iter(loader)
            first = next(batches)
            return loader.state_dict()["pass"], ids([first, *batches])

    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(resumed, 0)
        wait_until(
            lambda: any(lease.settled and lease.ranks for lease in open_leases(cache.root))
        )
        cache.add(13, 14)  # they would fit better
        follower = pool.submit(resumed, 1)
        (plan, mine), (other_plan, others) = leader.result(300), follower.result(300)
    assert plan == other_plan
    shards = {name // 1000 for name in mine + others}
    assert shards & {10, 11, 12}
    assert not shards & {13, 14}


@pytest.mark.mutant(
    26,
    "growcache.cache.lease_views:LeaseView.used",
    "if self.ranks is not None and self.ranks.rank:\n    return ()",
    "",
)
def test_all_ranks_together_count_as_one_use(cache: Filled) -> None:
    cache.add(0, 1, 2, 3)
    train(cache, 2, 3)
    uses = cache.uses()
    # A rank that closes its loader has started the next pass, whose first window counts or not.
    assert set(uses.values()) <= {3, 4}


def test_ranks_of_unlike_arguments_are_told_so(cache: Filled) -> None:
    cache.add(0, 1)
    with (
        EpochLoader(cache.root, batch_size=4, min_samples=1, rank=0, world_size=2) as leader,
        EpochLoader(cache.root, batch_size=5, min_samples=1, rank=1, world_size=2) as follower,
        ThreadPoolExecutor(1) as pool,
    ):
        other = pool.submit(next, iter(leader))
        with pytest.raises(
            ConfigError, match=r"batch_size must be equal .* rank 0 has 4, rank 1"
        ):
            next(iter(follower))
        leader.close()
        with pytest.raises(RuntimeError, match="closed"):
            other.result()


# --- the ranks' leases ---


def rank_of(cache: Filled, rank: int, ranks: int = 2) -> rank_sync.RankGroup:
    options = LoaderOptions(
        path=cache.root, batch_size=1, ranks=Ranks(rank, ranks, rank, ranks, True)
    )
    return rank_group(options, next_rank_note(options))


def watch() -> WaitControl:
    stop = threading.Event()
    return WaitControl(stop, stop.is_set)


@pytest.mark.mutant(
    26,
    "growcache.loading.rank_sync:_Leader.settle.all_here",
    "True if left <= over else None",
    "True",
)
def test_a_follower_takes_what_rank_0_took_though_it_was_retired_since(cache: Filled) -> None:
    cache.add(0, 1, 2)
    leader, follower = rank_of(cache, 0), rank_of(cache, 1)
    first = leader.take(0, watch(), read_index(cache.root))
    assert first is not None
    assert not follower.offers(0)  # rank 0 may still drop shards
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(leader.settle, first, watch())
        wait_until(lambda: follower.offers(0))
        cache.add(3)
        cache.cache.evict([1])
        assert not settled.done()  # no rank follows yet
        second = follower.take(0, watch(), read_index(cache.root))
        assert second is not None
        settled.result(300)
    first.close()
    cache.poll()
    with second:
        assert [row.number for row in second.shards] == [0, 1, 2]
        assert second.view.totals.retired_shards == 1
        assert second[10]["id"] == 1000


def test_a_follower_whose_rank_0_is_gone_ends(cache: Filled) -> None:
    cache.add(0, 1)
    leader, follower = rank_of(cache, 0), rank_of(cache, 1)
    first = leader.take(0, watch(), read_index(cache.root))
    assert first is not None
    first.lease.settle()
    copied = follower.take(0, watch(), read_index(cache.root))
    assert copied is not None
    first.close()
    with copied, pytest.raises(CacheError, match=r"rank 0 of job default .* ended"):
        follower.take(1, watch(), read_index(cache.root))


@pytest.mark.parametrize("evicted", [False, True])
def test_rank_0_may_be_over_when_its_list_is_copied(
    cache: Filled, monkeypatch: pytest.MonkeyPatch, evicted: bool
) -> None:
    cache.add(0, 1)
    leader, follower = rank_of(cache, 0), rank_of(cache, 1)
    first = leader.take(0, watch(), read_index(cache.root))
    assert first is not None
    close = first.close
    first.lease.settle()

    class Late(Snapshot):
        @classmethod
        def copy(cls, *arguments: Any, **keywords: Any) -> Snapshot:
            copied = Snapshot.copy(*arguments, **keywords)
            close()
            if evicted:
                cache.retire(1)
            return copied

    monkeypatch.setattr(rank_sync, "Snapshot", Late)
    if evicted:
        with pytest.raises(CacheError, match=r"rank 0 of job default .* ended"):
            follower.take(0, watch(), read_index(cache.root))
        return
    copied = follower.take(0, watch(), read_index(cache.root))
    assert copied is not None
    with copied, pytest.raises(CacheError, match=r"rank 0 of job default .* ended"):
        follower.take(1, watch(), read_index(cache.root))


def test_rank_0_goes_on_where_a_follower_is_gone(cache: Filled) -> None:
    cache.add(0, 1)
    leader, follower = rank_of(cache, 0), rank_of(cache, 1)
    first = leader.take(0, watch(), read_index(cache.root))
    assert first is not None
    first.lease.settle()
    copied = follower.take(0, watch(), read_index(cache.root))
    assert copied is not None
    leader.settle(first, watch())
    copied.close()
    second = leader.take(1, watch(), read_index(cache.root))
    assert second is not None
    leader.settle(second, watch())  # returns, or the test's time is over
    first.close()
    second.close()


def test_a_rank_that_never_comes_is_named_and_not_waited_for_for_ever(
    cache: Filled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_sync, "WARN_SECONDS", 0.0)
    monkeypatch.setattr(rank_sync, "PATIENCE_SECONDS", 0.5)
    cache.add(0)
    leader, follower = rank_of(cache, 0, 3), rank_of(cache, 1, 3)
    with pytest.raises(
        CacheError, match=r"waited .* for rank 0 to take the snapshot of pass 0"
    ):
        follower.take(0, watch(), read_index(cache.root))
    first = leader.take(0, watch(), read_index(cache.root))
    assert first is not None
    with first, pytest.raises(CacheError, match=r"waited .* for ranks 1, 2 to take the same"):
        leader.settle(first, watch())
    assert sum("waits for rank 0" in text for text in caplog.messages) == 1
    assert sum("waits for ranks 1, 2" in text for text in caplog.messages) == 1


def test_a_rank_that_begins_elsewhere_is_refused(cache: Filled) -> None:
    cache.add(0)
    leader, follower = rank_of(cache, 0), rank_of(cache, 1)
    first = leader.take(7, watch(), read_index(cache.root))
    assert first is not None
    first.lease.settle()
    with first, pytest.raises(CacheError, match="starts with pass 0, but rank 0 with pass 7"):
        follower.take(0, watch(), read_index(cache.root))


def test_a_walk_has_at_most_two_leases_per_rank(cache: Filled) -> None:
    cache.add(*range(4))
    most = [0]

    def count(batch: Any) -> Any:
        leases = open_leases(cache.root)
        found = [lease.ranks.rank for lease in leases if lease.ranks]
        most[0] = max([most[0], *(found.count(rank) for rank in found)])
        return batch

    train(cache, 2, 4, batch_transform=count)
    assert most[0] <= 2


# --- real processes, torch.distributed, a service that fills the cache meanwhile ---


@contextmanager
def job(
    cache: Path, out: Path, ranks: int, epochs: int, *settings: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks of a job; whoever is left at the end is killed."""
    pytest.importorskip("torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launched = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            command = [sys.executable, str(HERE / "train_rank.py"), str(cache)]
            process = subprocess.Popen(
                [*command, str(out / f"{rank}.jsonl"), str(epochs), *settings],
                env={**launched, "RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def finish(processes: list[subprocess.Popen[str]], seconds: float = 300) -> None:
    for process in processes:
        _, errors = process.communicate(timeout=seconds)
        assert process.returncode == 0, errors


def epochs_of(out: Path, ranks: int) -> list[list[Any]]:
    lines = [(out / f"{rank}.jsonl").read_text().splitlines() for rank in range(ranks)]
    return [
        [json.loads(line) for line in lines_of_epoch]
        for lines_of_epoch in zip(*lines, strict=True)
    ]


@pytest.mark.torch
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_train_in_step_while_the_cache_grows_and_evicts(
    tmp_path: Path, ranks: int
) -> None:
    url = make_source(tmp_path / "data", 600)
    cache: dict[str, Any] = {"path": str(tmp_path / "cache"), "max_bytes": "1400KB"}
    sampling = {"workers": 1, "shard_samples": 8, "max_bytes_per_second": "300KB"}
    config = write_config(tmp_path / "cache.yaml", url, cache=cache, sampling=sampling)
    settings = ["batch_size=4", "min_samples=40"]
    with (
        job(tmp_path / "cache", tmp_path, ranks, 6, *settings) as processes,
        service(config),
    ):
        finish(processes)
    sizes: list[int] = []
    seen: set[float] = set()
    for epoch in epochs_of(tmp_path, ranks):
        assert len({len(one["steps"]) for one in epoch}) == 1
        values = [x for one in epoch for step in one["steps"] for x in step]
        assert len(set(values)) == len(values)  # each sample once, over all ranks
        sizes.append(len(values))
        seen.update(values)
    assert len(sizes) == 6
    assert sizes[0] >= 40 - 4 * ranks
    assert len(seen) > max(sizes)  # the snapshots were different ones


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("killed", [0, 1])
def test_a_job_goes_on_when_it_is_started_again_after_a_rank_was_killed(
    tmp_path: Path, killed: int
) -> None:
    url = make_source(tmp_path / "data", 200, (4, 16))
    config = write_config(tmp_path / "cache.yaml", url)
    settings = ["batch_size=4", "min_samples=40"]
    out = tmp_path / f"{killed}.jsonl"
    with (
        service(config),
        job(tmp_path / "cache", tmp_path, 2, 10**6, *settings) as first,
    ):
        wait_until(lambda: out.exists() and out.stat().st_size)
        first[killed].send_signal(signal.SIGKILL)
        # The other one is still there, in its all-reduce or waiting for the dead.
        for path in tmp_path.glob("*.jsonl"):
            path.rename(path.with_suffix(".first"))
        with job(tmp_path / "cache", tmp_path, 2, 3, *settings) as second:
            finish(second)
        _, errors = first[1 - killed].communicate(timeout=300)
        assert first[1 - killed].returncode != 0, errors
    for epoch in epochs_of(tmp_path, 2):
        assert len({len(one["steps"]) for one in epoch}) == 1
