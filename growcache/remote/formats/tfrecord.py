"""TFRecord files as a source: each record a sample, by byte range."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from growcache.errors import ConfigError, FormatError
from growcache.remote.formats.blob import load_decoder
from growcache.remote.formats.compressed import compression, read_unpacked
from growcache.remote.formats.examples import Wish, parse_example, to_sample, wished
from growcache.remote.formats.lines import STRETCH
from growcache.remote.formats.objects import (
    Found,
    Measure,
    PartlyReadError,
    Reader,
    Visit,
    refuse_unknown,
    true_or_false,
)
from growcache.remote.formats.pieces import Unpacked, block_of, picked, stretches
from growcache.remote.formats.records import MOST_BYTES, SMALL, Heads, Record, Records
from growcache.remote.formats.rows import MOST_SAMPLES
from growcache.remote.formats.threads import Call, Threads
from growcache.schema import Sample
from growcache.usercode import UserCode

_OPTIONS = ("decode", "features", "index", "compression")
LEAST_BLOCK = 24  # what a visit reads in vain is about two records
BLOCK_BYTES = 1 << 19
MOST_BLOCK_BYTES = 1 << 25
_SPOT = 1 << 18  # bytes, at the start and in the middle, by which an object is measured
_MOST_STRETCHES = 64


class TFRecords:
    """Records of one object, as samples."""

    listed = True

    def __init__(
        self,
        packed: str,
        wishes: tuple[Wish, ...] | None,
        decode: UserCode | None,
        *,
        examples: bool,
        index: bool,
    ) -> None:
        self._packed = packed
        self._wishes = wishes
        self._decode = decode
        self._examples = examples
        self._records: Records | Heads = Heads() if index else Records()
        self._threads = Threads()
        self.ranged = packed == "none"
        self.code_digest = decode.digest if decode else None

    async def measure(self, reader: Reader) -> Measure:
        """See `ObjectFormat.measure`."""
        size = reader.entry.size
        if not self.ranged:
            count = len(await self._all(reader))
            return Measure(size / max(1, count), 0, count)
        if isinstance(self._records, Heads):
            count = len(await self._records.of(reader)) - 1
            return Measure(size / max(1, count), 0, count)
        if size <= SMALL:
            count = len(await self._records.between(reader, 0, size))
            stride = size / max(1, count)
        else:
            stride = await self._stride(self._records, reader)
            count = max(1, round(size / stride))
        return Measure(
            max(1.0, stride),
            0,
            count,
            block_of(stride, LEAST_BLOCK, BLOCK_BYTES, MOST_BLOCK_BYTES),
        )

    async def _stride(self, records: Records, reader: Reader) -> float:
        half = reader.entry.size // 2
        found = await records.between(reader, 0, min(half, _SPOT))
        found += await records.between(reader, half, min(reader.entry.size, half + _SPOT))
        return sum(record.stop - record.start for record in found) / len(found)

    async def read(self, reader: Reader, visit: Visit) -> Found:
        """See `ObjectFormat.read`; an origin is a range of the bytes, unpacked ones."""
        size = reader.entry.size
        start = visit.part * size // visit.parts
        stop = (visit.part + 1) * size // visit.parts
        if not self.ranged:
            records = picked(await self._all(reader), visit, reader.entry.key)
        elif visit.take is not None and stop - start > 4 * STRETCH:
            records = await self._stretches(reader, visit, start, stop)
        else:
            records = picked(await self._between(reader, start, stop), visit, reader.entry.key)
        if len(records) > MOST_SAMPLES:
            raise FormatError(
                f"{reader.entry.key}: one visit may yield {MOST_SAMPLES:,} samples, found "
                f"{len(records):,} records"
            )
        return await self._samples(reader.entry.key, records)

    async def _between(self, reader: Reader, start: int, stop: int) -> list[Record]:
        if stop - start > MOST_BYTES:
            raise FormatError(
                f"{reader.entry.key}: one visit may read {MOST_BYTES:,} bytes of records, found "
                f"{stop - start:,}; lower sampling.samples_per_object"
            )
        return await self._records.between(reader, start, stop)

    async def _all(self, reader: Reader) -> list[Record]:
        data = await read_unpacked(reader, self._packed)
        unpacked = Unpacked(reader, data)
        return await Records().between(unpacked, 0, unpacked.entry.size)

    async def _stretches(
        self, reader: Reader, visit: Visit, start: int, stop: int
    ) -> list[Record]:
        """Return records of stretches at random, until there are enough to take some."""
        key = reader.entry.key
        found: dict[int, list[Record]] = {}
        for at, end in stretches(visit, key, start, stop, STRETCH, most=_MOST_STRETCHES):
            found[at] = await self._between(reader, at, end)
            if sum(map(len, found.values())) >= (visit.take or 0):
                break
        return picked([record for at in sorted(found) for record in found[at]], visit, key)

    async def _samples(self, key: str, records: list[Record]) -> Found:
        def work(call: Call | None) -> Found:
            return self._decoded(key, records, call)

        if self._decode is not None:
            return await self._threads.run(work)
        return await asyncio.to_thread(work, None)

    def _decoded(self, key: str, records: list[Record], call: Call | None) -> Found:
        found: Found = []
        bad: list[str] = []
        for record in records:
            if call is not None:
                call.check()
            try:
                sample = self._sample(key, record)
            except FormatError as error:
                bad.append(f"{key}: the record at byte {record.start:,}: {error}")
                continue
            if sample is not None:
                found.append((sample, record.start, record.stop))
        if bad:
            more = f" (and {len(bad) - 1:,} records more)" if len(bad) > 1 else ""
            raise PartlyReadError(bad[0] + more, found)
        return found

    def _sample(self, key: str, record: Record) -> Sample | None:
        if record.data is None:
            raise FormatError("its checksum is wrong")
        if self._examples:
            return to_sample(parse_example(record.data), self._wishes)
        data = bytes(record.data)
        if self._decode is None:
            return {"data": data}
        result = self._decode(key, {"data": data, "key": key})
        return None if result is None else self._decode.sample(key, result)


def open_tfrecord(options: Mapping[str, Any]) -> TFRecords:
    """Return the format.

    Options:
        decode: ``example``: a record is a tf.train.Example, and its features are the fields;
            ``none``: the record is field ``data``; or ``package.module:function`` of ``data``,
            and ``key`` if it takes it, that returns the sample, None for none.
        features: which; a list of names, or a mapping of names to a dtype or [dtype, size, …],
            which bytes are read as, too. Without it all.
        index: true: where records begin is found out by walking over all heads of an object
            first. For records that are themselves TFRecord files, and for large ones.
        compression: ``auto`` (by the endings in source.url), ``none``, ``gzip``, ``zlib``, ``zstd``.

    Raises:
        ConfigError: an unknown option, or a value that cannot be meant.
    """
    refuse_unknown("tfrecord", options, _OPTIONS)
    index = true_or_false(options, "index")
    wishes = wished(options.get("features"))
    decode = options.get("decode", "example") or "none"  # YAML's null means it, too
    if wishes is not None and decode != "example":
        raise ConfigError("source.options.features: needs decode: example")
    code = None
    if decode not in ("example", "none"):
        if ":" not in str(decode):
            raise ConfigError(
                "source.options.decode: expected example, none or package.module:function, "
                f"found {decode!r}"
            )
        code = load_decoder(decode)
    packed = compression(options, ())
    return TFRecords(packed, wishes, code, examples=decode == "example", index=index)
