"""Probe a source without a config: list part of it, detect a format, and test it by reading.

The kind of object with the most bytes decides. Three of its objects are read as the service
would read them. If a candidate cannot be read, the next one is tried, and plain bytes last.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from growcache.cli.container_probe import CONTENT_PROBES, NAME_DATASETS
from growcache.cli.detect_format import (
    HEAD_BYTES,
    chunk_kinds,
    detect_format,
    folder_url,
    is_zarr,
    largest_group,
    narrower_url,
)
from growcache.cli.other_kinds import OtherKind, other_kind
from growcache.cli.propose_hdf5 import cells_options
from growcache.cli.propose_labels import propose_split
from growcache.cli.propose_options import candidates, guessed_raw
from growcache.cli.prove_candidate import ProbedSource, prove
from growcache.cli.table_probe import find_labels
from growcache.cli.zarr_probe import (
    MAX_CHUNKS_READ,
    find_array,
    find_others,
    is_anndata,
    zarr_candidate,
)
from growcache.config_source import SourceConfig
from growcache.errors import (
    FormatError,
    MissingLibraryError,
    ObjectMissingError,
    TransientStoreError,
)
from growcache.formats.signatures import advice_on
from growcache.store.contract import Entry, StoredObject
from growcache.store.left_out import UNKNOWN_FORMAT
from growcache.store.opening import open_store
from growcache.store.store import RemoteStore
from growcache.threads import DaemonThread

LISTING_SECONDS = 2.0  # enough to list a small source completely, and a part of a large one
PROBE_SECONDS = 15.0
MANY_OBJECTS = 16  # from this number on, each can be a sample
LABELS_SECONDS = 3.0  # to read tables next to the objects
WHOLE_BYTES = "An object's bytes are one sample, for your code to decode (decode in options)."


def probe_source(source: SourceConfig, seconds: float = PROBE_SECONDS) -> ProbedSource:
    thread = DaemonThread("probe")
    found = thread.submit(lambda: _probe_url_or_folder(source, seconds))
    thread.close(wait=False)
    if not found.wait(seconds):
        raise TransientStoreError(f"no answer within {seconds:g} s")
    return found.result()


def _probe_url_or_folder(source: SourceConfig, seconds: float) -> ProbedSource:
    below = folder_url(source.url[0]) if len(source.url) == 1 else ""
    try:
        return _probe_url(source, seconds)
    except ObjectMissingError as error:
        if not below:
            raise
        missing = error
    try:
        found = _probe_url(source.model_copy(update={"url": (below,)}), seconds)
    except ObjectMissingError:
        raise missing from None
    return replace(found, url=found.url or below)


def _probe_url(source: SourceConfig, seconds: float) -> ProbedSource:
    looked_at = source.model_copy(update={"format": UNKNOWN_FORMAT})
    store = open_store(looked_at, concurrency=1, timeout_seconds=seconds / 3)
    try:
        return _probe_store(source, store)
    finally:
        asyncio.run(store.close())


def _probe_store(source: SourceConfig, store: RemoteStore) -> ProbedSource:
    entries, is_whole = _list_some(store.pages())
    filled = [entry for entry in entries if entry.size]
    if not filled:
        found = "found only empty objects" if entries else "found no object"
        raise ObjectMissingError(f"{found} at {', '.join(source.url)}", code="GC217")
    listed = ProbedSource(len(entries), sum(entry.size for entry in entries), is_whole)
    zarr = is_zarr(filled)
    group, others = largest_group(filled, zarr=zarr)
    if zarr:
        return asyncio.run(_propose_zarr(listed, store, group, filled))
    folders = {PurePosixPath(entry.key).parent.name for entry in group} if is_whole else set()
    probed = asyncio.run(_propose(listed, store, group, folders))
    probed = replace(
        probed,
        labels=find_labels(source, filled, group, probed.fields, LABELS_SECONDS),
        split=propose_split([entry.key for entry in group]),
    )
    if not others:
        return probed
    url = narrower_url(source.url, group)
    shown = ", ".join(f"{count} {kind}" for kind, count in others.most_common(4))
    advice = f"so it became {url}" if url else "so narrow it to objects of one kind"
    matched = f"source.url matched others as well ({shown}), {advice}."
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
    # If numbers are equal, the largest object decides.
    form, compression = Counter(kinds).most_common(1)[0][0]
    first = kinds.index((form, compression))
    many = len(group) >= MANY_OBJECTS
    if not form:
        return await _propose_other(listed, readers, heads[first], readers[first], group)
    reason = ""
    try:
        if probe := CONTENT_PROBES.get(form):
            found = await probe(readers[first], many)
        else:
            found = candidates(form, compression, readers[first].entry, heads[first], folders)
        for options, findings in found:
            try:
                return await prove(listed, form, options, findings, readers, group)
            except FormatError as error:
                reason = f"It cannot be read as {form}: {error}."
    except MissingLibraryError as error:
        advice = (NAME_DATASETS,) if form == "hdf5" else ()
        findings = (f"Not looked into: {error}.", *advice)
        return replace(listed, format=form, findings=findings)
    except FormatError as error:
        reason = f"It cannot be read as {form}: {error}."
    return await prove(listed, "bytes", {}, (reason, WHOLE_BYTES), readers, group)


async def _propose_other(
    listed: ProbedSource,
    readers: Sequence[StoredObject],
    head: bytes,
    reader: StoredObject,
    group: Sequence[Entry],
) -> ProbedSource:
    """Propose settings for objects whose format was not recognised."""
    entry = reader.entry
    proposals = [other_kind(entry.key, head, many=len(group) >= MANY_OBJECTS)]
    if guess := guessed_raw(entry, head):
        proposals.append(OtherKind(tuple(guess[1]), "raw", guess[0]))
    reason = f"It was not recognised; it starts with {head[:8]!r}{advice_on(head)}."
    for one in proposals:
        if one is None:
            continue
        options = dict(one.options)
        try:
            found = await prove(listed, one.format, options, one.findings, readers, group)
            return replace(found, reader=one.reader)
        except MissingLibraryError as error:
            findings = (*one.findings, f"Not looked into: {error}.")
            return replace(listed, format=one.format, options=options, findings=findings)
        except FormatError as error:
            reason = f"It cannot be read as {one.format}: {error}."
    return await prove(listed, "bytes", {}, (reason, WHOLE_BYTES), readers, group)


async def _propose_cells(
    listed: ProbedSource,
    store: RemoteStore,
    path_by_key: Mapping[str, str],
    entries: Sequence[Entry],
    paths: Sequence[str],
) -> ProbedSource:
    options, sentences = cells_options(paths)
    chunks = [one for one in entries if path_by_key.get(one.key) in ("X", "X/data")]
    readers = [StoredObject(store, entry) for entry in chunks[:MAX_CHUNKS_READ]]
    findings = ["AnnData in Zarr.", *sentences]
    return await prove(listed, "zarr", options, findings, readers, chunks)


async def _propose_zarr(
    listed: ProbedSource, store: RemoteStore, chunks: Sequence[Entry], entries: Sequence[Entry]
) -> ProbedSource:
    reason = "None is listed: source.url must match the chunks of an array."
    url = store.source.url[0] if len(store.source.url) == 1 else ""
    path_by_key = chunk_kinds(entries)
    own = {path_by_key.get(entry.key) for entry in chunks}
    firsts = {path_by_key.get(entry.key): entry for entry in reversed(entries)}
    others = {
        path: StoredObject(store, one)
        for path, one in firsts.items()
        if path and path not in own
    }
    try:
        paths = sorted(set(path_by_key.values()))
        if is_anndata(paths):
            return await _propose_cells(listed, store, path_by_key, entries, paths)
        readers = [StoredObject(store, entry) for entry in chunks[:MAX_CHUNKS_READ]]
        if array := await find_array(readers):
            keys = [entry.key for entry in chunks]
            (options, findings), narrower = zarr_candidate(
                array, await find_others(others), url, keys
            )
            proved = await prove(listed, "zarr", options, findings, readers, chunks)
            return replace(proved, url=narrower)
    except (FormatError, ObjectMissingError, MissingLibraryError) as error:
        reason = f"It cannot be read: {error}."
    return replace(
        listed, format="zarr", options={"axis": 0}, findings=("Arrays of Zarr.", reason)
    )
