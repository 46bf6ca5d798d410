"""``growcache release``: let go of what readers that died still protect."""

from __future__ import annotations

from pathlib import Path

from growcache.cache.files import Layout
from growcache.cache.leases import LeaseView, end_dead_lease, survey_leases
from growcache.service.words import plural


def release_readers(cache: Path, job: str | None) -> tuple[str, int]:
    """End the leases of dead readers; return what to say, and the exit code.

    A service that runs heeds that within a moment, the next one at its start.

    Args:
        cache: its folder.
        job: whose readers; None for all.

    Raises:
        CacheMissingError: there is no cache.
    """
    layout = Layout(cache)
    layout.require()
    views, foreign = survey_leases(layout.root)
    dead = [
        view for view in views if not view.open and not view.closed and job in (None, view.job)
    ]
    ended, refused = _ended(layout, dead)
    said = [_said(ended, job)] if ended or not refused else []
    said += [
        f"{view.name}.lease of job {view.job} is another user's: run this as its owner"
        for view in refused
    ]
    if job is None:
        said += [f"{lease}: {lease.advice}" for lease in foreign if lease.protects]
    blocked = refused or (job is None and any(lease.held is None for lease in foreign))
    return "\n".join(said), int(bool(blocked))


def _ended(layout: Layout, dead: list[LeaseView]) -> tuple[list[LeaseView], list[LeaseView]]:
    ended, refused = [], []
    for view in dead:
        try:
            if end_dead_lease(layout, view.name):
                ended.append(view)
        except PermissionError:
            refused.append(view)
    return ended, refused


def _said(ended: list[LeaseView], job: str | None) -> str:
    of_job = "" if job is None else f" of job {job}"
    if not ended:
        return f"Nothing to let go of: no dead reader{of_job} protects a shard."
    shards = {number for view in ended if view.resumable for number in view.unfinished()}
    return (
        f"Let go of {plural(len(shards), 'shard')} that {plural(len(ended), 'dead reader')}"
        f"{of_job} protected."
    )
