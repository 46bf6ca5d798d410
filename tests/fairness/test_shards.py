"""Samples in one shard: those of one object, and of objects that were read quickly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.index.reader import read_index
from growcache.cache.status import read_status
from growcache.errors import CacheError
from growcache.loading.snapshot import Snapshot
from growcache.sampling.fill import encode_group
from growcache.sampling.messages import PartVisit, Permit
from growcache.sampling.sampler_memory import VisitResult
from growcache.sampling.sizing import ALIKE, RAMP_END, shards_per_group
from growcache.sampling.space_allocator import IN_TURN_SECONDS
from growcache.schema import Schema
from growcache.store.contract import Entry
from tests.sampling.services import run, service, wait_until, write_config

SCHEMA = Schema.from_sample({"x": np.zeros(2, np.int64)})


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    max_bytes=st.sampled_from([10**9, 10**11]),
)
def test_no_shard_has_more_of_an_object_than_the_group_can_help(
    counts: list[int], max_bytes: int
) -> None:
    visit = max(1, max(counts))
    shards = shards_per_group(visit, max_bytes)
    visits = tuple(PartVisit(Entry(f"k{n}", 1, None, 0.0), 0, 1) for n in range(len(counts)))
    permit = Permit("p", 0, 0, 0, tuple(range(shards)), visits)
    visited = [
        VisitResult(
            [{"x": np.array([n, i])} for i in range(count)], [(i, i + 1) for i in range(count)]
        )
        for n, count in enumerate(counts)
    ]
    sidecars = [
        filled.sidecar for filled in encode_group(permit, visited, SCHEMA, "f", "tfrecord")
    ]
    for sidecar in sidecars:
        met = Counter(sidecar.origins.object)
        assert max(met.values(), default=0) <= ALIKE
    assert sum(sidecar.samples for sidecar in sidecars) == sum(counts)
    sizes = [sidecar.samples for sidecar in sidecars]
    assert max(sizes) - min(sizes) <= len(counts)


def rows(folder: Path) -> str:
    for name in ("fast", "slow"):
        (folder / name).mkdir(parents=True)
        for n in range(200):
            np.save(folder / name / f"{n:03d}.npy", np.full(64, n))
    return f"{folder}/*/*.npy"


def test_recordings_shorter_than_a_window_are_counted(tmp_path: Path) -> None:
    for n in range(30):
        length = 100 if n % 3 else 40
        np.save(tmp_path / f"{n:02d}.npy", np.arange(length))
    config = write_config(
        tmp_path / "c.yaml",
        f"{tmp_path}/*.npy",
        source={"options": {"window": 50, "phase": "random"}},
    )
    assert run(config, "--until-full") == (0, "")
    status = read_status(tmp_path / "c")
    assert (status.empty_visits, status.holes, status.complete) == (10, 0, True)
    assert 20 <= status.samples <= 40  # one or two windows, by the phase


READ = """
import time
import numpy as np

def read(object, rng):
    time.sleep(0.25 if "/slow/" in object.key else 0.0)
    with object.open() as file:
        yield {"x": np.load(file)}
"""


def groups(cache: Path) -> list[int]:
    """The groups that are live now, in the order of their commits."""
    try:
        return [row.group for row in sorted(read_index(cache).shards, key=lambda row: row.seq)]
    except CacheError:  # not there yet
        return []


def test_early_snapshots_do_not_favour_fast_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment the first groups are those that are there, not those that are done."""
    (tmp_path / "slow_half.py").write_text(READ)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = write_config(
        tmp_path / "c.yaml",
        rows(tmp_path / "data"),
        source={"format": "slow_half:read"},
        sampling={"workers": 4, "shard_samples": 64},
    )
    seen: list[list[int]] = []

    def watched() -> bool:
        seen.append(groups(tmp_path / "c"))
        return len(seen[-1]) >= 16

    with service(config):
        wait_until(watched)
    # Without the order, groups that happen to have no slow object come first.
    for found in seen:
        assert found == list(range(len(found)))
    with Snapshot.take(tmp_path / "c") as snapshot:
        keys = [snapshot.origin(i).key for i in range(len(snapshot))]
    assert any("/slow/" in key for key in keys)


HANGS = """
import time
from pathlib import Path
import numpy as np

def read(object, rng):
    with Path("{}").open("a") as told:
        told.write(".")
        call = told.tell()
    time.sleep(60.0 if call == 24 else 0.0)
    with object.open() as file:
        yield {{"x": np.load(file)}}
"""


@pytest.mark.slow
def test_a_group_that_hangs_does_not_keep_others_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first groups one hangs; the time limit is a fraction of what it would cost each."""
    (tmp_path / "one_hangs.py").write_text(HANGS.format(tmp_path / "calls"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = write_config(
        tmp_path / "c.yaml",
        rows(tmp_path / "data"),
        source={"format": "one_hangs:read"},
        sampling={"workers": 2, "shard_samples": 64, "timeout_seconds": 60},
    )
    ramp = set(range(RAMP_END))
    with service(config):
        wait_until(
            lambda: len(ramp - set(groups(tmp_path / "c"))) == 1, seconds=5 * IN_TURN_SECONDS
        )
