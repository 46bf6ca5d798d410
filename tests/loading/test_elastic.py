"""A state is loaded by another number of ranks: what is left of the pass is dealt anew."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from growcache.loading import plan, rank_sync
from growcache.loading.delivered_rows import places_of
from growcache.loading.journal import Journal
from growcache.loading.options import LoaderOptions, Ranks, rank_share
from growcache.numpy import EpochLoader
from tests.filled import Filled
from tests.loading.conftest import full_of

worlds = st.integers(1, 4)


# --- dealing, pure ---


@given(
    samples=st.integers(0, 400),
    batch=st.integers(1, 9),
    parts=st.lists(st.tuples(worlds, st.integers(0, 6)), max_size=4),
    last=worlds,
    keeps_last=st.booleans(),
)
def test_whoever_goes_on_each_row_is_dealt_once(
    samples: int, batch: int, parts: list[tuple[int, int]], last: int, keeps_last: bool
) -> None:
    """Whatever the ranks, their steps in turn are the rows in order."""
    position, delivered = 0, []
    for world, steps in [*parts, (last, 10**6)]:
        shares = [
            rank_share(
                samples - position, batch, Ranks(r, world, r, world), keeps_last=keeps_last
            )
            for r in range(world)
        ]
        assert len({share.steps for share in shares}) == 1
        taken = min(shares[0].rows, steps * shares[0].step_rows)
        mine = [
            [position + row for a, b in share.mine(0, taken) for row in range(a, b)]
            for share in shares
        ]
        for step in range(min(steps, shares[0].steps)):
            rows = [one[step * batch : (step + 1) * batch] for one in mine]
            padded = [
                len(row) + (share.padding if step == share.steps - 1 else 0)
                for row, share in zip(rows, shares, strict=True)
            ]
            assert len(set(padded)) == 1
            delivered += list(chain(*rows))
        position += taken
    assert delivered == list(range(len(delivered)))
    assert samples - len(delivered) < (1 if keeps_last else batch * last)


# --- loaders, their ranks in threads ---

SHARDS = 13


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Filled]]:
    root = tmp_path_factory.mktemp("elastic")
    made = {
        name: Filled(root / name, full_of((4,)), cache_format="npy")
        for name in ("whole", "damaged")
    }
    for cache in made.values():
        for number in range(SHARDS):
            cache.add(number, samples=9 + number % 3)
        cache.complete()
    for number in (2, 3, 7):
        made["damaged"].damage(number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "WINDOW_BYTES", 500)
        patch.setattr(rank_sync, "PATIENCE_SECONDS", 20.0)
        yield made
    for cache in made.values():
        cache.close()


def ids(batch: Any) -> list[int]:
    """The samples of a batch that are no stand-ins, nor repeated."""
    pairs = zip(batch["id"].tolist(), batch["_valid"].tolist(), strict=True)
    return [name for name, valid in pairs if valid]


class Launched:
    """The variables of a launcher that started this machine's ranks of a job."""

    def __init__(self, patch: pytest.MonkeyPatch, world: int, first: int, local: int) -> None:
        self._patch, self._world, self._first, self._local = patch, world, first, local

    def enter(self, rank: int) -> dict[str, int]:
        variables = {
            "RANK": self._first + rank,
            "WORLD_SIZE": self._world,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": self._local,
        }
        for name, value in variables.items():
            self._patch.setenv(name, str(value))
        return {}


def deliver(
    root: Path,
    world: int,
    state: Any,
    steps: int | None,
    ranks: Launched | None = None,
    **options: Any,
) -> tuple[list[int], Any]:
    """Return what some ranks deliver, step after step, and a state of one of them."""
    barrier = threading.Barrier(world, timeout=300)
    options["job"] = uuid.uuid4().hex  # ranks of another process would count their loaders anew

    def made(rank: int) -> EpochLoader:
        which: dict[str, Any] = (
            {"rank": rank, "world_size": world} if ranks is None else ranks.enter(rank)
        )
        return EpochLoader(root, min_samples=1, **which, **options)

    def one(loader: EpochLoader) -> tuple[list[list[int]], Any]:
        with loader:
            if state is not None:
                loader.load_state_dict(json.loads(state))
            found = []
            for batch in islice(loader, steps):
                found.append(ids(batch))
                barrier.wait()
            barrier.wait()  # a rank with another number of steps ends here with an error
            return found, loader.state_dict()

    with ThreadPoolExecutor(world) as pool:
        results = list(pool.map(one, [made(rank) for rank in range(world)]))
    states = [{**said, "options": None} for _, said in results]
    assert all(said == states[0] for said in states)
    together = zip(*(found for found, _ in results), strict=True)
    return [i for step in together for each in step for i in each], json.dumps(results[-1][1])


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # ranks that wait are slow to shrink
)
@given(
    kind=st.sampled_from(["whole", "damaged"]),
    mode=st.sampled_from(
        [{"drop_last": False}, {"fixed": True}, {"shuffle": False, "drop_last": False}]
    ),
    batch=st.sampled_from([3, 8]),
    seed=st.integers(0, 2),
    parts=st.lists(st.tuples(worlds, st.integers(1, 4)), min_size=1, max_size=2),
    last=worlds,
)
def test_a_pass_goes_on_with_any_number_of_ranks(
    caches: dict[str, Filled],
    kind: str,
    mode: dict[str, Any],
    batch: int,
    seed: int,
    parts: list[tuple[int, int]],
    last: int,
) -> None:
    root = caches[kind].root
    options = {"batch_size": batch, "seed": seed, **mode}
    whole, _ = deliver(root, 1, None, None, **options)
    assert len(whole) == len(set(whole))
    delivered, state = [], None
    for world, steps in [*parts, (last, None)]:
        found, state = deliver(root, world, state, steps, **options)
        delivered += found
        if json.loads(state)["pass"] is None:
            break  # it is over
    assert Counter(delivered) == Counter(whole)
    if kind == "whole":
        assert delivered == whole


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 3)])
def test_epochs_of_a_length_keep_their_steps_and_no_sample_of_the_pass_is_lost(
    caches: dict[str, Filled], first: int, second: int
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "samples_per_epoch": 48, "drop_last": False}
    root = caches["whole"].root
    delivered, state = deliver(root, first, None, 3, **options)
    found, state = deliver(root, second, state, None, **options)
    assert len(found) == (48 // (4 * second) - 3) * 4 * second
    delivered += found
    total = sum(9 + number % 3 for number in range(SHARDS))
    assert len(set(delivered)) == len(delivered)
    while len(delivered) < total:
        found, state = deliver(root, first, state, None, **options)
        delivered += found
    assert len(set(delivered[:total])) == total


def test_where_too_little_is_left_for_more_ranks_the_pass_is_over(
    caches: dict[str, Filled],
) -> None:
    """Its rows would make no whole step; those of fewer ranks are delivered."""
    root = caches["whole"].root
    options: dict[str, Any] = {"batch_size": 8}
    with EpochLoader(root, rank=0, world_size=1, min_samples=1, **options) as loader:
        batches = list(islice(loader, 14))
        state = loader.state_dict()
    total = sum(9 + number % 3 for number in range(SHARDS))
    left = total - 8 * len(batches)
    assert 8 < left < 24
    for world, steps in ((1, left // 8), (3, 0)):
        with EpochLoader(root, rank=0, world_size=world, min_samples=1, **options) as loader:
            loader.load_state_dict(state)
            assert len(list(loader)) == steps


def test_each_machine_goes_on_with_its_own_pass(
    caches: dict[str, Filled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines of two ranks each go on with one of one and one of three; steps are equal."""
    options: dict[str, Any] = {"batch_size": 2, "samples_per_epoch": 400, "drop_last": False}
    with Filled(tmp_path / "other", full_of((4,))) as other:
        other.add(*range(100, 115), samples=10)
        roots = [caches["whole"].root, other.root]
        delivered: list[list[int]] = [[], []]
        states: list[Any] = [None, None]
        for machines, steps in (([2, 2], 7), ([1, 3], 9), ([2, 1], None)):
            world, first, made = sum(machines), 0, []
            for machine, local in enumerate(machines):
                ranks = Launched(monkeypatch, world, first, local)
                found, states[machine] = deliver(
                    roots[machine], local, states[machine], steps, ranks=ranks, **options
                )
                delivered[machine] += found
                made.append(json.loads(states[machine])["step"])
                first += local
            assert made[0] == made[1]
    for machine, samples in enumerate((129, 150)):
        one_pass = delivered[machine][:samples]
        assert len(set(one_pass)) == len(one_pass)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_rank_0_goes_on_in_its_journal(
    caches: dict[str, Filled], tmp_path: Path, first: int, second: int
) -> None:
    root, file = caches["whole"].root, tmp_path / "run.journal"
    options: dict[str, Any] = {"batch_size": 4, "drop_last": False, "journal": file}
    delivered, state = deliver(root, first, None, 3, **options)
    found, _ = deliver(root, second, state, None, **options)
    journal = Journal.read(file)
    mine = [
        part[step : step + 4]
        for part, world in ((delivered, first), (found, second))
        for step in range(0, len(part), 4 * world)
    ]
    for step, expected in enumerate(mine[:-1]):
        batch, _ = journal.find(step)
        places = places_of(batch.batch.rows, batch.plans, batch.session.options(root))
        names = (1000 * places.shards + places.rows).tolist()
        assert names == expected


def test_the_state_names_no_number_of_ranks(caches: dict[str, Filled]) -> None:
    with EpochLoader(caches["whole"].root, batch_size=4) as loader:
        assert "world_size" not in loader.state_dict()["options"]
    assert "world_size" in LoaderOptions("cache", batch_size=4).alike


# --- real processes that are killed ---


def run_job(
    library: str, world: int, cache: Path, out: Path, steps: int, state: str
) -> list[int]:
    """Return the exit codes of the ranks."""
    out.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    program = [
        sys.executable,
        "-m",
        "tests.loading.elastic_rank",
        library,
        str(cache),
        str(out),
    ]
    with ExitStack() as stack:
        processes = []
        for rank in range(world):
            environment = {**os.environ, **launched, "OMP_NUM_THREADS": "1", "RANK": str(rank)}
            process = subprocess.Popen([*program, str(steps), state], env=environment)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        return [process.wait(timeout=300) for process in processes]


def delivered_by(out: Path, world: int) -> tuple[list[int], str]:
    """Return what all ranks had before the last state that each of them had come to."""
    logs = [
        dict(json.loads(line) for line in (out / f"{rank}.jsonl").read_text().splitlines())
        for rank in range(world)
    ]
    states = {int(path.stem) for path in out.glob("*.state")}
    last = max(states.intersection(*logs))
    names = [
        name for step in sorted(logs[0]) if step <= last for log in logs for name in log[step]
    ]
    return names, str(out / f"{last}.state")


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    "parts",
    [
        [("torch", 2, 5), ("torch", 3, 4), ("numpy", 1, 0)],
        [("numpy", 1, 7), ("torch", 4, 3), ("torch", 2, 0)],
    ],
)
def test_a_job_that_is_killed_goes_on_with_other_ranks(
    parts: list[tuple[str, int, int]], tmp_path: Path
) -> None:
    """With torch.distributed and without; after the last part the pass is over."""
    pytest.importorskip("torch")
    delivered: list[int] = []
    state = ""
    with Filled(tmp_path / "cache", full_of((4,))) as cache:
        cache.add(*range(20), samples=7)
        for number, (library, world, steps) in enumerate(parts):
            out = tmp_path / str(number)
            codes = run_job(library, world, cache.root, out, steps, state)
            assert all(codes) if steps else not any(codes)
            found, state = delivered_by(out, world)
            delivered += found
    assert sorted(delivered) == [1000 * shard + row for shard in range(20) for row in range(7)]
