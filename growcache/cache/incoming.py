"""What a sampler leaves for the supervisor: a shard and its sidecar under a permit's name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from growcache.cache.direct import LEAST_BYTES, open_direct, write_direct
from growcache.cache.files import (
    BLOCK_BYTES,
    DIRECTORY_MODE,
    FILE_MODE,
    SIDECAR,
    Layout,
    block_bytes,
)
from growcache.cache.folders import folder, remove_parts, subfolder
from growcache.cache.formats.mapped import Buffer
from growcache.cache.formats.values import EncodedFile
from growcache.cache.seal import Seal
from growcache.cache.sidecar import Sidecar

BATCH_BYTES = 4 << 20  # that one call writes
MAX_BUFFERS = 1000  # IOV_MAX is 1024
MAP_SHARE = 80  # bytes of a file per byte of its map: at worst 1,024 of data for 12, and those
NAME_BYTES = 24  # what a file's name takes in its directory, beside its text


def needed_bytes(sidecar: Sidecar) -> int:
    """Return the bytes on disk to reserve for the shard and its sidecar.

    One block more per file, which a directory may need to grow, and a part of the size, which
    a file system may need to map a file that lies in fragments, and counts to the file (ext4
    with small blocks, none beside another, takes most). The commit frees what was not used.
    """
    sizes = [file.nbytes for file in sidecar.files] + [len(sidecar.to_bytes())]
    inner = [file.suffix for file in sidecar.files if "/" in file.suffix]
    if inner:  # their directory
        sizes.append(sum(len(name) + NAME_BYTES for name in inner))
    return sum(block_bytes(size) + BLOCK_BYTES + size // MAP_SHARE for size in sizes)


def write_incoming(
    layout: Layout,
    permit: str,
    sidecar: Sidecar,
    files: Sequence[EncodedFile],
    *,
    direct: bool = False,
) -> Sidecar:
    """Write the shard (where it has samples) and its sidecar, durably, for `Cache.commit`.

    Args:
        layout: of the cache.
        permit: in whose name.
        sidecar: of the shard, without the checksums of its files.
        files: of the shard.
        direct: past the page cache; see `growcache.cache.direct`.

    Returns:
        the whole description, as it was written.

    Raises:
        OSError: ENOSPC, EDQUOT and the like; nothing is left behind then.
    """
    number = sidecar.number
    prefix = layout.incoming_path(permit, number, "").name
    try:
        with folder(layout.incoming) as incoming:
            seal = _write_files(incoming, prefix, files, direct=direct)
            sealed = seal.on(sidecar)
            data = sealed.to_bytes()
            _write(incoming, prefix + SIDECAR, [data], len(data))
    except BaseException:
        discard_incoming(layout, permit, [number])
        raise
    return sealed


def _write_files(
    incoming: int, prefix: str, files: Sequence[EncodedFile], *, direct: bool
) -> Seal:
    """Write all but the sidecar, each where its suffix says: some in a folder, synced last."""
    seal = Seal()
    with ExitStack() as stack:
        inner: dict[str, int] = {}
        for file in files:
            above, _, name = f"{prefix}{file.suffix}".rpartition("/")
            if above and above not in inner:
                inner[above] = stack.enter_context(subfolder(incoming, above, DIRECTORY_MODE))
            past = direct and file.nbytes >= LEAST_BYTES
            where = inner[above] if above else incoming
            _write(where, name, seal.passing(file), file.nbytes, direct=past)
        for descriptor in inner.values():
            os.fsync(descriptor)
    return seal


def discard_incoming(layout: Layout, permit: str, numbers: Iterable[int]) -> None:
    """Remove what was written under the permit for these shards, as far as it is there."""
    for number in numbers:
        remove_parts(layout, layout.incoming_path(permit, number, "").name)


def _write(
    directory: int, name: str, pieces: Iterable[Buffer], size: int, *, direct: bool = False
) -> None:
    past = open_direct(name, FILE_MODE, directory) if direct else None
    descriptor = past
    if descriptor is None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, FILE_MODE, dir_fd=directory)
    try:
        # First all blocks, then the bytes: a full disk shows here, as a clean ENOSPC.
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
            _write_all(descriptor, batch)
            batch, held = [], 0
    _write_all(descriptor, batch)


def _write_all(descriptor: int, buffers: Sequence[Buffer]) -> None:
    views = [_view(buffer) for buffer in buffers if len(buffer)]
    while views:
        written = os.writev(descriptor, views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def _view(buffer: Buffer) -> memoryview:
    return memoryview(buffer) if isinstance(buffer, bytes) else buffer.data
