"""Ragged values: gathered as a naive model would, batched as the loader's help says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.formats.mapped import RaggedColumn
from growcache.loading.buffers import (
    ALIGNMENT,
    RECYCLE_BYTES,
    BufferBytes,
    BufferPool,
    allocate_private,
)
from growcache.loading.framework import NUMPY
from growcache.loading.gather import Gatherer, MappedShards
from growcache.loading.loader import Loader
from growcache.loading.ragged import (
    Ragged,
    ValueRanges,
    copy_items,
    copy_values,
    ragged_of_values,
)
from growcache.schema import Field, Sample, Schema
from tests.filled import Filled
from tests.loading.loaders import LOADERS, as_numpy
from tests.ragged import SCHEMAS, ragged_cache

# Gathering, against a model


@st.composite
def runs(draw: st.DrawFn) -> tuple[ValueRanges, int]:
    item = draw(st.sampled_from([1, 2, 4, 8, 16]))
    items = draw(st.lists(st.sampled_from([0, 0, 1, 2, 5, 300, 4000]), min_size=1, max_size=9))
    lengths = np.array(items, np.int64) * item
    gaps = np.array(draw(st.lists(st.integers(0, 9), min_size=len(items), max_size=len(items))))
    ends = np.cumsum(lengths + gaps)
    memory = np.random.default_rng(0).integers(0, 256, int(ends[-1]) + 3, np.uint8)
    chosen = np.array(draw(st.permutations(range(len(items)))))
    return ValueRanges(memory, (ends - lengths)[chosen], lengths[chosen]), item


@pytest.mark.parametrize("copy", ["values", "items"])
@given(made=runs())
def test_values_are_copied_whatever_their_alignment(made: Any, copy: str) -> None:
    run, item = made
    expected = [run.memory[s : s + n] for s, n in zip(run.starts, run.lengths, strict=True)]
    out: Any = np.full(int(run.lengths.sum()), 7, np.uint8)
    if copy == "values":
        copy_values(run, item, out, NUMPY.take_slices)
    else:
        copy_items(run, item, out)
    np.testing.assert_array_equal(out, np.concatenate(expected))


class Columns:
    """A shard that is nothing but a ragged column."""

    def __init__(self, values: list[bytes]) -> None:
        self._samples = len(values)
        lengths = np.array([len(v) for v in values], np.int64)
        memory = np.frombuffer(b"".join(values) + b"end", np.uint8)
        self.fields: dict[str, Any] = {}
        self.sentinels = ()
        self.damaged = False
        self.ragged = {
            "x": RaggedColumn(memory, np.cumsum(lengths) - lengths, lengths, lengths[:, None])
        }

    def __len__(self) -> int:
        return self._samples


@given(
    st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=6), min_size=1, max_size=4),
    st.data(),
)
def test_a_gathered_block_is_the_plan(shards: list[list[bytes]], data: st.DataObject) -> None:
    all_rows = [
        (place, row) for place, values in enumerate(shards) for row in range(len(values))
    ]
    plan = data.draw(st.permutations(all_rows))
    cut = data.draw(st.integers(1, len(plan)))
    schema = Schema((Field("x", "bytes", ()),))
    gatherer = Gatherer(schema, len(plan), NUMPY)
    expected = [shards[place][row] for place, row in plan]
    maps = MappedShards([Columns(values) for values in shards])
    for part in filter(None, (plan[:cut], plan[cut:])):
        gatherer.add(maps.rows(("x",), *np.array(part).T))
    found = gatherer.finish()["x"]
    assert isinstance(found, Ragged)
    assert [found[i] for i in range(len(found))] == expected


# Batches, for every loader and cache format


@pytest.fixture(params=["tfrecord", "npy"])
def filled(request: Any, tmp_path: Path) -> Iterator[Callable[..., Filled]]:
    made: list[Filled] = []

    def make(declared: dict[str, Any]) -> Filled:
        made.append(ragged_cache(tmp_path / "cache", declared, request.param))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=list(LOADERS))
def batches(request: Any) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    made: list[Loader] = []

    def read(cache: Filled, **options: Any) -> list[dict[str, Any]]:
        options = {"batch_size": 7, "min_samples": 1, "drop_last": False, **options}
        made.append(LOADERS[request.param](cache.root, **options))
        return [{k: as_numpy(v) for k, v in batch.items()} for batch in made[-1]]

    yield read
    for one in made:
        one.close()


def taken_apart(field: Field, batch: dict[str, Any], style: str, i: int) -> Any:
    """Value ``i`` of a batch, by nothing but what the help says."""
    x = batch["x"]
    if style == "list" or field.dtype == "str" or not field.is_ragged:
        return x[i]
    if style == "pad":
        sizes = np.atleast_1d(batch["x_lengths"][i]).tolist()
        value = x[i][tuple(map(slice, field.shape_of(sizes)))]
        assert np.count_nonzero(x[i]) == np.count_nonzero(value)
    else:
        start, stop = batch["x_offsets"][i : i + 2]
        value = x[start:stop]
        if "x_shapes" in batch:
            value = value.reshape(batch["x_shapes"][i])
    return value.tobytes() if field.dtype == "bytes" else value


@pytest.mark.parametrize("style", ["offsets", "pad", "list"])
@pytest.mark.parametrize("schema", list(SCHEMAS))
def test_batches_hold_what_was_written(
    filled: Any, batches: Any, schema: str, style: str
) -> None:
    cache = filled(SCHEMAS[schema])
    cache.add(0, 1, 2)
    field = cache.schema["x"]
    seen = []
    for batch in batches(cache, ragged=style):
        for i, name in enumerate(batch["id"].tolist()):
            expected, found = cache.make(name)["x"], taken_apart(field, batch, style, i)
            assert type(found) is type(expected)
            np.testing.assert_array_equal(found, expected)
            if isinstance(expected, np.ndarray):
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        seen += batch["id"].tolist()
    assert sorted(seen) == sorted(1000 * n + i for n in range(3) for i in range(10))


@pytest.mark.parametrize("style", ["offsets", "pad"])
def test_large_values_and_odd_sizes(filled: Any, batches: Any, style: str) -> None:
    cache = filled({"x": ["float32", None, 5]})
    cache.make = lambda name: {
        "id": np.array(name),
        "x": np.full((1 + name % 1000 * 800, 5), name, "<f4"),
    }
    cache.add(0, 1)
    for batch in batches(cache, ragged=style):
        for i, name in enumerate(batch["id"].tolist()):
            found = taken_apart(cache.schema["x"], batch, style, i)
            np.testing.assert_array_equal(found, cache.make(name)["x"])


def test_offsets_are_int64_rows_of_the_values(filled: Any, batches: Any) -> None:
    cache = filled({"x": ["float32", None, 3]})
    cache.add(0)
    (batch, _) = batches(cache, shuffle=False)
    assert batch["x_offsets"].dtype == np.int64
    assert batch["x_offsets"].shape == (8,)
    assert batch["x"].shape == (batch["x_offsets"][-1], 3)
    (batch, _) = batches(cache, shuffle=False, ragged="pad")
    assert (batch["x_lengths"].dtype, batch["x_lengths"].shape) == (np.int64, (7,))
    assert batch["x"].shape == (7, batch["x_lengths"].max(), 3)


# Transforms


def test_a_transform_sees_real_values_and_may_return_ragged_ones(
    filled: Any, batches: Any
) -> None:
    cache = filled({"x": ["float32", None, 3], "note": "str", "data": "bytes"})
    cache.add(0, 1)

    def transform(sample: Sample) -> Sample:
        expected = cache.make(int(sample["id"]))
        assert (sample["note"], sample["data"]) == (expected["note"], expected["data"])
        np.testing.assert_array_equal(sample["x"], expected["x"])
        return {
            "id": sample["id"],
            "x": np.concatenate([sample["x"]] * 2).astype("<f8"),
            "note": sample["note"].upper(),
            "new": sample["data"] * 3,
        }

    for batch in batches(cache, transform=transform):
        assert list(batch) == ["id", "new", "new_offsets", "note", "x", "x_offsets"]
        for i, name in enumerate(batch["id"].tolist()):
            expected = cache.make(name)
            value = batch["x"][batch["x_offsets"][i] : batch["x_offsets"][i + 1]]
            np.testing.assert_array_equal(value, np.concatenate([expected["x"]] * 2))
            assert batch["note"][i] == expected["note"].upper()
            start, stop = batch["new_offsets"][i : i + 2]
            assert batch["new"][start:stop].tobytes() == expected["data"] * 3


def test_a_decoded_blob_may_be_an_array_of_any_size(filled: Any, batches: Any) -> None:
    cache = filled({"x": "bytes"})
    cache.add(0, 1)

    def decode(sample: Sample) -> Sample:
        return {"id": sample["id"], "x": np.frombuffer(sample["x"], np.uint8).reshape(-1, 1)}

    for batch in batches(cache, transform=decode, ragged="list"):
        for name, value in zip(batch["id"].tolist(), batch["x"], strict=True):
            assert value.shape == (len(cache.make(name)["x"]), 1)
            assert value.tobytes() == cache.make(name)["x"]


# Memory


def test_ragged_memory_is_not_used_again_while_a_view_of_it_lives(tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).integers(40_000, 90_000, 5000)

    def sample(name: int) -> Sample:
        return {"id": np.array(name), "x": np.full(sizes[name % 5000], name % 251, np.uint8)}

    schema = Schema.declared({"id": ["int64"], "x": ["uint8", None]})
    with Filled(tmp_path / "c", sample, schema=schema) as cache:
        cache.add(0, 1, 2, samples=40)
        for kind in LOADERS.values():
            for style in ("offsets", "pad", "list"):
                check_kept(kind(cache.root, batch_size=4, min_samples=1, ragged=style))


def check_kept(loader: Loader) -> None:
    kept = []
    with loader:
        for _ in range(2):
            for batch in loader:
                values = batch["x"] if isinstance(batch["x"], list) else batch["x"][None]
                # A view of a part, and nothing else of the batch, is held.
                kept.append((values[0].reshape(-1)[:5], as_numpy(batch["id"])[0] % 251))
    for view, value in kept:
        assert as_numpy(view).tolist() == [value] * 5


def test_memory_goes_round_where_sizes_vary() -> None:
    pool = BufferPool()
    seen = set()
    for nbytes in np.random.default_rng(0).integers(2, 4, 200) * RECYCLE_BYTES:
        buffer = pool.take(int(nbytes))
        assert len(buffer) == nbytes
        seen.add(buffer.ctypes.data)
        del buffer
    assert len(seen) <= 3


def test_a_block_of_several_pieces_is_aligned_and_goes_round() -> None:
    gatherer = Gatherer(Schema((Field("x", "bytes", ()),)), 8, NUMPY)
    maps = MappedShards([Columns([bytes([i]) * RECYCLE_BYTES for i in range(8)])])
    seen = set()
    for _ in range(20):
        for part in (np.arange(5), np.arange(5, 8)):  # as where a window ends
            gatherer.add(maps.rows(("x",), np.zeros_like(part), part))
        found = gatherer.finish()["x"]
        assert isinstance(found, Ragged)
        seen.add(found.values.ctypes.data)
        assert found[7] == bytes([7]) * RECYCLE_BYTES
        del found
    assert all(address % ALIGNMENT == 0 for address in seen)  # TensorFlow copies others
    assert len(seen) <= 3


def test_a_batch_far_larger_than_the_others_makes_one_large_buffer() -> None:
    made: list[int] = []

    def allocate(nbytes: int, kept: list[BufferBytes] | None) -> BufferBytes:
        made.append(nbytes)
        return allocate_private(nbytes, kept)

    pool = BufferPool(allocate=allocate)
    ahead = deque(pool.take(RECYCLE_BYTES) for _ in range(3))
    for step in range(100):
        ahead.popleft()
        ahead.append(pool.take(RECYCLE_BYTES * (50 if step % 10 == 5 else 1)))
    assert sorted(nbytes // RECYCLE_BYTES for nbytes in made) == [1, 1, 1, 1, 56]


def test_larger_ones_take_the_places_of_what_does_not_suffice_any_more() -> None:
    pool, made = BufferPool(keep=4), set[int]()
    held = [pool.take(RECYCLE_BYTES * size) for size in (1, 40, 2, 3)]
    held.clear()
    for _ in range(3):
        held.append(pool.take(RECYCLE_BYTES * 4))
        made.add(held[-1].ctypes.data)
    assert len(made) == 3
    held.clear()
    for _ in range(20):
        assert pool.take(RECYCLE_BYTES * 4).ctypes.data in made


def test_values_of_users_are_copied() -> None:
    field = Field("x", "<f4", (None, 2))
    given_values = [np.full((n, 2), n, "<f4") for n in (3, 0, 1)]
    made = ragged_of_values(field, given_values, BufferPool())
    given_values[0][:] = 9
    assert [np.asarray(made[i]).tolist() for i in range(3)] == [[[3, 3]] * 3, [], [[1, 1]]]
