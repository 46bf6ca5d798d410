"""Test a proposal: open the format with its options, and read samples as a service would."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from growcache.cli.expected_rate import ReadTiming
from growcache.cli.propose_labels import ProposedLabels, ProposedSplit
from growcache.errors import ConfigError, FormatError, MissingLibraryError
from growcache.formats import open_format
from growcache.formats.base import ObjectFormat, Visit, read_partly
from growcache.humanize import in_bytes, plural
from growcache.schema import Sample, Schema, sample_bytes
from growcache.store.contract import Entry, StoredObject

MAX_READ_BYTES = 32 << 20  # of an object that is read whole to test a candidate
MAX_TIMED = 3  # objects; the fastest counts
SMALL_READ_BYTES, MAX_TIMED_BYTES = 1 << 12, 1 << 20


@dataclass(frozen=True, slots=True)
class ProbedSource:
    objects: int
    nbytes: int
    is_whole_listing: bool
    format: str = "bytes"
    options: dict[str, Any] = field(default_factory=dict)
    findings: tuple[str, ...] = ()  # sentences
    samples: int = 0  # estimate for all objects; 0 before any was read
    sample_bytes: int = 0
    fields: frozenset[str] = frozenset()  # of the samples
    url: str = ""  # matches only the objects that were read; empty: the source's own
    reader: str = ""  # source of a function that decodes an object that no format reads
    timing: ReadTiming | None = None
    labels: ProposedLabels | None = None  # of a table found with the objects
    split: ProposedSplit | None = None

    @property
    def all_have_labels(self) -> bool:
        return self.labels is not None and self.labels.share == 1 and self.is_whole_listing


async def prove(
    listed: ProbedSource,
    form: str,
    options: dict[str, Any],
    findings: Sequence[str],
    readers: Sequence[StoredObject],
    group: Sequence[Entry],
) -> ProbedSource:
    opened = _opened(form, options, readers[0].source.url)
    found: list[_ReadObject] = []
    error: FormatError | None = None
    for reader in readers:
        try:
            found.append(await _read_sample(opened, reader))
        except FormatError as unreadable:
            error = unreadable
    held = sum(one.samples for one in found)
    if not held:
        raise error or FormatError(f"{readers[0].entry.key} yields no sample")
    samples = [one.example for one in found if one.example is not None]
    size = sum(map(sample_bytes, samples)) // max(1, len(samples))
    failed = [f"One object cannot be read this way: {error}."] if error else []
    per_read = sum(one.per_read for one in found) / len(found)
    seconds = min([await _read_seconds(opened, reader) for reader in readers[:MAX_TIMED]])
    return replace(
        listed,
        format=form,
        options=options,
        findings=(*findings, *failed, _reading_text(samples, len(found), held, size)),
        samples=round(held * _share(found, group) * len(found) / len(readers)),
        sample_bytes=size,
        fields=frozenset(name for sample in samples for name in sample),
        timing=ReadTiming(seconds, per_read, size) if samples else None,
    )


def _opened(form: str, options: Mapping[str, Any], urls: Sequence[str]) -> ObjectFormat:
    try:
        return open_format(form, options, urls)
    except MissingLibraryError:
        raise
    except ConfigError as error:  # a header's words need not be a valid option
        raise FormatError(str(error), code=error.code) from None


@dataclass(frozen=True, slots=True)
class _ReadObject:
    nbytes: int
    samples: int
    per_read: int  # samples fetched together
    example: Sample | None


def _share(found: Sequence[_ReadObject], group: Sequence[Entry]) -> float:
    """Return the estimated samples of the group per sample of the objects that were read."""
    if len({one.samples for one in found}) == 1:
        return len(group) / len(found)
    return sum(one.size for one in group) / sum(one.nbytes for one in found)


async def _read_sample(object_format: ObjectFormat, reader: StoredObject) -> _ReadObject:
    """Read one sample of an object, or none of a large object that is read whole."""
    nbytes = reader.entry.size
    if object_format.reads_whole(reader.entry):
        if nbytes > MAX_READ_BYTES:
            return _ReadObject(nbytes, 1, 1, None)
        found, _ = await read_partly(object_format, reader, Visit(0, 1, 0, 0))
        return _ReadObject(nbytes, len(found), len(found), found[0][0] if found else None)
    measure = await object_format.measure(reader)
    together = max(1, measure.together)
    parts = max(1, measure.samples // together)
    for part in {0: 0, parts // 2: 0}:
        found, _ = await read_partly(object_format, reader, Visit(part, parts, 0, 0))
        if found:
            break
    per_read = min(together, max(1, measure.samples))
    return _ReadObject(nbytes, measure.samples, per_read, found[0][0] if found else None)


async def _read_seconds(object_format: ObjectFormat, reader: StoredObject) -> float:
    """Return the seconds of a read on an open connection."""
    whole = object_format.reads_whole(reader.entry)
    nbytes = min(reader.entry.size, MAX_TIMED_BYTES if whole else SMALL_READ_BYTES)
    start = time.perf_counter()
    await reader.read(0, nbytes)
    return time.perf_counter() - start


def _reading_text(samples: Sequence[Sample], objects: int, held: int, size: int) -> str:
    read = plural(objects, "object")
    if not samples:
        return f"{read} are too large to be read whole for a first look, so their samples are not counted."
    try:
        schema = str(Schema.covering([Schema.from_sample(sample) for sample in samples]))
    except FormatError as error:
        return (
            f"Read {read}, whose samples differ: {error}; sampling.schema can make them alike."
        )
    each = plural(round(held / objects), "sample")
    return f"Read {read}: {schema}; about {each} each, {in_bytes(size)} a sample."
