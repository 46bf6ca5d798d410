"""Commit and deletion of shards, in an order that a crash may cut anywhere.

written and fsynced under the permit's name → renamed → directory fsynced → row
row says retired → leases read → unlinked → row says deleted
"""

from __future__ import annotations

from collections.abc import Sequence

from growcache.cache.files import Layout, allocated, fsync_directory
from growcache.cache.incoming import discard_incoming
from growcache.cache.sidecar import Sidecar
from growcache.errors import CorruptShardError


def read_incoming(layout: Layout, permit: str, number: int) -> Sidecar:
    """Return the sidecar that a sampler wrote, once its shard has the size it says.

    Raises:
        CorruptShardError: missing, damaged, or not the shard that was asked for.
    """
    path = layout.incoming_path(permit, number, ".json")
    try:
        sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
        records = layout.incoming_path(permit, number, ".tfrecord")
        found = records.stat().st_size if sidecar.samples else 0
    except FileNotFoundError as error:
        raise CorruptShardError(f"{error.filename}: the sampler did not write it") from None
    if sidecar.number != number or found != sidecar.shard_bytes:
        raise CorruptShardError(
            f"{path}: expected shard {number} of {sidecar.shard_bytes} bytes, found "
            f"shard {sidecar.number} of {found}"
        )
    return sidecar


def install(layout: Layout, permit: str, sidecars: Sequence[Sidecar]) -> None:
    """Give the permit's files their final names, durably.

    The sidecar goes first, so that records never lie there without their description.
    """
    for sidecar in sidecars:
        remove(layout, sidecar.number)  # of a crash between rename and row
        for suffix, target in (
            (".json", layout.sidecar(sidecar.number)),
            (".tfrecord", layout.shard(sidecar.number)),
        ):
            if suffix == ".json" or sidecar.samples:
                layout.incoming_path(permit, sidecar.number, suffix).rename(target)
    fsync_directory(layout.shards)


def abandon(layout: Layout, permit: str, numbers: Sequence[int]) -> None:
    """Remove the files of a commit that failed, under either name."""
    discard_incoming(layout, permit, numbers)
    for number in numbers:
        remove(layout, number)


def remove(layout: Layout, number: int) -> int:
    """Unlink a shard and its sidecar; return the bytes that their blocks took."""
    freed = 0
    for path in (layout.shard(number), layout.sidecar(number)):
        freed += allocated(path)
        path.unlink(missing_ok=True)
    return freed
