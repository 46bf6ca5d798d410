"""Checksums of a shard, of bytes on their way to the disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import google_crc32c
import xxhash

from growcache.cache.formats.mapped import Buffer
from growcache.cache.formats.values import EncodedFile, split
from growcache.cache.sidecar import FileFacts, Sidecar

# What a description says until its files are written: as long as what it will say.
UNSEALED_DIGEST = "0" * 32
UNSEALED_CRC = 2**32 - 1


def unsealed(file: EncodedFile) -> FileFacts:
    """Return what is known of a file before it is written."""
    return FileFacts(file.suffix, file.nbytes, None if file.guarded else UNSEALED_CRC)


class Seal:
    """Watches the files of a shard go by, in their order, and completes its description."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._files: list[FileFacts] = []

    def passing(self, file: EncodedFile) -> Iterator[Buffer]:
        """Yield the pieces of the next file, each of them checked while it is at hand."""
        crc = 0
        for buffer in file.pieces:
            for piece in split(buffer):
                self._digest.update(piece if isinstance(piece, bytes) else piece.data)
                yield piece
                if not file.guarded:
                    crc = google_crc32c.extend(crc, piece)
        self._files.append(unsealed(file)._replace(crc32c=None if file.guarded else crc))

    def on(self, sidecar: Sidecar) -> Sidecar:
        """Return the description with the checksums of the files that have gone by."""
        if not self._files:
            return sidecar
        return replace(sidecar, digest=self._digest.hexdigest(), files=tuple(self._files))
