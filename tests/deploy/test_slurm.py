"""deploy/slurm/train.sbatch on a real Slurm: a service on each node of a job that is queued again, and moves."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from growcache.cache.status import read_status
from tests.deploy.slurm import NODES, Cluster, can_run, cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_run(), reason="needs root, Slurm and munge"),
]
ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


def submit(slurm: Cluster, *words: str) -> str:
    """Queue the script on both nodes, for a small source; return the job's number."""
    data = slurm.folder / "data"
    data.mkdir()
    rng = np.random.default_rng(0)
    for number in range(100):
        np.save(data / f"{number:03d}.npy", rng.random((64, 64), np.float32))
    config = {
        "source": {"url": f"{data}/*.npy", "options": {"axis": 0}},
        "sampling": {"shard_samples": 64, "workers": 1, "max_bytes_per_second": "200kB"},
        "cache": {"path": "elsewhere", "max_bytes": "20MB", "min_free": 0},
    }
    (slurm.folder / "growcache.yaml").write_text(yaml.safe_dump(config))
    return slurm.run(
        *("sbatch", "--parsable", "--nodes=2", f"--chdir={ROOT}"),
        *(f"--output={slurm.folder}/%j.log", str(SCRIPT), *words),
        CONFIG=str(slurm.folder / "growcache.yaml"),
        CHECKPOINT=str(slurm.folder / "last.pt"),
        SCRATCH=str(slurm.scratch),
        PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin",
    )


def wait_for(
    slurm: Cluster, job: str, is_so: Callable[[str], object], seconds: float = 300
) -> str:
    """Wait until the job's output is so, and return it."""
    log, deadline = slurm.folder / f"{job}.log", time.monotonic() + seconds
    while time.monotonic() < deadline:
        text = log.read_text() if log.exists() else ""
        if is_so(text):
            return text
        time.sleep(0.2)
    raise AssertionError(f"{slurm.state(job)}: {text[-3000:]}")


def test_a_job_is_queued_again_and_goes_on_in_its_epoch_on_other_nodes(slurm: Cluster) -> None:
    pytest.importorskip("torch")
    options = ["--batch-size=8", "--min-samples=64", "--save-every=20", "--steps"]
    job = submit(slurm, *options, "1000000")
    first = wait_for(slurm, job, lambda text: text.count("epoch ") >= 2)
    for number in range(2):
        assert f"node {number} of 2 (they count from 0), by Slurm (SLURM_NODEID" in first
    slurm.run("scancel", "--signal=USR1", "--batch", job)  # as at the end of its time
    wait_for(slurm, job, lambda text: slurm.state(job) == "PENDING")
    slurm.run("scontrol", "update", "nodename=n0", "state=drain", "reason=test")
    text = wait_for(slurm, job, lambda text: "resumes after step" in text)
    step, epoch = re.findall(r"ends at step (\d+) in epoch (\d+)", text)[-1]
    assert f"resumes after step {step} in epoch {epoch}" in text
    assert "DUE TO JOB REQUEUE" in text
    after = text.index("resumes after")
    more = wait_for(slurm, job, lambda text: "epoch " in text[after + 40 :])
    assert "Error" not in more[after:]

    caches = [slurm.disk_of(node) / f"growcache-{job}" for node in ("n1", "n2")]
    assert [read_status(cache).samples > 64 for cache in caches] == [True, True]


def test_a_job_that_ends_leaves_nothing_on_the_disks(slurm: Cluster) -> None:
    pytest.importorskip("torch")
    job = submit(slurm, "--batch-size=8", "--min-samples=64", "--steps=30")
    wait_for(slurm, job, lambda text: slurm.state(job) == "COMPLETED")
    assert [list(slurm.disk_of(node).iterdir()) for node in NODES] == [[]] * len(NODES)


def test_a_cancelled_job_leaves_nothing_on_the_disks(slurm: Cluster) -> None:
    pytest.importorskip("torch")
    job = submit(slurm, "--batch-size=8", "--min-samples=64", "--steps=1000000")
    wait_for(slurm, job, lambda text: text.count("epoch ") >= 1)
    slurm.run("scancel", job)
    wait_for(slurm, job, lambda text: slurm.state(job) == "CANCELLED")
    left = [path for node in NODES for path in slurm.disk_of(node).iterdir()]
    assert not left


def test_a_wrong_configuration_ends_the_job(slurm: Cluster) -> None:
    job = submit(slurm, "--steps=30")
    (slurm.folder / "growcache.yaml").write_text("source: {}\n")
    wait_for(slurm, job, lambda text: slurm.state(job) == "FAILED")
