"""The position of a loader as a value, and how another loader continues from it.

A position counts the rows of the pass's plan that all ranks together delivered, regardless of
what was made ahead. It contains the plan's shards, so it decides the order of everything after
it, and any number of ranks can share the rest. Shards that are not cached here are refetched:
the lease lists them, and the service draws them before anything new.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from growcache.errors import ConfigError
from growcache.loading.options import ORDER_OPTIONS, LoaderOptions
from growcache.loading.plan import (
    PassPlan,
    PassPosition,
    PlannedShard,
    SampleOrder,
    Window,
    locate_samples,
)
from growcache.loading.saved_pass import (
    pass_from_dict,
    pass_of_version_2,
    pass_to_dict,
)
from growcache.loading.transform import TransformSchema

VERSION = 3
READ_VERSIONS = (2, VERSION)


@dataclass(frozen=True, slots=True)
class Position:
    epoch: int = 0  # of the mark; without a mark, the next epoch
    step: int = 0  # number of its delivered batches
    next_epoch: int = 0  # of the next iteration; later if the epoch was abandoned
    next_pass: int = 0  # first with a new snapshot
    global_step: int = 0  # number of delivered batches of all epochs
    fingerprint: str | None = None  # of the cache; None before the first sample
    transform_schema: TransformSchema | None = None
    mark: PassPosition | None = None  # None: the next epoch starts with a new snapshot
    plan: PassPlan | None = None

    def to_dict(self, options: LoaderOptions) -> dict[str, Any]:
        return {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "options": {name: getattr(options, name) for name in ORDER_OPTIONS},
            "epoch": self.epoch,
            "step": self.step,
            "next_epoch": self.next_epoch,
            "next_pass": self.next_pass,
            "global_step": self.global_step,
            "form": None if self.transform_schema is None else self.transform_schema._asdict(),
            "pass": pass_to_dict(self.plan, self.mark, options),
        }

    @classmethod
    def from_dict(cls, values: object, options: LoaderOptions) -> Self:
        """Return the position in a state.

        Raises:
            ConfigError: The values are not a state, or belong to a loader with other arguments.
        """
        if not isinstance(values, Mapping) or values.get("version") not in READ_VERSIONS:
            raise ConfigError(
                f"expected what state_dict() of a loader returned, of version {VERSION} or "
                f"before, found {_describe_state(values)}",
                code="GC604",
            )
        try:
            _refuse_other_options(values["options"], options)
            decided, mark, plan = values["form"], None, None
            if values["pass"] is not None:
                plan, mark = _read_pass(values, options)
            return cls(
                fingerprint=values["fingerprint"],
                transform_schema=None if decided is None else TransformSchema(**decided),
                mark=mark,
                plan=plan,
                # States of earlier versions do not count the batches of all epochs.
                **{name: int({"global_step": 0, **values}[name]) for name in _COUNTS},
            )
        except (LookupError, TypeError, ValueError, AttributeError, zlib.error) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"this state of a loader is damaged: {type(error).__name__}: {error}",
                code="GC604",
            ) from None


def _read_pass(
    values: Mapping[str, Any], options: LoaderOptions
) -> tuple[PassPlan, PassPosition]:
    if values["version"] == 2:
        return pass_of_version_2(values["pass"])
    return pass_from_dict(values["pass"], options)


_COUNTS = [field.name for field in fields(Position) if field.type == "int"]


def _describe_state(values: object) -> str:
    if isinstance(values, Mapping) and "version" in values:
        return f"version {values['version']!r}"
    return f"{values!r:.60}"


def _refuse_other_options(saved: Mapping[str, Any], options: LoaderOptions) -> None:
    differing = [
        f"{name} (saved {saved.get(name)!r}, here {getattr(options, name)!r})"
        for name in ORDER_OPTIONS
        if saved.get(name) != getattr(options, name)
    ]
    if differing:
        raise ConfigError(
            f"the state belongs to a loader with other arguments: {', '.join(differing)}; "
            "create this loader with the arguments of the state",
            code="GC604",
        )


@dataclass(frozen=True, slots=True)
class RemainingPass:
    plan: PassPlan
    windows: tuple[Window, ...]
    mark: PassPosition
    whole_window: bool = False  # delivered rows may replace unreadable ones

    @property
    def first(self) -> int | None:
        """Index of the window in which the pass continues; None if nothing is left."""
        for window in self.windows:
            if self.mark.position < window.first + len(window):
                return window.index
        return None

    def started_shards(self) -> set[int]:
        before, _ = self._split()
        return before & self.needed()

    def needed(self) -> set[int]:
        if self.first is None:
            return set()
        before, after = self._split()
        rest = self.windows[self.first + 1 :]
        later = {number for window in rest for number in window.numbers}
        now = before | after if self.whole_window else after
        return (now | later) - set(self.mark.corrupt)

    def _split(self) -> tuple[set[int], set[int]]:
        if self.first is None:
            return set(), set()
        window = self.windows[self.first]
        order, cursor = window.order(), self.mark.position - window.first
        return _shards_of(window, order[:cursor]), _shards_of(window, order[cursor:])


def _shards_of(window: Window, order: SampleOrder) -> set[int]:
    places, _ = locate_samples(order, window.starts())
    return {window.numbers[place] for place in np.unique(places).tolist()}


def remaining_pass(state: Position, options: LoaderOptions) -> RemainingPass | None:
    if state.plan is None or state.mark is None:
        return None
    left = len(state.plan) - state.mark.position
    step = options.batch_size * options.ranks.local_world_size
    if options.samples_per_epoch is None and not options.keep_last and left < step:
        return None  # drop_last leaves it out
    filled = options.keeps_count and bool(state.mark.corrupt)
    rest = RemainingPass(state.plan, state.plan.windows(options), state.mark, filled)
    return None if rest.first is None else rest


def rows_left_of_length(samples: int, steps: int, options: LoaderOptions) -> int:
    """Return the rows of all ranks that an epoch of this length still has after some steps.

    An epoch keeps its number of steps, so steps with another number of ranks count like steps
    with this one.
    """
    return max(0, samples - steps * options.step_samples)


def epoch_rows_left(state: Position, options: LoaderOptions) -> int | None:
    """Return the rows that the state's epoch still has, or None if it starts a pass."""
    if options.samples_per_epoch is not None:
        return rows_left_of_length(options.samples_per_epoch, state.step, options)
    if state.plan is None or state.mark is None:
        return None
    return len(state.plan) - state.mark.position


def with_substitutes(
    plan: PassPlan,
    namesakes: Mapping[int, PlannedShard],
    others: Iterable[PlannedShard],
    gone: set[int],
) -> PassPlan:
    """Return the plan with substitutes for missing shards.

    A place gets its namesake, or else the shard with the nearest sufficient number of samples,
    or else the largest one left. The plan keeps its counts. If there are too few other shards,
    the places keep theirs.
    """
    left = sorted(others, key=_by_samples)
    chosen: dict[int, PlannedShard] = {}
    for shard in sorted(plan.shards, key=lambda shard: -shard.samples):
        if shard.number in namesakes:
            digest = namesakes[shard.number].digest
            chosen[shard.number] = shard._replace(digest=digest)
        elif shard.number in gone and left:
            place = bisect_left(left, shard.samples, key=lambda other: other.samples)
            other = left.pop(min(place, len(left) - 1))
            chosen[shard.number] = PlannedShard(other.number, shard.samples, other.digest)
    shards = tuple(chosen.get(shard.number, shard) for shard in plan.shards)
    return PassPlan(plan.number, shards, plan.window_samples)


def _by_samples(shard: PlannedShard) -> tuple[int, int]:
    return shard.samples, shard.number


MissingShards: TypeAlias = Literal["refetch", "substitute", "error"]
MISSING_SHARDS: tuple[MissingShards, ...] = ("refetch", "substitute", "error")
