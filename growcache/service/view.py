"""A status as a picture for the terminal, to be understood at a glance."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from growcache.cache.reader_status import ForeignLeaseStatus, JobStatus, LeaseStatus
from growcache.cache.status import Status, WorkerStatus
from growcache.service.drawing import FREE, Bar, Curve, OneLine, Pieces, Steady
from growcache.service.history import History
from growcache.service.words import in_bytes, in_count, in_percent, in_time, plural, shortened

STATE_STYLES = {
    "running": "bold green",
    "complete": "bold cyan",
    "full": "bold cyan",
    "waiting": "bold yellow",
    "shrinking": "bold yellow",
    "stopped": "bold",
}
# Parts of the cache's bar: how they are called and drawn, also where there are no colours.
PARTS = (
    ("samples", "green", "█"),
    ("leaving", "yellow", "▓"),
    ("writing", "cyan", "▒"),
    ("index", "blue", "▌"),
)
MOST_WIDTH = 120  # a wider picture is harder to read, not easier
LISTED_WORKERS = 4
LISTED_READERS = 4
LISTED_JOBS = 4
# Rows that go where there are not lines enough, first those that are missed least.
DISPENSABLE = (
    "samplers",
    "readers",
    "growth",
    "training",
    "split",
    "coverage",
    "rate",
    "trouble",
)
ALL = 0.9999
TITLE_WIDTH = 17  # of the title, less the path
LONGEST_JOB = 24  # characters
STARVED_SECONDS = 10.0  # twice as long as rates look back


@dataclass(frozen=True)
class Picture:
    """A status as a frame with a row for each question one may have.

    Attributes:
        status: what it shows.
        history: if there is one, the growth is shown, too.
        height: lines there are; rows that matter least go where all of them are too many.
    """

    status: Status
    history: History | None = None
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=min(options.max_width, MOST_WIDTH), height=None)
        rows = list(_rows(self.status, self.history))
        for dispensable in ("", *DISPENSABLE):
            rows = [row for row in rows if row[0] != dispensable]
            frame = _frame(rows, self.status, wide.max_width)
            lines = console.render_lines(frame, wide, pad=False)
            if self.height is None or len(lines) <= self.height:
                for drawn in lines:
                    yield from drawn
                    yield Segment.line()
                return
        yield from Text(line(self.status)).wrap(console, options.max_width)[: self.height]


def view(status: Status, history: History | None = None, height: int | None = None) -> Picture:
    """Return the picture of a status; see `Picture`."""
    return Picture(status, history, height)


def line(status: Status) -> str:
    """Return a status in one line of plain text."""
    parts = [
        f"{status.state}: {_meaning(status, None)}",
        f"{plural(status.samples, 'sample')} in {plural(status.shards, 'shard')}",
        f"{in_bytes(status.bytes)} of {in_bytes(status.max_bytes)}",
        f"{in_count(status.drawn)} drawn",
    ]
    if status.coverage is not None:
        parts.append(f"{in_percent(status.coverage)} covered")
    if status.failures:
        parts.append(plural(status.failures, "failed attempt"))
    if status.holes:
        parts.append(plural(status.holes, "hole"))
    if status.set_aside.parts:
        parts.append(f"{plural(status.set_aside.parts, 'part')} set aside")
    return " · ".join(parts)


def _frame(rows: Sequence[tuple[str, RenderableType]], status: Status, width: int) -> Panel:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(style="bold", no_wrap=True, min_width=8)
    grid.add_column(ratio=1)
    for label, content in rows:
        grid.add_row(label, content)
    return Panel(
        grid,
        # "default": a frame's own colour is too faint to be read on a light terminal.
        title=Text.assemble(
            ("growcache  ", "default"),
            (_tail(status.path, max(8, width - TITLE_WIDTH)), "default bold"),
        ),
        subtitle=Text(_age(status), style="default"),
        title_align="left",
        subtitle_align="right",
        border_style="bright_black",
    )


def _rows(status: Status, history: History | None) -> Iterator[tuple[str, RenderableType]]:
    meaning = ("  ", _meaning(status, history))
    style = STATE_STYLES.get(status.state, "bold")
    state = Text.assemble((status.state, style), *meaning)
    yield "state", state if history is None else Steady(state)
    yield "cache", Group(_cache_bar(status), _cache_words(status))
    yield "samples", _samples(status)
    if status.delivered:
        delivered = plural(status.delivered, "sample")
        sums = Text(f"{delivered} delivered (each {status.reuse:.1f} times)")
        yield "training", Group(sums, *_jobs(status.jobs))
    if history is not None and (status.state != "stopped" or history.seconds()):
        yield "growth", Curve(history)
    if status.state != "stopped":
        yield "rate", _rate(status)
    yield "coverage", _coverage(status)
    if status.sources:
        yield "sources", _sources(status)
    if status.subsets:
        yield "split", _split(status)
    yield "trouble", _trouble(status)
    if status.restart_for and status.state != "stopped":
        keys = ", ".join(status.restart_for)
        yield "config", Text(f"changed; restart the service for {keys}", style="yellow")
    if status.worker_states:
        yield "samplers", _workers(_renamed(status))
    yield "readers", _readers(status)


def _meaning(status: Status, history: History | None) -> str:
    """Say in a sentence what the state means, and what ends it."""
    if status.state == "waiting":
        return f"for {status.waiting_for}" if status.waiting_for else "for the next report"
    if status.state == "stopped":
        if status.complete:
            return f"no service runs, and none is needed: {_completed(status)}"
        return "no service runs on this cache; start one: growcache run CONFIG"
    if status.state == "complete":
        return f"{_completed(status)}; nothing more is drawn"
    if status.state == "shrinking":
        awaited = f"; it waits for {status.waiting_for}" if status.waiting_for else ""
        return f"max_bytes was lowered to {in_bytes(status.target_bytes)}{awaited}"
    if status.waiting_for:
        return f"samplers wait for {status.waiting_for}"
    if _starved(status):
        return "nothing has come from the store lately; samplers keep trying"
    if status.state == "full" or status.full:
        return "at its bound; " + _turning_over(status)
    return _filling(status, history)


def _completed(status: Status) -> str:
    """Say why nothing will ever be added: there is no more, or it may hold no more."""
    if status.coverage is not None and status.coverage < ALL:
        return "it holds all that it may, and nothing leaves"
    return "everything that can be read is cached" if status.holes else "everything is cached"


def _starved(status: Status) -> bool:
    """Whether samplers read, and have got nothing for some time."""
    return (
        status.uptime_seconds > STARVED_SECONDS
        and not status.bytes_per_second
        and not status.samples_per_second
        and any(worker.state == "reading" for worker in status.worker_states)
    )


def _turning_over(status: Status) -> str:
    if status.retired_bytes and any(w.state == "waiting" for w in status.worker_states):
        leaving = plural(status.retired_shards or 1, "old shard")
        return f"samplers wait until readers have let go of {leaving}"
    return "each new shard takes the place of an old one"


def _filling(status: Status, history: History | None) -> str:
    if history is not None and history.seconds() >= 3 and history.growth() > 0:
        full = (status.max_bytes - status.bytes - status.reserved_bytes) / history.growth()
        whole = _samples_left(status) / max(1e-9, history.sample_growth())
        end = "all of it cached" if whole < full else "full"
        return f"filling; {end} in about {in_time(max(1, min(whole, full)))}"
    return "filling; the first shards are small, to start soon" if status.ramping else "filling"


def _samples_left(status: Status) -> float:
    """Return how many samples were never drawn; infinity where nobody knows."""
    if status.coverage is None or not status.population_samples:
        return math.inf
    return status.population_samples * (1 - status.coverage)


def _cache_parts(status: Status) -> tuple[float, float, float, float]:
    """Return bytes of samples, of shards on their way out, being written, of all else."""
    overhead = status.budget_bytes + status.catalog_bytes
    if status.state == "stopped":  # nothing is set aside: all but the samples is overhead
        overhead = _overhead(status)
    samples = max(0, status.bytes - overhead - status.retired_bytes)
    return samples, status.retired_bytes, status.reserved_bytes, max(0, overhead)


def _overhead(status: Status) -> int:
    if not status.samples:
        return status.bytes
    if status.sample_bytes is None:
        return 0  # nobody says how large samples are, so all of it is called samples
    held = status.samples * status.sample_bytes + status.retired_bytes
    return max(status.bytes - held, status.catalog_bytes)


def _cache_bar(status: Status) -> Bar:
    amounts = _cache_parts(status)
    parts = [
        (amount, colour, character)
        for amount, (_, colour, character) in zip(amounts, PARTS, strict=True)
    ]
    return Bar(parts, status.max_bytes)


def _cache_words(status: Status) -> Group | Text:
    if not status.max_bytes:
        return Text(f"{in_bytes(status.bytes)} on disk; it has no bound before a service runs")
    used = status.bytes + status.reserved_bytes
    share = in_percent(used / status.max_bytes)
    *held, index = (
        _of_bar(amount, *part)
        for amount, part in zip(_cache_parts(status), PARTS, strict=True)
        if amount or part[0] in ("samples", "index")
    )
    free = _of_bar(max(0, status.max_bytes - used), "free", *FREE)
    whole = Text(f"{share} of {in_bytes(status.max_bytes)}")
    return Group(Pieces([whole, free, index]), Pieces(held))


def _of_bar(amount: float, name: str, colour: str, character: str) -> Text:
    # Only the sign is coloured: blue letters cannot be read on a dark terminal.
    return Text.assemble((character, colour), f" {name} {in_bytes(amount)}")


def _samples(status: Status) -> Pieces:
    cached = Text(f"{in_count(status.samples)} cached in {plural(status.shards, 'shard')}")
    cached.stylize("bold green", 0, len(in_count(status.samples)))
    drawn, evicted = in_count(status.drawn), in_count(status.evicted_samples)
    return Pieces([cached, Text(f"{drawn} drawn"), Text(f"{evicted} evicted")])


def _rate(status: Status) -> Pieces:
    return Pieces(
        [
            Text(f"{in_count(status.samples_per_second)} samples/s", style="bold"),
            Text(f"{in_bytes(status.bytes_per_second)}/s from the store"),
            Text(f"{in_bytes(status.egress_bytes)} in this run"),
        ]
    )


def _coverage(status: Status) -> Text | Pieces:
    found = status.objects - status.unmatched
    drawn = next((one.objects for one in status.subsets if one.used), found)
    objects = plural(drawn, "object")
    if status.unmatched:
        objects += f", {status.unmatched:,} unmatched ones left out"
    if status.endless:
        return Text("unknown: your function draws, from as many samples as it likes")
    if not status.listing_complete:
        if status.state == "stopped":
            seen = f"; {objects} so far" if status.objects else ""
            return Text(f"not known, for no listing came to its end{seen}")
        return Text(f"known when the listing is complete; {objects} so far")
    if status.coverage is None or not status.population_samples:
        return Text(f"not known yet; {objects}")
    words = (
        f"{in_percent(status.coverage)} of about "
        f"{in_count(status.population_samples)} samples in {objects}"
    )
    bar = Bar([(status.coverage, "magenta", "█")], 1.0, width=20)
    return Pieces([Text(words)], before=bar)


def _split(status: Status) -> Pieces:
    """Tell of each subset; the one that this cache is drawn from stands out."""
    return Pieces(
        [
            Text(
                f"{one.name}: {plural(one.objects, 'object')} in {plural(one.groups, 'group')}",
                style="bold" if one.used else "",
            )
            for one in status.subsets
        ]
    )


def _sources(status: Status) -> Group:
    """Tell of each source that is mixed: its share, and how far it was drawn."""
    return Group(
        *(
            Pieces(
                [
                    Text(f"{in_percent(one.share)} {shortened(one.url, 40)}"),
                    Text(
                        f"about {in_count(one.samples)} samples in {plural(one.objects, 'object')}"
                    ),
                    Text(f"drawn {one.rounds:.1f} times"),
                ]
            )
            for one in status.sources
        )
    )


def _trouble(status: Status) -> Text | Group:
    found = [
        text
        for number, text in (
            (status.failures, plural(status.failures, "failed attempt") + " (tried again)"),
            (status.holes, plural(status.holes, "hole") + " (unreadable, left out)"),
            (status.empty_visits, plural(status.empty_visits, "object") + " without a sample"),
            (status.restarts, plural(status.restarts, "sampler restart")),
        )
        if number
    ]
    aside = status.set_aside.words
    lines: list[RenderableType] = [Text(aside, style="yellow")] if aside else []
    if not found and not lines:
        return Text("none", style="dim")
    if found:
        lines = [Pieces([Text(text, style="yellow") for text in found]), *lines]
    if status.last_errors:
        lines.append(OneLine(f"last: {status.last_errors[-1]}", "dim"))
    return Group(*lines)


def _renamed(status: Status) -> list[WorkerStatus]:
    """Return the samplers; before any of them has ended, none is being *re*started."""
    if status.restarts:
        return status.worker_states
    return [
        replace(worker, state="starting") if worker.state == "restarting" else worker
        for worker in status.worker_states
    ]


def _workers(workers: Sequence[WorkerStatus]) -> Text | Group:
    if len(workers) > LISTED_WORKERS:
        states = [worker.state for worker in workers]
        counts = {state: states.count(state) for state in dict.fromkeys(states)}
        return Text(" · ".join(f"{number} {state}" for state, number in counts.items()))
    grid = Table.grid(padding=(0, 1))
    for column in range(4):
        grid.add_column(no_wrap=column != 2)
    for worker in workers:
        bar: RenderableType = ""
        progress = ""
        if worker.parts:
            bar = Bar([(worker.parts_done, "cyan", "█")], worker.parts, width=20)
            progress = f"{worker.parts_done} of {plural(worker.parts, 'read')}"
        grid.add_row(f"{worker.id}", f"{worker.state:<10}", bar, progress)
    return Group(grid)


def _jobs(jobs: Sequence[JobStatus]) -> Iterator[Text]:
    for job in jobs[-LISTED_JOBS:]:
        words = Text(no_wrap=True, overflow="ellipsis")
        words.append(shortened(job.name, LONGEST_JOB), style="bold")
        words.append(
            f"  {plural(job.delivered, 'sample')}, epoch {job.epoch}, waited "
            f"{job.waits.seconds:.1f} s ({job.waits.count} times)"
        )
        words.append(f"  {'pid' if job.open else 'ended, pid'} {job.pid}", style="dim")
        yield words
    if len(jobs) > LISTED_JOBS:
        yield Text(f"and {len(jobs) - LISTED_JOBS} jobs before")


def _readers(status: Status) -> Text | Group:
    leases = status.leases
    if not leases and not status.foreign_leases:
        return Text("none; nothing is held back from eviction", style="dim")
    lines = [_reader(lease, status.path) for lease in leases[:LISTED_READERS]]
    if len(leases) > LISTED_READERS:
        lines.append(Text(f"and {len(leases) - LISTED_READERS} more"))
    lines += [_foreign(lease) for lease in status.foreign_leases[:LISTED_READERS]]
    if len(status.foreign_leases) > LISTED_READERS:
        others = len(status.foreign_leases) - LISTED_READERS
        lines.append(Text(f"and {others} more that cannot be read"))
    return Group(*lines)


def _foreign(lease: ForeignLeaseStatus) -> Text:
    pid = f", pid {lease.pid}" if lease.pid is not None else ""
    return Text.assemble(
        (f"uid {lease.uid}{pid}", "bold"),
        f"  {lease.name} cannot be read: {lease.reason}; {lease.advice}",
    )


def _reader(lease: LeaseStatus, path: str) -> Text:
    shards = plural(lease.shards, "shard")
    if not lease.open:
        left = "" if lease.seconds_left is None else f", for another {lease.seconds_left:.0f} s"
        return Text(
            f"kept for a dead reader: {shards}, job {shortened(lease.job, LONGEST_JOB)}"
            f" (pid {lease.pid}){left}; let go with: growcache release {path}"
        )
    holds = f"holds {shards} for {in_time(lease.age_seconds)}"
    words = Text(no_wrap=True, overflow="ellipsis")
    words.append(shortened(lease.job, LONGEST_JOB), style="bold")
    words.append(f"  {holds}  ")
    words.append(f"pid {lease.pid} on {lease.host}: {lease.command}", style="dim")
    return words


def _age(status: Status) -> str:
    if status.state == "stopped":
        return f"stopped {_ago(status.updated_at)}" if status.updated_at else ""
    return f"pid {status.pid} on {status.host} · running for {in_time(status.uptime_seconds)}"


def _ago(at: float | None) -> str:
    return f"{in_time(time.time() - at)} ago" if at else ""


def _tail(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[-(width - 1) :]
