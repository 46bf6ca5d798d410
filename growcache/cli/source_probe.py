"""Probe a source before there is a config: list part of it, read the start of an object, propose a format."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TypeVar

from growcache.cli.container_probe import (
    FormatProposal,
    chunks_of,
    cut_array,
    is_zarr,
    probe_contents,
    probe_zarr,
    window_rows,
)
from growcache.cli.humanize import in_bytes, in_count
from growcache.config import SourceConfig
from growcache.errors import FormatError, ObjectMissingError, TransientStoreError
from growcache.formats import COMPRESSIBLE
from growcache.formats.compressed import compression_of, unpacked_name, unpacked_start
from growcache.formats.image import image_kind
from growcache.formats.lmdb_tree import LmdbMeta, parse_lmdb_meta
from growcache.formats.npy import NpyHeader, parse_npy_header
from growcache.formats.tar_headers import is_header
from growcache.formats.tfrecord import parse_example
from growcache.formats.tfrecord_scan import (
    RECORD_HEAD_BYTES,
    RECORD_TAIL_BYTES,
    record_length_at,
)
from growcache.store.contract import Entry, StoredObject
from growcache.store.store import RemoteStore, open_store

LISTING_SECONDS = 2.0  # a small source is listed to its end, of a large one a part
PROBE_SECONDS = 15.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProbedSource:
    """What was seen.

    Attributes:
        objects: how many were listed.
        nbytes: their sizes together.
        all: whether the listing came to its end.
        key: of the object that was looked at.
        size: of that object.
        proposal: what it could be read as.
    """

    objects: int
    nbytes: int
    all: bool
    key: str
    size: int
    proposal: FormatProposal


def probe_source(source: SourceConfig, seconds: float = PROBE_SECONDS) -> ProbedSource:
    """Return what a source looks like, within a time limit.

    Raises:
        ConfigError: a URL or option that cannot be meant.
        ObjectMissingError: nothing matches.
        TransientStoreError: no answer in time.
        StoreError: the store refuses.
    """
    return _call_within(lambda: _open_and_probe(source, seconds), seconds)


def _open_and_probe(source: SourceConfig, seconds: float) -> ProbedSource:
    store = open_store(source, concurrency=1, timeout_seconds=seconds / 3)
    try:
        return _probe_store(source, store)
    finally:
        asyncio.run(store.close())


def _probe_store(source: SourceConfig, store: RemoteStore) -> ProbedSource:
    entries, whole = _list_some(store.pages())
    filled = [entry for entry in entries if entry.size]
    if not filled:
        what = "only empty objects lie" if entries else "no object lies"
        raise ObjectMissingError(f"{what} at {', '.join(source.url)}")
    entry, proposal = asyncio.run(_propose_for(store, filled, whole=whole))
    nbytes = sum(entry.size for entry in entries)
    return ProbedSource(len(entries), nbytes, whole, entry.key, entry.size, proposal)


async def _propose_for(
    store: RemoteStore, filled: Sequence[Entry], *, whole: bool
) -> tuple[Entry, FormatProposal]:
    """Return the object that was looked at, and what it could be read as."""
    if is_zarr(filled):
        chunks = chunks_of(filled)
        readers = [StoredObject(store, entry) for entry in chunks]
        return (chunks or filled)[0], await probe_zarr(readers, filled)
    entry = filled[0]
    head = bytes(memoryview(await store.read(entry, 0, min(entry.size, HEAD_BYTES))))
    folders = {parent_name(entry.key) for entry in filled} if whole else set()
    proposal = propose_format(entry.key, head, entry.size, sorted(folders))
    return entry, await probe_contents(proposal, StoredObject(store, entry))


def _list_some(pages: Iterator[list[Entry]]) -> tuple[list[Entry], bool]:
    """Return what is listed in two seconds, at least one page; and whether that is all."""
    end = time.monotonic() + LISTING_SECONDS
    entries: list[Entry] = []
    for page in pages:
        entries += page
        if time.monotonic() > end:
            return entries, False
    return entries, True


def parent_name(key: str) -> str:
    """Return the name of the folder that holds an object; empty where there is none."""
    return key.rpartition("/")[0].rpartition("/")[2]


def _call_within(work: Callable[[], T], seconds: float) -> T:
    """Return what the work returns, or raise what it raises, unless it takes too long."""
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((work(), None))
        except BaseException as error:  # noqa: BLE001  (raised where it is waited for)
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TransientStoreError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    assert value is not None
    return value


HEAD_BYTES = 1 << 17  # of an object are enough for `propose`


LARGE_BYTES = 8 << 20  # an unknown object beyond this size is not cached as a whole


MAX_CLASSES = 1000
NPY_MAGIC = b"\x93NUMPY"

# Kinds that are known by their first bytes, and cannot be taken apart here.
UNREADABLE_MAGIC = (
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by Zstandard"),
    (b"RIFF", "a RIFF file (WAVE audio?)"),
    (b"fLaC", "FLAC audio"),
    (b"GIF8", "a GIF image"),
)
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
# By the name, where too little of an object can be unpacked to see what is in it.
FORMATS_BY_SUFFIX = {
    **dict.fromkeys(JSONL_SUFFIXES, "jsonl"),
    ".tar": "tar",
    ".tfrecord": "tfrecord",
}
# Suffixes that say what numbers a file without a header is of.
DTYPES_BY_SUFFIX = {
    **dict.fromkeys((".f32", ".float32"), "<f4"),
    **dict.fromkeys((".f64", ".float64"), "<f8"),
    **dict.fromkeys((".i16", ".int16", ".s16", ".pcm"), "<i2"),
    **dict.fromkeys((".u8", ".uint8"), "<u1"),
    **dict.fromkeys((".c64", ".cf32", ".cfile"), "<c8"),
}


def propose_format(
    key: str, head: bytes, size: int, folders: Sequence[str] = ()
) -> FormatProposal:
    """Return what objects like this one could be read as.

    Args:
        key: of the object.
        head: its first `HEAD_BYTES`, or all of it.
        size: of the object, bytes.
        folders: names of the folders that hold objects, where all of them are known.
    """
    if head.startswith(NPY_MAGIC):
        try:
            return _propose_npy(parse_npy_header(head, Entry(key, size, None, None)))
        except FormatError as error:
            why = str(error).removeprefix(f"{key}: ")
            return _propose_bytes(size, f"An .npy file that cannot be read as numbers: {why}.")
    if (meta := _lmdb_meta(key, head)) is not None:
        return _propose_lmdb(meta, size)
    if kind := image_kind(head):
        return _propose_image(key, kind, size, folders)
    if dtype := DTYPES_BY_SUFFIX.get(PurePosixPath(key).suffix.lower()):
        return _propose_raw(dtype, size, f"No header; {dtype} is what the name's ending says.")
    if is_header(memoryview(head), 0):
        return _propose_tar(size)
    if record_length_at(memoryview(head), 0) is not None:
        return _propose_tfrecord(head, size)
    if PurePosixPath(key).suffix.lower() in JSONL_SUFFIXES and head.lstrip()[:1] == b"{":
        return _propose_jsonl(head, size)
    if head.startswith(b"PK\x03\x04") and PurePosixPath(key).suffix.lower() == ".npz":
        return _propose_npz(size)
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return FormatProposal("hdf5", {}, ("An HDF5 file.",), 1, size)
    if head.startswith(b"PAR1"):
        return FormatProposal(
            "parquet", {}, ("A Parquet file; each row is a sample.",), 1, size
        )
    if (packed := _propose_compressed(key, head, size)) is not None:
        return packed
    seen = next((what for magic, what in UNREADABLE_MAGIC if head.startswith(magic)), None)
    if seen:
        return _propose_bytes(size, f"This looks like {seen}.")
    if size > LARGE_BYTES:
        return _propose_raw(
            "|u1",
            size,
            "Nothing known is at its start, and it is large: windows of bytes.",
            "Set dtype and shape to what was recorded, or format: bytes for whole objects.",
        )
    return _propose_bytes(size, "Nothing known is at its start.")


def _propose_npy(header: NpyHeader) -> FormatProposal:
    shape, dtype = header.shape, header.dtype
    nbytes = math.prod(shape) * dtype.itemsize
    what = f"An array of {dtype.name}{list(shape)}, {in_bytes(nbytes)}."
    if header.fortran and len(shape) > 1 and shape[0] > 1 and nbytes:
        alone = "Its rows are not contiguous (Fortran order): only whole arrays can be read."
        return FormatProposal("npy", {}, (what, alone), 1, nbytes)
    cut = cut_array(shape, dtype.itemsize)
    return FormatProposal("npy", cut.options, (what, cut.how), cut.samples, cut.sample_bytes)


def _lmdb_meta(key: str, head: bytes) -> LmdbMeta | None:
    try:
        return parse_lmdb_meta(head, key)
    except FormatError:
        return None


def _propose_lmdb(meta: LmdbMeta, size: int) -> FormatProposal:
    entries = meta.main.entries
    each = size // max(1, entries)
    reasons = (
        f"An LMDB data file with {in_count(entries)} values of {in_bytes(each)} on average.",
        "Each value's bytes are a sample; decode names a function of yours that makes arrays of "
        "them, and database one of several databases.",
        "Let source.url match data files only, not the lock files beside them.",
    )
    return FormatProposal("lmdb", {}, reasons, max(1, entries), each)


def _propose_npz(size: int) -> FormatProposal:
    reasons = (
        f"An archive of arrays, {in_bytes(size)}; together they are one sample.",
        "Set axis: 0 where they have as many rows each and row i of all of them is a sample, "
        "and fields to take some of them.",
    )
    return FormatProposal("npz", {}, reasons, 1, size)


def _propose_image(key: str, kind: str, size: int, folders: Sequence[str]) -> FormatProposal:
    what = f"A {kind} image of {in_bytes(size)}; it stays encoded in the cache."
    if "/" not in key or len(set(folders)) == 1:
        reasons = (what, "All lie in one folder, so there is no label.")
        return FormatProposal("image", {"label": "none"}, reasons, 1, size)
    if 1 < len(set(folders)) <= MAX_CLASSES:
        classes = sorted(set(folders))
        reasons = (what, "The label is the number of its folder in classes.")
        return FormatProposal("image", {"classes": classes}, reasons, 1, size)
    reasons = (what, "The label is its folder's name; list the names as classes for numbers.")
    return FormatProposal("image", {"label": "folder"}, reasons, 1, size)


def _propose_raw(dtype: str, size: int, *reasons: str) -> FormatProposal:
    item = int(dtype[-1])
    window = window_rows(item, size // item)
    return FormatProposal(
        "raw",
        {"dtype": dtype, "window": window},
        (*reasons, f"A window has {window} values; shape says how many values one row has."),
        max(1, size // item // window),
        window * item,
    )


def _propose_tfrecord(head: bytes, size: int) -> FormatProposal:
    record = (
        RECORD_HEAD_BYTES + (record_length_at(memoryview(head), 0) or 0) + RECORD_TAIL_BYTES
    )
    what = f"A TFRecord file, whose first record has {in_bytes(record)}; each is a sample."
    try:
        parse_example(memoryview(head)[RECORD_HEAD_BYTES : record - RECORD_TAIL_BYTES])
    except FormatError:
        options = {"decode": "none"}
        why = "It is kept as bytes, for it is no tf.train.Example, or too long to see."
    else:
        options = {}
        why = "Its features are the fields; features says their dtypes and shapes."
    return FormatProposal("tfrecord", options, (what, why), max(1, size // record), record)


def _propose_tar(size: int) -> FormatProposal:
    reasons = (
        "A tar archive; its files whose names are the same up to the first dot are a sample.",
        "All are taken, by their extensions; fields says which.",
    )
    return FormatProposal("tar", {}, reasons, 1, size)


def _propose_compressed(key: str, head: bytes, size: int) -> FormatProposal | None:
    """Return what is proposed for a compressed object, by what can be unpacked of its start."""
    kind = compression_of(head)
    if kind is None:
        return None
    inner = unpacked_start(head, kind)
    if compression_of(inner) or (not inner and kind != "zstd"):  # whose blocks may be larger
        return None
    longer = len(inner) / max(1, min(size, len(head)))
    name = unpacked_name(key)
    found = propose_format(name, inner, int(size * longer)) if inner else None
    form = (
        found.format if found else FORMATS_BY_SUFFIX.get(PurePosixPath(name).suffix.lower(), "")
    )
    if form not in COMPRESSIBLE:
        return None
    what = f"Compressed by {kind}, so that each object is read whole."
    if found is None:
        reasons = (what, "What it holds is a guess, by its name.")
        return FormatProposal(form, {"compression": kind}, reasons, 1, size)
    options = {**found.options, "compression": kind}
    return replace(found, options=options, reasons=(what, *found.reasons))


def _propose_jsonl(head: bytes, size: int) -> FormatProposal:
    lines = [line for line in head.splitlines(keepends=True) if not line.isspace()]
    mean = len(head) / len(lines)
    reasons = (
        f"Lines of JSON, the first of {in_bytes(len(lines[0]))}; each is a sample.",
        "All keys are taken; fields says which, of which dtype, and what if one is missing.",
    )
    return FormatProposal("jsonl", {}, reasons, max(1, round(size / mean)), round(mean))


def _propose_bytes(size: int, *reasons: str) -> FormatProposal:
    whole = f"The object's bytes ({in_bytes(size)}) are one sample, for your code to decode."
    return FormatProposal("bytes", {}, (*reasons, whole), 1, size)


def propose_bound(free_bytes: int, source_bytes: int | None) -> tuple[int, str]:
    """Return a bound for the cache, and why that.

    Args:
        free_bytes: of the disk.
        source_bytes: of all objects; None where that is not known.
    """
    half = free_bytes // 2
    if source_bytes is not None and (needed := source_bytes * 5 // 4 + 64_000_000) < half:
        return _round_size(needed, up=True), (
            f"{in_bytes(source_bytes)} of objects fit in as a whole; "
            f"{in_bytes(free_bytes)} are free"
        )
    return _round_size(
        half, up=False
    ), f"about half of the {in_bytes(free_bytes)} that are free"


def _round_size(number: int, *, up: bool) -> int:
    """Return the next number of the row 1, 2, 5, 10, …, at least a million.

    >>> _round_size(3_400_000_000, up=False), _round_size(3_400_000_000, up=True)
    (2000000000, 5000000000)
    """
    steps: list[int] = [m * 10**e for e in range(6, 18) for m in (1, 2, 5)]
    if up:
        return next(step for step in steps if step >= number)
    return max([step for step in steps if step <= number], default=steps[0])
