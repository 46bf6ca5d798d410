"""A hanging transform is reported after its timeout, with the sample that it was called with."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from growcache.numpy import EpochLoader
from tests.accidents.commands import (
    growcache,
    running,
    wait_until,
    write_config,
    write_objects,
)

LATE = re.compile(
    r"transform has run for \d+ s on sample (\d+) of pass 0, "
    r"\S*00005\.npy \[7:8\] \(shard \d+:\d+\)"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    source = {"url": write_objects(folder / "in", count=8), "format": "npy"}
    config = write_config(folder / "c.yaml", {**source, "options": {"axis": 0}})
    assert growcache("run", config, "--until-full").returncode == 0
    return config.with_suffix("")


def test_in_threads(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "growcache")
    goes_on = threading.Event()

    def hangs(sample: dict[str, Any]) -> dict[str, Any]:
        if (sample["x"][0], sample["x"][1]) == (5, 7):
            goes_on.wait(300)
        return sample

    with EpochLoader(
        cache, batch_size=16, min_samples=1, transform=hangs, timeout_seconds=0.5
    ) as loader:
        trained = threading.Thread(target=lambda: [None for _ in loader])
        trained.start()
        wait_until(lambda: LATE.search(caplog.text))
        assert "timeout_seconds (0.5)" in caplog.text
        goes_on.set()  # the transform was only slow, so no sample is lost
        trained.join(300)
        assert loader.report.samples == 128


@pytest.mark.slow
def test_in_processes(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "growcache")
    flag = tmp_path / "goes on"

    def hangs(sample: dict[str, Any]) -> dict[str, Any]:
        import time

        while (sample["x"][0], sample["x"][1]) == (5, 7) and not flag.exists():
            time.sleep(0.01)
        return sample

    options: dict[str, Any] = {"transform": hangs, "num_workers": 1, "timeout_seconds": 0.5}
    with EpochLoader(cache, batch_size=16, min_samples=1, **options) as loader:
        trained = threading.Thread(target=lambda: [None for _ in loader])
        trained.start()
        wait_until(lambda: LATE.search(caplog.text))
        flag.touch()
        trained.join(300)
        assert loader.report.samples == 128


@pytest.mark.slow
def test_many_short_calls_are_not_one_long_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process is given large samples one at a time, so each call has its own timeout."""
    caplog.set_level(logging.WARNING, "growcache")
    url = write_objects(tmp_path / "in", count=4, rows=4, columns=1 << 16)
    source = {"url": url, "format": "npy", "options": {"axis": 0}}
    config = write_config(tmp_path / "c.yaml", source)
    assert growcache("run", config, "--until-full").returncode == 0

    def short(sample: dict[str, Any]) -> dict[str, Any]:
        import time

        time.sleep(0.15)
        return sample

    options: dict[str, Any] = {"transform": short, "num_workers": 1, "timeout_seconds": 0.6}
    with EpochLoader(config.with_suffix(""), batch_size=4, min_samples=1, **options) as loader:
        assert len([None for _ in loader]) == 4
    assert "transform has run for" not in caplog.text


@pytest.mark.slow
def test_in_samplers(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(
        "import time\n"
        "def hangs(sample, origin):\n"
        "    while origin.key.endswith('00005.npy') and origin.start == 7:\n"
        "        time.sleep(0.1)\n"
        "    return sample\n"
    )
    source = {"url": write_objects(tmp_path / "in", count=8), "format": "npy"}
    sampling = {"transform": "hanging:hangs", "timeout_seconds": 0.5}
    config = write_config(
        tmp_path / "c.yaml", {**source, "options": {"axis": 0}}, sampling=sampling
    )
    with running(config, cwd=tmp_path) as service:
        named = r"in one call of sampling.transform hanging:hangs on \S*00005\.npy \[7:8\]"
        # The first restart names the sample; a few more of them end the service.
        service.wait_for(lambda now: any(re.search(named, e) for e in now["last_errors"]))
