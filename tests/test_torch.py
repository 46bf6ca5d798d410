"""The torch front door: tensors of the schema, epochs, arguments, pickling, threads."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from growcache.errors import ConfigError, FormatError  # noqa: E402
from growcache.loading.framework import (  # noqa: E402
    Join,
    Take,
    TakeSlices,
    join_parts,
    take_rows,
    take_slices,
)
from growcache.loading.gather_process import take_slices_locked as take_slices_alone  # noqa: E402
from growcache.schema import Sample  # noqa: E402
from growcache.torch import EpochLoader  # noqa: E402
from growcache.torch import join_parts as torch_join  # noqa: E402
from growcache.torch import take_rows as torch_take  # noqa: E402
from growcache.torch.loader import copy_in_this_thread_alone  # noqa: E402
from growcache.torch.loader import take_slices as torch_take_slices  # noqa: E402
from tests.filled import Filled  # noqa: E402
from tests.loading.conftest import full_of  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Filled]:
    filled = Filled(tmp_path / "cache", full_of((4,)))
    yield filled
    filled.close()


@pytest.fixture
def loader(cache: Filled) -> Iterator[Callable[..., EpochLoader]]:
    made: list[EpochLoader] = []

    def make(**options: Any) -> EpochLoader:
        made.append(EpochLoader(cache.root, **{"batch_size": 8, "min_samples": 1, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_batches_are_tensors_of_the_schema(cache: Filled, loader: Any) -> None:
    cache.add(0, 1, 2, 3)
    seen: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in loader():
            assert list(batch) == ["id", "x"]
            assert (batch["id"].shape, batch["id"].dtype) == ((8,), torch.int64)
            assert (batch["x"].shape, batch["x"].dtype) == ((8, 4), torch.float32)
            assert torch.equal(batch["x"][:, 3], batch["id"].float())
            batch["x"] += 1  # batches belong to the user
            seen += batch["id"].tolist()
    assert len(seen) == len(set(seen)) == 40


def test_tuples_in_the_order_that_was_asked_for(cache: Filled, loader: Any) -> None:
    cache.add(0)
    for x, name in loader(as_tuple=("x", "id")):
        assert torch.equal(x[:, 0], name.float())
    with pytest.raises(ConfigError, match="no field 'y'; there are id, x"):
        next(iter(loader(as_tuple=("y",))))
    with pytest.raises(ConfigError, match="sequence of names"):
        loader(as_tuple="x")


def test_lengths(cache: Filled, loader: Any) -> None:
    cache.add(0, 1, 2)
    assert len(loader(samples_per_epoch=20)) == 2
    assert len(loader(samples_per_epoch=20, drop_last=False)) == 3
    with pytest.raises(TypeError, match="samples_per_epoch"):
        len(loader())
    cache.complete()
    fixed = loader(fixed=True)
    assert len(fixed) == 4
    assert [len(b["id"]) for b in fixed] == [8, 8, 8, 6]
    assert torch.cat([b["id"] for b in fixed])[:12].tolist() == [*range(10), 1000, 1001]


def test_transforms_may_return_tensors_and_new_fields(cache: Filled, loader: Any) -> None:
    cache.add(0)

    def transform(sample: Sample) -> dict[str, Any]:
        return {"y": torch.from_numpy(sample["x"]) * 2, "label": int(sample["id"]) % 3}

    (batch,) = loader(transform=transform)
    assert (batch["label"].dtype, batch["label"].shape) == (torch.int64, (8,))
    assert batch["y"].shape == (8, 4)


def test_a_dtype_that_torch_lacks_is_named(cache: Filled, loader: Any) -> None:
    cache.add(0)
    wide = loader(transform=lambda s: {"z": s["x"].astype(np.longdouble)})
    with pytest.raises(FormatError, match="'z' has dtype"):
        next(iter(wide))


def test_a_loader_pickles_as_its_arguments(cache: Filled, loader: Any) -> None:
    cache.add(0, 1, 2, 3)
    first = loader(seed=5, as_tuple=("id",))
    expected = [x.tolist() for (x,) in first]
    data = pickle.dumps(first)
    assert len(data) < 1000
    with pickle.loads(data) as again:
        assert [x.tolist() for (x,) in again] == expected


def test_report_of_epochs(cache: Filled, loader: Any) -> None:
    cache.add(0, 1)
    cache.population(40.0)
    growing = loader(drop_last=False)
    for _ in range(2):
        for _batch in growing:
            pass
    report = growing.report
    assert (report.samples, report.cache_samples, report.passes) == (20, 20, 2)
    assert (report.new_samples, report.reuse, report.uses_max) == (0, 2.0, 2.0)
    assert (report.coverage_samples, report.ess_samples, report.skipped) == (0.5, 20.0, 0)
    assert str(report).count("\n") == 0
    metrics = growing.metrics(prefix="in/")
    assert (metrics["in/samples"], metrics["in/coverage_samples"]) == (20.0, 0.5)
    assert {type(value) for value in metrics.values()} == {float}
    assert "20 samples (0 new) of 20 cached, reuse 2.00, 50.0% seen" in str(report)


@pytest.mark.parametrize("nbytes", [1, 3072, 32_767, 32_768, 262_144, 32_771, 36_000])
@pytest.mark.parametrize("take", [take_rows, torch_take])
def test_rows_of_any_size_are_copied(take: Take, nbytes: int) -> None:
    rng = np.random.default_rng(0)
    for samples in (1, 5):
        file = rng.integers(0, 256, samples * (nbytes + 57), np.uint8)
        rows = rng.integers(0, samples, 7)
        starts = 41 + rows * (nbytes + 57)
        out = np.zeros((7, nbytes), np.uint8)
        take(file, starts, out)
        np.testing.assert_array_equal(out, [file[s : s + nbytes] for s in starts.tolist()])
        for bad in (len(file) - nbytes + 1, -1):
            with pytest.raises(IndexError):
                take(file, np.array([bad]), out[:1])


@pytest.mark.slow
def test_only_the_calling_thread_leaves_the_pool() -> None:
    program = (
        "import threading, torch\n"
        "from growcache.torch.loader import copy_in_this_thread_alone as alone\n"
        "torch.set_num_threads(3)\n"
        "seen = []\n"
        "def run(): alone(); seen.append(torch.get_num_threads())\n"
        "thread = threading.Thread(target=run); thread.start(); thread.join()\n"
        "other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))\n"
        "other.start(); other.join()\n"
        "print(*seen, torch.get_num_threads())\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.split() == ["1", "3", "3"], found.stderr


def test_import_and_exit_in_the_middle_of_an_epoch(cache: Filled) -> None:
    cache.add(*range(20))
    program = (
        "import sys\n"
        "from growcache.torch import EpochLoader\n"
        f"loader = EpochLoader({str(cache.root)!r}, batch_size=8, min_samples=1)\n"
        "print(len(next(iter(loader))['id']))\n"
    )
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "8\n", "")


@pytest.mark.slow
def test_an_exit_waits_for_no_more_than_the_calls_of_a_transform_that_are_under_way(
    cache: Filled,
) -> None:
    cache.add(*range(8))
    program = (
        "import itertools, time\n"
        "from growcache.torch import EpochLoader\n"
        "calls = itertools.count(1)\n"
        "slow = []\n"
        "def transform(sample):\n"
        "    if next(calls) > 90:  # of the second epoch's second block, of 32 samples\n"
        "        slow.append(True)\n"
        "        time.sleep(3)\n"
        "    return sample\n"
        f"loader = EpochLoader({str(cache.root)!r}, batch_size=8, min_samples=1,\n"
        "    transform=transform)\n"
        "for batch in loader: pass\n"
        "while not slow: time.sleep(0.01)\n"
        "print(time.monotonic())\n"
    )
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True
    )
    took = time.monotonic() - float(found.stdout)
    assert (found.returncode, found.stderr) == (0, "")
    assert took < 8  # all of the block would take four times three seconds, with eight threads


def test_preparing_a_thread_twice_is_harmless() -> None:
    import threading

    threads = [threading.Thread(target=copy_in_this_thread_alone) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("lengths", [[3], [40_000, 1, 70_001, 16_384], [100] * 50])
@pytest.mark.parametrize("take", [take_slices, torch_take_slices, take_slices_alone])
def test_rows_of_different_lengths_are_copied(take: TakeSlices, lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 256, 200_000, np.uint8)
    starts = rng.integers(0, 100_000, len(lengths))
    out: Any = np.zeros(sum(lengths), np.uint8)
    take(memory, starts, np.array(lengths), out)
    rows = [memory[s : s + n] for s, n in zip(starts.tolist(), lengths, strict=True)]
    np.testing.assert_array_equal(out, np.concatenate(rows))


@pytest.mark.parametrize("sizes", [[0, 3, 0], [5], [40_000, 0, 70_001, 1], [100] * 50])
@pytest.mark.parametrize("join", [join_parts, torch_join])
def test_parts_of_any_size_are_joined(join: Join, sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    out: Any = np.zeros(sum(sizes), np.uint8)
    join(parts, out)
    np.testing.assert_array_equal(out, np.concatenate(parts))
