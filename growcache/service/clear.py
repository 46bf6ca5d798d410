"""``growcache clear``: empty a cache that nobody uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from growcache.cache.adoption import adopt, require_cache
from growcache.cache.clearing import clear
from growcache.cache.files import Layout, allocated_tree
from growcache.cache.folders import strangers
from growcache.cache.leases import survey_leases
from growcache.cache.locks import is_held
from growcache.cache.opening import in_use, take_over
from growcache.errors import CacheBusyError
from growcache.service.words import in_bytes
from growcache.usercode import printable

SAMPLERS_SECONDS = 10.0  # that those of a service that died need to end
SHOWN = 3  # names of what is not ours


def describe(root: Path) -> str:
    """Return the question to ask before.

    Raises:
        CacheMissingError: there is no cache at the path.
    """
    layout = _require(root)
    return f"Delete {in_bytes(allocated_tree(layout.root))} of cached samples in {layout.root}?"


def clear_cache(root: Path) -> str:
    """Delete all that a service has put into the folder; return what to tell.

    Only names of a cache's own are touched. Locks stay, for they are never unlinked, and the
    marker, so that the next service takes the folder as it is.

    Raises:
        CacheMissingError: there is no cache at the path.
        CacheBusyError: a service or a reader uses it.
    """
    layout = _require(root)
    before = allocated_tree(layout.root)
    adopt(layout)
    if is_held(layout.supervisor_lock):
        raise in_use(layout, "stop that service first")
    with take_over(layout, SAMPLERS_SECONDS):
        views, foreign = survey_leases(layout.root)
        for strange in foreign:
            if strange.protects:
                raise CacheBusyError(f"{layout.root} may be read: {strange}; {strange.advice}")
        for lease in views:
            if lease.open and lease.holding():
                raise CacheBusyError(
                    f"{layout.root} is being read by {lease.command} (pid {lease.pid} on "
                    f"{lease.host}); stop it first"
                )
        clear(layout)
    freed = in_bytes(before - allocated_tree(layout.root))
    return f"Emptied {layout.root}; {freed} are free again.{_left(strangers(layout))}"


def _left(foreign: Sequence[Path]) -> str:
    """Return what stays because it is not growcache's, in words."""
    if not foreign:
        return ""
    shown = ", ".join(map(str, foreign[:SHOWN])) + (" …" if len(foreign) > SHOWN else "")
    return f" Not growcache's, so left as it is: {printable(shown)}."


def _require(root: Path) -> Layout:
    """Return the layout of a cache, also of one whose clearing was cut short."""
    layout = Layout(root)
    require_cache(layout)
    return layout
