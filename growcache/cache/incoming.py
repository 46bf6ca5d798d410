"""Write a sampler's shard: encoded, checksummed, and past the page cache if that is cheaper.

Writing through the page cache copies every byte once more, into memory that the kernel must
first find and clear. It also evicts bytes that readers still use. On a virtual machine that
costs more than fetching them. If memory can hold the whole cache, the copy pays off, because
readers never wait for the disk.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import google_crc32c
import numpy as np
import xxhash

from growcache.cache.files import (
    BLOCK_BYTES,
    SIDECAR,
    CacheLayout,
    whole_blocks,
)
from growcache.cache.folders import make_folder, open_folder, remove_incoming_shard
from growcache.cache.formats import CACHE_FORMATS
from growcache.cache.formats.encoding import EncodedFile, split_buffer
from growcache.cache.formats.mapped import Buffer, Bytes
from growcache.cache.sidecar import ShardFile, Sidecar
from growcache.modes import FILE_MODE, share_if_folder_is
from growcache.schema import Sample, Schema

ALIGNED = 4096  # offset, length and address of a direct write; no device requires more
CHUNK_BYTES = 4 << 20
HUGE_BYTES = 2 << 20  # a huge page, which may replace 512 small ones
LEAST_DIRECT_BYTES = 1 << 20  # smaller files are not worth two more calls
PAGE_CACHE_SHARE = 0.5  # of memory that the page cache is expected to keep for one cache


def exceeds_page_cache(max_bytes: int, memory: int) -> bool:
    """Return whether a full cache of this bound would exceed the page cache.

    >>> exceeds_page_cache(200 * 10**9, 64 * 10**9), exceeds_page_cache(10 * 10**9, 64 * 10**9)
    (True, False)
    """
    return max_bytes > PAGE_CACHE_SHARE * memory


def open_direct(
    path: str | os.PathLike[str], mode: int, directory: int | None = None
) -> int | None:
    """Return a descriptor for `write_direct`, or None if the file system lacks O_DIRECT."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags | os.O_DIRECT, mode, dir_fd=directory)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def write_direct(descriptor: int, pieces: Iterable[Buffer], size: int) -> None:
    """Write the pieces in aligned chunks, and truncate the file to ``size`` bytes.

    May raise OSError.
    """
    for chunk in _aligned_chunks(pieces):
        _write_chunk(descriptor, chunk)
    os.ftruncate(descriptor, size)


def _aligned_chunks(pieces: Iterable[Buffer]) -> Iterator[Bytes]:
    """Yield the same bytes in an aligned block. The last chunk is padded with zeros."""
    block, filled = _block_of_thread(), 0
    for piece in pieces:
        rest: Bytes = np.frombuffer(piece, np.uint8)
        while len(rest):
            part = rest[: CHUNK_BYTES - filled]
            block[filled : filled + len(part)] = part
            filled, rest = filled + len(part), rest[len(part) :]
            if filled == CHUNK_BYTES:
                yield block
                filled = 0
    if filled:
        whole = -(-filled // ALIGNED) * ALIGNED
        block[filled:whole] = 0
        yield block[:whole]


class _ThreadBlock(threading.local):
    """The block of each writing thread, kept for its next file.

    The kernel clears a new block page by page, which costs as much as writing.
    """

    block: Bytes | None = None


_thread_block = _ThreadBlock()


def _block_of_thread() -> Bytes:
    """Return this thread's aligned block, which still has bytes of the last file."""
    if _thread_block.block is None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, CHUNK_BYTES + HUGE_BYTES, flags=flags)
        with suppress(OSError):  # a kernel without huge pages uses small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole: Bytes = np.frombuffer(memory, np.uint8)
        start = -whole.ctypes.data % HUGE_BYTES
        _thread_block.block = whole[start : start + CHUNK_BYTES]
    return _thread_block.block


def _write_chunk(descriptor: int, chunk: Bytes) -> None:
    written = 0
    while written < len(chunk):
        written += os.write(descriptor, chunk[written:].data)


# Placeholders until the files are written, as long as the final values.
PLACEHOLDER_DIGEST = "0" * 32
PLACEHOLDER_CRC = 2**32 - 1


def file_without_checksum(file: EncodedFile) -> ShardFile:
    return ShardFile(file.suffix, file.nbytes, None if file.guarded else PLACEHOLDER_CRC)


class ShardChecksum:
    """Checksums of a shard's files, computed in order while they are written."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._files: list[ShardFile] = []

    def passing(self, file: EncodedFile) -> Iterator[Buffer]:
        crc = 0
        for buffer in file.pieces:
            for piece in split_buffer(buffer):
                self._digest.update(piece if isinstance(piece, bytes) else piece.data)
                yield piece
                if not file.guarded:
                    crc = google_crc32c.extend(crc, piece)
        self._files.append(
            file_without_checksum(file)._replace(crc32c=None if file.guarded else crc)
        )

    def on(self, sidecar: Sidecar) -> Sidecar:
        if not self._files:
            return sidecar
        return replace(sidecar, digest=self._digest.hexdigest(), files=tuple(self._files))


@dataclass(frozen=True, slots=True)
class PackedShard:
    files: list[EncodedFile]
    facts: dict[str, Any]  # arguments of Sidecar about the files


def encode_shard(cache_format: str, schema: Schema, samples: Sequence[Sample]) -> PackedShard:
    module = CACHE_FORMATS[cache_format]
    files: list[EncodedFile] = module.encode(schema, samples)
    facts = {
        "schema": schema,
        "samples": len(samples),
        "record_bytes": 0 if schema.is_ragged else module.record_bytes(schema, schema.nbytes),
        "shard_bytes": sum(file.nbytes for file in files),
        "digest": PLACEHOLDER_DIGEST if files else "",
        "files": tuple(map(file_without_checksum, files)),
        "cache_format": cache_format,
    }
    return PackedShard(files, facts)


BATCH_BYTES = 4 << 20  # written by one call
MAX_BUFFERS = 1000  # IOV_MAX is 1024
EXTENTS_SHARE = 80  # bytes of a file per byte of its block map; at worst 12 map 1,024
NAME_BYTES = 24  # of a directory entry, without the name's text


def bytes_to_reserve(sidecar: Sidecar) -> int:
    """Return the bytes to reserve for the shard and its sidecar. The commit frees the rest."""
    sizes = [file.nbytes for file in sidecar.files] + [len(sidecar.to_bytes())]
    inner = [file.suffix for file in sidecar.files if "/" in file.suffix]
    if inner:  # for their directory
        sizes.append(sum(len(name) + NAME_BYTES for name in inner))
    return reserved_bytes(sizes)


def reserved_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes to reserve for files of these sizes.

    They include a block per file for growth of the directory, and a share of the size. A file
    system needs blocks to map a fragmented file (most in ext4 with small blocks).
    """
    return sum(whole_blocks(size) + BLOCK_BYTES + size // EXTENTS_SHARE for size in sizes)


def write_incoming(
    layout: CacheLayout,
    permit: str,
    sidecar: Sidecar,
    files: Sequence[EncodedFile],
    *,
    direct: bool = False,
) -> Sidecar:
    """Write the shard and its sidecar durably for `Cache.commit`; return the complete sidecar.

    ``direct`` bypasses the page cache. May raise OSError (ENOSPC, EDQUOT, …), which leaves
    nothing behind.
    """
    number = sidecar.number
    prefix = layout.incoming_path(permit, number, "").name
    try:
        with open_folder(layout.incoming) as incoming:
            seal = _write_files(incoming, prefix, files, direct=direct)
            sealed = seal.on(sidecar)
            data = sealed.to_bytes()
            _write_file(incoming, prefix + SIDECAR, [data], len(data))
    except BaseException:
        discard_incoming(layout, permit, [number])
        raise
    return sealed


def _write_files(
    incoming: int, prefix: str, files: Sequence[EncodedFile], *, direct: bool
) -> ShardChecksum:
    """Write the files. If the format has a folder, it is synced last."""
    seal = ShardChecksum()
    with ExitStack() as stack:
        inner: dict[str, int] = {}
        for file in files:
            above, _, name = f"{prefix}{file.suffix}".rpartition("/")
            if above and above not in inner:
                inner[above] = stack.enter_context(make_folder(incoming, above))
            past = direct and file.nbytes >= LEAST_DIRECT_BYTES
            where = inner[above] if above else incoming
            _write_file(where, name, seal.passing(file), file.nbytes, direct=past)
        for descriptor in inner.values():
            os.fsync(descriptor)
    return seal


def discard_incoming(layout: CacheLayout, permit: str, numbers: Iterable[int]) -> None:
    for number in numbers:
        remove_incoming_shard(layout, layout.incoming_path(permit, number, "").name)


def _write_file(
    directory: int, name: str, pieces: Iterable[Buffer], size: int, *, direct: bool = False
) -> None:
    past = open_direct(name, FILE_MODE, directory) if direct else None
    descriptor = past
    if descriptor is None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, FILE_MODE, dir_fd=directory)
    try:
        share_if_folder_is(descriptor, directory)
        # All blocks come before the bytes, so that a full disk shows here as a clean ENOSPC.
        os.posix_fallocate(descriptor, 0, size)
        if past is not None:
            write_direct(descriptor, pieces, size)
        else:
            _write_batches(descriptor, pieces)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_batches(descriptor: int, pieces: Iterable[Buffer]) -> None:
    batch: list[Buffer] = []
    held = 0
    for piece in pieces:
        batch.append(piece)
        held += len(piece)
        if held >= BATCH_BYTES or len(batch) == MAX_BUFFERS:
            _write_buffers(descriptor, batch)
            batch, held = [], 0
    _write_buffers(descriptor, batch)


def _write_buffers(descriptor: int, buffers: Sequence[Buffer]) -> None:
    views = [_memoryview(buffer) for buffer in buffers if len(buffer)]
    while views:
        written = os.writev(descriptor, views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def _memoryview(buffer: Buffer) -> memoryview:
    return memoryview(buffer) if isinstance(buffer, bytes) else buffer.data
