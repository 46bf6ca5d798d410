"""Detect an object's format by its first bytes and its name, and the main kind of a source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from growcache.formats import COMPRESSIBLE
from growcache.formats.compressed import compression_of, unpacked_name, unpacked_start
from growcache.formats.image import image_kind
from growcache.formats.tar_scan import is_header
from growcache.formats.tfrecord_scan import record_length_at
from growcache.formats.zarr_metadata import folder_of_chunk
from growcache.store.contract import Entry

HEAD_BYTES = 1 << 17  # enough of an object for `detect_format`
ZARR_FILES = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
MAGIC = (
    (0, b"\x93NUMPY", "npy"),
    *((at, b"\x89HDF\r\n\x1a\n", "hdf5") for at in (0, 512, 1024, 2048)),  # v7.3 of MATLAB: 512
    (0, b"PAR1", "parquet"),
    (16, b"\xde\xc0\xef\xbe", "lmdb"),
    (344, b"n+1\0", "nifti"),
    (4, b"n+2\0", "nifti"),
    (0, b"SIMPLE  =", "fits"),
    *((0, magic, "tiff") for magic in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    (128, b"DICM", "dicom"),
    (8, b"WAVE", "audio"),
    (0, b"fLaC", "audio"),
    (0, b"OggS", "audio"),
    (0, b"ID3", "audio"),
    (0, b"\xffBIOSEMI", "edf"),
)
FORMATS_BY_SUFFIX = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), "jsonl"),
    **dict.fromkeys((".tfrecord", ".tfrecords"), "tfrecord"),
    **dict.fromkeys((".jpg", ".jpeg", ".png"), "image"),
    **dict.fromkeys((".h5", ".hdf5", ".nc", ".nc4", ".nwb", ".h5ad"), "hdf5"),
    **dict.fromkeys((".tif", ".tiff"), "tiff"),
    ".tar": "tar",
}
# The dtypes of files without a header.
DTYPES_BY_SUFFIX = {
    **dict.fromkeys((".f32", ".float32"), "<f4"),
    **dict.fromkeys((".f64", ".float64"), "<f8"),
    **dict.fromkeys((".i16", ".int16", ".s16", ".pcm"), "<i2"),
    **dict.fromkeys((".u8", ".uint8"), "<u1"),
    **dict.fromkeys((".c64", ".cf32", ".cfile"), "<c8"),
}


def suffix_of(key: str) -> str:
    """Return an object's suffix without that of its compression, or "" for none or a number."""
    suffix = PurePosixPath(unpacked_name(key)).suffix.lower()
    return "" if suffix[1:].isdigit() else suffix


def is_zarr(entries: Sequence[Entry]) -> bool:
    return any(
        key.rpartition("/")[2] in ZARR_FILES or (".zarr/" in key and folder_of_chunk(key))
        for key in (entry.key for entry in entries)
    )


def _kind_of(key: str) -> str:
    suffix = suffix_of(key)
    return FORMATS_BY_SUFFIX.get(suffix, suffix)


def chunk_kinds(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the path of the array of each chunk in a listing, by key. See `array_path`."""
    keys = [entry.key for entry in entries]
    roots = {_parent(key) for key in keys if key.endswith("/.zarray")}
    folders = {key: _array_folder(key, roots) for key in keys}
    return {key: array_path(folder) for key, folder in folders.items() if folder}


def _parent(key: str) -> str:
    return key[: key.rfind("/") + 1]


def _array_folder(key: str, roots: set[str]) -> str:
    """Return the folder of a chunk's array.

    The numbers of nested chunks may look like folders of arrays.
    """
    guess = folder_of_chunk(key)
    parents = [f"{parent}/" for parent in PurePosixPath(key).parents] if guess and roots else []
    return next((parent for parent in parents if parent in roots), guess)


def array_path(folder: str) -> str:
    """Return the path of a Zarr array in its store, which is equal in all stores of a source.

    >>> array_path("data/a.zarr/eeg/x/"), array_path("data/x/"), array_path("a.zarr/")
    ('eeg/x', 'x', '')
    """
    _, store, path = folder.rpartition(".zarr/")
    return path.rstrip("/") if store else PurePosixPath(folder).name


def largest_group(entries: Sequence[Entry], *, zarr: bool) -> tuple[list[Entry], Counter[str]]:
    """Return the objects of the kind with the most bytes, and the numbers of all others.

    The chunks of each Zarr array are a kind. Objects whose names start with ``.`` or ``_``,
    such as ``_metadata``, are metadata.
    """
    if zarr:
        kind_by_key = chunk_kinds(entries)
        entries = [entry for entry in entries if entry.key in kind_by_key]
    else:
        kind_by_key = {entry.key: _kind_of(entry.key) for entry in entries}
    shown = [entry for entry in entries if not _is_hidden(PurePosixPath(entry.key).name)]
    kinds: dict[str, list[Entry]] = {}
    for entry in shown or entries:
        kinds.setdefault(kind_by_key[entry.key], []).append(entry)
    group = max(kinds.values(), key=lambda group: sum(one.size for one in group), default=[])
    taken = {entry.key for entry in group}
    rest = [entry.key for entry in entries if entry.key not in taken]
    own = ("", kind_by_key[group[0].key] if group else "")
    others = [
        PurePosixPath(key).name if kind_by_key[key] in own else kind_by_key[key] for key in rest
    ]
    return group, Counter(others)


def _is_hidden(name: str) -> bool:
    return name[:1] in (".", "_") or name == "lock.mdb" or name.endswith("-lock")


def folder_url(url: str) -> str:
    """Return the URL of all objects below a folder, or "" if the URL already means several.

    >>> folder_url("s3://b/a.zarr"), folder_url("data/"), folder_url("stores/*.zarr"), folder_url("s3://b/**")
    ('s3://b/a.zarr/**', 'data/**', 'stores/*.zarr/**', '')
    """
    name = url.rstrip("/").rpartition("/")[2]
    is_glob = any(character in name for character in "*?[")
    return "" if is_glob and not name.endswith(".zarr") else f"{url.rstrip('/')}/**"


def narrower_url(urls: Sequence[str], group: Sequence[Entry]) -> str:
    """Return a URL that matches only the objects of a group, or "".

    >>> narrower_url(["s3://b/**"], [Entry("a/1.npy", 8, None, None)])
    's3://b/**/*.npy'
    >>> narrower_url(["s3://b/**"], [Entry("a/data.mdb", 8, None, None)])
    's3://b/**/data.mdb'
    """
    folder, _, pattern = urls[0].rpartition("/")
    endings = {_ending(entry.key) for entry in group}
    if len(urls) > 1 or pattern not in ("", "*", "**") or len(endings) > 1 or "" in endings:
        return ""
    ending = endings.pop()
    name = "data.mdb" if ending == ".mdb" else f"*{ending}"
    return f"{folder}/{'' if pattern == '*' else '**/'}{name}"


def _ending(key: str) -> str:
    """Return the suffixes that identify a kind of object, such as ``.nii.gz``."""
    suffixes = PurePosixPath(key).suffixes
    is_packed = unpacked_name(key) != key and len(suffixes) > 1
    return "".join(suffixes[-2:] if is_packed else suffixes[-1:])


def zarr_url(url: str, keys: Sequence[str], path: str) -> str:
    """Return the URL of one array's chunks in all stores, if a URL matches several arrays.

    Otherwise it is "".

    >>> zarr_url("s3://b/a.zarr/**", ["a.zarr/x/c/0"], "x"), zarr_url("s3://b/**", ["n/a.zarr/x/0.0"], "x")
    ('s3://b/a.zarr/x/**', 's3://b/**/x/**')
    """
    folder, _, pattern = url.rpartition("/")
    if pattern not in ("", "**") or not path:
        return ""
    name = folder.rpartition("/")[2]
    is_below = name.endswith(".zarr") or all(f"/{name}/{path}/" in f"/{key}" for key in keys)
    return f"{folder}/{path}/**" if is_below else f"{folder}/**/{path}/**"


def detect_format(key: str, head: bytes) -> tuple[str, str]:
    """Return the format and compression of an object by its first bytes and its name, or "".

    >>> detect_format("a.npy", bytes([0x93]) + b"NUMPY"), detect_format("a.txt", b"text")
    (('npy', ''), ('', ''))
    """
    suffix = suffix_of(key)
    if kind := compression_of(head) or ("zlib" if _starts_zlib(head) else None):
        start = unpacked_start(head, kind)
        if start:
            form, packed = detect_format(unpacked_name(key), start)
        else:  # blocks of zstd may be larger than the head
            form, packed = FORMATS_BY_SUFFIX.get(suffix, "") if kind == "zstd" else "", ""
        is_known = form in COMPRESSIBLE and not packed
        if is_known or kind != "zlib":  # because other bytes may start like zlib's
            return (form, kind) if is_known else ("", "")
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


def _starts_zlib(head: bytes) -> bool:
    return head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0
