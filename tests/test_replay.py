"""Replay with real services: batches come back bit for bit, from the cache, or from the store elsewhere."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import growcache
from growcache import Origin
from growcache.cache.directory import adopt
from growcache.cache.files import CacheLayout
from growcache.cache.index.reader import read_index
from growcache.cache.purge_list import PurgedObject, append_to_list, key_hash
from growcache.cli.cli import main
from growcache.errors import ConfigError, FingerprintError, JournalError
from growcache.loading.journal import Journal
from growcache.numpy import EpochLoader
from tests import journaling_trainer
from tests.journaling_trainer import digest
from tests.loading.loaders import as_bytes
from tests.sampling.services import make_source, run, service, wait_until, write_config
from tests.servers import Bucket, S3Server

SAMPLING = {"workers": 1, "shard_samples": 8, "seed": 3, "timeout_seconds": 10}
STEPS = 120


def augmented(sample: Any, rng: np.random.Generator, origin: Origin) -> dict[str, Any]:
    return {"x": sample["x"] * rng.random(dtype=np.float32), "key": origin.key}


@dataclass(frozen=True)
class TrainedRun:
    config: Path
    journal: Path
    seen: list[bytes]
    objects: Path


def write(path: Path, objects: Path, **sampling: Any) -> Path:
    return write_config(
        path,
        f"{objects}/*.npy",
        cache={"max_bytes": 1_000_000},
        sampling={**SAMPLING, **sampling},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A run over a cache that turned over meanwhile."""
    folder = tmp_path_factory.mktemp("run")
    make_source(folder / "objects", 300)
    config, seen = write(folder / "c.yaml", folder / "objects"), list[bytes]()
    with (
        service(config),
        EpochLoader(
            *(folder / "c",),
            batch_size=6,
            min_samples=30,
            journal=folder / "a.journal",
            transform=augmented,
        ) as loader,
    ):
        while len(seen) < STEPS:
            for batch in loader:
                seen.append(as_bytes(batch))
                time.sleep(0.01)
    return TrainedRun(config, folder / "a.journal", seen, folder / "objects")


@pytest.fixture
def elsewhere(trained: TrainedRun, tmp_path: Path) -> Path:
    """The configuration on a machine without the cache."""
    return write(tmp_path / "elsewhere.yaml", trained.objects)


def test_steps_come_back_elsewhere_from_the_store(
    trained: TrainedRun, elsewhere: Path, tmp_path: Path
) -> None:
    np.save(trained.objects / "00000a.npy", np.zeros((16, 64), np.float32))  # listed in between
    for step in random.Random(1).sample(range(len(trained.seen)), 3):
        found = growcache.replay(
            elsewhere, trained.journal, step, transform=augmented, cache=tmp_path / "again"
        )
        assert as_bytes(found.batch) == trained.seen[step]
        assert found.step == step
        assert found.known
        assert all(sample.drawn_again and sample.valid for sample in found.samples)
        assert [sample.origin.key for sample in found.samples] == found.batch["key"]
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
def test_what_the_cache_holds_is_read_there(trained: TrainedRun) -> None:
    live = {row.number for row in read_index(trained.config.with_suffix("")).shards}
    steps = range(len(trained.seen) - 1, -1, -1)
    found = growcache.replay(trained.config, trained.journal, steps[0], transform=augmented)
    assert as_bytes(found.batch) == trained.seen[steps[0]]
    for sample in found.samples:
        assert sample.drawn_again == (sample.shard not in live)


@pytest.mark.slow
def test_without_the_transform_samples_are_as_they_are_cached(
    trained: TrainedRun, elsewhere: Path
) -> None:
    found = growcache.replay(elsewhere, trained.journal, 0)
    for value, sample in zip(found.batch["x"], found.samples, strict=True):
        assert value.tobytes() == np.load(sample.origin.key).tobytes()


def test_another_configuration_is_refused(trained: TrainedRun, tmp_path: Path) -> None:
    other = write(tmp_path / "other.yaml", trained.objects, seed=4)
    with pytest.raises(FingerprintError, match="seed"):
        growcache.replay(other, trained.journal, 0)
    with pytest.raises(ConfigError, match="there is no journal"):
        growcache.replay(other, tmp_path / "none", 0)


@pytest.mark.slow
@pytest.mark.mutant(
    32,
    "growcache.cache.cache:Cache.lengths",
    "self.refetch_queue.lengths(numbers)",
    "{}",
)
def test_the_last_shard_of_a_fixed_set_comes_back_as_it_was_cut(tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "c.yaml",
        make_source(tmp_path / "objects", 40, (13, 64)),
        source={"options": {"axis": 0}},
        cache={"max_samples": 25, "eviction": "none"},
        sampling={"samples_per_object": 13},
    )
    assert run(config, "--until-full") == (0, "")
    options: dict[str, Any] = {"batch_size": 25, "min_samples": 1, "journal": tmp_path / "j"}
    with EpochLoader(tmp_path / "c", **options) as loader:
        (seen,) = [as_bytes(batch) for batch in loader]
    shutil.rmtree(tmp_path / "c")
    found = growcache.replay(config, tmp_path / "j", 0)
    assert as_bytes(found.batch) == seen
    assert all(sample.drawn_again for sample in found.samples)


@pytest.mark.slow
def test_purged_objects_do_not_come_back(
    trained: TrainedRun, elsewhere: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    found = growcache.replay(elsewhere, trained.journal, 5, cache=again)
    adopt(layout := CacheLayout(elsewhere.with_suffix("")))
    append_to_list(layout, [PurgedObject(key_hash(found.samples[2].origin.key), 1)])
    for folder in (again, None):
        with pytest.raises(JournalError, match="purged"):
            growcache.replay(elsewhere, trained.journal, 5, cache=folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", ["rewritten", pytest.param("removed", marks=pytest.mark.slow)]
)
def test_an_object_that_was_changed_is_named(
    change: str,
    trained: TrainedRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained.config.parent, folder)
    objects = folder / "objects"
    config = write(folder / "c.yaml", objects)
    # It is the copy's own run, over a part of its objects.
    shutil.rmtree(folder / "c")
    assert run(config, "--until-full")[0] == 0
    with EpochLoader(
        folder / "c", batch_size=6, min_samples=1, journal=folder / "b.journal"
    ) as loader:
        next(iter(loader))
    origin = growcache.replay(config, folder / "b.journal", 0).samples[0].origin
    if change == "rewritten":
        np.save(origin.key, np.ones((16, 64), np.float32))
    else:
        Path(origin.key).unlink()
    # Cached, it is still what the step saw.
    command = ["replay", str(config), str(folder / "b.journal"), "--step", "0"]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "1 object changed since" in said
    assert {"rewritten": "rewritten since", "removed": "gone from the store"}[change] in said
    assert main([*command, "--no-check"]) == 0
    shutil.rmtree(folder / "c")
    with pytest.raises(JournalError, match=Path(origin.key).name):
        growcache.replay(config, folder / "b.journal", 0)


def test_the_command_shows_and_writes_a_step(
    trained: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", str(trained.config), str(trained.journal)]
    assert main(words) == 0
    assert f"has {len(trained.seen)} steps" in capsys.readouterr().out
    kept = ["--cache", str(tmp_path / "kept")]
    assert main([*words, "--step", "7", "-o", str(tmp_path / "b.npz"), *kept]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"step 7 is batch \d+ of epoch \d+: 6 samples of \d+ shards", lines[0])
    assert len(lines) == 7
    assert main([*words, "--step", "7", "--json", *kept]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [said["step"], said["known"], said["earlier"]] == [7, True, 0]
    with np.load(tmp_path / "b.npz") as arrays:
        for value, sample in zip(arrays["x"], said["samples"], strict=True):
            assert value.tobytes() == np.load(sample["key"]).tobytes()
            place = f"{sample['shard']}:{sample['row']}"
            assert [place, sample["key"], "[0:16]"] in [line.split()[1:] for line in lines]


@pytest.mark.slow
def test_ranks_replay_their_own_batches(trained: TrainedRun, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    cache, file = trained.config.with_suffix(""), tmp_path / "ranks.journal"

    def read(rank: int) -> list[bytes]:
        options: dict[str, Any] = {"rank": rank, "world_size": 2, "drop_last": False}
        with EpochLoader(cache, batch_size=6, min_samples=1, journal=file, **options) as loader:
            return [as_bytes(batch) for batch in loader]

    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(read, range(2)))
    for rank, seen in enumerate(both):
        for step in (0, len(seen) - 1):
            found = growcache.replay(trained.config, file, step, rank=rank)
            assert as_bytes(found.batch) == seen[step]
    last = growcache.replay(trained.config, file, len(both[1]) - 1, rank=1)
    assert [sample.valid for sample in last.samples] == last.batch["_valid"].tolist()


@pytest.mark.slow
def test_a_journal_of_a_cache_that_was_made_anew_has_both_listings(
    trained: TrainedRun, tmp_path: Path
) -> None:
    folder, seen = tmp_path / "run", list[bytes]()
    make_source(folder / "objects", 40)
    config = write(folder / "c.yaml", folder / "objects")
    for name in ("early.npy", "late.npy"):
        shutil.rmtree(folder / "c", ignore_errors=True)
        np.save(folder / "objects" / name, np.full((16, 64), 7, np.float32))
        assert run(config, "--until-full")[0] == 0
        with EpochLoader(
            folder / "c", batch_size=6, min_samples=1, journal=folder / "a.journal"
        ) as loader:
            if seen:
                loader.load_state_dict(loader.state_dict() | {"global_step": len(seen)})
            seen += [as_bytes(batch) for batch in loader]
    shutil.rmtree(folder / "c")
    assert Journal.read(folder / "a.journal").sessions == 2
    for step in (0, len(seen) - 1):
        found = growcache.replay(config, folder / "a.journal", step, cache=tmp_path / "again")
        assert as_bytes(found.batch) == seen[step]


@pytest.mark.slow
def test_a_hole_that_was_filled_later_is_none_of_an_earlier_step(tmp_path: Path) -> None:
    folder, seen = tmp_path / "run", list[bytes]()
    make_source(folder / "objects", 40)
    hole = folder / "objects" / "00007.npy"
    whole, times = hole.read_bytes(), (1.7e9, 1.7e9)
    hole.write_bytes(bytes(len(whole)))
    os.utime(hole, times)
    config = write(folder / "c.yaml", folder / "objects", max_skipped=0.5)
    for flags in ((), ("--retry-holes",)):
        assert run(config, "--until-full", *flags)[0] == 0
        with EpochLoader(
            folder / "c", batch_size=6, min_samples=1, drop_last=False, journal=folder / "j"
        ) as loader:
            loader.load_state_dict(loader.state_dict() | {"global_step": len(seen)})
            seen += [as_bytes(batch) for batch in loader]
        hole.write_bytes(whole)
        os.utime(hole, times)  # the same version, for all that is known
    assert read_index(folder / "c").totals.samples == 40
    shutil.rmtree(folder / "c")
    for step in range(len(seen)):
        found = growcache.replay(config, folder / "j", step, cache=tmp_path / "again")
        assert as_bytes(found.batch) == seen[step]


def as_npy(number: int) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.full((16, 64), number, np.float32))
    return stream.getvalue()


@pytest.mark.slow
def test_steps_of_a_bucket_come_back_on_a_machine_without_the_cache(
    moto_server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = Bucket.make(moto_server)
    for number in range(60):
        bucket.put(f"{number:05d}.npy", as_npy(number))

    def configured(name: str) -> Path:
        source = {"storage_options": moto_server.storage_options}
        return write_config(
            tmp_path / f"{name}.yaml",
            bucket.url("*.npy"),
            source=source,
            sampling=SAMPLING,
        )

    assert run(configured("here"), "--until-full")[0] == 0
    journal = tmp_path / "j"
    with EpochLoader(tmp_path / "here", batch_size=6, min_samples=1, journal=journal) as loader:
        seen = [as_bytes(batch) for batch in loader]
    shutil.rmtree(tmp_path / "here")
    elsewhere, again = configured("elsewhere"), tmp_path / "again"
    found = growcache.replay(elsewhere, journal, 3, cache=again)
    assert as_bytes(found.batch) == seen[3]
    assert all(sample.drawn_again for sample in found.samples)
    command = ["replay", str(elsewhere), str(journal), "--step", "3"]
    assert main([*command, "--cache", str(again)]) == 0
    origin = found.samples[0].origin
    assert origin.etag is not None
    assert origin.etag in capsys.readouterr().out
    bucket.put(Path(origin.key).name, as_npy(1000))
    # Drawn before, it is still what the step saw.
    assert main([*command, "--cache", str(again)]) == 1
    assert "1 object changed since" in capsys.readouterr().out
    with pytest.raises(JournalError, match=Path(origin.key).name):
        growcache.replay(elsewhere, journal, 3)
    bucket.remove()


def last_seen(notes: Path) -> dict[int, str]:
    """What each step saw; of those that came again the last."""
    whole = notes.read_text().rpartition("\n")[0]
    return {int(step): hash_ for step, hash_ in map(str.split, whole.splitlines())}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("samples_per_epoch", [0, 100])
def test_a_thousand_steps_of_a_run_with_kills(samples_per_epoch: int, tmp_path: Path) -> None:
    """Trainers and services are killed; only configuration, journal and store are left."""
    rng, folder = random.Random(samples_per_epoch), tmp_path / "run"
    make_source(folder / "objects", 400)
    # Small, so that shards are evicted; those of killed trainers go at once.
    config = write_config(
        folder / "c.yaml",
        f"{folder}/objects/*.npy",
        cache={"max_bytes": 1_500_000, "resume_seconds": 1},
        sampling=SAMPLING,
    )
    command = [sys.executable, "-m", "tests.journaling_trainer"]
    command += [str(folder / "c"), str(folder), str(samples_per_epoch)]
    notes = folder / "seen"
    notes.touch()
    while len(last_seen(notes)) < 1500:
        stop = len(notes.read_text().splitlines()) + rng.randrange(60, 400)
        with service(config) as process, subprocess.Popen(command) as trainer:
            wait_until(lambda: len(notes.read_text().splitlines()) >= stop)  # noqa: B023
            trainer.kill()
            process.kill()
    shutil.rmtree(folder / "c")
    seen = last_seen(notes)
    elsewhere = write_config(
        tmp_path / "elsewhere.yaml", f"{folder}/objects/*.npy", sampling=SAMPLING
    )
    chosen = rng.sample(sorted(seen), 500)
    differing = [
        step
        for step in chosen
        if digest(
            growcache.replay(
                elsewhere,
                folder / "a.journal",
                step,
                transform=journaling_trainer.augmented,
                cache=tmp_path / "again",
            ).batch
        )
        != seen[step]
    ]
    assert not differing
    assert Journal.read(folder / "a.journal").sessions > 2
