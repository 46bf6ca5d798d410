"""The consequences of a configuration: pure functions of measured, given and assumed inputs.

`plan` simulates the service several times (`plan_simulation`), with each uncertain input at its
value, its low end and its high end. Every figure of the outcome has the range of these results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from growcache.monitor.plan_figures import (
    HOUR_SECONDS,
    Basis,
    Figure,
    Outcome,
    PlanInputs,
    weakest,
)
from growcache.monitor.plan_reader import OPEN_SECONDS, Consumption
from growcache.monitor.plan_scenario import Moment, Run, Scenario, Store
from growcache.monitor.plan_simulation import simulate

DAY_SECONDS = 86_400.0
CURVE_POINTS = 60
ALIKE_SHARE = 0.01  # by which two equal figures may differ


# ------------------------------------------------------------------------ scenarios


def scenario_of(inputs: PlanInputs, pick: Callable[[str, Figure], float]) -> Scenario:
    """Return the scenario in which each uncertain input has the picked value."""

    def at(name: str) -> float:
        return pick(name, getattr(inputs, name))

    return Scenario(
        inputs.config,
        inputs.sizing,
        inputs.record_bytes,
        inputs.shard_bytes,
        inputs.catalog_bytes,
        inputs.parts,
        _store(at),
        _consumption(inputs, at),
        at("startup_seconds"),
        inputs.memory_bytes,
        inputs.cores,
        inputs.horizon_seconds,
    )


def _store(at: Callable[[str], float]) -> Store:
    return Store(
        at("link_bytes_per_second"),
        at("visit_seconds"),
        at("visit_bytes"),
        at("visit_samples"),
        at("cpu_seconds"),
        at("disk_bytes_per_second"),
    )


def _consumption(inputs: PlanInputs, at: Callable[[str], float]) -> Consumption | None:
    if inputs.consumption is None:
        return None
    cache = inputs.config.cache
    return Consumption(
        at("consumption"),
        int(at("min_samples")),
        int(inputs.sample_bytes),
        max_reuse=cache.max_reuse,
        waits=cache.on_max_reuse == "wait",
    )


SLOWER = {"link_bytes_per_second": "low", "visit_seconds": "high", "startup_seconds": "high"}
FASTER = {"link_bytes_per_second": "high", "visit_seconds": "low", "startup_seconds": "low"}


def _picking(ends: Mapping[str, str]) -> Callable[[str, Figure], float]:
    def pick(name: str, figure: Figure) -> float:
        found = getattr(figure, ends.get(name, "value"))
        return float(figure.number if found is None else found)

    return pick


def scenarios(inputs: PlanInputs) -> list[Scenario]:
    """Return the expected scenario first, and then those at the ends of uncertain inputs."""
    ends: list[Mapping[str, str]] = [{}, SLOWER, FASTER]
    if inputs.consumption is not None and inputs.consumption.low != inputs.consumption.high:
        ends += [{"consumption": "low"}, {"consumption": "high"}]
    found = [scenario_of(inputs, _picking(end)) for end in ends]
    if inputs.consumption is None:  # without a known consumption, shards may leave at any time
        freely = inputs.config.cache.model_copy(update={"min_uses": 0})
        config = inputs.config.model_copy(update={"cache": freely})
        found += [replace(one, config=config) for one in found]
    unique: list[Scenario] = []
    for one in found:
        if one not in unique:
            unique.append(one)
    return unique


# ------------------------------------------------------------------------ outcomes


def plan(inputs: PlanInputs) -> Outcome:
    runs = [simulate(one) for one in scenarios(inputs)]
    moments = [run.at(inputs.horizon_seconds) for run in runs]
    found = _Outcomes(inputs, runs, moments)
    figures = found.of_time() | found.of_cache() | found.of_store() | found.of_training()
    return Outcome(figures, _curve(inputs, runs[0]))


@dataclass(frozen=True, slots=True)
class _Outcomes:
    """The runs of all scenarios, expected one first, and the state of each at the horizon."""

    inputs: PlanInputs
    runs: list[Run]
    moments: list[Moment]

    def of_time(self) -> dict[str, Figure]:
        link = self._supply.basis
        runs, trained = self.runs, self._trained
        complete = weakest([self._supply, self.inputs.population_samples])
        return {
            "first_batch_seconds": Figure.spanning(
                [_first_batch(self.inputs, run) for run in runs], link
            ),
            "full_seconds": Figure.spanning([_known(run.full_at) for run in runs], link),
            "complete_seconds": Figure.spanning(
                [_known(r.complete_at) for r in runs], complete
            ),
            "turnover_seconds": self._open(map(_turnover, runs), trained),
        }

    def of_cache(self) -> dict[str, Figure]:
        inputs, moments = self.inputs, self.moments
        seen = weakest([Figure.exact(None, self._trained), inputs.population_samples])
        coverage = self._open((inputs.parts.coverage(m.parts) for m in moments), seen)
        if not inputs.is_listed:  # there are at least as many as were listed
            coverage = replace(coverage, value=None, low=None)
        return {
            "samples": self._open((m.samples for m in moments), self._trained),
            "coverage": coverage,
            "bound_bytes": inputs.free_bytes,
        }

    def of_store(self) -> dict[str, Figure]:
        inputs, basis, horizon = self.inputs, self._trained, self.inputs.horizon_seconds
        of_visit, moments = inputs.visit_requests.number, self.moments
        hours = horizon / HOUR_SECONDS
        cost = self._open((_cost(inputs, run) for run in self.runs), basis)
        if inputs.price is None or inputs.price_basis == "assumed":
            cost = replace(cost, basis="assumed")
        drawn = self._open((m.drawn / horizon for m in moments), basis)
        if not inputs.visit_bytes.number:  # growcache does not see a Dataset's own reads
            unseen = ("requests_per_second", "egress_bytes_per_hour", "cost_usd_per_day")
            names = (*unseen, "read_amplification")
            return {
                "samples_per_second": drawn,
                **dict.fromkeys(names, Figure.exact(None, basis)),
            }
        return {
            "samples_per_second": drawn,
            "requests_per_second": self._open(
                (m.visits * of_visit / horizon for m in moments), basis
            ),
            "egress_bytes_per_hour": self._open(
                (m.egress_bytes / hours for m in moments), basis
            ),
            "read_amplification": Figure.exact(inputs.read_amplification, "measured"),
            "cost_usd_per_day": cost,
        }

    def of_training(self) -> dict[str, Figure]:
        names = ("reuse", "reuse_when_full", "ess_samples", "exposed_wait_share")
        if self.inputs.consumption is None:
            return {name: Figure.exact(None, "assumed") for name in names}
        horizon, basis = self.inputs.horizon_seconds, self._trained
        pairs = list(zip(self.runs, self.moments, strict=True))
        values: Iterable[list[float | None]] = (
            [m.delivered / m.drawn if m.drawn else None for m in self.moments],
            [_reuse_when_full(run) for run in self.runs],
            [run.ess_at(horizon) for run in self.runs],
            [_wait_share(run, moment, horizon) for run, moment in pairs],
        )
        found = (Figure.spanning(some, basis) for some in values)
        return dict(zip(names, found, strict=True))

    @property
    def _supply(self) -> Figure:
        """The input that determines the rate of samples."""
        link = self.inputs.link_bytes_per_second
        return link if math.isfinite(link.number) else self.inputs.visit_seconds

    @property
    def _trained(self) -> Basis:
        loop = self.inputs.consumption
        return weakest([self._supply, *([loop] if loop is not None else [])])

    def _open(self, values: Iterable[float | None], basis: Basis) -> Figure:
        """Return a figure, without a value if it depends on an unknown consumption."""
        found = Figure.spanning(list(values), basis)
        if self.inputs.consumption is None and not _same(found.low, found.high):
            return replace(found, value=None)
        return found


def _same(low: float | None, high: float | None) -> bool:
    if low is None or high is None:
        return low is high
    return high - low <= ALIKE_SHARE * abs(high)


def _known(at: float) -> float | None:
    return at if math.isfinite(at) else None


def _first_batch(inputs: PlanInputs, run: Run) -> float | None:
    if inputs.consumption is not None:
        return _known(run.first_batch_at)
    wanted = min(inputs.min_samples.number, inputs.population_samples.number)
    at = next((m.at for m in run.moments if m.samples >= wanted), None)
    return None if at is None else at + OPEN_SECONDS


def _turnover(run: Run) -> float | None:
    rate = run.rates.drawn
    if not math.isfinite(run.full_at) or rate <= 0:
        return None
    return run.moments[-1].samples / rate


def _reuse_when_full(run: Run) -> float | None:
    rates = run.rates
    if not math.isfinite(run.full_at) or rates.drawn <= 0:
        return None
    return rates.delivered / rates.drawn


def _wait_share(run: Run, moment: Moment, horizon: float) -> float | None:
    trained = horizon - run.first_batch_at
    return moment.waited_seconds / trained if trained > 0 else None


def _cost(inputs: PlanInputs, run: Run) -> float | None:
    """Return the cost of the first day in dollars."""
    if inputs.price is None:
        return None
    day = run.at(DAY_SECONDS)
    requests = day.visits * inputs.visit_requests.number
    return inputs.price.dollars(day.egress_bytes, requests)


def _curve(inputs: PlanInputs, run: Run) -> dict[str, list[float | None]]:
    """Return columns over time, with the names of the history's."""
    seconds = [inputs.horizon_seconds * i / CURVE_POINTS for i in range(CURVE_POINTS + 1)]
    found = [run.at(at) for at in seconds]
    names = ("samples", "bytes", "drawn", "evicted_samples", "delivered", "egress_bytes")
    columns: dict[str, list[float | None]] = {"at": list(seconds)}
    columns |= {name: [round(getattr(m, name), 1) for m in found] for name in names}
    whole = inputs.is_listed
    columns["coverage"] = [inputs.parts.coverage(m.parts) if whole else None for m in found]
    columns["reuse"] = [m.delivered / m.drawn if m.drawn else None for m in found]
    return columns
