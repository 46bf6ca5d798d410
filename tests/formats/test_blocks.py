"""Windows along any axis and blocks of several, of every format that holds arrays."""

from __future__ import annotations

import asyncio
import io
import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.errors import ConfigError, FormatError
from growcache.formats import open_format
from growcache.formats.base import ObjectFormat, Visit
from growcache.formats.grids import StorageOrder
from growcache.formats.joined_fields import JoinedFormat
from growcache.schema import Array
from tests.formats.held import Held, Row, visited
from tests.formats.test_formats import npy


def values_of(shape: tuple[int, ...], dtype: str = "<i4") -> Array:
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


def expected(array: Array, options: dict[str, Any]) -> dict[tuple[int, int], Array]:
    """Return the samples that the options describe at phase zero, by origin, the slow way."""
    window, axis = options.get("window"), options.get("axis")
    if axis is None and isinstance(window, list):
        axes, windows = list(range(array.ndim)), window
    else:
        axes = axis if isinstance(axis, list) else [axis or 0]
        windows = window if isinstance(window, list) else [window] * len(axes)
    strides = options.get("stride")
    strides = strides if isinstance(strides, list) else [strides] * len(axes)
    cuts = {
        a % array.ndim: (w, s or w or 1)
        for a, w, s in zip(axes, windows, strides, strict=True)
        if w is not None or not isinstance(window, list)
    }
    starts = [
        range(0, array.shape[a] - (cuts[a][0] or 1) + 1, cuts[a][1]) if a in cuts else [0]
        for a in range(array.ndim)
    ]
    found = {}
    for start in itertools.product(*starts):
        index: list[Any] = [slice(None)] * array.ndim
        ends = list(array.shape)
        for a, (w, _) in cuts.items():
            index[a] = start[a] if w is None else slice(start[a], start[a] + w)
            ends[a] = start[a] + (w or 1)
        sample = array[tuple(index)]
        dropped = [a for a, (w, _) in cuts.items() if w is None]
        for a, chosen in options.get("select", {}).items():
            at = a % array.ndim - sum(d < a % array.ndim for d in dropped)
            sample = np.take(sample, chosen, axis=at)
        if len(cuts) == 1:
            (a,) = cuts
            origin = start[a], ends[a]
        else:
            first = np.ravel_multi_index(start, array.shape)
            last = np.ravel_multi_index([e - 1 for e in ends], array.shape)
            origin = int(first), int(last) + 1
        found[origin] = sample
    return found


def written_npy(array: Array) -> bytes:
    return npy(array)


def written_npy_f(array: Array) -> bytes:
    return npy(np.asfortranarray(array))


def written_npz(array: Array) -> bytes:
    file = io.BytesIO()
    np.savez(file, x=array)
    return file.getvalue()


def written_packed_npz(array: Array) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, x=array)
    return file.getvalue()


def written_hdf5(array: Array, **settings: Any) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        opened.create_dataset("x", data=array, **settings)
    return file.getvalue()


def chunks_of(array: Array) -> tuple[int, ...]:
    return tuple(max(1, size // 3) for size in array.shape)


def raw_options(array: Array, order: str) -> dict[str, Any]:
    shape = [None, *array.shape[1:]] if order == "C" else [*array.shape[:-1], None]
    return {"dtype": array.dtype.str, "shape": shape, "order": order, "phase": "zero"}


Writer = Callable[[Array], tuple[str, dict[str, Any], bytes]]
WRITERS: dict[str, Writer] = {
    "npy": lambda a: ("npy", {}, written_npy(a)),
    "npy F": lambda a: ("npy", {}, written_npy_f(a)),
    "npz": lambda a: ("npz", {"fields": ["x"]}, written_npz(a)),
    "npz packed": lambda a: ("npz", {"read": "whole"}, written_packed_npz(a)),
    "raw": lambda a: ("raw", raw_options(a, "C"), a.tobytes()),
    "raw F": lambda a: ("raw", raw_options(a, "F"), a.tobytes("F")),
    "hdf5": lambda a: ("hdf5", {}, written_hdf5(a)),
    "hdf5 chunks": lambda a: ("hdf5", {}, written_hdf5(a, chunks=chunks_of(a))),
    "hdf5 gzip": lambda a: (
        "hdf5",
        {},
        written_hdf5(a, chunks=chunks_of(a), compression="gzip"),
    ),
}
OPTIONS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "channels x time": ((4, 50), {"axis": 1, "window": 7}),
    "channels x time, null": ((4, 50), {"window": [None, 7]}),
    "the last axis": ((4, 50), {"axis": -1, "window": 8, "stride": 3}),
    "single slices": ((4, 5, 6), {"axis": 1}),
    "planes of two axes": ((4, 5, 6), {"axis": [0, 2]}),
    "a volume": ((9, 12, 10), {"window": [4, 5, 3]}),
    "overlapping blocks": ((9, 12, 10), {"window": [4, 5, 3], "stride": [2, 5, 1]}),
    "weather": (
        (12, 5, 4, 6),
        {"axis": 0, "window": 3, "select": {1: [4, 0, 2]}},
    ),
    "weather blocks": (
        (12, 5, 4, 6),
        {"window": [3, None, 2, 4], "select": {1: [1, 2]}},
    ),
    "axes named": ((6, 5, 8), {"axis": [2, 0], "window": [4, 2], "stride": [2, 3]}),
    "rows": ((20, 3), {"axis": 0}),
}


def read_all(object_format: ObjectFormat, held: Held, parts: int = 1) -> dict[Any, Array]:
    found: dict[Any, Array] = {}
    for part in range(parts):
        for sample, start, stop in visited(object_format, held, part, parts):
            assert (start, stop) not in found
            found[start, stop] = sample["x"]
    return found


def same(found: dict[Any, Array], wanted: dict[Any, Array]) -> None:
    assert found.keys() == wanted.keys()
    for origin, sample in wanted.items():
        np.testing.assert_array_equal(found[origin], sample)
        assert np.asarray(found[origin]).flags.c_contiguous


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("writer", WRITERS)
def test_samples_are_what_numpy_cuts(writer: str, case: str) -> None:
    shape, options = OPTIONS[case]
    array = values_of(shape)
    form, more, data = WRITERS[writer](array)
    object_format, held = open_format(form, {**more, **options}), Held(data)
    wanted = expected(array, options)
    assert asyncio.run(object_format.measure(held)).samples == len(wanted)
    same(read_all(object_format, held), wanted)
    if object_format.ranged:
        for parts in (2, 5):
            same(read_all(object_format, held, parts), wanted)


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[Array, dict[str, Any]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    windows = [draw(st.none() | st.integers(1, size)) for size in shape]
    if not any(windows):
        windows[0] = 1
    strides = [draw(st.none() | st.integers(1, 5)) if w else None for w in windows]
    options: dict[str, Any] = {"window": windows, "stride": strides}
    whole = [at for at, window in enumerate(windows) if window is None]
    selected = draw(st.integers(0, len(whole)))
    for at in whole[:selected]:
        options["select"] = {at: draw(st.lists(st.integers(0, shape[at] - 1), min_size=1))}
    dtype = draw(st.sampled_from(["<i4", ">i2", "|u1"]))
    return values_of(shape, dtype), options


@settings(deadline=None)
@given(cut_arrays(), st.sampled_from(list(WRITERS)), st.integers(1, 4), st.data())
def test_any_block_of_any_array(
    cut: tuple[Array, dict[str, Any]], writer: str, parts: int, data: st.DataObject
) -> None:
    array, options = cut
    form, more, written = WRITERS[writer](array)
    object_format, held = open_format(form, {**more, **options}), Held(written)
    wanted = expected(array, options)
    same(read_all(object_format, held, parts if object_format.ranged else 1), wanted)
    take = data.draw(st.integers(1, 5))
    for sample, start, stop in visited(object_format, held, take=take):
        np.testing.assert_array_equal(sample["x"], wanted[start, stop])


@st.composite
def orders(draw: st.DrawFn) -> StorageOrder:
    axes = draw(st.integers(1, 4))
    starts = []
    for _ in range(axes):
        phase, step = draw(st.integers(0, 4)), draw(st.integers(1, 4))
        starts.append(range(phase, phase + step * draw(st.integers(1, 6)), step))
    chunks = tuple(draw(st.none() | st.integers(1, 8)) for _ in range(axes))
    return StorageOrder(tuple(starts), chunks, tuple(draw(st.permutations(range(axes)))))


@settings(deadline=None)
@given(orders())
def test_the_order_of_storage_goes_chunk_by_chunk(order: StorageOrder) -> None:
    count = math.prod(map(len, order.starts))
    ordinals = [order.ordinal(place) for place in range(count)]
    assert sorted(ordinals) == list(range(count))
    if order.is_by_ordinal:
        assert ordinals == sorted(ordinals)

    def chunk_of(ordinal: int) -> tuple[int, ...]:
        numbers = np.unravel_index(ordinal, [len(s) for s in order.starts])
        return tuple(
            0 if chunk is None else starts[int(n)] // chunk
            for starts, n, chunk in zip(order.starts, numbers, order.chunks, strict=True)
        )

    for place, ordinal in enumerate(ordinals):
        inside = order.chunk(place)
        assert place in inside
        members = {chunk_of(ordinals[other]) for other in inside}
        assert members == {chunk_of(ordinal)}
    assert len({(order.chunk(p).start, order.chunk(p).stop) for p in range(count)}) == len(
        {chunk_of(o) for o in ordinals}
    )


@pytest.mark.parametrize("case", [c for c in OPTIONS if "select" not in OPTIONS[c][1]])
@pytest.mark.parametrize("order", ["C", "F"])
def test_padded_blocks_end_in_zeros(case: str, order: Any) -> None:
    shape, options = OPTIONS[case]
    array = values_of(shape) + 1
    padding = [(0, 12)] * array.ndim
    held = Held(npy(np.asarray(array, order=order)))
    found = visited(open_format("npy", {**options, "edge": "pad"}), held)
    wanted = expected(array, options)
    assert len(found) >= len(wanted)
    cut = {tuple(sample["x"].shape) for sample, _, _ in found}
    assert cut == {sample.shape for sample in wanted.values()}
    assert Counter(np.concatenate([s["x"].ravel() for s, *_ in found]).tolist()).keys() <= {
        0, *np.pad(array, padding).ravel().tolist()
    }  # fmt: skip


def zarr_objects(array: Array, chunks: tuple[int, ...]) -> dict[str, bytes]:
    held: dict[str, Any] = {}
    group = zarr.create_group(zarr.storage.MemoryStore(held))
    group.create_array("x", shape=array.shape, chunks=chunks, dtype=array.dtype)[:] = array
    return {f"r.zarr/{key}": value.to_bytes() for key, value in held.items()}


@pytest.mark.parametrize("case", OPTIONS)
def test_the_chunks_of_zarr_own_blocks(case: str) -> None:
    shape, options = OPTIONS[case]
    array = values_of(shape)
    objects = zarr_objects(array, chunks_of(array))
    object_format = open_format("zarr", options)
    found: dict[Any, Array] = {}
    for key in objects:
        if "/c/" in key:
            held = Held(objects[key], key, objects)
            rows = visited(object_format, held)
            assert asyncio.run(object_format.measure(held)).samples == len(rows)
            for sample, start, stop in rows:
                assert (start, stop) not in found
                found[start, stop] = sample["x"]
    same(found, expected(array, options))


def test_every_position_is_equally_likely_along_each_axis() -> None:
    """Each axis has a phase of its own, which no other axis decides."""
    array = values_of((7, 9))
    options = {"window": [2, 3], "phase": ["random", "random"]}
    held, object_format = Held(npy(array)), open_format("npy", options)
    phases = Counter(
        np.unravel_index(visited(object_format, held, round=round)[0][1], array.shape)
        for round in range(600)
    )
    assert len(phases) == 6  # of two along one axis and three along the other
    assert min(phases.values()) > 60


def test_a_joined_object_is_cut_in_the_order_of_the_largest() -> None:
    x, y = values_of((12, 8, 6)), values_of((12, 8, 6), "<i2")
    formats = {
        "x": open_format("npy", {"window": [4, 4, 3]}),
        "y": open_format("hdf5", {"window": [4, 4, 3]}),
    }
    held = Held(npy(np.asfortranarray(x)), "a")
    held.others = [Held(written_hdf5(y, chunks=(5, 3, 4)), "b")]
    joined = JoinedFormat(formats)
    rows: list[Row] = []
    for part in range(3):
        rows += asyncio.run(joined.read(held, Visit(part, 3, 0, 0)))
    assert len(rows) == 12
    wanted = expected(x, {"window": [4, 4, 3]})
    for sample, start, stop in rows:
        np.testing.assert_array_equal(sample["x"], wanted[start, stop])
        np.testing.assert_array_equal(sample["y"], sample["x"])


def test_a_visit_reads_what_neighbours_share_once() -> None:
    """A row of blocks out of a volume costs its bytes, in one request per plane and block row."""
    array = values_of((64, 64, 512))
    held = Held(npy(array))
    object_format = open_format("npy", {"window": [32, 32, 64]})
    measure = asyncio.run(object_format.measure(held))
    assert measure.together == 8  # the blocks along the fastest axis
    held.asked.clear()
    found = visited(object_format, held, 1, measure.samples // measure.together)
    assert len(found) == 8
    read = sum(stop - start for start, stop in held.asked if stop is not None)
    assert read == sum(sample["x"].nbytes for sample, _, _ in found)
    assert len(held.asked) == 32


def test_channels_by_time_is_read_channel_by_channel() -> None:
    array = values_of((16, 200_000))
    held = Held(npy(array))
    object_format = open_format("npy", {"axis": 1, "window": 1000})
    measure = asyncio.run(object_format.measure(held))
    assert (measure.samples, measure.together) == (200, 17)
    held.asked.clear()
    found = visited(object_format, held, 3, measure.samples // 20)
    assert len(held.asked) == 16
    read = sum(stop - start for start, stop in held.asked if stop is not None)
    assert read == sum(sample["x"].nbytes for sample, _, _ in found)


def test_a_few_levels_are_read_and_no_others() -> None:
    array = values_of((4, 37, 100, 100), "<f4")
    held = Held(npy(array))
    object_format = open_format("npy", {"axis": 0, "window": 2, "select": {1: [0, 36]}})
    visited(object_format, held, 0, 2)
    read = sum(stop - start for start, stop in held.asked[1:] if stop is not None)
    assert read == 2 * 2 * 40_000


def test_chunks_are_fetched_once_a_visit() -> None:
    array = values_of((30, 30))
    data = written_hdf5(array, chunks=(10, 10), compression="gzip")
    object_format, held = open_format("hdf5", {"window": [5, 5]}), Held(data)
    assert asyncio.run(object_format.measure(held)).together == 4
    for part in range(9):
        found = visited(object_format, held, part, 9)
        corners = {tuple(np.unravel_index(start, array.shape)) for _, start, _ in found}
        assert len({(a // 10, b // 10) for a, b in corners}) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": [None, None]}, "a length for one axis at least"),
        ({"window": [2, 0]}, "an integer of at least 1, found 0"),
        ({"axis": [0, 0], "window": 2}, "a list, found"),
        ({"axis": True}, "number of an axis"),
        ({"axis": [0, 1], "window": [2]}, "a value for each of 2 axes"),
        ({"window": [2, 2], "stride": [1]}, "a value for each of 2 axes"),
        ({"window": [2, 2], "phase": ["random"]}, "a value for each of 2 axes"),
        ({"window": 2, "select": [1]}, r"as in \{1: \[0, 5, 9\]\}"),
        ({"window": 2, "select": {1: [-1]}}, r"as in \{1: \[0, 5, 9\]\}"),
        ({"select": {1: [0]}}, "select: needs window"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_format("npy", options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": [2, 2, 2]}, r"3 axes, as window has, found shape \[4, 50\]"),
        ({"axis": 2}, r"an axis 2, found shape \[4, 50\]"),
        ({"axis": [1, -1]}, "axis -1 is named twice"),
        ({"axis": 1, "select": {0: [4]}}, "index 4 along axis 0, as select names it, found 4"),
        ({"axis": 1, "select": {-1: [4]}}, "axis 1 is cut, so select cannot name it"),
    ],
)
@pytest.mark.parametrize("writer", ["npy", "hdf5 chunks"])
def test_arrays_that_do_not_fit_are_refused(
    writer: str, options: dict[str, Any], words: str
) -> None:
    form, more, data = WRITERS[writer](values_of((4, 50)))
    with pytest.raises(FormatError, match=words):
        visited(open_format(form, {**more, **options}), Held(data))


@pytest.mark.parametrize("writer", WRITERS)
def test_too_short_names_the_axis_and_its_length(writer: str) -> None:
    form, more, data = WRITERS[writer](values_of((4, 50)))
    object_format = open_format(form, {**more, "axis": 1, "window": 64})
    assert visited(object_format, Held(data)) == []
    measure = asyncio.run(object_format.measure(Held(data)))
    assert measure.samples == 0
    assert measure.empty == "expected at least 64 values along axis 1, found 50"
