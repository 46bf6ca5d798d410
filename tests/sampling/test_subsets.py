"""Which objects belong to a subset: for good, by their groups, in the shares that were asked for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from growcache.cache.status import read_status
from growcache.config import SplitConfig
from growcache.errors import ConfigError
from growcache.loading.snapshot import Snapshot
from growcache.sampling.draws import GroupDraw
from growcache.sampling.lanes import owned_lanes
from growcache.sampling.objects import NO_SUBSET, Objects, Split
from growcache.sampling.population import Population
from growcache.sampling.sizing import Sizing
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry
from tests.sampling.services import run, write_config

FRACTIONS = {"train": 0.6, "val": 0.3}  # and a tenth in neither
SUBJECT = "(?P<group>sub-[0-9]+)"


def split(use: str = "train", group: str | None = SUBJECT, seed: int = 0) -> SplitConfig:
    return SplitConfig(group=group, fractions=FRACTIONS, use=use, seed=seed)


def places(keys: list[str], **more: object) -> np.ndarray:
    subsets = Split(split(**more))  # type: ignore[arg-type]
    return subsets.places(subsets.groups(keys))


def keys(count: int) -> list[str]:
    return [f"sub-{n // 4}/run-{n}.npy" for n in range(count)]


@pytest.mark.mutant(
    3, "growcache.sampling.objects:Split._group_of", "return match['group']", "return key"
)
def test_no_group_is_in_two_subsets() -> None:
    found = places(keys(4000)).reshape(-1, 4)
    assert (found == found[:, :1]).all()
    assert {*np.unique(found)} == {0, 1, NO_SUBSET}


def test_without_a_group_each_object_is_one() -> None:
    found = places(keys(4000), group=None).reshape(-1, 4)
    assert (found != found[:, :1]).any()


def test_the_shares_are_those_asked_for() -> None:
    # A seeded statistic: 5 standard deviations are a false alarm in 1.7 million.
    count = 20_000
    found = places(keys(count), group=None)
    for place, share in ((0, 0.6), (1, 0.3), (NO_SUBSET, 0.1)):
        spread = (share * (1 - share) * count) ** 0.5
        assert abs((found == place).sum() - share * count) < 5 * spread


def test_a_seed_makes_another_split() -> None:
    assert (places(keys(4000)) != places(keys(4000), seed=1)).any()


def test_shares_of_one_leave_nothing_out() -> None:
    tenths = SplitConfig(fractions={str(n): 0.1 for n in range(10)}, use="0")
    found = Split(tenths).places([str(n) for n in range(10_000)])
    assert found.min() == 0


def test_a_key_without_a_group_is_named() -> None:
    with pytest.raises(ConfigError, match=r"split\.group: .* match every key, found readme"):
        places([*keys(4), "readme.npy"])


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.integers(0, 300), max_size=5), use=st.sampled_from(sorted(FRACTIONS)))
def test_the_numbering_does_not_hang_on_how_the_listing_came(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], use: str
) -> None:
    listed = keys(300)
    wanted = [
        k for k, place in zip(listed, places(listed), strict=True) if place == (use == "val")
    ]
    with Catalog.open(tmp_path_factory.mktemp("c") / "catalog") as catalog:
        catalog.append([Entry(key, n + 1, None, 0.0) for n, key in enumerate(listed)])
        objects = Objects(catalog, Split(split(use)))
        for step in sorted(steps):
            among = objects.among(step)
            assert among == sum(key in wanted for key in listed[:step])
        count = objects.among(300)
        assert [visit.entry.key for visit in objects.visits(np.arange(count))] == wanted
        assert objects.sizes(0, count).tolist() == [listed.index(key) + 1 for key in wanted]
        for start, stop in pairwise([0, count // 3, count // 3, count]):
            assert list(objects.keys(start, stop)) == wanted[start:stop]
        counted = {one.name: (one.objects, one.groups) for one in objects.subsets()}
        assert counted[use] == (len(wanted), len({key.split("/")[0] for key in wanted}))


def test_nodes_share_the_parts_of_a_subset(tmp_path: Path) -> None:
    sizing = Sizing(1, 1000.0, 0, whole=False, shard_samples=8)
    with Catalog.open(tmp_path / "catalog") as catalog:
        catalog.append([Entry(key, 3000, None, 0.0) for key in keys(400)])
        drawn: list[tuple[str, int]] = []
        for node in range(2):
            objects = Objects(catalog, Split(split()))
            population = Population(catalog, objects, sizing)
            parts = np.arange(population.parts(400))
            owned = population.owned(400, owned_lanes(node, 2))
            assert owned is not None
            visits = population.visits(GroupDraw(0, 0, 0, parts[owned(parts)]))
            drawn += [(visit.entry.key, visit.part) for visit in visits]
    wanted = [k for k, place in zip(keys(400), places(keys(400)), strict=True) if place == 0]
    assert sorted(drawn) == sorted((key, part) for key in wanted for part in range(3))


def subjects(folder: Path) -> str:
    for key in keys(80):
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / key, np.arange(64.0))
    return f"{folder}/**/*.npy"


@pytest.mark.slow
def test_caches_of_two_subsets_share_no_subject(tmp_path: Path) -> None:
    url = subjects(tmp_path / "data")
    found: dict[str, set[str]] = {}
    for seed, use in enumerate(FRACTIONS):
        config = write_config(
            tmp_path / f"{use}.yaml",
            url,
            sampling={"seed": seed},
            split={"group": SUBJECT, "fractions": FRACTIONS, "use": use},
        )
        assert run(config, "--until-full") == (0, "")
        with Snapshot.take(tmp_path / use) as snapshot:
            found[use] = {snapshot.origin(i).key for i in range(len(snapshot))}
        status = read_status(tmp_path / use)
        assert status.complete
        assert status.population == len(found[use])
        counts = {one.name: (one.objects, one.samples) for one in status.subsets}
        assert counts[use] == (len(found[use]), len(found[use]))
    groups = [{key.split("/")[-2] for key in mine} for mine in found.values()]
    assert not groups[0] & groups[1]


@pytest.mark.slow
def test_a_subset_without_an_object_is_told(tmp_path: Path) -> None:
    url = subjects(tmp_path / "data")
    split = {"group": "(?P<group>run)", "fractions": {"a": 0.5, "b": 0.5}}
    said = []
    for use in ("a", "b"):
        config = write_config(tmp_path / f"{use}.yaml", url, split={**split, "use": use})
        said.append(run(config, "--until-full"))
    code, errors = max(said)
    assert (min(said), code) == ((0, ""), 2)
    assert "split.use: none of the 80 objects belongs to" in errors
