"""The ranks of a job: who they are, and which rows of an epoch each of them delivers. Pure.

The ranks that share a cache walk the same plan side by side. Step s of an epoch takes the
next rows for all of them, a batch each, so they are in the same window at any time: what
one of them brought into memory the others find there, and the number of steps cannot
differ. To deal out shards instead would need one window per rank in memory, or windows
that mix less, and unequal shards would make unequal ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from growcache.errors import ConfigError
from growcache.loading.framework import Integers

VALID = "_valid"  # the field that tells rows from padding

# What is alike on all ranks of one start of a job, and another at the next one.
RUN_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
)
# One of these tells apart what runs at the same time; without them the parent does.
SUFFICIENT = frozenset({"MASTER_PORT", "SLURM_STEP_ID", "PMIX_NAMESPACE"})


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of its job.

    Attributes:
        rank: of this process, and
        world_size: how many there are.
        local_rank: the same among those on this machine, which share its cache, and
        local_world_size: how many these are.
        told: whether anybody said so; else it is one process that knows of no ranks.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    told: bool = False

    @property
    def share(self) -> bool:
        """Whether other ranks read the same cache."""
        return self.local_world_size > 1

    @property
    def leads(self) -> bool:
        """Whether this rank takes the snapshots."""
        return self.local_rank == 0


ALONE = Ranks()


def find_ranks(
    rank: int | None,
    world_size: int | None,
    distributed: tuple[int, int] | None,
    environment: Mapping[str, str],
) -> Ranks:
    """Return who this process is.

    Args:
        rank: as the user said, and
        world_size: likewise; both or neither.
        distributed: (rank, world size) as the framework has it; None where it has none.
        environment: asked for ``RANK`` and ``WORLD_SIZE`` then. ``LOCAL_RANK`` and
            ``LOCAL_WORLD_SIZE`` say which ranks are on this machine, as torchrun sets
            them; without them all are.

    Raises:
        ConfigError: a rank that cannot be.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(
            f"rank and world_size go together, found rank {rank!r} and world_size "
            f"{world_size!r}; give both or neither"
        )
    outer = _pair(environment, "RANK", "WORLD_SIZE")
    if rank is not None and world_size is not None:
        found: tuple[int, int] | None = (rank, world_size)
    else:
        found = distributed or outer
    if found is None:
        return ALONE
    _refuse("rank", "world_size", *found)
    local = _pair(environment, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    # Who names other ranks than the launcher's means a group of his own.
    if local is None or outer not in (None, found):
        local = found
    _refuse("LOCAL_RANK", "LOCAL_WORLD_SIZE", *local)
    if local[1] > found[1]:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE is {local[1]} where the world size is {found[1]}; unset it, or "
            "set it to the ranks on this machine"
        )
    return Ranks(*found, *local, told=True)


def _pair(environment: Mapping[str, str], rank: str, size: str) -> tuple[int, int] | None:
    if rank not in environment or size not in environment:
        return None
    try:
        return int(environment[rank]), int(environment[size])
    except ValueError:
        raise ConfigError(
            f"expected whole numbers in {rank} and {size}, found {environment[rank]!r} and "
            f"{environment[size]!r}"
        ) from None


def _refuse(rank_name: str, size_name: str, rank: int, size: int) -> None:
    whole = all(isinstance(value, int) for value in (rank, size))
    if not whole or not 0 <= rank < size:
        raise ConfigError(
            f"expected {rank_name} from 0 to {size_name} - 1, found {rank!r} of {size!r}"
        )


def run_of(environment: Mapping[str, str], parent: int) -> str:
    """Return what all ranks of one start of a job have alike, and no other start has.

    Args:
        environment: of this process.
        parent: its parent's process id; used where the environment is not enough.

    >>> run_of({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, 7)
    'MASTER_ADDR=localhost MASTER_PORT=29500'
    >>> run_of({}, 7)
    'parent=7'
    """
    known = [f"{name}={environment[name]}" for name in RUN_VARIABLES if name in environment]
    if SUFFICIENT.isdisjoint(environment):
        known.append(f"parent={parent}")
    return " ".join(known)


@dataclass(frozen=True, slots=True)
class Deal:
    """How the rows of one epoch go to the ranks.

    Rows are numbered from the beginning of the epoch, over all ranks of this machine. The
    last step may be smaller: its batches are of equal size on all ranks, and who has too
    few rows for that repeats the last one.

    Attributes:
        rows: that the ranks of this machine walk through together.
        steps: batches of every rank.
        batch: rows of a batch.
        rank: among those that share the cache.
        ranks: how many these are.
        whole_rows: of ``rows``, those of whole steps.
        last: (first, behind the last) row of this rank in the smaller last step.
        padding: repeated rows of this rank in it.
    """

    rows: int
    steps: int
    batch: int
    rank: int
    ranks: int
    whole_rows: int
    last: tuple[int, int]
    padding: int

    @property
    def step_rows(self) -> int:
        """Rows of one step, over all ranks of this machine."""
        return self.batch * self.ranks

    @property
    def delivered(self) -> int:
        """Rows that this rank delivers, repeated ones included."""
        low, high = self.last
        return self.whole_rows // self.ranks + high - low + self.padding

    def mine(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return which of the rows from ``first`` to ``stop`` this rank delivers, as ranges."""
        step = self.step_rows
        begins = range(first - first % step, min(stop, self.whole_rows), step)
        starts = [begin + self.rank * self.batch for begin in begins]
        found = [(start, start + self.batch) for start in starts] + [self.last]
        cut = [(max(low, first), min(high, stop)) for low, high in found]
        return [(low, high) for low, high in cut if low < high]


def deal(samples: int, batch_size: int, ranks: Ranks, *, keeps_last: bool) -> Deal:
    """Return how an epoch of so many samples, over all ranks, is dealt.

    Args:
        samples: of the epoch.
        batch_size: of a rank.
        ranks: this one among them.
        keeps_last: whether what makes no whole step is delivered.
    """
    steps, rest = divmod(samples, batch_size * ranks.world_size)
    whole = steps * batch_size * ranks.local_world_size
    rest = rest if keeps_last else 0
    each = -(-rest // ranks.world_size)
    here = ranks.rank - ranks.local_rank  # the first rank of this machine
    edges = [
        min(rest, each * rank)
        for rank in (here, ranks.rank, ranks.rank + 1, here + ranks.local_world_size)
    ]
    begin, low, high, end = edges
    # Where all of a machine's ranks are padded, there still must be a row to repeat.
    walked = max(end - begin, 1 if rest else 0)
    return Deal(
        rows=whole + walked,
        steps=steps + bool(rest),
        batch=batch_size,
        rank=ranks.local_rank,
        ranks=ranks.local_world_size,
        whole_rows=whole,
        last=(whole + low - begin, whole + high - begin),
        padding=each - (high - low),
    )


def stand_ins(good: npt.NDArray[np.bool_]) -> Integers:
    """Return for each row which one is delivered in its place: itself, where it is good.

    What stands in for the others is a function of which they are, not of who asks. But it
    need not be: each rank delivers as many rows as were dealt to it, whatever it found.

    Args:
        good: bool [n], at least one of them true.
    """
    chosen = np.arange(len(good), dtype=np.int64)
    chosen[~good] = np.resize(np.flatnonzero(good), int((~good).sum()))
    return chosen
