"""The doctor measures real folders and a real store, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.cli.cli import main
from growcache.config import CacheConfig
from growcache.config_text import load_config
from growcache.monitor import doctor, doctor_measure, doctor_store, plan_timing
from growcache.monitor.doctor_measure import core_count, measure_disk
from growcache.monitor.doctor_store import measure_store


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_store, "WINDOW_SECONDS", 0.2)
    monkeypatch.setattr(doctor_measure, "MOST_WRITTEN_BYTES", 8 << 20)
    monkeypatch.setattr(doctor, "SLOW_DISK_BYTES_PER_SECOND", 0.0)  # other tests write as well


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for i in range(4):
        np.save(tmp_path / "in" / f"{i}.npy", np.zeros((64, 16), "<f4"))
    (tmp_path / "c.yaml").write_text(
        f"source: {{url: '{tmp_path}/in/*.npy', options: {{axis: 0}}}}\n"
        f"cache: {{path: '{tmp_path}/cache', max_bytes: 50MB}}\n"
    )
    return tmp_path


def run_doctor(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, Any]:
    code = main(["doctor", str(folder / "c.yaml"), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def test_a_healthy_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.rglob("*"))
    code, found = run_doctor(folder, capsys, "--consume", "10/s")
    assert (code, found["ok"]) == (0, True), found["findings"]
    store, disk = found["measured"]["stores"][0], found["measured"]["disk"]
    assert store["objects"] == 4
    assert store["samples"] > 100
    assert store["sample_bytes"] == 64
    assert disk["written_bytes"] == 8 << 20
    assert disk["measured_in"] == str(folder)
    assert found["limit"]["resource"] == "training"
    assert sorted(folder.rglob("*")) == before  # not even the cache's folder


def test_visits_are_made_where_a_transform_takes_the_time(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_timing, "TIMED_SECONDS", 0.2)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "slow_code.py").write_text(
        "import time\ndef wait(sample):\n    time.sleep(0.0005)\n    return sample\n"
        "def fail(sample):\n    raise ValueError('no')\n"
    )
    few = ["--set", "sampling.workers=1", "--set", "sampling.concurrency=2"]
    _, found = run_doctor(folder, capsys, *few, "--set", "sampling.transform=slow_code:wait")
    assert found["limit"]["resource"] == "cpu"
    assert found["measured"]["stores"][0]["samples"] > 0
    code, found = run_doctor(folder, capsys, "--set", "sampling.transform=slow_code:fail")
    assert code == 1
    assert any("raised ValueError" in one["found"] for one in found["findings"])


def test_findings_as_text_are_a_line_each(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "cache").mkdir()
    (folder / "cache" / "thesis.tex").touch()
    assert main(["doctor", str(folder / "c.yaml")]) == 1
    lines = capsys.readouterr().out.splitlines()
    (wrong,) = [line for line in lines if line.startswith("wrong")]
    assert "is not a growcache cache" in wrong
    assert "thesis.tex" in wrong
    assert lines[-1] == "1 wrong"
    assert lines[-2].startswith("limit  ")


@pytest.mark.parametrize(
    ("url", "words"), [("none/*.npy", "no folder"), ("empty/*.npy", "found no object at")]
)
def test_a_source_without_objects(
    folder: Path, capsys: pytest.CaptureFixture[str], url: str, words: str
) -> None:
    (folder / "empty").mkdir()
    code, found = run_doctor(folder, capsys, "--set", f"source.url={folder}/{url}")
    (wrong,) = [one for one in found["findings"] if one["level"] == "wrong"]
    assert code == 1
    assert wrong["about"] == "store"
    assert words in wrong["found"]
    assert found["limit"]["resource"] == "unknown"


@pytest.mark.parametrize(
    ("count", "code", "level", "words"),
    [("3", 0, "ok", "node 1 of 3 (they count from 0), by torchrun"), ("", 1, "wrong", "not")],
)
def test_nodes_by_their_launcher(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    count: str,
    code: int,
    level: str,
    words: str,
) -> None:
    monkeypatch.setenv("GROUP_RANK", "1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", count)
    given, found = run_doctor(folder, capsys, "--set", "sampling.nodes=auto")
    (node,) = [one for one in found["findings"] if one["about"] == "nodes"]
    assert (given, node["level"]) == (code, level), found["findings"]
    assert words in node["found"]
    assert found["measured"]["stores"][0]["samples"] > 100  # as on a single machine


def test_objects_of_another_format(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_doctor(
        folder, capsys, "--set", "source.format=npz", "--set", "source.options={}"
    )
    assert code == 1
    (wrong,) = [one for one in found["findings"] if one["level"] == "wrong"]
    assert "see source.format: npy" in wrong["found"]


@pytest.mark.parametrize("rate", ["-1", "fast", "0", "5 GB/s"])
def test_a_rate_that_is_none(
    folder: Path, capsys: pytest.CaptureFixture[str], rate: str
) -> None:
    assert main(["doctor", str(folder / "c.yaml"), f"--consume={rate}"]) == 2
    assert "samples per second" in capsys.readouterr().err


def test_few_open_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    facts = doctor_measure.measure_machine(load_config(folder / "c.yaml"), [])
    assert (facts.files_limit, facts.files_hard_limit) == (64, 64)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    found = measure_disk(CacheConfig(path=tmp_path / "cache"))
    assert not found.may_write


def test_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = measure_disk(CacheConfig(path=tmp_path / "file" / "cache"))
    assert found.foreign == f"{tmp_path}/file is a file"


def test_a_quota_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert core_count(tmp_path) == min(2, len(os.sched_getaffinity(0)))
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert core_count(tmp_path) == len(os.sched_getaffinity(0))


class Forbids(BaseHTTPRequestHandler):
    """Refuses everything, an hour ago."""

    def date_time_string(self, timestamp: float | None = None) -> str:
        import time

        return formatdate(time.time() - 3600, usegmt=True)

    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def forbids() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Forbids) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_store_that_refuses_and_whose_clock_is_an_hour_behind(forbids: str) -> None:
    config = load_config({"source": {"url": f"{forbids}/a/1.npy"}})
    found = measure_store(config, config.sources[0])
    assert found.trouble == "refused"
    assert found.clock_skew_seconds == pytest.approx(-3600, abs=2)
