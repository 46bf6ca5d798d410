"""Probe a source before there is a config: list part of it, detect a format, prove it by reading.

The kind of object with the most bytes decides. Three of its objects are read as the service would read
them. A candidate that cannot be read gives way to the next one, at last to plain bytes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar

from growcache.cli.humanize import in_bytes, in_count, plural
from growcache.config import SourceConfig
from growcache.errors import (
    FormatError,
    MissingLibraryError,
    ObjectMissingError,
    TransientStoreError,
)
from growcache.formats import COMPRESSIBLE, open_format
from growcache.formats.base import (
    ObjectFormat,
    ObjectReader,
    Visit,
    read_partly,
    require_library,
)
from growcache.formats.compressed import compression_of, unpacked_name, unpacked_start
from growcache.formats.hdf5_dataset import DatasetLayout, dataset_paths, describe_dataset
from growcache.formats.hdf5_file import HDF5Files
from growcache.formats.image import image_kind
from growcache.formats.lmdb_tree import TreeReader
from growcache.formats.npy import read_npy_header
from growcache.formats.parquet import FooterCache, check_column_type, parquet_errors
from growcache.formats.tar_scan import is_header
from growcache.formats.tfrecord_scan import record_length_at
from growcache.formats.zarr import folder_of_chunk, open_zarr
from growcache.schema import Sample, Schema, sample_bytes
from growcache.store.contract import Entry, StoredObject
from growcache.store.store import RemoteStore, open_store
from growcache.threads import DaemonThread

LISTING_SECONDS = 2.0  # a small source is listed to its end, of a large one a part
PROBE_SECONDS = 15.0
HEAD_BYTES = 1 << 17  # of an object are enough for `detect_format`
MANY_OBJECTS = 16  # each of which can be a sample
MAX_READ_BYTES = 32 << 20  # of an object that is read whole, to prove a candidate
MAX_CHUNKS_READ = 8  # of a Zarr array
MAX_CLASSES = 1000
SMALL_BYTES = 1 << 20  # up to this size an array is one sample, where there are many objects
ROW_BYTES = 4096  # a row of this size can be a sample
SUBARRAY_BYTES = 256  # the same where rows are themselves arrays
WINDOW_BYTES = 1 << 16
MAX_IMAGE_CHANNELS = 4
MIN_IMAGE_SIDE = 16
MAX_NAMED = 8  # arrays, columns or databases
MAX_DATASETS_TOGETHER = 8  # that become fields of one sample
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
# Options to try, the best first, for formats that need not be looked into.
RECORD_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "tar": [{}, {"decode": "none"}],
    "tfrecord": [{}, {"decode": "none"}],
    "jsonl": [{}, {"raw": True}],
    "nifti": [{}],
    "dicom": [{}],
    "tiff": [{}, {"axis": 0}],
    "edf": [{"window": 1000}],
    "fits": [{}, {"table": 1}],
    "audio": [{"window": 16000}, {"window": 16000, "read": "whole"}, {}],
}
NAME_DATASETS = "Name its datasets in options, as {datasets: [x, y], axis: 0}."
WHOLE_BYTES = "An object's bytes are one sample, for your code to decode (decode in options)."

T = TypeVar("T")
R = TypeVar("R")
# Options of a format, and sentences about the objects.
Candidate = tuple[dict[str, Any], Sequence[str]]


@dataclass(frozen=True, slots=True)
class ProbedSource:
    objects: int
    nbytes: int
    is_whole_listing: bool
    format: str = "bytes"
    options: dict[str, Any] = field(default_factory=dict)
    findings: tuple[str, ...] = ()  # sentences
    samples: int = 0  # estimated, of all objects; 0 before any was read
    sample_bytes: int = 0
    url: str = ""  # matches only the objects that were read; empty: the source's own


def probe_source(source: SourceConfig, seconds: float = PROBE_SECONDS) -> ProbedSource:
    def probe() -> ProbedSource:
        store = open_store(source, concurrency=1, timeout_seconds=seconds / 3)
        try:
            return _probe_store(source, store)
        finally:
            asyncio.run(store.close())

    thread = DaemonThread("probe")
    found = thread.submit(probe)
    thread.close(wait=False)
    if not found.wait(seconds):
        raise TransientStoreError(f"no answer within {seconds:g} s")
    return found.result()


def _probe_store(source: SourceConfig, store: RemoteStore) -> ProbedSource:
    entries, is_whole = _list_some(store.pages())
    filled = [entry for entry in entries if entry.size]
    if not filled:
        found = "only empty objects are" if entries else "no object is"
        raise ObjectMissingError(f"{found} at {', '.join(source.url)}")
    listed = ProbedSource(len(entries), sum(entry.size for entry in entries), is_whole)
    zarr = is_zarr(filled)
    group, others = largest_group(filled, zarr=zarr)
    if zarr:
        return asyncio.run(_propose_zarr(listed, store, group, sorted(others)))
    folders = {PurePosixPath(entry.key).parent.name for entry in group} if is_whole else set()
    probed = asyncio.run(_propose(listed, store, group, folders))
    if not others:
        return probed
    url = narrower_url(source.url, group)
    shown = ", ".join(f"{count} {kind}" for kind, count in others.most_common(4))
    advice = "so it was narrowed" if url else "so let it match objects of one kind"
    matched = f"source.url matches others as well ({shown}), {advice}."
    return replace(probed, url=url, findings=(matched, *probed.findings))


def _list_some(pages: Iterator[list[Entry]]) -> tuple[list[Entry], bool]:
    end = time.monotonic() + LISTING_SECONDS
    entries: list[Entry] = []
    for page in pages:
        entries += page
        if time.monotonic() > end:
            return entries, False
    return entries, True


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


async def _propose(
    listed: ProbedSource, store: RemoteStore, group: Sequence[Entry], folders: set[str]
) -> ProbedSource:
    largest = max(group, key=lambda entry: entry.size)
    probed = {one.key: one for one in (largest, group[0], group[len(group) // 2])}
    readers = [StoredObject(store, entry) for entry in probed.values()]
    heads = [
        bytes(memoryview(await one.read(0, min(one.entry.size, HEAD_BYTES)))) for one in readers
    ]
    kinds = [
        detect_format(one.entry.key, head) for one, head in zip(readers, heads, strict=True)
    ]
    form, compression = Counter(kinds).most_common(1)[0][0]  # of equals that of the largest
    first = kinds.index((form, compression))
    reason = f"It was not recognised; it starts with {heads[first][:8]!r}."
    try:
        if probe := CONTENT_PROBES.get(form):
            found = await probe(readers[first], len(group) >= MANY_OBJECTS)
        else:
            found = candidates(form, compression, readers[first].entry, heads[first], folders)
        for options, findings in found:
            try:
                return await _prove(listed, form, options, findings, readers, group)
            except FormatError as error:
                reason = f"It cannot be read as {form}: {error}."
    except MissingLibraryError as error:
        advice = (NAME_DATASETS,) if form == "hdf5" else ()
        findings = (f"Not looked into: {error}.", *advice)
        return replace(listed, format=form, findings=findings)
    except FormatError as error:
        reason = f"It cannot be read as {form}: {error}."
    return await _prove(listed, "bytes", {}, (reason, WHOLE_BYTES), readers, group)


def candidates(
    form: str, compression: str, entry: Entry, head: bytes, folders: set[str]
) -> list[Candidate]:
    """Return the candidates for objects whose format needs no look inside, the best first.

    ``folders`` are all that hold an image; empty if they are not known.
    """
    options: dict[str, Any]
    if form == "image":
        image = f"A {image_kind(head)} image of {in_bytes(entry.size)}; it stays encoded in the cache."
        options = {"label": "folder"}
        label = "The label is its folder's name; list the names as classes for numbers."
        if "/" not in entry.key or len(folders) == 1:
            options, label = {"label": "none"}, "All are in one folder, so there is no label."
        elif 1 < len(folders) <= MAX_CLASSES:
            options = {"classes": sorted(folders)}
            label = "The label is the number of its folder in classes."
        return [(options, (image, label))]
    if form == "raw":
        dtype = DTYPES_BY_SUFFIX[suffix_of(entry.key)]
        window = window_rows(int(dtype[-1]), entry.size // int(dtype[-1]))
        values = f"A window has {window} values; shape says how many values one row has."
        suffix = f"No header; {dtype} is what the name's ending says."
        return [({"dtype": dtype, "window": window}, (suffix, values))]
    packed = {"compression": compression} if compression else {}
    findings = [f"Compressed by {compression}, so that each object is read whole."] * len(
        packed
    )
    return [({**options, **packed}, findings) for options in RECORD_OPTIONS.get(form, ())]


async def probe_npy(reader: ObjectReader, many: bool) -> list[Candidate]:
    header = await read_npy_header(reader)
    array = f"An array of {header.dtype.name}{list(header.shape)}, {in_bytes(header.nbytes)}."
    options, sentence = array_options(header.shape, header.dtype.itemsize, many=many)
    if options and header.fortran and len(header.shape) > 1:
        options = {}
        sentence = "Its rows are not contiguous (Fortran order): only whole arrays can be read."
    return [(options, (array, sentence))]


async def probe_npz(reader: ObjectReader, many: bool) -> list[Candidate]:
    if many and reader.entry.size <= SMALL_BYTES:
        return [({}, ())]
    # Compressed arrays are read at once. Arrays of different lengths are together one sample.
    return [({"axis": 0}, ()), ({"axis": 0, "read": "whole"}, ()), ({}, ())]


async def probe_hdf5(reader: ObjectReader, many: bool) -> list[Candidate]:
    require_library("source.format: hdf5", "h5py", "hdf5")

    def describe(file: Any) -> tuple[list[DatasetLayout], list[str]]:
        layout = partial(describe_dataset, file, key=reader.entry.key)
        return _split_readable(layout, dataset_paths(file))

    found, unreadable = await HDF5Files().get(reader.entry).call(reader, describe)
    dtypes = {one.path: "str" if one.string_storage else one.dtype.name for one in found}
    shown = [f"{one.path} {dtypes[one.path]}{list(one.shape)}" for one in found]
    listed = f"An HDF5 file with {plural(len(found), 'dataset')}: {names_text(shown)}."
    listed += f" {plural(len(unreadable), 'other')}: {unreadable[0]}." if unreadable else ""
    arrays = [one for one in found if one.shape]
    numbers = [one for one in arrays if not one.string_storage] or arrays
    if not numbers:
        raise FormatError(f"{listed} None is an array")
    main = max(numbers, key=lambda one: math.prod(one.shape) * one.dtype.itemsize)
    folder = main.path.rpartition("/")[0]
    siblings = [one for one in found if one.path.rpartition("/")[0] == folder]
    # What has scalars next to it is one sample, as a rule: an image with its label.
    many = many or not all(one.shape for one in siblings)
    options, sentence = array_options(main.shape, main.dtype.itemsize, many=many)
    if main.string_storage:
        options, sentence = {"axis": 0}, "Each of its texts is a sample."
    together = [one.path for one in siblings if _goes_along(one, main, options)]
    together = together if len(together) <= MAX_DATASETS_TOGETHER else [main.path]
    return [({"datasets": together, **options}, (listed, f"Of {main.path}: {sentence}"))]


def _split_readable(read: Callable[[T], R], items: Iterable[T]) -> tuple[list[R], list[str]]:
    found, errors = [], []
    for item in items:
        try:
            found.append(read(item))
        except FormatError as error:
            errors.append(str(error))
    return found, errors


def _goes_along(one: DatasetLayout, main: DatasetLayout, options: dict[str, Any]) -> bool:
    if not options:  # the object is one sample, of which arrays of text are no values
        return not (one.string_storage and one.shape)
    is_row_of_text = "window" not in options and len(one.shape) == 1
    return one.shape[:1] == main.shape[:1] and (not one.string_storage or is_row_of_text)


async def probe_parquet(reader: ObjectReader, many: bool) -> list[Candidate]:
    require_library("source.format: parquet", "pyarrow", "parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq

    footer = await FooterCache(None).footer_bytes(reader)
    with parquet_errors(reader.entry):
        metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
        columns = metadata.schema.to_arrow_schema()

    def readable(column: Any) -> str:
        check_column_type(column.name, column.type)
        return str(column.name)

    good, bad = _split_readable(readable, columns)
    rows, names = plural(metadata.num_rows, "row"), names_text(columns.names)
    table = f"A Parquet table of {rows} with {names}; each row is a sample."
    if not bad or not good:
        return [({}, (table,))]
    taken = f"Those that can be read are taken; {plural(len(bad), 'other')}: {bad[0].partition(';')[0]}."
    return [({"columns": good}, (table, taken))]


async def probe_lmdb(reader: ObjectReader, many: bool) -> list[Candidate]:
    found = await TreeReader(None).databases(reader)
    if not found:
        return [({}, ("Each value's bytes are a sample.",))]
    shown = names_text([f"{name} ({in_count(found[name])})" for name in found])
    databases = plural(len(found), "database")
    listed = f"An LMDB data file with {databases}, by their values: {shown}."
    return [({"database": max(found, key=lambda name: found[name])}, (listed,))]


CONTENT_PROBES: dict[str, Callable[[ObjectReader, bool], Awaitable[list[Candidate]]]] = {
    "hdf5": probe_hdf5,
    "lmdb": probe_lmdb,
    "npy": probe_npy,
    "npz": probe_npz,
    "parquet": probe_parquet,
}


async def _propose_zarr(
    listed: ProbedSource, store: RemoteStore, chunks: Sequence[Entry], others: Sequence[str]
) -> ProbedSource:
    reason = "None is listed: let source.url match the chunks of an array."
    try:
        readers = [StoredObject(store, entry) for entry in chunks[:MAX_CHUNKS_READ]]
        for reader in readers:
            found = await open_zarr({"axis": 0}).array_of(reader)
            if found is None:
                continue
            root, array = found
            shape, rows = array.shape, array.chunks[0]
            within = min(rows, shape[0]) or 1
            options, sentence = array_options(
                shape, array.dtype.itemsize, many=False, chunk_rows=within
            )
            if not options:
                options, sentence = {"axis": 0}, "Each row is a sample."
            chunks_text = f"Chunks of {plural(rows, 'row')} of {array.dtype.name}{list(shape)}."
            findings = [chunks_text, sentence]
            if others:
                findings.append(
                    f"Let source.url match the chunks of one array, {root}**; the option beside adds "
                    f"others of equal length. Chunks are listed of {names_text(others)}, too."
                )
            return await _prove(listed, "zarr", options, findings, readers, chunks)
    except (FormatError, ObjectMissingError, MissingLibraryError) as error:
        reason = f"It cannot be read: {error}."
    return replace(
        listed, format="zarr", options={"axis": 0}, findings=("Arrays of Zarr.", reason)
    )


def names_text(names: Sequence[str]) -> str:
    return ", ".join([*names[:MAX_NAMED], *(["…"] if len(names) > MAX_NAMED else [])])


def array_options(
    shape: Sequence[int], item_bytes: int, *, many: bool, chunk_rows: int = 0
) -> tuple[dict[str, Any], str]:
    """Return the options that cut samples from an array, and a sentence about them.

    A small array of ``many`` objects is one sample. Windows divide ``chunk_rows``, unless it is 0.
    """
    nbytes = math.prod(shape) * item_bytes
    is_small = many and nbytes <= SMALL_BYTES and len(shape) < 3
    is_image = len(shape) == 3 and sorted(shape)[1] >= MIN_IMAGE_SIDE
    is_image = is_image and min(shape[0], shape[-1]) <= MAX_IMAGE_CHANNELS
    if not shape or shape[0] <= 1 or not nbytes or is_small or is_image:
        return {}, "The whole array is one sample."
    row = nbytes // shape[0]
    if row >= (SUBARRAY_BYTES if len(shape) > 2 else ROW_BYTES):
        each = f"Each of its {in_count(shape[0])} rows {list(shape[1:])} is a sample"
        return {"axis": 0}, f"{each}, read by range; leave axis out to take whole arrays."
    rows = window_rows(row, shape[0])
    if chunk_rows:
        rows = max(n for n in range(1, min(rows, chunk_rows) + 1) if chunk_rows % n == 0)
    each = f"Windows of {rows} rows along the first axis ({in_bytes(rows * row)} each)"
    return {"window": rows}, f"{each}, read by range; a smaller stride lets them overlap."


def window_rows(row_bytes: int, rows: int) -> int:
    """Return the rows of a window of about 64 KiB; an object has at least four windows.

    >>> window_rows(16, 10**9), window_rows(16, 1000), window_rows(3000, 10**6)
    (4096, 128, 16)
    """
    most = min(WINDOW_BYTES // max(1, row_bytes), rows // 4)
    return 1 << max(0, most.bit_length() - 1)


async def _prove(
    listed: ProbedSource,
    form: str,
    options: dict[str, Any],
    findings: Sequence[str],
    readers: Sequence[StoredObject],
    group: Sequence[Entry],
) -> ProbedSource:
    opened = open_format(form, options)
    counts: list[tuple[int, int]] = []  # samples and bytes of an object
    samples: list[Sample] = []
    error: FormatError | None = None
    for reader in readers:
        try:
            count, found = await _read_sample(opened, reader)
        except FormatError as unreadable:
            error = unreadable
            continue
        counts.append((count, reader.entry.size))
        samples += found
    held = sum(count for count, _ in counts)
    if not held:
        raise error or FormatError(f"{readers[0].entry.key} yields no sample")
    if len({count for count, _ in counts}) == 1:
        share = len(group) / len(counts)
    else:
        share = sum(one.size for one in group) / sum(size for _, size in counts)
    size = sum(map(sample_bytes, samples)) // max(1, len(samples))
    failed = [f"One cannot be read so: {error}."] if error else []
    return replace(
        listed,
        format=form,
        options=options,
        findings=(*findings, *failed, _reading_text(samples, len(counts), held, size)),
        samples=round(held * share * len(counts) / len(readers)),
        sample_bytes=size,
    )


async def _read_sample(
    object_format: ObjectFormat, reader: StoredObject
) -> tuple[int, list[Sample]]:
    """Return the number of samples in an object, and one of them; of a large whole object 1 and none."""
    if not object_format.ranged:
        if reader.entry.size > MAX_READ_BYTES:
            return 1, []
        found, _ = await read_partly(object_format, reader, Visit(0, 1, 0, 0))
        return len(found), [one[0] for one in found[:1]]
    measure = await object_format.measure(reader)
    parts = max(1, measure.samples // max(1, measure.together))
    for part in {0: 0, parts // 2: 0}:
        found, _ = await read_partly(object_format, reader, Visit(part, parts, 0, 0))
        if found:
            break
    return measure.samples, [one[0] for one in found[:1]]


def _reading_text(samples: Sequence[Sample], objects: int, held: int, size: int) -> str:
    read = plural(objects, "object")
    if not samples:
        return f"{read} are too large to be read whole now, so their samples are not counted."
    try:
        schema = str(Schema.covering([Schema.from_sample(sample) for sample in samples]))
    except FormatError as error:
        return (
            f"Read {read}, whose samples differ: {error}; sampling.schema can make them alike."
        )
    each = plural(round(held / objects), "sample")
    return f"Read {read}: {schema}; about {each} each, {in_bytes(size)} a sample."
