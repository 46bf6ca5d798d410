"""Batches on a GPU that is there: what arrives, under loads that make every race show.

A sleep in a stream keeps the device back behind the process. In the stream of the copies it
lets these come late: a buffer that is filled again too early shows, and so does a batch that
is used too early. In the loop's stream it lets the step come late: device memory that is
used again too early shows. Values are compared on the device, behind the sleep.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from growcache.loading.buffers import RECYCLE_BYTES  # noqa: E402
from growcache.loading.options import Gather  # noqa: E402
from growcache.loading.ragged import RaggedStyle  # noqa: E402
from growcache.torch import EpochLoader  # noqa: E402
from growcache.torch.transfer import (  # noqa: E402
    map_tensors,
    tensors_of,
    transfer_to,
)
from tests.filled import Filled  # noqa: E402
from tests.gpu_job import PROGRAM  # noqa: E402
from tests.loading import functions  # noqa: E402
from tests.loading.conftest import full_of  # noqa: E402
from tests.loading.loaders import as_bytes  # noqa: E402
from tests.ragged import SCHEMAS, ragged_cache  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LARGE = (RECYCLE_BYTES // 4,)  # one sample fills a buffer that is recycled
SLEEP_CYCLES = 4_000_000  # two milliseconds and more
BOTH = pytest.mark.parametrize("gather", ["thread", "process"])


@pytest.fixture(params=["tfrecord", "npy"])
def cache(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Filled]:
    with Filled(tmp_path / "cache", full_of(LARGE), cache_format=request.param) as filled:
        filled.add(*range(20), samples=4)
        yield filled


def sleep() -> None:
    """Keep the current stream back."""
    torch.cuda._sleep(SLEEP_CYCLES)


class Step:
    """Compares batches on the device, and lets go of them before that has happened."""

    def __init__(self, *, slow: bool) -> None:
        self.slow = slow
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.ids: list[Tensor] = []

    def __call__(self, batch: dict[str, Tensor]) -> None:
        assert {tensor.device.type for tensor in batch.values()} == {"cuda"}
        if self.slow:
            sleep()
        self.wrong += (batch["x"] != batch["id"][:, None]).sum()
        self.ids.append(batch["id"].clone())

    def check(self, samples: int) -> None:
        """Check the number of samples since the last check, and that each came once."""
        assert int(self.wrong) == 0
        seen = torch.cat(self.ids).tolist()
        self.ids.clear()
        assert len(seen) == len(set(seen)) == samples


def own_copy(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Begin a copy of its own, and keep nothing of what it comes from."""
    sleep()
    batch["x"] = batch["x"].to("cuda", non_blocking=True)
    return batch


def own_stream(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy in another stream, which that of the copies waits for."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sleep()
        x = batch["x"].to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    return {"id": batch["id"], "x": x}


def leaving(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keep the copies back, and stay in another stream."""
    sleep()
    torch.cuda.set_stream(torch.cuda.Stream())
    return batch


def renewed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return other memory: page-locked by torch, and ordinary."""
    sleep()
    return {"id": batch["id"].clone(), "x": batch["x"].pin_memory()}


def as_it_is(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Do nothing."""
    return batch


def kept_back(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keep the copies back."""
    sleep()
    return batch


@BOTH
@pytest.mark.parametrize(
    "function", [as_it_is, kept_back, own_copy, own_stream, leaving, renewed]
)
def test_what_arrives_is_what_is_cached(
    cache: Filled, gather: Gather, function: Callable[..., Any]
) -> None:
    """While the cache grows."""
    before = torch.cuda.current_stream()
    options: dict[str, Any] = {"batch_size": 2, "min_samples": 1, "gather": gather}
    with EpochLoader(cache.root, device="cuda", batch_transform=function, **options) as loader:
        step = Step(slow=function is as_it_is)
        for epoch in range(6):
            for batch in loader:
                step(batch)
                del batch
            step.check(loader.report.cache_samples)
            cache.add(20 + epoch, samples=4)
        assert loader.report.cache_samples > 80
    assert torch.cuda.current_stream() == before


@BOTH
def test_batches_may_be_kept(cache: Filled, gather: Gather) -> None:
    with EpochLoader(
        cache.root, batch_size=2, min_samples=1, gather=gather, device="cuda"
    ) as loader:
        kept = [batch for _ in range(3) for batch in loader]
        step = Step(slow=False)
        for epoch in range(3):
            for batch in kept[40 * epoch : 40 * (epoch + 1)]:
                step(batch)
            step.check(80)


@BOTH
def test_the_loop_may_copy_from_ordinary_memory(cache: Filled, gather: Gather) -> None:
    """Without a device, ``non_blocking`` and letting go at once are safe."""
    with EpochLoader(cache.root, batch_size=2, min_samples=1, gather=gather) as loader:
        step = Step(slow=True)
        for _ in range(5):
            for batch in loader:
                assert not batch["x"].is_pinned()
                sleep()
                there = {k: v.to("cuda", non_blocking=True) for k, v in batch.items()}
                del batch
                step(there)
            step.check(80)


def delivered(root: Path, **options: Any) -> list[bytes]:
    """Two epochs, brought back."""
    with EpochLoader(root, batch_size=7, min_samples=1, seed=3, **options) as loader:
        batches = [batch for _ in range(2) for batch in loader]
    kind = "cpu" if options.get("device") is None else "cuda"
    assert {tensor.device.type for tensor in tensors_of(batches)} == {kind}
    return [as_bytes(map_tensors(Tensor.cpu, batch)) for batch in batches]


@pytest.mark.parametrize(
    ("gather", "num_workers"), [("thread", 0), ("thread", 2), ("process", 2)]
)
def test_what_a_transform_makes(tmp_path: Path, gather: Gather, num_workers: int) -> None:
    with Filled(tmp_path / "cache", full_of((130, 128))) as filled:
        filled.add(*range(8))
        options: dict[str, Any] = {
            "transform": functions.augment,
            "num_workers": num_workers,
            "gather": gather,
        }
        expected = delivered(filled.root, **options)
        assert delivered(filled.root, device="cuda", **options) == expected


@BOTH
@pytest.mark.parametrize("ragged", ["offsets", "pad", "list"])
@pytest.mark.parametrize("declared", ["rows", "both", "bytes", "str"])
def test_values_of_different_sizes(
    tmp_path: Path, gather: Gather, ragged: RaggedStyle, declared: str
) -> None:
    with ragged_cache(tmp_path / "cache", SCHEMAS[declared]) as filled:
        filled.add(*range(8))
        options: dict[str, Any] = {"ragged": ragged, "gather": gather}
        expected = delivered(filled.root, **options)
        assert delivered(filled.root, device="cuda", **options) == expected


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_is_forked_meanwhile_changes_nothing(cache: Filled) -> None:
    """Its pages are shared with it, and written to, while the device reads them."""
    reading, writing = os.pipe()
    children: list[int] = []
    step = Step(slow=False)
    options: dict[str, Any] = {"batch_size": 2, "min_samples": 1, "device": "cuda"}
    with EpochLoader(cache.root, batch_transform=kept_back, **options) as loader:
        for _ in range(4):
            for batch in loader:
                if loader.step in (5, 25):
                    if (child := os.fork()) == 0:
                        os.close(writing)
                        os.read(reading, 1)
                        os._exit(0)
                    children.append(child)
                step(batch)
                del batch
            step.check(80)
    os.close(writing)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    os.close(reading)


def test_an_error_of_locking_is_not_that_of_the_next_kernel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where memory is locked that is locked already."""
    sender = transfer_to("cuda")
    assert sender is not None
    sender.begin()
    found: list[int] = []

    def make() -> None:
        buffer = sender.allocate(RECYCLE_BYTES, [])
        sender.lock(buffer)
        found.append(int(torch.ones(3, device="cuda").sum()))

    thread = threading.Thread(target=make)
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread.join()
    assert found == [3]
    (record,) = caplog.records
    assert "bytes (CUDA error 712)" in record.getMessage()


# Jobs in processes of their own, because they change state of the whole process


def job(
    name: str, cache: Filled, *more: str, ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    """Run a job to its end, which no child of it outlives: that would keep its output open."""
    launcher: list[str] = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [sys.executable, *launcher, PROGRAM, name, cache.root, *more],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parent.parent)},
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["leave", "memory", "untouched", "forked"])
@pytest.mark.parametrize("cache", ["tfrecord"], indirect=True)
def test_a_job_ends_without_a_word(name: str, cache: Filled) -> None:
    done = job(name, cache)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["tfrecord"], indirect=True)
def test_an_error_of_the_step_on_the_device_reaches_the_loop(cache: Filled) -> None:
    done = job("failing", cache)
    assert done.returncode == 1
    assert "device-side assert" in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning", "accelerate"])
@pytest.mark.parametrize("cache", ["tfrecord"], indirect=True)
def test_a_trainer(name: str, cache: Filled) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}")
    done = job(name, cache)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["tfrecord"], indirect=True)
def test_two_ranks_on_one_gpu(cache: Filled, tmp_path: Path) -> None:
    done = job("ranks", cache, str(tmp_path), ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    ids = [(tmp_path / f"{rank}.txt").read_text().split() for rank in range(2)]
    assert [len(of_rank) for of_rank in ids] == [40, 40]
    assert len({*ids[0], *ids[1]}) == 80
