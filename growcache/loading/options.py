"""The arguments that all loaders share, checked once."""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from growcache.errors import ConfigError
from growcache.loading.gather import RAGGED_STYLES, RaggedStyle
from growcache.loading.maps import Verify
from growcache.loading.plan import ALONE, Ranks, RankShare, rank_share
from growcache.loading.transform import (
    MAX_TIMEOUT_SECONDS,
    TIMEOUT_SECONDS,
    UserFunction,
    function_arguments,
    pickle_function,
)
from growcache.schema import Schema


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return a whole number, whatever type it has, NumPy's or torch's.

    Raises:
        ConfigError: it is none, or less than ``least``.

    >>> whole_number("batch_size", np.int64(8), 1)
    8
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        above = "" if least is None else f" above {least - 1}"
        raise ConfigError(f"{name} must be a whole number{above}, found {value!r}")
    return number


def truth_value(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name} must be True or False, found {value!r}")
    return bool(value)


def check_cache_path(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError for a path that cannot become a cache."""
    if "://" in str(path):
        raise ConfigError(
            f"path expected as the local directory of a cache, found {path!r}; where objects "
            "are is said in the config, as source.url"
        )
    if Path(path).is_file():
        raise ConfigError(f"path expected as the directory of a cache, found a file: {path}")


# Where batches are put together.
Gather: TypeAlias = Literal["thread", "process", "auto"]
GATHER_KINDS: tuple[Gather, ...] = ("thread", "process", "auto")

# Arguments that decide which rows come when, and how they are cut.
ORDER_OPTIONS = (
    *("batch_size", "seed", "shuffle", "drop_last", "samples_per_epoch", "fixed"),
    "world_size",
)


def field_names(what: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or not names:
        raise ConfigError(f"{what} must be a sequence of names, found {names!r}")
    return tuple(names)


def unknown_field(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"no field {name!r}; there are {', '.join(names)}{hint}"


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """The checked arguments of a loader; see `growcache.loading.loader.Loader` for each."""

    path: str | os.PathLike[str]
    batch_size: int
    min_samples: int = 1000
    samples_per_epoch: int | None = None
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True
    fixed: bool = False
    transform: UserFunction | None = None
    batch_transform: Callable[[Any], Any] | None = None
    fields: tuple[str, ...] | None = None
    ragged: RaggedStyle = "offsets"
    job: str = "default"
    verify: Verify = "first"
    ranks: Ranks = ALONE
    num_workers: int = 0
    gather: Gather = "auto"
    timeout_seconds: float = TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        check_cache_path(self.path)
        self._settle_values()
        if self.verify not in ("first", "always"):
            raise ConfigError(f"verify must be 'first' or 'always', found {self.verify!r}")
        if self.ragged not in RAGGED_STYLES:
            raise ConfigError(
                f"ragged must be one of {', '.join(RAGGED_STYLES)}, found {self.ragged!r}"
            )
        if not self.job or not isinstance(self.job, str):
            raise ConfigError(f"job must be a name, found {self.job!r}")
        known = isinstance(self.timeout_seconds, int | float)
        if not known or not 0 < self.timeout_seconds <= MAX_TIMEOUT_SECONDS:
            raise ConfigError(
                f"timeout_seconds must be a number of seconds, found {self.timeout_seconds!r}"
            )
        if self.num_workers < 0:
            raise ConfigError(f"num_workers must be 0 or more, found {self.num_workers}")
        if self.transform is not None:
            takes = function_arguments(self.transform)
            if self.num_workers:
                pickle_function(self.transform, takes)
        if self.batch_transform is not None and not callable(self.batch_transform):
            raise ConfigError(
                f"batch_transform must be a function of a batch, found {self.batch_transform!r}"
            )
        self._refuse_places()
        self._refuse_lengths()

    def _settle_values(self) -> None:
        """Convert to plain numbers and truth values, because a state is saved as JSON."""
        values: dict[str, Any] = {"seed": whole_number("seed", self.seed)}
        values["num_workers"] = whole_number("num_workers", self.num_workers)
        for name in ("batch_size", "min_samples"):
            values[name] = whole_number(name, getattr(self, name), 1)
        if self.samples_per_epoch is not None:
            number = whole_number("samples_per_epoch", self.samples_per_epoch, 1)
            values["samples_per_epoch"] = number
        for name in ("shuffle", "drop_last", "fixed"):
            values[name] = truth_value(name, getattr(self, name))
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _refuse_places(self) -> None:
        if self.gather not in GATHER_KINDS:
            raise ConfigError(
                f"gather must be one of {', '.join(GATHER_KINDS)}, found {self.gather!r}"
            )
        if self.gather == "process" and self.transform is not None and not self.num_workers:
            raise ConfigError(
                "a transform with num_workers=0 runs in threads of this process, which "
                "gather='process' avoids; set num_workers, or leave gather at 'auto'"
            )

    def _refuse_lengths(self) -> None:
        alone = self.ranks.world_size == self.ranks.local_world_size
        if not alone and self.samples_per_epoch is None:
            instead = "set samples_per_epoch, so that all make the same number of steps"
            if self.fixed:
                instead = "give a fixed loader rank and world_size as on its machine alone"
            raise ConfigError(
                f"{self.ranks.world_size} ranks on several machines, "
                f"{self.ranks.local_world_size} on this one, have caches that grow unlike; "
                f"{instead}"
            )
        if self.samples_per_epoch is None:
            return
        if self.fixed:
            raise ConfigError(
                "fixed and samples_per_epoch exclude one another: a fixed epoch is one pass "
                "over everything"
            )
        if self.drop_last and self.samples_per_epoch < self.step_samples:
            ranks = f" times world_size {self.ranks.world_size}" * (self.ranks.world_size > 1)
            raise ConfigError(
                f"samples_per_epoch {self.samples_per_epoch} is less than batch_size "
                f"{self.batch_size}{ranks}, so drop_last leaves nothing; use drop_last=False"
            )

    @property
    def root(self) -> Path:
        """The cache directory, independent of later changes of the working directory."""
        return Path(self.path).absolute()

    def chosen(self, schema: Schema) -> Schema:
        """Return the part of the cache's schema that is delivered."""
        if self.fields is None:
            return schema
        for name in self.fields:
            if name not in schema.names:
                raise ConfigError(f"fields: {unknown_field(name, schema.names)}")
        return Schema(tuple(field for field in schema.fields if field.name in self.fields))

    @property
    def is_shuffled(self) -> bool:
        return self.shuffle and not self.fixed

    @property
    def keep_last(self) -> bool:
        return self.fixed or not self.drop_last

    @property
    def steps_per_epoch(self) -> int | None:
        return None if self.samples_per_epoch is None else self.steps(self.samples_per_epoch)

    @property
    def step_samples(self) -> int:
        return self.batch_size * self.ranks.world_size

    @property
    def min_pass_samples(self) -> int:
        """Samples below which a pass has no step at all."""
        dropped = self.samples_per_epoch is None and not self.keep_last
        return self.step_samples if dropped else 1

    @property
    def marks_valid(self) -> bool:
        return self.ranks.told and self.keep_last

    @property
    def alike(self) -> dict[str, Any]:
        """Arguments that must be equal on all ranks of a job."""
        return {name: getattr(self, name) for name in ORDER_OPTIONS}

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

    def usable(self, samples: int) -> int:
        return samples if self.keep_last else samples - samples % self.batch_size

    def deal(self, samples: int) -> RankShare:
        return rank_share(samples, self.batch_size, self.ranks, keeps_last=self.keep_last)

    def steps(self, samples: int) -> int:
        return self.deal(samples).steps
