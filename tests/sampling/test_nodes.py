"""Several machines draw from one source, and become more: every cache is kept (protocol 3)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from growcache.cache.files import CacheLayout
from growcache.cache.index.connection import reading_index
from growcache.cache.index.reader import read_editions
from growcache.cache.side_files import Edition
from growcache.cache.side_files import read_editions as read_side_file
from growcache.cache.status_model import MovedStatus
from growcache.loading.snapshot import Snapshot
from growcache.sampling.lanes import owned_lanes
from tests.sampling.services import run, status, write_config

OBJECTS = 150


def config(path: Path, node: int, nodes: int) -> Path:
    return write_config(
        path / f"{node}.yaml",
        f"{path}/data/*.npy",
        sampling={"node": node, "nodes": nodes},
    )


def keys(cache: Path) -> list[str]:
    with Snapshot.take(cache) as snapshot:
        return [snapshot.origin(i).key for i in range(len(snapshot))]


def editions(cache: Path) -> list[Edition]:
    layout = CacheLayout(cache)
    with reading_index(layout) as connection:
        found = read_editions(connection)
    assert read_side_file(layout) == found
    return found


@pytest.mark.slow
def test_two_machines_become_three_and_two_again_in_the_middle_of_a_pass(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    for n in range(OBJECTS):
        np.save(tmp_path / "data" / f"{n}.npy", np.full(64, n, "<f4"))
    caches = [tmp_path / str(node) for node in range(3)]
    held = [Counter[str]() for _ in caches]
    new = [Counter[str]() for _ in caches]  # of the last run
    for nodes, limits in ((2, "24 24"), (3, "8 8 32"), (2, "")):
        for node in range(nodes):
            arguments = ("--samples", limits.split()[node]) if limits else ("--until-full",)
            assert run(config(tmp_path, node, nodes), *arguments) == (0, "")
            found = Counter(keys(caches[node]))
            assert not held[node] - found  # every sample is kept
            assert found == Counter(set(found))  # and none comes twice
            new[node], held[node] = found - held[node], found
            if nodes == 3:
                assert status(caches[node]).moved == MovedStatus()
    assert set(held[0] | held[1]) == {f"{tmp_path}/data/{n}.npy" for n in range(OBJECTS)}
    assert not set(held[0]) & set(held[1])  # no lane moved between these two
    moved = [status(cache).moved for cache in caches]
    twice = [len(set(new[node]) & set(held[2])) for node in range(2)]
    for node in range(2):
        assert moved[node].left == 0
        assert twice[node] <= moved[node].parts < len(held[node]) / 2
    assert sum(twice) > 0
    for node, lanes in enumerate([owned_lanes(node, 2) for node in range(2)]):
        known = [one.lanes for one in editions(caches[node])]
        assert known == [lanes, owned_lanes(node, 3), lanes]


@pytest.mark.slow
def test_a_third_machine_throws_no_cache_away(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for n in range(OBJECTS):
        np.save(tmp_path / "data" / f"{n}.npy", np.full(64, n, "<f4"))
    for node in range(2):
        assert run(config(tmp_path, node, 2), "--until-full") == (0, "")
    caches = [tmp_path / str(node) for node in range(2)]
    before = [keys(cache) for cache in caches]
    assert Counter(before[0] + before[1]) == Counter(set(before[0] + before[1]))
    assert len(before[0] + before[1]) == OBJECTS

    for node in range(3):
        assert run(config(tmp_path, node, 3), "--until-full") == (0, "")
    for node, old in enumerate(before):
        assert Counter(keys(caches[node])) == Counter(old)  # it lost lanes and got none
        lanes = [one.lanes for one in editions(caches[node])]
        assert lanes == [owned_lanes(node, 2), owned_lanes(node, 3)]
    third = keys(tmp_path / "2")
    assert 20 < len(third) < 80

    # The second machine is gone: the first draws what it gets, and nothing again.
    assert run(config(tmp_path, 0, 1), "--until-full") == (0, "")
    assert Counter(keys(caches[0])) == Counter(set(before[0] + before[1]))
    known = editions(caches[0])
    assert [one.lanes for one in known] == [owned_lanes(0, 2), owned_lanes(0, 3), None]

    # With the index and the file lost, the shards alone tell it.
    layout = CacheLayout(caches[0])
    layout.editions.unlink()
    for path in layout.root.glob(f"{layout.index.name}*"):
        path.unlink()
    assert run(config(tmp_path, 0, 1), "--until-full") == (0, "")
    assert editions(caches[0]) == known
