"""Format tfrecord: which records are whose, what their features become, and what is refused."""

from __future__ import annotations

import asyncio
import gzip
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.cache.formats.encoding import length_delimited_head, masked_crc_bytes, varint
from growcache.errors import FormatError
from growcache.formats import open_format
from growcache.formats.base import PartlyReadError, Visit, read_partly
from growcache.formats.tfrecord_scan import find_heads
from tests.formats.held import Held, visited

RAW = {"decode": "none"}


def framed(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    crcs = [masked_crc_bytes(google_crc32c.value(data)) for data in (length, payload)]
    return length + crcs[0] + payload + crcs[1]


def file(payloads: Sequence[bytes]) -> bytes:
    return b"".join(map(framed, payloads))


def message(tag: int, content: bytes) -> bytes:
    return length_delimited_head(tag, len(content)) + content


def example(features: Mapping[str, Any], *, packed: bool = True) -> bytes:
    """A serialized tf.train.Example: bytes, lists of bytes, of floats, or of ints."""
    return message(1, b"".join(_entry(name, v, packed) for name, v in features.items()))


def _entry(name: str, value: Any, packed: bool) -> bytes:
    return message(1, message(1, name.encode()) + message(2, feature_message(value, packed)))


def feature_message(value: Any, packed: bool = True) -> bytes:
    values = value if isinstance(value, list) else [value]
    if values and isinstance(values[0], bytes):
        return message(1, b"".join(message(1, item) for item in values))
    if values and isinstance(values[0], float):
        items = [struct.pack("<f", item) for item in values]
        inner = message(1, b"".join(items)) if packed else b"".join(b"\x0d" + i for i in items)
        return message(2, inner)
    items = [varint(item & (1 << 64) - 1) for item in values]
    inner = message(1, b"".join(items)) if packed else b"".join(b"\x08" + i for i in items)
    return message(3, inner if items else b"")


def rows(count: int, nbytes: int = 2000, *, zeros: bool = False) -> list[bytes]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(nbytes // 2, nbytes * 3 // 2, count)
    return [bytes(n) if zeros else rng.bytes(int(n)) for n in sizes]


def parts_of(object_format: Any, data: bytes, count: int) -> list[Any]:
    return [
        row for part in range(count) for row in visited(object_format, Held(data), part, count)
    ]


@given(
    st.lists(st.sampled_from([0, 1, 11, 12, 13, 5_000]), max_size=12),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
)
def test_each_record_is_of_one_part(
    sizes: list[int], parts: int, index: bool, nested: bool
) -> None:
    payloads = [bytes([n % 251]) * size for n, size in enumerate(sizes)]
    if nested:
        payloads = [file(payloads), *payloads, file([file(payloads), *payloads])]
    data = file(payloads)
    object_format = open_format("tfrecord", {**RAW, "index": index})
    whole = visited(object_format, Held(data)) if index else []
    found = parts_of(object_format, data, parts)
    assert [sample["data"] for sample, _, _ in found] == payloads
    assert not whole or found == whole
    for sample, start, stop in found:
        assert data[start:stop] == framed(sample["data"])


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("parts", [2, 3, 17, 60, 300])
def test_each_record_of_a_large_object_is_of_one_part(parts: int, zeros: bool) -> None:
    payloads = rows(300, zeros=zeros)
    data = file(payloads)
    assert len(data) > 1 << 19
    found = parts_of(open_format("tfrecord", RAW), data, parts)
    assert [sample["data"] for sample, _, _ in found] == payloads


@pytest.mark.parametrize("parts", [1, 2, 7, 20])
def test_records_within_records_are_not_taken_for_records(parts: int) -> None:
    payloads = []
    for n, payload in enumerate(rows(60, 10_000)):
        inner = file(rows(8, 1000))  # of a TFRecord file, or in the midst of other bytes
        payloads.append((inner, b"x" + inner + b"yz", payload, file([inner, inner]))[n % 4])
    data = file(payloads)
    for options in (RAW, {**RAW, "index": True}):
        found = parts_of(open_format("tfrecord", options), data, parts)
        assert [sample["data"] for sample, _, _ in found] == payloads


def test_a_record_longer_than_a_block_with_records_in_it_is_refused() -> None:
    payloads = [*rows(50), file(rows(200)), *rows(50)]
    data = file(payloads)
    object_format = open_format("tfrecord", RAW)
    with pytest.raises(FormatError, match="looks like records; set index: true"):
        parts_of(object_format, data, 40)
    found = parts_of(open_format("tfrecord", {**RAW, "index": True}), data, 40)
    assert [sample["data"] for sample, _, _ in found] == payloads
    longer = [*rows(50), b"x" * 400_000, *rows(50)]
    found = parts_of(object_format, file(longer), 40)
    assert [sample["data"] for sample, _, _ in found] == longer


def test_a_visit_reads_its_records_and_little_more() -> None:
    held = Held(file(rows(3000)))
    object_format = open_format("tfrecord", RAW)
    measure = asyncio.run(object_format.measure(held))
    assert abs(measure.samples - 3000) < 100
    parts = -(-measure.samples // measure.together)
    assert 5 < parts < 20
    visited(object_format, held, 0, parts)
    held.asked.clear()
    used = sum(
        stop - start
        for part in range(1, parts)
        for _, start, stop in visited(object_format, held, part, parts)
    )
    assert len(held.asked) == parts - 1
    assert sum((stop or 0) - start for start, stop in held.asked) < 1.05 * used


def test_what_is_fetched_in_vain_is_a_record() -> None:
    held = Held(file(rows(240, 40_000)))
    object_format = open_format("tfrecord", RAW)
    visited(object_format, held, 0, 10)
    held.asked.clear()
    found = [row for part in range(1, 10) for row in visited(object_format, held, part, 10)]
    used = sum(stop - start for _, start, stop in found)
    assert (
        sum((stop or 0) - start for start, stop in held.asked) < 1.06 * used
    )  # of equal ones 1.04
    assert len(held.asked) == 9


def test_an_index_is_walked_once_and_visits_read_their_records_only() -> None:
    held = Held(file(rows(60, 50_000)))
    object_format = open_format("tfrecord", {**RAW, "index": True})
    measure = asyncio.run(object_format.measure(held))
    assert (measure.samples, measure.together) == (60, 1)
    assert sum((stop or 0) - start for start, stop in held.asked) < 10_000
    held.asked.clear()
    for part in range(60):
        for _, start, stop in visited(object_format, held, part, 60):
            assert held.asked[-1][0] <= start < stop <= (held.asked[-1][1] or 0)
    assert sum((stop or 0) - start for start, stop in held.asked) == len(held.data)
    small = Held(file(rows(5000, 100)))
    asyncio.run(object_format.measure(small))
    assert len(small.asked) < 20  # many heads at once


@pytest.mark.parametrize("parts", [1, 12])
@pytest.mark.parametrize("index", [False, True])
def test_a_damaged_record_is_a_hole(parts: int, index: bool) -> None:
    payloads = rows(300)
    data = bytearray(file(payloads))
    at = len(file(payloads[:150]))

    def read() -> tuple[int, list[str]]:
        object_format = open_format("tfrecord", {**RAW, "index": index})
        found, why = [], []
        for part in range(parts):
            visit = Visit(part, parts, 0, 0)
            try:
                some, error = asyncio.run(read_partly(object_format, Held(bytes(data)), visit))
            except FormatError as failed:
                some, error = [], failed
            found += some
            why += [str(error)] if error else []
        return len(found), why

    data[at + 100] ^= 1
    count, (why,) = read()
    assert count == 299
    assert why == f"k: the record at byte {at:,}: its checksum is wrong"
    data[at + 100] ^= 1
    data[at + 3] ^= 1
    count, whys = read()
    assert count < 300
    assert whys[0].startswith(f"k: expected a TFRecord at byte {at:,} of {len(data):,}, found")


FEATURES: dict[str, Any] = {
    "raw": b"\0\1\2\3\4\5\6\7",
    "floats": [1.5, -2.0],
    "float": [0.25],
    "ints": [1, -1, 300, 2**63 - 1, -(2**63)],
    "int": [7],
    "none": [],
    "text": "é".encode(),
}


def only(features: Mapping[str, Any], options: dict[str, Any], **more: Any) -> dict[str, Any]:
    data = file([example(features, **more)])
    ((sample, start, stop),) = visited(open_format("tfrecord", options), Held(data))
    assert (start, stop) == (0, len(data))
    return sample


@pytest.mark.parametrize("packed", [True, False])
def test_features_as_they_are_found(packed: bool) -> None:
    found = only(FEATURES, {}, packed=packed)
    kinds = {n: v if isinstance(v, bytes) else (v.dtype.str, v.shape) for n, v in found.items()}
    assert kinds == {
        "raw": FEATURES["raw"],
        "floats": ("<f4", (2,)),
        "float": ("<f4", ()),
        "ints": ("<i8", (5,)),
        "int": ("<i8", ()),
        "none": ("<i8", (0,)),
        "text": "é".encode(),
    }
    assert found["ints"].tolist() == FEATURES["ints"]
    assert found["floats"].tolist() == [1.5, -2.0]


def test_features_are_named() -> None:
    wishes = {
        "raw": ["int16", 2, 2],
        "floats": "float64",
        "int": ["int32", None],
        "text": "str",
    }
    found = only(FEATURES, {"features": wishes})
    assert list(found) == list(wishes)
    assert found["raw"].tolist() == [[0x100, 0x302], [0x504, 0x706]]
    assert (found["floats"].dtype, found["int"].tolist()) == (np.float64, [7])
    assert found["int"].dtype == np.int32
    assert found["text"] == "é"
    assert only(FEATURES, {"features": ["int"]}) == {"int": 7}
    assert int(only(FEATURES, {"features": {"int": "uint8"}})["int"]) == 7


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"x": "bytes"}, "expected a feature 'x', found float, floats, int"),
        ({"raw": ["float32", 3]}, "feature 'raw': cannot reshape"),
        ({"raw": "complex128"}, "feature 'raw': buffer size"),
        ({"ints": "int32"}, "feature 'ints': expected int32, found other numbers"),
        ({"floats": "int64"}, "feature 'floats': expected int64"),
        ({"floats": "bytes"}, "expected bytes, found numbers"),
        ({"raw": ["int16", 5, None]}, "feature 'raw': cannot reshape"),
    ],
)
def test_features_that_are_something_else(wishes: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError, match=words) as caught:
        only(FEATURES, {"features": wishes})
    assert "\n" not in str(caught.value)
    with pytest.raises(FormatError, match="expected one value of bytes, found 2"):
        only({"raw": [b"a", b"b"]}, {})


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x0a\xff", b"\xff" * 30, b"no example", message(1, message(1, b"\x0a\x05a")),
     message(1, message(1, message(1, b"\xff\xff") + message(2, b"")))],
)  # fmt: skip
def test_what_is_no_example(payload: bytes) -> None:
    with pytest.raises(
        FormatError, match=r"k: the record at byte 0: expected a tf\.train\.Exam"
    ):
        visited(open_format("tfrecord", {}), Held(file([payload])))


MANY = 600_000
BOMBS = {  # a few bytes for each of which protobuf would allocate many
    "features": lambda: message(1, message(1, message(1, b"abc")) * (MANY // 2)),
    "kinds": lambda: message(1, message(1, message(2, b"\x0a\x00\x12\x00" * (MANY // 2)))),
    "values": lambda: message(1, message(1, message(2, message(1, b"\x0a\x00" * MANY)))),
    "unknown fields": lambda: b"\x18\x01" * MANY,
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_record_of_very_many_fields_is_refused_before_it_is_parsed(kind: str) -> None:
    payload = BOMBS[kind]()
    with pytest.raises(FormatError, match=r"a tf\.train\.Example: more than 262,144 fields"):
        visited(open_format("tfrecord", {}), Held(file([payload])))


def test_too_many_features() -> None:
    payload = example({f"{n}": [] for n in range(10_001)})
    with pytest.raises(FormatError, match="at most 10,000 features"):
        visited(open_format("tfrecord", {}), Held(file([payload])))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_examples_are_read_or_refused(data: st.DataObject) -> None:
    payload = bytearray(example(FEATURES, packed=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        found = visited(open_format("tfrecord", {}), Held(file([bytes(payload)])))
    except FormatError:
        return
    assert found[0][0].keys()


@pytest.mark.parametrize("kind", ["gzip", "zlib"])
def test_compressed_records(kind: str) -> None:
    payloads = rows(200)
    compress = gzip.compress if kind == "gzip" else zlib.compress
    packed = compress(file(payloads))
    object_format = open_format("tfrecord", {**RAW, "compression": kind})
    assert not object_format.ranged
    found = visited(object_format, Held(packed))
    assert [sample["data"] for sample, _, _ in found] == payloads
    assert asyncio.run(object_format.measure(Held(packed))).samples == 200
    words = "is compressed by gzip; set" if kind == "gzip" else "expected a TFRecord"
    with pytest.raises(FormatError, match=words):
        visited(open_format("tfrecord", RAW), Held(packed))
    assert not open_format("tfrecord", {}, ["s3://b/*.tfrecord.gz"]).ranged


def test_records_decoded_by_a_function_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_records.py").write_text(
        "def size(data, key):\n"
        "    return None if not data else {'n': len(data) // (len(data) - 3), 'key': key}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_records", raising=False)
    object_format = open_format("tfrecord", {"decode": "user_records:size"})
    assert object_format.code_digest
    with pytest.raises(PartlyReadError, match="ZeroDivisionError") as caught:
        visited(object_format, Held(file([b"1234", b"", b"123", b"123456"])))
    assert [sample["n"] for sample, _, _ in caught.value.found] == [4, 2]


def test_some_records_of_many_are_read_out_of_few_stretches() -> None:
    held = Held(file(rows(6000)))
    object_format = open_format("tfrecord", RAW)
    found = visited(object_format, held, take=50)
    assert len(found) == 50
    assert sum((stop or 0) - start for start, stop in held.asked) < len(held.data) / 4


def test_a_length_that_no_sampler_can_hold_is_refused_unread() -> None:
    length = struct.pack("<Q", 10**12)
    data = length + masked_crc_bytes(google_crc32c.value(length)) + bytes(300_000)
    held = Held(data, size=1 << 41)
    for options in (RAW, {**RAW, "index": True}):
        with pytest.raises(FormatError):
            asyncio.run(open_format("tfrecord", options).read(held, Visit(0, 1 << 30, 0, 0)))
    assert max((stop or 0) - start for start, stop in held.asked) < 1 << 20
    with pytest.raises(FormatError, match="one visit may read at most 500,000,000 bytes"):
        visited(open_format("tfrecord", RAW), held)


def test_heads_are_found_where_a_look_at_each_byte_finds_them() -> None:
    rng = np.random.default_rng(3)
    data = memoryview(
        rng.bytes(100) + framed(b"a" * 5) + bytes(70_000) + framed(b"") + rng.bytes(30)
    )
    assert list(find_heads(data, 0, len(data), 100)) == [100, 100 + 21 + 70_000]
    assert list(find_heads(data, 0, len(data), 3)) == [100 + 21 + 70_000]
    assert list(find_heads(data, 101, 70_121, 100)) == []
