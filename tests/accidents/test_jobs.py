"""`status` reports for each job exactly the samples that its loop received."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.accidents.commands import (
    growcache,
    rows_of,
    running,
    status,
    wait_for_status,
    write_config,
    write_objects,
)
from tests.accidents.trainers import Trainer, loading, trainer

SAMPLES = 40 * 16
EPOCH = "for _ in loader: pass"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    url = write_objects(folder / "in", count=40)
    source = rows_of(url)
    made = write_config(folder / "cache.yaml", source)
    assert growcache("run", made, "--until-full").returncode == 0
    return made


@pytest.fixture
def cache(config: Path) -> Iterator[Path]:
    with running(config):
        wait_for_status(config.with_suffix(""), lambda found: found["state"] == "complete")
        yield config.with_suffix("")


def job(cache: Path, name: str) -> dict[str, Any]:
    """Return the status of a job, or an empty dict if it is not listed."""
    found: dict[str, Any] = {one["name"]: one for one in status(cache)["jobs"]}.get(name, {})
    return found


def delivered(cache: Path, name: str, wanted: int) -> dict[str, Any]:
    """Wait until a job has delivered exactly the wanted samples; return its status."""

    def enough(found: dict[str, Any]) -> bool:
        return any(one["name"] == name and one["delivered"] >= wanted for one in found["jobs"])

    wait_for_status(cache, enough)
    found = job(cache, name)
    assert found["delivered"] == wanted
    return found


def received(loop: Trainer) -> int:
    """Let the loop take five batches; return their number of samples."""
    code = "say(sum(len(next(batches)['x']) for _ in range(5)))"
    (samples,) = loop.ask(code)
    return int(samples)


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_delivered_is_what_the_loop_received(cache: Path, gather: str) -> None:
    """The loader reads far ahead: a few blocks hold all of these samples."""
    with trainer(cache, loading(job=gather, gather=gather)) as loop:
        assert received(loop) == 40
        found = delivered(cache, gather, 40)
        (pid,) = loop.ask("import os; say(os.getpid())")
        if gather == "thread":
            assert found["pid"] == pid
        assert (found["epoch"], found["open"]) == (0, True)
        assert found["waits"]["count"] >= 1
        assert found["waits"]["seconds"] > 0
        loop.tell("del batches")
        loop.tell(EPOCH)
        found = delivered(cache, gather, 40 + SAMPLES)
        assert found["epoch"] == 1
        assert found["reuse"] == pytest.approx((40 + SAMPLES) / SAMPLES)
        loop.end(signal.SIGKILL)
    wait_for_status(cache, lambda now: not any(one["open"] for one in now["jobs"]))
    delivered(cache, gather, 40 + SAMPLES)


@pytest.mark.slow
def test_jobs_are_told_apart_and_survive_the_service(config: Path) -> None:
    cache = config.with_suffix("")
    with running(config):
        wait_for_status(cache, lambda found: found["state"] == "complete")
        before = status(cache)["delivered"]
        with (
            trainer(cache, loading(job="first")) as one,
            trainer(cache, loading(job="second")) as two,
        ):
            assert received(one) == received(two) == received(two) == 40
            delivered(cache, "first", 40)
            delivered(cache, "second", 80)
            assert wait_for_status(cache, lambda now: now["delivered"] >= before + 120)
            two.tell("loader.close()")
            two.ask("say()")
            delivered(cache, "second", 80)
    wait_for_status(cache, lambda found: found["state"] == "stopped")
    delivered(cache, "first", 40)
    delivered(cache, "second", 80)
    shown = "".join(growcache("status", cache).stdout.replace("│", "").split())
    assert "second80samples,epoch0,waited" in shown


def test_a_snapshot_counts_what_is_taken_of_it(cache: Path) -> None:
    code = """
import growcache
snapshot = growcache.Snapshot.take(cache, job="mine")
for i in range(7): snapshot[i]
snapshot.close()
say()
"""
    with trainer(cache) as loop:
        loop.ask(code)
        delivered(cache, "mine", 7)


TENSORFLOW = """
import growcache.tensorflow as gtf
data = gtf.dataset(cache, batch_size=16, min_samples=16, job="{job}", reader="{reader}")
for batch in data: pass
say()
"""


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["native", "gather"])
def test_tensorflow_counts_too(cache: Path, reader: str) -> None:
    pytest.importorskip("tensorflow")
    with trainer(cache, TENSORFLOW.format(job=reader, reader=reader)) as loop:
        loop.ask("say()")
        delivered(cache, reader, SAMPLES)
