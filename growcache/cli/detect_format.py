"""Detect what an object holds by its first bytes and its name, and which objects decide for a source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from growcache.formats import COMPRESSIBLE
from growcache.formats.compressed import compression_of, unpacked_name, unpacked_start
from growcache.formats.image import image_kind
from growcache.formats.tar_scan import is_header
from growcache.formats.tfrecord_scan import record_length_at
from growcache.formats.zarr import folder_of_chunk
from growcache.store.contract import Entry

HEAD_BYTES = 1 << 17  # of an object are enough for `detect_format`
ZARR_FILES = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
MAGIC = (
    (0, b"\x93NUMPY", "npy"),
    (0, b"\x89HDF\r\n\x1a\n", "hdf5"),
    (0, b"PAR1", "parquet"),
    (16, b"\xde\xc0\xef\xbe", "lmdb"),
    (344, b"n+1\0", "nifti"),
    (4, b"n+2\0", "nifti"),
    (0, b"SIMPLE  =", "fits"),
    *((0, magic, "tiff") for magic in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    (128, b"DICM", "dicom"),
    (8, b"WAVE", "audio"),
    (0, b"fLaC", "audio"),
    (0, b"\xffBIOSEMI", "edf"),
)
FORMATS_BY_SUFFIX = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), "jsonl"),
    **dict.fromkeys((".tfrecord", ".tfrecords"), "tfrecord"),
    **dict.fromkeys((".jpg", ".jpeg", ".png"), "image"),
    **dict.fromkeys((".h5", ".hdf5"), "hdf5"),
    ".tar": "tar",
}
# The dtype of files without a header.
DTYPES_BY_SUFFIX = {
    **dict.fromkeys((".f32", ".float32"), "<f4"),
    **dict.fromkeys((".f64", ".float64"), "<f8"),
    **dict.fromkeys((".i16", ".int16", ".s16", ".pcm"), "<i2"),
    **dict.fromkeys((".u8", ".uint8"), "<u1"),
    **dict.fromkeys((".c64", ".cf32", ".cfile"), "<c8"),
}


def suffix_of(key: str) -> str:
    """Return an object's suffix without that of its compression; empty for none, or a number."""
    suffix = PurePosixPath(unpacked_name(key)).suffix.lower()
    return "" if suffix[1:].isdigit() else suffix


def is_zarr(entries: Sequence[Entry]) -> bool:
    return any(
        key.rpartition("/")[2] in ZARR_FILES or (".zarr/" in key and folder_of_chunk(key))
        for key in (entry.key for entry in entries)
    )


def _kind_of(key: str, *, zarr: bool) -> str:
    suffix = suffix_of(key)
    return folder_of_chunk(key) if zarr else FORMATS_BY_SUFFIX.get(suffix, suffix)


def largest_group(entries: Sequence[Entry], *, zarr: bool) -> tuple[list[Entry], Counter[str]]:
    """Return the objects of the kind with the most bytes, and the numbers of all others.

    The chunks of each Zarr array are a kind. Objects whose names start with ``.`` or ``_``, such as ``_metadata``,
    describe others.
    """
    if zarr:
        entries = [entry for entry in entries if folder_of_chunk(entry.key)]
    shown = [entry for entry in entries if PurePosixPath(entry.key).name[:1] not in (".", "_")]
    kinds: dict[str, list[Entry]] = {}
    for entry in shown or entries:
        kinds.setdefault(_kind_of(entry.key, zarr=zarr), []).append(entry)
    group = max(kinds.values(), key=lambda group: sum(one.size for one in group), default=[])
    taken = {entry.key for entry in group}
    rest = [entry.key for entry in entries if entry.key not in taken]
    return group, Counter(_kind_of(key, zarr=zarr) or PurePosixPath(key).name for key in rest)


def narrower_url(urls: Sequence[str], group: Sequence[Entry]) -> str:
    """Return a URL that matches the objects of a group only, or an empty text.

    >>> narrower_url(["s3://b/**"], [Entry("a/1.npy", 8, None, None)])
    's3://b/**/*.npy'
    """
    folder, _, pattern = urls[0].rpartition("/")
    endings = {PurePosixPath(entry.key).suffix for entry in group}
    if len(urls) > 1 or pattern not in ("*", "**") or len(endings) > 1 or "" in endings:
        return ""
    return f"{folder}/{'**/' if pattern == '**' else ''}*{endings.pop()}"


def detect_format(key: str, head: bytes) -> tuple[str, str]:
    """Return the format and compression of an object, by its first bytes and its name; empty if unknown.

    >>> detect_format("a.npy", bytes([0x93]) + b"NUMPY"), detect_format("a.txt", b"text")
    (('npy', ''), ('', ''))
    """
    suffix = suffix_of(key)
    if kind := compression_of(head):
        start = unpacked_start(head, kind)
        if start:
            form, packed = detect_format(unpacked_name(key), start)
        else:  # blocks of zstd may be larger than the head
            form, packed = FORMATS_BY_SUFFIX.get(suffix, "") if kind == "zstd" else "", ""
        return (form, kind) if form in COMPRESSIBLE and not packed else ("", "")
    view = memoryview(head)
    found = (
        *((form, head[at:].startswith(magic)) for at, magic, form in MAGIC),
        ("image", image_kind(head) is not None),
        ("edf", suffix == ".edf" and head.startswith(b"0       ")),
        ("raw", suffix in DTYPES_BY_SUFFIX),
        ("tar", is_header(view, 0)),
        ("tfrecord", record_length_at(view, 0) is not None),
        ("jsonl", FORMATS_BY_SUFFIX.get(suffix) == "jsonl" and head.lstrip()[:1] == b"{"),
        ("npz", head.startswith(b"PK\x03\x04") and suffix == ".npz"),
    )
    return next((form for form, is_it in found if is_it), ""), ""
