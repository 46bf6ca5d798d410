"""Probe a source before there is a config: list part of it, detect a format, prove it by reading.

The kind of object with the most bytes decides. Three of its objects are read as the service would read
them. A candidate that cannot be read gives way to the next one, at last to plain bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from growcache.cli.container_probe import (
    CONTENT_PROBES,
    FormatProposal,
    propose_zarr,
    window_rows,
)
from growcache.cli.humanize import in_bytes, in_count, plural
from growcache.config import SourceConfig
from growcache.errors import (
    FormatError,
    MissingLibraryError,
    ObjectMissingError,
    TransientStoreError,
)
from growcache.formats import COMPRESSIBLE, open_format
from growcache.formats.base import ObjectFormat, Visit, read_partly
from growcache.formats.compressed import compression_of, unpacked_name, unpacked_start
from growcache.formats.image import image_kind
from growcache.formats.tar_headers import is_header
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
MAX_READ_BYTES = 32 << 20  # of an object that is read whole, to prove a proposal
MAX_CLASSES = 1000
MAX_CHUNKS_TRIED = 8  # objects that may be chunks of a Zarr array
ZARR_FILES = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
MAGIC = (
    (0, b"\x93NUMPY", "npy"),
    (0, b"\x89HDF\r\n\x1a\n", "hdf5"),
    (0, b"PAR1", "parquet"),
    (16, b"\xde\xc0\xef\xbe", "lmdb"),
)
FORMATS_BY_SUFFIX = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), "jsonl"),
    **dict.fromkeys((".tfrecord", ".tfrecords"), "tfrecord"),
    **dict.fromkeys((".jpg", ".jpeg", ".png"), "image"),
    **dict.fromkeys((".h5", ".hdf5"), "hdf5"),
    ".tar": "tar",
}
# Suffixes that say what numbers a file without a header is of.
DTYPES_BY_SUFFIX = {
    **dict.fromkeys((".f32", ".float32"), "<f4"),
    **dict.fromkeys((".f64", ".float64"), "<f8"),
    **dict.fromkeys((".i16", ".int16", ".s16", ".pcm"), "<i2"),
    **dict.fromkeys((".u8", ".uint8"), "<u1"),
    **dict.fromkeys((".c64", ".cf32", ".cfile"), "<c8"),
}
# Candidates for formats whose options do not depend on what an object holds, the best first.
RECORD_FORMATS: dict[str, Sequence[tuple[dict[str, Any], str]]] = {
    "tar": [
        (
            {},
            "A tar archive; its files whose names are the same up to the first dot are a "
            "sample; fields says which are taken.",
        ),
        ({"decode": "none"}, "A tar archive, whose files are kept as bytes."),
    ],
    "tfrecord": [
        ({}, "A TFRecord file; features says the dtypes and shapes of its features."),
        ({"decode": "none"}, "A TFRecord file, whose records are no tf.train.Example."),
    ],
    "jsonl": [
        ({}, "Lines of JSON; each is a sample; fields says which keys are taken."),
        ({"raw": True}, "Lines that differ, so they are kept as bytes."),
    ],
}
NAME_DATASETS = "Name its datasets in options, as {datasets: [x, y], axis: 0}."


@dataclass(frozen=True, slots=True)
class ProbedSource:
    """What was found at a source.

    Attributes:
        objects: how many were listed, with ``nbytes`` together.
        is_whole_listing: whether the listing came to its end.
        proposal: what the objects can be read as.
        url: that matches only the objects which the proposal is for; empty: the source's own.
    """

    objects: int
    nbytes: int
    is_whole_listing: bool
    proposal: FormatProposal
    url: str = ""


def probe_source(source: SourceConfig, seconds: float = PROBE_SECONDS) -> ProbedSource:
    """Return what a source looks like, within a time limit.

    Raises:
        ConfigError: a URL or option that cannot be meant.
        ObjectMissingError: nothing matches.
        TransientStoreError: no answer in time.
        StoreError: the store refuses.
    """
    thread = DaemonThread("probe")
    found = thread.ahead(lambda: _open_and_probe(source, seconds))
    thread.close(wait=False)
    if not found.wait(seconds):
        raise TransientStoreError(f"no answer within {seconds:g} s")
    return found.result()


def _open_and_probe(source: SourceConfig, seconds: float) -> ProbedSource:
    store = open_store(source, concurrency=1, timeout_seconds=seconds / 3)
    try:
        return _probe_store(source, store)
    finally:
        asyncio.run(store.close())


def _probe_store(source: SourceConfig, store: RemoteStore) -> ProbedSource:
    entries, is_whole = _list_some(store.pages())
    filled = [entry for entry in entries if entry.size]
    if not filled:
        found = "only empty objects lie" if entries else "no object lies"
        raise ObjectMissingError(f"{found} at {', '.join(source.url)}")
    nbytes = sum(entry.size for entry in entries)
    if is_zarr(filled):
        proposal = asyncio.run(_propose_zarr(store, filled))
        return ProbedSource(len(entries), nbytes, is_whole, proposal)
    group, others = largest_group(filled)
    folders = {parent_name(entry.key) for entry in group} if is_whole else set()
    proposal = asyncio.run(_propose(store, group, folders))
    url = narrower_url(source.url, group) if others else ""
    if others:
        shown = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(4))
        advice = "so it was narrowed" if url else "so let it match objects of one kind"
        matched = f"source.url matches others as well ({shown}), {advice}."
        proposal = replace(proposal, findings=(matched, *proposal.findings))
    return ProbedSource(len(entries), nbytes, is_whole, proposal, url)


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


def suffix_of(key: str) -> str:
    """Return an object's suffix, less that of its compression; empty: none, or a number."""
    suffix = PurePosixPath(unpacked_name(key)).suffix.lower()
    return "" if suffix[1:].isdigit() else suffix


def largest_group(entries: Sequence[Entry]) -> tuple[list[Entry], Counter[str]]:
    """Return the objects of the kind that has most bytes, and how many others there are.

    Objects whose names start with ``.`` or ``_`` describe others, as ``_metadata`` does.
    """
    shown = [entry for entry in entries if PurePosixPath(entry.key).name[:1] not in (".", "_")]
    kinds: dict[str, list[Entry]] = {}
    for entry in shown or entries:
        suffix = suffix_of(entry.key)
        kinds.setdefault(FORMATS_BY_SUFFIX.get(suffix, suffix), []).append(entry)
    group = max(kinds.values(), key=lambda group: sum(entry.size for entry in group))
    rest = Counter(suffix_of(entry.key) or PurePosixPath(entry.key).name for entry in entries)
    return group, rest - Counter(
        suffix_of(entry.key) or PurePosixPath(entry.key).name for entry in group
    )


def narrower_url(urls: Sequence[str], group: Sequence[Entry]) -> str:
    """Return a URL that matches the objects of a group only; empty where none is known.

    >>> narrower_url(["s3://b/**"], [Entry("a/1.npy", 8, None, None)])
    's3://b/**/*.npy'
    """
    folder, _, pattern = urls[0].rpartition("/")
    endings = {PurePosixPath(entry.key).suffix for entry in group}
    if len(urls) > 1 or pattern not in ("*", "**") or len(endings) > 1 or "" in endings:
        return ""
    return f"{folder}/{'**/' if pattern == '**' else ''}*{endings.pop()}"


def detect_format(key: str, head: bytes) -> tuple[str, str]:
    """Return the format of an object by its first bytes and its name, and how it is compressed.

    Both are empty where nothing is recognised.

    >>> detect_format("a.npy", bytes([0x93]) + b"NUMPY"), detect_format("a.txt", b"text")
    (('npy', ''), ('', ''))
    """
    suffix = suffix_of(key)
    if kind := compression_of(head):
        start = unpacked_start(head, kind)
        if not start and kind != "zstd":  # whose blocks may be larger
            return "", ""
        form = detect_format(unpacked_name(key), start)[0] if start else ""
        form = form or (FORMATS_BY_SUFFIX.get(suffix, "") if not start else "")
        return (form, kind) if form in COMPRESSIBLE and not compression_of(start) else ("", "")
    for at, magic, form in MAGIC:
        if head[at:].startswith(magic):
            return form, ""
    view = memoryview(head)
    found = (
        ("image", image_kind(head) is not None),
        ("raw", suffix in DTYPES_BY_SUFFIX),
        ("tar", is_header(view, 0)),
        ("tfrecord", record_length_at(view, 0) is not None),
        ("jsonl", FORMATS_BY_SUFFIX.get(suffix) == "jsonl" and head.lstrip()[:1] == b"{"),
        ("npz", head.startswith(b"PK\x03\x04") and suffix == ".npz"),
    )
    return next((form for form, is_it in found if is_it), ""), ""


async def _propose(
    store: RemoteStore, group: Sequence[Entry], folders: set[str]
) -> FormatProposal:
    """Return the first candidate that three of the objects can be read by."""
    largest = max(group, key=lambda entry: entry.size)
    probed = {one.key: one for one in (largest, group[0], group[len(group) // 2])}.values()
    readers = [StoredObject(store, entry) for entry in probed]
    heads = [
        bytes(memoryview(await one.read(0, min(one.entry.size, HEAD_BYTES)))) for one in readers
    ]
    kinds = [
        detect_format(one.entry.key, head) for one, head in zip(readers, heads, strict=True)
    ]
    form, compression = Counter(kinds).most_common(1)[0][0]  # of equals that of the largest
    first = kinds.index((form, compression))
    reasons = [f"It was not recognised; it starts with {heads[first][:8]!r}."]
    try:
        probe = CONTENT_PROBES.get(form)
        many = len(group) >= MANY_OBJECTS
        for proposal in (
            await probe(readers[first], many=many)
            if probe
            else candidates(form, compression, readers[first].entry, heads[first], folders)
        ):
            try:
                return await _prove(proposal, readers, group)
            except FormatError as error:
                reasons = [f"It cannot be read as {form}: {error}."]
    except MissingLibraryError as error:
        advice = (NAME_DATASETS,) if form == "hdf5" else ()
        return FormatProposal(form, {}, (f"Not looked into: {error}.", *advice))
    except FormatError as error:
        reasons = [f"It cannot be read as {form}: {error}."]
    whole = "An object's bytes are one sample, for your code to decode (decode in options)."
    return await _prove(FormatProposal("bytes", {}, (*reasons, whole)), readers, group)


def candidates(
    form: str, compression: str, entry: Entry, head: bytes, folders: set[str]
) -> list[FormatProposal]:
    """Return proposals for objects of a format that need not be opened, the best first."""
    if form == "image":
        return [propose_image(entry, image_kind(head) or "", folders)]
    if form == "raw":
        return [propose_raw(entry)]
    packed = {"compression": compression} if compression else {}
    each = [f"Compressed by {compression}, so that each object is read whole."] * len(packed)
    return [
        FormatProposal(form, {**options, **packed}, (*each, sentence))
        for options, sentence in RECORD_FORMATS.get(form, ())
    ]


def propose_image(entry: Entry, kind: str, folders: set[str]) -> FormatProposal:
    """Return what is proposed for images; ``folders``: all that hold one, empty if unknown."""
    image = f"A {kind} image of {in_bytes(entry.size)}; it stays encoded in the cache."
    options: dict[str, Any] = {"label": "folder"}
    label = "The label is its folder's name; list the names as classes for numbers."
    if "/" not in entry.key or len(folders) == 1:
        options, label = {"label": "none"}, "All are in one folder, so there is no label."
    elif 1 < len(folders) <= MAX_CLASSES:
        options = {"classes": sorted(folders)}
        label = "The label is the number of its folder in classes."
    return FormatProposal("image", options, (image, label))


def propose_raw(entry: Entry) -> FormatProposal:
    """Return what is proposed for an array without header whose name says its dtype."""
    dtype = DTYPES_BY_SUFFIX[suffix_of(entry.key)]
    window = window_rows(int(dtype[-1]), entry.size // int(dtype[-1]))
    values = f"A window has {window} values; shape says how many values one row has."
    suffix = f"No header; {dtype} is what the name's ending says."
    return FormatProposal("raw", {"dtype": dtype, "window": window}, (suffix, values))


def is_zarr(entries: Sequence[Entry]) -> bool:
    """Whether what is listed are arrays of Zarr, or parts of them."""
    return any(
        key.rpartition("/")[2] in ZARR_FILES or (".zarr/" in key and folder_of_chunk(key))
        for key in (entry.key for entry in entries)
    )


async def _propose_zarr(store: RemoteStore, entries: Sequence[Entry]) -> FormatProposal:
    """Return what is proposed for the array of which most bytes are listed."""
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[folder_of_chunk(entry.key)] += entry.size
    sizes.pop("", None)
    largest = max(sizes, key=lambda root: sizes[root], default="")
    chunks = [entry for entry in entries if largest and folder_of_chunk(entry.key) == largest]
    readers = [StoredObject(store, entry) for entry in chunks[:MAX_CHUNKS_TRIED]]
    reason = "None is listed: let source.url match the chunks of an array."
    try:
        for reader in readers:
            if found := await open_zarr({"axis": 0}).array_of(reader):
                others = sorted(sizes.keys() - {found[0]})
                return await _prove(propose_zarr(*found, others), readers, chunks)
    except (FormatError, ObjectMissingError, MissingLibraryError) as error:
        reason = f"It cannot be read: {error}."
    return FormatProposal("zarr", {"axis": 0}, ("Arrays of Zarr.", reason))


async def _prove(
    proposal: FormatProposal, readers: Sequence[StoredObject], group: Sequence[Entry]
) -> FormatProposal:
    """Return a proposal with what reading objects by it shows.

    Raises:
        FormatError: no object can be read, or none yields a sample.
        MissingLibraryError: it takes a library that is not installed.
    """
    form = open_format(proposal.format, proposal.options)
    counts: list[tuple[int, int]] = []  # samples and bytes of an object
    samples: list[Sample] = []
    error: FormatError | None = None
    for reader in readers:
        try:
            count, found = await _read_sample(form, reader)
        except FormatError as unreadable:
            error = unreadable
            continue
        counts.append((count, reader.entry.size))
        samples += found
    if not any(count for count, _ in counts):
        raise error or FormatError(f"{readers[0].entry.key} yields no sample")
    size = sum(map(sample_bytes, samples)) // max(1, len(samples))
    failed = [f"One cannot be read so: {error}."] if error else []
    findings = (*proposal.findings, *failed, _reading_text(samples, counts, size))
    total = round(_estimated_samples(counts, group) * len(counts) / len(readers))
    return replace(proposal, findings=findings, samples=total, sample_bytes=size)


async def _read_sample(form: ObjectFormat, reader: StoredObject) -> tuple[int, list[Sample]]:
    """Return how many samples an object holds, and one of them (1 and none of a large whole object)."""
    if not form.ranged and reader.entry.size > MAX_READ_BYTES:
        return 1, []
    measure = await form.measure(reader)
    parts = max(1, measure.samples // max(1, measure.together)) if form.ranged else 1
    found, _ = await read_partly(form, reader, Visit(0, parts, 0, 0))
    if not found and parts > 1:
        found, _ = await read_partly(form, reader, Visit(parts // 2, parts, 0, 0))
    return (measure.samples if form.ranged else len(found)), [one[0] for one in found[:1]]


def _estimated_samples(counts: Sequence[tuple[int, int]], group: Sequence[Entry]) -> float:
    """Return about how many samples there are: per object if all have as many, else per byte."""
    if len({count for count, _ in counts}) == 1:
        return counts[0][0] * len(group)
    density = sum(count for count, _ in counts) / sum(size for _, size in counts)
    return density * sum(entry.size for entry in group)


def _reading_text(
    samples: Sequence[Sample], counts: Sequence[tuple[int, int]], size: int
) -> str:
    objects = plural(len(counts), "object")
    if not samples:
        return (
            f"{objects} are too large to be read whole now, so their samples are not counted."
        )
    try:
        schema = str(Schema.covering([Schema.of(sample) for sample in samples]))
    except FormatError as error:
        return f"Read {objects}, whose samples differ: {error}; sampling.schema can make them alike."
    each = in_count(sum(count for count, _ in counts) / len(counts))
    return f"Read {objects}: {schema}; about {each} samples each, {in_bytes(size)} a sample."
