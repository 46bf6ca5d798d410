"""A status as a picture for a terminal: a frame with one row for each question.

Rows that matter least are left out where the terminal is not high enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from growcache.cache.reader_status import ForeignLeaseStatus, JobStatus, LeaseStatus
from growcache.cache.status import Status
from growcache.cli.humanize import (
    in_bytes,
    in_count,
    in_percent,
    in_time,
    keep_end,
    plural,
    shorten_name,
)
from growcache.cli.status_text import (
    StatusHistory,
    coverage_text,
    state_meaning,
    status_sentence,
    trouble_texts,
)

# Of a terminal without Unicode.
TO_ASCII = str.maketrans("▁▂▃▄▅▆▇█▓▒▌░·…", "._-~=+*#%+=.,.")
SPARKS = "▁▂▃▄▅▆▇█"
MAX_CURVE_WIDTH = 60
MIN_BAR_WIDTH = 4
SMALL_BAR_WIDTH = 20
MAX_WIDTH = 120  # a wider picture is harder to read, not easier
MAX_LISTED = 4  # jobs, samplers, readers
TITLE_WIDTH = 17  # less the path
MAX_JOB_CHARACTERS = 24
STATE_STYLES = {
    "running": "bold green",
    "complete": "bold cyan",
    "full": "bold cyan",
    "waiting": "bold yellow",
    "shrinking": "bold yellow",
}
# Parts of the cache's bar: their names, colours and characters, which differ without colours, too.
BAR_PARTS = (
    ("samples", "green", "█"),
    ("leaving", "yellow", "▓"),
    ("writing", "cyan", "▒"),
    ("index", "blue", "▌"),
)
FREE_PART = ("free", "bright_black", "░")


@dataclass(frozen=True)
class Bar:
    """A bar of parts (amount, colour, character) over a total, as wide as there is room."""

    parts: Sequence[tuple[float, str, str]]
    total: float
    width: int | None = None

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width or options.max_width, options.max_width)
        amounts = [max(0.0, part[0]) for part in self.parts]
        scale = width / max(self.total, sum(amounts), 1e-9)
        cells = [round(end * scale) for end in accumulate(amounts, initial=0.0)] + [width]
        styles = [*(part[1:] for part in self.parts), FREE_PART[1:]]
        for (start, stop), (colour, character) in zip(pairwise(cells), styles, strict=True):
            yield Segment(character * (stop - start), Style(color=colour))
        yield Segment.line()

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        width = min(self.width or options.max_width, options.max_width)
        return Measurement(min(MIN_BAR_WIDTH, width), width)


@dataclass(frozen=True)
class SampleCountCurve:
    """How the number of cached samples went, and over how long."""

    history: StatusHistory

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        span = f"  last {in_time(self.history.span_seconds())}"
        values = self.history.curve(min(options.max_width - len(span), MAX_CURVE_WIDTH))
        if len(values) < 2:
            yield Text("watched from now on", style="dim")
            return
        top = max(values) + 1
        line = "".join(SPARKS[value * len(SPARKS) // top] for value in values)
        yield Text.assemble((line, "green"), span)


@dataclass(frozen=True)
class ShortenedText:
    """A text of at most ``lines`` lines, shortened where it names an object.

    With ``fill`` it always takes them, so that nothing below it jumps.
    """

    text: Text
    lines: int = 1
    fill: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        lines = list(self.text.wrap(console, width))
        room = self.lines * width
        while len(lines) > self.lines and room > self.lines:
            room -= 1  # words leave ends of lines empty, so how much has to go is to be tried
            plain = shorten_name(self.text.plain, room)
            spans = [span for span in self.text.spans if span.end <= room // 2]
            lines = list(Text(plain, self.text.style, spans=spans).wrap(console, width))
        yield from lines
        yield from [Text("")] * ((self.lines - len(lines)) * self.fill)


@dataclass(frozen=True)
class DotSeparated:
    """Texts with dots between them; a line ends between two of them, if it has to end.

    A ``bar`` stands left of the texts where both have room on one line.
    """

    texts: Sequence[Text]
    bar: Bar | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        dot = Text(" · ")
        width = dot.join(self.texts).cell_len
        if self.bar is not None and (self.bar.width or 0) + 1 + width <= options.max_width:
            yield from list(console.render(self.bar, options))[:-1]  # less its end of line
            yield Segment(" ")
        lines: list[Text] = []
        for text in self.texts:
            if lines and lines[-1].cell_len + dot.cell_len + text.cell_len <= options.max_width:
                lines[-1] = dot.join([lines[-1], text])
            else:
                lines.append(text)
        yield from lines


@dataclass(frozen=True)
class StatusPicture:
    """A status as a frame with a row for each question one may have.

    With a history the growth is shown, too. Rows that matter least go where all of them have
    more lines than ``height``.
    """

    status: Status
    history: StatusHistory | None = None
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=min(options.max_width, MAX_WIDTH), height=None)
        drawn = [(name, row(self.status, self.history)) for name, row in ROWS.items()]
        rows = {name: content for name, content in drawn if content is not None}
        for dispensable in ("", *DISPENSABLE):
            rows.pop(dispensable, None)
            frame = _frame(rows, self.status, wide.max_width)
            lines = console.render_lines(frame, wide, pad=False)
            if self.height is None or len(lines) <= self.height:
                break
        else:
            sentence = Text(status_sentence(self.status)).wrap(console, options.max_width)
            lines = [list(line.render(console)) for line in sentence[: self.height]]
        for text, style, control in (segment for line in lines for segment in [*line, END]):
            shown = text.translate(TO_ASCII) if options.ascii_only else text
            yield Segment(shown, style, control)


END = Segment.line()


def _frame(rows: dict[str, RenderableType], status: Status, width: int) -> Panel:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(style="bold", no_wrap=True, min_width=8)
    grid.add_column(ratio=1)
    for row in rows.items():
        grid.add_row(*row)
    path = keep_end(status.path, max(8, width - TITLE_WIDTH))
    return Panel(
        grid,
        # "default": a frame's own colour is too faint to be read on a light terminal.
        title=Text.assemble(("growcache  ", "default"), (path, "default bold")),
        subtitle=Text(_age_text(status), style="default"),
        title_align="left",
        subtitle_align="right",
        border_style="bright_black",
    )


def _age_text(status: Status) -> str:
    if status.state != "stopped":
        running = in_time(status.uptime_seconds)
        return f"pid {status.pid} on {status.host} · running for {running}"
    at = status.updated_at
    return f"stopped {in_time(time.time() - at)} ago" if at else ""


def _state_row(status: Status, history: StatusHistory | None) -> RenderableType:
    style = STATE_STYLES.get(status.state, "bold")
    state = Text.assemble((status.state, style), "  ", state_meaning(status, history))
    return state if history is None else ShortenedText(state, 2, fill=True)


def _cache_row(status: Status, _: object) -> RenderableType:
    amounts = _bar_amounts(status)
    bar = Bar(
        [(amount, *part[1:]) for amount, part in zip(amounts, BAR_PARTS, strict=True)],
        status.max_bytes,
    )
    if not status.max_bytes:
        held = in_bytes(status.bytes)
        return Group(bar, Text(f"{held} on disk; it has no bound before a service runs"))
    used = status.bytes + status.reserved_bytes
    *held_parts, index = (
        _bar_legend(amount, *part)
        for amount, part in zip(amounts, BAR_PARTS, strict=True)
        if amount or part[0] in ("samples", "index")
    )
    free = _bar_legend(max(0, status.max_bytes - used), *FREE_PART)
    whole = Text(f"{in_percent(used / status.max_bytes)} of {in_bytes(status.max_bytes)}")
    return Group(bar, DotSeparated([whole, free, index]), DotSeparated(held_parts))


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
        return 0  # the size of samples is unknown, so all of it counts as samples
    held = status.samples * status.sample_bytes + status.retired_bytes
    return max(status.bytes - held, status.catalog_bytes)


def _bar_legend(amount: float, name: str, colour: str, character: str) -> Text:
    # Only the sign is coloured: blue letters cannot be read on a dark terminal.
    return Text.assemble((character, colour), f" {name} {in_bytes(amount)}")


def _samples_row(status: Status, _: object) -> RenderableType:
    count = in_count(status.samples)
    cached = Text.assemble(
        (count, "bold green"), f" cached in {plural(status.shards, 'shard')}"
    )
    drawn, evicted = in_count(status.drawn), in_count(status.evicted_samples)
    return DotSeparated([cached, Text(f"{drawn} drawn"), Text(f"{evicted} evicted")])


def _training_row(status: Status, _: object) -> RenderableType | None:
    if not status.delivered:
        return None
    delivered = plural(status.delivered, "sample")
    sums = Text(f"{delivered} delivered (each {status.reuse:.1f} times)")
    lines = [_job_line(job) for job in status.jobs[-MAX_LISTED:]]
    return Group(sums, *lines, *_more(status.jobs, "and {} jobs before"))


def _more(listed: Sequence[object], text: str) -> list[Text]:
    """Return a line that says how many more there are than are listed."""
    more = len(listed) - MAX_LISTED
    return [Text(text.format(more))] if more > 0 else []


def _job_line(job: JobStatus) -> Text:
    waits = f"waited {job.waits.seconds:.1f} s ({job.waits.count} times)"
    return _named_line(
        job.name,
        f"  {plural(job.delivered, 'sample')}, epoch {job.epoch}, {waits}",
        f"  {'pid' if job.open else 'ended, pid'} {job.pid}",
    )


def _named_line(name: str, text: str, dim: str) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(shorten_name(name, MAX_JOB_CHARACTERS), style="bold")
    return line.append(text).append(dim, style="dim")


def _growth_row(status: Status, history: StatusHistory | None) -> RenderableType | None:
    if history is None or (status.state == "stopped" and not history.span_seconds()):
        return None
    return SampleCountCurve(history)


def _rate_row(status: Status, _: object) -> RenderableType | None:
    if status.state == "stopped":
        return None
    rate = Text(f"{in_count(status.samples_per_second)} samples/s", style="bold")
    fetched = Text(f"{in_bytes(status.bytes_per_second)}/s from the store")
    return DotSeparated([rate, fetched, Text(f"{in_bytes(status.egress_bytes)} in this run")])


def _coverage_row(status: Status, _: object) -> RenderableType:
    text, share = coverage_text(status)
    if share is None:
        return Text(text)
    return DotSeparated([Text(text)], Bar([(share, "magenta", "█")], 1.0, SMALL_BAR_WIDTH))


def _sources_row(status: Status, _: object) -> RenderableType | None:
    """Return a line for each source of a mixture: its share, and how far it was drawn."""
    lines = [
        _separated(
            f"{in_percent(one.share)} {shorten_name(one.url, 40)}",
            f"about {in_count(one.samples)} samples in {plural(one.objects, 'object')}",
            f"drawn {one.rounds:.1f} times",
        )
        for one in status.sources
    ]
    return Group(*lines) if lines else None


def _separated(*texts: str) -> DotSeparated:
    return DotSeparated([Text(text) for text in texts])


def _split_row(status: Status, _: object) -> RenderableType | None:
    """Return the subsets; the one that this cache is drawn from stands out."""
    texts = [
        Text(
            f"{one.name}: {plural(one.objects, 'object')} in {plural(one.groups, 'group')}",
            style="bold" if one.used else "",
        )
        for one in status.subsets
    ]
    return DotSeparated(texts) if texts else None


def _trouble_row(status: Status, _: object) -> RenderableType:
    found, aside = trouble_texts(status), status.set_aside.words
    if not found and not aside:
        return Text("none", style="dim")
    lines: list[RenderableType] = []
    if found:
        lines.append(DotSeparated([Text(text, style="yellow") for text in found]))
    if aside:
        lines.append(Text(aside, style="yellow"))
    if status.last_errors:
        lines.append(ShortenedText(Text(f"last: {status.last_errors[-1]}", "dim")))
    return Group(*lines)


def _config_row(status: Status, _: object) -> RenderableType | None:
    if not status.restart_for or status.state == "stopped":
        return None
    keys = ", ".join(status.restart_for)
    return Text(f"changed; restart the service for {keys}", style="yellow")


def _samplers_row(status: Status, _: object) -> RenderableType | None:
    workers = [
        # Before any sampler has ended, none is being *re*started.
        replace(worker, state="starting")
        if worker.state == "restarting" and not status.restarts
        else worker
        for worker in status.worker_states
    ]
    if not workers:
        return None
    if len(workers) > MAX_LISTED:
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
            bar = Bar([(worker.parts_done, "cyan", "█")], worker.parts, SMALL_BAR_WIDTH)
            progress = f"{worker.parts_done} of {plural(worker.parts, 'read')}"
        grid.add_row(f"{worker.id}", f"{worker.state:<10}", bar, progress)
    return Group(grid)  # a table of its own would be stretched


def _readers_row(status: Status, _: object) -> RenderableType:
    leases, foreign = status.leases, status.foreign_leases
    if not leases and not foreign:
        return Text("none; nothing is held back from eviction", style="dim")
    lines: Iterable[Text] = [
        *(_reader_line(lease, status.path) for lease in leases[:MAX_LISTED]),
        *_more(leases, "and {} more"),
        *(_foreign_lease_line(lease) for lease in foreign[:MAX_LISTED]),
        *_more(foreign, "and {} more that cannot be read"),
    ]
    return Group(*lines)


def _foreign_lease_line(lease: ForeignLeaseStatus) -> Text:
    pid = f", pid {lease.pid}" if lease.pid is not None else ""
    text = f"  {lease.name} cannot be read: {lease.reason}; {lease.advice}"
    return Text.assemble((f"uid {lease.uid}{pid}", "bold"), text)


def _reader_line(lease: LeaseStatus, path: str) -> Text:
    shards = plural(lease.shards, "shard")
    if lease.open:
        holds = f"  holds {shards} for {in_time(lease.age_seconds)}  "
        return _named_line(
            lease.job, holds, f"pid {lease.pid} on {lease.host}: {lease.command}"
        )
    left = "" if lease.seconds_left is None else f", for another {lease.seconds_left:.0f} s"
    job = shorten_name(lease.job, MAX_JOB_CHARACTERS)
    return Text(
        f"kept for a dead reader: {shards}, job {job} (pid {lease.pid}){left}; let go with: "
        f"growcache release {path}"
    )


ROWS: dict[str, Callable[[Status, StatusHistory | None], RenderableType | None]] = {
    "state": _state_row,
    "cache": _cache_row,
    "samples": _samples_row,
    "training": _training_row,
    "growth": _growth_row,
    "rate": _rate_row,
    "coverage": _coverage_row,
    "sources": _sources_row,
    "split": _split_row,
    "trouble": _trouble_row,
    "config": _config_row,
    "samplers": _samplers_row,
    "readers": _readers_row,
}
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
