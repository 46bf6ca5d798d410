"""What a sampler leaves for the supervisor: a shard and its sidecar under a permit's name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import xxhash

from growcache.cache.direct import LEAST_BYTES, open_direct, write_direct
from growcache.cache.files import (
    BLOCK_BYTES,
    DIRECTORY_MODE,
    FILE_MODE,
    SHARD_PARTS,
    SIDECAR,
    Layout,
    block_bytes,
    fsync_directory,
    remove_entry,
)
from growcache.cache.formats.mapped import Buffer
from growcache.cache.formats.values import EncodedFile
from growcache.cache.sidecar import Sidecar

MAX_BUFFERS = 1000  # IOV_MAX is 1024
NAME_BYTES = 24  # what a file's name takes in its directory, beside its text


def digest_of(files: Iterable[EncodedFile]) -> str:
    """Return the xxh3_128 of the files, one after the other, in hexadecimal."""
    digest = xxhash.xxh3_128()
    for file in files:
        for buffer in file.buffers:
            digest.update(_view(buffer))
    return digest.hexdigest()


def needed_bytes(sidecar: Sidecar) -> int:
    """Return the bytes on disk to reserve for the shard and its sidecar.

    One block more per file, because a file system may need one to map a fragmented file,
    and counts it to the file, or to grow a directory. The commit frees what was not used.
    """
    sizes = [file.nbytes for file in sidecar.files] + [len(sidecar.to_bytes())]
    inner = [file.suffix for file in sidecar.files if "/" in file.suffix]
    if inner:  # their directory
        sizes.append(sum(len(name) + NAME_BYTES for name in inner))
    return sum(block_bytes(size) + BLOCK_BYTES for size in sizes)


def write_incoming(
    layout: Layout,
    permit: str,
    sidecar: Sidecar,
    files: Sequence[EncodedFile],
    *,
    direct: bool = False,
) -> None:
    """Write the shard (where it has samples) and its sidecar, durably, for `Cache.commit`.

    Args:
        layout: of the cache.
        permit: in whose name.
        sidecar: of the shard.
        files: of the shard.
        direct: past the page cache; see `growcache.cache.direct`.

    Raises:
        OSError: ENOSPC, EDQUOT and the like; nothing is left behind then.
    """
    number = sidecar.number
    directories = set()
    try:
        for file in files:
            path = layout.incoming_path(permit, number, file.suffix)
            if path.parent != layout.incoming:
                path.parent.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
                directories.add(path.parent)
            size = sum(map(len, file.buffers))
            _write(path, file.buffers, size, direct=direct and size >= LEAST_BYTES)
        for directory in directories:
            fsync_directory(directory)
        data = sidecar.to_bytes()
        _write(layout.incoming_path(permit, number, SIDECAR), [data], len(data))
    except BaseException:
        discard_incoming(layout, permit, [number])
        raise


def discard_incoming(layout: Layout, permit: str, numbers: Iterable[int]) -> None:
    """Remove what was written under the permit for these shards, as far as it is there."""
    for number in numbers:
        for part in SHARD_PARTS:
            remove_entry(layout.incoming_path(permit, number, part))


def _write(path: Path, buffers: Sequence[Buffer], size: int, *, direct: bool = False) -> None:
    past = open_direct(path, FILE_MODE) if direct else None
    descriptor = past
    if descriptor is None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
    try:
        # First all blocks, then the bytes: a full disk shows here, as a clean ENOSPC.
        os.posix_fallocate(descriptor, 0, size)
        if past is not None:
            write_direct(descriptor, _views(buffers), size)
        else:
            for first in range(0, len(buffers), MAX_BUFFERS):
                _write_all(descriptor, buffers[first : first + MAX_BUFFERS])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, buffers: Sequence[Buffer]) -> None:
    views = list(_views(buffers))
    while views:
        written = os.writev(descriptor, views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def _views(buffers: Sequence[Buffer]) -> Iterator[memoryview]:
    return (_view(buffer) for buffer in buffers if len(buffer))


def _view(buffer: Buffer) -> memoryview:
    return memoryview(buffer) if isinstance(buffer, bytes) else buffer.data
