"""Samples of another configuration are replaced while a loader trains on them, and never mixed with new ones."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize

import growcache
from growcache.cache.cache import Cache
from growcache.cache.check import check
from growcache.cache.eviction_policy import Candidate
from growcache.cache.files import CacheLayout, allocated_tree, generation_numbers
from growcache.cache.generations import begin_generation, end_generation, to_give_way
from growcache.cache.index.reader import read_index
from growcache.cache.status import read_status
from growcache.config import CacheConfig
from growcache.errors import CacheMissingError
from growcache.loading import snapshot_choice
from growcache.loading.maps import MapPool
from growcache.loading.options import LoaderOptions
from growcache.loading.streams import open_stream_pass
from growcache.loading.waiting import chosen_generation
from growcache.numpy import EpochLoader
from growcache.sampling.serve import STOP_SECONDS
from tests.cache.making import add, opened
from tests.golden.making import write_npy

ROOT = Path(__file__).parents[2]
MAX_BYTES = 6_000_000
MIN_SAMPLES = 300
CODE = """
import numpy as np


def marked(sample, by):
    return {"x": sample["x"], "by": np.int64(by)}
"""
CONFIG = """
source: {url: "objects/*.npy", format: npy, options: {window: 1}}
sampling: {seed: 3, shard_samples: 16, workers: 1, transform: "marks:marked", transform_options: {by: 0}}
cache: {path: cache, max_bytes: 6MB, min_free: 0, min_uses: 0}
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with objects, a config and a full cache of generation 0."""
    folder = tmp_path_factory.mktemp("filled")
    (folder / "objects").mkdir()
    for number in range(20):
        rows = np.arange(60 * 1000, dtype=np.float32).reshape(60, 1000) + number
        write_npy(folder / f"objects/{number:02}.npy", rows)
    (folder / "marks.py").write_text(CODE)
    (folder / "config.yaml").write_text(CONFIG)
    assert run(folder, "--until-full") == (0, "")
    return folder


@pytest.fixture
def work(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its copy."""
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*more: str) -> list[str]:
    return [sys.executable, "-m", "growcache", "run", "config.yaml", *more]


def environment(work: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{work}"}


def run(work: Path, *more: str) -> tuple[int, str]:
    done = subprocess.run(
        command(*more),
        cwd=work,
        env=environment(work),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stderr


@contextmanager
def service(work: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command(*more), cwd=work, env=environment(work), stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(300)


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def other(by: int) -> tuple[str, str]:
    return "--set", f"sampling.transform_options={{by: {by}}}"


def values_in(cache: Path) -> set[int]:
    with growcache.Snapshot.take(cache) as snapshot:
        return {int(np.asarray(snapshot[i]["by"])) for i in range(len(snapshot))}


def test_a_loader_goes_on_through_a_replacement_and_sees_one_generation_at_a_time(
    work: Path,
) -> None:
    cache = work / "cache"
    code, errors = run(work, *other(1))
    assert code == 2
    assert "sampling.transform_options ({'by': 0} → {'by': 1})" in errors
    assert f"its {read_status(cache).samples:,} samples" in errors
    assert "--replace" in errors
    seen: list[tuple[int, int]] = []
    with (
        EpochLoader(cache, batch_size=16, min_samples=MIN_SAMPLES, seed=0) as loader,
        service(work, *other(1), "--replace"),
    ):
        deadline = time.monotonic() + 120
        while [generation for generation, _ in seen][-3:] != [1, 1, 1]:
            assert time.monotonic() < deadline, seen
            values = {int(value) for batch in loader for value in batch["by"]}
            assert len(values) == 1, "old and new samples in one pass"
            report = loader.report
            assert values == {report.generation}
            assert report.fingerprint is not None
            if not report.generation or (report.generation and not seen[-1][0]):
                assert report.cache_samples >= (MIN_SAMPLES if report.generation else 1)
            assert allocated_tree(cache) <= MAX_BYTES
            seen.append((report.generation, report.cache_samples))
    assert seen[0][0] == 0
    assert [generation for generation, _ in seen] == sorted(g for g, _ in seen)
    with service(work, *other(1)):
        wait_for(lambda: generation_numbers(cache) == [1])
    assert values_in(cache) == {1}
    found = read_status(cache)
    assert (found.generation, found.older_samples) == (1, 0)
    assert [one for one in check(cache) if one.severity == "error"] == []
    assert not list((cache / "shards").iterdir())


def drawn_of_generation_1(cache: Path) -> int:
    try:
        return read_index(cache / "generation-1").totals.drawn
    except CacheMissingError:
        return 0


def has_drawn_more(cache: Path, before: int) -> bool:
    return drawn_of_generation_1(cache) > before


@pytest.mark.slow
def test_a_replacement_that_is_killed_goes_on(work: Path) -> None:
    cache = work / "cache"
    for kills in range(2):
        with service(work, *other(1), "--replace") as process:
            before = drawn_of_generation_1(cache) if kills else 0
            wait_for(functools.partial(has_drawn_more, cache, before))
            process.send_signal(signal.SIGKILL)
        assert allocated_tree(cache) <= MAX_BYTES
    with service(work, *other(1), "--replace"):
        wait_for(lambda: generation_numbers(cache) == [1])
    assert values_in(cache) == {1}
    assert run(work, *other(1), "--until-full") == (0, "")
    assert [one for one in check(cache) if one.severity == "error"] == []


@pytest.mark.mutant(
    4,
    "growcache.sampling.replacement:_open_newest",
    "len(generation_numbers(root)) > 1",
    "False",
)
def test_a_replacement_that_ended_before_its_first_sample_costs_nothing(work: Path) -> None:
    cache = work / "cache"
    before = {row.number: row.digest for row in read_index(cache).shards}
    begin_generation(cache, any_owner=False)
    code, errors = run(work, *other(1), "--until-full")
    assert (code, "--replace" in errors) == (2, True)
    assert run(work, "--until-full") == (0, "")
    after = {row.number: row.digest for row in read_index(cache).shards}
    assert (generation_numbers(cache), before.items() <= after.items()) == ([0], True)


def test_a_state_of_the_old_generation_resumes_in_it_while_it_is_there(work: Path) -> None:
    cache = work / "cache"
    with EpochLoader(cache, batch_size=16, min_samples=MIN_SAMPLES, seed=0) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
        rest = [batch["x"].copy() for batch in batches]
    with Cache.open(cache, CacheConfig(path=cache, max_bytes=ByteSize(MAX_BYTES))) as old:
        assert old.totals().samples
    begin_generation(cache, any_owner=False)
    with EpochLoader(cache, batch_size=16, min_samples=MIN_SAMPLES, seed=0) as loader:
        loader.load_state_dict(state, missing="error")
        again = [batch["x"].copy() for batch in loader]
        assert loader.report.generation == 0
    assert len(rest) == len(again)
    assert all(np.array_equal(a, b) for a, b in zip(rest, again, strict=True))


@pytest.mark.slow
def test_serve_replaces_too(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = growcache.load_config("config.yaml", [other(1)[1]])
    monkeypatch.syspath_prepend(str(work))
    with growcache.serve(config, replace=True):
        wait_for(functools.partial(has_drawn_more, work / "cache", 0))
    assert read_status(work / "cache").generation == 1


# --- the wait for room, before the new generation begins ---


def waits_for_room(cache: Path) -> bool:
    return "generation that is being replaced" in (read_status(cache).waiting_for or "")


@contextmanager
def full_and_held(work: Path) -> Iterator[growcache.Snapshot]:
    cache = work / "cache"
    assert run(work, "--until-full") == (0, "")
    with growcache.Snapshot.take(cache) as held:
        yield held


@pytest.mark.slow
def test_the_wait_for_room_is_told_and_can_be_ended(work: Path) -> None:
    cache = work / "cache"
    with full_and_held(work) as held:
        with service(work, *other(1), "--replace") as process:
            wait_for(lambda: waits_for_room(cache))
            found = read_status(cache)
            assert (found.state, found.pid) == ("waiting", process.pid)
            assert [lease.pid for lease in found.leases] == [os.getpid()]
            process.terminate()
            assert process.wait(25) == 0
        assert read_status(cache).state == "stopped"
        assert generation_numbers(cache) == [0]
        with service(work, *other(1), "--replace"):
            wait_for(lambda: waits_for_room(cache))
            held.close()
            wait_for(lambda: drawn_of_generation_1(cache) > 0)
    assert allocated_tree(cache) <= MAX_BYTES


@pytest.mark.slow
def test_a_parents_end_ends_the_wait_for_room(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = growcache.load_config("config.yaml", [other(1)[1]])
    monkeypatch.syspath_prepend(str(work))
    with full_and_held(work):
        with growcache.serve(config, replace=True):  # which does not wait for readers
            wait_for(lambda: waits_for_room(work / "cache"))
            began = time.monotonic()
        assert time.monotonic() - began < STOP_SECONDS  # else it is killed
        assert read_status(work / "cache").state == "stopped"


# --- ranks, TensorFlow, and what else may differ ---


@pytest.mark.slow
def test_ranks_of_a_job_read_one_generation_at_a_time(work: Path) -> None:
    cache = work / "cache"
    assert run(work, "--until-full") == (0, "")
    settings: dict[str, Any] = {
        "batch_size": 8,
        "min_samples": MIN_SAMPLES,
        "seed": 0,
        "world_size": 2,
    }

    def train(rank: int) -> list[tuple[int, int]]:
        seen = []
        with EpochLoader(cache, rank=rank, **settings) as loader:
            for _ in range(400):
                batches = [batch["by"] for batch in loader]
                assert {int(value) for by in batches for value in by} == {
                    loader.report.generation
                }
                seen.append((loader.report.generation, len(batches)))
                if [generation for generation, _ in seen[-3:]] == [1, 1, 1]:
                    break  # at the same pass on both ranks, where they agree
        return seen

    with service(work, *other(1), "--replace"), ThreadPoolExecutor(2) as threads:
        passes = list(threads.map(train, range(2)))
    assert passes[0] == passes[1]
    assert {generation for generation, _ in passes[0]} == {0, 1}


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_tensorflow_reader_goes_on_through_a_replacement(work: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    import growcache.tensorflow as gtf

    assert tf is not None
    assert run(work, "--until-full") == (0, "")
    dataset = gtf.dataset(work / "cache", batch_size=16, min_samples=MIN_SAMPLES)
    seen: list[int] = []
    with service(work, *other(1), "--replace"):
        deadline = time.monotonic() + 200
        while seen[-3:] != [1, 1, 1]:
            assert time.monotonic() < deadline, seen
            (value,) = {int(by) for batch in dataset for by in batch["by"].numpy()}
            seen.append(value)
            assert allocated_tree(work / "cache") <= MAX_BYTES
    assert seen == sorted(seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--set", "source.url=moved/*.npy"), "source.url"),
        (("--set", "sampling.seed=4", "--set", "cache.eviction=none"), "sampling.seed"),
    ],
    ids=["source", "eviction-none"],
)
def test_a_replacement_ends_where_another_setting_differs(
    work: Path, change: tuple[str, ...], said: str
) -> None:
    cache = work / "cache"
    assert run(work, "--until-full") == (0, "")
    (work / "moved").symlink_to("objects")
    before = read_index(cache).fingerprint
    code, errors = run(work, *change, "--until-full")
    assert (code, said in errors) == (2, True)
    with service(work, *change, "--replace"):
        wait_for(lambda: generation_numbers(cache) == [1])
        wait_for(lambda: read_status(cache).samples > 900)
    assert allocated_tree(cache) <= MAX_BYTES
    assert read_index(cache).fingerprint not in (before, None)
    assert [one for one in check(cache) if one.severity == "error"] == []


def test_each_generation_has_maps_of_its_own(tmp_path: Path) -> None:
    """Shards of two generations have the same numbers."""
    cache = tmp_path / "cache"
    with opened(cache) as plain:
        add(plain, 0)
    first = MapPool.of(cache)
    begin_generation(cache, any_owner=False)
    opened(cache / "generation-1").close()
    newest = MapPool.of(cache)
    assert newest is not first
    assert MapPool.of(cache / "generation-0") is first
    assert MapPool.of(cache / "generation-1") is newest


@pytest.mark.mutant(
    4,
    "growcache.loading.waiting:chosen_generation",
    "(enough or some or [root])[0]",
    "(some or [root])[0]",
)
def test_a_running_loader_takes_the_newest_generation_that_has_enough(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with opened(cache) as plain:
        add(plain, 0)
        add(plain, 1)
    begin_generation(cache, any_owner=False)
    with opened(cache / "generation-1") as newest:
        add(newest, 0)
        enough = newest.totals().samples
    older, newer = cache / "generation-0", cache / "generation-1"
    for running in (True, False):
        chosen = functools.partial(chosen_generation, cache, least=1, running=running)
        assert chosen(enough) == newer
        assert chosen(2 * enough) == older
    assert chosen_generation(cache, 3 * enough, 1, running=True) == older
    assert chosen_generation(cache, 3 * enough, 1, running=False) == newer


@pytest.mark.mutant(
    3,
    "growcache.loading.windows:PassOpener._wait_and_take",
    "in_a_generation(options.root, attempt)",
    "attempt()",
)
def test_a_generation_that_ends_before_its_lease_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    with opened(cache) as plain:
        add(plain, 0)
    begin_generation(cache, any_owner=False)
    look, looks = snapshot_choice.wait_for_pass, list[Any]()

    def look_and_end(*arguments: Any, **keywords: Any) -> Any:
        looks.append(view := look(*arguments, **keywords))
        if len(looks) == 1:
            end_generation(CacheLayout(cache / "generation-0"))
            with opened(cache) as newest:
                add(newest, 1)
        return view

    monkeypatch.setattr("growcache.loading.windows.wait_for_pass", look_and_end)
    with EpochLoader(cache, batch_size=1, min_samples=1, gather="thread") as loader:
        next(iter(loader))
        assert loader.report.generation == 1


def test_a_stream_reads_the_old_generation_until_the_new_one_has_enough(tmp_path: Path) -> None:
    """A slow link leaves the newest with too few samples for longer than any retry."""
    cache = tmp_path / "cache"
    with opened(cache) as plain:
        add(plain, 0)
        add(plain, 1)
        enough = plain.totals().samples
    begin_generation(cache, any_owner=False)
    with opened(cache / "generation-1") as newest:
        add(newest, 0)
    options = LoaderOptions(cache, batch_size=1, min_samples=enough)
    opened_pass = open_stream_pass(options, 0, min_samples=1)
    assert sum(row.samples for row in opened_pass.rows) == enough
    opened_pass.snapshot.close()


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12), st.integers(0, 90))
def test_older_shards_give_way_as_far_as_needed(
    shards: list[tuple[int, bool]], need: int
) -> None:
    candidates = [
        Candidate(n, n, nbytes, 0, 0, leased) for n, (nbytes, leased) in enumerate(shards)
    ]
    evict, ahead = to_give_way(candidates, need)
    gone = sum(shards[n][0] for n in (*evict, *ahead))
    assert gone >= min(need, sum(nbytes for nbytes, _ in shards))
    assert not any(shards[n][1] for n in evict)
    assert all(shards[n][1] for n in ahead)
    if ahead:  # nobody's shards are retired early where free ones suffice
        assert sum(nbytes for nbytes, leased in shards if not leased) < need
    last = (evict + ahead)[-1:]
    assert sum(shards[n][0] for n in (*evict, *ahead) if n not in last) < max(1, need)
