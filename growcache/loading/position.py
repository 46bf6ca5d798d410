"""Where a loader stands, as a value that survives its process.

It is the consumer's position: what was delivered, whatever was made ahead since. It counts the
rows of the pass's plan and names the plan's shards with their digests, so the plan, and with it
the order of all that follows, can be made again from the position alone.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from growcache.errors import ConfigError
from growcache.loading.options import ORDER_OPTIONS, LoaderOptions
from growcache.loading.plan import SampleOrder, Window, cut_windows, locate_samples

T = TypeVar("T")


class LazyPickle(Generic[T]):
    """A value that the other process may never need; unpickling this costs a copy of bytes.

    The description of ten thousand shards takes ten milliseconds to make, for which the loop
    would wait. Used by one thread.
    """

    __slots__ = ("_data", "_value")

    def __init__(self, value: T) -> None:
        self._value: list[T] = [value]
        self._data = b""

    def get(self) -> T:
        if not self._value:
            self._value, self._data = [pickle.loads(self._data)], b""
        return self._value[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_lazily, (self._data or pickle.dumps(self.get(), protocol=5),)


def _unpickle_lazily(data: bytes) -> LazyPickle[Any]:  # what a pickle calls
    made = LazyPickle[Any](None)
    made._value, made._data = [], data
    return made


VERSION = 2
DIGEST_CHARACTERS = 32


class PlannedShard(NamedTuple):
    """A shard in the plan of a pass.

    A shard that stands in for another is planned with the samples of that one.
    """

    number: int
    samples: int
    digest: str


@dataclass(frozen=True, slots=True)
class PassPlan:
    """What the order of a pass depends on, besides the arguments of the loader."""

    number: int
    shards: tuple[PlannedShard, ...]
    window_samples: int

    def windows(self, options: LoaderOptions) -> tuple[Window, ...]:
        return cut_windows(
            [(shard.number, shard.samples) for shard in self.shards],
            seed=options.seed,
            pass_number=self.number,
            target_samples=self.window_samples,
            shuffle=options.is_shuffled,
        )

    def __len__(self) -> int:
        return sum(shard.samples for shard in self.shards)

    def __reduce__(self) -> tuple[Any, ...]:
        # By column: in half the time, and three quarters of the bytes.
        return _unpickle_plan, (
            self.number,
            tuple(zip(*self.shards, strict=True)),
            self.window_samples,
        )


def _unpickle_plan(
    number: int, columns: tuple[Any, ...], window_samples: int
) -> PassPlan:  # what a pickle calls
    shards = map(PlannedShard._make, zip(*columns, strict=True))
    return PassPlan(number, tuple(shards), window_samples)


class PassPosition(NamedTuple):
    """A place in a pass: the rows before it were delivered.

    corrupt: shards of its window that could not be read, so their rows are not delivered.
    """

    pass_number: int
    position: int  # rows of the plan before it
    corrupt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PassPositions:
    """Places in passes, by column, because as tuples they take eight times as long to unpickle."""

    passes: list[int]
    positions: list[int]
    corrupt: list[tuple[int, ...]]

    @classmethod
    def of(cls, marks: Iterable[PassPosition]) -> Self:
        made = cls([], [], [])
        for mark in marks:
            made.passes.append(mark.pass_number)
            made.positions.append(mark.position)
            made.corrupt.append(mark.corrupt)
        return made

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[PassPosition]:
        return map(PassPosition, self.passes, self.positions, self.corrupt)


class TransformForm(NamedTuple):
    """The schema of a transform's results, as JSON, which the first samples decided."""

    transformed: list[list[Any]] | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """Where a loader stands between two batches.

    next_epoch is later than epoch where that was broken off; mark is None where the next epoch
    begins with a new snapshot.
    """

    epoch: int = 0  # of the mark; without one the epoch that comes next
    step: int = 0  # batches delivered of it
    next_epoch: int = 0  # delivered by the next iteration
    next_pass: int = 0  # the first with a new snapshot
    fingerprint: str | None = None  # of the cache; None before a sample was seen
    form: TransformForm | None = None
    mark: PassPosition | None = None
    plan: PassPlan | None = None

    def to_dict(self, options: LoaderOptions) -> dict[str, Any]:
        """Return values that JSON can hold, with the arguments that decide the order."""
        return {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "options": {name: getattr(options, name) for name in ORDER_OPTIONS},
            "epoch": self.epoch,
            "step": self.step,
            "next_epoch": self.next_epoch,
            "next_pass": self.next_pass,
            "form": None if self.form is None else self.form._asdict(),
            "pass": _pass_to_dict(self.plan, self.mark),
        }

    @classmethod
    def from_dict(cls, values: object, options: LoaderOptions) -> Self:
        """Return the position that `to_dict` described.

        Raises ConfigError for anything else, and for a loader with other arguments.
        """
        if not isinstance(values, Mapping) or values.get("version") != VERSION:
            raise ConfigError(
                f"expected what state_dict() of a loader returned, of version {VERSION}, "
                f"found {_describe_state(values)}"
            )
        try:
            _refuse_other_options(values["options"], options)
            form, mark, plan = values["form"], None, None
            if values["pass"] is not None:
                plan, mark = _pass_from_dict(values["pass"])
            return cls(
                fingerprint=values["fingerprint"],
                form=None if form is None else TransformForm(**form),
                mark=mark,
                plan=plan,
                **{name: int(values[name]) for name in _COUNTS},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"this state of a loader is damaged: {type(error).__name__}: {error}"
            ) from None


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
            f"the state is of a loader with other arguments: {', '.join(differing)}; "
            "make this one with those of the state"
        )


def _pass_to_dict(plan: PassPlan | None, mark: PassPosition | None) -> dict[str, Any] | None:
    if plan is None or mark is None:
        return None
    return {
        "number": plan.number,
        "position": mark.position,
        "corrupt": list(mark.corrupt),
        "window_samples": plan.window_samples,
        # By column: a cache may have ten thousand shards.
        "numbers": [shard.number for shard in plan.shards],
        "samples": [shard.samples for shard in plan.shards],
        "digests": "".join(shard.digest for shard in plan.shards),
    }


def _pass_from_dict(values: Mapping[str, Any]) -> tuple[PassPlan, PassPosition]:
    numbers, samples, joined = values["numbers"], values["samples"], values["digests"]
    if len(joined) != DIGEST_CHARACTERS * len(numbers):
        raise ValueError(f"{len(numbers)} shards, but digests of {len(joined)} characters")
    starts = range(0, len(joined), DIGEST_CHARACTERS)
    digests = [joined[i : i + DIGEST_CHARACTERS] for i in starts]
    shards = tuple(map(PlannedShard, map(int, numbers), map(int, samples), digests))
    if len(shards) != len(samples):
        raise ValueError(f"{len(numbers)} shards, but {len(samples)} numbers of samples")
    plan = PassPlan(int(values["number"]), shards, int(values["window_samples"]))
    corrupt = tuple(map(int, values["corrupt"]))
    mark = PassPosition(plan.number, int(values["position"]), corrupt)
    if not 0 <= mark.position <= len(plan):
        raise ValueError(f"position {mark.position} of {len(plan)} samples")
    return plan, mark


@dataclass(frozen=True, slots=True)
class RemainingPass:
    """The rest of a pass that was left in the middle.

    whole_window: whether rows that were delivered may stand in for others that cannot be read.
    """

    plan: PassPlan
    windows: tuple[Window, ...]
    mark: PassPosition
    whole_window: bool = False

    @property
    def first(self) -> int | None:
        """Index of the window in which it continues; None where nothing is left."""
        for window in self.windows:
            if self.mark.position < window.first + len(window):
                return window.index
        return None

    def begun(self) -> set[int]:
        """Return the needed shards of which some rows were delivered."""
        before, _ = self._split()
        return before & self.needed()

    def needed(self) -> set[int]:
        """Return the shards of which rows are still to be delivered, or may stand in."""
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
    """Return the rest of the position's pass; None where no batch comes of it."""
    if state.plan is None or state.mark is None:
        return None
    left = len(state.plan) - state.mark.position
    step = options.batch_size * options.ranks.local_world_size
    if options.samples_per_epoch is None and not options.keep_last and left < step:
        return None  # drop_last leaves it out
    filled = options.ranks.share and bool(state.mark.corrupt)
    rest = RemainingPass(state.plan, state.plan.windows(options), state.mark, filled)
    return None if rest.first is None else rest


def with_substitutes(
    plan: PassPlan, others: Iterable[PlannedShard], gone: set[int]
) -> PassPlan:
    """Return the plan with other shards in the places of those that are gone.

    Each place goes to the other shard with the nearest sufficient number of samples, or to the
    largest left; the plan keeps its counts. Without enough others the places keep their shards.
    """
    left = sorted(others, key=_by_samples)
    chosen: dict[int, PlannedShard] = {}
    for shard in sorted(plan.shards, key=lambda shard: -shard.samples):
        if shard.number in gone and left:
            place = bisect_left(left, shard.samples, key=lambda other: other.samples)
            other = left.pop(min(place, len(left) - 1))
            chosen[shard.number] = PlannedShard(other.number, shard.samples, other.digest)
    shards = tuple(chosen.get(shard.number, shard) for shard in plan.shards)
    return PassPlan(plan.number, shards, plan.window_samples)


def _by_samples(shard: PlannedShard) -> tuple[int, int]:
    return shard.samples, shard.number


class PositionTracker:
    """Follows what is delivered, batch by batch."""

    def __init__(self, options: LoaderOptions, start: Position) -> None:
        self._whole_passes = options.samples_per_epoch is None
        self._epoch, self._step = start.epoch, start.step
        self._next_epoch, self._next_pass = start.next_epoch, start.next_pass
        self._fingerprint, self._form, self._mark = start.fingerprint, start.form, start.mark
        # A block may reach into the next pass, so that begins before this one has ended.
        self._plans = {} if start.plan is None else {start.plan.number: LazyPickle(start.plan)}

    @property
    def state(self) -> Position:
        mark = self._mark
        return Position(
            epoch=self._epoch,
            step=self._step,
            next_epoch=self._next_epoch,
            next_pass=self._next_pass if mark is None else mark.pass_number + 1,
            fingerprint=self._fingerprint,
            form=self._form,
            mark=mark,
            plan=None if mark is None else self._plans[mark.pass_number].get(),
        )

    @property
    def step(self) -> int:
        """Batches delivered of its epoch; unlike the state this needs no plan."""
        return self._step

    def begin_epoch(self, number: int) -> None:
        self._next_epoch = number
        if self._whole_passes and number != self._epoch:
            self._leave(number)

    def begin_pass(
        self, number: int, plan: LazyPickle[PassPlan], fingerprint: str | None
    ) -> None:
        self._plans[number] = plan
        self._fingerprint = fingerprint
        if self._mark is None:
            self._next_pass = number + 1

    def deliver(self, epoch: int, mark: PassPosition, form: TransformForm) -> None:
        self._step = self._step + 1 if epoch == self._epoch else 1
        self._epoch, self._form = epoch, form
        if self._mark is None or mark.pass_number != self._mark.pass_number:
            self._plans = {n: p for n, p in self._plans.items() if n >= mark.pass_number}
        self._mark = mark

    def end_epoch(self, number: int) -> None:
        self._next_epoch = number + 1
        if self._whole_passes:
            self._leave(number + 1)
        else:
            self._epoch, self._step = number + 1, 0

    def _leave(self, epoch: int) -> None:
        """Stand before an epoch that begins with a new snapshot."""
        if self._mark is not None:
            self._next_pass = self._mark.pass_number + 1
        self._epoch, self._step, self._mark = epoch, 0, None
