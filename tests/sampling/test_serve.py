"""`growcache.serve`: the service as a child of the trainer."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import growcache
from growcache.errors import CacheBusyError, ConfigError, FingerprintError, SamplingError
from tests.sampling.services import (
    drawn,
    make_source,
    service,
    status,
    wait_until,
    write_config,
)
from tests.sampling.test_service import alive


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_source(tmp_path_factory.mktemp("remote") / "objects", 60)


def test_the_service_lives_as_long_as_the_block(tmp_path: Path, url: str) -> None:
    config = write_config(tmp_path / "cache.yaml", url)
    with growcache.serve(config) as checked:
        wait_until(lambda: drawn(checked.cache.path) > 0)
        pid = status(checked.cache.path).pid
        assert pid is not None
        assert pid != os.getpid()
    assert not alive(pid)
    assert status(tmp_path / "cache").state == "stopped"
    assert not list((tmp_path / "cache" / "incoming").iterdir())


@pytest.mark.mutant(29, "growcache.sampling.serve:served", "_joins(config)", "False")
def test_a_running_service_is_joined_and_left_running(tmp_path: Path, url: str) -> None:
    config = write_config(tmp_path / "cache.yaml", url)
    with service(config) as running:
        wait_until(lambda: drawn(tmp_path / "cache") == 60)
        with growcache.serve(config):
            assert status(tmp_path / "cache").pid == running.pid
        time.sleep(0.3)
        assert running.poll() is None


def test_a_started_service_runs_until_it_is_stopped(tmp_path: Path, url: str) -> None:
    config = write_config(tmp_path / "cache.yaml", url)
    started = growcache.start(config)
    try:
        wait_until(lambda: started.status().drawn == 60)
        assert growcache.start(config) is started  # the cell was run again
        assert started.running
        pid = started.status().pid
        assert pid is not None
        with pytest.raises(FingerprintError, match=r"sampling\.seed"):
            growcache.start(growcache.load_config(config, ["sampling.seed=5"]))
    finally:
        started.stop()
    assert not alive(pid)
    assert repr(started) == f"<growcache service of {tmp_path / 'cache'}: stopped>"
    started.stop()


def test_a_started_service_ends_with_its_program(tmp_path: Path, url: str) -> None:
    config = write_config(tmp_path / "cache.yaml", url)
    program = "import sys, growcache; print(growcache.start(sys.argv[1]).status().pid)"
    command = [sys.executable, "-W", "error", "-c", program, str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert not alive(int(ended.stdout))
    assert ended.stderr == ""
    assert status(tmp_path / "cache").state == "stopped"


def test_a_service_of_another_configuration_is_not_joined(tmp_path: Path, url: str) -> None:
    config = write_config(tmp_path / "cache.yaml", url)
    with service(config):
        wait_until(lambda: drawn(tmp_path / "cache") == 60)
        other = growcache.load_config(config, ["sampling.seed=5"])
        with pytest.raises(FingerprintError, match=r"sampling\.seed"), growcache.serve(other):
            pass


def test_what_is_wrong_is_raised_in_the_trainer(tmp_path: Path, url: str) -> None:
    config = write_config(tmp_path / "cache.yaml", url, source={"format": "nypy"})
    with pytest.raises(ConfigError, match="npy"), growcache.serve(config):
        pass
    assert not isinstance(ConfigError, CacheBusyError)


@pytest.mark.parametrize("objects", [1, 4000])
def test_a_child_that_dies_at_import_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objects: int
) -> None:
    """With a short config, and with one that the pipe does not hold."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text("import os; os._exit(7)")
    monkeypatch.syspath_prepend(broken)
    urls = [f"/data/objects/{number:020}.npy" for number in range(objects)]
    config = write_config(tmp_path / "cache.yaml", "", source={"url": urls})
    with (
        pytest.raises(SamplingError, match=r"at its start \(exit code 7\).* -m growcache"),
        growcache.serve(config),
    ):
        pass


def test_a_killed_service_is_told_of_once(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = write_config(tmp_path / "cache.yaml", url)
    with caplog.at_level(logging.WARNING, "growcache"), growcache.serve(config):
        wait_until(lambda: drawn(tmp_path / "cache") > 0)
        pid = status(tmp_path / "cache").pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: caplog.records)
    (record,) = caplog.records
    assert "killed by SIGKILL" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_an_end_as_wished_is_no_news(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = write_config(tmp_path / "cache.yaml", url)
    with caplog.at_level(logging.WARNING, "growcache"), growcache.serve(config):
        pass
    assert not caplog.records


TRAINER = """
import sys, time, growcache
with growcache.serve(sys.argv[1]):
    print("serving", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_trainers_end_ends_the_service(
    tmp_path: Path, url: str, number: signal.Signals
) -> None:
    """No guard for ``__main__`` is needed, and nothing outlives a killed trainer."""
    config = write_config(tmp_path / "cache.yaml", url)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAINER))
    trainer = subprocess.Popen(
        [sys.executable, str(script), str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"serving\n"
    wait_until(lambda: drawn(tmp_path / "cache") > 0)
    pid = status(tmp_path / "cache").pid
    assert pid is not None
    trainer.send_signal(number)
    trainer.wait(20)
    trainer.stdout.close()
    wait_until(lambda: not alive(pid), 15)
