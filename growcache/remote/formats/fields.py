"""Several objects as one: each is a field, or several, of the same samples."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import replace

from growcache.errors import ConfigError, FormatError
from growcache.remote.formats.objects import (
    Found,
    Measure,
    ObjectFormat,
    PartlyReadError,
    Partnered,
    Reader,
    Visit,
)
from growcache.schema import Sample
from growcache.usercode import short

# Whose parts are stretches of bytes: the same part of two objects is of other samples.
UNALIGNED = frozenset({"jsonl", "lmdb", "tfrecord"})


class JoinedFields:
    """The samples of partners, put together one by one.

    All members are visited alike: random choices go by the first one's key.

    Args:
        formats: by field, in their order.

    Raises:
        ConfigError: some are read by range and others whole, or one draws samples by itself.
    """

    def __init__(self, formats: Mapping[str, ObjectFormat]) -> None:
        self._formats = formats
        self.ranged = all(form.ranged for form in formats.values())
        self.listed = all(form.listed for form in formats.values())
        if not self.listed:
            raise ConfigError(
                "source.fields: their formats need objects, and a function that draws samples "
                "by itself has none"
            )
        if not self.ranged and any(form.ranged for form in formats.values()):
            whole = ", ".join(name for name, form in formats.items() if not form.ranged)
            raise ConfigError(
                f"source.fields: expected all to be read by range, or all whole, found {whole} to "
                "be read whole; set axis, window or the like for all or none"
            )
        digests = [form.code_digest for form in formats.values()]
        text = "\n".join(digest or "" for digest in digests)
        self.code_digest = hashlib.sha256(text.encode()).hexdigest() if any(digests) else None

    async def measure(self, reader: Reader) -> Measure:
        """See `ObjectFormat.measure`; the sizes are those of the first field."""
        measures = await self._measures(reader)
        return replace(measures[0], together=max(one.together for one in measures))

    async def read(self, reader: Reader, visit: Visit) -> Found:
        """See `ObjectFormat.read`; origins are those of the first field."""
        visit = replace(visit, key=reader.entry.key)
        readers = _members(reader)
        reads = (
            form.read(member, visit)
            for form, member in zip(self._formats.values(), readers, strict=True)
        )
        try:
            found = dict(zip(self._formats, await asyncio.gather(*reads), strict=True))
        except PartlyReadError as error:  # what it kept lacks the other fields
            raise FormatError(str(error)) from None
        if self.ranged:
            await self._measures(reader)
        self._check(found, reader.entry.key)
        first = next(iter(found.values()))
        return [
            (
                self._joined({name: one[i][0] for name, one in found.items()}, reader),
                start,
                stop,
            )
            for i, (_, start, stop) in enumerate(first)
        ]

    async def _measures(self, reader: Reader) -> list[Measure]:
        """Return the sizes of the members, if they agree; of what is read whole the first's.

        Raises:
            FormatError: they have not equally many samples.
        """
        forms = list(self._formats.values())
        if not self.ranged:
            return [await forms[0].measure(reader)]
        readers = zip(forms, _members(reader), strict=True)
        measures = [await form.measure(member) for form, member in readers]
        counts = {n: one.samples for n, one in zip(self._formats, measures, strict=True)}
        if len(set(counts.values())) > 1:
            raise FormatError(f"{short(reader.entry.key)}: {_differing(counts)}")
        return measures

    def _check(self, found: Mapping[str, Found], key: str) -> None:
        counts = {name: len(one) for name, one in found.items()}
        if len(set(counts.values())) > 1:
            raise FormatError(f"{short(key)}: {_differing(counts)}")
        places = {name: [origin for _, *origin in one] for name, one in found.items()}
        first = next(iter(places.values()))
        for name, one in places.items():
            if self.ranged and one != first:
                raise FormatError(
                    f"{short(key)}: {name} has samples in other places than the first field; "
                    "the same part of each must be of the same rows"
                )

    def _joined(self, samples: Mapping[str, Sample], reader: Reader) -> Sample:
        joined: Sample = {}
        for name, sample in samples.items():
            for own, value in sample.items():
                field = name if len(sample) == 1 else f"{name}_{own}"
                if field in joined:
                    raise FormatError(
                        f"{short(reader.entry.key)}: two of source.fields yield {field!r}; "
                        "rename one"
                    )
                joined[field] = value
        return joined


def _members(reader: Reader) -> list[Reader]:
    return [reader, *(reader.partners if isinstance(reader, Partnered) else ())]


def _differing(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} has {count:,} samples" for name, count in counts.items())
