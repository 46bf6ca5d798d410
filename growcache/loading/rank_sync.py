"""The ranks of a job read one snapshot: rank 0 takes it, and the others copy its list.

Ranks communicate only through their leases, so a dead rank's notes disappear with it. Rank 0
takes a snapshot and settles its lease. It enters the pass only when every other rank has its
own lease on the same list; until then rank 0's lease protects the shards for all. So no two
ranks plan different passes, and none is ahead by more than one. A rank holds a lease as long as
it reads.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from growcache.cache.files import CacheLayout, path_of_generation
from growcache.cache.index.reader import IndexView, read_index
from growcache.cache.lease_views import (
    LeaseCounters,
    LeaseView,
    RankNote,
    ReaderProcess,
    survey_all_leases,
)
from growcache.cache.reader_lease import Lease
from growcache.errors import CacheError, ConfigError
from growcache.loading.options import LoaderOptions, launch_id
from growcache.loading.snapshot import Snapshot
from growcache.loading.snapshot_choice import take_new_snapshot
from growcache.loading.waiting import Backoff, WaitControl, wait_for_room, waking_on_change

WARN_SECONDS = 5.0  # of waiting for other ranks, before a warning
PATIENCE_SECONDS = 1800.0  # for ranks that were never seen, as in torch.distributed

T = TypeVar("T")

_log = logging.getLogger(__name__)
_walk_numbers: defaultdict[tuple[str, str, int], Iterator[int]] = defaultdict(itertools.count)


class RankGroup(Protocol):
    def offers(self, pass_number: int) -> bool:
        """Whether another rank offers this snapshot."""

    def announcing(self, pass_number: int, watch: WaitControl) -> WaitControl:
        """Return a control for a wait that makes the other ranks release their shards, too."""

    def take(self, pass_number: int, watch: WaitControl, view: IndexView) -> Snapshot | None:
        """Return the snapshot of a pass, or None if ``watch`` stopped the wait."""

    def leave(self) -> None:
        """End a wait without a snapshot."""

    def settle(self, snapshot: Snapshot, watch: WaitControl) -> None:
        """Wait until the snapshot is final, so that its pass may be entered."""

    def substituting_lease(self, pass_number: int, watch: WaitControl) -> LeaseView | None:
        """Return rank 0's lease of the rest of a pass, on other ranks; None there if stopped."""

    def substituting_note(self, pass_number: int, copied: LeaseView | None) -> RankNote:
        """Return the note for this rank's lease of that rest."""


def next_rank_note(options: LoaderOptions) -> RankNote:
    """Return the next note. The iterating thread calls this, so that all ranks count alike."""
    return RankNote(
        run=launch_id(os.environ, os.getppid()),
        walk=next(_walk_numbers[str(options.root), options.job, options.ranks.local_rank]),
        pass_number=0,
        rank=options.ranks.local_rank,
        ranks=options.ranks.local_world_size,
        settings=options.alike,
    )


def rank_group(options: LoaderOptions, note: RankNote) -> RankGroup:
    return (_Leader if options.ranks.leads else _Follower)(options, note)


def resume_note(options: LoaderOptions, pass_number: int) -> RankNote | None:
    """Return the note for a resumed pass, on rank 0.

    Only rank 0 counts its uses, and no rank copies its list, which is in every state.
    """
    ranks = options.ranks
    if ranks.leads:
        return None
    return RankNote("", -1, pass_number, ranks.local_rank, ranks.local_world_size)


class _Leader:
    def __init__(self, options: LoaderOptions, note: RankNote) -> None:
        self._options = options
        self._note = note
        self._names: list[str] = []  # of the leases of the latest two passes
        self._seen_processes: dict[int, ReaderProcess] = {}  # by rank
        self._presence: Lease | None = None  # while no shard may be held

    def offers(self, pass_number: int) -> bool:
        return False

    def announcing(self, pass_number: int, watch: WaitControl) -> WaitControl:
        note = replace(self._note, pass_number=pass_number)

        def on_long_wait() -> None:
            if self._presence is None:
                self._presence = _presence_lease(self._options, note, watch)
                if self._presence is not None:
                    self._names.append(self._presence.name)
            watch.on_long_wait()

        return replace(watch, on_long_wait=on_long_wait)

    def take(self, pass_number: int, watch: WaitControl, view: IndexView) -> Snapshot | None:
        note = replace(self._note, pass_number=pass_number)
        return take_new_snapshot(self._options, watch, view, note)

    def substituting_lease(self, pass_number: int, watch: WaitControl) -> LeaseView | None:
        return None

    def substituting_note(self, pass_number: int, copied: LeaseView | None) -> RankNote:
        return replace(self._note, walk=_resumed(self._note.walk), pass_number=pass_number)

    def leave(self) -> None:
        if self._presence is not None:
            self._presence.close()
            self._presence = None

    def settle(self, snapshot: Snapshot, watch: WaitControl) -> None:
        name = snapshot.lease.name
        self._names = [*self._names[-2:], name]
        snapshot.lease.settle()
        gone: set[int] = set()

        def missing() -> set[int]:
            return set(range(1, self._note.ranks)) - self._followers([name], over=True)

        def all_here() -> bool | None:
            nonlocal gone
            left = missing()
            absent = (left & self._seen_processes.keys()) - self._followers(self._names)
            # A second look finds a rank that was just changing leases.
            over, gone = absent & gone, absent
            self._refuse_dead(over)
            return True if left <= over else None

        try:
            _wait_for_ranks(
                self._options,
                all_here,
                watch,
                lambda: f"{_rank_names(missing())} to take the same snapshot",
                patient=lambda: bool(self._seen_processes),
            )
        finally:
            self.leave()
        self._followers([name])

    def _refuse_dead(self, ranks: set[int]) -> None:
        """Raise CacheError for dead ranks, but not for closed loaders and invisible processes."""
        for rank in sorted(ranks):
            process = self._seen_processes[rank]
            if process.has_ended:
                raise CacheError(
                    f"rank {rank} of job {self._options.job} (pid {process.pid} on {process.host}) ended while "
                    "rank 0 goes on; start all ranks of the job again",
                    code="GC704",
                )

    def _followers(self, names: list[str], *, over: bool = False) -> set[int]:
        found = {
            lease.ranks.rank: lease.process
            for lease in _leases_of_all(self._options.root)
            if (lease.open or over) and lease.ranks is not None and lease.ranks.follows in names
        }
        self._seen_processes.update(found)
        return set(found)


class _Follower:
    def __init__(self, options: LoaderOptions, note: RankNote) -> None:
        self._options = options
        self._note = note
        self._copied_lease = ""  # lease of rank 0 that was copied last
        self._leader_process: ReaderProcess | None = None  # of rank 0

    def offers(self, pass_number: int) -> bool:
        return _of_pass(self._leader(), pass_number) is not None

    def announcing(self, pass_number: int, watch: WaitControl) -> WaitControl:
        return watch

    def leave(self) -> None:
        pass

    def take(self, pass_number: int, watch: WaitControl, view: IndexView) -> Snapshot | None:
        present: list[Lease] = []
        try:
            return self._take(pass_number, watch, present)
        finally:
            for lease in present:
                lease.close()

    def _take(
        self, pass_number: int, watch: WaitControl, present: list[Lease]
    ) -> Snapshot | None:
        absences = 0

        def settled() -> LeaseView | None:
            nonlocal absences
            leases = self._leader()
            if (lease := _of_pass(leases, pass_number)) is not None:
                return lease
            if leases and not leases[0].numbers and not present:
                follows = replace(
                    self._note, pass_number=pass_number, follows=leases[0].name, settings={}
                )
                if (own := _presence_lease(self._options, follows, watch)) is not None:
                    present.append(own)
                watch.on_long_wait()
            if self._copied_lease:
                # A second look finds a rank that was just changing leases.
                absences = 0 if leases else absences + 1
                if absences > 1:
                    raise self._leader_gone()
            elif leases:
                self._refuse_other(leases[0], pass_number)
            return None

        while not watch.stopped():
            lease = _wait_for_ranks(
                self._options,
                settled,
                watch,
                lambda: f"rank 0 to take the snapshot of pass {pass_number}",
                patient=lambda: bool(self._copied_lease or present),
            )
            if lease is not None and (snapshot := self._copied(lease, watch)) is not None:
                return snapshot
        return None

    def settle(self, snapshot: Snapshot, watch: WaitControl) -> None:
        pass

    def substituting_lease(self, pass_number: int, watch: WaitControl) -> LeaseView | None:
        walk = _resumed(self._note.walk)
        return _wait_for_ranks(
            self._options,
            lambda: _of_pass(self._leader(walk), pass_number),
            watch,
            lambda: f"rank 0 to choose shards for the rest of pass {pass_number}",
            patient=lambda: False,
        )

    def substituting_note(self, pass_number: int, copied: LeaseView | None) -> RankNote:
        assert copied is not None
        return replace(
            self._note,
            walk=_resumed(self._note.walk),
            pass_number=pass_number,
            follows=copied.name,
            settings={},
        )

    def _leader(self, walk: int | None = None) -> list[LeaseView]:
        mine, found = self._note if walk is None else replace(self._note, walk=walk), []
        for lease in _leases_of_all(self._options.root):
            note = lease.ranks
            if note is None or note.rank or not lease.open or lease.job != self._options.job:
                continue
            if (note.run, note.walk) != (mine.run, mine.walk):
                continue
            if self._leader_process in (None, lease.process):
                found.append(lease)
        return sorted(found, key=lambda lease: -lease.created)

    def _copied(self, lease: LeaseView, watch: WaitControl) -> Snapshot | None:
        assert lease.ranks is not None
        _refuse_unlike(self._note, lease.ranks)
        options = self._options
        note = replace(
            self._note, pass_number=lease.ranks.pass_number, follows=lease.name, settings={}
        )
        snapshot = wait_for_room(
            lambda: Snapshot.copy(
                path_of_generation(options.root, lease.generation),
                lease,
                job=options.job,
                verify=options.verify,
                ranks=note,
            ),
            watch.wake,
            watch.stopped,
        )
        if snapshot is None:
            return None
        self._copied_lease, self._leader_process = lease.name, lease.process
        if not self._protected(lease, snapshot):
            snapshot.close()
            raise self._leader_gone()
        return snapshot

    def _protected(self, lease: LeaseView, snapshot: Snapshot) -> bool:
        """Whether no shard can have been deleted before it was leased here.

        Rank 0 may have ended after it saw this lease. Shards that are live then were never
        released.
        """
        if lease.name in {view.name for view in self._leader()}:
            return True
        live = {
            row.number for row in read_index(snapshot.view.root or self._options.root).shards
        }
        return live.issuperset(row.number for row in snapshot.shards)

    def _refuse_other(self, lease: LeaseView, pass_number: int) -> None:
        found = lease.ranks.pass_number if lease.ranks else None
        if found != pass_number:
            raise CacheError(
                f"rank {self._note.rank} of job {self._options.job} starts with pass "
                f"{pass_number}, but rank 0 with pass {found}; iterate and load states in the "
                "same way on all ranks",
                code="GC703",
            )

    def _leader_gone(self) -> CacheError:
        process = self._leader_process
        named = f" (pid {process.pid} on {process.host})" if process else ""
        return CacheError(
            f"rank 0 of job {self._options.job}{named} ended, or closed its loader, while "
            "other ranks continue; start all ranks of the job again",
            code="GC704",
        )


def _resumed(walk: int) -> int:
    """Return the number of the rest of a resumed pass, which differs from those of later passes."""
    return -1 - walk


def _presence_lease(options: LoaderOptions, note: RankNote, watch: WaitControl) -> Lease | None:
    return wait_for_room(
        lambda: Lease.create(
            options.root, options.job, (), ranks=note, counters=LeaseCounters(counts=True)
        ),
        watch.wake,
        watch.stopped,
    )


def _leases_of_all(root: Path) -> list[LeaseView]:
    """Return the leases of every generation, because rank 0 chooses the generation."""
    return survey_all_leases(root)[0]


def _of_pass(leases: Iterable[LeaseView], pass_number: int) -> LeaseView | None:
    for lease in leases:
        if lease.settled and lease.ranks and lease.ranks.pass_number == pass_number:
            return lease
    return None


def _refuse_unlike(mine: RankNote, leader: RankNote) -> None:
    for name, value in mine.settings.items():
        found = leader.settings.get(name)
        if found != value:
            raise ConfigError(
                f"{name} must be equal on all ranks: rank 0 has {found!r}, rank {mine.rank} "
                f"has {value!r}",
                code="GC703",
            )


def _rank_names(ranks: set[int]) -> str:
    """Return the ranks as text.

    >>> _rank_names({2, 1})
    'ranks 1, 2'
    """
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, sorted(ranks)))}"


def _wait_for_ranks(
    options: LoaderOptions,
    look: Callable[[], T | None],
    watch: WaitControl,
    event: Callable[[], str],
    *,
    patient: Callable[[], bool],
) -> T | None:
    if (found := look()) is not None:
        return found
    began, warned, pause = time.monotonic(), False, Backoff(watch.wake)
    with waking_on_change(CacheLayout(options.root).leases, watch.wake):
        while not watch.stopped():
            watch.wake.clear()
            if watch.stopped():
                break
            if (found := look()) is not None:
                return found
            waited = time.monotonic() - began
            who = f"rank {options.ranks.local_rank} of job {options.job} in {options.root}"
            if waited > PATIENCE_SECONDS and not patient():
                raise CacheError(
                    f"{who} waited {waited:.0f} s for {event()}; set LOCAL_RANK and "
                    "LOCAL_WORLD_SIZE for ranks on several machines, and the same MASTER_PORT "
                    "for ranks started in separate shells",
                    code="GC704",
                )
            if waited > WARN_SECONDS and not warned:
                _log.warning("%s waits for %s", who, event())
                warned = True
            pause.wait()
    return None
