"""Replay: a batch of an earlier run again, bit for bit, with the origin of each of its samples."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from growcache.cache.files import CacheLayout
from growcache.cache.purge_list import is_purged
from growcache.cache.side_files import Identity
from growcache.config import Config
from growcache.config_text import load_config
from growcache.errors import ConfigError, JournalError
from growcache.loading.blocks import BatchCutter, BlockAssembler
from growcache.loading.delivered_rows import Places, places_of
from growcache.loading.framework import NUMPY
from growcache.loading.gather import MappedShards
from growcache.loading.journal import CacheFacts, Journal, JournaledBatch
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import Window
from growcache.loading.snapshot import Snapshot
from growcache.loading.transform import TransformSchema
from growcache.loading.windows import OpenWindow, Piece
from growcache.replay_shards import refuse_other_config, snapshots_with
from growcache.schema import Origin
from growcache.store.contract import Entry


class ReplayedSample(NamedTuple):
    """Where a sample of a batch was, in the cache and in the store."""

    shard: int
    row: int
    origin: Origin
    valid: bool  # False: it took the place of one that could not be read, or filled the batch
    drawn_again: bool  # from the store, because the cache does not hold it any more
    store: int  # which of the configured URLs its object was listed by


@dataclass(frozen=True, slots=True)
class Replay:
    """A batch that was delivered earlier.

    Attributes:
        step: its number, over all epochs, from 0.
        epoch: its epoch, and
        epoch_step: its number there, from 0.
        known: whether the journal shows that the run came so far; a killed run may have
            ended up to half a minute before.
        seconds: Unix time at which the journal last said where the run was, at or before the step.
        earlier: how often the step came before, in runs that were resumed from an earlier state.
        batch: as the loader delivered it, a dict of NumPy arrays (whatever ``as_tuple`` was), or
            what ``batch_transform`` returned.
        samples: where each sample of the batch came from.
        objects: of the samples, as they were listed.
    """

    step: int
    epoch: int
    epoch_step: int
    known: bool
    seconds: int
    earlier: int
    batch: Any
    samples: tuple[ReplayedSample, ...]
    objects: tuple[Entry, ...]


def replay(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    journal: str | os.PathLike[str],
    step: int,
    *,
    rank: int = 0,
    transform: Callable[..., Any] | None = None,
    batch_transform: Callable[[Any], Any] | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Replay:
    """Make a batch again that a loader with ``journal=`` delivered.

    Shards that the cache of the configuration still holds are read there. The others are drawn
    again from the store, on this machine or another; each must have the bytes that it had.

    Args:
        config: the configuration of the run.
        journal: its journal.
        step: the number of the batch, over all epochs, from 0; see `EpochLoader.global_step`.
        rank: of several ranks, the one that received it.
        transform: the loader's, to get the batch as it was delivered. Without it the
            samples are as they are cached.
        batch_transform: the loader's.
        cache: a folder for shards that are drawn again, which the next call finds there;
            None: a temporary one.

    Raises:
        ConfigError: no such journal or step, or the configuration makes other samples.
        JournalError: a shard cannot be made again, because objects were changed, removed or purged.
    """
    settings = load_config(config, environment=os.environ)
    read = Journal.read(Path(journal), rank)
    found, others = read.find(step)
    facts, catalog = _cache_facts(read, Path(journal), found)
    identity = None
    if facts is not None and facts.values["identity"] is not None:
        identity = Identity.from_values(facts.values["identity"])
        refuse_other_config(settings, identity)
    options = found.session.options(
        Path(settings.cache.path), transform=transform, batch_transform=batch_transform
    )
    places = places_of(found.batch.rows, found.plans, options)
    planned = {shard.number: shard for plan in found.plans.values() for shard in plan.shards}
    needed = [planned[number] for number in np.unique(places.shards).tolist()]
    digests = {shard.number: shard.digest for shard in needed}
    lengths = {shard.number: shard.samples for shard in needed}
    with (
        _folder(cache) as folder,
        snapshots_with(settings, digests, lengths, facts, catalog, folder) as snapshots,
    ):
        samples, objects = _samples(places, snapshots)
        _refuse_purged(samples, Path(settings.cache.path), identity)
        batch = _batch(found, options, places, [snapshot for snapshot, _ in snapshots])
    at = found.batch
    return Replay(
        *(at.step, at.epoch, at.epoch_step, found.known, at.seconds, len(others)),
        *(batch, samples, objects),
    )


@contextmanager
def _folder(given: str | os.PathLike[str] | None) -> Iterator[Path]:
    if given is not None:
        yield Path(given).absolute()
        return
    with tempfile.TemporaryDirectory(prefix="growcache-replay-") as made:
        yield Path(made)


def _cache_facts(
    journal: Journal, path: Path, found: JournaledBatch
) -> tuple[CacheFacts | None, bytes | None]:
    """Return what the journal of the first rank on the machine says of the cache."""
    facts, ranks = found.facts, found.session.ranks
    if not ranks.leads:
        journal = Journal.read(path, ranks.rank - ranks.local_rank)
        facts = journal.facts[-1] if journal.facts else None
        with suppress(ConfigError):  # it was killed before that step
            facts = journal.find(found.batch.step)[0].facts
    if facts is None:
        return None, None
    facts = journal.latest(facts)
    return facts, journal.catalog(facts)


def _samples(
    places: Places, snapshots: Sequence[tuple[Snapshot, bool]]
) -> tuple[tuple[ReplayedSample, ...], tuple[Entry, ...]]:
    holders = {row.number: pair for pair in snapshots for row in pair[0].shards}
    samples: list[ReplayedSample] = []
    objects: dict[Entry, None] = {}
    rows = zip(*(c.tolist() for c in (places.shards, places.rows, places.valid)), strict=True)
    for shard, row, valid in rows:
        snapshot, again = holders[shard]
        origins = snapshot.sidecar(shard).origins
        entry = origins.entry(row)
        objects[entry] = None
        samples.append(ReplayedSample(shard, row, origins[row], valid, again, entry.store))
    return tuple(samples), tuple(objects)


def _refuse_purged(
    samples: Sequence[ReplayedSample], root: Path, identity: Identity | None
) -> None:
    test = is_purged(CacheLayout(root), identity=identity)
    if any(test(sample.origin.key) for sample in samples):
        raise JournalError(
            "the step had samples of objects that were purged since, so it cannot be made again"
        )


def _batch(
    found: JournaledBatch, options: LoaderOptions, places: Places, snapshots: Sequence[Snapshot]
) -> Any:
    """Assemble the batch as a loader does."""
    schema = TransformSchema(found.transform_schema)
    assembler = BlockAssembler(options, snapshots[0], NUMPY, lambda: False, schema)
    try:
        pieces = list(_pieces(found, options, places, snapshots))
        assembler.add(pieces, pieces)
        block = assembler.finish(found.batch.epoch)
        return next(BatchCutter(options, NUMPY).cut(block).batches)
    finally:
        assembler.close()


def _pieces(
    found: JournaledBatch, options: LoaderOptions, places: Places, snapshots: Sequence[Snapshot]
) -> Iterator[Piece]:
    """Yield the rows in order, as pieces of one window and one snapshot each."""
    windows = {
        (number, window.index): window
        for number, plan in found.plans.items()
        for window in plan.windows(options)
    }
    opened: dict[tuple[int, int, int], OpenWindow] = {}

    def place(i: int) -> tuple[int, int, int]:
        number, position = int(places.passes[i]), int(places.positions[i])
        index = next(
            w.index
            for (of, _), w in windows.items()
            if of == number and w.first <= position < w.first + len(w)
        )
        shard = int(places.shards[i])
        holder = next(n for n, snapshot in enumerate(snapshots) if snapshot.has(shard))
        return number, index, holder

    for key, group in groupby(range(len(places.rows)), place):
        which = np.array(list(group))
        window = windows[key[:2]]
        if key not in opened:
            opened[key] = _open(window, places, snapshots[key[2]])
        chosen = _chosen(opened[key], places, which, options)
        yield Piece(chosen, 0, len(which))


def _open(window: Window, places: Places, snapshot: Snapshot) -> OpenWindow:
    """Map the batch's shards of a snapshot, in the place of a window's."""
    needed = set(places.shards.tolist())
    numbers = tuple(row.number for row in snapshot.shards if row.number in needed)
    shards = [snapshot.mapped(number) for number in numbers]
    starts = np.cumsum([0, *map(len, shards)])
    none = np.zeros(0, np.int64)
    return OpenWindow(snapshot, window, numbers, MappedShards(shards), starts, none)


def _chosen(
    window: OpenWindow, places: Places, which: np.ndarray[Any, Any], options: LoaderOptions
) -> OpenWindow:
    shard_places = np.array([window.numbers.index(n) for n in places.shards[which].tolist()])
    rows = places.rows[which]
    names = options.chosen(window.snapshot.schema).names
    return OpenWindow(
        snapshot=window.snapshot,
        plan=window.plan,
        numbers=window.numbers,
        shards=window.shards,
        starts=window.starts,
        order=window.starts[shard_places] + rows,
        offsets=places.positions[which] - window.plan.first,
        valid=places.valid[which],
        rows=window.shards.rows(names, shard_places, rows),
    )
