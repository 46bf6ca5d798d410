"""`weight_by: objects`: objects take turns until every sample of each was drawn once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from growcache import Snapshot
from tests.accidents.commands import growcache, status, write_config

LENGTHS = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 89, 3]
Drawn = list[tuple[str, int]]  # object and row, in the order of the draws


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of very different lengths; `late` holds those that are listed later."""
    root = tmp_path_factory.mktemp("objects")
    (root / "in").mkdir()
    (root / "late").mkdir()
    for number, rows in enumerate(LENGTHS):
        values = np.stack([np.full(rows, number), np.arange(rows)], 1).astype(np.int64)
        np.save(root / f"in/{'abc'[number % 3]}-{number:02d}.npy", values)
        np.save(root / f"late/d-{number:02d}.npy", values[: rows // 2 + 1])
        np.savez_compressed(root / f"in/{number:02d}.npz", x=values)
    return root


def rows_of(folder: Path, pattern: str) -> dict[str, Any]:
    return {"url": f"{folder}/{pattern}", "format": "npy", "options": {"axis": 0}}


def run(config: Path, *more: str) -> dict[str, Any]:
    done = growcache("run", config, *(more or ("--until-full",)))
    assert done.returncode == 0, done.stderr
    return status(config.with_suffix(""))


def drawn(cache: Path) -> Drawn:
    found: list[tuple[int, str, int]] = []
    with Snapshot.take(cache) as snapshot:
        numbers = [shard.number for shard in snapshot.shards for _ in range(shard.samples)]
        for i, number in enumerate(numbers):
            origin = snapshot.origin(i)
            found.append((number, Path(origin.key).stem, int(np.asarray(snapshot[i]["x"])[1])))
    return [(key, row) for _, key, row in sorted(found, key=lambda one: one[0])]


def lengths(folder: Path, pattern: str) -> dict[str, int]:
    return {path.stem: len(np.load(path)) for path in folder.glob(pattern)}


def take_turns(found: Drawn, known: dict[str, int]) -> bool:
    """Return whether no object gets two visits ahead of another that still has samples."""
    visits: Counter[str] = Counter()
    for key, _ in found:
        visits[key] += 1
        least = min((visits[k] for k, rows in known.items() if visits[k] < rows), default=None)
        if least is not None and visits[key] > least + 1:
            return False
    return True


def write(tmp_path: Path, source: Any, **more: Any) -> Path:
    sampling = {"weight_by": "objects", "samples_per_object": 1, "shard_samples": 8, **more}
    config = write_config(tmp_path / "c.yaml", {}, sampling=sampling)
    values = yaml.safe_load(config.read_text())
    values["source"] = source
    config.write_text(yaml.safe_dump(values))
    return config


@pytest.mark.slow
def test_all_samples_come_once_and_objects_take_turns(tmp_path: Path, folder: Path) -> None:
    config = write(tmp_path, rows_of(folder, "in/*.npy"))
    found = run(config)
    known = lengths(folder, "in/*.npy")
    total = sum(LENGTHS)
    assert (found["samples"], found["population"], found["coverage"]) == (total, total, 1.0)
    assert found["population_samples"] == total
    order = drawn(tmp_path / "c")
    assert sorted(order) == sorted((key, row) for key, n in known.items() for row in range(n))
    assert take_turns(order, known)
    done = growcache("peek", tmp_path / "c", "--sample", "3:0", "--refetch")
    assert (done.returncode, "is equal" in done.stdout) == (0, True)


@pytest.mark.slow
def test_it_is_not_complete_after_one_sample_of_each(tmp_path: Path, folder: Path) -> None:
    config = write(tmp_path, rows_of(folder, "in/*.npy"))
    found = run(config, "--samples", str(len(LENGTHS) + 4))
    assert not found["complete"]
    assert found["coverage"] == pytest.approx(found["samples"] / sum(LENGTHS))


@pytest.mark.slow
def test_a_listing_that_grows(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "in").mkdir()
    for path in folder.glob("in/*.npy"):
        (tmp_path / "in" / path.name).symlink_to(path)
    config = write(tmp_path, rows_of(tmp_path, "in/*.npy"))
    before = run(config, "--samples", "60")["samples"]
    for path in folder.glob("late/*.npy"):
        (tmp_path / "in" / path.name).symlink_to(path)
    found = run(config, "--until-full", "--refresh")
    known = lengths(tmp_path, "in/*.npy")
    assert found["samples"] == found["population"] == sum(known.values())
    order = drawn(tmp_path / "c")
    assert len(set(order)) == len(order) == sum(known.values())
    # New objects take part from then on, once per turn, and do not catch up.
    late = Counter(key for key, _ in order[before : before + 22] if key.startswith("d-"))
    assert len(late) >= 5
    assert max(late.values()) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", ["permutation", pytest.param("replacement", marks=pytest.mark.slow)]
)
def test_objects_that_are_read_whole(tmp_path: Path, folder: Path, order: str) -> None:
    """One visit draws all samples of such an object, because another would fetch it all again."""
    source = {
        "url": f"{folder}/in/*.npz",
        "format": "npz",
        "options": {"axis": 0, "read": "whole"},
    }
    config = write(tmp_path, source, order=order, samples_per_object="auto")
    if order == "permutation":
        found = run(config)
        assert (found["samples"], found["coverage"]) == (sum(LENGTHS), 1.0)
        assert len(set(drawn(tmp_path / "c"))) == sum(LENGTHS)
        assert found["egress_bytes"] < 2.2 * sum(
            path.stat().st_size for path in folder.glob("in/*.npz")
        )
    else:  # independent visits never exhaust an object
        found = run(config, "--samples", "200")
        assert not found["complete"]


@pytest.mark.slow
def test_nodes_share_out_all_samples(tmp_path: Path, folder: Path) -> None:
    orders: list[Drawn] = []
    for node in range(2):
        (tmp_path / str(node)).mkdir()
        source = rows_of(folder, "in/*.npy")
        run(write(tmp_path / str(node), source, node=node, nodes=2), "--until-full")
        orders.append(drawn(tmp_path / str(node) / "c"))
    assert not set(orders[0]) & set(orders[1])
    assert len(orders[0]) + len(orders[1]) == sum(LENGTHS)


@pytest.mark.parametrize("how", [pytest.param("strata", marks=pytest.mark.slow), "sources"])
def test_each_stratum_and_each_source_takes_turns(
    tmp_path: Path, folder: Path, how: str
) -> None:
    source: Any = rows_of(folder, "in/*.npy")
    more: dict[str, Any] = {"strata": {"by": "(?P<stratum>[abc])-"}}
    if how == "sources":
        source = [{**rows_of(folder, f"in/{letter}-*.npy"), "weight": 1} for letter in "abc"]
        more = {}
    config = write(tmp_path, source, **more)
    growcache("run", config, "--samples", "120", "--set", "cache.eviction=none")
    order, known = drawn(tmp_path / "c"), lengths(folder, "in/*.npy")
    for letter in "abc":
        mine = {key: rows for key, rows in known.items() if key.startswith(letter)}
        found = [one for one in order if one[0] in mine]
        assert len(found) >= 30
        first = found[: sum(mine.values())]
        assert len(set(first)) == len(first)
        assert take_turns(first, mine)
