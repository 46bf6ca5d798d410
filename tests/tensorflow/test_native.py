"""How the native reader's pipeline is cut: chunks between threads, blocks between functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import growcache.tensorflow as gtf
from growcache.schema import Sample
from growcache.tensorflow import native
from growcache.tensorflow.native import NativeIteration, NativePipeline, PipelineSizes
from tests.filled import Filled
from tests.tensorflow.conftest import ids, written

pytestmark = pytest.mark.tensorflow

CACHED = st.builds(
    PipelineSizes, st.integers(0, 10**9), st.integers(0, 10**9), st.booleans()
)  # an empty sample has no bytes


def large(number: int) -> Sample:
    """Return a sample that threads hand on in chunks."""
    return {"id": np.array(number), "x": np.full((130, 32), number, np.float32)}


@given(CACHED, st.integers(1, 10**5))
def test_a_chunk_is_few_bytes_and_a_small_part_of_its_shard(
    cached: PipelineSizes, shard_samples: int
) -> None:
    chunk = cached.chunk_samples(shard_samples)
    assert 1 <= chunk <= native.CHUNK_SAMPLES
    if chunk > 1:
        assert chunk * cached.sample_bytes <= native.CHUNK_BYTES
        assert chunk * native.CHUNKS_PER_SHARD <= shard_samples


@given(CACHED, st.integers(1, 10**5))
def test_a_block_is_some_whole_batches_of_few_bytes(
    cached: PipelineSizes, batch_size: int
) -> None:
    batches, rest = divmod(cached.block_samples(batch_size), batch_size)
    assert rest == 0
    assert 1 <= batches <= native.BLOCK_BATCHES
    if batches > 1:
        assert batches * batch_size * cached.sample_bytes <= native.BLOCK_BYTES
        if cached.runs_on:  # or it would wait for samples that are not there yet
            assert batches * batch_size * native.BLOCKS_PER_PASS <= cached.samples


@given(CACHED)
def test_a_buffer_is_a_part_of_a_pass_where_passes_run_on(cached: PipelineSizes) -> None:
    samples = cached.buffer_samples()
    assert 1 <= samples <= native.SHUFFLE_SAMPLES
    assert samples == 1 or samples * cached.sample_bytes <= native.SHUFFLE_BYTES
    assert samples <= max(
        1, cached.samples // (native.BUFFERS_PER_PASS if cached.runs_on else 1)
    )


def test_samples_of_3_kib_come_by_eight_batches_and_large_ones_by_some_records() -> None:
    small, big = PipelineSizes(60_000, 3080, False), PipelineSizes(4000, 262_152, True)
    assert small.block_samples(64) == 8 * 64
    assert big.block_samples(64) == 64
    assert big.chunk_samples(256) == 7
    assert big.chunk_samples(20) == 2


@given(st.permutations(range(6)))
def test_shards_keep_their_turn_whoever_asks_first(order: list[int]) -> None:
    shards = [(f"{n}.tfrecord", n, 10) for n in range(4)]
    stream: Any = SimpleNamespace(shards=lambda: iter(shards))
    iteration = NativeIteration(stream, PipelineSizes(40, 8, False))
    found = {turn: iteration.shard(turn) for turn in order}
    assert [found[turn] for turn in range(6)] == [*shards, None, None]


@pytest.mark.parametrize("endless", [False, True])
def test_chunks_that_threads_read_come_in_one_order(
    make_cache: Callable[..., Filled], endless: bool
) -> None:
    cache = make_cache(large)
    cache.add(*range(8), samples=40)

    def epochs(seed: int) -> Iterator[list[int]]:
        for _ in range(3):
            dataset = gtf.dataset(
                cache.root, batch_size=16, min_samples=1, seed=seed, endless=endless
            )
            yield ids(dataset.take(20))

    first, *others = epochs(seed=1)
    assert others == [first, first]
    assert next(epochs(seed=2)) != first
    if not endless:
        assert sorted(first) == written(*range(8), samples=40)


def test_an_epoch_ends_when_all_of_it_is_counted(
    cache: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.add(*range(4))
    count = NativePipeline.count

    def late(feed: NativePipeline, numbers: Any) -> np.bool_:
        time.sleep(0.1)
        return count(feed, numbers)

    monkeypatch.setattr(NativePipeline, "count", late)
    assert len(list(gtf.dataset(cache.root, batch_size=5, min_samples=1))) == 8
    assert cache.uses() == dict.fromkeys(range(4), 1)


def test_python_counts_once_for_a_block_of_batches(
    cache: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.add(*range(12))  # 120 samples
    counted: list[int] = []
    count = NativePipeline.count

    def look(feed: NativePipeline, numbers: Any) -> np.bool_:
        counted.append(len(numbers))
        return count(feed, numbers)

    monkeypatch.setattr(NativePipeline, "count", look)
    batches = list(gtf.dataset(cache.root, batch_size=5, min_samples=1))
    assert sorted(ids(batches)) == written(*range(12))
    assert [len(batch["id"]) for batch in batches] == [5] * 24
    assert sorted(counted) == [40, 40, 40]
    assert cache.uses() == dict.fromkeys(range(12), 1)
