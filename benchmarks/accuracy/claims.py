"""The claims that margins.md made about E3 and E4 before the results, and their outcomes."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.accuracy import reuse
from benchmarks.accuracy.metrics import ACCURACY
from benchmarks.accuracy.results import Curves, final_metrics
from benchmarks.accuracy.statistics import Interval, mean_interval, paired_differences
from benchmarks.accuracy.tables import MIN_SEEDS
from benchmarks.accuracy.worths import TASK, rank_correlation

RANK_CORRELATION = 0.9  # below which the claim of E3 is lost
WARNED_USES = (2, 4)


class Claim(NamedTuple):
    """A claim, what was measured, and whether it holds; None: too few seeds."""

    text: str
    measured: str
    holds: bool | None

    def row(self) -> str:
        """Return the claim as a row of the table."""
        verdict = {True: "holds", False: "**lost**", None: "too few seeds yet"}[self.holds]
        return f"| {self.text} | {self.measured} | {verdict} |"


def table(claims: list[Claim]) -> str:
    """Return the claims as a table."""
    return "\n".join(
        [
            "| claim | measured | verdict |",
            "| --- | --- | --- |",
            *(one.row() for one in claims),
        ]
    )


def compared(curves: Curves, task: str, arm: str, other: str) -> tuple[Interval, int] | None:
    """Return arm − other, and of how many seeds; None without a common seed."""
    metrics = final_metrics(curves, task)
    found = paired_differences(metrics.get(arm, {}), metrics.get(other, {}))
    return (mean_interval(found), len(found)) if found.size else None


def reuse_claims(curves: Curves) -> list[Claim]:
    """Judge what was claimed of E4, for each task."""
    return [
        claim
        for task in reuse.VARIANTS
        for claim in (
            _as_good(
                curves,
                task,
                f"{task}: up to a reuse of 4 as good as a reuse of 1",
                [(f"growing {uses}", "growing 1") for uses in WARNED_USES],
            ),
            _as_good(
                curves,
                task,
                f"{task}: at no factor worse than data echoing",
                [(f"growing {uses}", f"echo {uses}") for uses in reuse.REUSES[1:]],
                undecided_holds=True,
            ),
        )
    ]


def _as_good(
    curves: Curves,
    task: str,
    text: str,
    pairs: list[tuple[str, str]],
    *,
    undecided_holds: bool = False,
) -> Claim:
    found = [compared(curves, task, arm, other) for arm, other in pairs]
    known = [each for each in found if each is not None]
    measured = "; ".join(
        f"{arm} − {other}: {each[0]}"
        for (arm, other), each in zip(pairs, found, strict=True)
        if each
    )
    if len(known) < len(pairs) or any(seeds < MIN_SEEDS for _, seeds in known):
        return Claim(text, measured, None)
    verdicts = [ACCURACY.verdict(difference) for difference, _ in known]
    fails = {"worse"} if undecided_holds else {"worse", "undecided"}
    return Claim(text, measured, fails.isdisjoint(verdicts))


def hard_case_claims(curves: Curves) -> list[Claim]:
    """Judge what was claimed of E3."""
    seeds = [len(by_seed) for by_seed in final_metrics(curves, TASK).values()]
    rank = rank_correlation(curves)
    order = Claim(
        "accuracy orders the settings as n / (1 + (k − 1) ρ) does",
        f"rank correlation {rank:.2f}",
        rank >= RANK_CORRELATION if min(seeds) >= MIN_SEEDS else None,
    )
    dealt = compared(curves, TASK, "visits of 50, fifo", "visits of 50, fifo, not dealt")
    text = "dealing a visit over a group of shards is better than leaving it in one shard"
    if dealt is None or dealt[1] < MIN_SEEDS:
        return [order, Claim(text, str(dealt[0]) if dealt else "", None)]
    return [order, Claim(text, f"dealt − not dealt: {dealt[0]}", ACCURACY.is_better(dealt[0]))]
