"""Plans: pure functions of their inputs, checked for what must hold whatever the inputs are."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from growcache.cli.cli import main
from growcache.cli.plan import swept
from growcache.errors import ConfigError
from growcache.humanize import in_count
from growcache.monitor.plan import plan, scenarios
from growcache.monitor.plan_figures import OUTCOMES, Figure, PlanInputs
from growcache.monitor.plan_scenario import Parts, Run
from growcache.monitor.plan_simulation import simulate
from growcache.monitor.plan_warnings import warnings_of
from growcache.monitor.prices import find_price, known_prices, usual_price
from tests.monitor.planning import SAMPLE_BYTES, plan_inputs

HOUR = 3600.0
# Without a search for the smallest failing case, because a simulation takes long.
QUICK = settings(max_examples=3, deadline=None, phases=(Phase.explicit, Phase.generate))
LINKS = st.floats(2e6, 200e6)
LOOPS = st.floats(50, 2000)
BOUNDS = st.sampled_from(["2GB", "5GB", "20GB"])


def run_of(inputs: PlanInputs) -> Run:
    return simulate(scenarios(inputs)[0])


@QUICK
@given(link=LINKS, loop=LOOPS, bound=BOUNDS)
def test_a_faster_link_fills_the_cache_sooner_and_lowers_reuse(
    link: float, loop: float, bound: str
) -> None:
    slow, fast = (run_of(plan_inputs(one, loop, max_bytes=bound)) for one in (link, 2 * link))
    assert fast.full_at <= slow.full_at * 1.001
    assert fast.first_batch_at <= slow.first_batch_at * 1.001
    assert fast.at(HOUR).drawn >= 0.95 * slow.at(HOUR).drawn
    reuses = [run.at(HOUR).delivered / run.at(HOUR).drawn for run in (fast, slow)]
    assert reuses[0] <= 1.06 * reuses[1]


@QUICK
@given(link=LINKS, loop=LOOPS)
def test_a_larger_cache_takes_longer_to_fill_and_never_draws_less(
    link: float, loop: float
) -> None:
    small, large = (
        run_of(plan_inputs(link, loop, max_bytes=bound)) for bound in ("2GB", "8GB")
    )
    assert small.full_at < large.full_at
    assert large.at(HOUR).drawn >= 0.95 * small.at(HOUR).drawn
    assert large.at(HOUR).samples >= small.at(HOUR).samples


@QUICK
@given(link=LINKS, loop=LOOPS, bound=BOUNDS, at=st.floats(0, 1e5))
def test_amounts_are_consistent_at_every_time(
    link: float, loop: float, bound: str, at: float
) -> None:
    inputs = plan_inputs(link, loop, max_bytes=bound)
    run = run_of(inputs)
    now, later = run.at(at), run.at(at + 100)
    assert now.samples == pytest.approx(now.drawn - now.evicted_samples)
    assert now.bytes <= int(inputs.config.cache.max_bytes)
    assert now.delivered <= loop * at + 1
    assert all(b >= a - 1e-6 * abs(a) for a, b in zip(now[3:], later[3:], strict=True))
    assert (now.drawn + 1) * SAMPLE_BYTES <= max(1, at) * 1.1 * link + 2e9
    assert now.egress_bytes >= now.drawn * SAMPLE_BYTES * 0.98


def test_all_figures_have_a_range_and_a_basis() -> None:
    outcome = plan(plan_inputs(error=0.1))
    for name in OUTCOMES:
        value = outcome[name].to_json()
        assert set(value) == {"value", "low", "high", "basis"}
        assert value["low"] <= value["value"] <= value["high"], name
    assert outcome["first_batch_seconds"].basis == "measured"
    assert outcome["reuse"].basis == "given"
    assert outcome["cost_usd_per_day"].basis == "assumed"
    assert all(len(column) == 61 for column in outcome.curve.values())
    orjson.dumps(outcome.curve)


def test_figures_follow_from_link_and_loop() -> None:
    """Before the cache is full the arithmetic is that of a pipe."""
    outcome = plan(plan_inputs(link=50e6, consume=900.0, max_bytes="500GB"))
    drawn = outcome["samples_per_second"].number
    assert drawn == pytest.approx(50e6 / SAMPLE_BYTES, rel=0.04)
    assert outcome["egress_bytes_per_hour"].number == pytest.approx(50e6 * HOUR, rel=0.01)
    assert outcome["coverage"].number == pytest.approx(drawn * HOUR / 4e6, rel=0.02)
    assert outcome["first_batch_seconds"].number == pytest.approx(2 + 1000 / drawn, rel=0.4)
    full = outcome["full_seconds"].number
    assert full == pytest.approx(500e9 / 50e6, rel=0.05)
    assert outcome["cost_usd_per_day"].number == pytest.approx(50e-3 * 86_400 * 0.09, rel=0.03)


def test_a_source_that_fits_is_complete_and_costs_no_more() -> None:
    outcome = plan(plan_inputs(population=20_000.0))
    assert outcome["full_seconds"].value is None
    assert outcome["complete_seconds"].number == pytest.approx(
        20_000 * SAMPLE_BYTES / 50e6, rel=0.1
    )
    assert outcome["coverage"].value == 1
    assert outcome["cost_usd_per_day"].number == pytest.approx(
        20_000 * SAMPLE_BYTES * 0.09e-9, rel=0.05
    )


def test_without_consumption_only_what_does_not_need_it_is_given() -> None:
    outcome = plan(plan_inputs(consume=None))
    assert outcome["first_batch_seconds"].value is not None
    assert outcome["full_seconds"].value is not None
    for name in ("turnover_seconds", "coverage", "reuse", "egress_bytes_per_hour"):
        assert outcome[name].value is None
    low, high = outcome["coverage"].low, outcome["coverage"].high
    assert low is not None
    assert high is not None
    assert low < high
    assert "consumption" in {
        one.code for one in warnings_of(plan_inputs(consume=None), outcome)
    }


def test_an_endless_source_has_no_coverage() -> None:
    endless = Parts((1.0,), (math.inf,), replacement=True)
    population = Figure(math.inf, None, None, "measured")
    changes = {"parts": endless, "population_samples": population}
    outcome = plan(plan_inputs(changes=changes))
    assert outcome["coverage"].to_json()["value"] is None
    assert outcome["reuse"].value is not None


@pytest.mark.parametrize(
    ("parts", "drawn", "coverage"),
    [
        (Parts((1.0,), (100.0,)), 50, 0.5),
        (Parts((1.0,), (100.0,)), 250, 1.0),
        (Parts((0.5, 0.5), (10.0, 90.0)), 40, 0.3),
        (Parts((1.0,), (100.0,), replacement=True), 100, 1 - 1 / math.e),
    ],
)
def test_coverage_is_what_a_status_says(parts: Parts, drawn: float, coverage: float) -> None:
    assert parts.coverage(drawn) == pytest.approx(coverage)


def test_a_limit_on_reuse_makes_training_wait() -> None:
    waits = plan(plan_inputs(link=10e6, max_reuse=2, on_max_reuse="wait"))
    warns = plan(plan_inputs(link=10e6, max_reuse=2))
    assert waits["exposed_wait_share"].number > 0.5
    assert waits["reuse_when_full"].number < 2.6
    assert warns["exposed_wait_share"].value == 0


@pytest.mark.parametrize(
    "inputs",
    [
        plan_inputs(max_bytes="2TB", error=0.1),
        plan_inputs(link=1e6, consume=5000.0, error=0.1),
        plan_inputs(link=1e9, consume=4000.0, max_bytes="100GB", error=0.1),
    ],
)
@pytest.mark.slow
def test_a_plan_takes_about_two_seconds(inputs: PlanInputs) -> None:
    began = time.process_time()
    plan(inputs)
    assert time.process_time() - began < 5 * 2.0


CASES: dict[str, dict[str, Any]] = {
    "disk": {"max_bytes": "2TB"},
    "min_samples": {"max_bytes": "200MB"},
    "reuse": {"link": 5e6, "consume": 1000.0},
    "throttled": {"link": 200e6, "consume": 400.0},
    "neighbours": {"sampling": {"samples_per_object": 16}, "visit": 16},
    "windows": {"max_bytes": "400MB"},
    "refused": {"sampling": {"shard_samples": 20_000}},
    "jobs": {"changes": {"jobs": 2}},
}


@pytest.mark.parametrize("code", CASES)
def test_a_bad_plan_says_what_would_mend_it(code: str) -> None:
    inputs = plan_inputs(**CASES[code])
    found = {one.code: one for one in warnings_of(inputs, plan(inputs))}
    assert code in found
    assert len(found[code].remedy) > 10


def test_the_warned_rate_is_that_of_the_reuse() -> None:
    inputs = plan_inputs(**CASES["throttled"])
    outcome = plan(inputs)
    (found,) = [one for one in warnings_of(inputs, outcome) if one.code == "throttled"]
    drawn = 400.0 / (outcome["reuse_when_full"].value or 1.0)
    assert f"training: {in_count(drawn)} of " in found.text


def test_nothing_is_said_about_a_good_plan() -> None:
    good = plan_inputs(consume=400.0, max_bytes="50GB")
    assert not warnings_of(good, plan(good))


def test_the_remedy_against_a_small_bound_is_one() -> None:
    inputs = plan_inputs(max_bytes="200MB")
    (found,) = [one for one in warnings_of(inputs, plan(inputs)) if one.code == "min_samples"]
    better = plan_inputs(max_bytes=found.remedy.rpartition(" ")[2])
    assert "min_samples" not in {one.code for one in warnings_of(better, plan(better))}


# ------------------------------------------------------------------------ prices


def test_every_price_names_its_page() -> None:
    for price in known_prices():
        assert price.source.startswith("https://")
        assert find_price(price.name) == find_price(f"{price.provider}/{price.name}")
        assert price.standing == (
            f"seen {price.seen}" if price.seen else "commonly quoted, not verified"
        )


def test_a_price_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("{region: here, class: tape, egress_per_gb: 0.5, per_1000_get: 2}")
    own = find_price(str(file))
    assert (own.dollars(2e9, 3000), own.standing) == (7, "your own")
    file.write_text("{egress_per_gb: cheap, per_1000_get: 2}")
    with pytest.raises(ConfigError, match="US dollars"):
        find_price(str(file))
    with pytest.raises(ConfigError, match="us-east-1/standard"):
        find_price("nowhere/standard")


def test_the_usual_price_is_that_of_the_provider() -> None:
    assert usual_price(["https://storage.googleapis.com"]) == find_price("us-central1/standard")
    assert usual_price(["https://s3.eu-west-1.amazonaws.com"]) == find_price(
        "us-east-1/standard"
    )
    assert usual_price(["http://minio:9000"]) is None
    assert usual_price([None]) is None
    assert usual_price(["https://storage.googleapis.com", None]) is None


# ------------------------------------------------------------------------ the command


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for i in range(20):
        rows = np.random.default_rng(i).normal(size=(64, 32)).astype("<f4")
        np.save(tmp_path / "data" / f"{i}.npy", rows)
    file = tmp_path / "growcache.yaml"
    file.write_text(
        f"source: {{url: '{tmp_path}/data/*.npy', options: {{axis: 0}}}}\n"
        "cache: {path: cache, max_bytes: 20MB}\n"
    )
    return file


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main(["plan", *arguments]) == 0
    return orjson.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_command_measures_a_source(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, str(config), "--consume", "1000/s", "--json", "--horizon", "10min")
    assert set(OUTCOMES) <= set(found)
    assert found["coverage"] == {"value": 1.0, "low": 1.0, "high": 1.0, "basis": "given"}
    assert found["inputs"]["population_samples"]["value"] == 20 * 64
    assert found["inputs"]["sample_bytes"] == {
        **dict.fromkeys(("value", "low", "high"), 128),
        "basis": "measured",
    }
    assert found["horizon_seconds"] == 600
    assert not (config.parent / "cache").exists()


def test_a_sweep_compares(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = (
        "--sweep",
        "cache.max_bytes=2MB,20MB",
        "--link",
        "1MB/s",
        "--consume",
        "5000",
        "--horizon",
        "60",
    )
    found = planned(capsys, str(config), *sweep, "--json")
    assert [one["set"] for one in found] == swept("cache.max_bytes=2MB,20MB")
    assert [one["max_bytes"] for one in found] == [2_000_000, 20_000_000]
    assert {one["inputs"]["link_bytes_per_second"]["basis"] for one in found} == {"given"}
    main(["plan", str(config), *sweep])
    text = capsys.readouterr().out
    assert "2MB" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "wrong",
    [
        ("--consume", "fast"),
        ("--link", "0"),
        ("--horizon", "soon"),
        ("--sweep", "cache.max_bytes"),
        ("--price", "moon/standard"),
    ],
)
def test_bad_usage_is_told(
    wrong: tuple[str, str], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config), *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


def test_scenarios_differ_only_where_something_is_uncertain() -> None:
    loop = Figure(400.0, 300.0, 500.0, "measured")
    assert len(scenarios(plan_inputs())) == 1
    assert len(scenarios(plan_inputs(error=0.1))) == 3
    assert len(scenarios(replace(plan_inputs(error=0.1), consumption=loop))) == 5
