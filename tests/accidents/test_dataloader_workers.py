"""torch's `DataLoader` around a loader works with `num_workers=0`, and is refused otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

import growcache.numpy  # noqa: E402
import growcache.torch  # noqa: E402
from growcache.errors import ConfigError  # noqa: E402
from tests.accidents.commands import growcache as run  # noqa: E402
from tests.accidents.commands import rows_of, write_config, write_objects  # noqa: E402

pytestmark = pytest.mark.torch


class Wrapped(IterableDataset):  # type: ignore[type-arg]
    """The wrapper that users write to pass a loader to a `DataLoader`."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    url = write_objects(folder / "in", count=8)
    source = rows_of(url)
    config = write_config(folder / "c.yaml", source)
    assert run("run", config, "--until-full").returncode == 0
    return config.with_suffix("")


@pytest.mark.parametrize("door", [growcache.torch, growcache.numpy], ids=["torch", "numpy"])
def test_workers_are_refused_and_none_works(cache: Path, door: Any) -> None:
    with door.EpochLoader(cache, batch_size=16, min_samples=1) as loader:
        with pytest.raises(ConfigError) as error:
            list(DataLoader(Wrapped(loader), batch_size=None, num_workers=2))
        assert "num_workers=2" in str(error.value)
        assert "num_workers=0" in str(error.value)
        assert "EpochDataLoader" in str(error.value)
        batches = list(DataLoader(Wrapped(loader), batch_size=None, num_workers=0))
    assert sum(len(batch["x"]) for batch in batches) == 128


@pytest.mark.slow
def test_workers_over_the_dataset_of_an_epoch_data_loader(cache: Path) -> None:
    with growcache.torch.EpochDataLoader(
        cache, batch_size=16, samples_per_epoch=64, min_samples=1
    ) as loader:
        with pytest.raises(ConfigError, match="num_workers=1"):
            list(DataLoader(loader.dataset, batch_size=16, num_workers=1))
        assert len(list(loader)) == 4
