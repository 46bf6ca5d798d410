"""What must hold, as functions of what was seen; each returns the violations in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from growcache.cache.check import Finding
from growcache.cache.index.schema import CacheTotals
from growcache.cache.sidecar import Sidecar
from tests.chaos.content import changes
from tests.chaos.disk import Seen
from tests.chaos.flips import Flip
from tests.chaos.readers import Line

RESTART_SECONDS = 10.0  # the promise is 2 s; the rest is for everything else that runs here
PROGRESS_SECONDS = 90.0
RACE_SECONDS = 0.5  # a reader's clock and ours differ by a scheduling delay

# What a loader may raise while there is something wrong with the index.
_INDEX_WORDS = ("the index", "no cache at", "was removed", "has no samples yet")
_TENSORFLOW_DAMAGE = ("DataLossError", "corrupted record", "truncated record")


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What readers had to live with lately.

    Attributes:
        flips: of this round and the one before.
        index_faults: when an index was damaged or missing: (from, to), monotonic seconds.
        full_disks: when there was no room: (from, to).
    """

    flips: Sequence[Flip] = ()
    index_faults: Sequence[tuple[float, float]] = ()
    full_disks: Sequence[tuple[float, float]] = ()


def bound(seen: Seen) -> list[str]:
    """G1: at no look was more allocated than allowed."""
    return [f"G1: {used:,} bytes in use, {most:,} allowed" for most, used in seen.over[:3]]


def totals(found: CacheTotals, lost_before: int) -> list[str]:
    """Samples do not vanish from the books, and shards not from the disk."""
    wrong = []
    if found.drawn != found.samples + found.evicted_samples and found.lost_shards == 0:
        wrong.append(
            f"totals: {found.drawn} drawn, but {found.samples} here and "
            f"{found.evicted_samples} evicted"
        )
    if found.lost_shards > lost_before:
        wrong.append(f"G6: {found.lost_shards - lost_before} live shards lost their files")
    return wrong


def findings(found: Iterable[Finding], damaged: set[int]) -> list[str]:
    """G2: ``check`` finds what was damaged on purpose, and nothing else."""
    return [
        f"G2: {finding.message}"
        for finding in found
        if finding.severity == "error" and finding.shard not in damaged
    ]


def holes(sidecar: Sidecar) -> list[str]:
    """Only an object that was rewritten or deleted is a hole; a store's refusals are none."""
    return [
        f"shard {sidecar.number} has a hole of an object that never changed: {hole.reason}"
        for hole in sidecar.holes
        if not changes(hole.key)
    ]


def delivered_wrong(line: Line, now: Circumstances) -> list[str]:
    """G2: nothing wrong is delivered but what was damaged after it had been verified."""
    since = line.facts["since"] - RACE_SECONDS
    if any(flip.at >= since for flip in now.flips):
        return []
    facts = line.facts
    return [
        f"G2: {line.role} was given {facts['samples']} wrong samples, the first {facts['heads']}"
    ]


def reader_error(line: Line, now: Circumstances) -> list[str]:
    """G3: a reader meets no error but a named one, for which there is a reason."""
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
    """G6: the next start is quick, and needs nobody.

    Args:
        seconds: that it took.
        ready: whether it owned the cache then.
        words: its last ones.
        load: processes that want to run, per core: what others have of the machine.
    """
    if not ready:
        return [f"G6: the service did not start: {words}"]
    if seconds > RESTART_SECONDS * max(1.0, load):
        return [f"G6: the service took {seconds:.1f} s to start"]
    return []


def is_refusal(words: str, *, full: bool) -> bool:
    """Whether a start was refused because there was not one block left for the index."""
    return full and "no room on the disk for the index" in words


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What lies about after the service was stopped.

    Attributes:
        exit_code: of the service.
        processes: samplers that still run.
        locks: lock files that somebody holds.
        temporary: files that only a running service has a use for.
        errors: what ``growcache check`` found, and its exit code.
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
    """Liveness: whoever waits names the event that ends the wait."""
    if state not in ("waiting", "full", "shrinking") or waiting_for:
        return []
    return [f"liveness: the service is {state}, and names no event"]


def progress(drew: bool, waited_seconds: float, waiting_for: str | None) -> list[str]:
    """Liveness: with nothing wrong any more, samples are drawn, or the event is named."""
    if drew or waited_seconds < PROGRESS_SECONDS:
        return []
    awaited = f"it waits for {waiting_for}" if waiting_for else "and it names no event"
    return [f"liveness: nothing was drawn for {waited_seconds:.0f} s; {awaited}"]


def reading(role: str, silent_seconds: float) -> list[str]:
    """Liveness: with nothing wrong any more, every reader is served."""
    if silent_seconds < PROGRESS_SECONDS:
        return []
    return [f"liveness: {role} was given nothing for {silent_seconds:.0f} s"]
