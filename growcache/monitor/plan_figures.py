"""The inputs and the figures of a plan: numbers with their ranges and their bases. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from growcache.cache import space
from growcache.config import Config
from growcache.monitor.plan_cache import ShardBytes
from growcache.monitor.plan_scenario import Parts
from growcache.monitor.prices import Price
from growcache.sampling.sizing import Sizing

HOUR_SECONDS = 3600.0

Basis = Literal["measured", "given", "assumed"]
_WEAKNESS: dict[Basis, int] = {"measured": 0, "given": 1, "assumed": 2}


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its possible range; None if it is unknown."""

    value: float | None
    low: float | None
    high: float | None
    basis: Basis

    @classmethod
    def exact(cls, value: float | None, basis: Basis) -> Figure:
        return cls(value, value, value, basis)

    @classmethod
    def spanning(cls, values: Sequence[float | None], basis: Basis) -> Figure:
        """Return the first value, with the range of all known values."""
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
        """Return ``number`` divided by the figure."""
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
    link_bytes_per_second: Figure  # infinite if latency or processors are the limit
    limited_by: str  # link, latency or processor
    visit_seconds: Figure
    visit_bytes: Figure
    visit_requests: Figure
    visit_samples: Figure
    cpu_seconds: Figure  # of a visit
    disk_bytes_per_second: Figure
    free_bytes: Figure  # on the disk for the cache, including its present bytes
    startup_seconds: Figure  # until the first permit
    population_samples: Figure  # infinite if a user's function draws
    consumption: Figure | None  # samples per second, of all jobs together
    min_samples: Figure
    price: Price | None = None
    price_basis: Basis = "assumed"
    is_listed: bool = True  # to its end
    jobs: int = 1  # that train on the cache; one loop represents all
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
        """Samples in a full cache."""
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
    """A problem of a plan, and its remedy."""

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
    """The figures of a plan by name, and the growth of the cache."""

    figures: Mapping[str, Figure]
    curve: Mapping[str, list[float | None]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Figure:
        return self.figures[name]


def plan_values(
    inputs: PlanInputs, outcome: Outcome, warned: Sequence[Warned]
) -> dict[str, Any]:
    """Return a plan as JSON values."""
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
