"""Empty a cache that is not in use, and end the leases of dead readers."""

from __future__ import annotations

from pathlib import Path

from growcache.cache.dead_readers import end_dead_lease
from growcache.cache.directory import adopt, clear_cache, in_use_error, require_cache, take_over
from growcache.cache.files import (
    CacheLayout,
    allocated_tree,
    generation_paths,
    path_of_generation,
)
from growcache.cache.folders import foreign_paths
from growcache.cache.lease_views import LeaseView, survey_all_leases, survey_leases
from growcache.cache.locks import is_locked
from growcache.errors import CacheBusyError
from growcache.humanize import in_bytes, plural
from growcache.usercode import printable

SAMPLERS_END_SECONDS = 10.0  # that samplers of a dead service need to end
MAX_NAMED_STRANGERS = 3  # names of foreign files


def clear_question(root: Path) -> str:
    require_cache(CacheLayout(root))
    whole = root.absolute()
    return f"Delete {in_bytes(allocated_tree(whole))} of cached samples in {whole}?"


def empty_cache(root: Path) -> str:
    """Delete a cache's own files except its marker, its purge list and its locks.

    Returns:
        A text for the user.
    """
    require_cache(CacheLayout(root))
    whole = root.absolute()
    before = allocated_tree(whole)
    layouts = [CacheLayout(path) for path in generation_paths(whole)]
    for layout in layouts:
        _empty_generation(layout)
    freed = in_bytes(before - allocated_tree(whole))
    emptied = f"Emptied {whole}; freed {freed}."
    strangers = [str(path) for layout in layouts for path in foreign_paths(layout)]
    if not strangers:
        return emptied
    more = " …" if len(strangers) > MAX_NAMED_STRANGERS else ""
    shown = printable(", ".join(strangers[:MAX_NAMED_STRANGERS]) + more)
    return f"{emptied} Left in place, because it is not growcache's: {shown}."


def _empty_generation(layout: CacheLayout) -> None:
    require_cache(layout)  # even if an earlier clearing did not finish
    adopt(layout)
    if is_locked(layout.supervisor_lock):
        raise in_use_error(layout, "stop that service first")
    with take_over(layout, SAMPLERS_END_SECONDS):
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
        clear_cache(layout)


def release_readers(cache: Path, job: str | None) -> tuple[str, int]:
    """End the leases of dead readers. Return a text for the user, and the exit code."""
    layout = CacheLayout(cache)
    layout.require()
    views, foreign = survey_all_leases(cache)
    dead = [
        view for view in views if not view.open and not view.closed and job in (None, view.job)
    ]
    ended: list[LeaseView] = []
    refused: list[LeaseView] = []
    for view in dead:
        try:
            if end_dead_lease(
                CacheLayout(path_of_generation(cache, view.generation)), view.name
            ):
                ended.append(view)
        except PermissionError:
            refused.append(view)
    texts = [_released_text(ended, job)] if ended or not refused else []
    texts += [
        f"{view.name}.lease of job {view.job} belongs to another user; run this command as its "
        "owner"
        for view in refused
    ]
    if job is None:
        texts += [f"{lease}: {lease.advice}" for lease in foreign if lease.protects]
    blocked = refused or (job is None and any(lease.held is None for lease in foreign))
    return "\n".join(texts), int(bool(blocked))


def _released_text(ended: list[LeaseView], job: str | None) -> str:
    of_job = "" if job is None else f" of job {job}"
    if not ended:
        return f"Nothing to release: no dead reader{of_job} protects a shard."
    shards = {
        (view.generation, number)
        for view in ended
        if view.resumable
        for number in view.unfinished()
    }
    return (
        f"Released {plural(len(shards), 'shard')} that "
        f"{plural(len(ended), 'dead reader')}{of_job} protected."
    )
