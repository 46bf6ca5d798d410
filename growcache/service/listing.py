"""The local copy of the listing, as `check` sees it: it can always be made again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from growcache.cache.files import Layout
from growcache.cache.findings import Finding
from growcache.cache.locks import FileLock, is_held
from growcache.errors import CacheError
from growcache.remote.catalog import Catalog


def check_listing(cache: Path) -> Iterator[Finding]:
    """Yield what is amiss with the copy of the listing."""
    path = Layout(cache).catalog
    if not path.exists() or not path.stat().st_size:
        return  # the next start lists
    try:
        with Catalog.open(path, readonly=True) as catalog:
            torn, count = catalog.torn_bytes, len(catalog)
    except CacheError:
        yield Finding("error", None, f"{path} is damaged from its start", mendable=True)
        return
    if torn and not is_held(Layout(cache).supervisor_lock):
        text = f"{path}: {torn} bytes behind {count} objects are damaged; the next start lists anew"
        yield Finding("info", None, text)


def mend_listing(cache: Path) -> list[Finding]:
    """Remove a copy of the listing that cannot be read: the next start lists the source again."""
    layout = Layout(cache)
    with FileLock.acquire(layout.supervisor_lock):
        found = list(check_listing(cache))
        if any(finding.mendable for finding in found):
            layout.catalog.unlink()
    return [_mended(finding) for finding in found]


def _mended(finding: Finding) -> Finding:
    if not finding.mendable:
        return finding
    return Finding(
        "mended", None, f"{finding.message}; the next start lists anew", mendable=True
    )
