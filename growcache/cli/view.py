"""A status as a picture for a terminal: a frame with one row per question."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from growcache.cache.status_model import (
    ForeignLeaseStatus,
    JobStatus,
    LeaseStatus,
    Status,
    WorkerStatus,
)
from growcache.cli.status import (
    StatusHistory,
    coverage_text,
    state_meaning,
    status_sentence,
    trouble_texts,
)
from growcache.humanize import (
    in_bytes,
    in_count,
    in_percent,
    in_time,
    keep_end,
    plural,
    shorten_name,
)
from growcache.monitor.verdicts import advice_for

# Used by a terminal without Unicode.
TO_ASCII = str.maketrans("▁▂▃▄▅▆▇█▓▒▌░·…", "._-~=+*#%+=.,.")
SPARKS = "▁▂▃▄▅▆▇█"
MAX_CURVE_WIDTH = 60
MIN_BAR_WIDTH = 4
SMALL_BAR_WIDTH = 20
MAX_WIDTH = 120  # a wider picture would be harder to read
LABEL_WIDTH = 8
FRAME_WIDTH = LABEL_WIDTH + 6  # of the picture without its rows' texts
MAX_LISTED = 4  # jobs, samplers, readers
TITLE_WIDTH = 17  # of the title without the path
MAX_JOB_CHARACTERS = 24
STATE_STYLES = {
    "running": "bold green",
    "complete": "bold cyan",
    "full": "bold cyan",
    "waiting": "bold yellow",
    "shrinking": "bold yellow",
}
# Parts of the cache's bar: names, colours, and characters that differ without colours, too.
BAR_PARTS = (
    ("samples", "green", "█"),
    ("leaving", "yellow", "▓"),
    ("writing", "cyan", "▒"),
    ("index", "blue", "▌"),
)
FREE_PART = ("free", "bright_black", "░")


@dataclass(frozen=True)
class StatusPicture:
    """A status as a frame of rows.

    If it exceeds ``height`` lines, the least important rows go.
    """

    status: Status
    history: StatusHistory | None = None
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        frame = options.update(width=min(options.max_width, MAX_WIDTH), height=None)
        width = max(1, frame.max_width - FRAME_WIDTH)
        drawn = {name: row(self.status, self.history, width) for name, row in ROWS.items()}
        rows = {name: Text("\n").join(lines) for name, lines in drawn.items() if lines}
        for dispensable in ("", *DISPENSABLE):
            rows.pop(dispensable, None)
            panel = _frame_rows(rows, self.status, frame.max_width)
            lines = console.render_lines(panel, frame, pad=False)
            if self.height is None or len(lines) <= self.height:
                break
        else:
            sentence = Text(status_sentence(self.status)).wrap(console, options.max_width)
            lines = [list(line.render(console)) for line in sentence[: self.height]]
        end = Segment.line()
        for text, style, control in (segment for line in lines for segment in [*line, end]):
            shown = text.translate(TO_ASCII) if options.ascii_only else text
            yield Segment(shown, style, control)


def _frame_rows(rows: dict[str, Text], status: Status, width: int) -> Panel:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(ratio=1)
    for label, text in rows.items():
        grid.add_row(label.ljust(LABEL_WIDTH), text)
    if status.state != "stopped":
        running = in_time(status.uptime_seconds)
        age = f"pid {status.pid} on {status.host} · running for {running}"
    else:
        at = status.updated_at
        age = f"stopped {in_time(time.time() - at)} ago" if at else ""
    path = keep_end(status.path, max(8, width - TITLE_WIDTH))
    return Panel(
        grid,
        # "default", because a frame's own colour is too faint on a light terminal.
        title=Text.assemble(("growcache  ", "default"), (path, "default bold")),
        subtitle=Text(age, style="default"),
        title_align="left",
        subtitle_align="right",
        border_style="bright_black",
    )


def bar_text(parts: Sequence[tuple[float, str, str]], total: float, width: int) -> Text:
    amounts = [max(0.0, amount) for amount, _, _ in parts]
    scale = width / max(total, sum(amounts), 1e-9)
    cells = [round(end * scale) for end in accumulate(amounts, initial=0.0)] + [width]
    styles = [*(part[1:] for part in parts), FREE_PART[1:]]
    return Text.assemble(
        *(
            (character * (stop - start), colour)
            for (start, stop), (colour, character) in zip(pairwise(cells), styles, strict=True)
        )
    )


def curve_text(history: StatusHistory, width: int) -> Text:
    span = f"  last {in_time(history.span_seconds())}"
    values = history.curve(min(width - len(span), MAX_CURVE_WIDTH))
    if len(values) < 2:
        return Text("watched from now on", style="dim")
    top = max(values) + 1
    line = "".join(SPARKS[value * len(SPARKS) // top] for value in values)
    return Text.assemble((line, "green"), span)


def shorten_to_lines(text: str, width: int, count: int) -> list[str]:
    """Return a text in at most ``count`` lines, with its object's name shortened if necessary."""
    room = count * width
    lines = textwrap.wrap(shorten_name(text, room), width, break_on_hyphens=False)
    while len(lines) > count and room > count:
        room -= 1  # try again, because words leave ends of lines empty
        lines = textwrap.wrap(shorten_name(text, room), width, break_on_hyphens=False)
    return lines[:count]


def _dotted(texts: Sequence[Text | str], width: int) -> list[Text]:
    dot = Text(" · ")
    lines: list[Text] = []
    for text in (Text(text) if isinstance(text, str) else text for text in texts):
        if lines and lines[-1].cell_len + dot.cell_len + text.cell_len <= width:
            lines[-1] = dot.join([lines[-1], text])
        else:
            lines.append(text)
    return lines


def _more(listed: Sequence[object], text: str) -> list[Text]:
    more = len(listed) - MAX_LISTED
    return [Text(text.format(more))] if more > 0 else []


def _named_line(name: str, text: str, dim: str, width: int) -> Text:
    line = Text.assemble((shorten_name(name, MAX_JOB_CHARACTERS), "bold"), text, (dim, "dim"))
    line.truncate(width, overflow="ellipsis")
    return line


def _state_row(status: Status, history: StatusHistory | None, width: int) -> list[Text]:
    text = f"{status.state}  {state_meaning(status, history)}"
    if history is not None:  # always two lines, so that nothing below them jumps
        lines = shorten_to_lines(text, width, 2)
        text = "\n".join([*lines, *[""] * (2 - len(lines))])
    state = Text(text)
    state.stylize(STATE_STYLES.get(status.state, "bold"), 0, len(status.state))
    return [state]


def _advice_row(status: Status, _: object, width: int) -> list[Text]:
    """Show the remedy for the service's wait, as the page does."""
    level, action = advice_for(status) if status.waiting_for else ("ok", "")
    lines = textwrap.wrap(action, width, break_on_hyphens=False) if level != "ok" else []
    return [Text(line, style="yellow") for line in lines]


def _cache_row(status: Status, _: object, width: int) -> list[Text]:
    amounts = _bar_amounts(status)
    parts = [(amount, *part[1:]) for amount, part in zip(amounts, BAR_PARTS, strict=True)]
    bar = bar_text(parts, status.max_bytes, width)
    if not status.max_bytes:
        held = in_bytes(status.bytes)
        return [bar, Text(f"{held} on disk; the bound is unknown until a service runs")]
    used = status.bytes + status.reserved_bytes
    *held_parts, index = (
        _bar_legend(amount, *part)
        for amount, part in zip(amounts, BAR_PARTS, strict=True)
        if amount or part[0] in ("samples", "index")
    )
    free = _bar_legend(max(0, status.max_bytes - used), *FREE_PART)
    whole = f"{in_percent(used / status.max_bytes)} of {in_bytes(status.max_bytes)}"
    return [bar, *_dotted([whole, free, index], width), *_dotted(held_parts, width)]


def _bar_amounts(status: Status) -> tuple[float, float, float, float]:
    """Return bytes of samples, of retired shards, of shards being written, and of the rest."""
    overhead = status.budget_bytes + status.catalog_bytes
    if status.state == "stopped":  # nothing is set aside, so all but the samples is overhead
        if not status.samples:
            overhead = status.bytes
        elif status.sample_bytes is None:
            overhead = 0  # the size of samples is unknown, so all of it counts as samples
        else:
            held = status.samples * status.sample_bytes + status.retired_bytes
            overhead = max(status.bytes - held, status.catalog_bytes)
    samples = max(0, status.bytes - overhead - status.retired_bytes)
    return samples, status.retired_bytes, status.reserved_bytes, max(0, overhead)


def _bar_legend(amount: float, name: str, colour: str, character: str) -> Text:
    # Only the sign is coloured, because blue letters cannot be read on a dark terminal.
    return Text.assemble((character, colour), f" {name} {in_bytes(amount)}")


def _samples_row(status: Status, _: object, width: int) -> list[Text]:
    count, shards = in_count(status.samples), plural(status.shards, "shard")
    cached = Text.assemble((count, "bold green"), f" cached in {shards}")
    drawn, evicted = in_count(status.drawn), in_count(status.evicted_samples)
    return _dotted([cached, f"{drawn} drawn", f"{evicted} evicted"], width)


def _training_row(status: Status, _: object, width: int) -> list[Text]:
    if not status.delivered:
        return []
    delivered = plural(status.delivered, "sample")
    sums = Text(f"{delivered} delivered (each {status.reuse:.1f} times)")
    lines = [_job_line(job, width) for job in status.jobs[-MAX_LISTED:]]
    return [sums, *lines, *_more(status.jobs, "and {} earlier jobs")]


def _job_line(job: JobStatus, width: int) -> Text:
    waits = f"waited {job.waits.seconds:.1f} s ({job.waits.count} times)"
    return _named_line(
        job.name,
        f"  {plural(job.delivered, 'sample')}, epoch {job.epoch}, {waits}",
        f"  {'pid' if job.open else 'ended, pid'} {job.pid}",
        width,
    )


def _growth_row(status: Status, history: StatusHistory | None, width: int) -> list[Text]:
    if history is None or (status.state == "stopped" and not history.span_seconds()):
        return []
    return [curve_text(history, width)]


def _rate_row(status: Status, _: object, width: int) -> list[Text]:
    if status.state == "stopped":
        return []
    rate = Text(f"{in_count(status.samples_per_second)} samples/s", style="bold")
    fetched = f"{in_bytes(status.bytes_per_second)}/s from the store"
    return _dotted([rate, fetched, f"{in_bytes(status.egress_bytes)} in this run"], width)


def _coverage_row(status: Status, _: object, width: int) -> list[Text]:
    text, share = coverage_text(status)
    if share is None or SMALL_BAR_WIDTH + 1 + len(text) > width:
        return [Text(text)]
    bar = bar_text([(share, "magenta", "█")], 1.0, SMALL_BAR_WIDTH)
    return [Text.assemble(bar, f" {text}")]


def _sources_row(status: Status, _: object, width: int) -> list[Text]:
    lines: list[Text] = []
    for one in status.sources:
        source = f"{in_percent(one.share)} {shorten_name(one.url, 40)}"
        held = f"about {in_count(one.samples)} samples in {plural(one.objects, 'object')}"
        lines += _dotted([source, held, f"drawn {one.rounds:.1f} times"], width)
    return lines


def _split_row(status: Status, _: object, width: int) -> list[Text]:
    texts = [
        Text(
            f"{one.name}: {plural(one.objects, 'object')} in {plural(one.groups, 'group')}",
            style="bold" if one.used else "",
        )
        for one in status.subsets
    ]
    return _dotted(texts, width)


def _catalog_row(status: Status, _: object, width: int) -> list[Text]:
    return [
        Text(line) for words in status.catalogs for line in shorten_to_lines(words, width, 2)
    ]


def _lanes_row(status: Status, _: object, __: int) -> list[Text]:
    return [Text(status.moved.words)] if status.moved.words else []


def _trouble_row(status: Status, _: object, width: int) -> list[Text]:
    found, aside = trouble_texts(status), status.set_aside.words
    if not found and not aside:
        return [Text("none", style="dim")]
    lines = _dotted([Text(text, style="yellow") for text in found], width)
    lines += [Text(aside, style="yellow")] if aside else []
    for error in status.last_errors[-1:]:
        lines += [Text(line, "dim") for line in shorten_to_lines(f"last: {error}", width, 1)]
    return lines


def _config_row(status: Status, _: object, __: int) -> list[Text]:
    if not status.restart_for or status.state == "stopped":
        return []
    keys = ", ".join(status.restart_for)
    return [Text(f"changed; restart the service for {keys}", style="yellow")]


def _samplers_row(status: Status, _: object, width: int) -> list[Text]:
    # Before any sampler has ended, none is being *re*started.
    first = {} if status.restarts else {"restarting": "starting"}
    states = [first.get(worker.state, worker.state) for worker in status.worker_states]
    if len(states) > MAX_LISTED:
        counts = {state: states.count(state) for state in dict.fromkeys(states)}
        return [Text(" · ".join(f"{number} {state}" for state, number in counts.items()))]
    return [
        _sampler_line(worker, state, width)
        for worker, state in zip(status.worker_states, states, strict=True)
    ]


def _sampler_line(worker: WorkerStatus, state: str, width: int) -> Text:
    line = Text(f"{worker.id} {state:<10} ")
    where = f" on {worker.node}" if worker.node else ""
    if worker.parts:
        progress = f" {worker.parts_done} of {plural(worker.parts, 'read')}{where}"
        room = min(SMALL_BAR_WIDTH, width - line.cell_len - len(progress))
        if room >= MIN_BAR_WIDTH:
            line += bar_text([(worker.parts_done, "cyan", "█")], worker.parts, room)
        line += Text(progress)
    elif where:
        line += Text(where.lstrip())
    line.truncate(width, overflow="ellipsis")
    return line


def _readers_row(status: Status, _: object, width: int) -> list[Text]:
    leases, foreign = status.leases, status.foreign_leases
    if not leases and not foreign:
        return [Text("none; nothing is held back from eviction", style="dim")]
    return [
        *(_reader_line(lease, status.path, width) for lease in leases[:MAX_LISTED]),
        *_more(leases, "and {} more"),
        *(_foreign_lease_line(lease) for lease in foreign[:MAX_LISTED]),
        *_more(foreign, "and {} more that cannot be read"),
    ]


def _foreign_lease_line(lease: ForeignLeaseStatus) -> Text:
    pid = f", pid {lease.pid}" if lease.pid is not None else ""
    text = f"  {lease.name} cannot be read: {lease.reason}; {lease.advice}"
    return Text.assemble((f"uid {lease.uid}{pid}", "bold"), text)


def _reader_line(lease: LeaseStatus, path: str, width: int) -> Text:
    shards = plural(lease.shards, "shard")
    if lease.open:
        holds = f"  holds {shards} for {in_time(lease.age_seconds)}  "
        reader = f"pid {lease.pid} on {lease.host}: {lease.command}"
        return _named_line(lease.job, holds, reader, width)
    left = "" if lease.seconds_left is None else f", for another {lease.seconds_left:.0f} s"
    job = shorten_name(lease.job, MAX_JOB_CHARACTERS)
    return Text(
        f"kept for a dead reader: {shards}, job {job} (pid {lease.pid}){left}; release them "
        f"with: growcache release {path}"
    )


ROWS: dict[str, Callable[[Status, StatusHistory | None, int], list[Text]]] = {
    "state": _state_row,
    "cache": _cache_row,
    "samples": _samples_row,
    "training": _training_row,
    "growth": _growth_row,
    "rate": _rate_row,
    "coverage": _coverage_row,
    "sources": _sources_row,
    "split": _split_row,
    "catalog": _catalog_row,
    "lanes": _lanes_row,
    "trouble": _trouble_row,
    "config": _config_row,
    "samplers": _samplers_row,
    "readers": _readers_row,
    "advice": _advice_row,  # last, so that nothing jumps when it appears or disappears
}
# Rows that are left out if there are too few lines, least important first.
DISPENSABLE = (
    "samplers",
    "readers",
    "growth",
    "training",
    "split",
    "lanes",
    "coverage",
    "rate",
    "advice",
    "trouble",
)
