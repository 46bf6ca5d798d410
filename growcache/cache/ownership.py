"""Whose samples a cache holds: one fingerprint's, or nobody's yet."""

from __future__ import annotations

from typing import Any

from growcache.cache.files import Layout, entries_of, fsync_directory, remove_entry
from growcache.cache.identity import Identity, describe_differences, write_identity
from growcache.cache.index import Index
from growcache.errors import FingerprintError


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
        noted = {key: identity.parts.get(key) for key in parts}
    if noted == parts:
        return False
    if noted is not None and drawn:
        raise FingerprintError(_refusal(layout, describe_differences(noted, parts)))
    if noted is not None:
        # The listing goes before the claim on it is cleared: a crash in between must not
        # let the next source go on with it.
        layout.catalog.unlink(missing_ok=True)
        fsync_directory(layout.root)
        start_afresh(layout, index)
    with index.transaction():
        index.set_meta("claim", parts)
    return noted is not None


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
        index.set_meta("fingerprint", wanted.fingerprint)
    return wanted


def start_afresh(layout: Layout, index: Index) -> None:
    """Forget everything about a cache without samples, but for its catalog.

    Files go first: a crash in between leaves rows of empty shards without a sidecar,
    which the next start takes off the index.
    """
    own = (layout.identity, layout.issued, layout.editions)
    for path in (*own, *entries_of(layout.shards)):
        remove_entry(path)
    with index.transaction():
        index.clear()


def _refusal(layout: Layout, differing: list[str]) -> str:
    what = "; ".join(differing[:5]) or "its fingerprint"
    return (
        f"the cache {layout.root} holds samples of another configuration: {what}. "
        "Choose another cache.path, or empty it with: growcache clear"
    )
