"""A real Prometheus scrapes two jobs of two ranks each: every panel of the dashboard has data, every rule is evaluated."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from growcache.cli.dashboard import shipped_file
from growcache.numpy import EpochLoader
from tests.monitor.serving import serving
from tests.sampling.services import drawn, make_source, service, wait_until, write_config
from tests.servers.guarded import guarded

PROMETHEUS = shutil.which("prometheus")
JOBS, RANKS, STEP_SECONDS = ("resnet", "sweep"), (0, 1), 0.01
VARIABLES = {"$instance": ".*", "$cache": ".*", "$__rate_interval": "10s"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed"),
]


def train(cache: Path, job: str, rank: int, ended: threading.Event) -> None:
    loader = EpochLoader(
        cache, batch_size=4, min_samples=8, samples_per_epoch=64, job=job, rank=rank,
        world_size=len(RANKS),
    )  # fmt: skip
    while not ended.is_set():
        for _ in loader:
            if ended.wait(STEP_SECONDS):
                break


@contextmanager
def training(cache: Path) -> Iterator[None]:
    ended = threading.Event()
    loops = [
        threading.Thread(target=train, args=(cache, job, rank, ended))
        for job in JOBS
        for rank in RANKS
    ]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        ended.set()
        for loop in loops:
            loop.join()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run it with the shipped rules; yield its address."""
    rules, config, port = folder / "alerts.yaml", folder / "prometheus.yaml", free_port()
    rules.write_text(shipped_file("alerts.yaml"))
    scrape = {
        "job_name": "growcache",
        "honor_labels": True,
        "static_configs": [{"targets": [target]}],
    }
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config.write_text(
        yaml.safe_dump(
            {"global": every, "rule_files": [str(rules)], "scrape_configs": [scrape]}
        )
    )
    command = [
        PROMETHEUS or "", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.terminate()
        process.wait(300)


def asked(address: str, **query: str) -> Any:
    with urlopen(f"{address}?{urlencode(query)}", timeout=300) as answer:
        return json.load(answer)["data"]


def values_of(api: str, expression: str) -> list[float]:
    """Return the values of a query's series now, without those that are no number."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    try:
        series = asked(f"{api}/query", query=expression)["result"]
    except URLError:  # it has not started
        return []
    values = [float(one["value"][1]) for one in series]
    return [value for value in values if math.isfinite(value)]


def expressions() -> list[str]:
    panels = json.loads(shipped_file("grafana.json"))["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_every_panel_has_data_and_every_rule_is_evaluated(tmp_path: Path) -> None:
    folder, cache = tmp_path / "source", tmp_path / "cache"
    make_source(folder, 200, (64, 1024))
    with guarded(folder) as bucket:
        bucket.refuse_key("00003.npy", 404, "NoSuchKey")
        bucket.let_in("NONE", refusal=(503, "SlowDown"))  # until it has refused a few
        source = {"url": "s3://b/*.npy", "storage_options": bucket.storage_options()}
        config = write_config(
            tmp_path / "cache.yaml", "", source=source, sampling={"max_skipped": 0.5},
            cache={"min_uses": 0},
        )  # fmt: skip
        with (
            service(config),
            serving([cache]) as url,
            prometheus(tmp_path, url.removeprefix("http://").rstrip("/")) as api,
        ):
            wait_until(lambda: bucket.refusals >= 3)
            bucket.let_in("KEY-1")
            wait_until(lambda: drawn(cache) > 8)
            with training(cache):
                empty = expressions()
                until = time.monotonic() + 60
                while empty and time.monotonic() < until:
                    empty = [one for one in empty if not values_of(api, one)]
                    time.sleep(0.5)
                assert empty == []
                waits = values_of(
                    api, "sum by (job, rank) (growcache_batch_wait_seconds_count)"
                )
                assert len(waits) == len(JOBS) * len(RANKS)
                groups = asked(f"{api}/rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 5
    assert {rule["health"] for rule in rules} == {"ok"}, [
        rule.get("lastError") for rule in rules
    ]


def test_no_query_has_a_variable_that_is_not_replaced_here() -> None:
    """A variable of another name would ask for a label of that name, which matches nothing."""
    left = {name for one in expressions() for name in re.findall(r"\$\w+", one)}
    assert left == set(VARIABLES)
