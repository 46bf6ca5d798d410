"""Loaders with a real service: small populations, sets that are fixed for validation."""

from __future__ import annotations

import threading
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import growcache
from growcache.cache.index.reader import read_index
from growcache.errors import CacheError, ConfigError
from growcache.numpy import EpochLoader
from tests.sampling.services import make_source, run, service, write_config


def first_values(loader: EpochLoader) -> list[list[float]]:
    """Per batch what names its samples' objects."""
    return [batch["x"][:, 0, 0].tolist() for batch in loader]


def test_min_samples_is_capped_and_a_complete_cache_goes_on_delivering(tmp_path: Path) -> None:
    config = write_config(tmp_path / "cache.yaml", make_source(tmp_path / "data", 40))
    with (
        service(config) as process,
        EpochLoader(tmp_path / "cache", batch_size=10, min_samples=10**6) as loader,
    ):
        # The whole population is waited for, and no more.
        assert sorted(chain(*first_values(loader))) == list(range(40))
        drawn = read_index(tmp_path / "cache").totals.drawn
        for _ in range(3):
            assert sorted(chain(*first_values(loader))) == list(range(40))
        assert process.poll() is None
        view = read_index(tmp_path / "cache")
        assert view.complete
        assert view.totals.drawn == drawn == 40
        assert loader.report.coverage_samples == 1.0
        assert loader.report.coverage_objects == 1.0


def test_a_fixed_set_is_waited_for_and_then_always_the_same(tmp_path: Path) -> None:
    url = make_source(tmp_path / "data", 60)
    cache: dict[str, Any] = {
        "path": str(tmp_path / "val"),
        "max_samples": 24,
        "eviction": "none",
    }
    config = write_config(tmp_path / "val.yaml", url, cache=cache)
    loader = EpochLoader(tmp_path / "val", batch_size=10, fixed=True)
    epochs: list[list[list[float]]] = []
    reader = threading.Thread(target=lambda: epochs.append(first_values(loader)))
    reader.start()
    time.sleep(0.3)
    assert not epochs
    code, errors = run(config, "--until-full")
    assert code == 0, errors
    reader.join(300)
    with loader:
        assert len(loader) == 3
        epochs += [first_values(loader), first_values(loader)]
    with EpochLoader(tmp_path / "val", batch_size=10, fixed=True, seed=9) as another:
        epochs.append(first_values(another))
    assert [len(batch) for batch in epochs[0]] == [10, 10, 4]
    assert len(set(chain(*epochs[0]))) == 24
    assert all(epoch == epochs[0] for epoch in epochs)


def test_a_fixed_loader_refuses_a_cache_that_evicts(tmp_path: Path) -> None:
    url = make_source(tmp_path / "data", 60)
    config = write_config(tmp_path / "cache.yaml", url, cache={"max_bytes": 800_000})
    with (
        service(config),
        EpochLoader(tmp_path / "cache", batch_size=10, fixed=True) as loader,
        pytest.raises(ConfigError, match="eviction: none"),
    ):
        next(iter(loader))


def test_nobody_waits_for_a_service_of_this_process_that_failed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for i in range(20):
        (tmp_path / "data" / f"{i}.npy").write_text("no array")
    config = {
        "source": {"url": f"{tmp_path}/data/*.npy"},
        "cache": {"path": str(tmp_path / "cache"), "max_bytes": 20_000_000},
    }
    with (
        growcache.serve(config),
        EpochLoader(tmp_path / "cache", batch_size=10) as loader,
        pytest.raises(CacheError, match=r"service failed: no object .* yields a sample"),
    ):
        next(iter(loader))
