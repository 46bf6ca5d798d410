from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from growcache.errors import FormatError
from growcache.formats import open_format
from growcache.formats.base import Visit
from growcache.schema import Array
from tests.formats.held import Held, Row, visited

h5py = pytest.importorskip("h5py")
numcodecs = pytest.importorskip("numcodecs")

X = np.arange(200 * 3 * 4, dtype="<i4").reshape(200, 3, 4)
CHUNKS = (16, 2, 4)
RECORDS = np.zeros(200, [("t", ">f8"), ("xy", "<i2", (2,))])
RECORDS["t"], RECORDS["xy"] = np.arange(200) / 4, X[:, 0, :2]


def hdf5(write: Callable[[Any], object], **settings: Any) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w", **settings) as opened:
        write(opened)
    return file.getvalue()


def one(data: Array = X, name: str = "x", **settings: Any) -> bytes:
    return hdf5(lambda file: file.create_dataset(name, data=data, **settings))


def rows(data: bytes, name: str = "x", **options: Any) -> list[Row]:
    return visited(open_format("hdf5", {"datasets": name, **options}), Held(data))


STORED: dict[str, dict[str, Any]] = {
    "in one piece": {},
    "chunks": {"chunks": CHUNKS},
    "gzip": {"chunks": CHUNKS, "compression": "gzip"},
    "all that is here": {
        "chunks": CHUNKS, "compression": "gzip", "shuffle": True, "fletcher32": True,
    },
    "checksums": {"chunks": (7, 3, 4), "fletcher32": True},
    "lzf": {"chunks": CHUNKS, "compression": "lzf", "shuffle": True},
    "scale and offset": {"chunks": CHUNKS, "scaleoffset": 0},
    "one chunk": {"chunks": X.shape, "compression": "gzip"},
    "resizable": {"chunks": CHUNKS, "maxshape": (None, 3, 4), "compression": "gzip"},
    "resizable twice": {"chunks": CHUNKS, "maxshape": (None, None, 4)},
}  # fmt: skip


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("stored", STORED)
def test_windows_of_every_storage(stored: str, libver: str) -> None:
    for dtype, userblock in (("<i4", 0), (">u2", 512)):
        want = X.astype(dtype)
        write = lambda file: file.create_dataset("x", data=want, **STORED[stored])  # noqa: B023, E731
        data = hdf5(write, libver=libver, userblock_size=userblock)
        found = rows(data, window=30, stride=17)
        assert [(a, b) for _, a, b in found] == [(s, s + 30) for s in range(0, 171, 17)]
        for sample, start, stop in found:
            np.testing.assert_array_equal(sample["x"], want[start:stop])
            assert sample["x"].dtype == np.dtype(dtype).newbyteorder("<")


@pytest.mark.parametrize("chunks", [None, (16, 3, 4)])
def test_values_that_were_never_written_are_the_fill_value(chunks: Any) -> None:
    def write(file: Any) -> None:
        settings = {"shape": X.shape, "dtype": "<i4", "fillvalue": 7, "chunks": chunks}
        file.create_dataset("never", **settings)
        file.create_dataset("some", **settings)[40:50] = X[40:50]

    for userblock in (0, 512):
        data = hdf5(write, userblock_size=userblock)
        assert all((s["never"] == 7).all() for s, _, _ in rows(data, "never", axis=0))
        for sample, at, _ in rows(data, "some", axis=0):
            expected = X[at] if 40 <= at < 50 else np.full((3, 4), 7)
            np.testing.assert_array_equal(sample["some"], expected)


def test_kinds_of_values() -> None:
    def write(file: Any) -> None:
        file["bool"] = X[:, 0, 0] % 3 == 0
        file["enum"] = (X[:, 0, 0] % 2).astype(h5py.enum_dtype({"A": 0, "B": 1}, "i2"))
        file["complex"] = X[:, 0] * (1 + 2j)
        file.create_dataset("records", data=RECORDS, chunks=(50,), compression="gzip")
        file["half"] = X.astype("f2")

    data = hdf5(write)
    found = {
        name: rows(data, name, axis=0)[9][0] for name in ("bool", "enum", "complex", "half")
    }
    assert found["bool"]["bool"].dtype == np.bool_
    assert bool(found["bool"]["bool"]) == (X[9, 0, 0] % 3 == 0)
    assert (found["enum"]["enum"].dtype.str, int(found["enum"]["enum"])) == ("<i2", 0)
    np.testing.assert_array_equal(found["complex"]["complex"], X[9, 0] * (1 + 2j))
    np.testing.assert_array_equal(found["half"]["half"], X[9].astype("f2"))
    records = rows(data, "records", window=3)[4][0]
    assert {name: value.dtype.str for name, value in records.items()} == {
        "records.t": "<f8",
        "records.xy": "<i2",
    }
    np.testing.assert_array_equal(records["records.t"], RECORDS["t"][12:15])
    np.testing.assert_array_equal(records["records.xy"], RECORDS["xy"][12:15])


def test_strings_are_text() -> None:
    texts = [f"é{n}" * (n % 90) for n in range(200)]
    short = np.array([f"s{n}" for n in range(200)], "S6")
    spaced = h5py.h5t.C_S1.copy()
    spaced.set_size(6)
    spaced.set_strpad(h5py.h5t.STR_SPACEPAD)

    def write(file: Any) -> None:
        file.create_dataset("heap", data=texts, dtype=h5py.string_dtype())
        file.create_dataset(
            "zip", data=texts, dtype=h5py.string_dtype(), chunks=(32,), compression="gzip"
        )
        file["fixed"] = short
        space = h5py.h5s.create_simple((200,))
        h5py.h5d.create(file.id, b"spaced", spaced, space).write(
            h5py.h5s.ALL, h5py.h5s.ALL, np.char.ljust(short, 6)
        )

    for userblock in (0, 1024):
        data = hdf5(write, userblock_size=userblock)
        for name in ("heap", "zip"):
            assert [sample[name] for sample, _, _ in rows(data, name, axis=0)] == texts
        for name in ("fixed", "spaced"):
            found = [sample[name] for sample, _, _ in rows(data, name, axis=0)]
            assert found == [f"s{n}" for n in range(200)]
    with pytest.raises(FormatError, match=r"^k: dataset heap holds strings.*axis: 0"):
        rows(data, "heap", window=2)


def test_several_datasets_in_one_window() -> None:
    def write(file: Any) -> None:
        file.create_dataset("a/x", data=X, chunks=(16, 3, 4), compression="gzip")
        file.create_dataset("y", data=np.arange(200.0))
        file.create_dataset("short", data=np.arange(199.0))

    held = Held(hdf5(write))
    object_format = open_format("hdf5", {"datasets": ["a/x", "y"], "window": 20, "stride": 15})
    for sample, start, stop in visited(object_format, held):
        np.testing.assert_array_equal(sample["x"], X[start:stop])
        np.testing.assert_array_equal(sample["y"], np.arange(start, stop))
    named = open_format("hdf5", {"datasets": {"signal": "/a/x", "t": "y"}, "axis": 0})
    assert visited(named, held)[3][0].keys() == {"signal", "t"}
    unequal = open_format("hdf5", {"datasets": ["y", "short"], "axis": 0})
    with pytest.raises(
        FormatError, match=r"^k: expected arrays of one length, found y: 200, short"
    ):
        visited(unequal, held)


def test_whole_objects() -> None:
    def write(file: Any) -> None:
        file.create_dataset("x", data=X, chunks=CHUNKS, compression="gzip")
        file["n"] = np.int16(5)
        file["note"] = "é"
        file["names"] = ["a", "b"]
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((20,))
        made = h5py.h5d.create(file.id, b"compact", h5py.h5t.STD_I16BE, space, compact)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(20, dtype="i2"))

    held = Held(hdf5(write))
    object_format = open_format("hdf5", {"datasets": ["x", "n", "note", "compact"]})
    assert not object_format.ranged
    ((sample, start, stop),) = visited(object_format, held)
    np.testing.assert_array_equal(sample["x"], X)
    np.testing.assert_array_equal(sample["compact"], np.arange(20))
    assert (sample["n"].shape, int(sample["n"]), sample["note"]) == ((), 5, "é")
    assert (start, stop) == (0, 200)
    with pytest.raises(FormatError, match="an array of strings"):
        visited(open_format("hdf5", {"datasets": "names"}), held)
    with pytest.raises(FormatError, match="a single value, without an axis 0"):
        visited(open_format("hdf5", {"datasets": "n", "axis": 0}), held)


def test_the_only_dataset_need_not_be_named() -> None:
    object_format = open_format("hdf5", {"axis": 0})
    assert len(visited(object_format, Held(one(name="signal")))) == 200
    two = Held(hdf5(lambda file: [file.create_dataset(n, data=X) for n in "ab"]))
    with pytest.raises(FormatError, match=r"one dataset at its root, found 'a', 'b'; name"):
        visited(open_format("hdf5", {}), two)


def recording(file: Any) -> None:
    file["signal"] = X
    file["state"] = np.arange(len(X), dtype="u1")
    file["who"] = ["s"] * len(X)
    file["names"] = ["c0", "c1", "c2"]
    file["rate"] = 250.0
    file["other"] = h5py.ExternalLink("x.h5", "/x")
    file["elsewhere"] = np.zeros(len(X) + 1)


def test_the_datasets_as_long_as_the_largest_belong_together() -> None:
    held = Held(hdf5(recording))
    found = visited(open_format("hdf5", {"axis": 0}), held)
    assert len(found) == len(X)
    assert all(set(sample) == {"signal", "state", "who"} for sample, _, _ in found)
    np.testing.assert_array_equal([sample["state"] for sample, _, _ in found], range(len(X)))
    for options, fields in (({"window": 8}, {"signal", "state"}), ({"axis": 1}, {"signal"})):
        assert set(visited(open_format("hdf5", options), held)[0][0]) == fields


@given(
    st.integers(0, 90), st.integers(1, 20), st.integers(1, 12), st.integers(1, 9),
    st.integers(1, 11), st.booleans(),
)  # fmt: skip
def test_the_parts_of_an_object_are_its_windows(
    count: int, chunk: int, window: int, stride: int, parts: int, pad: bool
) -> None:
    held = Held(one(X[:count, 0], chunks=(chunk, 4), maxshape=(None, 4)))
    options = {"window": window, "stride": stride, "edge": "pad" if pad else "drop"}
    object_format = open_format("hdf5", options)
    starts = list(range(0, count if pad else count - window + 1, stride))
    found = [row for part in range(parts) for row in visited(object_format, held, part, parts)]
    assert [start for _, start, _ in found] == starts
    for sample, start, stop in found:
        assert stop == min(count, start + window)
        np.testing.assert_array_equal(sample["x"][: stop - start], X[start:stop, 0])
        assert not sample["x"][stop - start :].any()
    measure = asyncio.run(object_format.measure(held))
    assert measure.samples == len(starts)
    if starts and not pad:
        exact = (held.entry.size - measure.overhead_bytes) / measure.stride_bytes
        assert int(exact + 1e-3) == len(starts)


def test_parts_worth_a_chunk_are_chunks() -> None:
    data = one(np.arange(1000.0), chunks=(100,), compression="gzip")
    object_format = open_format("hdf5", {"axis": 0})
    measure = asyncio.run(object_format.measure(Held(data)))
    assert (measure.samples, measure.together) == (1000, 100)
    for parts in (9, 10, 11):
        borders = {
            visited(object_format, Held(data), part, parts)[0][1] for part in range(1, parts)
        }
        assert sum(border % 100 == 0 for border in borders) >= 8
    assert [
        len(visited(object_format, Held(data), part, 1000)) for part in (0, 99, 100, 999)
    ] == [1] * 4


def test_every_start_is_equally_likely() -> None:
    object_format = open_format("hdf5", {"window": 8, "stride": 5, "phase": "random"})
    held = Held(one(np.arange(40, dtype="u1"), chunks=(7,)))
    found = (visited(object_format, held, round=round) for round in range(300))
    counts = Counter(start for samples in found for _, start, _ in samples)
    assert set(counts) == set(range(33))
    assert all(abs(count - 60) < 6 * 60**0.5 for count in counts.values())


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 70))
def test_taking_some_reads_few_chunks(count: int, chunk: int, take: int) -> None:
    held = Held(one(np.arange(count, dtype="<i8"), chunks=(chunk,), maxshape=(None,)))
    starts = [row[1] for row in visited(open_format("hdf5", {"axis": 0}), held, take=take)]
    assert starts == sorted(set(starts))
    assert len(starts) == min(take, count)
    assert len({start // chunk for start in starts}) <= -(-take // chunk) + 1


def test_taken_samples_are_all_alike() -> None:
    """Of every chunk, the last and small one included."""
    object_format = open_format("hdf5", {"axis": 0})
    held = Held(one(np.arange(13, dtype="u1"), chunks=(5,)))
    counts = Counter(visited(object_format, held, take=1, round=n)[0][1] for n in range(650))
    assert all(abs(counts[start] - 50) < 36 for start in range(13))


def test_what_a_visit_reads() -> None:
    """Metadata once, then the chunks that hold the samples, together."""
    noise = np.random.default_rng(0).random((4096, 64))
    held = Held(one(noise, chunks=(64, 64), compression="gzip", maxshape=(None, 64)))
    object_format = open_format("hdf5", {"window": 64})
    visited(object_format, held, 3, 64)
    assert len(held.asked) <= 4
    held.asked.clear()
    for part in range(10, 20):
        visited(object_format, held, part, 64)
    read = sum((stop or 0) - start for start, stop in held.asked)
    stored = sum(
        info.size
        for info in map(h5py.File(io.BytesIO(held.data))["x"].id.get_chunk_info, range(10, 20))
    )
    assert read <= 1.1 * stored
    assert len(held.asked) == 10


def test_the_index_of_chunks_is_not_read_to_find_the_only_dataset() -> None:
    """Pieces of it are between the chunks, one behind every few dozen of them."""
    noise = np.random.default_rng(0).random((1000, 1000), "f4")
    held = Held(one(noise, chunks=(2, 1000)))
    object_format = open_format("hdf5", {"axis": 0})
    assert asyncio.run(object_format.measure(held)).samples == 1000
    assert len(visited(object_format, held, 250, 500)) == 2
    assert sum((stop or 0) - start for start, stop in held.asked) < 140_000
    assert len(held.asked) <= 5


def test_a_second_visit_to_values_in_one_piece_is_one_request() -> None:
    held = Held(one(np.arange(100_000.0)))
    object_format = open_format("hdf5", {"window": 100})
    visited(object_format, held, 0, 1000)
    held.asked.clear()
    ((_, start, _),) = visited(object_format, held, 700, 1000)
    ((first, stop),) = held.asked
    assert stop is not None
    assert stop - first == 800
    assert first > start * 8


def test_visits_at_the_same_time_share_what_they_fetch() -> None:
    held = Held(one(np.random.default_rng(0).random(50_000), chunks=(1000,)))
    object_format = open_format("hdf5", {"window": 1000})

    async def all_at_once() -> None:
        await asyncio.gather(*(object_format.read(held, Visit(p, 50, 0, 0)) for p in range(50)))

    asyncio.run(all_at_once())
    assert len(held.asked) <= 52


@pytest.mark.parametrize("damage", ["bits", "checksum", "cut"])
def test_a_damaged_chunk_is_a_hole(damage: str) -> None:
    gzip = None if damage == "checksum" else "gzip"
    data = bytearray(one(chunks=(16, 3, 4), fletcher32=not gzip, compression=gzip))
    info = h5py.File(io.BytesIO(bytes(data)))["x"].id.get_chunk_info(2)
    if damage == "cut":
        data = data[: info.byte_offset + 5]
    else:
        data[info.byte_offset + 20] ^= 255
    object_format = open_format("hdf5", {"axis": 0})
    with pytest.raises(FormatError, match=r"^k: .*"):
        visited(object_format, Held(bytes(data)))


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=1, max_size=300))
@example(bytes(256))
@example(b"\xff" * 255)
@example(b"\0\xff" * 70_000)
def test_the_checksum_is_that_of_hdf5(data: bytes) -> None:
    values = np.frombuffer(data, "u1")
    written = one(values, chunks=values.shape, fletcher32=True)
    found = rows(written, axis=0)
    assert bytes(int(sample["x"]) for sample, _, _ in found) == data


ENCODED = {
    32001: lambda data: numcodecs.Blosc(cname="zstd", shuffle=1).encode(data),
    32015: lambda data: numcodecs.Zstd(3).encode(data),
}


def compressed_by(code: int, chunk: bytes, mask: int = 0) -> bytes:
    """A dataset of one chunk of 4,000 numbers, as a plugin has compressed it."""
    stored = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    stored.set_chunk((4000,))
    stored.set_shuffle()
    stored.set_filter(code, h5py.h5z.FLAG_OPTIONAL, (4,))

    def write(file: Any) -> None:
        space = h5py.h5s.create_simple((4000,))
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I32LE, space, stored)
        dataset.write_direct_chunk((0,), chunk, mask)

    return hdf5(write)


@pytest.mark.parametrize("code", ENCODED)
def test_chunks_of_blosc_and_zstd(code: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 99, 4000, "<i4")
    shuffled = numbers.view("u1").reshape(-1, 4).T.tobytes()
    chunk = bytes(ENCODED[code](shuffled))
    for data, mask in ((chunk, 0), (bytes(ENCODED[code](numbers)), 1), (shuffled, 2)):
        ((sample, _, _),) = rows(compressed_by(code, data, mask))
        np.testing.assert_array_equal(sample["x"], numbers)
    cut = [chunk[:length] for length in range(1, len(chunk), 97)]
    others = [bytes(ENCODED[code](bytes(n))) for n in (0, 15_996, 16_004, 50_000_000)]
    for damaged in (*cut, *others, b"<html>" * 9):
        with pytest.raises(FormatError, match=r"^k: "):
            rows(compressed_by(code, damaged))


@pytest.mark.parametrize("code", ENCODED)
def test_the_library_is_never_asked_for_a_plugin(code: int) -> None:
    """A number in the middle of its bytes is for the library, which would load a plugin."""

    def write(file: Any) -> None:
        stored = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        stored.set_chunk((8,))
        stored.set_filter(code, h5py.h5z.FLAG_OPTIONAL, (4,))
        padded = h5py.h5t.STD_I32LE.copy()
        padded.set_precision(20)
        padded.set_offset(4)
        space = h5py.h5s.create_simple((8,))
        dataset = h5py.h5d.create(file.id, b"x", padded, space, stored)
        dataset.write_direct_chunk((0,), bytes(ENCODED[code](bytes(32))), 0)

    with pytest.raises(FormatError, match="one that only the HDF5 library reads"):
        rows(hdf5(write))


def outside(tmp_path: Path) -> dict[str, Callable[[Any], object]]:
    """What leads out of the file, each to a file with what must not be read."""
    secret = tmp_path / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["x"] = X
    (tmp_path / "raw").write_bytes(X.tobytes())

    def soft(file: Any) -> None:
        file["far"] = h5py.ExternalLink(str(secret), "/")
        file["x"] = h5py.SoftLink("/far/x")

    def virtual(file: Any) -> None:
        layout = h5py.VirtualLayout(X.shape, X.dtype)
        layout[:] = h5py.VirtualSource(str(secret), "x", X.shape)
        file.create_virtual_dataset("x", layout)

    def external(file: Any) -> None:
        file["x"] = h5py.ExternalLink(str(secret), "/x")

    def storage(file: Any) -> None:
        file.create_dataset("x", X.shape, X.dtype, external=str(tmp_path / "raw"))

    def references(file: Any) -> None:
        file.create_dataset("x", (200,), h5py.ref_dtype)

    return {
        "virtual": virtual, "a link out of": external, "far": soft, "external storage": storage,
        "type object": references,
    }  # fmt: skip


@contextmanager
def files_opened() -> Iterator[list[str]]:
    """The names of files that are opened in the block."""
    names: list[str] = []
    watching = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watching and event == "open":
            names.append(str(args[0]))

    sys.addaudithook(hook)
    try:
        yield names
    finally:
        watching = False  # a hook stays for good, so it must do nothing from now on


@pytest.mark.parametrize(
    "what", ["virtual", "a link out of", "far", "external storage", "type object"]
)
def test_no_other_file_is_ever_opened(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = hdf5(outside(tmp_path)[what])
    refused = pytest.raises(FormatError, match=what if what != "far" else "a link out of")
    with files_opened() as opened, refused:
        rows(data, axis=0)
    assert not [path for path in opened if str(tmp_path) in path]


def test_links_within_the_file_are_followed_and_end() -> None:
    def write(file: Any) -> None:
        file["g/deep"] = X
        file["soft"] = h5py.SoftLink("/g/deep")
        file["g/near"] = h5py.SoftLink("deep")
        file["circle"] = h5py.SoftLink("/circle")

    data = hdf5(write)
    assert len(rows(data, "soft", axis=0)) == len(rows(data, "g/near", axis=0)) == 200
    for name in ("circle", "g", "nowhere", "g/deep/er"):
        with pytest.raises(FormatError, match=r"^k: .*no dataset at"):
            rows(data, name, axis=0)


def test_types_that_are_no_values() -> None:
    def write(file: Any) -> None:
        file.create_dataset("lists", (5,), h5py.vlen_dtype("f4"))
        file.create_dataset("opaque", (5,), "V7")
        file.create_dataset("empty", dtype="f4")
        odd = h5py.h5t.NATIVE_INT32.copy()
        odd.set_precision(20)
        h5py.h5d.create(file.id, b"bits", odd, h5py.h5s.create_simple((5,)))

    data = hdf5(write)
    for name in ("lists", "opaque", "empty", "bits"):
        with pytest.raises(FormatError, match=rf"^k: dataset {name} "):
            rows(data, name, axis=0)


def test_a_filter_of_a_plugin_is_named() -> None:
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk((10,))
    settings.set_filter(32026, h5py.h5z.FLAG_OPTIONAL, (3,))

    def write(file: Any) -> None:
        space = h5py.h5s.create_simple((50,))
        h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I32LE, space, settings)

    with pytest.raises(
        FormatError, match=r"^k: dataset x uses filter 32026 \(blosc2\).*h5repack"
    ):
        rows(hdf5(write), axis=0)


def test_claims_cost_nothing() -> None:
    def write(file: Any) -> None:
        file.create_dataset("x", (1 << 50,), "f8", chunks=(1 << 20,), compression="gzip")

    data = hdf5(write)
    every: list[dict[str, Any]] = [{"axis": 0}, {"window": 1 << 40}, {"window": 1 << 28}]
    for options in every:
        with pytest.raises(FormatError, match=r"^k: one visit may yield"):
            rows(data, **options)


def test_chunks_that_are_claimed_are_not_listed() -> None:
    data = hdf5(lambda file: file.create_dataset("x", (1 << 21, 2), "u1", chunks=(1, 1)))
    tracemalloc.start()
    with pytest.raises(
        FormatError, match=r"may read at most 65,536 chunks of 1 bytes, found 4,194,304"
    ):
        visited(open_format("hdf5", {}), Held(data))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000


def test_without_h5py_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("source: {url: 's3://b/*.h5', format: hdf5}\n")
    hidden = "import sys; sys.modules['h5py'] = None; from growcache.cli.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", hidden, "run", str(tmp_path / "c.yaml")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "growcache: source.format: hdf5 needs h5py; pip install 'growcache[hdf5]' "
        "(GC801; growcache explain GC801)"
    ]


def test_a_process_ends_well_with_files_open() -> None:
    """The library closes what is open when its process ends, at a time when Python is gone."""
    code = """
import io, h5py, numpy as np
from growcache.formats import open_format
from tests.formats.held import Held, visited
file = io.BytesIO()
with h5py.File(file, "w") as opened:
    opened.create_dataset("x", data=np.arange(100), chunks=(10,))
kept = open_format("hdf5", {"axis": 0})
print(len(visited(kept, Held(file.getvalue()))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, b"100\n"), done.stderr
