"""Service and trainer of the compose file in containers: two users, two pid namespaces, one volume."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.cache.status import read_status
from growcache.cache.status_model import Status
from tests.deploy.containers import (
    COMPOSE,
    GROUP,
    answer,
    can_run,
    container,
    running,
    services,
    stop,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_run(), reason="needs root and bubblewrap"),
]
PAGE = "http://127.0.0.1:8650"
SETTINGS = {
    "GROWCACHE_TOKEN": "0123456789abcdef",
    "GROWCACHE_SOURCE__URL": "/data/*.npy",
    "GROWCACHE_SOURCE__OPTIONS": "{axis: 0}",
    "GROWCACHE_SAMPLING__SHARD_SAMPLES": "64",
    "GROWCACHE_SAMPLING__MAX_BYTES_PER_SECOND": "4MB",
    "GROWCACHE_CACHE__MAX_BYTES": "8MB",
    "GROWCACHE_CACHE__MIN_FREE": "0",
}
OWN_LOOP = """
import sys, time
from growcache.numpy import EpochLoader
loader = EpochLoader(sys.argv[1], batch_size=8, min_samples=64, job="own")
while True:
    for batch in loader:
        print("batch", flush=True)
        time.sleep(0.1)
"""


class Pod:
    """The containers of one test, and where they write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache, self.data = folder / "cache", folder / "data"
        self.volumes = {"cache": self.cache, "checkpoints": folder / "checkpoints"}
        for path in self.volumes.values():
            path.mkdir()
            os.chown(path, 0, GROUP)
            path.chmod(0o2770)  # as the image's /cache is; Docker copies that
        self.data.mkdir()
        rng = np.random.default_rng(0)
        for number in range(40):
            np.save(self.data / f"{number}.npy", rng.random((64, 1024), np.float32))

    def words(
        self, name: str, hostname: str, command: list[str] | None = None, **changes: str
    ) -> list[str]:
        service = {**services()[name], **changes}
        return container(
            service,
            self.volumes,
            hostname=hostname,
            environment=SETTINGS,
            image={self.data: "/data", COMPOSE.parent.parent / "train.py": "/opt/train.py"},
            command=command or service["command"],
        )

    def output(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def said(self, name: str) -> str:
        return self.output(name).read_text() if self.output(name).exists() else ""

    def wait_for(self, is_so: Callable[[Status], Any], seconds: float = 300) -> Status:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (self.cache / "index.sqlite").exists() and is_so(
                found := read_status(self.cache)
            ):
                return found
            time.sleep(0.05)
        logs = [f"{path.name}: {path.read_text()[-800:]}" for path in self.folder.glob("*.log")]
        pytest.fail("\n".join(logs))


@pytest.fixture
def pod() -> Iterator[Pod]:
    folder = Path(tempfile.mkdtemp(prefix="growcache-pod-"))  # other users reach it
    folder.chmod(0o755)
    yield Pod(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "hosts", [("service", "trainer"), ("pod", "pod")], ids=["compose", "pod"]
)
def test_two_users_train_on_a_cache_that_turns_over(pod: Pod, hosts: tuple[str, str]) -> None:
    pytest.importorskip("torch")
    train = [*services()["trainer"]["command"], "--batch-size", "16", "--save-every", "50"]
    with running(pod.words("service", hosts[0]), pod.output("service")) as service:
        with running(pod.words("trainer", hosts[1], train), pod.output("trainer")) as trainer:
            found = pod.wait_for(lambda now: now.evicted_samples > 300 and now.delivered > 3000)
            assert not found.foreign_leases
            assert answer(service, f"{PAGE}/readyz?min_samples=50") == (200, "ready")
            assert answer(service, f"{PAGE}/metrics")[0] == 401
            assert answer(service, f"{PAGE}/healthz")[0] == 200
            assert stop(trainer) == os.EX_TEMPFAIL, pod.said("trainer")
        step = int(re.findall(r"ends at step (\d+)", pod.said("trainer"))[-1])
        pod.wait_for(lambda now: not now.leases)
        more = [*train, "--steps", str(step + 50)]
        with running(pod.words("trainer", hosts[1], more), pod.output("again")) as trainer:
            assert trainer.wait(timeout=300) == 0, pod.said("again")
        assert f"resumes after step {step}" in pod.said("again")
        assert f"ends at step {step + 50}" in pod.said("again")
        assert stop(service) == 0, pod.said("service")
    assert "Traceback" not in pod.said("service")
    owners = {path.stat().st_uid for path in pod.cache.rglob("*")}
    assert owners == {10001}


def test_a_loop_without_handlers_ends_as_process_1_of_its_container(pod: Pod) -> None:
    """The kernel drops a signal without a handler there, and the leases are closed by then."""
    (pod.data / "loop.py").write_text(OWN_LOOP)
    loop = ["python", "/data/loop.py", "/cache"]
    with running(pod.words("service", "service"), pod.output("service")):
        with running(pod.words("trainer", "trainer", loop), pod.output("loop")) as trainer:
            pod.wait_for(lambda now: now.leases and "batch" in pod.said("loop"))
            assert stop(trainer) == 128 + signal.SIGTERM
        pod.wait_for(lambda now: not now.leases)


def test_a_service_that_was_killed_is_another_one_of_the_same_pid(pod: Pod) -> None:
    with running(pod.words("service", "pod"), pod.output("service")) as service:
        before = pod.wait_for(lambda now: now.state == "running" and now.samples > 100)
        assert before.pid == 1
        stop(service, signal.SIGKILL)
    began = time.time()
    assert read_status(pod.cache).state == "stopped"
    words = pod.words("service", "pod", user=f"10003:{GROUP}")  # an image of another user
    with running(words, pod.output("service")) as service:
        after = pod.wait_for(lambda now: now.pid == 1 and (now.started_at or 0) > began)
        assert (after.state, after.waiting_reason) != ("waiting", "service")
        pod.wait_for(lambda now: now.drawn > before.drawn)
        assert stop(service) == 0, pod.said("service")
