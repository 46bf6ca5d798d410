"""Growing epochs over nodes with caches of their own: as many samples of each rank as the smallest cache has."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import ConfigError
from growcache.loading.agreement import Offer
from growcache.loading.framework import NUMPY
from growcache.loading.options import LoaderOptions, Ranks, rank_share
from growcache.loading.waiting import WaitControl
from growcache.numpy import EpochLoader
from growcache.threads import StoppedError
from tests.filled import Filled

MakeCache = Callable[..., Filled]


class Table:
    """The agreement of ranks that are threads of one process."""

    def __init__(self, ranks: int) -> None:
        self._offers: dict[tuple[int, int], list[int]] = {}
        self._ranks = ranks
        self._changed = threading.Condition()

    def prepare(self, reason: Callable[[], str]) -> None:
        self.reason = reason

    def agree(self, offer: Offer, watch: WaitControl) -> int:
        with self._changed:
            mine = self._offers.setdefault((offer.pass_number, offer.step), [])
            mine.append(offer.rows)
            self._changed.notify_all()
            while len(mine) < self._ranks:
                if watch.stopped():
                    raise StoppedError
                self._changed.wait(0.05)
            return min(mine)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Node:
    cache: Filled
    ranks: int


def train(
    nodes: list[Node],
    patch: pytest.MonkeyPatch,
    *,
    epochs: int = 1,
    steps: int | None = None,
    states: list[Any] | None = None,
    **options: Any,
) -> tuple[list[list[list[int]]], list[Any]]:
    """Return what each node delivers in each epoch, and a state of each."""
    world = sum(node.ranks for node in nodes)
    table, barrier = Table(world), threading.Barrier(world, timeout=300)
    options = {"batch_size": 4, "min_samples": 1, **options}

    def loader_of(place: int, rank: int, first: int) -> EpochLoader:
        class Ranked(EpochLoader):
            framework = replace(
                NUMPY, ranks=lambda: (first + rank, world), agreement=lambda _: table
            )

        patch.setenv("LOCAL_RANK", str(rank))
        patch.setenv("LOCAL_WORLD_SIZE", str(nodes[place].ranks))
        loader = Ranked(nodes[place].cache.root, **options)
        if states is not None:
            loader.load_state_dict(json.loads(json.dumps(states[place])))
        return loader

    def run(loader: EpochLoader) -> tuple[list[list[list[int]]], Any]:
        done = []
        with loader:
            for _ in range(epochs):
                found: list[list[int]] = []
                for batch in islice(loader, steps):
                    barrier.wait()
                    found.append(batch["id"].tolist())
                barrier.wait()  # a rank with another number of steps ends here with an error
                done.append(found)
            return done, loader.state_dict()

    places = [(place, rank) for place, node in enumerate(nodes) for rank in range(node.ranks)]
    firsts = [sum(node.ranks for node in nodes[:place]) for place, _ in places]
    loaders = [loader_of(*at, first) for at, first in zip(places, firsts, strict=True)]
    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(run, loaders))
    delivered = []
    for place in range(len(nodes)):
        mine = [one for (at, _), (one, _) in zip(places, found, strict=True) if at == place]
        epochs_of_ranks = zip(*mine, strict=True)
        delivered.append(
            [[i for rank in e for batch in rank for i in batch] for e in epochs_of_ranks]
        )
    last = {at: state for (at, _), (_, state) in zip(places, found, strict=True)}
    return delivered, [last[place] for place in range(len(nodes))]


SIZES = [7, 3, 5]  # shards of each node, of 10 samples


@pytest.fixture
def nodes_of(make_cache: MakeCache) -> Callable[..., list[Node]]:
    def make(*ranks: int) -> list[Node]:
        made = []
        for place, count in enumerate(ranks):
            cache = make_cache(f"node{place}")
            cache.add(*range(100 * place, 100 * place + SIZES[place]))
            made.append(Node(cache, count))
        return made

    return make


NodesOf = Callable[..., list[Node]]


@pytest.mark.mutant(
    26,
    "growcache.loading.windows:PassOpener._agree",
    "opened.cut(self._agreement.agree(offer, self._watch), ranks)",
    "self._agreement.agree(offer, self._watch)",
)
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("ranks", "each"), [((1, 1, 1), 30), ((2, 1), 30), ((1, 2), 15)])
def test_the_smallest_cache_decides_how_much_each_rank_delivers(
    nodes_of: NodesOf,
    monkeypatch: pytest.MonkeyPatch,
    ranks: tuple[int, ...],
    each: int,
    drop_last: bool,
) -> None:
    nodes = nodes_of(*ranks)
    delivered, _ = train(nodes, monkeypatch, epochs=3, drop_last=drop_last)
    usable = each - each % 4 if drop_last else each
    for place, epochs in enumerate(delivered):
        assert {name // 100_000 for epoch in epochs for name in epoch} == {place}
        assert [len(epoch) for epoch in epochs] == [usable * ranks[place]] * 3
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("after", [([1, 1, 1]), ([2, 1, 1]), ([1, 1])])
def test_nodes_go_on_where_they_stood(
    nodes_of: NodesOf, monkeypatch: pytest.MonkeyPatch, after: list[int]
) -> None:
    """Also with another number of ranks, and with one node fewer: no sample of a pass comes twice."""
    nodes = nodes_of(1, 1, 1)
    first, states = train(nodes, monkeypatch, steps=4, drop_last=False)
    rest = [Node(node.cache, count) for node, count in zip(nodes, after, strict=False)]
    second, _ = train(rest, monkeypatch, epochs=2, states=states, drop_last=False)
    left = min((10 * SIZES[place] - 16) // count for place, count in enumerate(after))
    for place, count in enumerate(after):
        of_pass = first[place][0] + second[place][0]
        assert len(second[place][0]) == left * count
        assert len(set(of_pass)) == len(of_pass)
        assert (
            len(second[place][1])
            == min(10 * SIZES[p] // n for p, n in enumerate(after)) * count
        )
    assert sorted(first[1][0] + second[1][0]) == [
        1000 * n + i for n in range(100, 103) for i in range(10)
    ]


@given(
    nodes=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 4)), min_size=2, max_size=4),
    batch=st.integers(1, 9),
    keeps_last=st.booleans(),
)
def test_what_is_agreed_fits_into_every_cache(
    nodes: list[tuple[int, int]], batch: int, keeps_last: bool
) -> None:
    each, world = min(samples // ranks for samples, ranks in nodes), sum(r for _, r in nodes)
    shares = [
        rank_share(
            each * world, batch, Ranks(first + r, world, r, ranks), keeps_last=keeps_last
        )
        for first, (_, ranks) in zip(firsts_of(nodes), nodes, strict=True)
        for r in range(ranks)
    ]
    assert {share.steps for share in shares} == {
        -(-each // batch) if keeps_last else each // batch
    }
    assert not any(share.padding for share in shares)
    limits = [samples for samples, ranks in nodes for _ in range(ranks)]
    assert all(share.rows <= limit for share, limit in zip(shares, limits, strict=True))


def firsts_of(nodes: list[tuple[int, int]]) -> list[int]:
    return [sum(ranks for _, ranks in nodes[:place]) for place in range(len(nodes))]


def test_epochs_that_all_ranks_leave_alike_are_followed_by_others(
    nodes_of: NodesOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered, _ = train(nodes_of(1, 2), monkeypatch, epochs=3, steps=2)
    assert [[len(epoch) for epoch in node] for node in delivered] == [[8] * 3, [16] * 3]
    assert len({tuple(epoch) for epoch in delivered[0]}) == 3


def test_where_the_smallest_pass_is_over_the_epoch_is(
    nodes_of: NodesOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = nodes_of(1, 1)
    first, states = train(
        nodes, monkeypatch, steps=8, drop_last=False
    )  # 30 samples are 8 steps
    assert [len(one[0]) for one in first] == [30, 30]
    second, _ = train(nodes, monkeypatch, epochs=2, states=states, drop_last=False)
    assert [[len(epoch) for epoch in one] for one in second] == [[0, 30]] * 2


def test_a_damaged_shard_makes_no_node_shorter(
    nodes_of: NodesOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = nodes_of(1, 1)
    nodes[1].cache.damage(101)
    delivered, _ = train(nodes, monkeypatch, drop_last=False)
    assert [len(one[0]) for one in delivered] == [30, 30]
    assert {name // 1000 for name in delivered[1][0]} == {100, 102}


def test_what_cannot_agree_is_refused() -> None:
    grouped = Ranks(0, 2, 0, 1, explicit=True, grouped=True)
    assert LoaderOptions("cache", batch_size=4, ranks=grouped).agrees
    assert not LoaderOptions("cache", batch_size=4, ranks=grouped, samples_per_epoch=80).agrees
    with pytest.raises(ConfigError, match="agree on growing epochs in the trainer's process"):
        LoaderOptions("cache", batch_size=4, ranks=grouped, gather="process")
    with pytest.raises(ConfigError, match="after init_process_group"):
        LoaderOptions("cache", batch_size=4, ranks=replace(grouped, grouped=False))
