"""A shard before it is written: its files, and what its description says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from growcache.cache.formats import CACHE_FORMATS
from growcache.cache.formats.values import EncodedFile
from growcache.cache.seal import UNSEALED_DIGEST, unsealed
from growcache.schema import Sample, Schema


@dataclass(frozen=True, slots=True)
class Packed:
    """The samples of a shard, encoded.

    Attributes:
        files: to be written.
        facts: the part of the `Sidecar` that is about the files, by argument; a `Seal`
            on the files that are written completes it.
    """

    files: list[EncodedFile]
    facts: dict[str, Any]


def pack(cache_format: str, schema: Schema, samples: Sequence[Sample]) -> Packed:
    """Return the samples as the files of a shard.

    Raises:
        FormatError: a sample is not what the schema says.
    """
    module = CACHE_FORMATS[cache_format]
    files: list[EncodedFile] = module.encode(schema, samples)
    facts = {
        "schema": schema,
        "samples": len(samples),
        "record_bytes": 0 if schema.is_ragged else module.record_bytes(schema, schema.nbytes),
        "shard_bytes": sum(file.nbytes for file in files),
        "digest": UNSEALED_DIGEST if files else "",
        "files": tuple(map(unsealed, files)),
        "cache_format": cache_format,
    }
    return Packed(files, facts)
