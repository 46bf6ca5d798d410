"""The files of a shared catalog: what is written comes back, and nothing else is believed."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.config_source import ManifestConfig
from growcache.errors import FormatError
from growcache.store.contract import Entry, storable_entries
from growcache.store.manifest_tables import manifest_rows
from growcache.store.shared_catalog import (
    MOST_PART_BYTES,
    Part,
    PartPacker,
    Pointer,
    PublishedListing,
    decode_pointer,
    encode_pointer,
    part_digest,
    unpack_part,
)

ETAGS = st.none() | st.text("0123456789abcdef", max_size=32).map(lambda text: f'"{text}"')
TIMES = st.none() | st.floats(0, 2e9)
ENTRIES = st.lists(
    st.builds(
        Entry, st.text(min_size=1), st.integers(0, 1 << 50), ETAGS, TIMES, st.integers(0, 3)
    ),
    max_size=20,
).map(storable_entries)
LISTING = PublishedListing("host:1", 1.5, True, (Part("0" * 32, 3),), {"empty": 2})


def packed(entries: list[Entry]) -> tuple[Part, bytes]:
    packer = PartPacker(100)
    packer.add(entries)
    return packer.finish()


@given(entries=ENTRIES)
def test_a_part_holds_the_entries_that_were_put_in(entries: list[Entry]) -> None:
    part, data = packed(entries)
    assert unpack_part(part, data) == entries
    assert packed(entries) == (part, data)  # one name for one content


def test_a_part_is_a_manifest() -> None:
    import io

    entries = [Entry("a/x.npy", 7, '"e"', 1.0), Entry("a/ü.npy", 8, None, 2.0)]
    _, data = packed(entries)
    rows = manifest_rows(io.BytesIO(data), "jsonl.gz", ManifestConfig(url="parts.jsonl.gz"))
    assert [(row.name, row.size, row.etag) for row in rows] == [
        ("a/x.npy", 7, '"e"'),
        ("a/ü.npy", 8, None),
    ]


def resealed(lines: bytes, entries: int = 1) -> tuple[Part, bytes]:
    data = gzip.compress(lines, 1)
    return Part(part_digest(data), entries), data


GOOD = {"key": "k", "size": 1, "etag": None, "mtime": None}


@pytest.mark.parametrize(
    "row",
    [
        {"key": "k"},
        [1],
        {**GOOD, "key": 7},
        {**GOOD, "size": -1},
        {**GOOD, "size": True},
        {**GOOD, "size": 1 << 60},
        {**GOOD, "etag": ["x"]},
        {**GOOD, "etag": "x\ny"},
        {**GOOD, "mtime": "now"},
        {**GOOD, "url": "s3://other"},
        {**GOOD, "key": "k" * 9000},
    ],
)
def test_rows_that_no_listing_has_are_refused(row: object) -> None:
    with pytest.raises(FormatError):
        unpack_part(*resealed(orjson.dumps(row)))


def test_other_bytes_another_number_and_bombs_are_refused() -> None:
    part, data = packed([Entry("k", 1, None, None)])
    with pytest.raises(FormatError, match="another digest"):
        unpack_part(part, data[:-1] + b"x")
    with pytest.raises(FormatError, match="no listing has"):
        unpack_part(replace(part, entries=2), data)
    with pytest.raises(FormatError, match="at most"):
        unpack_part(*resealed(b" " * (MOST_PART_BYTES + 1)))
    with pytest.raises(FormatError, match="expected gzip"):
        unpack_part(Part(part_digest(b"{}"), 1), b"{}")


def test_a_pointer_comes_back_and_names_the_newest_listing_first() -> None:
    newer = replace(LISTING, parts=(Part("1" * 32, 1), Part("2" * 32, 2)), complete=False)
    pointer = Pointer((LISTING, newer))
    assert decode_pointer(encode_pointer(pointer)) == pointer
    assert [part.digest[0] for part in pointer.parts()] == ["1", "2", "0"]
    assert pointer.complete == (LISTING,)
    assert pointer.entries == 6


def _changed(change: Callable[[dict[str, object]], object]) -> bytes:
    values = orjson.loads(encode_pointer(Pointer((LISTING,))))
    change(values)
    return orjson.dumps(values)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"<html>",
        _changed(lambda values: values.update(growcache_catalog=2)),
        _changed(lambda values: values.update(listings=[])),
        _changed(lambda values: values.update(listings=[{}])),
        _changed(lambda values: values["listings"][0].update(parts=[["../../x", 1]])),  # type: ignore[index]
        _changed(lambda values: values["listings"][0].update(parts=[[7, 1]])),  # type: ignore[index]
        _changed(lambda values: values["listings"][0].update(at="soon")),  # type: ignore[index]
        _changed(lambda values: values["listings"][0].update(at="nan")),  # type: ignore[index]
        _changed(lambda values: values["listings"][0].update(at=-1e300)),  # type: ignore[index]
    ],
)
def test_what_is_no_pointer_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_pointer(data)


def test_a_later_version_is_named() -> None:
    with pytest.raises(FormatError, match=r"(?m)^expected a catalog of version 1, found 2$"):
        decode_pointer(_changed(lambda values: values.update(growcache_catalog=2)))
