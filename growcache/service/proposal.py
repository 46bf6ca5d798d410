"""What a config could say of objects like this one. Pure; a person has the last word."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from growcache.errors import FormatError
from growcache.remote.formats import COMPRESSIBLE
from growcache.remote.formats.compressed import packed_by, unpacked_name, unpacked_start
from growcache.remote.formats.examples import parse_example
from growcache.remote.formats.framing import HEAD, TAIL, length_at
from growcache.remote.formats.image import image_kind
from growcache.remote.formats.lmdb_pages import Meta, parse_meta
from growcache.remote.formats.npy import Header, parse_header
from growcache.remote.formats.tar_headers import is_header
from growcache.remote.store import Entry
from growcache.service.words import in_bytes, in_count

HEAD_BYTES = 1 << 17  # of an object are enough for `propose`
SMALL_BYTES = 1 << 20  # an array up to this size is one sample, unless it looks like many
LARGE_BYTES = 8 << 20  # an unknown object beyond this size is not cached as a whole
ROW_BYTES = 4096  # a row of this size can be a sample
ITEM_BYTES = 256  # the same where rows are themselves arrays
WINDOW_BYTES = 1 << 16
MOST_ITEMS_OF_AN_IMAGE = 4  # channels
MOST_CLASSES = 1000
NPY_MAGIC = b"\x93NUMPY"

# Kinds that are known by their first bytes, and cannot be taken apart here.
OTHERS = (
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by Zstandard"),
    (b"RIFF", "a RIFF file (WAVE audio?)"),
    (b"fLaC", "FLAC audio"),
    (b"GIF8", "a GIF image"),
)
LINES = (".jsonl", ".ndjson", ".jsonlines")
# By the name, where too little of an object can be unpacked to see what is in it.
NAMED = {**dict.fromkeys(LINES, "jsonl"), ".tar": "tar", ".tfrecord": "tfrecord"}
# Suffixes that say what numbers a file without a header is of.
DTYPES = {
    **dict.fromkeys((".f32", ".float32"), "<f4"),
    **dict.fromkeys((".f64", ".float64"), "<f8"),
    **dict.fromkeys((".i16", ".int16", ".s16", ".pcm"), "<i2"),
    **dict.fromkeys((".u8", ".uint8"), "<u1"),
    **dict.fromkeys((".c64", ".cf32", ".cfile"), "<c8"),
}


@dataclass(frozen=True, slots=True)
class Proposal:
    """A format for the objects of a source.

    Attributes:
        format: of the source.
        options: of the format.
        reasons: sentences that tell what was seen and what else could be meant.
        samples: about how many the object holds.
        sample_bytes: about how large each is.
    """

    format: str
    options: dict[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    samples: int = 1
    sample_bytes: int = 0


def propose(key: str, head: bytes, size: int, folders: Sequence[str] = ()) -> Proposal:
    """Return what objects like this one could be read as.

    Args:
        key: of the object.
        head: its first `HEAD_BYTES`, or all of it.
        size: of the object, bytes.
        folders: names of the folders that hold objects, where all of them are known.
    """
    if head.startswith(NPY_MAGIC):
        try:
            return _of_array(parse_header(head, Entry(key, size, None, None)))
        except FormatError as error:
            why = str(error).removeprefix(f"{key}: ")
            return _of_bytes(size, f"An .npy file that cannot be read as numbers: {why}.")
    if (meta := _lmdb(key, head)) is not None:
        return _of_lmdb(meta, size)
    if kind := image_kind(head):
        return _of_image(key, kind, size, folders)
    if dtype := DTYPES.get(PurePosixPath(key).suffix.lower()):
        return _of_raw(dtype, size, f"No header; {dtype} is what the name's ending says.")
    if is_header(memoryview(head), 0):
        return _of_tar(size)
    if length_at(memoryview(head), 0) is not None:
        return _of_records(head, size)
    if PurePosixPath(key).suffix.lower() in LINES and head.lstrip()[:1] == b"{":
        return _of_lines(head, size)
    if head.startswith(b"PK\x03\x04") and PurePosixPath(key).suffix.lower() == ".npz":
        return _of_archive(size)
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return Proposal("hdf5", {}, ("An HDF5 file.",), 1, size)
    if head.startswith(b"PAR1"):
        return Proposal("parquet", {}, ("A Parquet file; each row is a sample.",), 1, size)
    if (packed := _of_packed(key, head, size)) is not None:
        return packed
    seen = next((what for magic, what in OTHERS if head.startswith(magic)), None)
    if seen:
        return _of_bytes(size, f"This looks like {seen}.")
    if size > LARGE_BYTES:
        return _of_raw(
            "|u1",
            size,
            "Nothing known is at its start, and it is large: windows of bytes.",
            "Set dtype and shape to what was recorded, or format: bytes for whole objects.",
        )
    return _of_bytes(size, "Nothing known is at its start.")


@dataclass(frozen=True, slots=True)
class Cut:
    """How samples could be cut from an array.

    Attributes:
        options: of the format.
        how: a sentence.
        samples: that it yields.
        sample_bytes: of each.
    """

    options: dict[str, Any]
    how: str
    samples: int
    sample_bytes: int


def cut_of(shape: Sequence[int], item_bytes: int) -> Cut:
    """Return how samples could be cut from an array of this shape."""
    nbytes = math.prod(shape) * item_bytes
    whole = Cut({}, "The whole array is one sample.", 1, nbytes)
    if len(shape) == 0 or shape[0] <= 1 or nbytes == 0:
        return whole
    row = nbytes // shape[0]
    if _is_image(shape) or (nbytes <= SMALL_BYTES and len(shape) < 3):
        return whole
    if (len(shape) >= 3 and row >= ITEM_BYTES) or row >= ROW_BYTES:
        each = f"Each of its {in_count(shape[0])} rows {list(shape[1:])} is a sample"
        how = f"{each}, read by range; leave axis out to take whole arrays."
        return Cut({"axis": 0}, how, shape[0], row)
    rows = window_rows(row, shape[0])
    each = f"Windows of {rows} rows along the first axis ({in_bytes(rows * row)} each)"
    how = f"{each}, read by range; a stride below {rows} lets them overlap."
    return Cut({"window": rows}, how, shape[0] // rows, rows * row)


def _of_array(header: Header) -> Proposal:
    shape, dtype = header.shape, header.dtype
    nbytes = math.prod(shape) * dtype.itemsize
    what = f"An array of {dtype.name}{list(shape)}, {in_bytes(nbytes)}."
    if header.fortran and len(shape) > 1 and shape[0] > 1 and nbytes:
        alone = "Its rows are not contiguous (Fortran order): only whole arrays can be read."
        return Proposal("npy", {}, (what, alone), 1, nbytes)
    cut = cut_of(shape, dtype.itemsize)
    return Proposal("npy", cut.options, (what, cut.how), cut.samples, cut.sample_bytes)


def _lmdb(key: str, head: bytes) -> Meta | None:
    try:
        return parse_meta(head, key)
    except FormatError:
        return None


def _of_lmdb(meta: Meta, size: int) -> Proposal:
    entries = meta.main.entries
    each = size // max(1, entries)
    reasons = (
        f"An LMDB data file with {in_count(entries)} values of {in_bytes(each)} on average.",
        "Each value's bytes are a sample; decode names a function of yours that makes arrays of "
        "them, and database one of several databases.",
        "Let source.url match data files only, not the lock files beside them.",
    )
    return Proposal("lmdb", {}, reasons, max(1, entries), each)


def _of_archive(size: int) -> Proposal:
    reasons = (
        f"An archive of arrays, {in_bytes(size)}; together they are one sample.",
        "Set axis: 0 where they have as many rows each and row i of all of them is a sample, "
        "and fields to take some of them.",
    )
    return Proposal("npz", {}, reasons, 1, size)


def _is_image(shape: Sequence[int]) -> bool:
    return len(shape) == 3 and min(shape[0], shape[-1]) <= MOST_ITEMS_OF_AN_IMAGE


def window_rows(row_bytes: int, rows: int) -> int:
    """Return how many rows make a window of about 64 KiB, and at least four per object.

    >>> window_rows(16, 10**9), window_rows(16, 1000), window_rows(3000, 10**6)
    (4096, 128, 16)
    """
    most = min(WINDOW_BYTES // max(1, row_bytes), rows // 4)
    return 1 << max(0, most.bit_length() - 1)


def _of_image(key: str, kind: str, size: int, folders: Sequence[str]) -> Proposal:
    what = f"A {kind} image of {in_bytes(size)}; it stays encoded in the cache."
    if "/" not in key or len(set(folders)) == 1:
        reasons = (what, "All lie in one folder, so there is no label.")
        return Proposal("image", {"label": "none"}, reasons, 1, size)
    if 1 < len(set(folders)) <= MOST_CLASSES:
        classes = sorted(set(folders))
        reasons = (what, "The label is the number of its folder in classes.")
        return Proposal("image", {"classes": classes}, reasons, 1, size)
    reasons = (what, "The label is its folder's name; list the names as classes for numbers.")
    return Proposal("image", {"label": "folder"}, reasons, 1, size)


def _of_raw(dtype: str, size: int, *reasons: str) -> Proposal:
    item = int(dtype[-1])
    window = window_rows(item, size // item)
    return Proposal(
        "raw",
        {"dtype": dtype, "window": window},
        (*reasons, f"A window has {window} values; shape says how many values one row has."),
        max(1, size // item // window),
        window * item,
    )


def _of_records(head: bytes, size: int) -> Proposal:
    record = HEAD + (length_at(memoryview(head), 0) or 0) + TAIL
    what = f"A TFRecord file, whose first record has {in_bytes(record)}; each is a sample."
    try:
        parse_example(memoryview(head)[HEAD : record - TAIL])
    except FormatError:
        options = {"decode": "none"}
        why = "It is kept as bytes, for it is no tf.train.Example, or too long to see."
    else:
        options = {}
        why = "Its features are the fields; features says their dtypes and shapes."
    return Proposal("tfrecord", options, (what, why), max(1, size // record), record)


def _of_tar(size: int) -> Proposal:
    reasons = (
        "A tar archive; its files whose names are the same up to the first dot are a sample.",
        "All are taken, by their extensions; fields says which.",
    )
    return Proposal("tar", {}, reasons, 1, size)


def _of_packed(key: str, head: bytes, size: int) -> Proposal | None:
    """Return what is proposed for a compressed object, by what can be unpacked of its start."""
    kind = packed_by(head)
    if kind is None:
        return None
    inner = unpacked_start(head, kind)
    if packed_by(inner) or (not inner and kind != "zstd"):  # whose blocks may be larger
        return None
    longer = len(inner) / max(1, min(size, len(head)))
    name = unpacked_name(key)
    found = propose(name, inner, int(size * longer)) if inner else None
    form = found.format if found else NAMED.get(PurePosixPath(name).suffix.lower(), "")
    if form not in COMPRESSIBLE:
        return None
    what = f"Compressed by {kind}, so that each object is read whole."
    if found is None:
        reasons = (what, "What it holds is a guess, by its name.")
        return Proposal(form, {"compression": kind}, reasons, 1, size)
    options = {**found.options, "compression": kind}
    return replace(found, options=options, reasons=(what, *found.reasons))


def _of_lines(head: bytes, size: int) -> Proposal:
    lines = [line for line in head.splitlines(keepends=True) if not line.isspace()]
    mean = len(head) / len(lines)
    reasons = (
        f"Lines of JSON, the first of {in_bytes(len(lines[0]))}; each is a sample.",
        "All keys are taken; fields says which, of which dtype, and what if one is missing.",
    )
    return Proposal("jsonl", {}, reasons, max(1, round(size / mean)), round(mean))


def _of_bytes(size: int, *reasons: str) -> Proposal:
    whole = f"The object's bytes ({in_bytes(size)}) are one sample, for your code to decode."
    return Proposal("bytes", {}, (*reasons, whole), 1, size)


def propose_bound(free_bytes: int, source_bytes: int | None) -> tuple[int, str]:
    """Return a bound for the cache, and why that.

    Args:
        free_bytes: of the disk.
        source_bytes: of all objects; None where that is not known.
    """
    half = free_bytes // 2
    if source_bytes is not None and (needed := source_bytes * 5 // 4 + 64_000_000) < half:
        return _round(needed, up=True), (
            f"{in_bytes(source_bytes)} of objects fit in as a whole; "
            f"{in_bytes(free_bytes)} are free"
        )
    return _round(half, up=False), f"about half of the {in_bytes(free_bytes)} that are free"


def _round(number: int, *, up: bool) -> int:
    """Return the next number of the row 1, 2, 5, 10, …, at least a million.

    >>> _round(3_400_000_000, up=False), _round(3_400_000_000, up=True)
    (2000000000, 5000000000)
    """
    steps: list[int] = [m * 10**e for e in range(6, 18) for m in (1, 2, 5)]
    if up:
        return next(step for step in steps if step >= number)
    return max([step for step in steps if step <= number], default=steps[0])
