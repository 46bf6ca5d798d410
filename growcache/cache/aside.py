"""What is amiss with all files of a cache but shards and index."""

from __future__ import annotations

from collections.abc import Iterator

from growcache.cache.beside import (
    deferrals_of,
    read_deferrals,
    read_editions,
    read_issued,
)
from growcache.cache.files import Layout, number_of, read_marker
from growcache.cache.findings import Finding, Severity
from growcache.cache.folders import strangers
from growcache.cache.identity import Identity, read_identity
from growcache.cache.index import Contents
from growcache.cache.leases import survey_leases
from growcache.cache.names import SET_ASIDE, is_incoming, is_shard
from growcache.cache.rebuild import numbers_in
from growcache.errors import CacheError


def identities(layout: Layout, contents: Contents) -> tuple[Identity | None, list[Finding]]:
    """Return the identity by the file or by the index's copy, and what is wrong with the file."""
    copy = contents.meta.get("identity")
    known = Identity.from_values(copy) if copy else None
    try:
        held = read_identity(layout.root)
    except CacheError:
        return known, [_identity_error(layout, "is damaged", known)]
    if held is None and (known or contents.rows or numbers_in(layout)):
        return known, [_identity_error(layout, "is missing", known)]
    if known is not None and held != known:
        return known, [_identity_error(layout, "is not that of the index", known)]
    return held, []


def _identity_error(layout: Layout, what: str, known: Identity | None) -> Finding:
    way = "" if known else (
        ", and so is the copy in the index: growcache run CONFIG takes the shards over, where "
        "they are those of CONFIG"
    )  # fmt: skip
    return Finding("error", None, f"{layout.identity} {what}{way}", mendable=known is not None)


def editions_finding(layout: Layout, contents: Contents) -> Iterator[Finding]:
    """Yield what is wrong with the file of editions."""
    # It may have one more than the index, which is told of it afterwards.
    found, known = read_editions(layout), contents.editions
    if found is None:
        yield Finding("error", None, f"{layout.editions} is damaged", mendable=True)
    elif found[: len(known)] != known:
        text = f"{layout.editions}: expected {len(known)} editions as in the index"
        yield Finding("error", None, f"{text}, found {len(found)} others", mendable=True)


def deferrals_finding(layout: Layout, contents: Contents) -> Iterator[Finding]:
    """Yield what is wrong with the record of what was set aside."""
    # The file may be one change ahead of the index, which is told of it afterwards.
    found, known = read_deferrals(layout), deferrals_of(contents.meta)
    if found is None:
        yield Finding("error", None, f"{layout.deferrals} is damaged", mendable=True)
    elif found.serial < known.serial or (found.serial == known.serial and found != known):
        text = f"{layout.deferrals}: expected {known.size} visits set aside, as in the index"
        yield Finding("error", None, f"{text}, found {found.size} others", mendable=True)


def issued_finding(layout: Layout, contents: Contents) -> Iterator[Finding]:
    """Yield what is wrong with the note of the highest group issued."""
    found = read_issued(layout)
    least = max((row.group for row in contents.rows), default=-1)
    if found is None:
        yield Finding("error", None, f"{layout.issued} is damaged", mendable=True)
    elif found < least:
        text = f"{layout.issued}: expected group {least} or more, found {found}"
        yield Finding("error", None, text, mendable=True)


def lease_findings(layout: Layout) -> Iterator[Finding]:
    """Yield leases that cannot be read."""
    for lease in survey_leases(layout.root)[1]:
        if lease.protects:
            # Another user's may well be sound: who may not look into it has found nothing.
            severity: Severity = "error" if lease.opened else "info"
            yield Finding(severity, None, f"{lease.path}: {lease.reason}; {lease.advice}")
        else:  # a power cut leaves such, for leases are not synced
            text = (
                f"{lease.path}: {lease.reason}; no reader holds it, the next start removes it"
            )
            yield Finding("info", None, text)


def marker_findings(layout: Layout) -> Iterator[Finding]:
    """Yield that the marker is not what was written, and what in the cache is not ours.

    Caches of before there was one have none, and the next start writes it.
    """
    if layout.marker.exists() and read_marker(layout) is None:
        yield Finding("info", None, f"{layout.marker} is damaged; the next start writes it")
    for path in strangers(layout):
        yield Finding(
            "info", None, f"{path}: not growcache's; it stays, and counts in the bound"
        )


def litter(layout: Layout, known: set[int], *, whole: bool) -> Iterator[Finding]:
    """Yield files that no row speaks of; only while nobody may be about to commit them.

    Args:
        layout: of the cache.
        known: numbers of the shards that may lie there.
        whole: whether the index tells of all of them.
    """
    for path in sorted(layout.shards.iterdir() if whole and layout.shards.is_dir() else ()):
        number = number_of(path)
        if is_shard(path.name) and number not in known:
            yield Finding("info", number, f"{path}: no live shard; the next start removes it")
    for path in sorted(layout.incoming.iterdir() if layout.incoming.is_dir() else ()):
        if not is_incoming(path.name):
            continue
        who = (
            "set aside by a repair" if path.name.startswith(SET_ASIDE) else "left by a sampler"
        )
        yield Finding("info", None, f"{path}: {who}; the next start removes it")
