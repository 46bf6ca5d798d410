"""A shard before it is written: its files, and what its description says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c

from growcache.cache.formats import CACHE_FORMATS
from growcache.cache.formats.values import EncodedFile
from growcache.cache.incoming import digest_of
from growcache.cache.sidecar import FileFacts
from growcache.schema import Sample, Schema


@dataclass(frozen=True, slots=True)
class Packed:
    """The samples of a shard, encoded.

    Attributes:
        files: to be written.
        facts: the part of the `Sidecar` that is about the files, by argument.
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
    described = tuple(_describe(file, guarded=file.suffix in module.GUARDED) for file in files)
    facts = {
        "schema": schema,
        "samples": len(samples),
        "record_bytes": 0 if schema.is_ragged else module.record_bytes(schema, schema.nbytes),
        "shard_bytes": sum(file.nbytes for file in described),
        "digest": digest_of(files) if files else "",
        "files": described,
        "cache_format": cache_format,
    }
    return Packed(files, facts)


def _describe(file: EncodedFile, *, guarded: bool) -> FileFacts:
    nbytes = sum(map(len, file.buffers))
    if guarded:
        return FileFacts(file.suffix, nbytes, None)
    crc = 0
    for buffer in file.buffers:
        crc = google_crc32c.extend(crc, buffer)
    return FileFacts(file.suffix, nbytes, crc)
