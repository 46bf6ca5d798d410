"""The counters of a real run are those that the server, the index and the training loop counted themselves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from growcache.cache.history import read_history
from growcache.cache.index.reader import read_index
from growcache.monitor.server import create_app
from growcache.numpy import EpochLoader
from tests.sampling.services import drawn, kill, make_source, service, wait_until, write_config
from tests.servers.guarded import GuardedBucket, guarded

OBJECTS, LEFT_OUT = 60, 2
EPOCHS, BATCH = 3, 8


class Scrape:
    """One answer of /metrics, summed over labels that are not asked for."""

    def __init__(self, cache: Path) -> None:
        client = TestClient(create_app([cache]), base_url="http://localhost")
        families = text_string_to_metric_families(client.get("/metrics").text)
        self._samples = [sample for family in families for sample in family.samples]

    def sum(self, name: str, **labels: str) -> float:
        return sum(
            one.value
            for one in self._samples
            if one.name == f"growcache_{name}" and labels.items() <= one.labels.items()
        )

    def by(self, label: str, name: str) -> dict[str, float]:
        found: Counter[str] = Counter()
        for one in self._samples:
            if one.name == f"growcache_{name}":
                found[one.labels[label]] += one.value  # type: ignore[assignment]
        return dict(found)


def train(cache: Path, job: str) -> tuple[int, int, float]:
    """Return the batches and samples that a loop received, and what its loader says that it waited."""
    loader = EpochLoader(cache, batch_size=BATCH, min_samples=BATCH, job=job)
    batches, samples, waited = 0, 0, 0.0
    for _ in range(EPOCHS):
        for batch in loader:
            batches, samples = batches + 1, samples + len(batch["x"])
        waited += loader.report.wait_seconds
    return batches, samples, waited


def assert_requests(cache: Path, bucket: GuardedBucket) -> None:
    """Compare requests with those that the server answered as they wanted, and refused."""
    scrape = Scrape(cache)
    served = scrape.sum("store_requests_total", code="ok")
    assert served == bucket.answers
    assert scrape.sum("store_requests_total") - served == bucket.refusals
    assert scrape.sum("store_read_seconds_count") == served
    assert scrape.sum("store_read_bytes_total") == bucket.sent


@pytest.mark.slow
def test_counters_are_exact_once_all_is_quiet(tmp_path: Path) -> None:
    folder, cache = tmp_path / "source", tmp_path / "cache"
    make_source(folder, OBJECTS)
    with guarded(folder) as bucket:
        bucket.refuse_key("00003.npy", 404, "NoSuchKey")
        bucket.refuse_key("00005.npy", 403, "AccessDenied")
        bucket.let_in("NONE", refusal=(503, "SlowDown"))  # until it has refused a few
        source = {"url": "s3://b/*.npy", "storage_options": bucket.storage_options()}
        config = write_config(
            tmp_path / "cache.yaml", "", source=source, sampling={"max_skipped": 0.5}
        )
        with service(config) as process:
            wait_until(lambda: bucket.refusals >= 3)
            bucket.let_in("KEY-1")
            wait_until(lambda: drawn(cache) and Scrape(cache).sum("holes_total") == LEFT_OUT)
            batches, samples, waited = train(cache, "a")
            wait_until(lambda: Scrape(cache).sum("samples_delivered_total") == samples)
            wait_until(
                lambda: (
                    Scrape(cache).sum("store_requests_total")
                    == bucket.answers + bucket.refusals
                )
            )
            assert_requests(cache, bucket)
            scrape, totals = Scrape(cache), read_index(cache).totals
            assert scrape.sum("samples_drawn_total") == totals.drawn == OBJECTS - LEFT_OUT
            assert scrape.by("reason", "holes_total") == {"missing": 1, "denied": 1}
            assert scrape.by("reason", "store_retries_total")["throttled"] >= 3
            assert scrape.sum("batch_wait_seconds_count", job="a", rank="0") == batches
            assert scrape.sum("batch_wait_seconds_sum", job="a") == pytest.approx(
                waited, abs=0.01
            )
            # Nearly all were used alike: the last batch of an epoch is left out.
            wait_until(lambda: 50 < Scrape(cache).sum("ess_samples", job="a") <= OBJECTS)
            assert scrape.sum("waiting_seconds_total", reason="complete") > 0
            before = scrape.sum("store_requests_total")
            kill(process.pid)
            process.wait()
        folder.joinpath("99999.npy").write_bytes(folder.joinpath("00000.npy").read_bytes())
        with service(config, "--refresh") as process:
            wait_until(lambda: drawn(cache) == OBJECTS - LEFT_OUT + 1)
            wait_until(
                lambda: (
                    Scrape(cache).sum("store_requests_total")
                    == bucket.answers + bucket.refusals
                )
            )
            assert_requests(cache, bucket)
            assert Scrape(cache).sum("store_requests_total") > before
            process.terminate()
            process.wait(20)
    assert Scrape(cache).sum("state", state="stopped") == 1
    assert Scrape(cache).sum("samples_drawn_total") == OBJECTS - LEFT_OUT + 1
    last = read_history(cache)[-1]
    assert (last.state, last.drawn, last.requests) == (
        "stopped",
        OBJECTS - LEFT_OUT + 1,
        bucket.answers + bucket.refusals,
    )
