"""The service as processes: what it draws does not depend on who draws it, or who dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from growcache.cache.check import check
from growcache.cache.directory import adopt
from growcache.cache.files import CacheLayout, allocated_tree
from growcache.cache.formats import CACHE_FORMATS
from growcache.cache.index.reader import read_index
from growcache.cache.locks import FileLock
from growcache.cache.sidecar import Sidecar
from growcache.cache.status_model import Status
from growcache.config_text import load_config
from growcache.loading.snapshot import Snapshot
from growcache.sampling.messages import pack
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


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_source(tmp_path_factory.mktemp("remote") / "objects")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, url: str) -> dict[str, str]:
    """The digests of the files of one undisturbed sampler."""
    folder = tmp_path_factory.mktemp("expected")
    config = write_config(folder / "alone.yaml", url)
    code, errors = run(config, "--until-full")
    assert (code, errors) == (0, "")
    return digests(folder / "alone")


def every_sample_is_its_object(cache: Path, url: str) -> int:
    view = read_index(cache)
    assert view.schema is not None
    count = 0
    for row in view.shards:
        path = cache / "shards" / f"{row.number:08d}"
        sidecar = Sidecar.from_bytes(path.with_suffix(".json").read_bytes())
        shard = CACHE_FORMATS["tfrecord"].open_shard(
            path.with_suffix(".tfrecord"), view.schema, row.samples
        )
        for i in range(row.samples):
            origin = sidecar.origin(i)
            assert np.array_equal(shard[i]["x"], np.load("/" + origin.key.lstrip("/")))
            count += 1
        shard.close()
    return count


def test_a_small_source_is_cached_completely_and_exactly(tmp_path: Path, url: str) -> None:
    config = write_config(tmp_path / "cache.yaml", url)
    code, errors = run(config, "--until-full")
    assert (code, errors) == (0, "")
    found = status(tmp_path / "cache")
    assert (found.samples, found.drawn, found.coverage) == (120, 120, 1.0)
    assert found.state == "stopped"
    assert found.complete
    assert every_sample_is_its_object(tmp_path / "cache", url) == 120
    assert [f for f in check(tmp_path / "cache") if f.severity == "error"] == []


@pytest.mark.slow
def test_every_byte_that_was_read_is_told_and_counts(tmp_path: Path, url: str) -> None:
    """What the samplers read last, too, although they have no time to say so any more."""
    sizes = [path.stat().st_size for path in Path(url).parent.iterdir()]
    config = write_config(tmp_path / "cache.yaml", url)
    assert run(config, "--until-full") == (0, "")
    looked_at = 16 * max(sizes)  # before the first shard
    assert sum(sizes) <= status(tmp_path / "cache").egress_bytes <= sum(sizes) + looked_at
    config = write_config(tmp_path / "little.yaml", url, sampling={"max_egress": 1})
    code, said = run(config, "--until-full")
    assert (code, said.count("\n")) == (2, 1)
    assert "sampling.max_egress is reached by a first look at a few objects; raise it" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        ({"max_bytes": "20MB"}, "all that is to be cached is cached"),
        ({"max_bytes": 900_000, "eviction": "none"}, "the cache is full"),
    ],
)
def test_more_samples_than_there_will_be_end_the_run(
    tmp_path: Path, url: str, bounds: dict[str, object], why: str
) -> None:
    config = write_config(tmp_path / "cache.yaml", url, cache=bounds)
    code, said = run(config, "--samples", "1000", seconds=30)
    found = status(tmp_path / "cache")
    assert (code, said.count("\n")) == (0, 1)
    assert f"ended after {found.drawn} samples in this run" in said
    assert why in said


def test_shards_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, url: str, expected: dict[str, str]
) -> None:
    config = write_config(
        tmp_path / "four.yaml", url, sampling={"workers": 4, "concurrency": 3}
    )
    assert run(config, "--until-full") == (0, "")
    assert digests(tmp_path / "four") == expected


def slow_config(tmp_path: Path, url: str, name: str) -> Path:
    return write_config(
        tmp_path / f"{name}.yaml",
        url,
        sampling={"workers": 2, "max_bytes_per_second": 150_000},
    )


def test_a_killed_sampler_changes_no_byte(
    tmp_path: Path, url: str, expected: dict[str, str]
) -> None:
    config = slow_config(tmp_path, url, "killed")
    cache = tmp_path / "killed"
    with service(config, "--until-full") as process:
        for least in (10, 40, 70):
            wait_until(lambda least=least: drawn(cache) >= least)
            for victim in samplers_of(process.pid)[:1]:
                kill(victim)
        process.wait(300)
        assert process.returncode == 0
    assert digests(cache) == expected
    assert status(cache).restarts >= 2


def test_a_killed_supervisor_is_followed_by_one_that_finishes(
    tmp_path: Path, url: str, expected: dict[str, str]
) -> None:
    config = slow_config(tmp_path, url, "killed")
    cache = tmp_path / "killed"
    for least in (10, 50):
        with service(config) as process:
            wait_until(lambda least=least: drawn(cache) >= least)
            children = samplers_of(process.pid)
            process.kill()
            process.wait()
            wait_until(lambda children=children: not any(map(alive, children)), 5)
    assert run(config, "--until-full") == (0, "")
    assert digests(cache) == expected
    assert not list((cache / "incoming").iterdir())
    assert [f for f in check(cache) if f.severity == "error"] == []


@pytest.mark.mutant(28, "growcache.sampling.sampler:_listen", "os._exit(0)", "")
def test_a_sampler_ends_with_the_pipe_that_its_supervisor_has(tmp_path: Path, url: str) -> None:
    """Also one that has nothing to say: its answers go to a file here, which never breaks."""
    config = load_config(write_config(tmp_path / "c.yaml", url))
    adopt(layout := CacheLayout(config.cache.path))
    FileLock.acquire(layout.samplers_lock).close()  # the supervisor makes it
    with (tmp_path / "said").open("wb") as said:
        sampler = subprocess.Popen(
            [sys.executable, "-m", "growcache", "sampler"], stdin=subprocess.PIPE, stdout=said
        )
    try:
        assert sampler.stdin is not None
        sampler.stdin.write(pack({"type": "setup", "config": config.model_dump(mode="json")}))
        sampler.stdin.flush()
        wait_until(lambda: b"ready" in (tmp_path / "said").read_bytes())
        assert sampler.poll() is None
        sampler.stdin.close()
        assert sampler.wait(10) == 0
    finally:
        sampler.kill()
        sampler.wait()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_and_leaves_nothing(
    tmp_path: Path, url: str, number: signal.Signals
) -> None:
    """Guarantee 7."""
    config = slow_config(tmp_path, url, "stopped")
    cache = tmp_path / "stopped"
    with service(config) as process:
        wait_until(lambda: drawn(cache) >= 10)
        children = samplers_of(process.pid)
        assert len(children) == 2
        process.send_signal(number)
        process.wait(10)
        assert process.returncode == 0
        assert not any(map(alive, children))
    assert not list((cache / "incoming").iterdir())
    assert status(cache).state == "stopped"
    names = {path.name for path in cache.iterdir()}
    assert not {n for n in names if n.endswith(("-wal", "-shm", ".tmp"))}


def ignores_ctrl_c(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (ignored,) = (line for line in lines if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.mutant(
    27,
    "growcache.sampling.engines.child:EngineProcess.start",
    "start_new_session=True",
    "start_new_session=False",
)
@pytest.mark.mutant(
    27, "growcache.sampling.sampler:main", "signal.signal(signal.SIGINT, signal.SIG_IGN)", ""
)
def test_samplers_have_a_session_of_their_own_and_ignore_ctrl_c(
    tmp_path: Path, url: str
) -> None:
    config = slow_config(tmp_path, url, "sessions")
    with service(config) as process:
        wait_until(lambda: drawn(tmp_path / "sessions") > 0)
        children = samplers_of(process.pid)
        assert len(children) == 2
        assert all(os.getsid(child) == child for child in children)
        wait_until(lambda: all(map(ignores_ctrl_c, children)))  # the second one may still start


@pytest.mark.slow
def test_the_bound_holds_while_the_cache_turns_over(tmp_path: Path, url: str) -> None:
    """Guarantee 1, measured from outside; min_uses 0 lets shards go without readers."""
    bound = 1_000_000
    config = write_config(
        tmp_path / "small.yaml", url, cache={"max_bytes": bound, "min_uses": 0}
    )
    cache = tmp_path / "small"
    worst = 0
    with service(config) as process:
        deadline = time.monotonic() + 300
        while drawn(cache) < 700:
            worst = max(worst, allocated_tree(cache))
            time.sleep(0.002)
            assert process.poll() is None
            assert time.monotonic() < deadline
    assert 0 < worst <= bound
    assert status(cache).evicted_samples > 300
    assert [f for f in check(cache) if f.severity == "error"] == []


def is_full_and_done(found: Status) -> bool:
    """Nothing more is granted, nor is a group that was granted before still on its way."""
    at_work = {worker.state for worker in found.worker_states} & {"reading", "writing"}
    return found.state == "full" and not at_work


def test_a_full_cache_that_nobody_reads_waits_and_says_so(tmp_path: Path, url: str) -> None:
    config = write_config(tmp_path / "full.yaml", url, cache={"max_bytes": 1_000_000})
    cache = tmp_path / "full"
    with service(config):
        wait_until(lambda: drawn(cache) > 0)
        wait_until(lambda: status(cache).listing_complete)  # for which room is kept till then
        wait_until(lambda: is_full_and_done(status(cache)))
        before = drawn(cache)
        time.sleep(0.5)
        found = status(cache)
        assert drawn(cache) == before
        assert "no job reads" in (found.waiting_for or "")


@pytest.mark.mutant(
    10, "growcache.sampling.sampler:Sampler._ask_for_room", "await answered.wait()", ""
)
def test_who_waits_for_room_holds_memory_and_no_disk(tmp_path: Path, url: str) -> None:
    config = write_config(tmp_path / "held.yaml", url, cache={"max_bytes": 1_000_000})
    cache = tmp_path / "held"
    with service(config):
        wait_until(lambda: drawn(cache) > 0 and status(cache).listing_complete)
        wait_until(lambda: status(cache).state == "full")
        with Snapshot.take(cache) as snapshot:
            for i in range(len(snapshot)):
                snapshot[i]  # so all may go, as soon as they are let go
            wait_until(lambda: "readers to release" in (status(cache).waiting_for or ""))
            before = drawn(cache)
            for _ in range(20):
                assert not list((cache / "incoming").iterdir())
                time.sleep(0.02)
            assert drawn(cache) == before
            assert [w.state for w in status(cache).worker_states] == ["waiting"]
        wait_until(lambda: drawn(cache) > before)


def test_a_second_service_is_refused(tmp_path: Path, url: str) -> None:
    config = slow_config(tmp_path, url, "busy")
    with service(config) as first:
        wait_until(lambda: drawn(tmp_path / "busy") > 0)
        code, errors = run(config)
        assert code == 2
        assert str(first.pid) in errors
        assert len(errors.splitlines()) <= 2


@pytest.mark.mutant(4, "growcache.sampling.fingerprint:configured_values", "sampling.seed", "0")
def test_another_configuration_is_refused_with_what_differs(tmp_path: Path, url: str) -> None:
    config = write_config(tmp_path / "cache.yaml", url)
    assert run(config, "--samples", "20")[0] == 0
    before = digests(tmp_path / "cache")
    code, errors = run(config, "--set", "sampling.seed=7")
    assert code == 2
    assert "sampling.seed" in errors
    assert len(errors.splitlines()) <= 2
    assert digests(tmp_path / "cache") == before


def test_bad_objects_are_holes_and_too_many_end_the_service(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "mixed"
    good = make_source(folder, 60)
    for number in range(3):
        (folder / f"bad{number}.npy").write_bytes(b"no array")
    config = write_config(tmp_path / "cache.yaml", good, sampling={"max_skipped": 0.2})
    assert run(config, "--until-full") == (0, "")
    found = status(tmp_path / "cache")
    assert (found.samples, found.holes) == (60, 3)
    strict = write_config(tmp_path / "strict.yaml", good, sampling={"max_skipped": 0.01})
    code, errors = run(strict, "--until-full")
    assert code == 1
    assert "max_skipped" in errors
    assert "bad" in errors


def test_an_empty_listing_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    config = write_config(tmp_path / "cache.yaml", f"{tmp_path}/nothing/*.npy")
    code, errors = run(config)
    assert code == 2
    assert "nothing" in errors
    assert len(errors.splitlines()) == 1


def test_a_full_cache_that_nobody_reads_takes_in_what_refresh_finds(tmp_path: Path) -> None:
    """Also where pages are listed before the samplers have started."""
    folder = tmp_path / "growing"
    url = make_source(folder, 200)
    config = write_config(tmp_path / "cache.yaml", url, cache={"max_bytes": 1_200_000})
    cache = tmp_path / "cache"
    assert run(config, "--until-full") == (0, "")
    for number in range(1500):
        os.link(folder / "00000.npy", folder / f"{os.urandom(45).hex()}-{number}.npy")
    with service(config, "--refresh") as process:
        wait_until(lambda: process.poll() is not None or status(cache).objects == 1700)
        wait_until(lambda: process.poll() is not None or status(cache).listing_complete)
        assert process.poll() is None
    assert 0 < status(cache).samples < 200


def test_new_objects_are_found_by_refresh_and_old_ones_not_drawn_again(tmp_path: Path) -> None:
    folder = tmp_path / "growing"
    url = make_source(folder, 40)
    config = write_config(tmp_path / "cache.yaml", url)
    cache = tmp_path / "cache"
    assert run(config, "--until-full")[0] == 0
    for number in range(100, 120):
        np.save(folder / f"{number:05d}.npy", np.full((16, 64), number, np.float32))
    assert run(config, "--until-full", "--refresh")[0] == 0
    found = status(cache)
    assert (found.samples, found.drawn) == (60, 60)
    assert every_sample_is_its_object(cache, url) == 60
