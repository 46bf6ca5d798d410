"""`reader="gather"`: what the native reader promises, out of growcache's own buffers."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import growcache.tensorflow as gtf
from growcache.errors import ConfigError
from growcache.loading.blocks import BLOCK_BATCHES
from growcache.loading.buffers import RECYCLE_BYTES
from growcache.schema import Sample
from growcache.tensorflow import gather as tensorflow_gather
from growcache.tensorflow.gather import BATCHES_AT_ONCE, GatherPipeline
from tests.filled import Filled, open_leases
from tests.ragged import ragged_cache
from tests.sampling.services import wait_until
from tests.tensorflow.conftest import ids, written
from tests.tensorflow.test_ragged import KINDS

pytestmark = pytest.mark.tensorflow


def gathered(cache: Filled, **arguments: Any) -> Any:
    return gtf.dataset(cache.root, **{"min_samples": 1, "reader": "gather", **arguments})


LASTING = ("growcache-sigterm", "growcache-counters")  # one of each in a process, for its life


def loader_threads() -> set[threading.Thread]:
    running = [t for t in threading.enumerate() if t.name.startswith("growcache")]
    return {t for t in running if t.name not in LASTING}


# What an epoch is


def test_an_epoch_is_every_sample_once_and_the_next_is_over_what_is_there_by_then(
    cache: Filled,
) -> None:
    cache.add(*range(12))
    dataset = gathered(cache, batch_size=16, drop_last=False)
    assert isinstance(dataset, tf.data.Dataset)
    batches = list(dataset)
    assert sorted(ids(batches)) == written(*range(12))
    for batch in batches:
        assert np.array_equal(batch["x"].numpy(), np.tile(batch["id"].numpy(), (4, 1)).T)
    assert [len(batch["id"]) for batch in batches] == [16] * 7 + [8]
    cache.add(12)
    # The first batches of the second epoch were made before the shard was there.
    epochs = [ids(dataset) for _ in range(2)]
    assert sorted(epochs[1]) == written(*range(13))


def test_orders_differ_and_the_seed_repeats_them(cache: Filled) -> None:
    cache.add(*range(12))

    def epochs(seed: int) -> list[list[int]]:
        dataset = gathered(cache, batch_size=10, seed=seed)
        broken_off = [ids(dataset.take(3)) for _ in range(2)]
        return [*broken_off, ids(dataset), ids(dataset)]

    found = epochs(0)
    assert len({tuple(epoch[:30]) for epoch in found}) == 4
    assert found == epochs(0)
    assert epochs(1)[0] not in found


def test_a_dataset_that_only_a_loop_keeps_is_in_the_order_of_any_other(cache: Filled) -> None:
    cache.add(*range(12))
    named = gathered(cache, batch_size=10)
    assert ids(gathered(cache, batch_size=10)) == ids(named)


def test_static_shapes_and_tuples(cache: Filled) -> None:
    cache.add(0, 1)
    full = gathered(cache, batch_size=16, as_tuple=("x", "id"))
    assert [each.shape.as_list() for each in full.element_spec] == [[16, 4], [16]]
    [(x, name)] = full
    assert np.array_equal(x.numpy()[:, 0], name.numpy())
    rest = gathered(cache, batch_size=16, drop_last=False, fields=["id"])
    assert {k: v.shape.as_list() for k, v in rest.element_spec.items()} == {"id": [None]}
    assert [len(batch["id"]) for batch in rest] == [16, 4]
    with pytest.raises(ConfigError, match="reader must be native or gather, found 'fast'"):
        gathered(cache, batch_size=4, reader="fast")


@pytest.mark.parametrize("drop_last", [True, False])
def test_samples_per_epoch_goes_on_where_the_last_epoch_ended(
    cache: Filled, drop_last: bool
) -> None:
    cache.add(*range(6))  # 60 samples
    dataset = gathered(cache, batch_size=8, samples_per_epoch=20, drop_last=drop_last)
    sizes = [8, 8] if drop_last else [8, 8, 4]
    assert len(dataset) == len(sizes)
    epochs = [list(dataset) for _ in range(15)]
    assert all([len(b["id"]) for b in epoch] == sizes for epoch in epochs)
    seen = Counter(i for epoch in epochs for i in ids(epoch))
    passes = 15 * sum(sizes) / 60
    assert set(seen.values()) <= {int(passes), int(passes) + 1}
    del dataset, epochs
    gc.collect()
    wait_until(lambda: not open_leases(cache.root))


def test_fixed_is_one_pass_in_order_every_time(cache: Filled) -> None:
    cache.add(2, 0, 1)
    cache.complete()
    dataset = gathered(cache, batch_size=16, fixed=True)
    assert [ids(dataset) for _ in range(2)] == [written(0, 1, 2)] * 2


def test_endless_goes_on_with_what_is_there_by_then_under_two_leases(cache: Filled) -> None:
    cache.add(*range(12))
    dataset = gathered(cache, batch_size=10, endless=True)
    assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    assert dataset.element_spec["x"].shape.as_list() == [10, 4]
    seen: Counter[int] = Counter()
    most, left = 0, 240
    for step, batch in enumerate(dataset):
        seen.update(ids([batch]))
        most = max(most, len(open_leases(cache.root)))
        if step == 60:
            cache.add(12)
            cache.cache.evict([0])
        if step % 20 == 0:
            cache.poll()
        # How many passes are made before the new shard is noticed is a matter of time.
        left -= any(i in seen for i in written(12))
        if not left:
            break
    assert most <= 2
    assert set(seen) == set(written(*range(13)))
    kept = [seen[i] for n in range(1, 12) for i in written(n)]
    assert max(kept) - min(kept) <= 1
    assert max(seen[i] for i in written(12)) < max(kept)


def test_two_iterators_at_once_see_all_of_it(cache: Filled) -> None:
    cache.add(*range(4))
    dataset = gathered(cache, batch_size=10)
    pairs = list(tf.data.Dataset.zip((dataset, dataset)))
    first, second = ([pair[k] for pair in pairs] for k in range(2))
    assert sorted(ids(first)) == sorted(ids(second)) == written(*range(4))
    assert ids(first) != ids(second)


# What a batch is made of


@pytest.mark.parametrize("style", ["offsets", "pad"])
def test_every_kind_of_value_comes_as_from_the_native_reader(
    tmp_path: Path, style: Any
) -> None:
    dtypes = ["bool", "int8", "uint32", "uint64", "float16", "complex128"]
    kinds = {**KINDS, **{f"of_{name}": [name, 2] for name in dtypes}, "none": ["float32", 2, 0]}
    with ragged_cache(tmp_path / "cache", kinds) as cache:
        cache.add(0, 1)
        arguments = {"batch_size": 10, "shuffle": False, "ragged": style}
        readers = [gathered(cache, **arguments, reader=r) for r in ("native", "gather")]
        native, gather = (dataset.element_spec for dataset in readers)
        assert sorted(native) == sorted(gather)
        for expected, found in zip(*readers, strict=True):
            for name, value in expected.items():
                assert isinstance(found[name], type(value)), name
                assert found[name].dtype == value.dtype
                assert found[name].shape.as_list() == value.shape.as_list(), name
                assert str(found[name]) == str(value), name


def test_strings_alone_and_a_cache_of_arrays(tmp_path: Path) -> None:
    declared = {"b": "bytes", "s": "str", "x": ["float32", 2]}
    with ragged_cache(tmp_path / "cache", declared, "npy") as cache:
        cache.add(0)
        [batch] = gathered(cache, batch_size=10, shuffle=False)
        samples = cache.samples(0, 10)
        assert batch["b"].numpy().tolist() == [sample["b"] for sample in samples]
        assert batch["s"].numpy().tolist() == [sample["s"].encode() for sample in samples]
        assert np.array_equal(batch["x"].numpy(), np.stack([s["x"] for s in samples]))


# How often Python is asked


def test_python_is_asked_once_for_many_batches(
    cache: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask takes longer than to copy a small batch, and waits where the loop is in Python."""
    given: list[int] = []
    arrays = GatherPipeline.arrays

    def noting(feed: GatherPipeline, batches: Any) -> Any:
        given.append(0 if batches is None else len(batches["id"]))
        return arrays(feed, batches)

    monkeypatch.setattr(GatherPipeline, "arrays", noting)
    cache.add(*range(40))
    seen = ids(gathered(cache, batch_size=4, endless=True).take(100))
    assert max(Counter(seen).values()) == 1
    assert 100 // BATCHES_AT_ONCE <= sum(n > 0 for n in given) <= 10


def test_what_is_handed_over_at_once_is_no_more_than_was_begun(
    cache: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch is over once its last batch was asked for, not once all were handed over."""
    monkeypatch.setattr("growcache.tensorflow.gather.IDLE_SECONDS", 600.0)
    cache.add(*range(4))
    dataset = gathered(cache, batch_size=4)
    first = [ids(dataset.take(5)), ids(dataset)]
    assert sorted(first[1]) == written(*range(4))
    assert first[0] != first[1][:20]
    iterator = iter(dataset)
    next(iterator)
    del iterator
    gc.collect()
    wait_until(lambda: not open_leases(cache.root))  # and not after a wait for IDLE_SECONDS


# Memory

FLOATS = RECYCLE_BYTES // 8


def large(name: int) -> Sample:
    return {"id": np.array(name), "x": np.full(FLOATS, name, "<f4")}


def address(tensor: Any) -> int:
    return int(np.frombuffer(memoryview(tensor), np.uint8).ctypes.data)


def assert_whole(batches: Iterable[Any]) -> None:
    for batch in batches:
        assert np.array_equal(batch["x"].numpy(), np.tile(batch["id"].numpy(), (FLOATS, 1)).T)


@pytest.fixture
def large_cache(make_cache: Callable[..., Filled]) -> Filled:
    cache = make_cache(large)
    cache.add(*range(4), samples=16)
    return cache


def test_memory_goes_round_but_never_under_a_tensor_that_is_kept(large_cache: Filled) -> None:
    dataset = gathered(large_cache, batch_size=4, endless=True)
    places = Counter(address(batch["x"]) for batch in dataset.take(12 * BLOCK_BATCHES))
    # It is recycled, and not copied on the way: else each batch had a place of its own.
    assert max(places.values()) > 2
    kept = [batch for step, batch in enumerate(dataset.take(100)) if step % 3 == 0]
    assert len({address(batch["x"]) for batch in kept}) == len(kept)
    assert_whole(kept)


def test_what_a_pipeline_of_the_user_keeps_is_not_overwritten(large_cache: Filled) -> None:
    dataset = gathered(large_cache, batch_size=4, endless=True)
    held = list(dataset.prefetch(3).shuffle(20, seed=1).batch(5).take(4))
    for batch in held:
        for k in range(5):
            assert_whole([{name: value[k] for name, value in batch.items()}])
    cached = dataset.take(30).cache()
    for _ in range(2):
        assert_whole(cached)


def test_what_a_graph_keeps_is_not_overwritten(large_cache: Filled) -> None:
    iterator = iter(gathered(large_cache, batch_size=4, endless=True))

    @tf.function  # type: ignore[untyped-decorator]
    def collect() -> Any:
        first = next(iterator)
        x = tf.TensorArray(tf.float32, 60).write(0, first["x"])
        names = tf.TensorArray(tf.int64, 60).write(0, first["id"])
        for i in tf.range(1, 60):
            batch = next(iterator)
            x, names = x.write(i, batch["x"]), names.write(i, batch["id"])
        return x.stack(), names.stack()

    x, names = collect()
    assert_whole({"x": x[i], "id": names[i]} for i in range(60))


def test_what_the_user_changes_in_place_stays_in_its_batch(large_cache: Filled) -> None:
    dataset = gathered(large_cache, batch_size=4, endless=True)
    for batch in dataset.map(lambda batch: {**batch, "x": batch["x"] * 0 - 1}).take(20):
        assert (batch["x"].numpy() == -1).all()
    variable = tf.Variable(tf.zeros((4, FLOATS)))
    for batch in dataset.take(40):
        variable.assign(batch["x"])
        variable.assign_add(tf.ones_like(variable))
        assert_whole([batch])


def test_keras_trains_on_what_was_written(large_cache: Filled) -> None:
    kept: list[Any] = []

    class Keeps(tf.keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, name = data
            means = tf.reduce_mean(x, axis=1) - tf.cast(name, tf.float32)
            return {"off": tf.reduce_max(tf.abs(means))}

    class Collects(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            kept.append(logs["off"])

    dataset = gathered(large_cache, batch_size=4, as_tuple=("x", "id"), endless=True)
    model = Keeps()
    model.compile()
    model.fit(
        dataset,
        steps_per_epoch=30,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[Collects()],
    )
    assert len(kept) == 60
    assert not np.any([float(off) for off in kept])


# Leases


def test_an_iterator_that_is_dropped_frees_its_leases_and_counts_its_uses(
    cache: Filled,
) -> None:
    cache.add(*range(40))
    dataset = gathered(cache, batch_size=10, shuffle=False)
    iterator = iter(dataset)
    next(iterator)
    assert len(open_leases(cache.root)) in (1, 2)
    del iterator
    gc.collect()
    wait_until(lambda: not open_leases(cache.root))
    assert cache.uses()[0] == 1
    assert len(list(dataset)) == 40  # and it goes on


def test_an_epoch_counts_one_use_of_each_shard_and_the_dataset_lets_go(cache: Filled) -> None:
    cache.add(*range(6))
    dataset = gathered(cache, batch_size=8, drop_last=False)
    for _ in range(2):
        ids(dataset)
    assert len(open_leases(cache.root)) <= 2
    del dataset
    gc.collect()
    wait_until(lambda: not open_leases(cache.root))
    assert set(cache.uses().values()) <= {2, 3}  # the third epoch had started before


def test_what_is_ready_for_the_next_epoch_is_let_go_where_none_begins(
    cache: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full cache waits with its evictions for the lease of what is ahead."""
    cache.add(*range(6))
    others = loader_threads()  # of earlier tests in this process
    promptly = gathered(cache, batch_size=10)
    orders = [ids(promptly) for _ in range(3)]
    wait_until(lambda: len(open_leases(cache.root)) == 1)  # of the epoch that is ahead
    del promptly
    gc.collect()
    wait_until(lambda: not open_leases(cache.root))
    monkeypatch.setattr(tensorflow_gather, "IDLE_SECONDS", 0.05)
    slowly = gathered(cache, batch_size=10)
    for order in orders:
        assert ids(slowly) == order
        wait_until(lambda: not open_leases(cache.root))
        wait_until(lambda: loader_threads() <= others)


def test_a_loader_begins_with_its_iterator_and_waits_for_it_so_long(
    cache: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow takes tens of milliseconds to ask for a first batch."""
    monkeypatch.setattr(tensorflow_gather, "IDLE_SECONDS", 0.5)
    cache.add(*range(6))
    dataset = gathered(cache, batch_size=10)
    iterator = iter(dataset)
    wait_until(lambda: open_leases(cache.root) != [])
    wait_until(lambda: not open_leases(cache.root))
    assert sorted(ids(iterator)) == written(*range(6))


def test_an_iterator_outlives_its_dataset(cache: Filled) -> None:
    cache.add(*range(6))
    iterator = iter(gathered(cache, batch_size=5))
    gc.collect()
    assert sorted(ids(iterator)) == written(*range(6))
    del iterator
    gc.collect()
    wait_until(lambda: not open_leases(cache.root))


def test_an_iterator_that_waits_for_samples_can_be_dropped(
    make_cache: Callable[..., Filled],
) -> None:
    cache = make_cache(max_reuse=1, on_max_reuse="wait")
    cache.add(0, 1)
    iterator = iter(gathered(cache, batch_size=10).repeat().prefetch(4))
    assert sorted(ids([next(iterator), next(iterator)])) == written(0, 1)
    del iterator  # its pipeline waits for more by now, in a thread of TensorFlow
    gc.collect()
    wait_until(lambda: not open_leases(cache.root))


HOLDS_AND_ENDS = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import growcache.tensorflow as gtf
dataset = gtf.dataset(sys.argv[1], batch_size=4, min_samples=1, endless=True, reader="gather")
iterator = iter(dataset)
kept = [next(iterator) for _ in range(3)]
print("holds", flush=True)
"""


@pytest.mark.slow
def test_the_end_of_the_process_is_the_end_of_its_leases(cache: Filled) -> None:
    cache.add(*range(4))
    done = subprocess.run(
        [sys.executable, "-c", HOLDS_AND_ENDS, str(cache.root)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("holds\n", 0)
    assert not open_leases(cache.root)
