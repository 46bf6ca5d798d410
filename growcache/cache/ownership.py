"""Whose samples a cache holds: one fingerprint's, or nobody's yet."""

from __future__ import annotations

import shlex
from typing import Any

from growcache.cache.files import Layout, fsync_directory
from growcache.cache.folders import folder, parted, remove, root_folder
from growcache.cache.identity import Identity, describe_differences, write_identity
from growcache.cache.index import Index
from growcache.cache.names import is_shard
from growcache.cache.rebuild import notes_of, numbers_in
from growcache.cache.sidecar import Sidecar
from growcache.errors import CorruptShardError, FingerprintError

# What a configuration may lack: parts of these that only a cache has were left out since.
OPTIONAL = ("source.", "split.", "sampling.strata.")


def claim(
    layout: Layout,
    index: Index,
    identity: Identity | None,
    parts: dict[str, Any],
    drawn: int,
) -> bool:
    """Note what the cache is wanted for; True where it was emptied for that.

    Raises:
        FingerprintError: it holds samples, and they differ in one of these parts.
    """
    noted = index.meta("claim")
    if identity is not None:
        told = identity.parts.items()
        noted = {key: value for key, value in told if key in parts or key.startswith(OPTIONAL)}
    if noted == parts:
        return False
    if noted is not None and drawn:
        raise FingerprintError(_refusal(layout, describe_differences(noted, parts)))
    # What nobody has said yet whose it is (`Identity` lost) is not of who asked last.
    emptied = noted is not None and is_initialised(index)
    if noted is not None:
        # The listing goes before the claim on it is cleared: a crash in between must not
        # let the next source go on with it.
        layout.catalog.unlink(missing_ok=True)
        fsync_directory(layout.root)
    if emptied:
        start_afresh(layout, index)
    with index.transaction():
        index.set_meta("claim", parts)
    return emptied


def settle_identity(
    layout: Layout,
    index: Index,
    current: Identity | None,
    wanted: Identity,
    drawn: int,
) -> Identity:
    """Return the identity that holds from now on: the one on disk, or the wanted one.

    Raises:
        FingerprintError: samples of another fingerprint are cached.
    """
    if not is_initialised(index):
        _refuse_others(layout, wanted)
    held = current.fingerprint if current else index.meta("fingerprint", wanted.fingerprint)
    if held != wanted.fingerprint and drawn:
        differing = wanted.differing(current) if current else []
        raise FingerprintError(_refusal(layout, differing))
    if current is not None and held == wanted.fingerprint:
        return current
    if current is not None or held != wanted.fingerprint:
        start_afresh(layout, index)
    write_identity(layout.root, wanted)
    with index.transaction():
        for key, value in notes_of(wanted).items():
            index.set_meta(key, value)
    return wanted


def _refuse_others(layout: Layout, wanted: Identity) -> None:
    """Refuse shards of which nothing but they themselves tells that they are another's."""
    for number in numbers_in(layout):
        path = layout.sidecar(number)
        try:
            sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
        except (CorruptShardError, FileNotFoundError):
            continue
        if sidecar.samples and sidecar.fingerprint != wanted.fingerprint:
            raise FingerprintError(
                _refusal(
                    layout, [f"fingerprint ({sidecar.fingerprint} → {wanted.fingerprint})"]
                )
            )


def mark_initialised(index: Index) -> None:
    """Note that what the index says is all there is: files that it misses are litter."""
    index.set_meta("initialised", True)


def is_initialised(index: Index) -> bool:
    """Return whether `mark_initialised` was called since the index was made or emptied."""
    return bool(index.meta("initialised"))


def start_afresh(layout: Layout, index: Index) -> None:
    """Forget everything about a cache without samples, but for its catalog.

    Files go first: a crash in between leaves rows of empty shards without a sidecar,
    which the next start takes off the index.
    """
    with root_folder(layout) as root:
        for path in (layout.identity, layout.issued, layout.editions, layout.deferrals):
            remove(root, path.name)
    with folder(layout.shards) as shards:
        for name in parted(shards, is_shard)[0]:
            remove(shards, name)
    with index.transaction():
        index.clear()


def _refusal(layout: Layout, differing: list[str]) -> str:
    what = "; ".join(differing[:5]) or "its fingerprint"
    return (
        f"the cache {layout.root} holds samples of another configuration: {what}. "
        f"Choose another cache.path, or empty it with: growcache clear {shlex.quote(str(layout.root))}"
    )
