"""What a configuration leads to: pure functions of measured, given and assumed inputs.

`plan` simulates the service several times (`plan_simulation`), with each uncertain input at its value, its low and its
high end. Every figure of the outcome has the range that these span.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from growcache.cache import space
from growcache.config import Config
from growcache.monitor.plan_cache import ShardBytes
from growcache.monitor.plan_reader import OPEN_SECONDS, Consumption
from growcache.monitor.plan_scenario import Moment, Parts, Run, Scenario, Store
from growcache.monitor.plan_simulation import simulate
from growcache.monitor.prices import Price
from growcache.sampling.sizing import Sizing

DAY_SECONDS, HOUR_SECONDS = 86_400.0, 3600.0
CURVE_POINTS = 60
ALIKE_SHARE = 0.01  # by which two figures may differ and still be the same one

Basis = Literal["measured", "given", "assumed"]
_WEAKNESS: dict[Basis, int] = {"measured": 0, "given": 1, "assumed": 2}


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with the range that it may be in; None where it is not known."""

    value: float | None
    low: float | None
    high: float | None
    basis: Basis

    @classmethod
    def exact(cls, value: float | None, basis: Basis) -> Figure:
        return cls(value, value, value, basis)

    @classmethod
    def spanning(cls, values: Sequence[float | None], basis: Basis) -> Figure:
        """Return the first value, with the range of all that are known."""
        known = [value for value in values if value is not None and math.isfinite(value)]
        if not known:
            return cls.exact(None, basis)
        first = values[0] if values[0] is not None and math.isfinite(values[0]) else None
        return cls(first, min(known), max(known), basis)

    @property
    def number(self) -> float:
        assert self.value is not None
        return self.value

    def _mapped(self, change: Callable[[float], float]) -> Figure:
        ends = (None if end is None else change(end) for end in (self.low, self.high))
        low, high = ends
        return Figure(change(self.number), low, high, self.basis)

    def plus(self, number: float) -> Figure:
        return self._mapped(lambda value: value + number)

    def times(self, number: float) -> Figure:
        return self._mapped(lambda value: value * number)

    def dividing(self, number: float) -> Figure:
        """Return ``number`` over the figure."""
        found = self._mapped(lambda value: number / value)
        return replace(found, low=found.high, high=found.low)

    def to_json(self) -> dict[str, Any]:
        values = {"value": self.value, "low": self.low, "high": self.high}
        found: dict[str, Any] = {name: _finite(number) for name, number in values.items()}
        return {**found, "basis": self.basis}


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def weakest(figures: Iterable[Figure]) -> Basis:
    return max((one.basis for one in figures), key=_WEAKNESS.__getitem__, default="measured")


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything that a plan depends on."""

    config: Config
    sizing: Sizing
    parts: Parts
    shard_bytes: ShardBytes
    record_bytes: int
    sample_bytes: float
    catalog_bytes: int
    link_bytes_per_second: Figure  # infinite where latency or processors are the limit
    limited_by: str  # link, latency or processor
    visit_seconds: Figure
    visit_bytes: Figure
    visit_requests: Figure
    visit_samples: Figure
    cpu_seconds: Figure  # of a visit
    disk_bytes_per_second: Figure
    free_bytes: Figure  # of the disk, for the cache, with what it has there already
    startup_seconds: Figure  # until the first permit
    population_samples: Figure  # infinite where a user's function draws
    consumption: Figure | None  # samples per second
    min_samples: Figure
    price: Price | None = None
    price_basis: Basis = "assumed"
    is_listed: bool = True  # to its end
    memory_bytes: int = 8 << 30
    cores: int = 2
    horizon_seconds: float = HOUR_SECONDS

    @property
    def figures(self) -> Mapping[str, Figure]:
        """The inputs that have a basis, by name."""
        found = {
            name: value
            for name in self.__slots__
            if isinstance(value := getattr(self, name), Figure)
        }
        return {
            **found,
            "sample_bytes": Figure.exact(self.sample_bytes, "measured"),
            "consumption": self.consumption or Figure.exact(None, "assumed"),
        }

    @property
    def capacity_samples(self) -> int:
        """Samples that a full cache holds."""
        max_bytes = int(self.config.cache.max_bytes)
        room = max_bytes - space.fixed_budget(max_bytes).total - self.catalog_bytes
        each = self.shard_bytes.allocated(self.sizing.shard_samples)
        return max(0, room // max(1, each)) * self.sizing.shard_samples

    @property
    def read_amplification(self) -> float:
        return self.visit_bytes.number / max(
            1e-9, self.visit_samples.number * self.sample_bytes
        )


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that is bad about a plan, and what would mend it."""

    code: str
    text: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        return {"code": self.code, "text": self.text, "remedy": self.remedy}


OUTCOMES = (
    "first_batch_seconds",
    "full_seconds",
    "turnover_seconds",
    "coverage",
    "reuse",
    "ess_samples",
    "exposed_wait_share",
    "requests_per_second",
    "egress_bytes_per_hour",
    "cost_usd_per_day",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of a plan, by name, and how the cache grows."""

    figures: Mapping[str, Figure]
    curve: Mapping[str, list[float | None]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Figure:
        return self.figures[name]


def plan_values(
    inputs: PlanInputs, outcome: Outcome, warned: Sequence[Warned]
) -> dict[str, Any]:
    """Return a plan as JSON has it."""
    return {
        "cache": str(inputs.config.cache.path),
        "max_bytes": int(inputs.config.cache.max_bytes),
        "horizon_seconds": inputs.horizon_seconds,
        **{name: figure.to_json() for name, figure in outcome.figures.items()},
        "inputs": {name: figure.to_json() for name, figure in inputs.figures.items()},
        "price": None if inputs.price is None else inputs.price.to_json(inputs.price_basis),
        "warnings": [one.to_json() for one in warned],
        "curve": outcome.curve,
    }


# ------------------------------------------------------------------------ scenarios


def scenario_of(inputs: PlanInputs, pick: Callable[[str, Figure], float]) -> Scenario:
    """Return the world in which each uncertain input has the picked value."""

    def at(name: str) -> float:
        return pick(name, getattr(inputs, name))

    config, store_seconds = inputs.config, at("visit_seconds")
    store = Store(
        at("link_bytes_per_second"),
        store_seconds,
        at("visit_bytes"),
        at("visit_samples"),
        at("cpu_seconds"),
        at("disk_bytes_per_second"),
    )
    consumption = None
    if inputs.consumption is not None:
        consumption = Consumption(
            at("consumption"),
            int(at("min_samples")),
            int(inputs.sample_bytes),
            max_reuse=config.cache.max_reuse,
            waits=config.cache.on_max_reuse == "wait",
        )
    return Scenario(
        config,
        inputs.sizing,
        inputs.record_bytes,
        inputs.shard_bytes,
        inputs.catalog_bytes,
        inputs.parts,
        store,
        consumption,
        at("startup_seconds"),
        inputs.memory_bytes,
        inputs.cores,
        inputs.horizon_seconds,
    )


SLOWER = {"link_bytes_per_second": "low", "visit_seconds": "high", "startup_seconds": "high"}
FASTER = {"link_bytes_per_second": "high", "visit_seconds": "low", "startup_seconds": "low"}


def _picking(ends: Mapping[str, str]) -> Callable[[str, Figure], float]:
    def pick(name: str, figure: Figure) -> float:
        found = getattr(figure, ends.get(name, "value"))
        return float(figure.number if found is None else found)

    return pick


def scenarios(inputs: PlanInputs) -> list[Scenario]:
    """Return the expected world first, then those at the ends of what is uncertain."""
    ends: list[Mapping[str, str]] = [{}, SLOWER, FASTER]
    if inputs.consumption is not None and inputs.consumption.low != inputs.consumption.high:
        ends += [{"consumption": "low"}, {"consumption": "high"}]
    found = [scenario_of(inputs, _picking(end)) for end in ends]
    if inputs.consumption is None:  # nothing is known of when shards may go: at will, at most
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
    link, population = _supply(inputs), inputs.population_samples
    trained = [link, *_known(inputs.consumption)]
    unknown_loop = inputs.consumption is None

    def over(values: Iterable[float | None], *main: Figure, loop: bool = True) -> Figure:
        found = Figure.spanning(list(values), weakest(main))
        if unknown_loop and loop and not _same(found.low, found.high):
            return replace(found, value=None)
        return found

    horizon = inputs.horizon_seconds
    figures = {
        "first_batch_seconds": over((_first_batch(inputs, r) for r in runs), link, loop=False),
        "full_seconds": over((_time(run.full_at) for run in runs), link, loop=False),
        "complete_seconds": over((_time(r.complete_at) for r in runs), link, population),
        "turnover_seconds": over(map(_turnover, runs), *trained),
        "coverage": over(
            (inputs.parts.coverage(m.parts) for m in moments), *trained, population
        ),
        "exposed_wait_share": over(
            (_wait_share(r, m, horizon) for r, m in zip(runs, moments, strict=True)), *trained
        ),
        "samples_per_second": over((m.drawn / horizon for m in moments), *trained),
        "samples": over((m.samples for m in moments), *trained),
        "requests_per_second": over(
            (m.visits * inputs.visit_requests.number / horizon for m in moments),
            *trained,
            inputs.visit_requests,
        ),
        "egress_bytes_per_hour": over(
            (m.egress_bytes * HOUR_SECONDS / horizon for m in moments), *trained
        ),
        "cost_usd_per_day": over((_cost(inputs, run) for run in runs), *trained),
        "read_amplification": Figure.exact(inputs.read_amplification, "measured"),
        "bound_bytes": inputs.free_bytes,
    }
    figures |= _of_training(inputs, runs, moments, trained)
    if not inputs.is_listed:  # what was listed is the least that there is
        figures["coverage"] = replace(figures["coverage"], value=None, low=None)
    if inputs.price is None:
        figures["cost_usd_per_day"] = Figure.exact(None, "assumed")
    elif inputs.price_basis == "assumed":
        figures["cost_usd_per_day"] = replace(figures["cost_usd_per_day"], basis="assumed")
    return Outcome(figures, _curve(inputs, runs[0]))


def _of_training(
    inputs: PlanInputs, runs: Sequence[Run], moments: Sequence[Moment], main: Sequence[Figure]
) -> dict[str, Figure]:
    if inputs.consumption is None:
        names = ("reuse", "reuse_when_full", "ess_samples", "exposed_wait_share")
        return {name: Figure.exact(None, "assumed") for name in names}
    basis = weakest(main)
    values: dict[str, list[float | None]] = {
        "reuse": [m.delivered / m.drawn if m.drawn else None for m in moments],
        "reuse_when_full": [_reuse_when_full(run) for run in runs],
        "ess_samples": [run.ess_at(inputs.horizon_seconds) for run in runs],
    }
    return {name: Figure.spanning(found, basis) for name, found in values.items()}


def _known(figure: Figure | None) -> list[Figure]:
    return [] if figure is None else [figure]


def _supply(inputs: PlanInputs) -> Figure:
    """Return the input that says how fast samples come."""
    if math.isfinite(inputs.link_bytes_per_second.number):
        return inputs.link_bytes_per_second
    return inputs.visit_seconds


def _same(low: float | None, high: float | None) -> bool:
    if low is None or high is None:
        return low is high
    return high - low <= ALIKE_SHARE * abs(high)


def _time(at: float) -> float | None:
    return at if math.isfinite(at) else None


def _first_batch(inputs: PlanInputs, run: Run) -> float | None:
    if inputs.consumption is not None:
        return _time(run.first_batch_at)
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
    """Return the dollars of the first day."""
    if inputs.price is None:
        return None
    day = run.at(DAY_SECONDS)
    requests = day.visits * inputs.visit_requests.number
    return inputs.price.dollars(day.egress_bytes, requests)


def _curve(inputs: PlanInputs, run: Run) -> dict[str, list[float | None]]:
    """Return columns over time, named as those of the history."""
    seconds = [inputs.horizon_seconds * i / CURVE_POINTS for i in range(CURVE_POINTS + 1)]
    found = [run.at(at) for at in seconds]
    names = ("samples", "bytes", "drawn", "evicted_samples", "delivered", "egress_bytes")
    columns: dict[str, list[float | None]] = {"at": list(seconds)}
    columns |= {name: [round(getattr(m, name), 1) for m in found] for name in names}
    whole = inputs.is_listed
    columns["coverage"] = [inputs.parts.coverage(m.parts) if whole else None for m in found]
    columns["reuse"] = [m.delivered / m.drawn if m.drawn else None for m in found]
    return columns
