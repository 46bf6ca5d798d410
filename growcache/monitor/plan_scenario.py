"""The inputs and results of a simulation: a store, parts, a training loop, and amounts over time.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from growcache.config import Config
from growcache.monitor.plan_cache import ShardBytes
from growcache.monitor.plan_reader import Consumption
from growcache.sampling.sizing import Sizing


@dataclass(frozen=True, slots=True)
class Store:
    """A store, as the rate of its samples."""

    bytes_per_second: float  # of all reads together; infinite if only latency is the limit
    visit_seconds: float  # of a visit without others
    visit_bytes: float  # read by one visit
    visit_samples: float
    cpu_seconds: float  # of a sampler, per visit
    disk_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts to draw, by stratum: the share of the draws, and the number of parts."""

    shares: tuple[float, ...]
    counts: tuple[float, ...]
    replacement: bool = False
    others: float = 0.0  # parts that other nodes draw

    @property
    def total(self) -> float:
        return sum(self.counts)

    def coverage(self, drawn: float) -> float | None:
        """Return the share of different parts among all, or None if parts are endless."""
        if not math.isfinite(self.total) or not self.total:
            return None
        if self.replacement:
            return -math.expm1(-drawn / self.total)
        pairs = zip(self.shares, self.counts, strict=True)
        distinct = sum(min(drawn * share, parts) for share, parts in pairs)
        return distinct / (self.total + self.others)

    @property
    def until_complete(self) -> float:
        """Number of draws after which every part was drawn once."""
        pairs = zip(self.shares, self.counts, strict=True)
        return math.inf if self.replacement else max(parts / share for share, parts in pairs)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A simulated case: a configuration, its sizes, a store, and optionally a training loop."""

    config: Config
    sizing: Sizing
    record_bytes: int
    shard_bytes: ShardBytes
    catalog_bytes: int
    parts: Parts
    store: Store
    consumption: Consumption | None
    startup_seconds: float
    memory_bytes: int
    cores: int
    horizon_seconds: float


class Moment(NamedTuple):
    """The state at one time, with amounts since the start."""

    at: float
    samples: float
    bytes: float
    drawn: float
    parts: float
    evicted_samples: float
    delivered: float
    egress_bytes: float
    visits: float
    waited_seconds: float


@dataclass(frozen=True)  # without slots, because of its cached properties
class Run:
    """The result of a scenario."""

    moments: Sequence[Moment]
    first_batch_at: float
    full_at: float
    complete_at: float
    ess_samples: float  # at the horizon, or at an earlier end
    ess_drawn: float  # draws until then
    ends_at_rest: bool  # whether nothing is added any more

    def at(self, seconds: float) -> Moment:
        """Return the state at a time. After the simulated time it follows the last rates."""
        last = self.moments[-1]
        if seconds <= last.at:
            times, *_ = self._columns
            found = Moment(*(float(np.interp(seconds, times, one)) for one in self._columns))
        else:
            rates, more = self.rates, seconds - last.at
            pairs = zip(last, rates, strict=True)
            found = Moment(*(value + rate * more for value, rate in pairs))
        return found._replace(evicted_samples=found.drawn - found.samples)

    def ess_at(self, seconds: float) -> float:
        """Return the effective sample size, which grows with the draws while the rates stay."""
        return self.ess_samples * max(1.0, self.at(seconds).drawn / max(1.0, self.ess_drawn))

    @cached_property
    def _columns(self) -> npt.NDArray[np.float64]:
        return np.array(self.moments, np.float64).T

    @cached_property
    def rates(self) -> Moment:
        """The change per second over the last turnover, or else over the last half."""
        moments = self._last_moments()
        seconds = moments[:, 0] - moments[0, 0]
        slopes = seconds - seconds.mean()
        weights = slopes / max(1e-9, float((slopes**2).sum()))
        grown = Moment(*(weights @ moments).tolist())._replace(at=1.0, samples=0.0, bytes=0.0)
        if self.ends_at_rest:
            return Moment(1.0, *[0.0] * (len(grown) - 1))._replace(delivered=grown.delivered)
        # Reads are draws, but reads and commits happen in different steps.
        last = self.moments[-1]
        per_part = grown.parts / max(1e-9, last.parts)
        return grown._replace(
            visits=last.visits * per_part, egress_bytes=last.egress_bytes * per_part
        )

    def _last_moments(self) -> npt.NDArray[np.float64]:
        last = self.moments[-1]
        begin = self.full_at if self.full_at < last.at else 0.0
        since = begin + (last.at - begin) / 3
        found = np.array([moment for moment in self.moments if moment.at >= since], np.float64)
        return found if len(found) > 1 else np.array(self.moments[-2:], np.float64)
