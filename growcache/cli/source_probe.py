"""Probe a source before there is a config: list part of it, detect a format, prove it by reading.

The kind of object with the most bytes decides. Three of its objects are read as the service would read
them. A candidate that cannot be read gives way to the next one, at last to plain bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from growcache.cli.container_probe import CONTENT_PROBES, NAME_DATASETS, SCALED
from growcache.cli.detect_format import (
    HEAD_BYTES,
    detect_format,
    is_zarr,
    largest_group,
    narrower_url,
)
from growcache.cli.humanize import in_bytes, plural
from growcache.cli.propose_options import array_options, candidates, names_text
from growcache.config import SourceConfig
from growcache.errors import (
    FormatError,
    MissingLibraryError,
    ObjectMissingError,
    TransientStoreError,
)
from growcache.formats import open_format
from growcache.formats.base import (
    ObjectFormat,
    Visit,
    read_partly,
)
from growcache.formats.zarr import open_zarr
from growcache.schema import Sample, Schema, sample_bytes
from growcache.store.contract import Entry, StoredObject
from growcache.store.store import RemoteStore, open_store
from growcache.threads import DaemonThread

LISTING_SECONDS = 2.0  # a small source is listed to its end, of a large one a part
PROBE_SECONDS = 15.0
MANY_OBJECTS = 16  # each of which can be a sample
MAX_READ_BYTES = 32 << 20  # of an object that is read whole, to prove a candidate
MAX_CHUNKS_READ = 8  # of a Zarr array
WHOLE_BYTES = "An object's bytes are one sample, for your code to decode (decode in options)."


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


async def _propose_zarr(
    listed: ProbedSource, store: RemoteStore, chunks: Sequence[Entry], others: Sequence[str]
) -> ProbedSource:
    reason = "None is listed: let source.url match the chunks of an array."
    try:
        readers = [StoredObject(store, entry) for entry in chunks[:MAX_CHUNKS_READ]]
        for reader in readers:
            opened = open_zarr({"axis": 0})
            found = await opened.array_of(reader)
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
            if await opened.advice(reader):
                options["scale"] = "cf"
                findings.append(f"Its {SCALED}")
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
    if object_format.reads_whole(reader.entry):
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
