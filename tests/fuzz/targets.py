"""Functions that take any bytes and must end well: by a result, or by the error they promise.

Any other exception is a finding, and so is memory: what is claimed must not be believed.
Where bytes are guarded by a checksum, the target puts the right one before them, so that
what stands behind the guard is tried, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import google_crc32c
import numpy as np
import orjson

from growcache.cache.files import CacheLayout, checksummed_json
from growcache.cache.formats import CACHE_FORMATS
from growcache.cache.formats.encoding import masked_crc_bytes, record_head
from growcache.cache.formats.encoding import npy_header as encode_npy_header
from growcache.cache.lease_views import MAGIC, _parse_lease
from growcache.cache.side_files import Identity, read_editions, read_issued
from growcache.cache.sidecar import Sidecar
from growcache.cache.status_model import Status
from growcache.config_text import load_config
from growcache.errors import CacheError, ConfigError, CorruptShardError, FormatError, StoreError
from growcache.formats import lmdb, open_format
from growcache.formats.base import Visit
from growcache.formats.image import decode_image, image_kind
from growcache.formats.npy import parse_npy_header
from growcache.pickles import unpickle_arrays
from growcache.schema import Field, Schema
from growcache.secrecy import hide_secrets, url_without_secrets
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry, storable_entries
from growcache.store.shared_catalog import Part, decode_pointer, part_digest, unpack_part
from growcache.store.store_errors import read_obstore_error, store_error
from growcache.store.urls import is_unsupported_key, parse_url, redact
from growcache.usercode import printable
from tests.formats.held import Held

FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
SIZES = (None, 0, 1 << 20, 10**12, 1 << 50)  # that a listing may claim; None: the truth
LOOP = asyncio.new_event_loop()
SCHEMAS = (
    Schema((Field("x", "<f4", (4, 2)),)),
    Schema((Field("b", "bytes", ()), Field("x", "<i2", (None, 3)))),
    Schema((Field("s", "str", ()), Field("z", "<u2", (None, 0, None)))),
)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(prefix="growcache-fuzz-", dir=FOLDER) as made:
        yield Path(made)


def npy_header(data: bytes) -> None:
    for size in SIZES:
        with contextlib.suppress(FormatError):
            found = parse_npy_header(data, Held(data, size=size).entry)
            assert all(n >= 0 for n in found.shape)
            assert not found.dtype.hasobject


def _visited(name: str, options: dict[str, Any], held: Held, visit: Visit) -> None:
    object_format = open_format(name, options)
    for work in (object_format.measure(held), object_format.read(held, visit)):
        with contextlib.suppress(FormatError):
            LOOP.run_until_complete(work)


def npy_rows(data: bytes) -> None:
    """The first byte chooses what is asked of the rest."""
    first = data[0] if data else 0
    every: tuple[dict[str, Any], ...] = (
        {}, {"axis": 0}, {"window": 3}, {"window": 5, "stride": 2, "phase": "random"},
        {"axis": 0, "stride": 7},
    )  # fmt: skip
    held = Held(data[1:], size=SIZES[first % 5] if first & 128 else None)
    if held.entry.size != len(held.data):
        return npy_header(held.data)  # reads that come short are the store's to refuse
    part = first >> 5
    visit = Visit(part, 1 + part, 1, 0, 2 if first & 64 else None)
    _visited("npy", every[first % len(every)], held, visit)
    return None


def raw_rows(data: bytes) -> None:
    first = data[0] if data else 0
    options: dict[str, Any] = {"dtype": (">i2", "<c8", "?", "=f4")[first % 4], "shape": [2]}
    if first & 4:
        options |= {"window": 1 + first % 9, "stride": 1 + first % 3, "offset": first % 11}
    if first & 8:
        options["edge"] = "pad"
    _visited("raw", options, Held(data[1:]), Visit(0, 1, 0, first, None))


def lmdb_values(data: bytes) -> None:
    first = data[0] if data else 0
    options: dict[str, Any] = ({}, {"key": "bytes"}, {"database": "m"}, {"key": "str"})[
        first % 4
    ]
    visit = Visit(first >> 6, 1 + (first >> 5), 1, 0, 2 if first & 16 else None)
    leaves = 1 if first & 8 else lmdb.RANDOM_LEAVES  # how many are too few to choose among
    with mock.patch.object(lmdb, "RANDOM_LEAVES", leaves):
        _visited("lmdb", options, Held(data[1:]), visit)


def hdf5(data: bytes) -> None:
    """The first byte chooses what is asked of the rest."""
    first = data[0] if data else 0
    every: tuple[dict[str, Any], ...] = (
        {}, {"axis": 0}, {"window": 3}, {"datasets": ["x", "s"], "axis": 0},
        {"datasets": "g/x", "window": 4, "stride": 2, "edge": "pad", "phase": "random"},
    )  # fmt: skip
    visit = Visit(first >> 6, 4, 1, 0, 2 if first & 32 else None)
    _visited("hdf5", every[first % len(every)], Held(data[1:]), visit)


def jsonl(data: bytes) -> None:
    """The first byte chooses what is asked of the rest."""
    first = data[0] if data else 0
    fields = {"a": "int32", "b": {"dtype": "float32", "default": []}, "c": {"path": "d.e"}}
    every: tuple[dict[str, Any], ...] = (
        {},
        {"raw": True},
        {"fields": fields},
        {"fields": ["a"]},
    )
    packed = ("none", "none", "gzip", "zlib", "zstd")[first % 5]
    options = {**every[first % 4], "compression": packed}
    parts = 1 if packed != "none" else 1 + (first >> 5)
    held = Held(data[1:])
    for part in range(parts):
        _visited("jsonl", options, held, Visit(part, parts, 1, 0, 2 if first & 64 else None))


def parquet(data: bytes) -> None:
    first = data[0] if data else 0
    options: dict[str, Any] = ({}, {"columns": ["x"]}, {"nulls": "drop"})[first % 3]
    visit = Visit(first >> 6, 4, 1, 0, 2 if first & 32 else None)
    _visited("parquet", options, Held(data[1:]), visit)


def npz_arrays(data: bytes) -> None:
    first = data[0] if data else 0
    every: tuple[dict[str, Any], ...] = (
        {}, {"fields": ["x"]}, {"axis": 0}, {"window": 3, "phase": "random"},
        {"axis": 0, "fields": ["y"]}, {"window": 2, "read": "whole"},
    )  # fmt: skip
    visit = Visit(first >> 6, 1 + (first >> 5), 1, 0, 2 if first & 16 else None)
    _visited("npz", every[first % len(every)], Held(data[1:]), visit)


def zarr(data: bytes) -> None:
    """The metadata of an array and, behind two zero bytes, one of its chunks."""
    metadata, _, chunk = data.partition(b"\0\0")
    for key, file in (("k/c/0/0", "k/zarr.json"), ("k/0.0", "k/.zarray")):
        for options in ({"axis": 0}, {"window": 3, "stride": 2, "phase": "random"}):
            _visited("zarr", options, Held(chunk, key, {file: metadata}), Visit(0, 1, 0, 0))


def _of_science(name: str, every: tuple[dict[str, Any], ...], data: bytes) -> None:
    """The first byte chooses what is asked of the rest."""
    first = data[0] if data else 0
    visit = Visit(first >> 6, 1 + (first >> 5), 1, 0, 2 if first & 16 else None)
    _visited(name, every[first % len(every)], Held(data[1:]), visit)


def tiff(data: bytes) -> None:
    every: tuple[dict[str, Any], ...] = (
        {}, {"axis": 0}, {"window": 3, "phase": "random"}, {"page": 1}, {"level": 1, "axis": -1},
    )  # fmt: skip
    _of_science("tiff", every, data)


def edf(data: bytes) -> None:
    every: tuple[dict[str, Any], ...] = (
        {"window": 8}, {"window": "500ms", "stride": 3}, {"window": 9, "edge": "pad"},
        {"window": 4, "channels": ["C3"], "dtype": "stored"},
    )  # fmt: skip
    _of_science("edf", every, data)


def nifti(data: bytes) -> None:
    every: tuple[dict[str, Any], ...] = (
        {}, {"axis": 0}, {"window": [2, 2]}, {"compression": "gzip"},
        {"axis": 1, "dtype": "float32", "compression": "gzip"},
    )  # fmt: skip
    _of_science("nifti", every, data)


def audio(data: bytes) -> None:
    every: tuple[dict[str, Any], ...] = (
        {}, {"window": 7}, {"window": 5, "edge": "pad", "dtype": "float64"},
        {"window": 7, "read": "whole"},
    )  # fmt: skip
    _of_science("audio", every, data)


def tfrecord(data: bytes) -> None:
    """The first byte chooses what is asked of the rest; its checksums are put right, or not."""
    first = data[0] if data else 0
    every: tuple[dict[str, Any], ...] = (
        {}, {"decode": "none"}, {"features": {"x": ["float32", None, 2], "y": "str"}},
    )  # fmt: skip
    options = {**every[first % 3], "index": bool(first & 8)}
    framed = b"".join(_framed(piece) for piece in data[1:].split(b"\xfe\xfe"))
    for held in (Held(data[1:]), Held(framed)):
        for part in range(1 + (first >> 5)):
            visit = Visit(part, 1 + (first >> 5), 1, 0, 2 if first & 16 else None)
            _visited("tfrecord", options, held, visit)


def tar(data: bytes) -> None:
    """The first byte chooses what is asked of the rest; its headers' checksums are put right, or not."""
    first = data[0] if data else 0
    every: tuple[dict[str, Any], ...] = ({}, {"decode": "none"}, {"fields": ["npy", "__key__"]})
    options = {**every[first % 3], "index": bool(first & 8)}
    for held in (Held(data[1:]), Held(_summed(data[1:]))):
        for part in range(1 + (first >> 5)):
            visit = Visit(part, 1 + (first >> 5), 1, 0, 2 if first & 16 else None)
            _visited("tar", options, held, visit)


def _summed(data: bytes) -> bytes:
    blocks = [bytearray(data[at : at + 512]) for at in range(0, len(data), 512)]
    for block in blocks:
        if len(block) == 512 and block[155:156] == b" ":
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
    return b"".join(blocks)


def _framed(data: bytes) -> bytes:
    return record_head(len(data)) + data + masked_crc_bytes(google_crc32c.value(data))


def image(data: bytes) -> None:
    image_kind(data)
    with contextlib.suppress(FormatError):
        found = decode_image(data, "k")
        assert found.dtype == np.uint8
        assert found.shape[2] == 3


def pickles(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        unpickle_arrays(data)


def sidecar(data: bytes) -> None:
    inner = b'{"crc32c":"%08x","sidecar":%b}' % (google_crc32c.value(data), data)
    for written in (data, inner):
        with contextlib.suppress(CorruptShardError):
            found = Sidecar.from_bytes(written)
            assert len(found.origins) == found.samples
            for i in range(found.samples):
                found.origin(i)
            assert Sidecar.from_bytes(found.to_bytes()) == found


def lease(data: bytes) -> None:
    """A header and states, divided by the first zero byte; and a file as it is."""
    head, _, states = data.partition(b"\0")
    framed = MAGIC + struct.pack("<I", len(head)) + head + b"\0" + states
    for written in (data, framed):
        found = _parse_lease(Path("a.lease"), written, True)
        if found is not None:
            assert len(found.numbers) == len(found.states)
            assert all(n >= 0 for n in (*found.holding(), *found.unread(), *found.used()))


def catalog(data: bytes) -> None:
    """A file as it is; and frames with their right checksums, each after its length."""
    frames, at = b"", 0
    while at + 2 <= len(data):
        (length,) = struct.unpack_from("<H", data, at)
        content = data[at + 2 : at + 2 + length]
        frames += struct.pack("<II", len(content), google_crc32c.value(content)) + content
        at += 2 + length
    for written in (data, b"GCCAT\x00\x00\x01" + frames):
        with folder() as here:
            path = here / "catalog.bin"
            path.write_bytes(written)
            with contextlib.suppress(CacheError), Catalog.open(path, readonly=True) as found:
                found.digest(len(found))
                list(found.stores_and_keys(0, len(found)))
                for ordinal in range(len(found)):
                    found.entry(ordinal)


def shared_catalog(data: bytes) -> None:
    """A pointer; and a part as it is, and as the lines in it, each with its right digest."""
    with contextlib.suppress(FormatError):
        decode_pointer(data)
    for packed in (data, gzip.compress(data, 1, mtime=0)):
        with contextlib.suppress(FormatError):
            part = Part(part_digest(packed), data.count(b"\n") + 1)
            assert len(unpack_part(part, packed)) == part.entries


def notes(data: bytes) -> None:
    """The small files next to the index."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        identity = Identity.from_json(data)
        assert Identity.from_json(identity.to_json()) == identity
        assert not any(field.item_dtype.hasobject for field in identity.schema.fields)
    with contextlib.suppress(ValueError):
        status = Status.from_json(data)
        status.to_json()
    with folder() as here:
        layout = CacheLayout(here)
        layout.editions.write_bytes(data)
        layout.issued.write_bytes(data)
        assert read_issued(layout) is None
        assert read_editions(layout) is None
        with contextlib.suppress(orjson.JSONDecodeError):
            found = orjson.loads(data)
            layout.editions.write_bytes(checksummed_json({"editions": found}))
            layout.issued.write_bytes(checksummed_json({"issued": found}))
            read_editions(layout)
            read_issued(layout)


def shard(data: bytes) -> None:
    """Files of a shard: the first byte chooses the schema, the second how many samples."""
    if len(data) < 2:
        return
    schema, samples = SCHEMAS[data[0] % 3], data[1] % 5
    half = 2 + (len(data) - 2) // 2
    for name, form in CACHE_FORMATS.items():
        with folder() as here:
            path = here / f"00000000{form.EXTENSION}"
            for number, suffix in enumerate(form.suffixes(schema)):
                file = here / f"00000000{suffix}"
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(
                    _content(data[2:half] if number else data[half:], suffix, data)
                )
            with contextlib.suppress(CorruptShardError):
                found = form.open_shard(path, schema, samples)
                form.bad_records(found)
                found.digest()
                for i in range(len(found)):
                    found[i]
                assert name in CACHE_FORMATS


def _content(data: bytes, suffix: str, all_: bytes) -> bytes:
    """Arrays get the header that is expected, so that their values are looked at."""
    if not suffix.endswith(".npy") or all_[1] & 128:
        return data
    columns = {".offsets.npy": {0: 0, 1: 4, 2: 4}[all_[0] % 3]}.get(suffix, 0)
    samples = all_[1] % 5
    if not columns:
        return encode_npy_header("<i8", (samples + 1,)) + data[: 8 * (samples + 1)].ljust(
            8 * samples + 8, b"\0"
        )
    return encode_npy_header("<i8", (samples, columns)) + data[: 8 * samples * columns].ljust(
        8 * samples * columns, b"\0"
    )


def config(data: bytes) -> None:
    with folder() as here:
        path = here / "c.yaml"
        path.write_bytes(data)
        with contextlib.suppress(ConfigError):
            found = load_config(path)
            orjson.dumps(found.model_dump(mode="json"))
        with contextlib.suppress(ConfigError, UnicodeDecodeError):
            load_config({"source": {"url": "x"}}, [data.decode()])


def url(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    redact(text)
    assert url_without_secrets(url_without_secrets(text)) == url_without_secrets(text)
    with contextlib.suppress(ConfigError):
        found = parse_url(text)
        assert found.prefix == "" or found.prefix.endswith("/")
        found.matches("a/b")
        assert "MYPASSWORD" not in parse_url("https://me:MYPASSWORD@host/" + text).root


def listing(data: bytes) -> None:
    """Keys, ETags and sizes that a store claims: lines of text."""
    entries = []
    for number, line in enumerate(data.decode("utf-8", "surrogateescape").split("\n")):
        key, _, etag = line.partition("\t")
        size = int(etag) if etag.isdecimal() and len(etag) < 40 else number
        entries.append(Entry(key, size, etag or None, None, number % 2))
    kept = storable_entries(entries)
    with folder() as here, Catalog.open(here / "c") as found:
        found.append(kept)
        found.flush()
        again = found.entries(range(len(found)))
        assert {(e.store, e.key) for e in again} == {(e.store, e.key) for e in kept}
        for entry in again:
            is_unsupported_key(entry.key)
            assert printable(entry.key).isprintable()
    assert list(FOLDER.glob("growcache-fuzz-*/../evil*")) == []


def answer(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    found = store_error(read_obstore_error(OSError(text)), "s3://b/", text[:20])
    assert isinstance(found, StoreError | ConfigError)
    hide_secrets(str(found))


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        npy_header, npy_rows, raw_rows, jsonl, hdf5, parquet, zarr, lmdb_values, npz_arrays, tfrecord, tar, tiff, edf, nifti, audio, image, pickles, sidecar, lease, catalog, shared_catalog, notes, shard, config,
        url, listing, answer,
    )
}  # fmt: skip
