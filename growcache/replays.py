"""Replay: deliver a batch of an earlier run again, bit for bit, with the origin of each sample."""

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
    """The place of a batch's sample in the cache and in the store.

    Attributes:
        shard: Number of its shard.
        row: Its row in the shard.
        origin: The object, version and rows that it came from.
        valid: False if it stood in for an unreadable sample, or filled up the batch.
        drawn_again: Whether it was drawn from the store again, because the cache no longer
            holds it.
        store: Index of the configured URL that listed its object.
    """

    shard: int
    row: int
    origin: Origin
    valid: bool
    drawn_again: bool
    store: int


@dataclass(frozen=True, slots=True)
class Replay:
    """A batch that an earlier run delivered.

    Attributes:
        step: Number of the batch over all epochs, from 0.
        epoch: Number of its epoch.
        epoch_step: Number of the batch in its epoch, from 0.
        known: Whether the journal proves that the run reached the step. A killed run may have
            ended up to 30 seconds before it.
        seconds: Unix time of the last journal entry about the run's progress at or before the
            step.
        earlier: How often the step occurred before, in runs that were resumed from an earlier
            state.
        batch: The batch as the loader delivered it: a dict of NumPy arrays (even with
            ``as_tuple``), or the result of ``batch_transform``.
        samples: The place of each sample of the batch.
        objects: The objects of the samples, as they were listed.
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
    """Deliver a batch again that a loader with ``journal=`` delivered.

    Shards that the configured cache still holds are read there. All others are drawn from the
    store again, on this machine or another. Each must have the same bytes as before.

    Args:
        config: Configuration of the run.
        journal: Path of the run's journal.
        step: Number of the batch over all epochs, from 0; see `EpochLoader.global_step`.
        rank: Rank that received the batch.
        transform: The loader's ``transform``. Without it the samples are as they are cached.
        batch_transform: The loader's ``batch_transform``.
        cache: Folder for shards that are drawn again, where the next call finds them. None uses
            a temporary folder.

    Returns:
        The batch, with the origin of each sample.

    Raises:
        ConfigError: The journal or the step does not exist, or the configuration makes other
            samples.
        JournalError: A shard cannot be drawn again, because objects were changed, removed or
            purged.
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
    """Return what the journal of this machine's first rank records about the cache."""
    facts, ranks = found.facts, found.session.ranks
    if not ranks.leads:
        journal = Journal.read(path, ranks.rank - ranks.local_rank)
        facts = journal.facts[-1] if journal.facts else None
        with suppress(ConfigError):  # the first rank was killed before that step
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
    """Map the shards of the batch that a snapshot holds, as a window maps its own."""
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
