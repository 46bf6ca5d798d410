"""TensorFlow's front door: the right samples, once each, leased while TensorFlow needs them."""

from __future__ import annotations

import gc
import itertools
import logging
import mmap
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf

import growcache.tensorflow as gtf
from growcache.cache.lease_views import read_leases
from growcache.cache.status import read_status
from growcache.errors import ConfigError, CorruptShardError, FormatError
from growcache.schema import Sample
from growcache.tensorflow.native import (
    BLOCK_BATCHES,
    MAX_DECODED_BLOCKS,
    PREFETCH_BATCHES,
    NativeIteration,
)
from tests.filled import Filled, open_leases
from tests.sampling.services import (
    drawn,
    make_source,
    service,
    wait_until,
    write_config,
)
from tests.tensorflow.conftest import ids, written

pytestmark = pytest.mark.tensorflow


# What an epoch is


def test_an_epoch_is_every_sample_once_with_its_own_values(cache: Filled) -> None:
    cache.add(*range(12))
    dataset = gtf.dataset(cache.root, batch_size=16, min_samples=1, drop_last=False)
    assert isinstance(dataset, tf.data.Dataset)
    batches = list(dataset)
    assert sorted(ids(batches)) == written(*range(12))
    for batch in batches:
        assert np.array_equal(batch["x"].numpy(), np.tile(batch["id"].numpy(), (4, 1)).T)
    assert [len(batch["id"]) for batch in batches] == [16] * 7 + [8]


def test_every_iteration_has_an_order_of_its_own_and_the_seed_repeats_it(
    cache: Filled,
) -> None:
    cache.add(*range(12))

    def epochs(seed: int) -> list[list[int]]:
        dataset = gtf.dataset(cache.root, batch_size=10, min_samples=1, seed=seed)
        return [ids(dataset), ids(dataset)]

    first, second = epochs(0)
    assert sorted(first) == sorted(second) == written(*range(12))
    assert first != second
    assert [first, second] == epochs(0)
    assert epochs(1)[0] not in (first, second)


def test_a_batch_mixes_shards(cache: Filled) -> None:
    cache.add(*range(12))
    dataset = gtf.dataset(cache.root, batch_size=20, min_samples=1)
    assert all(len({i // 1000 for i in ids([batch])}) > 3 for batch in dataset)


def test_an_epoch_is_over_what_is_there_by_then(cache: Filled) -> None:
    cache.add(0, 1)
    dataset = gtf.dataset(cache.root, batch_size=5, min_samples=1)
    assert sorted(ids(dataset)) == written(0, 1)
    cache.add(2)
    cache.cache.evict([0])
    assert sorted(ids(dataset)) == written(1, 2)


def test_without_shuffle_samples_come_by_shard_and_row(cache: Filled) -> None:
    cache.add(3, 0, 7)
    dataset = gtf.dataset(cache.root, batch_size=10, min_samples=1, shuffle=False)
    assert ids(dataset) == written(0, 3, 7)


def test_drop_last_makes_full_batches_of_static_shape(cache: Filled) -> None:
    cache.add(0, 1)
    full = gtf.dataset(cache.root, batch_size=16, min_samples=1)
    assert full.element_spec["x"].shape.as_list() == [16, 4]
    assert [len(batch["id"]) for batch in full] == [16]
    rest = gtf.dataset(cache.root, batch_size=16, min_samples=1, drop_last=False)
    assert rest.element_spec["x"].shape.as_list() == [None, 4]
    assert [len(batch["id"]) for batch in rest] == [16, 4]


def test_empty_shards_are_left_out(cache: Filled) -> None:
    cache.add(0, samples=0)
    cache.add(1)
    assert sorted(ids(gtf.dataset(cache.root, batch_size=5, min_samples=1))) == written(1)


@pytest.mark.parametrize("drop_last", [True, False])
def test_samples_per_epoch_goes_on_where_the_last_epoch_ended(
    cache: Filled, drop_last: bool
) -> None:
    cache.add(*range(6))  # 60 samples
    dataset = gtf.dataset(
        cache.root, batch_size=8, min_samples=1, samples_per_epoch=20, drop_last=drop_last
    )
    sizes = [8, 8] if drop_last else [8, 8, 4]
    assert len(dataset) == len(sizes)
    epochs = [list(dataset) for _ in range(24)]
    assert all([len(b["id"]) for b in epoch] == sizes for epoch in epochs)
    seen = Counter(i for epoch in epochs for i in ids(epoch))
    assert set(seen) == set(written(*range(6)))
    # The shuffle buffer holds a quarter of a pass back, a sample now and then for longer.
    passes = 24 * sum(sizes) / 60
    assert passes - 3 <= min(seen.values()) <= max(seen.values()) <= passes + 2
    del dataset, epochs
    gc.collect()
    wait_until(lambda: not open_leases(cache.root))


def test_fixed_waits_for_the_end_and_is_one_pass_in_order(cache: Filled) -> None:
    cache.add(0, 1)
    dataset = gtf.dataset(cache.root, batch_size=16, fixed=True)

    def finish() -> None:
        time.sleep(0.3)
        cache.add(2)
        cache.complete()

    # The writer's connection belongs to this thread, so the reader gets another.
    found: list[list[int]] = []
    reader = threading.Thread(target=lambda: found.extend([ids(dataset), ids(dataset)]))
    reader.start()
    finish()
    reader.join(300)
    assert found == [written(0, 1, 2)] * 2


# What a batch is made of

VALUES = np.array([0, 1, 200, 3])
DTYPES = ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


def test_every_dtype_of_a_schema_comes_as_it_was_written(
    make_cache: Callable[..., Filled],
) -> None:
    def sample(name: int) -> Sample:
        made = {dtype: (VALUES * 3 + name % 7).astype(dtype).reshape(2, 2) for dtype in DTYPES}
        made["u8"] = made["u8"] + np.uint64(2**63)
        made["u4"] = made["u4"] + np.uint32(2**31)
        return {**made, "none": np.zeros((2, 0), "f4"), "scalar": np.array(name, "u4")}

    cache = make_cache(sample)
    cache.add(0)
    [batch] = gtf.dataset(cache.root, batch_size=10, min_samples=1, shuffle=False)
    for field in cache.schema.fields:
        expected = np.stack([s[field.name] for s in cache.samples(0, 10)])
        assert batch[field.name].dtype == tf.as_dtype(np.dtype(field.dtype))
        assert batch[field.name].shape == (10, *field.shape)
        np.testing.assert_array_equal(batch[field.name].numpy(), expected)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="longdouble is float64")
def test_a_dtype_that_tensorflow_lacks_is_refused_by_name(
    make_cache: Callable[..., Filled],
) -> None:
    cache = make_cache(lambda name: {"id": np.array(name), "q": np.ones(2, np.longdouble)})
    cache.add(0)
    with pytest.raises(FormatError, match="'q' has dtype float128"):
        gtf.dataset(cache.root, batch_size=4)
    left_out = gtf.dataset(cache.root, batch_size=10, min_samples=1, as_tuple=("id",))
    assert sorted(left_out.as_numpy_iterator().next()[0]) == written(0)


def test_as_tuple(cache: Filled) -> None:
    cache.add(0)
    x, name = next(
        iter(gtf.dataset(cache.root, batch_size=4, min_samples=1, as_tuple=("x", "id")))
    )
    assert np.array_equal(x.numpy()[:, 0], name.numpy())
    with pytest.raises(ConfigError, match="no field 'z'; there are id, x"):
        gtf.dataset(cache.root, batch_size=4, as_tuple=("z",))
    with pytest.raises(ConfigError, match="sequence of names"):
        gtf.dataset(cache.root, batch_size=4, as_tuple="x")


@pytest.mark.parametrize(
    "arguments", [{"batch_size": 0}, {"verify": "never"}, {"endless": True, "fixed": True}]
)
def test_arguments_that_cannot_be_meant(cache: Filled, arguments: dict[str, Any]) -> None:
    cache.add(0)
    with pytest.raises(ConfigError):
        gtf.dataset(cache.root, **{"batch_size": 4, **arguments})


# Waiting


def test_a_dataset_waits_for_its_cache_and_says_so(
    tmp_path: Path, make_cache: Callable[..., Filled], caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "cache"
    found: list[list[int]] = []

    def read() -> None:
        dataset = gtf.dataset(root, batch_size=10, min_samples=30)
        found.append(ids(dataset))

    with caplog.at_level(logging.WARNING):
        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: "waiting for a cache at" in caplog.text)
        cache = make_cache()
        cache.add(0, 1)
        wait_until(lambda: "waiting for 30 samples" in caplog.text)
        assert not found
        cache.add(2)
        reader.join(300)
    assert [sorted(epoch) for epoch in found] == [written(0, 1, 2)]


def test_a_cache_that_will_never_make_a_batch_is_refused(cache: Filled) -> None:
    cache.add(0)
    cache.complete()
    with pytest.raises(ConfigError, match="less than one batch of 16"):
        iter(gtf.dataset(cache.root, batch_size=16))
    endless = gtf.dataset(cache.root, batch_size=16, endless=True)
    assert len(ids(endless.take(3))) == 48  # its batches run on across passes


INTERRUPTED = """
import os, signal, sys, threading
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import growcache.tensorflow as gtf
dataset = gtf.dataset(sys.argv[1], batch_size=4, min_samples=1000)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    next(iter(dataset))
except KeyboardInterrupt:
    sys.exit(7)
"""


@pytest.mark.slow
def test_control_c_ends_a_wait(cache: Filled) -> None:
    cache.add(0)
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(cache.root)], timeout=300, check=False
    )
    assert done.returncode == 7


# Leases


def count_when_still(count: Callable[[], int]) -> int:
    """Return what it counts once that was the same for a while: TensorFlow runs ahead."""
    seen = [count()]

    def is_still() -> bool:
        seen.append(count())
        return seen[-1] == seen[-2]

    wait_until(is_still, every=0.5)
    return seen[-1]


def test_bytes_are_let_go_as_batches_come_and_uses_are_counted_once(cache: Filled) -> None:
    cache.add(*range(100), samples=20)
    dataset = gtf.dataset(cache.root, batch_size=20, min_samples=1, shuffle=False)
    iterator = iter(dataset)
    for _ in range(20):
        next(iterator)
    used = count_when_still(lambda: len(open_leases(cache.root)[0].used()))
    # TensorFlow runs ahead by a few blocks of batches, not by the files it has asked for.
    ahead = PREFETCH_BATCHES + (MAX_DECODED_BLOCKS + 1) * BLOCK_BATCHES
    assert 20 <= used <= 20 + ahead
    [lease] = open_leases(cache.root)
    assert lease.holding() == tuple(range(used, 100))
    cache.cache.retire(range(100))
    cache.poll()
    left = {path.stem for path in (cache.root / "shards").glob("*.tfrecord")}
    assert f"{99:08d}" in left
    assert f"{0:08d}" not in left
    assert [int(b["id"][0]) for b in iterator] == [1000 * n for n in range(20, 100)]
    assert not open_leases(cache.root)
    cache.poll()
    assert not list((cache.root / "shards").glob("*.tfrecord"))


@pytest.mark.mutant(
    22,
    "growcache.loading.streams:ShardStream._give",
    "running.given.add(token)",
    "running.given.add(token)\nrunning.lease.mark_read(row.number, mapped=False)",
)
def test_a_shard_counts_once_its_last_sample_is_delivered(cache: Filled) -> None:
    """Not when TensorFlow asks for its file, which it does long before."""
    cache.add(*range(6), samples=1000)  # more than what is decoded ahead
    iterator = iter(gtf.dataset(cache.root, batch_size=10, min_samples=1, shuffle=False))
    next(iterator)
    [lease] = open_leases(cache.root)
    assert lease.used() == ()
    assert lease.holding() == tuple(range(6))
    for _ in range(199):
        next(iterator)
    [lease] = open_leases(cache.root)
    assert lease.used()[:1] == (0,)
    assert 0 not in lease.holding()


def test_an_epoch_counts_one_use_of_each_shard(cache: Filled) -> None:
    cache.add(*range(6))
    dataset = gtf.dataset(cache.root, batch_size=8, min_samples=1)
    for epoch in (1, 2):
        ids(dataset)  # 4 samples make no batch, and were read all the same
        assert cache.uses() == dict.fromkeys(range(6), epoch)


def test_an_abandoned_epoch_lets_go_and_counts_what_it_delivered(cache: Filled) -> None:
    cache.add(*range(40))
    dataset = gtf.dataset(cache.root, batch_size=10, min_samples=1, shuffle=False)
    for _ in dataset:
        break
    gc.collect()
    wait_until(lambda: not open_leases(cache.root))
    uses = cache.uses()
    assert uses[0] == 1
    assert uses[39] == 0


def test_a_dataset_that_is_not_iterated_holds_nothing(cache: Filled) -> None:
    cache.add(0)
    gtf.dataset(cache.root, batch_size=4, min_samples=1, endless=True)
    assert not read_leases(cache.root)


HOLDS_AND_ENDS = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import growcache.tensorflow as gtf
iterator = iter(gtf.dataset(sys.argv[1], batch_size=4, min_samples=1, endless=True))
next(iterator)
print("holds", flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("exits", marks=pytest.mark.slow), "killed"])
def test_the_end_of_the_process_is_the_end_of_its_leases(cache: Filled, how: str) -> None:
    cache.add(*range(4))
    done = subprocess.run(
        [sys.executable, "-c", HOLDS_AND_ENDS, str(cache.root), how],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "holds\n"
    assert done.returncode == (0 if how == "exits" else -9)
    assert not open_leases(cache.root)


def test_no_shard_disappears_under_an_iterator(cache: Filled) -> None:
    cache.add(*range(8))
    iterator = iter(gtf.dataset(cache.root, batch_size=4, min_samples=1))
    first = next(iterator)
    cache.cache.evict(range(8))
    assert sorted(ids([first, *iterator])) == written(*range(8))


# Memory


def test_large_tensors_are_made_of_memory_that_was_used_before(
    make_cache: Callable[..., Filled],
) -> None:
    """TensorFlow has it mapped and cleared each time once a generator was used."""
    floats, batches = 2**16, 16
    cache = make_cache(lambda name: {"id": np.array(name), "x": np.full(floats, name, "<f4")})
    cache.add(0, 1, samples=32)
    iterator = iter(gtf.dataset(cache.root, batch_size=8, min_samples=1, endless=True))
    for _ in range(batches):
        next(iterator)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(batches):
        next(iterator)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < batches * 8 * 4 * floats // mmap.PAGESIZE  # it was twice as many


# Endless


def test_endless_goes_on_with_what_is_there_by_then_under_two_leases(cache: Filled) -> None:
    cache.add(*range(12))
    dataset = gtf.dataset(cache.root, batch_size=10, min_samples=1, endless=True)
    assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    seen: Counter[int] = Counter()
    most = 0
    for step, batch in enumerate(dataset.take(240)):
        seen.update(ids([batch]))
        most = max(most, len(open_leases(cache.root)))
        if step == 60:
            cache.add(12)
            cache.cache.evict([0])
        if step % 20 == 0:
            cache.poll()
    assert most <= 2
    assert set(seen) == set(written(*range(13)))
    # Of the first 60 batches, and of the passes that were planned by then.
    old, new = (sum(seen[i] for i in written(n)) / 10 for n in (0, 12))
    kept = [seen[i] for n in range(1, 12) for i in written(n)]
    assert old < 12 < new + 5
    assert max(kept) - min(kept) <= 4
    assert max(seen[i] for i in written(12)) < max(kept)


@pytest.mark.parametrize("samples", [1, 7])
def test_endless_over_a_tiny_cache(cache: Filled, samples: int) -> None:
    cache.add(0, samples=samples)
    dataset = gtf.dataset(cache.root, batch_size=4, min_samples=1, endless=True)
    seen = Counter(ids(dataset.take(20)))
    assert set(seen) == set(written(0, samples=samples))
    assert sum(seen.values()) == 80


def test_endless_over_fewer_shards_than_are_read_at_a_time_does_not_dawdle(
    cache: Filled,
) -> None:
    cache.add(0, samples=200)
    dataset = gtf.dataset(cache.root, batch_size=20, min_samples=1, endless=True)
    batches = iter(dataset)
    next(batches)
    began = time.monotonic()
    for _ in range(40):
        next(batches)
    assert time.monotonic() - began < 8  # 0.5 s; with a pause at each turn 30 s


# Damage


def test_a_damaged_shard_is_left_out_and_logged_once(
    cache: Filled, caplog: pytest.LogCaptureFixture
) -> None:
    cache.add(*range(4))
    cache.damage(2)
    dataset = gtf.dataset(cache.root, batch_size=5, min_samples=1)
    for _ in range(2):
        assert sorted(ids(dataset)) == written(0, 1, 3)
    assert caplog.text.count("skips a corrupt shard") == 1
    assert cache.uses()[2] == 0


def test_verify_always_finds_damage_that_came_later(cache: Filled) -> None:
    cache.add(*range(4))
    dataset = gtf.dataset(cache.root, batch_size=5, min_samples=1, verify="always")
    assert sorted(ids(dataset)) == written(*range(4))
    cache.damage(1)
    assert sorted(ids(dataset)) == written(0, 2, 3)


def test_a_cache_with_nothing_whole_is_an_error(cache: Filled) -> None:
    cache.add(0)
    cache.damage(0)
    for endless in (False, True):
        dataset = gtf.dataset(cache.root, batch_size=5, min_samples=1, endless=endless)
        batches = iter(dataset)
        for _ in range(2):  # the error comes again with each request
            with pytest.raises(tf.errors.OpError, match=r"every shard of .* is damaged"):
                next(batches)


def test_an_error_is_told_in_its_turn_and_to_whoever_asks_on() -> None:
    """Threads ask in any order; what was there before the error is delivered."""

    def shards() -> Iterator[tuple[str, int, int]]:
        yield "a", 1, 10
        yield "b", 2, 10
        raise CorruptShardError("damaged")

    iteration = NativeIteration(cast("Any", SimpleNamespace(shards=shards)), cast("Any", None))
    with pytest.raises(CorruptShardError):
        iteration.shard(2)
    assert [iteration.shard(turn) for turn in (1, 0)] == [("b", 2, 10), ("a", 1, 10)]
    for turn in (2, 3):
        with pytest.raises(CorruptShardError, match="damaged"):
            iteration.shard(turn)


# Keras


def test_keras_sees_a_real_cache_grow_and_evict(tmp_path: Path) -> None:
    url = make_source(tmp_path / "source", 400, (16, 64))
    config = write_config(
        tmp_path / "cache.yaml",
        url,
        sampling={"workers": 1, "shard_samples": 8, "max_bytes_per_second": 400_000},
        cache={"path": str(tmp_path / "cache"), "max_bytes": "2MB", "min_free": 0},
    )
    cache = tmp_path / "cache"
    seen: list[set[int]] = []

    def note(x: Any) -> np.int64:
        seen[-1].update(x[:, 0, 0].astype(int).tolist())
        for sample in x:
            expected = np.random.default_rng(int(sample[0, 0])).random((16, 64))
            assert np.array_equal(sample.flat[1:], expected.astype(np.float32).flat[1:])
        return np.int64(0)

    def with_target(x: Any) -> Any:
        with tf.control_dependencies([tf.numpy_function(note, [x], tf.int64)]):
            return x, tf.reduce_mean(x, axis=[1, 2])

    class Epochs(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append(set())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            time.sleep(0.3)

    with service(config):
        dataset = gtf.dataset(
            cache, batch_size=8, min_samples=32, as_tuple=("x",), endless=True
        )
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((16, 64)),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer="sgd", loss="mse")
        seen.append(set())
        history = model.fit(
            dataset.map(with_target),
            steps_per_epoch=12,
            epochs=12,
            shuffle=False,  # or Keras warns that it does not shuffle datasets
            verbose=0,
            callbacks=[Epochs()],
        )
        wait_until(lambda: read_status(cache).evicted_samples > 0)
        assert drawn(cache) > read_status(cache).samples
    assert len(history.history["loss"]) == 12
    unions = [len(union) for union in itertools.accumulate(seen, lambda old, new: old | new)]
    assert unions[-1] > 3 * 32  # far more than it began with
    assert unions[-1] > unions[len(unions) // 2]  # and new ones come to the end
    del dataset
    gc.collect()
    wait_until(lambda: not open_leases(cache))
