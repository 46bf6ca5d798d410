"""Many nodes on one bucket, in virtual time and by the service's own decisions. Pure.

`Node` draws with the real population, lanes, permutation and editions, over objects that are only numbers. `world` is one
node's service for `growcache.monitor.plan_simulation`: its permits, sizes of groups, writes and evictions are real, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from growcache.monitor.plan import scenario_of
from growcache.monitor.plan_scenario import Parts, Run, Scenario
from growcache.monitor.plan_simulation import simulate
from growcache.sampling.draw_notes import DrawNotes
from growcache.sampling.draws import Draws
from growcache.sampling.lanes import FINE_LANES, lane_mask, owned_lanes
from growcache.sampling.orders import Ints
from growcache.sampling.population import Population
from growcache.sampling.sizing import Sizing
from growcache.sampling.stratum_draws import DrawnEdition
from growcache.store.shared_catalog import part_sizes
from tests.monitor.planning import SAMPLE_BYTES, plan_inputs

# Of a partitioned prefix, per second, as AWS documents it ("Best practices design patterns", S3 user guide). The page
# names no figure for LIST, which is counted here with the lower one.
GETS_PER_PREFIX = 5_500
LISTS_PER_PREFIX = PUTS_PER_PREFIX = 3_500
PAGE_KEYS = 1_000  # of a LIST request
TRAINERS_PER_NODE = 8
HOUR, DAY = 3_600.0, 86_400.0

SMALL_SHARDS = Sizing(
    samples_per_object=1, stride_bytes=1.0, overhead_bytes=0, whole=False, shard_samples=8
)
USUAL_SHARDS = replace(SMALL_SHARDS, shard_samples=256)  # 64 MB of samples of 256 KiB


class NumberedObjects:
    """Objects of one size, whose keys are their numbers: what `Population` asks of `Objects`."""

    def __init__(self, size: int) -> None:
        self._size = size

    def among(self, listed: int) -> int:
        """Return the objects among the first listed."""
        return listed

    def sizes(self, start: int, stop: int) -> Ints:
        """Return bytes."""
        return np.full(stop - start, self._size, np.int64)

    def sources(self, start: int, stop: int) -> Ints:
        """Return the only source."""
        return np.zeros(stop - start, np.int64)

    def keys(self, start: int, stop: int) -> Iterator[str]:
        """Yield keys."""
        return (f"recordings/{number:012d}.npy" for number in range(start, stop))


def population(parts_of_object: int = 1) -> Population:
    nothing: Any = None
    objects: Any = NumberedObjects(parts_of_object)
    return Population(nothing, objects, SMALL_SHARDS)


# ----------------------------------------------------------------------------- resizes


@dataclass
class Node:
    """One machine: its cache stays while it is away."""

    number: int
    population: Population
    objects: int
    sizing: Sizing = SMALL_SHARDS
    notes: DrawNotes = field(default_factory=DrawNotes)
    draws: Draws = field(init=False)
    editions: list[DrawnEdition] = field(default_factory=list)
    groups: int = 0
    drawn: list[Ints] = field(default_factory=list)  # of its first pass

    def __post_init__(self) -> None:
        self.draws = Draws(0, self.sizing, notes=self.notes)

    def join(self, nodes: int, own_parts: int | None = None) -> None:
        """Become one of this number of nodes."""
        lanes = owned_lanes(self.number, nodes)
        strata = self.population.strata(self.objects, lanes, own_parts)
        self.editions.append(DrawnEdition(len(self.editions), self.groups, strata, lanes))
        self.draws.add(self.editions[-1])

    def start(self, nodes: int, own_parts: int, groups: int) -> None:
        """Go on after this number of groups, as a restarted service does."""
        self.join(nodes, own_parts)
        self.draws.recall()
        self.groups = groups
        self.draw(1)

    def draw(self, most: float) -> None:
        """Draw until at least this number of further parts is drawn, or the first pass ends."""
        count = 0
        while count < most:
            try:
                found = self.draws.group(self.groups)
            except LookupError:  # it owns no part
                return
            assert found is not None
            if found.round:
                return
            self.drawn.append(found.parts)
            count += len(found.parts)
            self.groups += 1

    @property
    def reported_twice(self) -> int:
        """The number that `growcache status` shows as moved."""
        try:
            return self.draws.moved(self.groups)[0]
        except LookupError:
            return 0


@dataclass(frozen=True, slots=True)
class Resize:
    """The cost of a change of the number of nodes, as shares of the population."""

    phases: tuple[int, ...]
    moved: float  # lanes that change their owner at the first change
    twice: float  # parts that were drawn by more than one node in the pass
    reported: float  # what the nodes' statuses say of that
    missed: float  # parts that no node drew


def moved_lanes(before: int, after: int) -> float:
    """Return the share of the lanes that change their owner.

    >>> [round(moved_lanes(a, b), 2) for a, b in ((2, 3), (3, 2), (100, 101))]
    [0.32, 0.32, 0.01]
    """
    stay = sum(
        int((lane_mask(owned_lanes(n, before)) & lane_mask(owned_lanes(n, after))).sum())
        for n in range(min(before, after))
    )
    return 1 - stay / FINE_LANES


def resize(phases: Sequence[int], objects: int, until: float = 0.5) -> Resize:
    """Change the number of nodes in the middle of a pass: each phase but the last draws a share of what is left."""
    shared = population()
    nodes: list[Node] = []
    for place, total in enumerate(phases):
        nodes += [Node(number, shared, objects) for number in range(len(nodes), total)]
        for node in nodes[:total]:
            node.join(total)
            last = place == len(phases) - 1
            node.draw(math.inf if last else until * objects / total)
    counts = np.zeros(objects, np.int64)
    for node in nodes:
        for parts in node.drawn:
            counts[parts] += 1
    return Resize(
        tuple(phases),
        moved_lanes(phases[0], phases[1]),
        int((counts > 1).sum()) / objects,
        sum(node.reported_twice for node in nodes) / objects,
        int((counts == 0).sum()) / objects,
    )


# ------------------------------------------------------------------- one bucket, N nodes


@dataclass(frozen=True, slots=True)
class Deployment:
    """N equal nodes on one bucket.

    Attributes:
        prefixes: partitioned prefixes that the keys are spread over evenly.
        link: bytes per second of a node's link to the store.
        visit: samples of 256 KiB that a request yields.
        consume: samples per second that the trainers of a node take.
        samples: that the bucket holds.
    """

    nodes: int
    prefixes: int
    link: float = 1.25e9
    visit: int = 1
    consume: float = 16_000.0
    samples: float = 1e9
    max_bytes: str = "2TB"

    @property
    def visit_bytes(self) -> float:
        """Bytes of a request."""
        return float(self.visit * SAMPLE_BYTES)

    @property
    def share_of_link(self) -> float:
        """Bytes per second that a node gets: of its link, and of what the prefixes answer all nodes together."""
        answered = GETS_PER_PREFIX * self.prefixes / self.nodes
        return min(self.link, answered * self.visit_bytes)


def largest_share(nodes: int) -> float:
    """Return the lanes of the node that has most of them, over the mean; it ends a pass last."""
    counts = [int(lane_mask(owned_lanes(node, nodes)).sum()) for node in range(nodes)]
    return max(counts) * nodes / FINE_LANES


def world(deployment: Deployment, share: float = 1.0) -> Scenario:
    """Return one node's service and training; ``share``: of its lanes, over the mean."""
    parts = deployment.samples / deployment.visit
    own = parts / deployment.nodes * share
    inputs = plan_inputs(
        link=deployment.share_of_link,
        consume=deployment.consume,
        population=deployment.samples,
        visit=deployment.visit,
        sampling={"workers": 16, "concurrency": 64, "samples_per_object": deployment.visit},
        max_bytes=deployment.max_bytes,
    )
    inputs = replace(inputs, parts=Parts((1.0,), (own,), others=parts - own), cores=32)
    return scenario_of(inputs, lambda _, figure: figure.number)


@dataclass(frozen=True, slots=True)
class Load:
    """The load of N nodes on the bucket, and its effect on training, an hour after the start."""

    gets_per_second: float
    bytes_per_second: float
    coverage_day: float
    pass_seconds: float  # until the node with most lanes has drawn all of them once
    reuse: float  # samples delivered per sample drawn, at the end of the first day
    first_batch_seconds: float


def seconds_until(run: Run, parts: float) -> float:
    """Return the time at which a run has drawn this number of parts."""
    low, high = 0.0, 1e10
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if run.at(middle).parts >= 0.9999 * parts else (middle, high)
    return high


def load(deployment: Deployment) -> Load:
    run: Run = simulate(world(deployment))
    gets = run.at(HOUR).visits / HOUR * deployment.nodes
    day = run.at(DAY)
    of_a_node = deployment.samples / deployment.visit / deployment.nodes
    return Load(
        gets,
        gets * deployment.visit_bytes,
        min(1.0, day.parts / of_a_node),
        seconds_until(run, of_a_node) * largest_share(deployment.nodes),
        day.delivered / max(1.0, day.drawn),
        run.first_batch_at,
    )


# -------------------------------------------------------------------- listing once


@dataclass(frozen=True, slots=True)
class Listings:
    """Requests and bytes until all nodes have the listing."""

    lists: float
    gets: float
    puts: float
    nbytes: float


def listings(objects: int, nodes: int, bytes_per_key: float, *, shared: bool) -> Listings:
    pages = math.ceil(objects / PAGE_KEYS)
    if not shared:
        return Listings(pages * nodes, 0, 0, 0)
    parts = catalog_parts(objects)
    readers = nodes - 1
    nbytes = readers * objects * bytes_per_key
    return Listings(pages, readers * (parts + 1), 2 * parts + 1, nbytes)


def catalog_parts(objects: int) -> int:
    """Return the parts of a catalog.

    >>> catalog_parts(1000), catalog_parts(1_000_000)
    (1, 21)
    """
    count = 0
    sizes = part_sizes()
    for size in islice(sizes, 16):  # by then they do not grow any more
        if objects <= 0:
            return count
        objects -= size
        count += 1
    return count + math.ceil(max(0, objects) / next(sizes))
