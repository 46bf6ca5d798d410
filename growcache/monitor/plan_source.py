"""A short look at a source, with the samplers' own code: list, probe, and time a few visits.

The visits are those that a new cache would draw first, with as many reads in flight as all
samplers together have.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from growcache.cache.formats import CACHE_FORMATS
from growcache.cache.sidecar import Sidecar
from growcache.config import Config
from growcache.errors import FormatError, SamplingError, TransientStoreError
from growcache.formats import names_decide
from growcache.formats.base import Measure, endless_entry
from growcache.monitor.plan_cache import ShardBytes
from growcache.monitor.plan_scenario import Parts
from growcache.monitor.plan_timing import (
    ReadCounter,
    Timings,
    Visited,
    plan_permit,
    time_visits,
)
from growcache.sampling.draws import Draws
from growcache.sampling.fill import GroupFiller, encode_group, load_transform
from growcache.sampling.labels import Labels, read_labels
from growcache.sampling.lanes import owned_lanes
from growcache.sampling.messages import PartVisit
from growcache.sampling.objects import Objects, Split, field_join
from growcache.sampling.orders import Floats, Ints
from growcache.sampling.population import (
    ObjectStrata,
    Population,
    block_draws,
    block_quotas,
    source_names,
    source_shares,
    stratum_names,
    stratum_shares,
)
from growcache.sampling.schema_probe import SchemaProbe
from growcache.sampling.schema_search import PROBED
from growcache.sampling.sizing import (
    MeasuredSource,
    Sizing,
    measure_sizing,
    objects_take_turns,
)
from growcache.sampling.sources import Sources, first_urls, open_listings, open_sources
from growcache.sampling.stratum_draws import DrawnEdition, EditionStrata
from growcache.schema import Schema
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry

PATIENCE_SECONDS = 20.0  # with a store that does not answer
LISTING_SECONDS = 4.0
MOST_LISTED = 50_000
MOST_ENCODED = 128


@dataclass(frozen=True, slots=True)
class Look:
    """The findings about a source."""

    objects: int
    is_whole: bool  # the listing is complete
    is_endless: bool  # a user's function draws samples
    parts: Parts
    population_samples: float
    sizing: Sizing
    schema: Schema
    sample_bytes: float
    record_bytes: int
    shard_bytes: ShardBytes
    catalog_bytes: int  # of the listed objects
    first_page_seconds: float
    listing_seconds: float
    probe_seconds: float
    timings: Timings
    samples_of_visit: float
    measured: tuple[MeasuredSource, ...] = ()

    def with_bound(self, config: Config) -> Look | None:
        """Return the same look for another bound, or None if other visits would be made."""
        sizing = measure_sizing(config, self.measured, self.schema, self.sample_bytes)
        same = sizing.samples_per_object == self.sizing.samples_per_object
        same &= sizing.partitionings == self.sizing.partitionings
        return replace(self, sizing=sizing) if same else None


def look_at_source(config: Config) -> Look:
    here = str(Path.cwd())
    if here not in sys.path:  # samplers find the user's code here, too
        sys.path.insert(0, here)
    with (
        tempfile.TemporaryDirectory(prefix="growcache-plan-") as scratch,
        redirect_stdout(sys.stderr),  # the user's code may print
    ):
        return asyncio.run(_look(config, Path(scratch)))


async def _look(config: Config, scratch: Path) -> Look:
    sampling, read = config.sampling, ReadCounter()
    sources = open_sources(
        config.sources,
        concurrency=sampling.samplers * sampling.concurrency,
        timeout_seconds=min(sampling.timeout_seconds, PATIENCE_SECONDS),
        on_bytes=read.add,
    )
    try:
        listed = await asyncio.to_thread(_list_some, config, sources)
        with closing(Catalog.open(scratch / "catalog.bin")) as catalog:
            return await _examine(config, sources, listed, catalog, read)
    finally:
        await sources.close()


async def _examine(
    config: Config, sources: Sources, listed: _Listed, catalog: Catalog, read: ReadCounter
) -> Look:
    labels = await asyncio.to_thread(_labels, config)
    objects = _objects(config, catalog, listed, labels)
    catalog.flush()
    filler = _filler(config, sources)
    began = time.monotonic()
    measured, schema, nbytes = await _probe(config, sources, filler, objects)
    probe_seconds = time.monotonic() - began
    sizing = measure_sizing(config, measured, schema, nbytes)
    drawn = _Drawn(config, catalog, objects, sizing)
    timings, visited = await time_visits(config, filler, drawn.visits(), schema, read)
    parts, population = Parts((1.0,), (math.inf,), replacement=True), math.inf
    if sources.listed:
        parts = drawn.parts
        population = sum(samples for _, samples in drawn.population.sources(len(catalog)))
    return Look(
        objects=len(catalog),
        is_whole=listed.is_whole,
        is_endless=not sources.listed,
        parts=parts,
        population_samples=population,
        sizing=sizing,
        schema=schema,
        sample_bytes=nbytes,
        record_bytes=CACHE_FORMATS[config.cache.format].record_bytes(schema, nbytes),
        shard_bytes=_encoded(config, schema, visited),
        catalog_bytes=catalog.allocated_bytes,
        first_page_seconds=listed.first_page_seconds,
        listing_seconds=listed.seconds,
        probe_seconds=probe_seconds,
        timings=timings,
        samples_of_visit=timings.samples / timings.visits,
        measured=tuple(measured),
    )


def _filler(config: Config, sources: Sources) -> GroupFiller:
    sampling = config.sampling
    transform = load_transform(sampling.transform, sampling.transform_options, sampling.seed)
    in_flight = sampling.samplers * sampling.concurrency
    weighted = sampling.strata is not None
    return GroupFiller(sources, transform, sampling.seed, in_flight, weighted=weighted)


# ------------------------------------------------------------------------ listing


@dataclass(frozen=True, slots=True)
class _Listed:
    entries: list[Entry]
    is_whole: bool
    first_page_seconds: float
    seconds: float


def _list_some(config: Config, sources: Sources) -> _Listed:
    if not sources.listed:
        return _Listed([endless_entry(config.sources[0].format)], True, 0.0, 0.0)
    listings = open_listings(
        config.sources,
        timeout_seconds=min(config.sampling.timeout_seconds, PATIENCE_SECONDS),
        on_retry=lambda error: None,
        lengths=sources.lengths,
    )
    began, entries, first = time.monotonic(), list[Entry](), 0.0
    for page in listings.pages():
        now = time.monotonic() - began
        first = first or now
        entries += page
        shown = {entry.store for entry in entries} if len(config.sources) > 1 else {0}
        if (now > LISTING_SECONDS or len(entries) >= MOST_LISTED) and len(shown) >= len(
            config.sources
        ):
            return _Listed(entries, False, first, now)
    if not entries:
        urls = ", ".join(config.urls)
        raise SamplingError(
            f"the listing is empty: no object matches {urls}; check bucket, prefix and glob in "
            "source.url",
            code="GC217",
        )
    return _Listed(entries, True, first, time.monotonic() - began)


def _labels(config: Config) -> Labels | None:
    if all(source.labels is None for source in config.sources):
        return None
    patience = min(config.sampling.timeout_seconds, PATIENCE_SECONDS)
    return read_labels(config.sources, patience)


def _objects(
    config: Config, catalog: Catalog, listed: _Listed, labels: Labels | None
) -> Objects:
    catalog.append(listed.entries)
    objects = Objects(
        catalog,
        Split(config.split) if config.split is not None else None,
        field_join(config.sources),
        skips=True,  # a part of a listing lacks partners
        firsts=first_urls(config.sources),
    )
    if labels is not None:
        objects.labels = labels
    objects.look(len(catalog))
    if not objects.counts(len(catalog)).all():
        raise SamplingError(
            "a source has no object to draw from among those listed; check source.url, "
            "source.labels and split",
            code="GC217",
        )
    return objects


# ------------------------------------------------------------------------ probing


async def _probe(
    config: Config, sources: Sources, filler: GroupFiller, objects: Objects
) -> tuple[list[MeasuredSource], Schema, float]:
    """Return measures, schema and mean bytes of a sample, as from `SchemaSearch`."""
    declared = None
    if config.sampling.schema != "auto":
        declared = Schema.declared(config.sampling.schema)
    probe = SchemaProbe(sources, filler, config.sampling.seed, declared)
    measured, schemas, sizes = [], [], []
    for number, (source, object_format) in enumerate(
        zip(config.sources, sources.formats, strict=True)
    ):
        found = await probe.probe(objects.visits(objects.numbers(number, 0, PROBED)))
        if reason := found.get("transient"):
            raise TransientStoreError(f"waited for {reason}")
        if reason := found.get("mixed") or found.get("errors"):
            raise FormatError(reason if isinstance(reason, str) else reason[0])
        ranged = object_format.ranged
        measured.append(
            MeasuredSource(
                Measure(**found["measure"]),
                found["samples_per_object"],
                ranged,
                ranged and names_decide(source),
            )
        )
        schemas.append(Schema.from_json(found["schema"]))
        sizes.append(found["sample_bytes"])
    weights = config.weights or (1.0,)
    return measured, Schema.covering(schemas), float(np.average(sizes, weights=weights))


# ------------------------------------------------------------------------ drawing


class _Drawn:
    """The parts of the listed objects, in the order in which a new cache draws them."""

    def __init__(
        self, config: Config, catalog: Catalog, objects: Objects, sizing: Sizing
    ) -> None:
        sampling, listed = config.sampling, len(catalog)
        lanes = owned_lanes(*sampling.node_of_nodes)
        self.population = Population(catalog, objects, sizing)
        strata, quotas = self._strata(config, objects, listed, lanes)
        replacement = sampling.order == "replacement"
        self._draws = Draws(
            sampling.seed, sizing, turns=objects_take_turns(sampling), replacement=replacement
        )
        self._draws.add(DrawnEdition(0, 0, strata, lanes, quotas))
        shares = np.ones(1) if quotas is None else quotas / quotas.sum()
        pairs = [
            (float(s), float(n)) for s, n in zip(shares, strata.own, strict=True) if s and n
        ]
        shares_of, counts = zip(*pairs, strict=True)
        others = float(strata.sizes.sum() - strata.own.sum())
        self.parts = Parts(shares_of, counts, replacement, others)

    def _strata(
        self, config: Config, objects: Objects, listed: int, lanes: str | None
    ) -> tuple[EditionStrata, Ints | None]:
        weights, strata_config = config.weights, config.sampling.strata
        if weights is not None:
            names = [str(number) for number in range(len(weights))]
            strata = ObjectStrata(objects, self.population, source_names, names)
            found = strata.strata(listed, lanes)
            wanted: Floats = source_shares(
                weights, found.own, self.population.per_visit(listed)
            )
            return found, block_quotas(wanted, block_draws(wanted))
        if strata_config is None:
            return self.population.strata(listed, lanes), None
        by_objects = config.sampling.weight_by == "objects"
        strata = ObjectStrata(
            objects, self.population, stratum_names(config), by_objects=by_objects
        )
        found = strata.strata(listed, lanes)
        shares = stratum_shares(found.names, found.natural, strata_config.weights)
        return found, block_quotas(shares)

    def visits(self) -> Iterator[PartVisit]:
        """Yield the visits of one round, because repeated reads may be faster."""
        left = self.parts.total
        for group in count():
            draw = self._draws.group(group)
            if draw is None or left <= 0:
                return
            left -= len(draw.parts)
            yield from self.population.visits(draw)


# ------------------------------------------------------------------------ encoding


def _encoded(config: Config, schema: Schema, visited: Visited) -> ShardBytes:
    """Return the bytes of shards per sample, from samples that were read and encoded."""
    filled = [one for one in visited[:MOST_ENCODED] if one[1].samples]
    if not filled:
        raise FormatError(
            next(
                (r.hole for _, r in visited if r.hole),
                "no sample could be read",
            )
        )
    permit = plan_permit([visit for visit, _ in filled], None)
    results = [result for _, result in filled]
    shards = encode_group(permit, results, schema, "", config.cache.format)
    sidecar = shards[0].sidecar
    record = sum(file.nbytes for file in sidecar.files) / max(1, sidecar.samples)
    return ShardBytes(record, _bytes_of(sidecar) / max(1, sidecar.samples))


def _bytes_of(sidecar: Sidecar) -> int:
    return len(sidecar.to_bytes())
