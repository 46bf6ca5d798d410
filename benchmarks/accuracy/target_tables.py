"""E1's tables, from its results alone: when and at what cost each arm came to a share of full data's accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.accuracy.conversion import Conversion
from benchmarks.accuracy.results import Curves, Row, Run, figures_of, final_metric
from benchmarks.accuracy.statistics import (
    Interval,
    first_reaching,
    mean_interval,
    not_worse,
    paired_differences,
)
from benchmarks.accuracy.to_target import ARMS, FULL, LINKS, LONGER, RIVALS, STEPS, UNLIMITED

MARGIN = 0.5  # points of accuracy, as margins.md has it
SOONER, EGRESS_SHARE = 2.5, 0.2  # goals of margins.md
CLAIMED = "a tenth"  # the link that the claim of time is about
MIN_SEEDS = 5  # below which nothing is decided
TARGETS = (90, 95)  # percent of full data's final accuracy
TRAININGS = 10  # over which a conversion is amortised
OURS, FROZEN, STREAMED = "growcache", "frozen", "DataLoader"
HEAD = (
    "arm",
    "seeds",
    "s to 90 %",
    "s to 95 %",
    "MB to 95 %",
    "steps",
    "accuracy, %",
    "wait, %",
    "egress, MB",
    "requests",
    "disk, MB",
    "memory, MB",
)

CONVERSION_HEAD = (
    "loader",
    "in the store, MB",
    "conversion alone, s",
    "with its transfers, s",
    "first training to 95 %, s",
    f"each of {TRAININGS}, s",
)

BySeed = dict[int, list[Row]]


def runs_of(curves: Curves, link: str, arm: str) -> BySeed:
    """Return the rows of an arm's runs by seed."""
    return {run.seed: rows for run, rows in curves.items() if run[:2] == (link, arm)}


def goals(curves: Curves) -> dict[int, float]:
    """Return the final accuracy of full data by seed."""
    return {n: final_metric(rows) for n, rows in runs_of(curves, UNLIMITED, FULL).items()}


def reached(
    runs: BySeed, full: Mapping[int, float], percent: int, of: Callable[[Row], float]
) -> dict[int, float | None]:
    """Return what each run had taken when it first came to a share of full data's accuracy."""
    return {
        seed: first_reaching(
            [(of(row), row.metric) for row in rows], full[seed] * percent / 100
        )
        for seed, rows in runs.items()
        if seed in full
    }


def seconds_of(row: Row) -> float:
    """Return the seconds since the loader was opened."""
    return row.seconds


def megabytes_of(row: Row) -> float:
    """Return what the store had sent."""
    return row.egress_bytes / 1e6


def arms_of(curves: Curves, link: str) -> list[str]:
    """Return the arms that have results, ours first."""
    there = {run.arm for run in curves if run.experiment == link}
    order = dict.fromkeys((OURS, LONGER, *ARMS, *RIVALS))
    return [arm for arm in order if arm in there]


def table(curves: Curves, link: str) -> str:
    """Return the table of a link, with full data above it."""
    full = goals(curves)
    rows = [_cells(runs_of(curves, UNLIMITED, FULL), full, "full data, on local disk")]
    rows += [_cells(runs_of(curves, link, arm), full, arm) for arm in arms_of(curves, link)]
    return "\n".join(map(_row, (HEAD, ("---",) + ("--:",) * (len(HEAD) - 1), *rows)))


def _cells(runs: BySeed, full: Mapping[int, float], arm: str) -> tuple[str, ...]:
    ends = [rows[-1] for rows in runs.values()]
    found = [figures_of(rows) for rows in runs.values()]

    def mean(name: str, scale: float = 1.0) -> float:
        return float(np.mean([one[name] for one in found])) / scale

    return (
        arm,
        str(len(runs)),
        *(_reached(reached(runs, full, percent, seconds_of)) for percent in TARGETS),
        _reached(reached(runs, full, TARGETS[-1], megabytes_of)),
        f"{np.mean([row.step for row in ends]):,.0f}",
        f"{np.mean([final_metric(rows) for rows in runs.values()]):.2f}",
        f"{mean('wait_percent'):.0f}",
        f"{np.mean([row.egress_bytes for row in ends]) / 1e6:,.0f}",
        f"{mean('requests'):,.0f}",
        f"{mean('disk_bytes', 1e6):.1f}",
        f"{mean('memory_bytes', 1e6):,.0f}",
    )


def _reached(found: Mapping[int, float | None]) -> str:
    there = [value for value in found.values() if value is not None]
    if len(there) < len(found):
        return "never" if not there else f"{len(there)} of {len(found)} runs"
    return f"{np.mean(there):.0f}" if there else ""


class Finding(NamedTuple):
    """A claim of margins.md for a link, and what came of it."""

    claim: str
    found: str
    verdict: str


def findings(curves: Curves, link: str) -> Iterator[Finding]:
    """Yield what the four arms show at a link."""
    full = goals(curves)
    ours = runs_of(curves, link, OURS)
    streamed = runs_of(curves, link, STREAMED)
    for percent in TARGETS:
        mine = reached(ours, full, percent, seconds_of)
        theirs = reached(streamed, full, percent, seconds_of)
        yield _sooner(percent, mine, theirs, claimed=link == CLAIMED)
    yield _egress(ours, streamed)
    finals = {seed: final_metric(rows) for seed, rows in ours.items()}
    frozen = {s: final_metric(rows) for s, rows in runs_of(curves, link, FROZEN).items()}
    better = mean_interval(paired_differences(finals, frozen))
    yield Finding(
        "better than a frozen subset on the same disk, points",
        str(better),
        _enough(finals, "met" if better.low > 0 else "lost"),
    )
    difference = mean_interval(paired_differences(finals, full))
    yield Finding(
        f"within {MARGIN} points of full data after {STEPS:,} steps",
        str(difference),
        _enough(finals, not_worse(difference, MARGIN)),
    )


def _sooner(
    percent: int,
    mine: Mapping[int, float | None],
    theirs: Mapping[int, float | None],
    *,
    claimed: bool,
) -> Finding:
    ratios = [
        their / my
        for seed, my in mine.items()
        if my is not None and (their := theirs.get(seed)) is not None
    ]
    goal = f"{SOONER} × " if claimed else ""
    claim = f"{percent} % of full data's accuracy {goal}sooner than streamed"
    if not ratios:
        return Finding(claim, "not reached", "undecided")
    found = mean_interval(ratios)
    verdict = "met" if found.low >= SOONER else "lost"
    return Finding(claim, _times(found), _enough(ratios, verdict) if claimed else "no claim")


def _egress(ours: BySeed, streamed: BySeed) -> Finding:
    """Compare bytes per step, because the streamed runs are shorter where the link is slow."""

    def per_step(rows: list[Row]) -> float:
        return rows[-1].egress_bytes / rows[-1].step

    ratios = [per_step(ours[n]) / per_step(streamed[n]) for n in ours.keys() & streamed.keys()]
    found = mean_interval(ratios)
    return Finding(
        "egress at equal steps at most a fifth of streaming every epoch",
        f"{found.value:.3f} of it",
        _enough(ratios, "met" if found.value <= EGRESS_SHARE else "lost"),
    )


def _times(found: Interval) -> str:
    return f"{found.value:.1f} × ({found.low:.1f} to {found.high:.1f})"


def _enough(seeds: object, verdict: str) -> str:
    return verdict if len(seeds) >= MIN_SEEDS else "too few seeds"  # type: ignore[arg-type]


def store_bytes(curves: Curves) -> float:
    run = next(iter(runs_of(curves, UNLIMITED, FULL).values()))
    return float(figures_of(run)["store_bytes"])


def download_seconds(curves: Curves, link: str) -> float:
    return store_bytes(curves) / LINKS[link]


def downloaded_first(curves: Curves, link: str) -> str:
    """Return when full data comes to the targets if it is fetched before training."""
    runs, full = runs_of(curves, UNLIMITED, FULL), goals(curves)
    store, fetch = store_bytes(curves), download_seconds(curves, link)
    times = [
        fetch + float(np.mean([s for s in reached(runs, full, p, seconds_of).values() if s]))
        for p in TARGETS
    ]
    return (
        f"Full data would have to be fetched first: {fetch:.0f} s at this link, so it comes to 90 % after {times[0]:.0f} s "
        f"and to 95 % after {times[1]:.0f} s, with {store / 1e6:.0f} MB on disk and of egress."
    )


def repeated(curves: Curves, again: Curves, link: str = CLAIMED) -> str:
    """Return the times of the runs that were repeated, next to the first ones of the same seeds."""
    times = (f"s to {percent} %, {time}" for percent in TARGETS for time in ("first", "again"))
    head = ("arm", "seeds", *times)
    arms = ((UNLIMITED, FULL), (link, OURS), (link, STREAMED))
    rows = [_repeated_row(curves, again, *arm) for arm in arms]
    ours, streamed = runs_of(again, link, OURS), runs_of(again, link, STREAMED)
    claims = [
        _sooner(
            percent,
            reached(ours, goals(again), percent, seconds_of),
            reached(streamed, goals(again), percent, seconds_of),
            claimed=False,
        )
        for percent in TARGETS
    ]
    table = map(_row, (head, ("---",) + ("--:",) * (len(head) - 1), *rows))
    return "\n".join((*table, "", *(f"- {one.claim}, again: {one.found}" for one in claims)))


def _repeated_row(curves: Curves, again: Curves, link: str, arm: str) -> tuple[str, ...]:
    later = runs_of(again, link, arm)
    first = {seed: rows for seed, rows in runs_of(curves, link, arm).items() if seed in later}
    both = ((first, goals(curves)), (later, goals(again)))
    times = [
        _reached(reached(runs, full, percent, seconds_of))
        for percent in TARGETS
        for runs, full in both
    ]
    return arm, str(len(later)), *times


def conversions(curves: Curves, found: Mapping[str, Conversion], link: str = CLAIMED) -> str:
    """Return what loaders with a format of their own need to a target, once and amortised over several trainings.

    The raw objects come through the link before the conversion, and its result goes back through it.
    """
    rows = [_conversion(one, curves, link) for one in found.values()]
    return "\n".join(map(_row, (CONVERSION_HEAD, ("---",) + ("--:",) * 5, *rows)))


def _conversion(one: Conversion, curves: Curves, link: str) -> tuple[str, ...]:
    moved = one.seconds + download_seconds(curves, link) + one.store_bytes / LINKS[link]
    runs = runs_of(curves, link, one.arm)
    times = reached(runs, goals(curves), TARGETS[-1], seconds_of).values()
    trained = [seconds for seconds in times if seconds is not None]
    ends = ("never", "never")
    if trained and len(trained) == len(times):
        mean = float(np.mean(trained))
        ends = f"{moved + mean:,.0f}", f"{moved / TRAININGS + mean:,.0f}"
    size = f"{one.store_bytes / 1e6:.0f}"
    return one.arm, size, f"{one.seconds:.1f}", f"{moved:,.0f}", *ends


def tables(curves: Curves) -> str:
    """Return all that the page shows of E1."""
    found = []
    for link in LINKS:
        if Run(link, OURS, 0) not in curves:
            continue
        rows = [("claim", "found", "verdict"), ("---",) * 3, *findings(curves, link)]
        verdicts = "\n".join(map(_row, rows))
        parts = (f"**link: {link} of what training consumes**", table(curves, link))
        found += [*parts, downloaded_first(curves, link), verdicts]
    return "\n\n".join(found)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
