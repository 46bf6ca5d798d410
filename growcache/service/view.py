"""A status as a picture for the terminal, to be understood at a glance."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from growcache.cache.status import LeaseStatus, Status, WorkerStatus
from growcache.service.words import in_bytes, in_count, in_percent, in_time, plural

STATE_STYLES = {
    "running": "bold green",
    "complete": "bold cyan",
    "full": "bold cyan",
    "waiting": "bold yellow",
    "shrinking": "bold yellow",
    "stopped": "bold red",
}
# Parts of the cache's bar: how they are called, and drawn with and without Unicode.
PARTS = (
    ("samples", "green", "█", "#"),
    ("leaving", "yellow", "▓", "%"),
    ("writing", "cyan", "▒", "+"),
    ("index", "blue", "█", "="),
)
FREE = ("bright_black", "░", ".")
SPARKS = "▁▂▃▄▅▆▇█"
ASCII_SPARKS = "._-=+*#@"
CURVE_WIDTH = 60
MOST_WIDTH = 120  # a wider picture is harder to read, not easier
LISTED_WORKERS = 4
LISTED_READERS = 4
RATE_SECONDS = 30.0


@dataclass
class History:
    """The recent past of a cache, for its curve and its growth rate.

    Points are thinned as the time they span grows, so that it never holds many.
    """

    capacity: int = 240
    points: list[tuple[float, int, int]] = field(default_factory=list)
    spacing: float = 0.25

    def add(self, at: float, status: Status) -> None:
        """Remember (time, samples, bytes), unless the last point is close."""
        if self.points and at - self.points[-1][0] < self.spacing:
            return
        self.points.append((at, status.samples, status.bytes))
        if len(self.points) > self.capacity:
            self.points = self.points[::2]
            self.spacing *= 2

    def seconds(self) -> float:
        """Return how far back it goes."""
        return self.points[-1][0] - self.points[0][0] if self.points else 0.0

    def growth(self) -> float:
        """Return bytes per second by which the cache grew lately."""
        if not self.points:
            return 0.0
        end, _, size = self.points[-1]
        start, _, before = next(p for p in self.points if p[0] >= end - RATE_SECONDS)
        return (size - before) / (end - start) if end > start else 0.0

    def samples(self, width: int) -> list[int]:
        """Return the number of cached samples at ``width`` evenly spaced times."""
        if len(self.points) < 2:
            return []
        start, end = self.points[0][0], self.points[-1][0]
        curve, position = [], 0
        for column in range(width):
            at = start + (end - start) * column / max(1, width - 1)
            while position + 1 < len(self.points) and self.points[position + 1][0] <= at:
                position += 1
            curve.append(self.points[position][1])
        return curve


@dataclass(frozen=True)
class Bar:
    """A bar of coloured parts over a total, as wide as there is room."""

    parts: Sequence[tuple[float, str, str, str]]  # amount, colour, character, ASCII character
    total: float
    width: int | None = None

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width or options.max_width, options.max_width)
        scale = width / max(self.total, sum(part[0] for part in self.parts), 1e-9)
        ends = [0.0]
        for amount, *_rest in self.parts:
            ends.append(ends[-1] + max(0.0, amount))
        cells = [round(end * scale) for end in ends]
        for (start, stop), (_amount, colour, full, plain) in zip(
            pairwise(cells), self.parts, strict=True
        ):
            character = plain if options.ascii_only else full
            yield Segment(character * (stop - start), Style(color=colour))
        colour, empty, plain = FREE
        rest = width - cells[-1]
        yield Segment((plain if options.ascii_only else empty) * rest, Style(color=colour))
        yield Segment.line()

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        width = min(self.width or options.max_width, options.max_width)
        return Measurement(width, width)


@dataclass(frozen=True)
class Curve:
    """How the number of cached samples went, and over how long."""

    history: History

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        words = f"  in {in_time(self.history.seconds())}"
        values = self.history.samples(min(options.max_width - len(words), CURVE_WIDTH))
        top = max(values, default=0)
        sparks = ASCII_SPARKS if options.ascii_only else SPARKS
        line = (sparks[value * len(sparks) // (top + 1)] for value in values)
        yield Segment("".join(line), Style(color="green"))
        yield Segment(words)
        yield Segment.line()


@dataclass(frozen=True)
class Steady:
    """A text that always takes two lines, for it may need them: nothing below it jumps."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self.text.wrap(console, options.max_width)
        yield from lines
        if len(lines) < 2:
            yield Text("")


def view(status: Status, history: History | None = None) -> Constrain:
    """Return the picture of a status; with a history it shows the growth, too."""
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(ratio=1)
    for label, content in _rows(status, history):
        rows.add_row(label, content)
    picture = Panel(
        rows,
        title=Text.assemble("growcache  ", (_tail(status.path, 48), "bold")),
        subtitle=Text(_age(status), style="dim"),
        title_align="left",
        subtitle_align="right",
        border_style="bright_black",
    )
    return Constrain(picture, MOST_WIDTH)


def line(status: Status) -> str:
    """Return a status in one line of plain text."""
    return " · ".join(
        (
            f"{status.state}: {_meaning(status, None)}",
            f"{in_count(status.samples)} samples in {plural(status.shards, 'shard')}",
            f"{in_bytes(status.bytes)} of {in_bytes(status.max_bytes)}",
            f"{in_count(status.drawn)} drawn",
        )
    )


def _rows(status: Status, history: History | None) -> Iterator[tuple[str, RenderableType]]:
    meaning = ("  ", _meaning(status, history))
    style = STATE_STYLES.get(status.state, "bold")
    state = Text.assemble((status.state, style), *meaning)
    yield "state", state if history is None else Steady(state)
    yield "cache", Group(_cache_bar(status), _cache_words(status))
    yield "samples", _samples(status)
    if status.delivered:
        delivered = f"{in_count(status.delivered)} samples delivered"
        yield "training", Text(f"{delivered} (each {status.reuse:.1f} times)")
    if history is not None:
        yield "growth", Curve(history)
    if status.state != "stopped":
        yield "rate", _rate(status)
    yield "coverage", _coverage(status)
    yield "trouble", _trouble(status)
    if status.worker_states:
        yield "samplers", _workers(status.worker_states)
    yield "readers", _readers(status.leases)


def _meaning(status: Status, history: History | None) -> str:
    """Say in a sentence what the state means, and what ends it."""
    if status.state == "waiting":
        return f"for {status.waiting_for}" if status.waiting_for else "for the next report"
    if status.state == "stopped":
        if status.complete:
            return "no service runs, and none is needed: all there is has been cached"
        return "no service runs on this cache; start one with: growcache run CONFIG"
    if status.state == "complete":
        return "all there is has been cached; nothing more is drawn"
    if status.state == "shrinking":
        return "max_bytes was lowered; shards leave as their readers finish"
    if status.waiting_for:
        return f"samplers wait for {status.waiting_for}"
    if status.state == "full" or status.evicted_samples:
        return "at its bound; " + _turning_over(status)
    return _filling(status, history)


def _turning_over(status: Status) -> str:
    if status.retired_bytes and any(w.state == "waiting" for w in status.worker_states):
        leaving = plural(status.retired_shards or 1, "old shard")
        return f"samplers wait until readers have let go of {leaving}"
    return "each new shard takes the place of an old one"


def _filling(status: Status, history: History | None) -> str:
    if history is not None and history.seconds() >= 3 and history.growth() > 0:
        left = status.max_bytes - status.bytes - status.reserved_bytes
        return f"filling; full in about {in_time(max(1, left / history.growth()))}"
    return "filling; the first shards are small, to start soon" if status.ramping else "filling"


def _cache_parts(status: Status) -> tuple[float, float, float, float]:
    """Return bytes of samples, of shards on their way out, being written, of all else."""
    overhead = status.budget_bytes + status.catalog_bytes
    if status.state == "stopped":  # nothing is set aside: all but the samples is overhead
        known = status.samples * (status.sample_bytes or 0)
        overhead = status.bytes - status.retired_bytes - known
        overhead = max(overhead, status.catalog_bytes) if known else status.bytes
    samples = max(0, status.bytes - overhead - status.retired_bytes)
    return samples, status.retired_bytes, status.reserved_bytes, max(0, overhead)


def _cache_bar(status: Status) -> Bar:
    amounts = _cache_parts(status)
    parts = [
        (amount, colour, character, plain)
        for amount, (_, colour, character, plain) in zip(amounts, PARTS, strict=True)
    ]
    return Bar(parts, status.max_bytes)


def _cache_words(status: Status) -> Text:
    used = status.bytes + status.reserved_bytes
    share = in_percent(used / status.max_bytes) if status.max_bytes else "0 %"
    words = Text(f"{share} of {in_bytes(status.max_bytes)}")
    words.append(f" · free {in_bytes(max(0, status.max_bytes - used))}\n", style="dim")
    parts = [
        Text(f"{name} {in_bytes(amount)}", style=colour)
        for amount, (name, colour, _, _) in zip(_cache_parts(status), PARTS, strict=True)
        if amount or name == "samples"
    ]
    return words.append(Text(" · ").join(parts))


def _samples(status: Status) -> Text:
    return Text.assemble(
        (in_count(status.samples), "bold green"),
        f" cached in {plural(status.shards, 'shard')} · ",
        f"{in_count(status.drawn)} drawn · {in_count(status.evicted_samples)} evicted",
    )


def _rate(status: Status) -> Text:
    return Text.assemble(
        (f"{in_count(status.samples_per_second)} samples/s", "bold"),
        f" · {in_bytes(status.bytes_per_second)}/s from the store · "
        f"{in_bytes(status.egress_bytes)} in this run",
    )


def _coverage(status: Status) -> Text | Group:
    objects = plural(status.objects, "object")
    if not status.listing_complete:
        return Text(f"known when the listing is complete; {objects} so far")
    if status.coverage is None or not status.population_samples:
        return Text(f"not known yet; {objects}")
    words = (
        f" {in_percent(status.coverage)} of about "
        f"{in_count(status.population_samples)} samples in {objects}"
    )
    grid = Table.grid()
    bar = Bar([(status.coverage, "magenta", "█", "#")], 1.0, width=20)
    grid.add_row(bar, words)
    return Group(grid)


def _trouble(status: Status) -> Text | Group:
    found = [
        text
        for number, text in (
            (status.failures, plural(status.failures, "failed attempt") + " (tried again)"),
            (status.holes, plural(status.holes, "hole") + " (unreadable, left out)"),
            (status.restarts, plural(status.restarts, "sampler restart")),
        )
        if number
    ]
    if not found:
        return Text("none", style="dim")
    words = Text(" · ".join(found), style="yellow")
    if not status.last_errors:
        return words
    last = Text(f"last: {status.last_errors[-1]}", "dim", no_wrap=True, overflow="ellipsis")
    return Group(words, last)


def _workers(workers: Sequence[WorkerStatus]) -> Text | Group:
    if len(workers) > LISTED_WORKERS:
        states = [worker.state for worker in workers]
        counts = {state: states.count(state) for state in dict.fromkeys(states)}
        return Text(" · ".join(f"{number} {state}" for state, number in counts.items()))
    grid = Table.grid(padding=(0, 1))
    for worker in workers:
        progress = (
            f"{worker.parts_done} of {plural(worker.parts, 'read')}" if worker.parts else ""
        )
        bar = Bar([(worker.parts_done, "cyan", "█", "#")], max(1, worker.parts), width=20)
        grid.add_row(f"{worker.id}", f"{worker.state:<10}", bar, progress)
    return Group(grid)


def _readers(leases: Sequence[LeaseStatus]) -> Text | Group:
    if not leases:
        return Text("none; nothing is held back from eviction", style="dim")
    lines = [_reader(lease) for lease in leases[:LISTED_READERS]]
    if len(leases) > LISTED_READERS:
        lines.append(Text(f"and {len(leases) - LISTED_READERS} more"))
    return Group(*lines)


def _reader(lease: LeaseStatus) -> Text:
    shards = plural(lease.shards, "shard")
    holds = (
        f"holds {shards} for {in_time(lease.age_seconds)}"
        if lease.open
        else f"has ended; {shards} kept for its return"
    )
    words = Text(no_wrap=True, overflow="ellipsis")
    words.append(lease.job, style="bold")
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
