"""Epochs hold what they should, run on while the cache changes, and end cleanly."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from growcache.cache.formats.mapped import MappedShard
from growcache.cache.lease_views import read_leases
from growcache.cache.reader_lease import Lease
from growcache.errors import CacheError, ConfigError
from growcache.loading import blocks, buffers, passes, plan
from growcache.loading.blocks import Batch, Block, BlockAssembler
from growcache.loading.channel import QueuedStage
from growcache.loading.consumer import Consumer
from growcache.loading.framework import NUMPY, Framework
from growcache.loading.gather_process import ProcessStage
from growcache.loading.options import LoaderOptions, Ranks
from growcache.loading.snapshot import Snapshot
from growcache.loading.windows import OpenWindow
from growcache.schema import Origin, Sample
from growcache.threads import DaemonThread
from tests.filled import open_leases
from tests.forked import fork
from tests.ragged import ragged_cache

MakeConsumer = Callable[..., Consumer]
IsItem = Callable[[FrameType, str, Any], bool]


def threads() -> list[str]:
    """The loaders' own: without those of formats and stores, and those that all loaders have in common."""
    common = (
        "growcache-user",
        "growcache-hdf5",
        "growcache-counters",
        "growcache-sigterm",
        "growcache-read",
    )
    names = {t.name for t in threading.enumerate()}
    return sorted(n for n in names if n.startswith("growcache") and not n.startswith(common))


@pytest.fixture
def make_consumer() -> Iterator[MakeConsumer]:
    made: list[Consumer] = []

    def make(cache: Any, **options: Any) -> Consumer:
        options = {"batch_size": 8, "min_samples": 1, **options}
        made.append(Consumer(LoaderOptions(path=cache.root, **options)))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert threads() == []


def ids(epoch: Iterator[Batch]) -> list[int]:
    found: list[int] = []
    for batch in epoch:
        np.testing.assert_array_equal(
            batch["x"].reshape(len(batch["id"]), -1)[:, 0], batch["id"]
        )
        found += batch["id"].tolist()
    return found


def everything(*numbers: int, samples: int = 10) -> list[int]:
    return [1000 * n + i for n in sorted(numbers) for i in range(samples)]


def settled(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("shape", [(4,), (130, 128)], ids=["small", "large"])
def test_an_epoch_is_every_sample_once(
    make_cache: Any, make_consumer: MakeConsumer, shape: Any
) -> None:
    cache = make_cache(shape=shape)
    cache.add(*range(12))
    loader = make_consumer(cache, drop_last=False, batch_size=7)
    first, second = ids(loader.epoch()), ids(loader.epoch())
    assert sorted(first) == sorted(second) == everything(*range(12))
    assert first != second
    assert first != sorted(first)


def test_batches_are_full_unless_the_last_is_kept(
    cache: Any, make_consumer: MakeConsumer
) -> None:
    cache.add(0, 1, 2)
    full = [len(b["id"]) for b in make_consumer(cache).epoch()]
    kept = [len(b["id"]) for b in make_consumer(cache, drop_last=False).epoch()]
    assert full == [8, 8, 8]
    assert kept == [8, 8, 8, 6]


def test_the_order_depends_on_the_seed_alone(cache: Any, make_consumer: MakeConsumer) -> None:
    cache.add(*range(8))
    orders = [
        [ids(loader.epoch()), ids(loader.epoch())]
        for loader in (
            make_consumer(cache, seed=3),
            make_consumer(cache, seed=3),
            make_consumer(cache, seed=4),
        )
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_without_shuffle_shards_come_by_number(cache: Any, make_consumer: MakeConsumer) -> None:
    cache.add(5, 1, 3)
    assert ids(make_consumer(cache, shuffle=False, batch_size=10).epoch()) == everything(
        1, 3, 5
    )


def test_epochs_grow_with_the_cache(cache: Any, make_consumer: MakeConsumer) -> None:
    cache.add(0, 1)
    loader = make_consumer(cache, drop_last=False)
    sizes = []
    for number in range(2, 8):
        sizes.append(len(ids(loader.epoch())))
        cache.add(number)
    # Each epoch's snapshot is taken while the one before it runs, so it may lag by what
    # was added since, but never further behind.
    for epoch, size in enumerate(sizes):
        assert size in {20 + 10 * epoch, max(20, 10 + 10 * epoch)}
    assert sizes[-1] >= 60


class Due:
    """Decides by the rows left of the pass whether the next snapshot is due, and counts the calls.

    By the pace of the loop it is another matter, which `test_timing` is about: on a machine
    with other work the pace is anything.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._asked = threading.Semaphore(0)

    def __call__(self, left: int, pace: float, prepare: float | None, whole: int) -> bool:
        self._asked.release()
        return left <= self._rows

    def asked_again(self, times: int) -> None:
        """Wait until it was asked so often, from now on."""
        while self._asked.acquire(blocking=False):
            pass
        for _ in range(times):
            assert self._asked.acquire(timeout=300)


def test_what_comes_while_an_epoch_lasts_is_in_the_next_one(
    cache: Any, make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of one window, of which a batch was delivered: its snapshot is not taken yet."""
    monkeypatch.setattr(passes, "is_due", due := Due(2000))
    cache.add(*range(40), samples=100)
    loader = make_consumer(cache, drop_last=False)
    epoch = loader.epoch()
    first = next(epoch)["id"].tolist()
    due.asked_again(20)
    assert len(open_leases(cache.root)) == 1
    cache.add(99, samples=100)
    assert sorted(first + ids(epoch)) == everything(*range(40), samples=100)
    assert sorted(ids(loader.epoch())) == everything(*range(40), 99, samples=100)


def test_of_a_pass_of_several_epochs_the_next_snapshot_is_taken_near_the_end(
    cache: Any, make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So the thread is not through with the pass before the loop is.
    monkeypatch.setattr(blocks, "BLOCK_BATCHES", 1)
    monkeypatch.setattr(buffers, "MAX_IN_FLIGHT", buffers.MIN_IN_FLIGHT)
    monkeypatch.setattr(passes, "is_due", due := Due(1000))
    cache.add(*range(40), samples=100)
    loader = make_consumer(cache, samples_per_epoch=400)
    found: list[int] = []
    for batch in itertools.chain(*(loader.epoch() for _ in range(3))):
        found += batch["id"].tolist()
    next(loader.epoch())  # what is left of it is gone, but not the pass
    found += next(epoch := loader.epoch())["id"].tolist()
    due.asked_again(20)
    assert len(open_leases(cache.root)) == 1
    cache.add(99, samples=100)
    found += itertools.chain(ids(epoch), *(ids(loader.epoch()) for _ in range(5)))
    assert len(found) == len(set(found)) == 3600
    assert set(found) < set(everything(*range(40), samples=100))
    following = itertools.chain(*(ids(loader.epoch()) for _ in range(11)))
    assert set(following) == set(everything(*range(40), 99, samples=100))


def test_retired_shards_leave_and_maps_follow(cache: Any, make_consumer: MakeConsumer) -> None:
    cache.add(0, 1, 2)
    loader = make_consumer(cache, drop_last=False)
    ids(loader.epoch())
    cache.retire(0)
    cache.add(3)
    seen = [set(ids(loader.epoch())) for _ in range(3)]
    assert seen[-1] == set(everything(1, 2, 3))


def test_epochs_of_a_given_length_carry_the_cursor_over(
    cache: Any, make_consumer: MakeConsumer
) -> None:
    cache.add(0, 1, 2)  # 30 samples
    loader = make_consumer(cache, samples_per_epoch=24)
    epochs = [ids(loader.epoch()) for _ in range(5)]
    assert [len(e) for e in epochs] == [24] * 5
    stream = list(itertools.chain(*epochs))
    for start in range(0, 120, 30):
        assert sorted(stream[start : start + 30]) == everything(0, 1, 2)


def test_an_epoch_may_be_longer_than_the_cache(cache: Any, make_consumer: MakeConsumer) -> None:
    cache.add(0)
    loader = make_consumer(cache, samples_per_epoch=37, drop_last=False)
    batches = [len(b["id"]) for b in loader.epoch()]
    assert batches == [8, 8, 8, 8, 5]
    assert len(ids(loader.epoch())) == 37
    assert loader.report.passes >= 7


def test_the_tail_of_a_given_length_is_not_lost(
    cache: Any, make_consumer: MakeConsumer
) -> None:
    cache.add(0, 1)
    loader = make_consumer(
        cache, samples_per_epoch=13
    )  # one batch of 8; the next epoch goes on there
    stream = list(itertools.chain(*(ids(loader.epoch()) for _ in range(5))))
    assert sorted(stream[:20]) == everything(0, 1)


@pytest.mark.parametrize("length", [None, 64])
def test_breaking_off_discards_the_rest_and_nothing_else(
    cache: Any, make_consumer: MakeConsumer, length: int | None
) -> None:
    cache.add(*range(8))
    through = make_consumer(cache, samples_per_epoch=length)
    expected = [ids(through.epoch()) for _ in range(3)]
    broken = make_consumer(cache, samples_per_epoch=length)
    assert next(broken.epoch())["id"].tolist() == expected[0][:8]
    assert next(broken.epoch())["id"].tolist() == expected[1][:8]
    assert ids(broken.epoch()) == expected[2]


def test_an_older_iterator_says_that_it_is_over(
    cache: Any, make_consumer: MakeConsumer
) -> None:
    """At once, though batches of its block are there still; and nothing moves by it."""
    cache.add(*range(10))
    loader = make_consumer(cache, samples_per_epoch=40)
    old = loader.epoch()
    next(old)
    new = loader.epoch()
    next(new)
    stands = loader.position()
    with pytest.raises(RuntimeError, match="a new iteration began"):
        next(old)
    assert loader.position() == stands
    assert len(list(new)) == 4


@pytest.mark.parametrize("end", ["close", "load"])
def test_an_iterator_ends_with_what_made_its_batches(
    cache: Any, make_consumer: MakeConsumer, end: str
) -> None:
    cache.add(*range(10))
    loader = make_consumer(cache)
    epoch = loader.epoch()
    next(epoch)
    stood = loader.position()
    next(epoch)
    if end == "close":
        loader.close()
    else:
        loader.reset(stood, "error")
    stands = loader.position()
    with pytest.raises(RuntimeError, match="the loader was closed"):
        next(epoch)
    assert loader.position() == stands


def test_at_most_two_leases_and_none_afterwards(
    cache: Any, make_consumer: MakeConsumer
) -> None:
    cache.add(*range(10), samples=20)
    loader = make_consumer(cache, job="mine")
    for _ in range(4):
        for _ in loader.epoch():
            leases = open_leases(cache.root)
            assert len(leases) <= 2
            assert {lease.job for lease in leases} == {"mine"}
    loader.close()
    assert not any(lease.open for lease in read_leases(cache.root))
    assert threads() == []


@pytest.mark.mutant(
    25,
    "growcache.loading.passes:Passes._begin_pass_ahead.prepare",
    "self._close_left_passes()",
    "",
)
def test_at_most_two_leases_where_passes_are_much_shorter_than_epochs(
    cache: Any, make_consumer: MakeConsumer
) -> None:
    """The thread runs ahead by several passes, of which none was delivered to its end."""
    cache.add(*range(10), samples=20)
    loader = make_consumer(cache, samples_per_epoch=4000)
    for batch, _ in enumerate(loader.epoch()):
        if batch % 50 == 0:
            assert len(open_leases(cache.root)) <= 2
    loader.close()
    assert not any(lease.open for lease in read_leases(cache.root))


def test_a_pass_that_is_over_keeps_no_lease_where_all_of_the_next_one_is_made(
    cache: Any, make_consumer: MakeConsumer
) -> None:
    """The thread waits for the next epoch, which may begin in an hour; evictions wait for it."""
    cache.add(0)
    loader = make_consumer(cache)
    epoch = loader.epoch()
    next(epoch)
    assert settled(lambda: len(open_leases(cache.root)) == 2)
    time.sleep(0.2)  # by then the only block of the second epoch is made
    assert list(epoch) == []
    assert settled(lambda: len(open_leases(cache.root)) == 1)


def items(loader: Consumer) -> Any:
    """What a thread has made, and the loop has not received."""
    source: Any = loader.stage
    return source.items


@pytest.mark.mutant(
    25, "growcache.loading.passes:Passes._close_left_passes", "self._closing", "ExitStack()"
)
def test_no_third_lease_is_taken_while_the_loader_still_closes_the_first(
    cache: Any, make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So it is at blocks of the next epoch when the loop is through with one.
    monkeypatch.setattr(blocks, "BLOCK_BATCHES", 1)
    monkeypatch.setattr(buffers, "MAX_IN_FLIGHT", buffers.MIN_IN_FLIGHT)
    monkeypatch.setattr(
        passes, "is_due", lambda *_: True
    )  # the next snapshot, as an epoch begins
    cache.add(*range(10))
    closing, taken, most = threading.Event(), threading.Event(), [0]
    close, create = Snapshot.close, Lease.create

    def close_slowly(snapshot: Snapshot) -> None:
        if threading.current_thread().name == "growcache-loader" and not snapshot.closed:
            taken.clear()
            closing.set()
            taken.wait(0.3)  # whoever does not wait for this has its lease by then
        close(snapshot)

    def counted(*arguments: Any, **keywords: Any) -> Lease:
        lease = create(*arguments, **keywords)
        most[0] = max(most[0], len(open_leases(cache.root)))
        taken.set()
        return lease

    monkeypatch.setattr(Snapshot, "close", close_slowly)
    monkeypatch.setattr(Lease, "create", counted)
    loader = make_consumer(cache, gather="thread")
    for _ in range(4):
        epoch = loader.epoch()
        assert len(list(itertools.islice(epoch, 12))) == 12
        # Behind them wait the end, another pass, and two blocks; a third one is made.
        assert settled(lambda: items(loader).qsize() == 4)
        closing.clear()
        assert list(epoch) == []
        assert closing.wait(300)  # by the thread that walks
    loader.close()
    assert most[0] == 2


def rows_of_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each block that is made from now on."""
    found: list[int] = []
    finish = BlockAssembler.finish

    def noted(assembler: BlockAssembler, epoch: int) -> Block:
        block = finish(assembler, epoch)
        found.append(block.rows)
        return block

    monkeypatch.setattr(BlockAssembler, "finish", noted)
    return found


def has_made(loader: Consumer, least: int) -> bool:
    return bool(items(loader).qsize() >= least)


@pytest.mark.parametrize("length", [None, 200])
def test_who_waits_for_an_epoch_gets_its_first_batches_in_small_blocks(
    cache: Any, make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch, length: int | None
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BATCHES", 12)
    cache.add(*range(10), samples=20)
    made = rows_of_blocks(monkeypatch)
    loader = make_consumer(cache, gather="thread", samples_per_epoch=length, drop_last=False)
    for _ in range(3):
        for batch, _ in enumerate(loader.epoch(), 1):
            # The next block is ready before it is asked for, so nothing waits for it; behind the
            # last batch that is the end, another pass, and a block.
            assert settled(functools.partial(has_made, loader, 1 if batch < 25 else 3))
    assert made[:4] == [8, 32, 96, 64]
    if length is None:
        assert len(made) > 10  # nobody waited for the second epoch, or for the third
        assert made[4:] == list(itertools.islice(itertools.cycle([96, 96, 8]), len(made) - 4))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"samples_per_epoch": 130},
        {"drop_last": False},
        {"transform": lambda sample: {"id": sample["id"], "x": sample["x"] + 0}},
    ],
    ids=["passes", "fixed", "all", "transform"],
)
def test_what_comes_is_the_same_however_large_the_blocks_are(
    cache: Any,
    make_consumer: MakeConsumer,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    cache.add(*range(5), samples=20)
    found = []
    for first_bytes, batches in ((0, 12), (1 << 40, 128), (600, 5)):
        monkeypatch.setattr(blocks, "FIRST_BYTES", first_bytes)
        monkeypatch.setattr(blocks, "BLOCK_BATCHES", batches)
        loader = make_consumer(cache, gather="thread", **options)
        epochs: list[Any] = []
        for number in range(4):
            # The second one is left early.
            epochs.append(ids(itertools.islice(loader.epoch(), 3 if number == 1 else None)))
            epochs.append(loader.position())
        found.append(epochs)
        loader.close()
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("where", ["before the walk", "as it begins"])
def test_an_error_before_the_first_block_reaches_the_loop(
    cache: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    cache.add(0)
    framework = Framework(prepare=fail) if where == "before the walk" else NUMPY
    monkeypatch.setattr(DaemonThread, "submit", fail)
    loader = Consumer(LoaderOptions(cache.root, batch_size=8, min_samples=1), framework)
    with pytest.raises(RuntimeError, match="new thread"):
        next(loader.epoch())
    assert threads() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_leases_and_threads_end_though_letting_go_of_memory_fails(
    cache: Any, make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(window: OpenWindow) -> None:
        raise OSError("no file can be opened")

    cache.add(*range(4))
    monkeypatch.setattr(OpenWindow, "close", fail)
    loader = make_consumer(cache, transform=lambda sample: sample, samples_per_epoch=8)
    with pytest.raises(OSError, match="no file"):
        list(itertools.chain.from_iterable(loader.epoch() for _ in range(100)))
    assert open_leases(cache.root) == []
    assert threads() == []


def test_a_framework_may_have_several_batches_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cuts them itself; a piece ends where a block does."""
    monkeypatch.setattr(blocks, "BLOCK_BATCHES", 7)
    monkeypatch.setattr(blocks, "FIRST_BYTES", 1 << 40)
    cache = ragged_cache(tmp_path / "ragged", {"x": ["float32", None, 2]})
    cache.add(*range(10))
    options = LoaderOptions(cache.root, batch_size=4, min_samples=1, drop_last=False)
    epochs: list[list[Batch]] = []
    with contextlib.closing(cache):
        for batches_at_once in (1, 3):
            loader = Consumer(options, Framework(batches_at_once=batches_at_once))
            with contextlib.closing(loader):
                epochs.append(list(loader.epoch()))
                assert loader.position().step == 0
                assert loader.report.samples == 100
    _, pieces = epochs
    assert [len(piece["id"]) for piece in pieces] == [12, 12, 4] * 3 + [12, 4]
    for name in ("id", "x"):
        whole, cut = (np.concatenate([batch[name] for batch in epoch]) for epoch in epochs)
        np.testing.assert_array_equal(whole, cut)
    assert [len(piece["x_offsets"]) for piece in pieces] == [13, 13, 5] * 3 + [13, 5]


def test_every_pass_counts_as_one_use(cache: Any, make_consumer: MakeConsumer) -> None:
    cache.add(*range(5))
    loader = make_consumer(cache, drop_last=False)
    for _ in range(3):
        ids(loader.epoch())
    loader.close()
    uses = [list(lease.used()) for lease in read_leases(cache.root)]
    assert uses.count([0, 1, 2, 3, 4]) >= 3


def test_what_was_not_delivered_is_no_use(
    make_cache: Any, make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BATCHES", 1)
    cache = make_cache(shape=(130, 128))
    cache.add(0, samples=400)
    cache.add(1, samples=400)
    loader = make_consumer(cache, shuffle=False)
    next(loader.epoch())
    loader.close()
    assert {n for lease in read_leases(cache.root) for n in lease.used()} == {0}


def test_collecting_the_loader_ends_its_thread(cache: Any) -> None:
    cache.add(0, 1)
    loader = Consumer(LoaderOptions(path=cache.root, batch_size=8, min_samples=1))
    next(loader.epoch())
    assert threads()
    del loader
    gc.collect()
    assert settled(lambda: threads() == [])
    assert not any(lease.open for lease in read_leases(cache.root))


def test_a_window_that_fails_when_nobody_wants_it_leaves_no_lease(
    make_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next window is mapped ahead; the loader is closed before it is entered."""
    monkeypatch.setattr(plan, "WINDOW_BYTES", 1)
    monkeypatch.setattr(blocks, "BLOCK_BATCHES", 1)
    cache = make_cache(shape=(130, 128))
    cache.add(*range(8))
    mapped, failed = itertools.count(1), threading.Event()

    ordinary = MappedShard.digest

    def digest(shard: MappedShard, *, asking: bool) -> str:
        if next(mapped) > plan.MIN_WINDOW_SHARDS:
            failed.set()
            raise OSError("out of files")
        return ordinary(shard, asking=asking)

    monkeypatch.setattr(MappedShard, "digest", digest)
    loader = Consumer(LoaderOptions(path=cache.root, batch_size=2, min_samples=1))
    next(loader.epoch())
    assert failed.wait(300)
    loader.close()
    assert not any(lease.open for lease in read_leases(cache.root))
    assert settled(lambda: threads() == [])


def test_batches_that_are_kept_stay_as_they_were(
    make_cache: Any, make_consumer: MakeConsumer
) -> None:
    cache = make_cache(shape=(130, 128))
    cache.add(*range(20))
    loader = make_consumer(cache)
    kept = [batch for _ in range(2) for batch in loader.epoch()]
    for batch in kept:
        assert (batch["x"] == batch["id"][:, None, None]).all()


def test_a_corrupt_shard_is_left_out(
    cache: Any, make_consumer: MakeConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    cache.add(0, 1, 2)
    cache.damage(1)
    loader = make_consumer(cache, drop_last=False)
    with caplog.at_level(logging.WARNING):
        assert sorted(ids(loader.epoch())) == everything(0, 2)
    assert loader.report.skipped >= 10
    assert "00000001.tfrecord" in caplog.text


@pytest.mark.parametrize("length", [None, 8])
def test_nothing_but_corrupt_shards_is_an_error(
    cache: Any, make_consumer: MakeConsumer, length: int | None
) -> None:
    cache.add(0)
    cache.damage(0)
    with pytest.raises(CacheError, match="growcache check"):
        list(make_consumer(cache, samples_per_epoch=length).epoch())


def test_fewer_samples_than_a_batch_is_an_error_not_a_hang(
    cache: Any, make_consumer: MakeConsumer
) -> None:
    cache.add(0)
    cache.complete()
    with pytest.raises(ConfigError, match="drop_last=False"):
        list(make_consumer(cache, batch_size=64).epoch())
    assert len(ids(make_consumer(cache, batch_size=64, drop_last=False).epoch())) == 10


def test_fixed_is_one_pass_in_order_once_complete(
    cache: Any, make_consumer: MakeConsumer
) -> None:
    cache.add(1, 0)
    loader = make_consumer(cache, fixed=True)
    timer = threading.Thread(target=lambda: None)
    epoch = loader.epoch()
    cache.add(2)
    cache.complete()
    timer.start()
    timer.join()
    assert ids(epoch) == ids(loader.epoch()) == everything(0, 1, 2)


def test_a_fixed_set_that_changes_is_an_error(cache: Any, make_consumer: MakeConsumer) -> None:
    cache.add(0, 1)
    cache.complete()
    loader = make_consumer(cache, fixed=True)
    ids(loader.epoch())
    cache.add(2)
    with pytest.raises(CacheError, match="eviction: none"):
        list(map(ids, (loader.epoch() for _ in range(3))))


def test_it_waits_for_the_cache(cache: Any, make_consumer: MakeConsumer) -> None:
    loader = make_consumer(cache, min_samples=20)
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.extend(ids(loader.epoch())))
    cache.add(0)
    reader.start()
    reader.join(0.3)
    assert not found
    cache.add(1)
    reader.join(300)
    assert len(found) == 16
    assert loader.report.limited_by == "cache"


def test_closing_ends_a_wait_at_once(cache: Any, make_consumer: MakeConsumer) -> None:
    loader = make_consumer(cache, min_samples=20)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            ids(loader.epoch())
        except RuntimeError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.2)
    loader.close()
    reader.join(300)
    assert "closed" in str(errors[0])


def test_it_starts_again_after_close(cache: Any, make_consumer: MakeConsumer) -> None:
    cache.add(0, 1, 2)
    loader = make_consumer(cache)
    first = ids(loader.epoch())
    loader.close()
    second = ids(loader.epoch())
    assert len(second) == 24
    assert first != second


def test_transforms_see_seed_pass_and_origin(cache: Any, make_consumer: MakeConsumer) -> None:
    cache.add(*range(5))

    def transform(sample: Sample, rng: np.random.Generator, origin: Origin) -> Sample:
        number, row = map(int, origin.key.removeprefix("object-").split("-"))
        assert 1000 * number + row == sample["id"]
        return {"id": sample["id"], "x": sample["x"], "noise": rng.random(2)}

    def noise(seed: int) -> list[dict[int, float]]:
        loader = make_consumer(cache, transform=transform, seed=seed, drop_last=False)
        return [
            {
                i: n
                for b in loader.epoch()
                for i, n in zip(b["id"], b["noise"][:, 0], strict=True)
            }
            for _ in range(2)
        ]

    first, again, other = noise(0), noise(0), noise(1)
    assert first == again
    assert len(first[0]) == 50
    assert not set(first[0].values()) & set(first[1].values())
    assert not set(first[0].values()) & set(other[0].values())


def test_errors_in_a_transform_reach_the_loop(cache: Any, make_consumer: MakeConsumer) -> None:
    cache.add(0, 1)

    def bad(sample: Sample) -> Sample:
        raise ZeroDivisionError("in the user's code")

    loader = make_consumer(cache, transform=bad)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="user's code"):
            list(loader.epoch())


def test_an_interrupt_that_comes_with_the_last_word_leaves_a_loader_that_reads(
    cache: Any, make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come when the error was received, and nothing was done about it."""

    def bad(batch: Batch) -> Batch:
        raise ZeroDivisionError

    received = list[float]()

    def interrupted(make_consumer: Consumer, seconds: float) -> None:
        received.append(seconds)
        if len(received) == 2:  # behind the snapshot
            raise KeyboardInterrupt

    cache.add(0)
    made = make_consumer(cache, batch_transform=bad)
    with monkeypatch.context() as patch:
        patch.setattr(Consumer, "count_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(made.epoch())
    with pytest.raises(ZeroDivisionError):
        list(made.epoch())


def is_item_of_a_thread(frame: FrameType, event: str, argument: Any) -> bool:
    """When the call returns that what a thread made is taken by."""
    taken = event == "c_return" and argument.__name__ == "get"
    return taken and frame.f_code is QueuedStage.next.__code__


def is_item_of_a_process(frame: FrameType, event: str, argument: Any) -> bool:
    """When what a process sent is returned."""
    return event == "return" and frame.f_code is ProcessStage.next.__code__


def interrupted_epoch(made: Consumer, is_item: IsItem, lost: int) -> int:
    """Read until an item is lost; return in which epoch that is."""
    left = [lost]

    def interrupt(frame: FrameType, event: str, argument: Any) -> None:
        if is_item(frame, event, argument):
            left[0] -= 1
            if not left[0]:
                sys.setprofile(None)
                raise KeyboardInterrupt

    for epoch in itertools.count():
        running = made.epoch()
        sys.setprofile(interrupt)
        try:
            for _ in running:
                pass
        except KeyboardInterrupt:
            return epoch
        finally:
            sys.setprofile(None)
    raise AssertionError


@pytest.mark.parametrize("length", [None, 24])
@pytest.mark.parametrize(
    ("gather", "is_item"), [("thread", is_item_of_a_thread), ("process", is_item_of_a_process)]
)
@pytest.mark.parametrize(
    "lost", [1, 2, 3, *(pytest.param(lost, marks=pytest.mark.slow) for lost in (4, 5))]
)
def test_what_an_interrupt_loses_leaves_a_loader_that_reads(
    cache: Any,
    make_consumer: MakeConsumer,
    monkeypatch: pytest.MonkeyPatch,
    length: int | None,
    gather: str,
    is_item: IsItem,
    lost: int,
) -> None:
    """Python looks for signals when a call returns: what that returned is lost."""
    monkeypatch.setattr(blocks, "batches_per_block", lambda *_, **__: 1)
    cache.add(0, 1, 2, 3)
    through = make_consumer(cache, samples_per_epoch=length)
    expected = [ids(through.epoch()) for _ in range(9)]
    through.close()  # or it would hold what is retired
    made = make_consumer(cache, samples_per_epoch=length, gather=gather)
    delivered = sum(interrupted_epoch(made, is_item, lost) + 1 for _ in range(2))
    if length is None:
        cache.retire(3)  # of which nothing would be drawn again
        cache.add(4)
    found: list[list[int]] = [[], [], []]
    for epoch in found:
        for batch in made.epoch():
            epoch += batch["id"].tolist()
            assert made.position().plan is not None
    if length is None:  # a pass of which nothing was delivered begins anew
        assert sorted(found[-1]) == everything(0, 1, 2, 4)
    else:  # what another goes on with is not over before something of it was delivered
        assert found in (expected[delivered:][:3], expected[delivered - 1 :][:3])


def test_a_rank_that_lost_a_batch_says_that_all_must_begin_anew(
    cache: Any, make_consumer: MakeConsumer
) -> None:
    """It cannot go on alone: the others would not know its walk, nor wait for it."""
    cache.add(0, 1)
    first, second = (make_consumer(cache, ranks=Ranks(rank, 2, rank, 2)) for rank in range(2))
    with ThreadPoolExecutor(1) as other:
        read = other.submit(lambda: ids(first.epoch()))
        assert interrupted_epoch(second, is_item_of_a_thread, 2) == 0
        with pytest.raises(CacheError, match="on all ranks"):
            next(second.epoch())
        assert len(read.result()) == 8


def test_an_error_that_an_interrupt_loses_comes_again(
    cache: Any, make_consumer: MakeConsumer
) -> None:
    def bad(batch: Batch) -> Batch:
        raise ZeroDivisionError

    cache.add(0)
    made = make_consumer(cache, batch_transform=bad)
    assert interrupted_epoch(made, is_item_of_a_thread, 2) == 0
    with pytest.raises(ZeroDivisionError):
        list(made.epoch())


def test_a_forked_child_reads_on_its_own(cache: Any, make_consumer: MakeConsumer) -> None:
    cache.add(0, 1, 2)
    loader = make_consumer(cache)
    ids(loader.epoch())
    child = fork()
    if child == 0:
        os._exit(0 if len(ids(loader.epoch())) == 24 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(ids(loader.epoch())) == 24


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"min_samples": -1},
        {"samples_per_epoch": 4},
        {"samples_per_epoch": 80, "fixed": True},
        {"verify": "never"},
        {"transform": lambda: None},
    ],
)
def test_arguments_that_cannot_be_meant(cache: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LoaderOptions(path=cache.root, **{"batch_size": 8, **options})
