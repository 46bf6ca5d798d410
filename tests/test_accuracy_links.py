"""The benchmarks beside a slow link: seconds of a run, and what came of E1's claims."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.accuracy.conversion import Conversion
from benchmarks.accuracy.network import seconds_of
from benchmarks.accuracy.paced.loop import Step
from benchmarks.accuracy.results import Row
from benchmarks.accuracy.target_tables import (
    conversions,
    findings,
    reached,
    runs_of,
)
from benchmarks.accuracy.target_tables import (
    seconds_of as row_seconds,
)
from benchmarks.accuracy.to_target import CONSUMED, LINKS, planned

COUNT = 12
waits_and_samples = st.lists(
    st.tuples(st.floats(0.0, 2.0), st.integers(1, 64), st.integers(0, 64)), max_size=20
)


def steps_of(drawn: list[tuple[float, int, int]]) -> list[Step]:
    """Return steps one after the other, 40 ms each beside their waits."""
    steps, now = [], 0.0
    for waited, samples, new in drawn:
        steps.append(Step(now, waited, samples, min(new, samples)))
        now += waited + 0.04
    return steps


@given(waits_and_samples)
def test_every_sample_and_every_wait_is_in_the_second_that_it_belongs_to(
    drawn: list[tuple[float, int, int]],
) -> None:
    steps = steps_of(drawn)
    found = list(seconds_of("arm", steps, [0] * COUNT))
    inside = [step for step in steps if step.asked + step.waited < COUNT]
    assert sum(one.delivered for one in found) == sum(step.samples for step in inside)
    assert sum(one.distinct for one in found) == sum(step.new for step in inside)
    assert all(0 <= one.waited <= 1.001 for one in found)


def test_a_loader_that_hangs_waits_to_the_end() -> None:
    found = list(seconds_of("arm", [Step(0.0, 0.5, 64, 64)], [0] * COUNT))
    assert found[0].delivered == 64
    assert [one.waited for one in found[1:]] == [1.0] * (COUNT - 1)


def curve(link: str, arm: str, seed: int, pace: float, last: float) -> list[Row]:
    """Return a run that comes from 50 % to its last accuracy in ten evaluations."""
    return [
        Row(link, arm, seed, n, n * pace, 50 + (last - 50) * n / 10, n * 1000, "", "")
        for n in range(11)
    ]


def test_times_are_compared_by_seed_and_with_full_data_of_the_same_seed() -> None:
    arms = {
        ("no link", "full"): (1.0, 90.0),
        ("a tenth", "growcache"): (2.0, 90.0),
        ("a tenth", "frozen"): (2.0, 70.0),
        ("a tenth", "DataLoader"): (10.0, 90.0),
    }
    rows = [
        curve(link, arm, seed, pace, last + seed / 10)
        for (link, arm), (pace, last) in arms.items()
        for seed in range(5)
    ]
    curves = {run[0].run: run for run in rows}
    verdicts = [one.verdict for one in findings(curves, "a tenth")]
    assert verdicts == ["met", "met", "lost", "met", "as good"]
    frozen = runs_of(curves, "a tenth", "frozen")
    assert set(reached(frozen, dict.fromkeys(range(5), 90.0), 90, row_seconds).values()) == {
        None
    }


def test_links_bring_what_they_are_named_after_and_runs_are_made_once() -> None:
    assert LINKS["a tenth"] == pytest.approx(CONSUMED / 10)
    runs = [one.run for one in planned()]
    assert len(runs) == len(set(runs))


def test_a_conversion_is_paid_before_the_first_training_and_by_a_tenth_of_ten() -> None:
    full = curve("no link", "full", 0, 1.0, 90.0)
    full[-1] = full[-1]._replace(figures=json.dumps({"store_bytes": 1e8}))
    runs = (
        curve("a tenth", "LitData", 0, 10.0, 90.0),
        curve("a tenth", "LanceDB", 0, 10.0, 60.0),
    )
    curves = {one[0].run: one for one in (full, *runs)}
    found = {
        arm: Conversion(arm, 40.0, 50_000_000, "", "")
        for arm in ("LitData", "LanceDB", "xbatcher")
    }
    moved = 40.0 + 1.5e8 / LINKS["a tenth"]
    trained = 80.0  # where the curve passes 95 % of full data
    lines = conversions(curves, found).splitlines()[2:]
    ends = f"{moved + trained:.0f} | {moved / 10 + trained:.0f}"
    assert lines[0] == f"| LitData | 50 | 40.0 | {moved:.0f} | {ends} |"
    assert all(line.endswith("| never | never |") for line in lines[1:])
