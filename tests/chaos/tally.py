"""Counts of everything that happened in a run, and their table for the documentation."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.disk import Seen
from tests.chaos.schedule import ROLES
from tests.chaos.states import STATES
from tests.servers.slowlink import Counts

BEGIN, END = "<!-- chaos: written by make chaos -->", "<!-- chaos: end -->"


@dataclass(slots=True)
class Tally:
    """The counts of a run, to which the harness adds.

    Attributes:
        seed: The seed of the run.
        server: The S3 server.
        own_disk: Whether the cache had a file system of its own.
        rounds: The number of rounds.
        minutes: Their duration.
        kills: By (role, "all") and (role, state that some file was in).
        events: All other faults, by name.
        flips: By (kind, how it was found).
        starts: The seconds of each start after a kill.
        samples: Verified samples, by the reader's role.
        readers_ended: Readers that ended with a named error and a cause.
        raced: Deliveries with a bit that was flipped after verification.
        drawn: Drawn samples.
        redrawn: Shards drawn a second time, with equal bytes.
        seen: The observations of the disk's watcher.
        link: Traffic of the link.
        violations: Messages.
    """

    seed: int
    server: str = ""
    own_disk: bool = True
    rounds: int = 0
    minutes: float = 0.0
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    flips: Counter[tuple[str, str]] = field(default_factory=Counter)
    starts: list[float] = field(default_factory=list)
    samples: Counter[str] = field(default_factory=Counter)
    readers_ended: Counter[str] = field(default_factory=Counter)
    raced: int = 0
    drawn: int = 0
    redrawn: int = 0
    seen: Seen = field(default_factory=Seen)
    link: Counts = field(default_factory=Counts)
    violations: list[str] = field(default_factory=list)

    def killed(self, role: str, states: Iterable[str]) -> None:
        """Count a kill, once for every state that some file was in."""
        self.kills[role, "all"] += 1
        for state in states:
            self.kills[role, state] += 1

    @property
    def all_kills(self) -> int:
        """The number of kills of all roles."""
        return sum(self.kills[role, "all"] for role in ROLES)


def markdown(tally: Tally) -> str:
    """Return the tally as the documentation shows it."""
    memory = psutil.virtual_memory().total / 2**30
    disk = "a tmpfs of its own" if tally.own_disk else "a shared file system (never filled)"
    watched = (
        f"The disk was looked at {tally.seen.looks:,} times, at most "
        f"{tally.seen.longest_gap_seconds * 1000:.0f} ms apart. Most bytes in use: "
        f"{tally.seen.most_bytes:,}."
    )
    samples = ", ".join(f"{role} {count:,}" for role, count in sorted(tally.samples.items()))
    lines = [
        f"Seed {tally.seed}, {tally.minutes:.0f} minutes, {tally.rounds} rounds, on "
        f"{os.cpu_count()} cores with {memory:.0f} GiB, cache on {disk}. Store: {tally.server} "
        f"behind a link that refused {tally.link.unavailable:,} of {tally.link.requests:,} "
        f"requests, reset {tally.link.resets:,} and stalled {tally.link.stalls:,}.",
        "",
        f"**{tally.all_kills} kills, {tally.events['full disks']} full disks, "
        f"{sum(tally.flips.values())} bit flips, {len(tally.violations)} violations.** "
        f"{tally.drawn:,} samples were drawn; {tally.redrawn} shards were drawn twice, with equal "
        f"bytes. Verified by readers: {samples}.",
        "",
        *_kills(tally),
        "",
        *_flips(tally),
        "",
        *_events(tally),
        "",
        watched,
        *_starts(tally),
    ]
    return "\n".join(lines)


def _kills(tally: Tally) -> list[str]:
    columns = ["all", *STATES]
    rows = [f"| kill -9 of | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    for role in ROLES:
        counts = " | ".join(str(tally.kills[role, column]) for column in columns)
        rows.append(f"| {role} | {counts} |")
    return [*rows, "", "A kill counts in every state that a file had at that moment."]


def _flips(tally: Tally) -> list[str]:
    rows = ["| bit flips | found by | count |", "| --- | --- | ---: |"]
    for (kind, outcome), count in sorted(tally.flips.items()):
        rows.append(f"| {kind.removeprefix('flip ')} | {outcome} | {count} |")
    return [
        *rows,
        "",
        f"Delivered, because they flipped between check and copy: {tally.raced}.",
    ]


def _events(tally: Tally) -> list[str]:
    rows = ["| what else | count |", "| --- | ---: |"]
    rows += [f"| {name} | {count} |" for name, count in sorted(tally.events.items())]
    rows += [
        f"| readers that ended with a named error: {why} | {count} |"
        for why, count in sorted(tally.readers_ended.items())
    ]
    return rows


def _starts(tally: Tally) -> list[str]:
    if not tally.starts:
        return []
    return [
        f"{len(tally.starts)} starts after a kill: median {statistics.median(tally.starts):.2f} s, "
        f"longest {max(tally.starts):.2f} s."
    ]


def write_section(page: Path, text: str) -> None:
    """Put the text between the markers of a page, which are added below its heading."""
    before = page.read_text(encoding="utf-8")
    if BEGIN not in before:
        before = before.replace("## Chaos runs\n", f"## Chaos runs\n\n{BEGIN}\n{END}\n", 1)
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")
