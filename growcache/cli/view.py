"""A status as a picture for a terminal: a frame with one row for each question.

Rows that matter least are left out where the terminal is not high enough.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from growcache.cache.reader_status import ForeignLeaseStatus, JobStatus, LeaseStatus
from growcache.cache.status import Status, WorkerStatus
from growcache.cli.humanize import in_bytes, in_count, in_percent, in_time, plural, shorten_name
from growcache.cli.status_text import StatusHistory, state_meaning, status_sentence

FREE_PART = ("bright_black", "░")
# What takes the place of characters that a terminal without Unicode does not have.
TO_ASCII = str.maketrans("█▓▒▌░·", "#%+=.,")
SPARKS = "▁▂▃▄▅▆▇█"
ASCII_SPARKS = "._-=+*#@"
MAX_CURVE_WIDTH = 60
MIN_BAR_WIDTH = 4


@dataclass(frozen=True)
class Bar:
    """A bar of coloured parts over a total, as wide as there is room."""

    parts: Sequence[tuple[float, str, str]]  # amount, colour, character
    total: float
    width: int | None = None

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width or options.max_width, options.max_width)
        scale = width / max(self.total, sum(part[0] for part in self.parts), 1e-9)
        ends = [0.0]
        for amount, *_rest in self.parts:
            ends.append(ends[-1] + max(0.0, amount))
        cells = [round(end * scale) for end in ends]
        cells.append(width)
        looks = [*((colour, character) for _, colour, character in self.parts), FREE_PART]
        for (start, stop), (colour, character) in zip(pairwise(cells), looks, strict=True):
            shown = character.translate(TO_ASCII) if options.ascii_only else character
            yield Segment(shown * (stop - start), Style(color=colour))
        yield Segment.line()

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        width = min(self.width or options.max_width, options.max_width)
        return Measurement(min(MIN_BAR_WIDTH, width), width)


@dataclass(frozen=True)
class SampleCountCurve:
    """How the number of cached samples went, and over how long."""

    history: StatusHistory

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        words = f"  last {in_time(self.history.seconds())}"
        values = self.history.samples(min(options.max_width - len(words), MAX_CURVE_WIDTH))
        if not values:
            yield Text("watched from now on", style="dim")
            return
        top = max(values)
        sparks = ASCII_SPARKS if options.ascii_only else SPARKS
        line = (sparks[value * len(sparks) // (top + 1)] for value in values)
        yield Segment("".join(line), Style(color="green"))
        yield Segment(words)
        yield Segment.line()


@dataclass(frozen=True)
class TwoLineText:
    """A text of always two lines, for it may need them: nothing below it jumps.

    What is too long even for two is shortened where it names an object.
    """

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = wrap_shortened(self.text, console, options.max_width, 2)
        yield from lines
        if len(lines) < 2:
            yield Text("")


def wrap_shortened(text: Text, console: Console, width: int, most: int) -> list[Text]:
    """Return a text as so many lines at most; a text that is shortened has one style."""
    lines = list(text.wrap(console, width))
    room = most * width
    while len(lines) > most and room > most:
        room -= 1  # words leave ends of lines empty, so how much has to go is to be tried
        plain = shorten_name(text.plain, room)
        spans = [span for span in text.spans if span.end <= room // 2]
        lines = list(Text(plain, text.style, spans=spans).wrap(console, width))
    return lines


@dataclass(frozen=True)
class OneLineText:
    """A text on one line, shortened where it names an object."""

    text: str
    style: str = ""

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        short = shorten_name(self.text, options.max_width)
        yield Text(short, self.style, no_wrap=True, overflow="ellipsis")


@dataclass(frozen=True)
class DotSeparated:
    """Texts with dots between them; lines end between two of them, if they have to end."""

    pieces: Sequence[Text]
    before: Bar | None = None  # left of the first line, where both have room on it

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bar = self.before
        pieces = (
            [_ascii_text(piece) for piece in self.pieces] if options.ascii_only else self.pieces
        )
        dot = Text(" · ".translate(TO_ASCII) if options.ascii_only else " · ")
        whole = dot.join(pieces)
        if bar is not None and (bar.width or 0) + 1 + whole.cell_len <= options.max_width:
            yield from list(console.render(bar, options))[:-1]  # less its end of line
            yield Segment(" ")
        yield from _wrap_between(pieces, dot, options.max_width)


def _wrap_between(pieces: Sequence[Text], dot: Text, width: int) -> list[Text]:
    lines: list[Text] = []
    for piece in pieces:
        if lines and lines[-1].cell_len + dot.cell_len + piece.cell_len <= width:
            lines[-1] = dot.join([lines[-1], piece])
        else:
            lines.append(piece)
    return lines


def _ascii_text(text: Text) -> Text:
    return Text(text.plain.translate(TO_ASCII), text.style, spans=text.spans)


STATE_STYLES = {
    "running": "bold green",
    "complete": "bold cyan",
    "full": "bold cyan",
    "waiting": "bold yellow",
    "shrinking": "bold yellow",
    "stopped": "bold",
}
# Parts of the cache's bar: how they are called and drawn, also where there are no colours.
BAR_PARTS = (
    ("samples", "green", "█"),
    ("leaving", "yellow", "▓"),
    ("writing", "cyan", "▒"),
    ("index", "blue", "▌"),
)
MAX_WIDTH = 120  # a wider picture is harder to read, not easier
MAX_LISTED_WORKERS = 4
MAX_LISTED_READERS = 4
MAX_LISTED_JOBS = 4
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


TITLE_WIDTH = 17  # of the title, less the path
MAX_JOB_CHARACTERS = 24  # characters


@dataclass(frozen=True)
class StatusPicture:
    """A status as a frame with a row for each question one may have.

    Attributes:
        status: what it shows.
        history: if there is one, the growth is shown, too.
        height: lines there are; rows that matter least go where all of them are too many.
    """

    status: Status
    history: StatusHistory | None = None
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=min(options.max_width, MAX_WIDTH), height=None)
        rows = list(_all_rows(self.status, self.history))
        for dispensable in ("", *DISPENSABLE):
            rows = [row for row in rows if row[0] != dispensable]
            frame = _frame(rows, self.status, wide.max_width)
            lines = console.render_lines(frame, wide, pad=False)
            if self.height is None or len(lines) <= self.height:
                for drawn in lines:
                    yield from drawn
                    yield Segment.line()
                return
        yield from Text(status_sentence(self.status)).wrap(console, options.max_width)[
            : self.height
        ]


def status_view(
    status: Status, history: StatusHistory | None = None, height: int | None = None
) -> StatusPicture:
    """Return the picture of a status; see `StatusPicture`."""
    return StatusPicture(status, history, height)


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
            (_keep_end(status.path, max(8, width - TITLE_WIDTH)), "default bold"),
        ),
        subtitle=Text(_age_text(status), style="default"),
        title_align="left",
        subtitle_align="right",
        border_style="bright_black",
    )


def _all_rows(
    status: Status, history: StatusHistory | None
) -> Iterator[tuple[str, RenderableType]]:
    meaning = ("  ", state_meaning(status, history))
    style = STATE_STYLES.get(status.state, "bold")
    state = Text.assemble((status.state, style), *meaning)
    yield "state", state if history is None else TwoLineText(state)
    yield "cache", Group(_cache_bar(status), _cache_legend(status))
    yield "samples", _samples_row(status)
    if status.delivered:
        delivered = plural(status.delivered, "sample")
        sums = Text(f"{delivered} delivered (each {status.reuse:.1f} times)")
        yield "training", Group(sums, *_job_lines(status.jobs))
    if history is not None and (status.state != "stopped" or history.seconds()):
        yield "growth", SampleCountCurve(history)
    if status.state != "stopped":
        yield "rate", _rate_row(status)
    yield "coverage", _coverage_row(status)
    if status.sources:
        yield "sources", _sources_row(status)
    if status.subsets:
        yield "split", _split_row(status)
    yield "trouble", _trouble_row(status)
    if status.restart_for and status.state != "stopped":
        keys = ", ".join(status.restart_for)
        yield "config", Text(f"changed; restart the service for {keys}", style="yellow")
    if status.worker_states:
        yield "samplers", _samplers_row(_starting_not_restarting(status))
    yield "readers", _readers_row(status)


def _bar_amounts(status: Status) -> tuple[float, float, float, float]:
    """Return bytes of samples, of shards on their way out, being written, of all else."""
    overhead = status.budget_bytes + status.catalog_bytes
    if status.state == "stopped":  # nothing is set aside: all but the samples is overhead
        overhead = _overhead_bytes(status)
    samples = max(0, status.bytes - overhead - status.retired_bytes)
    return samples, status.retired_bytes, status.reserved_bytes, max(0, overhead)


def _overhead_bytes(status: Status) -> int:
    if not status.samples:
        return status.bytes
    if status.sample_bytes is None:
        return 0  # nobody says how large samples are, so all of it is called samples
    held = status.samples * status.sample_bytes + status.retired_bytes
    return max(status.bytes - held, status.catalog_bytes)


def _cache_bar(status: Status) -> Bar:
    amounts = _bar_amounts(status)
    parts = [
        (amount, colour, character)
        for amount, (_, colour, character) in zip(amounts, BAR_PARTS, strict=True)
    ]
    return Bar(parts, status.max_bytes)


def _cache_legend(status: Status) -> Group | Text:
    if not status.max_bytes:
        return Text(f"{in_bytes(status.bytes)} on disk; it has no bound before a service runs")
    used = status.bytes + status.reserved_bytes
    share = in_percent(used / status.max_bytes)
    *held, index = (
        _bar_legend(amount, *part)
        for amount, part in zip(_bar_amounts(status), BAR_PARTS, strict=True)
        if amount or part[0] in ("samples", "index")
    )
    free = _bar_legend(max(0, status.max_bytes - used), "free", *FREE_PART)
    whole = Text(f"{share} of {in_bytes(status.max_bytes)}")
    return Group(DotSeparated([whole, free, index]), DotSeparated(held))


def _bar_legend(amount: float, name: str, colour: str, character: str) -> Text:
    # Only the sign is coloured: blue letters cannot be read on a dark terminal.
    return Text.assemble((character, colour), f" {name} {in_bytes(amount)}")


def _samples_row(status: Status) -> DotSeparated:
    cached = Text(f"{in_count(status.samples)} cached in {plural(status.shards, 'shard')}")
    cached.stylize("bold green", 0, len(in_count(status.samples)))
    drawn, evicted = in_count(status.drawn), in_count(status.evicted_samples)
    return DotSeparated([cached, Text(f"{drawn} drawn"), Text(f"{evicted} evicted")])


def _rate_row(status: Status) -> DotSeparated:
    return DotSeparated(
        [
            Text(f"{in_count(status.samples_per_second)} samples/s", style="bold"),
            Text(f"{in_bytes(status.bytes_per_second)}/s from the store"),
            Text(f"{in_bytes(status.egress_bytes)} in this run"),
        ]
    )


def _coverage_row(status: Status) -> Text | DotSeparated:
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
    return DotSeparated([Text(words)], before=bar)


def _split_row(status: Status) -> DotSeparated:
    """Tell of each subset; the one that this cache is drawn from stands out."""
    return DotSeparated(
        [
            Text(
                f"{one.name}: {plural(one.objects, 'object')} in {plural(one.groups, 'group')}",
                style="bold" if one.used else "",
            )
            for one in status.subsets
        ]
    )


def _sources_row(status: Status) -> Group:
    """Tell of each source that is mixed: its share, and how far it was drawn."""
    return Group(
        *(
            DotSeparated(
                [
                    Text(f"{in_percent(one.share)} {shorten_name(one.url, 40)}"),
                    Text(
                        f"about {in_count(one.samples)} samples in {plural(one.objects, 'object')}"
                    ),
                    Text(f"drawn {one.rounds:.1f} times"),
                ]
            )
            for one in status.sources
        )
    )


def _trouble_row(status: Status) -> Text | Group:
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
        lines = [DotSeparated([Text(text, style="yellow") for text in found]), *lines]
    if status.last_errors:
        lines.append(OneLineText(f"last: {status.last_errors[-1]}", "dim"))
    return Group(*lines)


def _starting_not_restarting(status: Status) -> list[WorkerStatus]:
    """Return the samplers; before any of them has ended, none is being *re*started."""
    if status.restarts:
        return status.worker_states
    return [
        replace(worker, state="starting") if worker.state == "restarting" else worker
        for worker in status.worker_states
    ]


def _samplers_row(workers: Sequence[WorkerStatus]) -> Text | Group:
    if len(workers) > MAX_LISTED_WORKERS:
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


def _job_lines(jobs: Sequence[JobStatus]) -> Iterator[Text]:
    for job in jobs[-MAX_LISTED_JOBS:]:
        words = Text(no_wrap=True, overflow="ellipsis")
        words.append(shorten_name(job.name, MAX_JOB_CHARACTERS), style="bold")
        words.append(
            f"  {plural(job.delivered, 'sample')}, epoch {job.epoch}, waited "
            f"{job.waits.seconds:.1f} s ({job.waits.count} times)"
        )
        words.append(f"  {'pid' if job.open else 'ended, pid'} {job.pid}", style="dim")
        yield words
    if len(jobs) > MAX_LISTED_JOBS:
        yield Text(f"and {len(jobs) - MAX_LISTED_JOBS} jobs before")


def _readers_row(status: Status) -> Text | Group:
    leases = status.leases
    if not leases and not status.foreign_leases:
        return Text("none; nothing is held back from eviction", style="dim")
    lines = [_reader_line(lease, status.path) for lease in leases[:MAX_LISTED_READERS]]
    if len(leases) > MAX_LISTED_READERS:
        lines.append(Text(f"and {len(leases) - MAX_LISTED_READERS} more"))
    lines += [
        _foreign_lease_line(lease) for lease in status.foreign_leases[:MAX_LISTED_READERS]
    ]
    if len(status.foreign_leases) > MAX_LISTED_READERS:
        others = len(status.foreign_leases) - MAX_LISTED_READERS
        lines.append(Text(f"and {others} more that cannot be read"))
    return Group(*lines)


def _foreign_lease_line(lease: ForeignLeaseStatus) -> Text:
    pid = f", pid {lease.pid}" if lease.pid is not None else ""
    return Text.assemble(
        (f"uid {lease.uid}{pid}", "bold"),
        f"  {lease.name} cannot be read: {lease.reason}; {lease.advice}",
    )


def _reader_line(lease: LeaseStatus, path: str) -> Text:
    shards = plural(lease.shards, "shard")
    if not lease.open:
        left = "" if lease.seconds_left is None else f", for another {lease.seconds_left:.0f} s"
        return Text(
            f"kept for a dead reader: {shards}, job {shorten_name(lease.job, MAX_JOB_CHARACTERS)}"
            f" (pid {lease.pid}){left}; let go with: growcache release {path}"
        )
    holds = f"holds {shards} for {in_time(lease.age_seconds)}"
    words = Text(no_wrap=True, overflow="ellipsis")
    words.append(shorten_name(lease.job, MAX_JOB_CHARACTERS), style="bold")
    words.append(f"  {holds}  ")
    words.append(f"pid {lease.pid} on {lease.host}: {lease.command}", style="dim")
    return words


def _age_text(status: Status) -> str:
    if status.state == "stopped":
        return f"stopped {_ago_text(status.updated_at)}" if status.updated_at else ""
    return f"pid {status.pid} on {status.host} · running for {in_time(status.uptime_seconds)}"


def _ago_text(at: float | None) -> str:
    return f"{in_time(time.time() - at)} ago" if at else ""


def _keep_end(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[-(width - 1) :]
