from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from growcache.errors import FormatError
from growcache.formats import open_format
from tests.formats.held import Held, Row, visited

pytest.importorskip("numcodecs")
zarr = pytest.importorskip("zarr")
from numcodecs import LZ4, Blosc, Shuffle, Zlib, Zstd  # noqa: E402
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

X = np.arange(200 * 6, dtype="<i4").reshape(200, 6)
ROOT = "b/a.zarr/"


def stored(version: int = 3, dtype: str = "<i4", **settings: Any) -> dict[str, bytes]:
    """The objects of a group with array x, and y of which the end was never written."""
    held: dict[str, Any] = {}
    group = zarr.open_group(zarr.storage.MemoryStore(held), mode="w", zarr_format=version)
    settings = {"chunks": (16, 4), **settings}
    group.create_array("x", shape=X.shape, dtype=dtype, **settings)[:] = X
    y = group.create_array("y", shape=(200,), chunks=(50,), dtype="f8", fill_value=7)
    y[:100] = np.arange(100)
    return {ROOT + key: value.to_bytes() for key, value in held.items()}


def all_rows(objects: dict[str, bytes], **options: Any) -> list[Row]:
    """What the objects of x yield, ordered by row."""
    object_format = open_format("zarr", options)
    found: list[Row] = []
    for key in objects:
        if key.startswith(ROOT + "x/"):
            held = Held(objects[key], key, objects)
            rows = visited(object_format, held)
            assert asyncio.run(object_format.measure(held)).samples == len(rows)
            found += rows
    return sorted(found, key=lambda row: row[1])


WRITTEN: dict[str, dict[str, Any]] = {
    "as it is": {"compressors": None},
    "zstd": {},
    "gzip": {"compressors": GzipCodec()},
    "blosc": {"compressors": BloscCodec()},
    "checksums": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "big-endian": {"dtype": ">u2"},
    "transposed": {"filters": [TransposeCodec(order=(1, 0))]},
    "dots": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "names of version 2": {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "shards": {"shards": (48, 8)},
    "shards as they are": {"shards": (32, 4), "compressors": None, "fill_value": 3},
    "2": {"version": 2},
    "2 blosc": {"version": 2, "compressors": Blosc()},
    "2 zlib": {"version": 2, "compressors": Zlib()},
    "2 lz4": {"version": 2, "compressors": LZ4()},
    "2 zstd, Fortran": {"version": 2, "compressors": Zstd(), "order": "F"},
    "2 shuffled": {"version": 2, "filters": [Shuffle(4)]},
    "2 slashes": {"version": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
}


@pytest.mark.parametrize("written", WRITTEN)
def test_every_window_is_of_the_chunk_in_which_it_starts(written: str) -> None:
    objects = stored(**WRITTEN[written])
    found = all_rows(objects, window=10, stride=7, beside=["y"])
    assert [(start, stop) for _, start, stop in found] == [
        (n, n + 10) for n in range(0, 191, 7)
    ]
    y = np.where(np.arange(200) < 100, np.arange(200.0), 7)
    for sample, start, stop in found:
        np.testing.assert_array_equal(sample["x"], X[start:stop])
        np.testing.assert_array_equal(sample["y"], y[start:stop])
        assert sample["x"].dtype == np.dtype(sample["x"].dtype).newbyteorder("<")


def test_a_transposition_of_three_axes() -> None:
    held: dict[str, Any] = {}
    values = np.arange(8 * 3 * 5, dtype="<i2").reshape(8, 3, 5)
    array = zarr.create_array(
        zarr.storage.MemoryStore(held), name="x", shape=values.shape, chunks=(4, 3, 5),
        dtype="i2", filters=[TransposeCodec(order=(2, 0, 1))],
    )  # fmt: skip
    array[:] = values
    found = all_rows({ROOT + key: value.to_bytes() for key, value in held.items()}, axis=0)
    np.testing.assert_array_equal([sample["x"] for sample, _, _ in found], values)


def test_an_aligned_visit_is_one_request() -> None:
    objects = stored(chunks=(20, 6))
    object_format = open_format("zarr", {"window": 10})
    first, second = (
        Held(objects[key], key, objects) for key in (ROOT + "x/c/0/0", ROOT + "x/c/1/0")
    )
    assert len(visited(object_format, first)) == 2
    assert first.found == [ROOT + "x/zarr.json"]
    assert [start for _, start, _ in visited(object_format, second)] == [20, 30]
    assert (len(second.asked), second.found) == (1, [])


def test_what_is_no_chunk_owns_nothing_and_costs_nothing() -> None:
    objects = stored()
    object_format = open_format("zarr", {"axis": 0})
    for key in (ROOT + "x/zarr.json", ROOT + "zarr.json", "b/readme.txt"):
        held = Held(b"{}", key, objects)
        assert visited(object_format, held) == []
        assert (held.asked, held.found) == ([], [])
    held = Held(objects[ROOT + "x/c/0/1"], ROOT + "x/c/0/1", objects)
    assert visited(object_format, held) == []  # the second column
    assert held.asked == []


def test_a_chunk_that_was_never_written_is_the_fill_value_in_the_windows_of_others() -> None:
    objects = stored(fill_value=3)
    gone = {key: value for key, value in objects.items() if "/x/c/1/" not in key}
    found = {start: sample["x"] for sample, start, _ in all_rows(gone, window=10)}
    assert not set(found) & set(range(16, 32))
    assert (found[10][6:] == 3).all()
    np.testing.assert_array_equal(found[10][:6], X[10:16])


@pytest.mark.slow
def test_every_start_is_equally_likely() -> None:
    objects = stored(chunks=(7, 6))
    object_format = open_format("zarr", {"window": 8, "stride": 5, "phase": "random"})
    held = [Held(v, k, objects) for k, v in objects.items() if k.startswith(ROOT + "x/c/")]
    counts = Counter(
        start
        for round in range(40)
        for one in held
        for _, start, _ in visited(object_format, one, round=round)
    )
    assert set(counts) == set(range(193))
    assert all(abs(count - 8) < 17 for count in counts.values())


def test_folders_with_numbers_for_names() -> None:
    objects = stored(version=2, chunk_key_encoding={"name": "v2", "separator": "/"})
    moved = {
        "data/7/" + key.removeprefix(ROOT + "x/"): v
        for key, v in objects.items()
        if "/x/" in key
    }
    object_format = open_format("zarr", {"axis": 0})
    starts = [
        row[1] for key in moved for row in visited(object_format, Held(moved[key], key, moved))
    ]
    assert sorted(starts) == list(range(200))


def metadata(**changes: Any) -> bytes:
    found = {
        "zarr_format": 2, "shape": [8], "chunks": [8], "dtype": "<i4", "fill_value": 0, "order": "C",
        "filters": None, "compressor": None,
    }  # fmt: skip
    return json.dumps(found | changes).encode()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"dtype": "|O", "filters": [{"id": "pickle"}]},
            "Python objects, which are not unpickled",
        ),
        ({"filters": [{"id": "pickle"}]}, "'pickle' is not read.*unpickles"),
        ({"compressor": {"id": "zfpy"}}, "codec 'zfpy' is not read; blosc, gzip"),
        ({"dtype": [["a", "<i4"]]}, "plain numbers"),
        ({"dtype": "<U5"}, "plain numbers"),
        ({"shape": [8, 8]}, "an array with an axis 0"),
        ({"shape": [-1]}, "a list of sizes"),
        ({"shape": [1 << 62]}, "a list of sizes"),
        ({"chunks": [0]}, "a list of sizes"),
        ({"dimension_separator": "../"}, "between the numbers"),
        ({"fill_value": {}}, "fill value"),
    ],
)
def test_metadata_that_cannot_be_read(changes: dict[str, Any], words: str) -> None:
    held = Held(bytes(32), "k/0", {"k/.zarray": metadata(**changes)})
    with pytest.raises(FormatError, match=rf"^k/.zarray: .*{words}"):
        visited(open_format("zarr", {"axis": 0}), held)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"node_type": "group"}', b"\xff"])
@pytest.mark.parametrize("file", ["zarr.json", ".zarray"])
def test_what_is_no_metadata(file: str, text: bytes) -> None:
    held = Held(bytes(32), "k/0", {f"k/{file}": text})
    with pytest.raises(FormatError, match=rf"^k/{file}: "):
        visited(open_format("zarr", {"axis": 0}), held)


def test_a_chunk_without_its_array() -> None:
    with pytest.raises(FormatError, match=r"^k/0: no zarr.json or .zarray at k/"):
        visited(open_format("zarr", {"axis": 0}), Held(bytes(32), "k/0"))


def test_a_chunk_of_another_size() -> None:
    held = Held(bytes(31), "k/0", {"k/.zarray": metadata()})
    with pytest.raises(FormatError, match=r"^k/0: a chunk has 31 bytes, expected 32"):
        visited(open_format("zarr", {"axis": 0}), held)


def test_what_compresses_well_is_read() -> None:
    """A few kB of Zstandard hold a chunk of 50 MB that is all the same."""
    chunk = Zstd().encode(np.zeros(50_000_000, "u1"))
    kept = metadata(shape=[50], chunks=[50], dtype="|u1", compressor={"id": "zstd"})
    wide = kept.replace(b"[50]", b"[50, 1000000]")
    held = Held(chunk, "k/0.0", {"k/.zarray": wide})
    assert len(visited(open_format("zarr", {"window": 25}), held)) == 2


def numbers_read(chunk: bytes, codec: dict[str, Any], size: int = 400) -> bytes:
    """The bytes of the one chunk of an array, as they are read."""
    kept = metadata(shape=[1, size], chunks=[1, size], dtype="|u1", compressor=codec)
    held = Held(chunk, "k/0.0", {"k/.zarray": kept})
    ((sample, _, _),) = visited(open_format("zarr", {"axis": 0}), held)
    return bytes(np.asarray(sample["x"]))


@pytest.mark.parametrize(("level", "size"), [(0, 64), (5, 2048)])
def test_a_blosc_chunk_that_is_cut_off_shows_no_memory_of_the_process(
    level: int, size: int
) -> None:
    values = (np.arange(size) // 32 % 9).astype("u1").tobytes()
    chunk = bytes(Blosc(clevel=level).encode(values))
    assert (len(chunk) < size) == bool(level)
    codec = {"id": "blosc"}
    assert numbers_read(chunk, codec, size) == values
    for length in range(len(chunk)):
        with pytest.raises(FormatError):
            numbers_read(chunk[:length], codec, size)
    claims = bytearray(chunk[:20])  # more than is there
    claims[2] |= 2
    claims[4:8] = claims[8:12] = (400).to_bytes(4, "little")
    for stored_bytes in (416, 16, 0, 2**31 - 1, 2**32 - 1):
        claims[12:16] = stored_bytes.to_bytes(4, "little")
        with pytest.raises(FormatError):
            numbers_read(bytes(claims), codec)


@pytest.mark.parametrize("sized", [True, False])
def test_a_zstd_frame_that_is_too_short_or_too_long(sized: bool) -> None:
    zstandard = pytest.importorskip("zstandard")
    values = (np.random.default_rng(0).integers(0, 99, 401, "u1") // 98).tobytes()
    compress = zstandard.ZstdCompressor(write_content_size=sized).compress
    codec = {"id": "zstd"}
    assert numbers_read(compress(values[:400]), codec) == values[:400]
    for length in (1, 10, 255, 256, 399, 401):
        with pytest.raises(FormatError):
            numbers_read(compress(values[:length]), codec)
    for two in ((10, 400), (400, 1)):
        with pytest.raises(FormatError):
            numbers_read(b"".join(compress(values[:length]) for length in two), codec)
    whole = compress(values[:400])
    for length in range(len(whole)):
        with pytest.raises(FormatError):
            numbers_read(whole[:length], codec)
