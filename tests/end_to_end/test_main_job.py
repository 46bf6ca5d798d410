"""S3 → a cache a tenth of the dataset → PyTorch and Keras, all alive at once (issue: end to end)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from growcache.cache.check import check
from growcache.cache.files import allocated_tree
from tests.end_to_end.recordings import COUNT, SAMPLE_BYTES, as_npy, key
from tests.sampling.services import drawn, service, status, wait_until, write_config
from tests.servers import Bucket
from tests.servers.ceph import missing

EPOCHS = 10
TURNOVERS = 5
MAX_BYTES = COUNT * SAMPLE_BYTES // 10
CAPACITY = MAX_BYTES // SAMPLE_BYTES  # samples, were there nothing but samples

pytestmark = [pytest.mark.torch, pytest.mark.tensorflow]

# Every day on one of them: Ceph where it is installed.
MOTO = pytest.param("moto", marks=() if missing() else pytest.mark.slow)
CEPH = pytest.param("ceph", marks=pytest.mark.ceph)


@pytest.fixture
def own_file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds the cache and nothing else."""
    mount = tmp_path / "disk"
    mount.mkdir()
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={2 * MAX_BYTES}", "tmpfs", str(mount)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounting.returncode:
        print("no own file system for the cache:", mounting.stderr.strip())
        yield mount
        return
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


class Watch(threading.Thread):
    """Looks at the disk from outside, as often as it can, and keeps the worst it saw."""

    def __init__(self, mount: Path) -> None:
        super().__init__(daemon=True)
        self.worst = 0
        self.looks = 0
        self._mount = mount
        self._own = os.path.ismount(mount)
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.002):
            self.worst = max(self.worst, self._used())
            self.looks += 1

    def _used(self) -> int:
        if not self._own:
            return allocated_tree(self._mount)
        found = os.statvfs(self._mount)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def stop(self) -> None:
        self._ended.set()
        self.join()


def train(module: str, cache: Path, until: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            f"tests.end_to_end.{module}",
            str(cache),
            str(EPOCHS),
            str(until),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        cwd=Path(__file__).parents[2],
    )


def result(process: subprocess.Popen[str]) -> dict[str, object]:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-2000:]
    found: dict[str, object] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.parametrize("s3", [MOTO, CEPH], indirect=True)
def test_two_frameworks_train_while_the_cache_grows_and_evicts(
    s3: Bucket, own_file_system: Path, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(8) as uploads:
        list(uploads.map(lambda n: s3.put(key(n), as_npy(n)), range(COUNT)))
    cache = own_file_system / "cache"
    config = write_config(
        tmp_path / "job.yaml",
        s3.url("recordings/**/*.npy"),
        source={"storage_options": s3.storage_options},
        sampling={
            "workers": 2,
            "shard_samples": "auto",
            "transform": "tests.end_to_end.recordings:label",
        },
        cache={"path": str(cache), "max_bytes": MAX_BYTES},
    )
    watch = Watch(own_file_system)
    watch.start()
    with service(config) as process:
        wait_until(lambda: drawn(cache) > 0)
        enough = tmp_path / "enough"
        trainers = [train(name, cache, enough) for name in ("train_torch", "train_keras")]
        while all(trainer.poll() is None for trainer in trainers):
            assert process.poll() is None, process.communicate()[1]
            if status(cache).evicted_samples >= TURNOVERS * CAPACITY:
                enough.touch()  # both trained on it all the while
            time.sleep(0.1)
        torch_saw, keras_saw = map(result, trainers)
        found = status(cache)
        process.terminate()
        process.wait(15)
        watch.stop()
        assert process.returncode == 0
    print(json.dumps({"torch": torch_saw, "keras": keras_saw, "worst": watch.worst}))
    assert torch_saw["wrong"] == keras_saw["wrong"] == 0
    assert torch_saw["skipped"] == 0
    sizes = torch_saw["sizes"]
    assert isinstance(sizes, list)
    assert len(sizes) >= EPOCHS
    assert min(sizes) > 0
    assert found.evicted_samples >= TURNOVERS * CAPACITY
    assert found.holes == 0
    assert watch.looks > 500
    assert found.samples * SAMPLE_BYTES < watch.worst <= MAX_BYTES + _empty(own_file_system)
    assert [f for f in check(cache) if f.severity == "error"] == []


def _empty(mount: Path) -> int:
    """Blocks that the mount point itself takes, which are not the cache's."""
    return mount.stat().st_blocks * 512 if os.path.ismount(mount) else 4096
