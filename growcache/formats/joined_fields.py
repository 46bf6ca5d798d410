"""Join several objects into one: each has one or more fields of the same samples."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    JoinedReader,
    Measure,
    ObjectFormat,
    ObjectReader,
    PartlyReadError,
    SamplesWithOrigins,
    Visit,
    read_partly,
)
from growcache.schema import Sample
from growcache.usercode import CodeDigest, short_key

_BY_BYTES = (
    "are cut by bytes, so that parts of two of them do not belong together; use one object for "
    "all fields"
)
# Formats that cannot be joined, and why: equal parts of two objects have different samples.
NOT_JOINABLE = {
    **dict.fromkeys(("jsonl", "lmdb", "tar", "tfrecord"), _BY_BYTES),
    "zarr": "are chunks, which may differ between two arrays; name the other arrays in its "
    "option `beside`",
}


class JoinedFormat(ObjectFormat):
    """The joint format of several fields.

    Random choices depend on the first member's key. Parts start at chunks of the largest
    member.
    """

    def __init__(self, formats: Mapping[str, ObjectFormat]) -> None:
        self._formats = formats
        self.ranged = all(object_format.ranged for object_format in formats.values())
        self.listed = all(object_format.listed for object_format in formats.values())
        if not self.listed:
            raise ConfigError(
                "source.fields: their formats need objects, and a function that draws samples "
                "by itself has none",
                code="GC103",
            )
        if not self.ranged and any(object_format.ranged for object_format in formats.values()):
            whole = ", ".join(
                name for name, object_format in formats.items() if not object_format.ranged
            )
            raise ConfigError(
                f"source.fields: expected all to be read by range, or all whole, found {whole} to "
                "be read whole; set axis, window or the like for all or none",
                code="GC103",
            )
        self.header_first = self.ranged and any(
            object_format.header_first for object_format in formats.values()
        )
        self._chunked = self.ranged and any(
            object_format.says_ordinals for object_format in formats.values()
        )
        digests = [object_format.code_digest for object_format in formats.values()]
        self.code_digest = CodeDigest.combined(digests)

    async def measure(self, reader: ObjectReader) -> Measure:
        measures = await self._measures(reader)
        return replace(measures[0], together=measures[self._largest(measures)].together)

    async def advice(self, reader: ObjectReader) -> str:
        members = zip(self._formats.values(), _members(reader), strict=True)
        said = [await object_format.advice(member) for object_format, member in members]
        return next(filter(None, said), "")

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        """Return the samples of a visit, with the origins of the first field."""
        visit = replace(visit, key=reader.entry.key)
        if self._chunked:
            visit = replace(visit, ordinals=await self._ordinals(reader, visit))
        members = zip(self._formats.values(), _members(reader), strict=True)
        each = await asyncio.gather(
            *(read_partly(object_format, one, visit) for object_format, one in members)
        )
        if self.ranged:  # the objects are known by now
            await self._measures(reader)
        found = {name: one for name, (one, _) in zip(self._formats, each, strict=True)}
        wrong = next((why for _, why in each if why is not None), None)
        if wrong is not None and not self.ranged:  # the missing partners cannot be determined
            raise FormatError(str(wrong))
        joined = self._joined(found, visit, reader.entry.key)
        if wrong is not None:
            raise PartlyReadError(str(wrong), joined)
        return joined

    def _largest(self, measures: Sequence[Measure]) -> int:
        """Return the chunked field with most bytes."""
        object_formats = enumerate(self._formats.values())
        chunked = [n for n, object_format in object_formats if object_format.says_ordinals]
        return max(chunked, key=lambda n: measures[n].stride_bytes, default=0)

    async def _ordinals(self, reader: ObjectReader, visit: Visit) -> Sequence[int]:
        n = self._largest(await self._measures(reader))
        object_format = list(self._formats.values())[n]
        return await object_format.ordinals(_members(reader)[n], visit)

    async def _measures(self, reader: ObjectReader) -> list[Measure]:
        """Return the measures of the fields.

        Of objects that are read whole, only the first is measured.
        """
        object_formats = list(self._formats.values())
        if not self.ranged:
            return [await object_formats[0].measure(reader)]
        readers = zip(object_formats, _members(reader), strict=True)
        measures = [await object_format.measure(member) for object_format, member in readers]
        counts = {n: one.samples for n, one in zip(self._formats, measures, strict=True)}
        _refuse_differing(counts, reader.entry.key)
        return measures

    def _joined(
        self, found: Mapping[str, SamplesWithOrigins], visit: Visit, key: str
    ) -> SamplesWithOrigins:
        if self.ranged:
            found = _common_rows(found, visit, key)
        _refuse_differing({name: len(one) for name, one in found.items()}, key)
        first = next(iter(found.values()))
        return [
            (_joined_sample({name: one[i][0] for name, one in found.items()}, key), start, stop)
            for i, (_, start, stop) in enumerate(first)
        ]


def _common_rows(
    found: Mapping[str, SamplesWithOrigins], visit: Visit, key: str
) -> dict[str, SamplesWithOrigins]:
    """Keep the samples that all fields have."""
    rows = {name: {(start, stop) for _, start, stop in one} for name, one in found.items()}
    asked = max(map(len, rows.values())) if visit.ordinals is None else len(visit.ordinals)
    if len(set.union(*rows.values())) > asked:
        first, *others = rows
        other = next(name for name in others if rows[name] != rows[first])
        raise FormatError(
            f"{short_key(key)}: {other} has samples of other rows than {first}; give all fields the "
            "same axis, window, stride, edge and phase",
            code="GC308",
        )
    common = set.intersection(*rows.values())
    return {
        name: [sample for sample in one if sample[1:] in common] for name, one in found.items()
    }


def _joined_sample(samples: Mapping[str, Sample], key: str) -> Sample:
    joined: Sample = {}
    for name, sample in samples.items():
        for own, value in sample.items():
            field = name if len(sample) == 1 else f"{name}_{own}"
            if field in joined:
                raise FormatError(
                    f"{short_key(key)}: two of source.fields yield {field!r}; rename one",
                    code="GC303",
                )
            joined[field] = value
    return joined


def _members(reader: ObjectReader) -> list[ObjectReader]:
    return [reader, *(reader.partners if isinstance(reader, JoinedReader) else ())]


def _refuse_differing(counts: Mapping[str, int], key: str) -> None:
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} has {count:,} samples" for name, count in counts.items())
        raise FormatError(f"{short_key(key)}: {shown}", code="GC308")
