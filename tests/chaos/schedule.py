"""The faults of a round, and their times: a pure function of (seed, round)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

SUPERVISOR, SAMPLER = "supervisor", "sampler"
TORCH, TENSORFLOW, STOPPED, UNFINISHED = "torch", "tensorflow", "stopped", "unfinished"
RESUMABLE = "resumable"  # takes states, so its leases are kept when it dies
READERS = (TORCH, TENSORFLOW, STOPPED, UNFINISHED, RESUMABLE)
ROLES = (SUPERVISOR, SAMPLER, *READERS)

# How often each role is killed. TensorFlow is killed least, because it takes seconds to start.
_KILLS = {
    SUPERVISOR: 5,
    SAMPLER: 7,
    TORCH: 2,
    TENSORFLOW: 1,
    STOPPED: 4,
    UNFINISHED: 4,
    RESUMABLE: 4,
}
_PAUSES = {SUPERVISOR: 3, SAMPLER: 3, TORCH: 1, TENSORFLOW: 1, UNFINISHED: 1}

# The moment at which the service is killed, if it comes in time; "any" is a random one.
AIMS = ("any", "reserved", "incoming", "installing", "deleting")

KILL, PAUSE, GO_ON = "kill", "pause", "go on"
FILL, FREE = "fill the disk", "free the disk"
FLIP_SHARD, FLIP_SIDECAR, FLIP_INDEX, NO_INDEX = (
    "flip in a shard", "flip in a sidecar", "flip in the index", "remove the index",
)  # fmt: skip
REWRITE, DELETE, RESTORE = "rewrite an object", "delete an object", "restore an object"
BOUND, STOP, OUTAGE, RECOVER = "change the bound", "stop", "outage", "recover"
STORM, STORM_ENDS = "refuse most requests", "serve again"
EXPIRE, RENEW = "let credentials expire", "renew credentials"
BAD_KEY = "have one key fail, or answer again"
PURGE = "purge an object"
FOREIGN_LEASE = "put a file that is no lease among the leases"

STOP_EVERY = 12  # rounds; a clean stop, which must leave nothing behind
CALM_EVERY = 6  # rounds; all faults end, and everything must make progress


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """A fault that is injected.

    Attributes:
        at: Seconds from the start of the round.
        kind: The kind of fault.
        role: The process that it hits, if it hits one.
        aim: The moment to wait for before the fault.
        luck: A number in 0..1 for every further choice.
    """

    at: float
    kind: str
    role: str = ""
    aim: str = "any"
    luck: float = 0.0

    def __str__(self) -> str:
        what = " ".join(filter(None, (self.kind, self.role)))
        return f"{self.at:.2f} s: {what}" + (f" when {self.aim}" if self.aim != "any" else "")


@dataclass(frozen=True, slots=True)
class Round:
    """A few seconds of faults.

    Attributes:
        number: The round's number, from 0.
        seconds: Its duration without the checks.
        link: The link's faults during the round; see `slowlink.Faults`.
        faults: The other faults, in order of time.
        calm: Whether all faults end after the round, and progress is required.
    """

    number: int
    seconds: float
    link: dict[str, float] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    calm: bool = False


def plan(seed: int, number: int, kinds: frozenset[str]) -> Round:
    """Return a round.

    Args:
        seed: The seed of the whole run.
        number: The round's number.
        kinds: The kinds of faults that this machine and version support.
    """
    dice = random.Random(f"{seed}/{number}")
    seconds = dice.uniform(2.5, 5.0)
    faults = [fault for fault in _faults(dice, number, seconds) if fault.kind in kinds]
    return Round(
        number, seconds, _link(dice), tuple(sorted(faults)), calm=not (number + 1) % CALM_EVERY
    )


def _link(dice: random.Random) -> dict[str, float]:
    bad = dice.random() < 0.6
    return {
        "latency_seconds": dice.uniform(0, 0.02),
        "bytes_per_second": dice.choice([0, 0, 4e6, 1e6]),
        "unavailable": dice.uniform(0, 0.05) if bad else 0.0,
        "resets": dice.uniform(0, 0.03) if bad else 0.0,
        "stalls": dice.uniform(0, 0.02) if bad else 0.0,
        "truncated": dice.uniform(0, 0.03) if bad else 0.0,
        "stall_seconds": dice.uniform(0.2, 3.0),
        "fault_after_bytes": dice.randrange(0, 2000),
        "slow": 0.02 if dice.random() < 0.5 else 0.0,
        "slow_seconds": dice.uniform(2, 6),
    }


def _faults(dice: random.Random, number: int, seconds: float) -> Iterator[Fault]:
    def at(until: float = 1.0) -> float:
        return round(dice.uniform(0, seconds * until), 3)

    for _ in range(dice.choice([2, 3, 3])):
        aim = dice.choice(AIMS)
        yield Fault(at(), KILL, _chosen(dice, _KILLS), aim, dice.random())
    for kind, chance in _CHANCES.items():
        if dice.random() < chance:
            yield Fault(at(), kind, luck=dice.random())
    for first, last, chance, longest in _SPANS:
        if dice.random() < chance:
            role = _chosen(dice, _PAUSES) if first == PAUSE else ""
            begin = at(0.7)
            yield Fault(begin, first, role, luck=dice.random())
            yield Fault(begin + dice.uniform(0.1, longest), last, role)
    if not (number + 1) % STOP_EVERY:
        for _ in range(2):  # for `check --repair` to find
            yield Fault(0.9 * seconds, FLIP_SHARD, luck=dice.random())
        yield Fault(seconds, STOP, luck=dice.random())


_CHANCES = {
    FLIP_SHARD: 0.8,
    FLIP_SIDECAR: 0.15,
    FLIP_INDEX: 0.1,
    NO_INDEX: 0.03,
    REWRITE: 0.25,
    DELETE: 0.15,
    RESTORE: 0.4,
    BOUND: 0.12,
    BAD_KEY: 0.1,
    PURGE: 0.35,
    FOREIGN_LEASE: 0.15,
}
_SPANS = (
    (PAUSE, GO_ON, 0.5, 2.0),
    (FILL, FREE, 0.3, 1.5),
    (OUTAGE, RECOVER, 0.1, 1.5),
    (STORM, STORM_ENDS, 0.2, 3.0),
    (EXPIRE, RENEW, 0.15, 3.0),
)
EVERYTHING = frozenset(_CHANCES) | {
    KILL, PAUSE, GO_ON, FILL, FREE, STOP, OUTAGE, RECOVER, STORM, STORM_ENDS, EXPIRE, RENEW
}  # fmt: skip


def _chosen(dice: random.Random, weights: dict[str, int]) -> str:
    return dice.choices(list(weights), list(weights.values()))[0]
