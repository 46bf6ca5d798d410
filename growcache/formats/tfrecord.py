"""TFRecord files: each record is a sample, usually a ``tf.train.Example`` or ``SequenceExample``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    Measure,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    bool_option,
    refuse_unknown_options,
    take_some,
)
from growcache.formats.compressed import UnpackLimit, compression_option, limit_where
from growcache.formats.items import (
    RANDOM_RANGE_BYTES,
    ItemsFormat,
    decode_option,
    items_of_part,
)
from growcache.formats.tf_example import FeatureList, Features, parse_example
from growcache.formats.tf_features import FeatureSpec, features_option, sample_of_features
from growcache.formats.tfrecord_scan import (
    READ_WHOLE_BYTES,
    Record,
    RecordOffsets,
    RecordScan,
    record_length_at,
)
from growcache.schema import Sample
from growcache.store.contract import Entry
from growcache.usercode import UserCode

_EXAMPLES = ("auto", "example", "sequence_example")  # auto: by the record
_OPTIONS = ("decode", "features", "index", "compression")
_SPOT_BYTES = 1 << 18  # read at the start and in the middle to measure an object
_MOST_RANDOM_RANGES = 64


class TFRecordFormat(ItemsFormat):
    visit_bytes = 1 << 19

    def __init__(
        self,
        compression: str,
        wishes: tuple[FeatureSpec, ...] | None,
        code: UserCode | None,
        *,
        decode: str,
        index: bool,
    ) -> None:
        super().__init__(code, compression)
        self._wishes = wishes
        self._decode = decode
        self._cached: Collection[str] | None = None  # fields of an existing cache
        self._records: RecordScan | RecordOffsets = RecordOffsets() if index else RecordScan()

    def follow_fields(self, names: Collection[str]) -> None:
        self._cached = names

    async def measure(self, reader: ObjectReader) -> Measure:
        size = reader.entry.size
        if not self.ranged:
            return self.measure_of(reader.entry, len(await self._all(reader)))
        if isinstance(self._records, RecordOffsets):
            offsets = await self._records.offsets(reader)
            return self.measure_of(reader.entry, len(offsets) - 1)
        if size <= READ_WHOLE_BYTES:
            count = len(await self._records.records_in(reader, 0, size))
            stride = size / max(1, count)
        else:
            stride = await self._stride(self._records, reader)
            count = max(1, round(size / stride))
        return self.measure_of(reader.entry, count, stride)

    def unpack_limit(self, _: Entry) -> UnpackLimit:
        return limit_where(lambda head: record_length_at(memoryview(head), 0) is not None)

    async def _stride(self, records: RecordScan, reader: ObjectReader) -> float:
        half = reader.entry.size // 2
        found = await records.records_in(reader, 0, min(half, _SPOT_BYTES))
        found += await records.records_in(
            reader, half, min(reader.entry.size, half + _SPOT_BYTES)
        )
        return sum(record.stop - record.start for record in found) / len(found)

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        if not self.ranged:
            records = take_some(await self._all(reader), visit, reader.entry.key)
        else:
            records = await items_of_part(
                reader,
                visit,
                partial(self._records.records_in, reader),
                range_bytes=RANDOM_RANGE_BYTES,
                most_ranges=_MOST_RANDOM_RANGES,
                least_bytes=4 * RANDOM_RANGE_BYTES,
            )
        key = reader.entry.key
        return await self.samples_of(
            key,
            records,
            partial(self._sample, key),
            lambda record: f"the record at byte {record.start:,}",
        )

    async def _all(self, reader: ObjectReader) -> list[Record]:
        unpacked = await self.unpacked(reader)
        return await RecordScan().records_in(unpacked, 0, unpacked.entry.size)

    def _sample(self, key: str, record: Record) -> Sample | None:
        if record.data is None:
            raise FormatError("its checksum is wrong", code="GC302")
        if self._decode in _EXAMPLES:
            features = parse_example(record.data, self._decode)
            return sample_of_features(self._known(features), self._wishes)
        data = bytes(record.data)
        return {"data": data} if self._code is None else self.by_user(key, data, key)

    def _known(self, features: Features) -> Features:
        """Leave out lists that the cache lacks, because earlier versions read only the context."""
        if self._cached is None or self._wishes is not None:
            return features
        return {
            name: values
            for name, values in features.items()
            if name in self._cached or not isinstance(values, FeatureList)
        }


def open_tfrecord(options: Mapping[str, Any]) -> TFRecordFormat:
    refuse_unknown_options("tfrecord", options, _OPTIONS)
    index = bool_option(options, "index")
    wishes = features_option(options.get("features"))
    decode, code = decode_option(options, (*_EXAMPLES, "none"))
    if wishes is not None and decode not in _EXAMPLES:
        raise ConfigError(
            "source.options.features: needs decode: example or sequence_example", code="GC103"
        )
    compression = compression_option(options, ())
    return TFRecordFormat(compression, wishes, code, decode=decode, index=index)
