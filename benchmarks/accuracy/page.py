"""docs/evidence.md: its tables, between markers, from the results alone.

A table stands between `<!-- results: NAME -->` and `<!-- end of results -->`. NAME is that of the results' file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.accuracy import (
    cache_size,
    claims,
    hard_case,
    network,
    network_tables,
    reuse,
    same_disk,
    target_tables,
)
from benchmarks.accuracy.conversion import read_conversions
from benchmarks.accuracy.experiment import Experiment
from benchmarks.accuracy.results import HERE, Curves, Run, read_rows
from benchmarks.accuracy.statistics import Interval
from benchmarks.accuracy.tables import MIN_SEEDS, markdown, reuse_limit
from benchmarks.accuracy.worths import predicted_worths

PAGE = Path(__file__).parents[2] / "docs/evidence.md"
NOTHING_YET = "No results yet."

LIMIT_HEAD = (
    "| task | reuse at which the loss exceeds 0.5 points (95 % interval) |",
    "| --- | --- |",
)

Tables = Callable[[Curves], str]


def tables_of(experiment: Experiment, curves: Curves) -> str:
    """Return a table for each task of an experiment that has results."""
    found = [
        f"**{title}**\n\n" + markdown(curves, title, experiment.reference, experiment.metric)
        for title in experiment.variants
        if Run(title, experiment.reference, 0) in curves
    ]
    return "\n\n".join(found) or NOTHING_YET


def reuse_tables(curves: Curves) -> str:
    """Return the tables of E4, what became of the claims, and the reuse at which the margin is exceeded."""
    enough = range(MIN_SEEDS)
    limits = [
        f"| {title} | {limit_text(reuse_limit(curves, title, 'growing'))} |"
        for title in reuse.VARIANTS
        if all(
            Run(title, f"growing {uses}", n) in curves for n in enough for uses in reuse.REUSES
        )
    ]
    tables = tables_of(reuse.EXPERIMENT, curves)
    if not curves:
        return tables
    judged = claims.table(claims.reuse_claims(curves))
    limit = "\n".join([*LIMIT_HEAD, *limits])
    return "\n\n".join([tables, judged, limit] if limits else [tables, judged])


def limit_text(limit: Interval) -> str:
    """Return where a margin is exceeded, in words.

    >>> limit_text(Interval(5.25, 2.0, float("inf")))
    '5.2 (2.0 to more than was measured)'
    """
    value, low, high = (
        "more than was measured" if number == float("inf") else f"{number:.1f}"
        for number in limit
    )
    return f"{value} ({low} to {high})"


def hard_case_tables(curves: Curves) -> str:
    """Return the table of E3, the predicted worths, and what became of the claims."""
    tables = tables_of(hard_case.EXPERIMENT, curves)
    worths = predicted_worths(curves)
    if not worths:
        return tables
    rows = "\n".join(f"| {arm} | {worth:,.0f} |" for arm, worth in worths.items())
    judged = claims.table(claims.hard_case_claims(curves))
    return f"{tables}\n\n| arm | predicted worth, samples |\n| --- | --- |\n{rows}\n\n{judged}"


def cache_size_tables(curves: Curves) -> str:
    """Return the table of E2, that of growing against frozen, and how well effective samples predict."""
    tables = tables_of(cache_size.EXPERIMENT, curves)
    if not any(same_disk.pairs(curves)):
        return tables
    rank = same_disk.rank_correlation(curves)
    return (
        f"{tables}\n\n{same_disk.pairs_table(curves)}\n\n"
        f"Rank correlation of effective samples and the difference from full data, over the arms with a cache: {rank:.2f}."
    )


TABLES: dict[str, Tables] = {
    "reuse": reuse_tables,
    "hard_case": hard_case_tables,
    "cache_size": cache_size_tables,
    "to_target": target_tables.tables,
}


def filled(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with new tables; what stands outside of markers stays."""
    for name, table in tables.items():
        begin, end = f"<!-- results: {name} -->\n", "<!-- end of results -->"
        before, found, rest = page.partition(begin)
        _, ends, after = rest.partition(end)
        if not found or not ends:
            raise ValueError(
                f"docs/evidence.md has no place for {name}: {begin.strip()} … {end}"
            )
        page = f"{before}{begin}\n{table}\n\n{end}{after}"
    return page


def write_tables() -> None:
    """Write all tables of the page again."""
    tables = {name: table(read_rows(HERE / f"{name}.csv")) for name, table in TABLES.items()}
    curves = read_rows(HERE / "to_target.csv")
    tables["to_target_repeated"] = target_tables.repeated(
        curves, read_rows(HERE / "to_target_repeated.csv")
    )
    tables["conversion"] = target_tables.conversions(curves, read_conversions())
    tables["network"] = network_tables.table(network.read_seconds())
    PAGE.write_text(filled(PAGE.read_text("utf-8"), tables), encoding="utf-8")
    print(f"wrote {PAGE}")
