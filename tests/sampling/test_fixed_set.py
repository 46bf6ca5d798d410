"""`cache.max_samples` is exact: with holes, in whatever order samplers come, and after kills."""

from __future__ import annotations

import itertools
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.sampling.fixed_set import FixedSet, kept_lengths, until_reached
from growcache.sampling.group_queue import GroupQueue, IssuedPermit
from growcache.sampling.messages import Permit
from growcache.sampling.sizing import RAMP_END, Sizing
from tests.sampling.services import (
    digests,
    drawn,
    kill,
    make_source,
    run,
    samplers_of,
    service,
    status,
    wait_until,
    write_config,
)

COUNTS = st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=12)

STEPS = ("issue", "issue", "encode", "grant", "commit", "rush", "die")


def first_samples(counts: list[list[int]], most: int) -> dict[int, list[int]]:
    """What is kept of each group, counted in their order alone."""
    flat = kept_lengths([count for group in counts for count in group], most)
    return {n: flat[2 * n : 2 * n + 2] for n in range(len(counts))}


@dataclass
class Model:
    """Samplers that fill groups of two shards in any order, die, and fill them again."""

    counts: list[list[int]]
    most: int

    def __post_init__(self) -> None:
        self.kept: dict[int, list[int]] = {}
        self.queue = GroupQueue(len(self.counts), range(len(self.counts)))
        cache: Any = SimpleNamespace(totals=self.totals, returning_samples=0)
        self.fixed_set = FixedSet(self.most, cache, self.queue)
        self.permits: dict[int, IssuedPermit] = {}

    def totals(self) -> Any:
        return SimpleNamespace(samples=sum(map(sum, self.kept.values())))

    def step(self, what: str, pick: int) -> None:
        groups = sorted(self.permits)
        if what == "issue" and (group := self.queue.due(0.0)) is not None:
            self.queue.start(group)
            permit = Permit("", group, 0, 0, (2 * group, 2 * group + 1), ())
            self.permits[group] = IssuedPermit(permit, 0, fresh=permit.shards)
        elif what != "issue" and groups:
            getattr(self, what)(groups[pick % len(groups)])

    def encode(self, group: int) -> None:
        if self.permits[group].need_bytes is None:
            self.permits[group].need_bytes, self.permits[group].samples = 1, self.counts[group]

    def grant(self, group: int) -> None:
        one, permits = self.permits[group], self.permits.values()
        if not one.waits or self.fixed_set.awaits_earlier(one, permits):
            return
        if (lengths := self.fixed_set.cut(one, permits)) is not None:
            one.samples = lengths
        assert self.fixed_set.cut(one, permits) is None
        one.granted = True

    def commit(self, group: int) -> None:
        if self.permits[group].granted:
            self.kept[group] = list(self.permits.pop(group).samples or ())
            self.queue.done(group)

    def rush(self, group: int) -> None:
        """Be faster than all other samplers."""
        self.encode(group)
        self.grant(group)
        self.commit(group)

    def die(self, group: int) -> None:
        del self.permits[group]
        self.queue.abandoned(group)

    def finish(self) -> None:
        for _ in range(4 * len(self.counts)):
            for what in ("issue", "encode", "grant", "commit"):
                for group in sorted(self.permits) or [0]:
                    self.step(what, sorted(self.permits).index(group) if self.permits else 0)


@pytest.mark.mutant(
    4,
    "growcache.sampling.fixed_set:FixedSet.awaits_earlier",
    "return self.awaits_open(issued) or not is_next or self._left(permits) <= 0",
    "return self._left(permits) <= 0",
)
@given(COUNTS, st.integers(1, 40), st.integers(0, 10**6))
def test_what_is_kept_depends_on_the_shards_alone(
    counts: list[list[int]], most: int, seed: int
) -> None:
    model, dice = Model(counts, most), random.Random(seed)
    for _ in range(120):
        model.step(dice.choice(STEPS), dice.randrange(10))
        assert model.totals().samples <= most
    model.finish()
    expected = first_samples(counts, most)
    assert all(model.kept[group] == expected[group] for group in model.kept)
    assert model.totals().samples == min(most, sum(map(sum, counts)))
    assert model.fixed_set.is_whole == (model.totals().samples == most)


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(-3, 60))
def test_a_run_stops_at_the_first_whole_shard_with_which_it_has_enough(
    counts: list[int], wanted: int
) -> None:
    shards = until_reached(counts, wanted)
    assert shards == len(counts) or sum(counts[:shards]) >= wanted
    assert not shards or sum(counts[: shards - 1]) < wanted


@given(st.integers(1, 3000), st.integers(1, 64), st.integers(0, 5), st.integers(1, 9))
def test_small_groups_follow_the_planned_ones(
    most: int, shard_samples: int, doublings: int, visit: int
) -> None:
    sizing = Sizing(
        visit, 1.0, 0, whole=False, shard_samples=shard_samples, max_parts=most,
        doublings=doublings, tops_up=True,
    )  # fmt: skip
    given = [sizing.parts_given(group) for group in range(RAMP_END + most + 60)]
    parts = [after - before for before, after in itertools.pairwise(given)]
    assert given[0] == 0
    assert min(parts) >= 1
    planned = given.index(most)  # the plan ends where a group does
    assert given[:planned] == [sizing.parts_before(group) for group in range(planned)]
    assert parts[planned] == max(1, min(most, sizing.group_parts(RAMP_END)) >> 6)
    assert parts[planned:] == sorted(parts[planned:])
    assert max(parts[planned:]) <= max(1, min(most, sizing.group_parts(RAMP_END)))


def with_bad_objects(folder: Path, count: int, every: int) -> str:
    url = make_source(folder, count, (4, 64))
    for number in range(0, count, every):
        (folder / f"{number:05d}.npy").write_bytes(b"no array" * 100)
    return url


def fixed_config(tmp_path: Path, url: str, name: str, **sampling: Any) -> Path:
    return write_config(
        tmp_path / f"{name}.yaml",
        url,
        sampling={"shard_samples": 16, "max_skipped": 1.0, "concurrency": 4, **sampling},
        cache={"max_samples": 100, "eviction": "none"},
    )


@pytest.mark.slow
def test_as_many_samples_as_wanted_come_with_holes_and_kills_and_the_same_ones(
    tmp_path: Path,
) -> None:
    """One object of five is a hole."""
    url = with_bad_objects(tmp_path / "objects", 200, 5)
    config = fixed_config(tmp_path, url, "one")
    assert run(config, "--until-full") == (0, "")
    found = status(tmp_path / "one")
    assert (found.samples, found.drawn, found.complete) == (100, 100, True)
    assert found.holes > 10
    config = fixed_config(tmp_path, url, "two", workers=3, max_bytes_per_second=60_000)
    with service(config, "--until-full") as process:
        wait_until(lambda: drawn(tmp_path / "two") >= 10)
        for sampler in samplers_of(process.pid)[:2]:
            kill(sampler)
        wait_until(lambda: drawn(tmp_path / "two") >= 50)
        os.kill(process.pid, signal.SIGKILL)
    assert run(fixed_config(tmp_path, url, "two", workers=3), "--until-full") == (0, "")
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


@pytest.mark.slow
def test_a_population_that_is_too_small_is_all_there_is(tmp_path: Path) -> None:
    url = with_bad_objects(tmp_path / "objects", 60, 5)
    config = fixed_config(tmp_path, url, "few")
    assert run(config, "--until-full") == (0, "")
    found = status(tmp_path / "few")
    assert (found.samples, found.complete, found.coverage) == (48, True, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [13, 90])
def test_visits_of_many_samples_are_cut_to_length(tmp_path: Path, rows: int) -> None:
    """Of objects that are read whole; their samples are dealt over several shards."""
    folder = tmp_path / "objects"
    folder.mkdir()
    for number in range(40):
        np.save(folder / f"{number:05d}.npy", np.full((rows, 5000), number, np.int64))
    config = write_config(
        tmp_path / "cache.yaml",
        f"{folder}/*.npy",
        source={"options": {"axis": 0}},
        sampling={"workers": 2, "samples_per_object": rows},
        cache={"max_samples": 100, "eviction": "none", "max_bytes": "200MB"},
    )
    assert run(config, "--until-full") == (0, "")
    assert status(tmp_path / "cache").samples == 100


def test_samples_ends_the_run_with_the_first_shard_that_reaches_it(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    for number in range(40):
        np.save(folder / f"{number:05d}.npy", np.full((64, 50), number, np.int64))
    config = write_config(
        tmp_path / "cache.yaml",
        f"{folder}/*.npy",
        source={"options": {"axis": 0}},
        sampling={"workers": 2, "samples_per_object": 16, "shard_samples": 32},
    )
    for wanted in (10, 50):  # groups of four shards, small ones at first
        before = drawn(tmp_path / "cache")
        assert run(config, "--samples", str(wanted)) == (0, "")
        found = status(tmp_path / "cache")
        assert wanted <= found.drawn - before < wanted + 32
    assert run(config, "--until-full") == (0, "")
    found = status(tmp_path / "cache")
    assert (found.samples, found.complete) == (40 * 64, True)
