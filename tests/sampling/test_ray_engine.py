"""Samplers on a real Ray cluster: the same bytes, and nothing lost whatever dies."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from growcache.cache.status import read_status
from growcache.cache.status_model import Status
from growcache.errors import CacheMissingError
from growcache.numpy import EpochLoader
from tests.matrix.case import Case
from tests.sampling.ray_clusters import RayCluster, ray_cluster
from tests.sampling.services import make_source, run, service, wait_until, write_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as found:
        yield found


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_source(tmp_path_factory.mktemp("objects") / "objects")


def on_ray(cluster: RayCluster, workers: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "engine": "ray",
        "workers": 0,
        "ray": {"address": cluster.address, "workers": workers, **more},
    }


def status(cache: Path) -> Status:
    """Return the status of a cache that need not exist yet."""
    try:
        return read_status(cache)
    except CacheMissingError:
        return Status()


def digests(cache: Path) -> dict[str, str]:
    """Return the digests of the files of all shards; sidecars say no time."""
    files = (path for path in (cache / "shards").rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ------------------------------------------------------------------------------- bytes


def formats() -> dict[str, Case]:
    """Return the first case of each format in the matrix of writers."""
    from tests.matrix.registry import all_cases

    found: dict[str, Case] = {}
    for case in all_cases():
        if not case.refused:
            found.setdefault(case.format, case)
    return found


FORMATS = formats()


@pytest.mark.filterwarnings("ignore")  # of the libraries that write
@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_are_those_of_the_local_engine(
    name: str, cluster: RayCluster, tmp_path: Path
) -> None:
    case, files = FORMATS[name], tmp_path / "files"
    for module in case.needs:
        pytest.importorskip(module)
    files.mkdir()
    case.write(files)
    source = {
        "url": f"{files}/{case.url}",
        "format": case.format,
        "options": dict(case.options),
        **json.loads(json.dumps(dict(case.source)).replace("{files}", str(files))),
    }
    found = []
    for engine, sampling in (("local", {"workers": 1}), ("ray", on_ray(cluster, 1))):
        config = tmp_path / f"{engine}.yaml"
        cache = {"path": str(tmp_path / engine), "max_bytes": "100MB", "min_free": 0}
        settings = {"source": source, "sampling": {**case.sampling, **sampling}, "cache": cache}
        config.write_text(yaml.safe_dump(settings))
        code, errors = run(config, "--until-full", seconds=100)
        assert code == 0, errors
        found.append(digests(tmp_path / engine))
    assert found[0] == found[1]
    assert found[0]


MODULE = """
def transform(sample, rng):
    return {"x": sample["x"] + rng.random(dtype="f4"), "n": helper(sample["x"])}

def helper(x):
    return x.sum()
"""


def test_code_and_cache_go_with_the_engine(
    cluster: RayCluster, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache changes engines, because its fingerprint has none."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "mine_alone.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    transform = {"transform": "mine_alone:transform"}
    both = write_config(tmp_path / "both.yaml", url, sampling=transform)
    code, errors = run(both, "--samples", "40")
    assert code == 0, errors
    mine = write_config(tmp_path / "both.yaml", url, sampling={**transform, **on_ray(cluster)})
    code, errors = run(mine, "--until-full")
    assert code == 0, errors
    other = write_config(tmp_path / "other.yaml", url, sampling=transform)
    run(other, "--until-full")
    assert digests(tmp_path / "both") == digests(tmp_path / "other")


class Squares:
    """A Dataset of this module, which no node can import."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(8, index * index, np.int64)}


def test_a_dataset_of_a_program(cluster: RayCluster, tmp_path: Path) -> None:
    loader = EpochLoader.from_dataset(
        Squares(),
        tmp_path / "cache",
        max_bytes="20MB",
        config={"sampling": on_ray(cluster)},
        batch_size=10,
        min_samples=200,
    )
    with loader:
        seen = {int(x) for batch in loader for x in batch["x"][:, 0]}
    assert seen == {n * n for n in range(200)}


# ------------------------------------------------------------------------------ failures


def slow_config(path: Path, url: str, cluster: RayCluster, **more: Any) -> Path:
    """A config whose run takes some seconds."""
    sampling = {**on_ray(cluster), "max_bytes_per_second": 100_000, **more}
    return write_config(path, url, sampling=sampling)


def pids(cache: Path) -> list[int]:
    states = status(cache).worker_states
    return [one.pid for one in states if one.pid and one.node]


def check_whole(cache: Path, objects: int = 120) -> None:
    found = status(cache)
    assert found.complete
    assert found.samples == objects
    assert not list((cache / "incoming").iterdir())


def kill_some(cache: Path, find: Callable[[], list[int]], times: int) -> None:
    """Kill one of the processes again and again, whatever they do."""
    for _ in range(times):
        wait_until(lambda: status(cache).complete or find())
        time.sleep(0.3)
        for pid in find()[:1]:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: pid not in find(), 30)


def test_samplers_may_be_killed(cluster: RayCluster, url: str, tmp_path: Path) -> None:
    config, cache = slow_config(tmp_path / "c.yaml", url, cluster), tmp_path / "c"
    with service(config, "--until-full") as process:
        wait_until(lambda: len(pids(cache)) == 2)
        assert len({one.node for one in status(cache).worker_states}) == 2
        kill_some(cache, lambda: pids(cache), 4)
        assert process.wait(120) == 0
    check_whole(cache)


def writers(service_pid: int) -> list[int]:
    children = psutil.Process(service_pid).children()
    return [child.pid for child in children if "ray-writer" in child.cmdline()]


def test_the_writer_may_be_killed(cluster: RayCluster, url: str, tmp_path: Path) -> None:
    config, cache = slow_config(tmp_path / "c.yaml", url, cluster), tmp_path / "c"
    with service(config, "--until-full") as process:
        wait_until(lambda: status(cache).samples > 8)
        (writer,) = writers(process.pid)
        samplers = pids(cache)
        os.kill(writer, signal.SIGKILL)
        wait_until(lambda: not any(map(psutil.pid_exists, samplers)), 30)
        assert process.wait(120) == 0
    check_whole(cache)


def test_no_sampler_outlives_a_killed_supervisor(
    cluster: RayCluster, url: str, tmp_path: Path
) -> None:
    config, cache = slow_config(tmp_path / "c.yaml", url, cluster), tmp_path / "c"
    with service(config) as process:
        wait_until(lambda: status(cache).samples > 8)
        left = [*pids(cache), *writers(process.pid)]
        process.kill()
        wait_until(lambda: not any(map(psutil.pid_exists, left)), 30)
    run(config, "--until-full", seconds=100)
    check_whole(cache)


def test_a_node_may_be_lost(cluster: RayCluster, url: str, tmp_path: Path) -> None:
    node = cluster.add_node()
    config = slow_config(tmp_path / "c.yaml", url, cluster)
    cache = tmp_path / "c"
    with service(config, "--until-full", "--set", "sampling.ray.workers=3") as process:
        wait_until(lambda: len(pids(cache)) == 3)
        cluster.remove_node(node)
        assert process.wait(150) == 0
    check_whole(cache)


def test_the_head_may_be_lost(url: str, tmp_path: Path) -> None:
    patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    with ray_cluster(nodes=1, more=patience) as cluster:
        limit = {"max_bytes_per_second": 10_000}  # all takes 50 seconds
        config, cache = slow_config(tmp_path / "c.yaml", url, cluster, **limit), tmp_path / "c"
        with service(config, "--set", "sampling.ray.workers=1"):
            wait_until(lambda: status(cache).samples > 4)
            cluster.kill_head()
            wait_until(lambda: f"Ray at {cluster.address} to answer" in waits_for(cache))
    with ray_cluster(nodes=1) as cluster:  # the cache goes on with another cluster
        config = write_config(tmp_path / "c.yaml", url, sampling=on_ray(cluster, 1))
        code, errors = run(config, "--until-full", seconds=100)
        assert code == 0, errors
    check_whole(cache)


def test_the_copy_of_a_slow_permit_wins(cluster: RayCluster, url: str, tmp_path: Path) -> None:
    """A sampler is stopped; far sooner than it counts as stalled, another has filled its groups."""
    config = slow_config(tmp_path / "c.yaml", url, cluster, timeout_seconds=100)
    cache = tmp_path / "c"
    with service(config, "--until-full") as process:
        wait_until(lambda: len(pids(cache)) == 2 and status(cache).samples > 40)
        stopped = pids(cache)[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert process.wait(100) == 0
        finally:
            if psutil.pid_exists(stopped):
                os.kill(stopped, signal.SIGCONT)
    check_whole(cache)


RANDOM = """
import os, time
import numpy as np

def transform(sample):
    return {"x": np.frombuffer(os.urandom(64), "u1")}
"""


def test_copies_that_differ_end_the_run_and_name_both_nodes(
    cluster: RayCluster, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "not_a_function.py").write_text(RANDOM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    more = {"transform": "not_a_function:transform", "timeout_seconds": 100}
    config = slow_config(tmp_path / "c.yaml", url, cluster, **more)
    cache = tmp_path / "c"
    with service(config) as process:
        wait_until(lambda: len(pids(cache)) == 2 and status(cache).samples > 40)
        slow = pids(cache)[0]
        os.kill(slow, signal.SIGSTOP)
        time.sleep(25)  # as long as it takes to be slow, and for a copy to arrive
        os.kill(slow, signal.SIGCONT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    nodes = [one for one in errors.split() if one.startswith(os.uname().nodename)]
    assert "have different bytes" in errors
    assert len(set(nodes)) >= 2
    assert "numpy" in errors


# ----------------------------------------------------------------- what ends or waits


def test_other_versions_on_a_node_end_the_run(
    cluster: RayCluster, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other" / "numpy-1.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(other.parent))  # of this machine alone
    config = write_config(tmp_path / "c.yaml", url, sampling=on_ray(cluster))
    code, errors = run(config, seconds=100)
    assert code == 1
    assert f"numpy is 1.0 on this machine and {np.__version__} on " in errors


def test_a_group_that_the_object_store_cannot_take_ends_the_run(
    cluster: RayCluster, url: str, tmp_path: Path
) -> None:
    sampling = on_ray(cluster, in_flight_bytes=1000)
    config = write_config(tmp_path / "c.yaml", url, sampling=sampling)
    code, errors = run(config, seconds=100)
    assert code == 2
    assert "sampling.ray.in_flight_bytes: one group of shards takes" in errors


def test_budgets_hold_over_all_samplers(cluster: RayCluster, url: str, tmp_path: Path) -> None:
    sampling = {**on_ray(cluster), "max_egress": 200_000}
    config = write_config(tmp_path / "c.yaml", url, sampling=sampling)
    code, errors = run(config, "--until-full", seconds=100)
    assert code == 0, errors
    found = status(tmp_path / "c")
    assert 150_000 < found.egress_bytes <= 200_000
    assert 0 < found.samples < 60


def test_no_node_has_what_samplers_need(cluster: RayCluster, url: str, tmp_path: Path) -> None:
    sampling = on_ray(cluster, resources={"camera": 1})
    config = write_config(tmp_path / "c.yaml", url, sampling=sampling)
    with service(config):
        wait_until(lambda: "a node of Ray with room" in waits_for(tmp_path / "c"))
        assert "camera 1" in waits_for(tmp_path / "c")


def waits_for(cache: Path) -> str:
    found = status(cache)
    return (found.waiting_for or "") if found.state == "waiting" else ""


def test_local_samplers_go_on_without_ray(url: str, tmp_path: Path) -> None:
    ray = {"engine": "ray", "ray": {"address": "127.0.0.1:9"}}
    lone = write_config(tmp_path / "lone.yaml", url, sampling={"workers": 0, **ray})
    with service(lone):
        wait_until(lambda: "Ray at 127.0.0.1:9 to answer" in waits_for(tmp_path / "lone"))
        assert status(tmp_path / "lone").waiting_reason == "cluster"
    both = write_config(tmp_path / "both.yaml", url, sampling={"workers": 1, **ray})
    code, errors = run(both, "--until-full", seconds=60)
    assert code == 0, errors
    check_whole(tmp_path / "both")


def processes_of_ray() -> set[int]:
    return {
        p.pid
        for p in psutil.process_iter(["name"])
        if p.info["name"] in ("raylet", "gcs_server")
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_ray_of_its_own_goes_with_the_service(
    number: signal.Signals, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tempfile.TemporaryDirectory(prefix="gc-")  # a short one
    monkeypatch.setenv("TMPDIR", folder.name)
    before = processes_of_ray()
    sampling = {"engine": "ray", "workers": 0, "ray": {"address": "local", "workers": 1}}
    config = write_config(tmp_path / "c.yaml", url, sampling=sampling)
    with service(config) as process:
        wait_until(lambda: status(tmp_path / "c").samples == 120)
        assert processes_of_ray() > before
        process.send_signal(number)
        process.wait(30)
        wait_until(lambda: processes_of_ray() <= before, 30)
    assert not list(Path(folder.name).iterdir())
    folder.cleanup()
