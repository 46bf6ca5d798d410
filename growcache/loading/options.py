"""The arguments that all loaders share, checked once."""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from growcache.cache.files import generation_in, unusable_path_error
from growcache.errors import ConfigError
from growcache.loading.maps import Verify
from growcache.loading.ragged import RAGGED_STYLES, RaggedStyle
from growcache.loading.transform import (
    MAX_TIMEOUT_SECONDS,
    TIMEOUT_SECONDS,
    UserFunction,
    function_arguments,
    pickle_function,
)
from growcache.schema import Schema


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return a whole number of any type, such as NumPy's or torch's.

    >>> whole_number("batch_size", np.int64(8), 1)
    8
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        above = "" if least is None else f" above {least - 1}"
        raise ConfigError(
            f"{name} must be a whole number{above}, found {value!r}", code="GC601"
        )
    return number


def truth_value(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name} must be True or False, found {value!r}", code="GC601")
    return bool(value)


def check_cache_path(path: str | os.PathLike[str]) -> None:
    if "://" in str(path):
        raise ConfigError(
            f"path: expected the local directory of a cache, found {path!r}; the config says "
            "where the objects are (source.url)",
            code="GC601",
        )
    try:
        is_file = Path(path).is_file()
    except OSError as error:
        raise unusable_path_error(Path(path), error) from error
    if is_file:
        raise ConfigError(
            f"path: expected the directory of a cache, found a file: {path}", code="GC601"
        )


# Where batches are put together.
Gather: TypeAlias = Literal["thread", "process", "auto"]
GATHER_KINDS: tuple[Gather, ...] = ("thread", "process", "auto")

# Arguments that decide the order of rows, and how they are cut.
ORDER_OPTIONS = ("batch_size", "seed", "shuffle", "drop_last", "samples_per_epoch", "fixed")


def field_names(what: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or not names:
        raise ConfigError(f"{what} must be a sequence of names, found {names!r}", code="GC601")
    return tuple(names)


def unknown_field(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"no field {name!r}; there are {', '.join(names)}{hint}"


@dataclass(frozen=True, slots=True)
class Ranks:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    explicit: bool = False  # named by an argument or the environment
    grouped: bool = False  # of a process group, which can agree on counts

    @property
    def share(self) -> bool:
        return self.local_world_size > 1

    @property
    def leads(self) -> bool:
        return self.local_rank == 0

    @property
    def spread(self) -> bool:
        """Whether some ranks are on other machines."""
        return self.world_size > self.local_world_size


ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """The arguments of `growcache.loading.loader.Loader`, checked."""

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
    journal: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_cache_path(self.path)
        self._settle_values()
        if self.verify not in ("first", "always"):
            raise ConfigError(
                f"verify must be 'first' or 'always', found {self.verify!r}", code="GC601"
            )
        if self.ragged not in RAGGED_STYLES:
            raise ConfigError(
                f"ragged must be one of {', '.join(RAGGED_STYLES)}, found {self.ragged!r}",
                code="GC601",
            )
        if not self.job or not isinstance(self.job, str):
            raise ConfigError(f"job must be a name, found {self.job!r}", code="GC601")
        known = isinstance(self.timeout_seconds, int | float)
        if not known or not 0 < self.timeout_seconds <= MAX_TIMEOUT_SECONDS:
            raise ConfigError(
                f"timeout_seconds must be a number of seconds, found {self.timeout_seconds!r}",
                code="GC601",
            )
        if self.num_workers < 0:
            raise ConfigError(
                f"num_workers must be 0 or more, found {self.num_workers}", code="GC601"
            )
        if self.transform is not None:
            takes = function_arguments(self.transform)
            if self.num_workers:
                pickle_function(self.transform, takes)
        if self.batch_transform is not None and not callable(self.batch_transform):
            raise ConfigError(
                f"batch_transform must be a function of a batch, found {self.batch_transform!r}",
                code="GC601",
            )
        if not isinstance(self.journal, str | os.PathLike | None):
            raise ConfigError(
                f"journal must be the path of a file, found {self.journal!r}", code="GC601"
            )
        self._refuse_places()
        self._refuse_lengths()

    def _settle_values(self) -> None:
        """Convert to plain numbers and bools, because a state is saved as JSON."""
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
                f"gather must be one of {', '.join(GATHER_KINDS)}, found {self.gather!r}",
                code="GC601",
            )
        if self.gather == "process" and self.transform is not None and not self.num_workers:
            raise ConfigError(
                "a transform with num_workers=0 runs in threads of this process, which "
                "gather='process' avoids; set num_workers, or leave gather at 'auto'",
                code="GC601",
            )
        if self.gather == "process" and self.agrees:
            raise ConfigError(
                "ranks on several machines agree on growing epochs in the trainer's process; "
                "leave gather at 'auto', or set samples_per_epoch",
                code="GC705",
            )

    def _refuse_lengths(self) -> None:
        can_agree = self.ranks.grouped and not self.fixed
        if self.ranks.spread and self.samples_per_epoch is None and not can_agree:
            instead = (
                "set samples_per_epoch, so that all make the same number of steps, or let "
                "torch.distributed agree on it: growcache.torch.EpochLoader after "
                "init_process_group"
            )
            if self.fixed:
                instead = "give a fixed loader the rank and world_size within its own machine"
            raise ConfigError(
                f"{self.ranks.world_size} ranks on several machines, "
                f"{self.ranks.local_world_size} on this one, have caches that grow "
                f"differently; {instead}",
                code="GC705",
            )
        if self.samples_per_epoch is None:
            return
        if self.fixed:
            raise ConfigError(
                "fixed and samples_per_epoch exclude one another: a fixed epoch is one pass "
                "over everything",
                code="GC601",
            )
        if self.drop_last and self.samples_per_epoch < self.step_samples:
            ranks = f" times world_size {self.ranks.world_size}" * (self.ranks.world_size > 1)
            raise ConfigError(
                f"samples_per_epoch {self.samples_per_epoch} is less than batch_size "
                f"{self.batch_size}{ranks}, so drop_last leaves nothing; use drop_last=False",
                code="GC601",
            )

    def at_generation(self, root: Path | None) -> Self:
        """Return the options of a pass over one generation. ``root`` is that of its index."""
        if root is None or generation_in(root) is None:
            return self
        return replace(self, path=root)

    @property
    def root(self) -> Path:
        """The cache directory, independent of later changes of the working directory."""
        return Path(self.path).absolute()

    @property
    def journal_file(self) -> Path | None:
        """The file of this rank's journal.

        Rank 0 continues the existing file, even if it is the only rank now.
        """
        if self.journal is None:
            return None
        alone = Path(self.journal).absolute()
        own = rank_file(alone, self.ranks.rank)
        if self.ranks.rank:
            return own
        default = alone if self.world_size == 1 else own
        return next((path for path in (alone, own) if path.is_file()), default)

    def chosen(self, schema: Schema) -> Schema:
        if self.fields is None:
            return schema
        for name in self.fields:
            if name not in schema.names:
                raise ConfigError(f"fields: {unknown_field(name, schema.names)}", code="GC601")
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
    def agrees(self) -> bool:
        """Whether ranks on several machines agree on the samples of each pass that they deliver."""
        return self.ranks.spread and self.samples_per_epoch is None and not self.fixed

    @property
    def keeps_count(self) -> bool:
        """Whether substitutes replace unreadable samples, because ranks rely on the count."""
        return self.ranks.share or self.agrees

    @property
    def min_pass_samples(self) -> int:
        """The smallest number of samples of this machine's cache that makes a pass."""
        if self.samples_per_epoch is None and not self.keep_last:
            return self.batch_size * self.ranks.local_world_size
        return self.ranks.local_world_size if self.agrees else 1

    @property
    def marks_valid(self) -> bool:
        return self.ranks.explicit and self.keep_last

    @property
    def alike(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*ORDER_OPTIONS, "world_size")}

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

    def usable(self, samples: int) -> int:
        return samples if self.keep_last else samples - samples % self.batch_size

    def rank_share(self, samples: int) -> RankShare:
        return rank_share(samples, self.batch_size, self.ranks, keeps_last=self.keep_last)

    def steps(self, samples: int) -> int:
        return self.rank_share(samples).steps


VALID_FIELD = "_valid"  # False for padding

# Variables that are equal on all ranks of one start of a job, and differ at the next start.
RUN_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
)
# Each of these separates concurrent jobs. Without them the parent process does.
SUFFICIENT_VARIABLES = frozenset({"MASTER_PORT", "SLURM_STEP_ID", "PMIX_NAMESPACE"})


def find_ranks(
    rank: int | None,
    world_size: int | None,
    distributed: tuple[int, int] | None,
    environment: Mapping[str, str],
) -> Ranks:
    """Return the ranks: from arguments, else from the framework, else from the environment."""
    if (rank is None) != (world_size is None):
        raise ConfigError(
            f"rank and world_size go together, found rank {rank!r} and world_size "
            f"{world_size!r}; give both or neither",
            code="GC702",
        )
    outer = _rank_variables(environment, "RANK", "WORLD_SIZE")
    if rank is not None and world_size is not None:
        found: tuple[int, int] | None = (rank, world_size)
    else:
        found = distributed or outer
    if found is None:
        return ALONE
    _refuse_rank("rank", "world_size", *found)
    local = _rank_variables(environment, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    # Arguments that differ from the launcher's ranks mean a separate group.
    if local is None or outer not in (None, found):
        local = found
    _refuse_rank("LOCAL_RANK", "LOCAL_WORLD_SIZE", *local)
    if local[1] > found[1]:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE is {local[1]} where the world size is {found[1]}; unset it, or "
            "set it to the ranks on this machine",
            code="GC702",
        )
    return Ranks(*found, *local, explicit=True, grouped=found == distributed)


def _rank_variables(
    environment: Mapping[str, str], rank: str, size: str
) -> tuple[int, int] | None:
    if rank not in environment or size not in environment:
        return None
    try:
        return int(environment[rank]), int(environment[size])
    except ValueError:
        raise ConfigError(
            f"expected whole numbers in {rank} and {size}, found {environment[rank]!r} and "
            f"{environment[size]!r}",
            code="GC702",
        ) from None


def _refuse_rank(rank_name: str, size_name: str, rank: int, size: int) -> None:
    whole = all(isinstance(value, int) for value in (rank, size))
    if not whole or not 0 <= rank < size:
        raise ConfigError(
            f"expected {rank_name} from 0 to {size_name} - 1, found {rank!r} of {size!r}",
            code="GC702",
        )


def rank_file(path: Path, rank: int) -> Path:
    """Return the name of one rank's file.

    >>> str(rank_file(Path("runs/a.journal"), 3))
    'runs/a.journal.rank3'
    """
    return path.with_name(f"{path.name}.rank{rank}")


def launch_id(environment: Mapping[str, str], parent: int) -> str:
    """Return a name that all ranks of one start of a job share, and that no other start has.

    >>> launch_id({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, 7)
    'MASTER_ADDR=localhost MASTER_PORT=29500'
    >>> launch_id({}, 7)
    'parent=7'
    """
    known = [f"{name}={environment[name]}" for name in RUN_VARIABLES if name in environment]
    if SUFFICIENT_VARIABLES.isdisjoint(environment):
        known.append(f"parent={parent}")
    return " ".join(known)


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's share of an epoch. Rows are numbered over all ranks of this machine.

    The batches of a smaller last step have equal sizes, because a rank with too few rows
    repeats its last row.
    """

    rows: int  # of all ranks on this machine
    steps: int  # number of batches of each rank
    batch: int  # number of its rows
    rank: int
    ranks: int  # that share the cache
    whole_rows: int  # rows of whole steps
    last: tuple[int, int]  # (first, end) of this rank's rows in the smaller last step
    padding: int  # repeated rows of this rank in it

    @property
    def step_rows(self) -> int:
        return self.batch * self.ranks

    @property
    def delivered(self) -> int:
        low, high = self.last
        return self.whole_rows // self.ranks + high - low + self.padding

    def mine(self, first: int, stop: int) -> list[tuple[int, int]]:
        step = self.step_rows
        begins = range(first - first % step, min(stop, self.whole_rows), step)
        starts = [begin + self.rank * self.batch for begin in begins]
        found = [(start, start + self.batch) for start in starts] + [self.last]
        cut = [(max(low, first), min(high, stop)) for low, high in found]
        return [(low, high) for low, high in cut if low < high]


def rank_share(samples: int, batch_size: int, ranks: Ranks, *, keeps_last: bool) -> RankShare:
    """Return a rank's share of an epoch.

    ``keeps_last`` tells whether rows beyond the last whole step are delivered.
    """
    steps, rest = divmod(samples, batch_size * ranks.world_size)
    whole = steps * batch_size * ranks.local_world_size
    rest = rest if keeps_last else 0
    each = -(-rest // ranks.world_size)
    here = ranks.rank - ranks.local_rank  # first rank on this machine
    edges = [
        min(rest, each * rank)
        for rank in (here, ranks.rank, ranks.rank + 1, here + ranks.local_world_size)
    ]
    begin, low, high, end = edges
    # Even if all ranks of a machine are padded, they need a row to repeat.
    rows_here = max(end - begin, 1 if rest else 0)
    return RankShare(
        rows=whole + rows_here,
        steps=steps + bool(rest),
        batch=batch_size,
        rank=ranks.local_rank,
        ranks=ranks.local_world_size,
        whole_rows=whole,
        last=(whole + low - begin, whole + high - begin),
        padding=each - (high - low),
    )
