"""docs/reference/loader_benchmarks.md: what stands between its markers is written from the results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.goals import SPEED, SUBJECT, SUSTAINED, goals
from benchmarks.peers.results import Results, Round, gaps, lost_seconds
from benchmarks.peers.roster import CONTESTANTS, contestants

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference/loader_benchmarks.md"
BEGIN, END = "<!-- written by python -m benchmarks.peers: {} -->", "<!-- end: {} -->"
NAMES = {
    "256KiB": "256 KiB: float32 64 × 1024",
    "3KiB": "3 KiB: uint8 32 × 32 × 3",
    "ragged": "20 to 200 KiB: uint8, every sample of another size",
}
IDLE = (
    "contestant",
    "setting",
    "MB/s",
    "with gaps",
    "samples/s",
    "× memcpy",
    "growcache ×",
    "MB per CPU-s",
    "GIL left",
    "first batch, s",
    "epoch gap, ms",
)
TRIED = ("contestant", "setting", "MB/s, idle", "lost per step, ms")
STEPS = (
    "contestant",
    "setting",
    "wait, ms",
    "with gaps",
    "p99 wait, ms",
    "stall, ms",
    "steps/s",
)


def number(value: float | None, digits: int = 3) -> str:
    """Return a figure with as many digits as it can carry; a dash where there is none."""
    if value is None:
        return "–"
    if abs(value) >= 10 ** (digits - 1):
        magnitude = 10 ** max(0, len(str(int(abs(value)))) - digits)
        return f"{round(value / magnitude) * magnitude:,.0f}"
    text = f"{value:.{digits}g}"
    return f"{float(text):.6f}".rstrip("0").rstrip(".") if "e" in text else text


def in_order(found: Results) -> list[str]:
    """Return the contestants that have rounds, the fastest first."""
    speeds = {
        c.module: speed
        for c in contestants()
        if (speed := speed_of(found, c.module)) is not None
    }
    return sorted(speeds, key=lambda name: -speeds[name])


def speed_of(found: Results, name: str) -> float | None:
    """Return bytes per second, main thread idle."""
    return found.median(name, "idle", lambda r: r.get(SPEED))


def counted(name: str) -> str:
    """Return the figure by which a contestant is compared with others."""
    return SUSTAINED if name == SUBJECT else SPEED


def idle_rows(found: Results) -> Iterator[list[str]]:
    """Yield a row per contestant of the loop that does nothing else."""
    for name in in_order(found):

        def of(key: str, loop: str = "idle", name: str = name) -> float | None:
            return found.median(name, loop, partial(_figure, key))

        speed = speed_of(found, name)
        per_cpu = found.median(name, "idle", lambda r: r["bytes"] / r["cpu_seconds"] / 1e6)
        gap = _median_of(gaps(found.rounds_of(name, "idle")))
        yield [
            _title(name),
            found.best(name, "idle") or "",
            number(speed and speed / 1e6),
            number((sustained := of(SUSTAINED)) and sustained / 1e6),
            number(of("samples_per_second")),
            number(found.ratio(name, "memcpy", "idle", counted(name), SPEED), 2),
            number(found.ratio(SUBJECT, name, "idle", SUSTAINED, counted(name)), 2),
            number(per_cpu),
            _percent(of("gil_share", "gil")),
            number(of("first_seconds"), 2),
            number(gap and gap * 1e3, 2),
        ]


def step_rows(found: Results, step_seconds: float) -> Iterator[list[str]]:
    """Yield a row per contestant of the loop with steps of pure Python, least loss first."""
    lost = {
        c.module: value
        for c in contestants()
        if (value := found.median(c.module, "steps", lost_seconds)) is not None
    }
    for name in sorted(lost, key=lambda name: lost[name]):
        figures = [
            found.median(name, "steps", partial(_figure, key))
            for key in (
                "wait_seconds",
                "sustained_wait_seconds",
                "wait_p99_seconds",
                "stall_seconds",
            )
        ]
        cells = [number(value and max(0.0, value) * 1e3, 2) for value in figures]
        rate = number(1 / (step_seconds + lost[name]))
        yield [_title(name), found.best(name, "steps") or "", *cells, rate]


def tried_rows(found: Results) -> Iterator[list[str]]:
    """Yield a row per contestant and setting: what it was chosen by."""
    for contestant in contestants():
        for setting in contestant.settings:
            tried = {
                t["loop"]: t
                for t in found.trials
                if (t["contestant"], t["setting"]) == (contestant.module, setting)
            }
            if tried:
                speed = tried.get("idle", {}).get("bytes_per_second")
                lost = lost_seconds(tried["steps"]) * 1e3 if "steps" in tried else None
                cells = [number(speed and speed / 1e6), number(lost, 2)]
                yield [contestant.title, setting, *cells]


def _figure(key: str, round_: Round) -> float | None:
    found: float | None = round_.get(key)
    return found


def _title(name: str) -> str:
    title = CONTESTANTS[name].title
    return f"**{title}**" if name == SUBJECT else title


def _median_of(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{min(1.0, value) * 100:.0f} %"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; the first two columns are text."""
    rule = ["---" if i < 2 else "--:" for i in range(len(heading))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heading, rule, *rows])


def measured(results: Mapping[str, Results]) -> str:
    """Return the part of the page that has the figures."""
    parts = [about(results), "## Goals", verdicts(results)]
    for case, found in results.items():
        step = float(found.about["step_seconds"])
        parts += [
            f"## {NAMES.get(case, case)}",
            f"{sizes(found.about)} {proven(found)}",
            "The main thread looks at one element of each batch and asks for the next:",
            table(IDLE, idle_rows(found)),
            f"The main thread computes in pure Python for {number(step * 1e3)} ms between two batches:",
            table(STEPS, step_rows(found, step)),
            *missing(found),
            "<details><summary>All settings that were tried, in short trials</summary>",
            table(TRIED, tried_rows(found)),
            "</details>",
        ]
    return "\n\n".join(parts)


def about(results: Mapping[str, Results]) -> str:
    """Return where and when the figures come from."""
    lines = []
    for case, found in results.items():
        a = found.about
        lines.append(
            f"- {case}: {a['date']}, commit {a['commit']}, {a['cores']} cores of "
            f"{a['cpu']}, {a['memory_gib']} GiB, Linux {a['kernel']}, Python {a['python']}, no "
            f"GPU, load average {a['load_before']:g} before; rounds: {rounds_in(found)}"
        )
    return "\n".join(lines)


def rounds_in(found: Results) -> int:
    """Return how many interleaved rounds there were."""
    return len({r["round"] for r in found.rounds})


def verdicts(results: Mapping[str, Results]) -> str:
    """Return the table of goals."""
    heading = ("samples", "what", "measured", "goal")
    rows = [(g.case, g.what, number(g.value), g.verdict) for g in goals(results)]
    return table(heading, rows)


def sizes(a: Mapping[str, Any]) -> str:
    """Return a line about the data set."""
    return (
        f"{a['samples']:,} samples, {a['data_bytes'] / 1e6:,.0f} MB, in batches of 64 of "
        f"{a['data_bytes'] / a['samples'] * 64 / 1e6:.3g} MB each."
    )


def proven(found: Results) -> str:
    """Return how many contestants were seen to deliver a whole epoch, byte for byte."""
    playing = {r["contestant"] for r in found.rounds}
    shown = {r["contestant"] for r in found.rounds if r.get("digest") is not None}
    return f"{len(shown)} of {len(playing)} contestants provably delivered a whole epoch."


def missing(found: Results) -> list[str]:
    """Return a line on every failure, if there was one."""
    return [f"- {name}: {why.splitlines()[-1][:200]}" for name, why in found.failures.items()]


def versions(results: Mapping[str, Results]) -> str:
    """Return the versions of everything that took part."""
    found: dict[str, str] = {}
    for each in results.values():
        found |= each.about["versions"]
    return ", ".join(f"{name} {version}" for name, version in sorted(found.items())) + "."


def settings() -> str:
    """Return the contestants with what makes their settings the best."""
    return "\n".join(f"- **{c.title}**: {c.why}." for c in contestants())


def written(page: str, parts: Mapping[str, str]) -> str:
    """Return the page with its parts in place.

    Raises:
        ValueError: a part has no place.
    """
    for name, text in parts.items():
        begin, end = BEGIN.format(name), END.format(name)
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the page has no '{begin}' with '{end}' behind it")
        page = f"{head}{begin}\n\n{text}\n\n{end}{tail}"
    return page


def write_page(results: Mapping[str, Results], to: Path = PAGE) -> None:
    """Put figures, settings and versions into the page."""
    parts = {
        "figures": measured(results),
        "settings": settings(),
        "versions": versions(results),
    }
    to.write_text(written(to.read_text(encoding="utf-8"), parts), encoding="utf-8")
