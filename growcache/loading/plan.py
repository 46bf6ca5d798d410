"""The order in which a pass visits the samples of a snapshot, and each rank's share. Pure.

A pass shuffles the shards and cuts them into windows of about equal size; inside a window the
samples of all its shards are permuted. Every shard is a random mixture already, so a window of a
few is shuffled as well as a whole epoch would be, while each gather finds many rows in one map.

Ranks that share a cache walk the same plan side by side: step s of an epoch takes the next rows
for all of them, a batch each. So the number of steps cannot differ, and what one rank brings into
memory the others find there. To deal out shards instead would need one window per rank in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from growcache.errors import ConfigError
from growcache.loading.framework import Integers
from growcache.seeding import generator_at

# A window is read ahead, mapped and verified as a whole, so its bytes are a matter of memory,
# its shards one of what it takes to begin, and its samples one of both.
WINDOW_BYTES = 256_000_000
WINDOW_SAMPLES = 1 << 18
MIN_WINDOW_SHARDS = 4  # a window of fewer would mix too little
MAX_WINDOW_SHARDS = 64

_Integers = npt.NDArray[np.int64]
SampleOrder = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """Shards that are shuffled together, and their place in a pass."""

    seed: int
    pass_number: int
    index: int
    first: int  # position in the pass of its first sample
    numbers: tuple[int, ...]  # shards, in the order of their visit
    counts: tuple[int, ...]  # samples of each
    shuffle: bool = True

    def __len__(self) -> int:
        return sum(self.counts)

    def order(self) -> SampleOrder:
        """Return the order of the samples, numbered shard after shard: [n], see `located`.

        Four bytes per sample, because a window of small ones holds many.
        """
        order = _smallest_dtype(np.arange(len(self)))
        if self.shuffle:
            generator_at(self.seed, "window", self.pass_number, self.index).shuffle(order)
        return order

    def starts(self) -> SampleOrder:
        """Return the first sample of each shard, and the end of the last: [k + 1]."""
        return _smallest_dtype(np.cumsum((0, *self.counts)))


def locate_samples(order: SampleOrder, starts: SampleOrder) -> tuple[_Integers, _Integers]:
    """Return for each sample the index of its shard and its row there: int64 [n] each."""
    places = np.searchsorted(starts, order, side="right") - 1
    return places, (order - starts[places]).astype(np.int64)


def _smallest_dtype(numbers: _Integers) -> SampleOrder:
    last = numbers[-1] if len(numbers) else 0
    return numbers.astype(np.int32) if last <= np.iinfo(np.int32).max else numbers


def window_samples(sample_bytes: int, shard_samples: float = math.inf) -> int:
    """Return how many samples a window should hold.

    Args:
        sample_bytes: of each.
        shard_samples: in a shard, on average.

    >>> window_samples(256 * 1024), window_samples(64), window_samples(64, 1000)
    (976, 262144, 64000)
    """
    most = min(WINDOW_SAMPLES, MAX_WINDOW_SHARDS * shard_samples)
    return max(1, min(WINDOW_BYTES // max(1, sample_bytes), int(most)))


def shard_order(
    shards: Iterable[tuple[int, int]], *, seed: int, pass_number: int, shuffle: bool = True
) -> list[tuple[int, int]]:
    """Return the (number, samples) of shards with samples in the order of their visit."""
    chosen = sorted(shard for shard in shards if shard[1] > 0)
    if not shuffle:
        return chosen
    order = generator_at(seed, "shards", pass_number).permutation(len(chosen))
    return [chosen[i] for i in order]


def cut_windows(
    order: Sequence[tuple[int, int]],
    *,
    seed: int,
    pass_number: int,
    target_samples: int,
    shuffle: bool = True,
) -> tuple[Window, ...]:
    windows, first = [], 0
    for index, (start, stop) in enumerate(_window_edges([n for _, n in order], target_samples)):
        numbers, counts = zip(*order[start:stop], strict=True)
        windows.append(Window(seed, pass_number, index, first, numbers, counts, shuffle))
        first += sum(counts)
    return tuple(windows)


def _window_edges(counts: Sequence[int], target_samples: int) -> list[tuple[int, int]]:
    """Cut where the running sum comes nearest to equal shares."""
    total, most = sum(counts), max(1, len(counts) // MIN_WINDOW_SHARDS)
    windows = min(most, max(1, round(total / target_samples)))
    ends = np.cumsum(counts, dtype=np.float64)
    shares = np.arange(1, windows) * (total / windows)
    right = np.searchsorted(ends, shares)
    left = np.maximum(right - 1, 0)
    nearest = np.where(shares - ends[left] < ends[right] - shares, left, right) + 1
    edges = sorted({0, *nearest.tolist(), len(counts)})
    return list(pairwise(edges))


VALID_FIELD = "_valid"  # the field that tells rows from padding

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
SUFFICIENT_VARIABLES = frozenset({"MASTER_PORT", "SLURM_STEP_ID", "PMIX_NAMESPACE"})


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of its job.

    told: whether an argument or the environment named the ranks; launch: equal on all ranks of
    one start.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    told: bool = False

    @property
    def share(self) -> bool:
        return self.local_world_size > 1

    @property
    def leads(self) -> bool:
        return self.local_rank == 0


ALONE = Ranks()


def find_ranks(
    rank: int | None,
    world_size: int | None,
    distributed: tuple[int, int] | None,
    environment: Mapping[str, str],
) -> Ranks:
    """Return the ranks from the arguments, the framework or the environment, in this order."""
    if (rank is None) != (world_size is None):
        raise ConfigError(
            f"rank and world_size go together, found rank {rank!r} and world_size "
            f"{world_size!r}; give both or neither"
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
    # Who names other ranks than the launcher's means a group of his own.
    if local is None or outer not in (None, found):
        local = found
    _refuse_rank("LOCAL_RANK", "LOCAL_WORLD_SIZE", *local)
    if local[1] > found[1]:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE is {local[1]} where the world size is {found[1]}; unset it, or "
            "set it to the ranks on this machine"
        )
    return Ranks(*found, *local, told=True)


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
            f"{environment[size]!r}"
        ) from None


def _refuse_rank(rank_name: str, size_name: str, rank: int, size: int) -> None:
    whole = all(isinstance(value, int) for value in (rank, size))
    if not whole or not 0 <= rank < size:
        raise ConfigError(
            f"expected {rank_name} from 0 to {size_name} - 1, found {rank!r} of {size!r}"
        )


def launch_id(environment: Mapping[str, str], parent: int) -> str:
    """Return what all ranks of one start of a job have alike, and no other start has.

    Args:
        environment: of this process.
        parent: its parent's process id; used where the environment is not enough.

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
    """How the rows of one epoch go to the ranks.

    Rows are numbered over all ranks of this machine. The last step may be smaller: its batches
    have equal size on all ranks, and a rank with too few rows repeats the last one.
    """

    rows: int  # of all ranks of this machine
    steps: int  # batches of each rank
    batch: int  # rows
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
        """Rows that this rank delivers, repeated ones included."""
        low, high = self.last
        return self.whole_rows // self.ranks + high - low + self.padding

    def mine(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return this rank's share of the rows from ``first`` to ``stop``, as ranges."""
        step = self.step_rows
        begins = range(first - first % step, min(stop, self.whole_rows), step)
        starts = [begin + self.rank * self.batch for begin in begins]
        found = [(start, start + self.batch) for start in starts] + [self.last]
        cut = [(max(low, first), min(high, stop)) for low, high in found]
        return [(low, high) for low, high in cut if low < high]


def rank_share(samples: int, batch_size: int, ranks: Ranks, *, keeps_last: bool) -> RankShare:
    """Return this rank's share of an epoch of `samples` over all ranks.

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
    return RankShare(
        rows=whole + walked,
        steps=steps + bool(rest),
        batch=batch_size,
        rank=ranks.local_rank,
        ranks=ranks.local_world_size,
        whole_rows=whole,
        last=(whole + low - begin, whole + high - begin),
        padding=each - (high - low),
    )


def substitute_rows(good: npt.NDArray[np.bool_]) -> Integers:
    """Return for each row the one that is delivered in its place: itself, where it is good.

    The substitutes are a function of the rows that are not good.
    """
    chosen = np.arange(len(good), dtype=np.int64)
    chosen[~good] = np.resize(np.flatnonzero(good), int((~good).sum()))
    return chosen
