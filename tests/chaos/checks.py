"""The invariants, as pure functions of observations that return violations as messages."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from growcache.cache.check import Finding
from growcache.cache.index.schema import CacheTotals
from growcache.cache.sidecar import Sidecar
from tests.chaos.content import changes, key_name
from tests.chaos.disk import Seen
from tests.chaos.flips import Flip
from tests.chaos.readers import Line

RESTART_SECONDS = 10.0  # the guarantee is 2 s; the rest allows for the load of this harness
PROGRESS_SECONDS = 90.0
RACE_SECONDS = 0.5  # a reader's clock and ours differ by a scheduling delay

# Messages that a loader may raise while the index is damaged.
_INDEX_WORDS = (
    "the index",
    "no cache at",
    "was removed",
    "has no samples yet",
    "is missing; repair",
)
_TENSORFLOW_DAMAGE = ("DataLossError", "corrupted record", "truncated record")


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The faults that readers met recently.

    Attributes:
        flips: Bits flipped in this round and the one before.
        index_faults: Spans (from, to) with a damaged or missing index, in monotonic seconds.
        full_disks: Spans (from, to) with a full disk.
    """

    flips: Sequence[Flip] = ()
    index_faults: Sequence[tuple[float, float]] = ()
    full_disks: Sequence[tuple[float, float]] = ()


def bound(seen: Seen) -> list[str]:
    """G1: allocated bytes never exceed the bound."""
    return [f"G1: {used:,} bytes in use, {most:,} allowed" for most, used in seen.over[:3]]


def totals(found: CacheTotals, lost_before: int, *, purging: bool = False) -> list[str]:
    """Samples do not vanish from the totals, nor shards from the disk.

    While shards are ``purging`` they count neither as live nor as evicted.
    """
    wrong = []
    balanced = found.drawn == found.samples + found.evicted_samples
    if not balanced and not purging and found.lost_shards == 0:
        wrong.append(
            f"totals: {found.drawn} drawn, but {found.samples} here and "
            f"{found.evicted_samples} evicted"
        )
    if found.lost_shards > lost_before:
        wrong.append(f"G6: {found.lost_shards - lost_before} live shards lost their files")
    return wrong


def findings(found: Iterable[Finding], damaged: set[int]) -> list[str]:
    """G2: ``check`` finds the deliberate damage, and nothing else."""
    return [
        f"G2: {finding.message}"
        for finding in found
        if finding.severity == "error" and finding.shard not in damaged
    ]


def holes(sidecar: Sidecar) -> list[str]:
    """Only rewritten or deleted objects become holes; a refusal by the store makes none."""
    return [
        f"shard {sidecar.number} has a hole of an object that never changed: {hole.reason}"
        for hole in sidecar.holes
        if not changes(hole.key)
    ]


def purged(sidecar: Sidecar, gone: Iterable[int]) -> list[str]:
    """A shard of a new snapshot has nothing of an object whose purge was reported as done."""
    named = {*sidecar.origins.keys, *(hole.key for hole in sidecar.holes)}
    found = sorted(named.intersection(map(key_name, gone)))
    return [f"purge: shard {sidecar.number} still has {found}"] if found else []


def exported(keys: Iterable[int], gone: Collection[int]) -> list[str]:
    """An export has no sample of a purged object."""
    found = sorted(set(keys).intersection(gone))
    return [f"purge: an export has samples of objects {found}"] if found else []


def delivered_purged(line: Line, gone: Mapping[int, float]) -> list[str]:
    """A pass that begins after a purge was reported delivers nothing of the object."""
    began = line.facts["since"]
    found = [key for key in line.facts["objects"] if gone.get(key, math.inf) < began]
    if not found:
        return []
    return [f"purge: {line.role} was given objects {found} in a pass of after their purge"]


def delivered_wrong(line: Line, now: Circumstances) -> list[str]:
    """G2: a wrong sample is delivered only if its shard was damaged after verification."""
    since = line.facts["since"] - RACE_SECONDS
    if any(flip.at >= since for flip in now.flips):
        return []
    facts = line.facts
    return [
        f"G2: {line.role} was given {facts['samples']} wrong samples, the first {facts['heads']}"
    ]


def reader_error(line: Line, now: Circumstances) -> list[str]:
    """G3: a reader raises only named errors, and only with a cause."""
    kind, message, since = line.facts["type"], line.facts["message"], line.facts["since"]
    if _within(line.at, now.index_faults) and any(w in message for w in _INDEX_WORDS):
        return []
    struck = any(flip.at >= since - RACE_SECONDS for flip in now.flips)
    if struck and any(w in kind + message for w in _TENSORFLOW_DAMAGE):
        return []
    return [f"G3: {line.role} ended with {kind}: {message}"]


def _within(at: float, spans: Iterable[tuple[float, float]]) -> bool:
    return any(first - RACE_SECONDS <= at <= last + RACE_SECONDS for first, last in spans)


def restart(seconds: float, *, ready: bool, words: str, load: float = 1.0) -> list[str]:
    """G6: the next start is quick and needs no intervention.

    Args:
        seconds: The duration of the start.
        ready: Whether the service then owned the cache.
        words: The end of its output.
        load: Runnable processes per core, as a measure of competing load.
    """
    if not ready:
        return [f"G6: the service did not start: {words}"]
    if seconds > RESTART_SECONDS * max(1.0, load):
        return [f"G6: the service took {seconds:.1f} s to start"]
    return []


def is_refusal(words: str, *, full: bool) -> bool:
    """Return whether a start was refused because a full disk had no block for the index."""
    return full and "no room on the disk for the index" in words


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Everything that is left after the service has stopped.

    Attributes:
        exit_code: The service's exit code.
        processes: Samplers that still run.
        locks: Lock files that are still held.
        temporary: Files that only a running service uses.
        errors: The errors of ``growcache check``, and its exit code.
    """

    exit_code: int = 0
    processes: Sequence[int] = ()
    locks: Sequence[str] = ()
    temporary: Sequence[str] = ()
    errors: Sequence[str] = field(default_factory=tuple)


def stopped(left: Leftovers) -> list[str]:
    """G7: a stopped service leaves no process, no held lock and no temporary file."""
    wrong = [f"G7: exit code {left.exit_code}"] if left.exit_code else []
    wrong += [f"G7: process {pid} runs on" for pid in left.processes]
    wrong += [f"G7: {lock} is held" for lock in left.locks]
    wrong += [f"G7: {name} was left" for name in left.temporary]
    return wrong + [f"G7: {error}" for error in left.errors]


def named(state: str, waiting_for: str | None) -> list[str]:
    """Liveness: a waiting service names the event that ends the wait."""
    if state not in ("waiting", "full", "shrinking") or waiting_for:
        return []
    return [f"liveness: the service is {state}, and names no event"]


def progress(drew: bool, waited_seconds: float, waiting_for: str | None) -> list[str]:
    """Liveness: without faults, samples are drawn or the awaited event is named."""
    if drew or waited_seconds < PROGRESS_SECONDS:
        return []
    awaited = f"it waits for {waiting_for}" if waiting_for else "and it names no event"
    return [f"liveness: nothing was drawn for {waited_seconds:.0f} s; {awaited}"]


def reading(role: str, silent_seconds: float) -> list[str]:
    """Liveness: without faults, every reader receives batches."""
    if silent_seconds < PROGRESS_SECONDS:
        return []
    return [f"liveness: {role} was given nothing for {silent_seconds:.0f} s"]
