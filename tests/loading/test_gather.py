"""Gathered rows are the samples that were planned, whatever their size and field count."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.formats import tfrecord
from growcache.cache.formats.mapped import MappedShard
from growcache.errors import CacheError
from growcache.loading.blocks import RAMP_FACTOR, BlockSizeRamp, batches_per_block
from growcache.loading.framework import NUMPY, Framework, Take, take_rows
from growcache.loading.gather import Gatherer, MappedShards
from growcache.loading.gather_process import take_rows_locked as take_rows_alone
from growcache.schema import Sample, Schema


def samples_of(shape: tuple[int, ...], n: int, seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        {"x": rng.standard_normal(shape).astype("<f4"), "y": np.asarray(rng.integers(99))}
        for _ in range(n)
    ]


def written(path: Path, samples: Sequence[Sample]) -> MappedShard:
    schema = Schema.from_sample(samples[0])
    path.write_bytes(
        b"".join(bytes(b) for f in tfrecord.encode(schema, samples) for b in f.pieces)
    )
    return tfrecord.open_shard(path, schema, len(samples))


def takes() -> list[Take]:
    try:
        from growcache.torch import take_rows as torch_take
    except ImportError:
        return [take_rows, take_rows_alone]
    return [take_rows, take_rows_alone, torch_take]


@pytest.mark.parametrize("shape", [(), (3,), (7, 5), (41, 400), (0,)])
@pytest.mark.parametrize("take", takes())
def test_rows_are_those_of_the_plan(tmp_path: Path, shape: tuple[int, ...], take: Take) -> None:
    shards = [samples_of(shape, n, n) for n in (9, 1, 5)]
    maps = MappedShards([*(written(tmp_path / f"{i}", s) for i, s in enumerate(shards)), None])
    places = np.array([2, 0, 0, 1, 2, 0, 2, 0])
    rows = np.array([4, 8, 0, 0, 1, 3, 4, 1])
    gatherer = Gatherer(Schema.from_sample(shards[0][0]), 8, Framework(take=take))
    for _ in range(3):
        for part in (slice(5), slice(5, None)):  # as one block out of two pieces
            gatherer.add(maps.rows(("x", "y"), places[part], rows[part]))
        arrays = gatherer.finish()
        for i, (place, row) in enumerate(zip(places, rows, strict=True)):
            for name, value in shards[place][row].items():
                np.testing.assert_array_equal(arrays[name][i], value)
                assert np.asarray(arrays[name]).dtype == value.dtype


def test_a_block_that_is_held_is_not_overwritten(tmp_path: Path) -> None:
    shard = samples_of((64, 1024), 4, 0)
    maps = MappedShards([written(tmp_path / "s", shard)])
    gatherer = Gatherer(Schema.from_sample(shard[0]), 2, NUMPY)
    held = []
    for i in range(4):
        gatherer.add(maps.rows(("x", "y"), np.array([0, 0]), np.array([i, i])))
        held.append(gatherer.finish()["x"])
    for i, array in enumerate(held):
        np.testing.assert_array_equal(array[1], shard[i]["x"])
    del array, held
    gatherer.add(maps.rows(("x", "y"), np.array([0]), np.array([1])))
    again = gatherer.finish()
    np.testing.assert_array_equal(again["x"][0], shard[1]["x"])


def test_a_block_may_be_shorter_than_the_longest(tmp_path: Path) -> None:
    shard = samples_of((5,), 6, 0)
    gatherer = Gatherer(Schema.from_sample(shard[0]), 6, NUMPY)
    maps = MappedShards([written(tmp_path / "s", shard)])
    gatherer.add(maps.rows(("x", "y"), np.zeros(2, int), np.array([5, 2])))
    arrays = gatherer.finish()
    assert np.asarray(arrays["x"]).shape == (2, 5)
    assert np.asarray(arrays["y"]).tolist() == [int(shard[5]["y"]), int(shard[2]["y"])]


@given(
    st.integers(1, 10**9),
    st.integers(1, 10_000),
    st.integers(8_000_000, 72_000_000),
    st.booleans(),
)
def test_blocks_are_bounded(
    sample_bytes: int, batch_size: int, block_bytes: int, transformed: bool
) -> None:
    batches = batches_per_block(sample_bytes, batch_size, block_bytes, transformed=transformed)
    most = 8_000_000 if transformed else block_bytes
    assert batches == 1 or batches * batch_size * sample_bytes <= most
    assert 1 <= batches <= 128


@given(st.integers(1, 100), st.integers(1, 40), st.integers(1, 200), st.integers(0, 4000))
def test_who_waits_gets_small_blocks_first_and_comes_to_full_ones(
    batch_size: int, least: int, most: int, filled: int
) -> None:
    ramp = BlockSizeRamp(batch_size, least, most)
    full = batch_size * most
    assert ramp.rows == full
    filled = min(filled, full - 1)  # there is room, or the block were over
    ramp.begin(filled)
    assert filled < ramp.rows <= min(full, filled + least * batch_size)
    first_rows = ramp.rows
    ramp.begin(first_rows - 1)  # it is nearly full, so a waiting consumer makes it no larger
    assert ramp.rows == first_rows
    ramp.begin(0)
    rows = [ramp.rows]
    while rows[-1] < full:
        ramp.grow()
        rows.append(ramp.rows)
    assert rows[0] == batch_size * min(least, most)
    assert all(one % batch_size == 0 for one in rows)
    assert all(after in (full, RAMP_FACTOR * one) for one, after in itertools.pairwise(rows))
    ramp.grow()
    assert ramp.rows == full


@pytest.mark.parametrize(("place", "row"), [(0, 3), (1, 7), (0, -1), (2, 0)])
def test_rows_beyond_the_mapped_are_refused(tmp_path: Path, place: int, row: int) -> None:
    shards = [samples_of((2,), n, n) for n in (3, 7)]
    maps = [written(tmp_path / f"{i}", s) for i, s in enumerate(shards)]
    with pytest.raises(IndexError, match=f"row {row} of"):
        MappedShards([*maps, None]).rows(("x",), np.array([place]), np.array([row]))


def test_closed_shards_are_refused(tmp_path: Path) -> None:
    shard = samples_of((2,), 3, 0)
    maps = MappedShards([written(tmp_path / "s", shard)])
    gatherer = Gatherer(Schema.from_sample(shard[0]), 1, NUMPY)
    rows = maps.rows(("x", "y"), np.array([0]), np.array([0]))
    gatherer.add(rows)
    maps.close()
    with pytest.raises(CacheError, match="closed"):
        gatherer.add(rows)
    with pytest.raises(CacheError, match="closed"):
        maps.rows(("x",), np.array([0]), np.array([0]))
