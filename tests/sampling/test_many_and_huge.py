"""10^5 tiny objects and one of 5 GB in one listing: neither drowns the other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache import Snapshot
from growcache.cache.index.reader import read_index
from growcache.config_source import SourceConfig
from growcache.formats import open_format
from growcache.formats.base import Visit
from growcache.sampling.objects import Objects
from growcache.sampling.population import Population
from growcache.sampling.sizing import Sizing
from growcache.store.catalog import Catalog
from growcache.store.contract import StoredObject
from growcache.store.opening import open_store
from tests.sampling.drawn import drawn_by, edition
from tests.sampling.outcomes import ODD
from tests.sampling.services import run, status, write_config
from tests.servers.imagined import HUGE_ROWS, KEYS, TINY, TINY_ROWS, imagined, size


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, object]]:
    with imagined() as found:
        yield found


@pytest.mark.parametrize("client", ["obstore", pytest.param("fsspec", marks=pytest.mark.slow)])
def test_all_are_listed_and_any_row_is_read(options: dict[str, Any], client: Any) -> None:
    source = SourceConfig(url=("s3://b/**/*.npy",), storage_options=options, client=client)
    store = open_store(source)
    entries = [entry for page in store.pages() for entry in page]
    assert sorted(entry.key for entry in entries) == KEYS
    huge = next(entry for entry in entries if entry.key == "huge.npy")
    assert (huge.size, huge.size > 4_999_999_000) == (size("huge.npy"), True)
    object_format = open_format("npy", {"axis": 0})

    async def rows(parts: int) -> list[int]:
        try:
            visits = [Visit(part, parts, 0, 0) for part in (0, parts // 2, parts - 1)]
            found = [
                await object_format.read(StoredObject(store, huge), visit) for visit in visits
            ]
        finally:
            await store.close()
        assert all(sample["x"].tolist() == [at, at] for one in found for sample, at, _ in one)
        return [len(one) for one in found]

    assert asyncio.run(rows(HUGE_ROWS // 8)) == [8, 8, 8]


def test_draws_are_as_the_weights_say(tmp_path: Path, options: dict[str, Any]) -> None:
    store = open_store(SourceConfig(url=("s3://b/",), storage_options=options))
    with Catalog.open(tmp_path / "catalog.bin") as catalog:
        for page in store.pages():
            catalog.append(page)
        assert len(catalog) == TINY + 1
        for by_objects in (False, True):
            _check_draws(catalog, by_objects=by_objects)


def _check_draws(catalog: Catalog, *, by_objects: bool) -> None:
    sizing = Sizing(1, 16.0, 128, by_objects, 1000)
    population = Population(catalog, Objects(catalog), sizing)
    parts = population.parts(len(catalog))
    assert parts == (TINY + 1 if by_objects else TINY * TINY_ROWS + HUGE_ROWS)
    draws = drawn_by(0, sizing, [edition(0, np.array([0, parts]))])
    draw = draws.group(100)
    assert draw is not None
    visits = population.visits(draw)
    tiny = sum(visit.entry.key != "huge.npy" for visit in visits)
    assert tiny >= 999 if by_objects else tiny <= 20  # one in 1,560 rows


@pytest.mark.parametrize("weight_by", ["samples", "objects"])
def test_the_service_takes_both(
    tmp_path: Path, options: dict[str, Any], weight_by: str, write_tables: bool
) -> None:
    source = {"url": "s3://b/", "storage_options": options, "options": {"axis": 0}}
    sampling = {"weight_by": weight_by, "shard_samples": 200, "concurrency": 8}
    config = write_config(tmp_path / "c.yaml", "", source=source, sampling=sampling)
    assert run(config, "--samples", "400") == (0, "")
    found = status(tmp_path / "c")
    assert (found.holes, found.failures) == (0, 0)
    assert found.samples >= 400
    view = read_index(tmp_path / "c")
    assert view.schema is not None
    assert np.dtype(view.schema["x"].dtype) == np.int64
    with Snapshot.take(tmp_path / "c") as snapshot:
        for i in range(len(snapshot)):
            origin = snapshot.origin(i)
            expected = [origin.start] * 2
            if origin.key != "huge.npy":
                expected = [int(origin.key[5:11]), -origin.start]
            assert snapshot[i]["x"].tolist() == expected
    with ODD.open(writes=write_tables) as table:
        table.record(
            "10^5 tiny objects and one of 5 GB in one listing",
            "`x: int64[2]`, any row as often as any other; with `weight_by: objects` any object",
        )
