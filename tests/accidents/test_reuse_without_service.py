"""`max_reuse` with `on_max_reuse: wait` on a cache whose service has stopped."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from growcache.numpy import EpochLoader
from tests.accidents.commands import (
    growcache,
    rows_of,
    running,
    status,
    wait_for_status,
    wait_until,
    write_config,
    write_objects,
)


def stopped_cache(folder: Path, **cache: Any) -> Path:
    """Return the config of a partly filled cache whose service has stopped."""
    url = write_objects(folder / "in", count=40, rows=64, columns=256)
    config = write_config(folder / "c.yaml", rows_of(url), cache=cache)
    assert growcache("run", config, "--samples", "64").returncode == 0
    return config


class Trainer:
    """A training loop in a thread, because the loop may have to wait."""

    def __init__(self, cache: Path, epochs: int) -> None:
        self.epochs = 0
        self.loader = EpochLoader(cache, batch_size=16, min_samples=1)
        self.thread = threading.Thread(target=self._train, args=(epochs,), daemon=True)
        self.thread.start()

    def _train(self, epochs: int) -> None:
        for _ in range(epochs):
            for _ in self.loader:
                pass
            self.epochs += 1

    def close(self) -> None:
        """End the loop at any point."""
        self.loader.close()


@pytest.mark.slow
def test_it_holds_and_says_what_it_waits_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "growcache")
    config = stopped_cache(tmp_path, max_reuse=2, on_max_reuse="wait")
    cache = config.with_suffix("")
    first = Trainer(cache, 1)  # uses by an earlier loader count too
    first.thread.join(300)
    first.close()
    second = Trainer(cache, 3)
    wait_until(lambda: "waiting for new samples" in caplog.text)
    assert second.epochs == 1
    assert "2 times" in caplog.text
    assert "start it with: growcache run" in caplog.text
    with running(config):  # counts the uses since, and adds samples
        second.thread.join(300)
        assert second.epochs == 3
        second.close()
        wait_for_status(cache, lambda found: found["reuse"] > 0 and not found["leases"])
        wait_until(lambda: not list((cache / "leases").glob("*.lease")))


@pytest.mark.slow
def test_without_a_limit_nothing_stays_behind(tmp_path: Path) -> None:
    cache = stopped_cache(tmp_path).with_suffix("")
    trainer = Trainer(cache, 5)
    trainer.thread.join(300)
    trainer.close()
    assert trainer.epochs == 5
    assert not list((cache / "leases").glob("*.lease"))
    assert status(cache)["leases"] == []
