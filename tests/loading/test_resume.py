"""Resuming with a real service: after a kill, after eviction, on another machine."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.cache.index.reader import read_index
from growcache.errors import CacheError
from growcache.loading import plan, saved_pass
from growcache.numpy import EpochLoader
from tests.filled import open_leases
from tests.loading.loaders import as_bytes
from tests.loading.trainer import OPTIONS, WINDOW_BYTES
from tests.sampling.services import (
    kill,
    make_source,
    run,
    service,
    wait_until,
    write_config,
)

BOUND = 1_000_000


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "WINDOW_BYTES", WINDOW_BYTES)
    monkeypatch.setattr(saved_pass, "NAMED_SHARDS", 1)  # one digest is over the later windows


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_source(tmp_path_factory.mktemp("remote") / "objects")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, url: str) -> Path:
    """A full cache, which holds a part of the population and does not change."""
    folder = tmp_path_factory.mktemp("filled")
    config = write_config(folder / "c.yaml", url, cache={"max_bytes": BOUND})
    assert run(config, "--until-full")[0] == 0
    return config.with_suffix("")


@pytest.fixture
def cache(filled: Path, tmp_path: Path) -> Path:
    shutil.copytree(filled, tmp_path / "c")
    return tmp_path / "c"


@pytest.fixture
def config(cache: Path, url: str) -> Path:
    """What goes on filling the cache."""
    return write_config(cache.with_suffix(".yaml"), url, cache={"max_bytes": BOUND})


def loader(cache: Path) -> EpochLoader:
    return EpochLoader(cache, **OPTIONS)  # type: ignore[arg-type]


def one_pass(cache: Path) -> tuple[list[bytes], list[dict[str, Any]]]:
    """The batches of the first pass, and the state behind each."""
    with loader(cache) as whole:
        found = [(as_bytes(batch), whole.state_dict()) for batch in whole]
    return [batch for batch, _ in found], [state for _, state in found]


def live(cache: Path) -> set[int]:
    return {row.number for row in read_index(cache).shards}


@contextmanager
def reading(cache: Path) -> Iterator[None]:
    """Somebody who uses up what is cached, so that it is evicted."""
    stop = threading.Event()

    def read() -> None:
        with EpochLoader(cache, batch_size=8, min_samples=1) as other:
            while not stop.is_set():
                for _ in other:
                    if stop.wait(0.005):
                        break

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def evict_all(cache: Path, config: Path) -> None:
    """Let the service turn the cache over, until nothing is left of what it held."""
    before = live(cache)
    with service(config), reading(cache):
        wait_until(lambda: not before & live(cache))


@pytest.mark.slow
def test_what_was_evicted_is_drawn_again_for_the_rest(
    cache: Path, filled: Path, config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches, states = one_pass(filled)
    stopped = len(batches) // 3
    evict_all(cache, config)
    drawn = read_index(cache).totals.drawn
    with service(config), loader(cache) as resumed, caplog.at_level(logging.WARNING):
        resumed.load_state_dict(json.loads(json.dumps(states[stopped - 1])))
        found = []
        for batch in resumed:
            found.append(as_bytes(batch))
            assert len(open_leases(cache)) <= 2
    assert found == batches[stopped:]
    (said,) = [r.message for r in caplog.records if "they are drawn again" in r.message]
    assert "shards that the rest of pass 0 needs" in said
    totals = read_index(cache).totals
    assert totals.refetched_shards > 0
    assert totals.drawn >= drawn


@pytest.mark.slow
def test_another_machine_goes_on_with_the_very_batches(
    filled: Path, tmp_path: Path, url: str
) -> None:
    batches, states = one_pass(filled)
    stopped = len(batches) // 2
    config = write_config(tmp_path / "there.yaml", url)
    there = config.with_suffix("")
    with loader(there) as resumed:
        resumed.load_state_dict(states[stopped - 1])
        with service(config):
            assert [as_bytes(batch) for batch in resumed] == batches[stopped:]


@pytest.mark.slow
def test_another_node_draws_other_shards_and_takes_the_counts_alone(
    tmp_path: Path, url: str
) -> None:
    """Its lanes are others, so a state of this node cannot be exact there."""
    caches = []
    for node in range(2):
        sampling = {"node": node, "nodes": 2}
        config = write_config(tmp_path / f"{node}.yaml", url, sampling=sampling)
        assert run(config, "--until-full")[0] == 0
        caches.append(config.with_suffix(""))
    batches, states = one_pass(caches[0])
    stopped = len(batches) // 2
    with service(tmp_path / "1.yaml"), loader(caches[1]) as resumed:
        resumed.load_state_dict(states[stopped - 1])
        with pytest.raises(CacheError, match=r"cannot be drawn again .* other bytes"):
            next(iter(resumed))
        resumed.load_state_dict(states[stopped - 1], missing="substitute")
        rest = [as_bytes(batch) for batch in resumed]
        assert 0 < len(rest) <= len(batches) - stopped
        assert resumed.global_step == stopped + len(rest)
        assert not set(rest) & set(batches)


@pytest.mark.slow
def test_what_cannot_be_drawn_again_is_said_and_others_can_stand_in(tmp_path: Path) -> None:
    url = make_source(tmp_path / "objects")
    config = write_config(tmp_path / "c.yaml", url, cache={"max_bytes": BOUND})
    cache = config.with_suffix("")
    assert run(config, "--until-full")[0] == 0
    batches, states = one_pass(cache)
    evict_all(cache, config)
    for path in (tmp_path / "objects").iterdir():
        np.save(path, np.load(path) + 1)
    with service(config), loader(cache) as resumed:
        resumed.load_state_dict(states[0])
        with pytest.raises(CacheError, match=r"cannot be drawn again .* missing='substitute'"):
            next(iter(resumed))
        resumed.load_state_dict(states[0], missing="substitute")
        assert len(list(resumed)) > len(batches) // 2


@pytest.mark.slow
def test_a_killed_trainer_finds_the_rest_of_its_pass_beside_a_service_that_evicts(
    cache: Path, filled: Path, config: Path, tmp_path: Path
) -> None:
    batches, _ = one_pass(filled)
    notes = tmp_path / "notes"
    notes.mkdir()
    trainer = subprocess.Popen(
        [sys.executable, "-m", "tests.loading.trainer", str(cache), str(notes), "0.1"]
    )
    stopped = 3 * len(batches) // 4
    try:
        wait_until((notes / "1.json").exists)
        with service(config), reading(cache):
            wait_until((notes / f"{stopped}.json").exists)
            wait_until(lambda: read_index(cache).totals.evicted_shards)
            kill(trainer.pid)
            trainer.wait()
            delivered = max(int(path.stem) for path in notes.glob("*.json"))
            note = json.loads((notes / f"{delivered}.json").read_text())
            assert bytes.fromhex(note["batch"]) == batches[delivered - 1]
            with loader(cache) as resumed:
                resumed.load_state_dict(note["state"])
                assert [as_bytes(batch) for batch in resumed] == batches[delivered:]
            totals = read_index(cache).totals
    finally:
        trainer.kill()
        trainer.wait()
    assert totals.refetched_shards == 0, "what it still needed was not kept for it"
