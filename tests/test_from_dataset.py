"""`EpochLoader.from_dataset`: any map-style Dataset, given by a program."""

from __future__ import annotations

import functools
import gc
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.cache.files import CacheLayout
from growcache.cache.locks import is_locked
from growcache.errors import ConfigError, FingerprintError
from growcache.numpy import EpochLoader
from growcache.sampling.dataset_service import given_dataset
from tests.sampling.services import status, wait_until

SMALL = {"cache": {"min_free": 0}, "sampling": {"shard_samples": 8}}


class Squares:
    """A map-style Dataset."""

    def __init__(self, count: int = 60) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full(3, index, np.float32), index * index


def squares(count: int) -> Squares:
    return Squares(count)


def held(options: dict[str, Any]) -> Squares:
    return Squares(len(options["count"]))


def loader_of(dataset: Any, path: Path, **more: Any) -> EpochLoader:
    options = {"max_bytes": "20MB", "workers": 1, "config": SMALL, "batch_size": 10, **more}
    return EpochLoader.from_dataset(dataset, path, **options)


def served(path: Path) -> bool:
    return is_locked(CacheLayout(path).supervisor_lock)


def values(loader: EpochLoader, name: str = "0") -> list[float]:
    return sorted(float(one) for batch in loader for one in batch[name].reshape(10, -1)[:, 0])


def test_an_instance_fills_a_cache_as_long_as_the_loader_is_open(tmp_path: Path) -> None:
    with loader_of(Squares(), tmp_path / "c", names=["x", "y"], fixed=True) as loader:
        assert served(tmp_path / "c")
        assert values(loader, "x") == list(range(60))
        assert values(loader, "y") == [float(i * i) for i in range(60)]
    assert not served(tmp_path / "c")
    assert values(loader, "x") == list(range(60))  # what is cached stays


def test_a_dropped_loader_ends_its_service(tmp_path: Path) -> None:
    loader = loader_of(functools.partial(squares, 60), tmp_path / "c")
    next(iter(loader))
    del loader
    gc.collect()
    wait_until(lambda: not served(tmp_path / "c"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "dataset", [Squares(), functools.partial(squares, count=60), [*range(60)]]
)
def test_a_cache_is_gone_on_with(tmp_path: Path, dataset: Any) -> None:
    for _ in range(2):
        name = "x" if isinstance(dataset, list) else "0"
        with loader_of(dataset, tmp_path / "c", fixed=True) as loader:
            assert values(loader, name) == list(range(60))
    assert status(tmp_path / "c").drawn == 60


def test_another_dataset_is_refused(tmp_path: Path) -> None:
    with loader_of(Squares(), tmp_path / "c", fixed=True, name="a") as loader:
        next(iter(loader))
        with pytest.raises(FingerprintError, match="dataset"):
            loader_of(Squares(), tmp_path / "c", name="b")
        other = loader_of(Squares(), tmp_path / "c", fixed=True, name="a")  # as on another rank
        assert values(other) == list(range(60))
        other.close()
        assert served(tmp_path / "c")
    with pytest.raises(ConfigError, match="another configuration"):
        loader_of(Squares(), tmp_path / "c", name="b")


SCRIPT = """
import sys
import numpy as np
from growcache.numpy import EpochLoader

class Mine:
    def __init__(self, bad):
        self.bad = bad
    def __len__(self):
        return 40
    def __getitem__(self, i):
        if i == self.bad:
            raise KeyError(i)
        return {"x": np.float32(i)}

def make():
    return Mine(3)

given = {"instance": Mine(3), "function": make, "class": Mine, "lambda": lambda: Mine(3)}[sys.argv[1]]
settings = {"sampling": {"max_skipped": 0.9}, "cache": {"min_free": 0}}
loader = EpochLoader.from_dataset(given, "c", max_bytes="20MB", workers=1, config=settings,
                                  batch_size=13, fixed=True)
for _ in range(2):
    print(sorted(int(x) for batch in loader for x in batch["x"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("given", ["instance", "function", "lambda"])
def test_a_dataset_of_a_script_needs_no_main_guard(tmp_path: Path, given: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    temporary = {"TMPDIR": str(tmp_path / "tmp")}
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), **temporary}
    for _ in range(2):  # the second time it goes on with its cache
        done = subprocess.run(
            [sys.executable, str(script), given],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        wanted = str([i for i in range(40) if i != 3])
        assert done.stdout.splitlines() == [wanted] * 2
    assert not served(tmp_path / "c")
    holes = "".join(path.read_text() for path in (tmp_path / "c/shards").glob("*.json"))
    line = SCRIPT.split("raise KeyError")[0].count("\n") + 1
    assert f"raised KeyError: 3 at train.py:{line} on index 3" in holes
    assert not list((tmp_path / "tmp").iterdir())


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    locked = Squares()
    locked.lock = threading.Lock()  # type: ignore[attr-defined]
    count = 5
    for given, words in [
        (locked, "cannot be sent to sampler processes.*give a function"),
        (iter([1]), "expected a map-style Dataset"),
        ({"a": 1}, "expected a map-style Dataset"),
        ([], "is 0"),
        (lambda: Squares(count), "give name="),
        (functools.partial(held, {"count": {1, 2}}), "give name="),
    ]:
        with pytest.raises(ConfigError, match=words):
            loader_of(given, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_what_can_be_imported_travels_by_its_name() -> None:
    made = given_dataset(functools.partial(squares, 7))
    assert (made.name, made.options) == ("tests.test_from_dataset:squares", {"count": 7})
    assert made.pickled is None
    assert given_dataset(Squares).name == "tests.test_from_dataset:Squares"
    assert given_dataset(Squares()).name == "pickled:tests.test_from_dataset.Squares[60]"


@pytest.mark.slow
def test_tensors_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from growcache.torch import EpochLoader as TorchLoader

    images = torch.arange(60 * 4, dtype=torch.float32).reshape(60, 2, 2)
    labels = torch.arange(60) % 3
    dataset = torch.utils.data.TensorDataset(images, labels)
    split = torch.utils.data.Subset(dataset, range(10, 50))
    loader = TorchLoader.from_dataset(
        split,
        tmp_path / "c",
        max_bytes="20MB",
        workers=1,
        config=SMALL,
        names=["image", "label"],
        batch_size=40,
        fixed=True,
        seed=3,
    )
    with loader:
        (batch,) = loader
    order = (batch["image"][:, 0, 0] // 4).long()
    assert torch.equal(batch["image"], images[order])
    assert torch.equal(batch["label"], labels[order])
    assert sorted(order.tolist()) == list(range(10, 50))


def test_images_of_pillow(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    arrays = [np.full((4 + i % 2, 3, 3), i, np.uint8) for i in range(20)]
    given = [{"image": image.fromarray(one), "label": i} for i, one in enumerate(arrays)]
    with loader_of(given, tmp_path / "c", fixed=True, ragged="list") as loader:
        for batch in loader:
            pairs = zip(batch["image"], batch["label"], strict=True)
            assert all(np.array_equal(one, arrays[label]) for one, label in pairs)


@pytest.mark.slow
def test_a_state_goes_on_after_the_service_was_started_anew(tmp_path: Path) -> None:
    with loader_of(Squares(), tmp_path / "c", samples_per_epoch=60, min_samples=60) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = [batch["1"].tolist() for batch in batches]
    with loader_of(Squares(), tmp_path / "c", samples_per_epoch=60, min_samples=60) as loader:
        loader.load_state_dict(state)
        assert [batch["1"].tolist() for batch in loader] == rest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of its own pickler
def test_a_dataset_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"x": [[float(i)] * 4 for i in range(60)], "text": [f"no {i}" for i in range(60)]}
    dataset = datasets.Dataset.from_dict(rows).with_format("numpy")
    with loader_of(dataset, tmp_path / "c", fixed=True) as loader:
        batches = list(loader)
    found = {
        x: text for one in batches for x, text in zip(one["x"][:, 0], one["text"], strict=True)
    }
    assert found == {float(i): f"no {i}" for i in range(60)}


@pytest.mark.slow
def test_a_dataset_of_monai(tmp_path: Path) -> None:
    monai = pytest.importorskip("monai.data")
    given = [
        {"image": np.full((4, 5), i, np.float32), "label": i, "path": None} for i in range(60)
    ]
    names = ["image", "label"]
    with loader_of(monai.Dataset(given), tmp_path / "c", fixed=True, names=names) as loader:
        for batch in loader:
            assert np.array_equal(batch["image"][:, 0, 0], batch["label"])


RANK = """
import json
import sys
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from growcache.torch import EpochLoader

class Squares:
    def __len__(self):
        return 60
    def __getitem__(self, i):
        return np.full(3, i, np.float32), i * i

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
settings = {"cache": {"min_free": 0}, "sampling": {"shard_samples": 8}}
with EpochLoader.from_dataset(Squares(), "c", max_bytes="20MB", workers=1, config=settings,
                              batch_size=4, min_samples=20) as loader:
    for _ in range(3):
        print(json.dumps([batch["0"][:, 0].tolist() for batch in loader]), flush=True)
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.torch
def test_ranks_that_start_at_once_share_one_service(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(RANK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    launched = {**os.environ, **address, "WORLD_SIZE": "2", "PYTHONPATH": str(Path.cwd())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env={**launched, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    epochs = [[json.loads(line) for line in out.splitlines()] for out, _ in said]
    for one, other in zip(*epochs, strict=True):
        assert len(one) == len(other) > 0
        values = [x for step in (*one, *other) for x in step]
        assert len(values) == len(set(values))  # each sample once, over all ranks
    assert not served(tmp_path / "c")
