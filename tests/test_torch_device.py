"""Batches on a device: everything but CUDA's own calls, which no machine of ours has.

A lane whose copies happen as late as they may stands for a GPU: a buffer that is used again
too early, or a batch that is used too early, shows in the values.
"""

from __future__ import annotations

import ctypes
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from growcache.errors import ConfigError  # noqa: E402
from growcache.loading.buffers import RECYCLE_BYTES, BufferPool  # noqa: E402
from growcache.loading.consumer import Consumer  # noqa: E402
from growcache.loading.framework import Bytes  # noqa: E402
from growcache.loading.options import Gather, LoaderOptions  # noqa: E402
from growcache.numpy import EpochLoader as NumpyLoader  # noqa: E402
from growcache.torch import EpochLoader  # noqa: E402
from growcache.torch.transfer import (  # noqa: E402
    CopyEvent,
    DeviceTransfer,
    map_tensors,
    tensors_of,
)
from tests.filled import Filled  # noqa: E402
from tests.forked import ended, exits_with, fork  # noqa: E402
from tests.loading.conftest import full_of  # noqa: E402

pytestmark = pytest.mark.torch

LARGE = (RECYCLE_BYTES // 4,)  # one sample fills a buffer that is recycled


class LateMark:
    """The end of some copies, which nothing but waiting brings about."""

    def __init__(self, lane: LateLane, copies: int) -> None:
        self.lane, self.copies = lane, copies

    def query(self) -> bool:
        return self.lane.done >= self.copies

    def synchronize(self) -> None:
        self.lane.run(self.copies)


class LateLane:
    """Copies that happen when they are awaited, and not before.

    Attributes:
        done: copies that happened.
        locked: buffers that are page-locked: their addresses.
        entered: threads that may do something with it.
    """

    def __init__(self) -> None:
        self.started: list[tuple[Tensor, Tensor]] = []
        self.done = 0
        self.locked: list[int] = []
        self.arrived: list[Tensor] = []
        self.entered: set[int] = set()
        self._mapped: list[Any] = []  # so that what comes too late reads something else
        self._turn = threading.Lock()  # the loop's thread awaits copies, and so does the other

    def enter(self) -> None:
        self.entered.add(threading.get_ident())

    def lock(self, buffer: Bytes) -> None:
        assert threading.get_ident() in self.entered
        weakref.finalize(buffer, self.locked.remove, buffer.ctypes.data)
        self.locked.append(buffer.ctypes.data)
        self._mapped.append(buffer.base)

    def copy(self, tensor: Tensor) -> Tensor:
        assert threading.get_ident() in self.entered
        there: Tensor = torch.full_like(tensor, -1)
        # As for a GPU: an address, which keeps no memory from being used again.
        address = np.ndarray(tensor.shape, tensor.numpy().dtype, memory_of(tensor))
        self.started.append((torch.from_numpy(address), there))
        return there

    def run(self, copies: int) -> None:
        with self._turn:
            for source, there in self.started[self.done : copies]:
                there.copy_(source)
            self.done = max(self.done, copies)

    def mark(self) -> CopyEvent:
        return LateMark(self, len(self.started))

    def arrive(self, mark: CopyEvent, tensors: list[Tensor]) -> None:
        mark.synchronize()
        self.arrived += tensors


def memory_of(tensor: Tensor) -> Any:
    """The memory itself, which this does not keep."""
    return (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())


class Late(NamedTuple):
    engine: Consumer
    sender: DeviceTransfer
    lane: LateLane

    def epoch(self) -> Iterator[dict[str, Tensor]]:
        self.sender.begin()
        for sent in self.engine.epoch():
            yield self.sender.receive(sent)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Filled]:
    with Filled(tmp_path / "cache", full_of(LARGE)) as filled:
        yield filled


@pytest.fixture(params=["thread", "process"])
def late(cache: Filled, request: pytest.FixtureRequest) -> Iterator[Late]:
    lane = LateLane()
    sender = DeviceTransfer(lambda: lane)
    options = LoaderOptions(path=cache.root, batch_size=2, min_samples=1, gather=request.param)
    lent = replace(EpochLoader.framework, transfer=sender, allocate=sender.allocate)
    engine = Consumer(options, lent)
    yield Late(engine, sender, lane)
    engine.close()


def test_no_buffer_is_used_again_before_it_was_copied(cache: Filled, late: Late) -> None:
    cache.add(*range(20), samples=4)
    for _ in range(12):
        seen: list[int] = []
        for batch in late.epoch():
            assert torch.equal(batch["x"], batch["id"][:, None].expand_as(batch["x"]).float())
            seen += batch["id"].tolist()
        assert len(set(seen)) == 80
    addresses = {source.data_ptr() for source, _ in late.lane.started if source.ndim == 2}
    assert len(addresses) < 240  # of 480 batches: they did go round
    assert 0 < len(late.lane.locked) == len(set(late.lane.locked)) <= 12


def test_a_child_has_one_way_of_its_own() -> None:
    lanes: list[LateLane] = []

    def make() -> LateLane:
        lanes.append(LateLane())
        return lanes[-1]

    sender = DeviceTransfer(make)
    sender.begin()
    sender.send({"x": torch.zeros(3)})

    def twice() -> int:
        for _ in range(2):
            sender.begin()
        sent = sender.receive(sender.send({"x": torch.ones(3)}))
        return 0 if len(lanes) == 2 and bool((sent["x"] == 1).all()) else 1

    child = fork()
    if child == 0:
        exits_with(twice)
    assert ended(child)
    sender.begin()
    assert len(lanes) == 1


@pytest.mark.parametrize("gather", ["thread", "process"])
def test_a_copy_of_batch_transform_is_of_memory_that_stays(
    cache: Filled, gather: Gather
) -> None:
    """It returns what is on its way, and nothing refers any more to what that comes from."""
    cache.add(*range(20), samples=4)
    lane = LateLane()
    sender = DeviceTransfer(lambda: lane)

    def there(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["x"] = lane.copy(batch["x"])
        return batch

    options = LoaderOptions(
        path=cache.root, batch_size=2, min_samples=1, gather=gather, batch_transform=there
    )
    lent = replace(EpochLoader.framework, transfer=sender, allocate=sender.allocate)
    with closing(Consumer(options, lent)) as engine:
        for _ in range(12):
            for batch in Late(engine, sender, lane).epoch():
                expected = batch["id"][:, None].expand_as(batch["x"]).float()
                assert torch.equal(batch["x"], expected)


def test_what_arrives_is_what_was_said_to_the_stream(cache: Filled, late: Late) -> None:
    cache.add(0)
    batches = list(late.epoch())
    assert len(batches) == 5
    expected = [tensor for batch in batches for tensor in batch.values()]
    assert list(map(id, late.lane.arrived)) == list(map(id, expected))


@pytest.mark.parametrize("gather", ["thread", "process"])
def test_a_thread_enters_before_it_calls_batch_transform(tmp_path: Path, gather: Any) -> None:
    """With samples so small that nothing is locked before; the loop's thread stays out."""
    lane = LateLane()
    sender = DeviceTransfer(lambda: lane)
    called: list[int] = []

    def look(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        assert threading.get_ident() in lane.entered
        called.append(threading.get_ident())
        return batch

    with Filled(tmp_path / "small", full_of((4,))) as small:
        small.add(0)
        options = LoaderOptions(
            path=small.root, batch_size=5, min_samples=1, gather=gather, batch_transform=look
        )
        lent = replace(EpochLoader.framework, transfer=sender, allocate=sender.allocate)
        with closing(Consumer(options, lent)) as engine:
            assert len(list(Late(engine, sender, lane).epoch())) == 2
    assert lane.entered == set(called) != {threading.get_ident()}


class Broken(LateLane):
    """Does not lock anything."""

    def lock(self, buffer: Bytes) -> None:
        raise OSError("the driver is gone")


@pytest.mark.parametrize("gather", ["thread", "process"])
def test_an_error_of_the_way_reaches_the_loop(cache: Filled, gather: Any) -> None:
    cache.add(0)
    sender = DeviceTransfer(Broken)
    options = LoaderOptions(path=cache.root, batch_size=5, min_samples=1, gather=gather)
    lent = replace(EpochLoader.framework, transfer=sender, allocate=sender.allocate)
    with closing(Consumer(options, lent)) as engine:
        sender.begin()
        for _ in range(2):
            with pytest.raises(OSError, match="the driver is gone"):
                next(engine.epoch(pause_seconds=5))


class Watching(LateLane):
    """Sees whether memory is there still when its copy is awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[weakref.ref[Any]] = []
        self.kept: list[bool] = []

    def run(self, copies: int) -> None:
        self.kept += [found() is not None for found in self.memory[self.done : copies]]
        super().run(copies)


def test_memory_does_not_go_before_it_was_copied() -> None:
    lane = Watching()
    sender = DeviceTransfer(lambda: lane)
    sender.begin()
    for i in range(12):
        array = np.full(1000, i)
        lane.memory.append(weakref.ref(array))
        sender.send({"x": torch.from_numpy(array)})
        del array
    assert lane.done == 4
    del sender
    assert lane.kept == [True] * 12
    assert [int(there[-1]) for _, there in lane.started] == list(range(12))
    assert not any(found() for found in lane.memory)


class Lost(LateMark):
    """The device has failed, and says so to whoever asks."""

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nAdvice follows.")


def test_a_device_that_failed_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """The loop got the error; a finalizer after it would raise where no code catches it."""
    lane = LateLane()
    lane.mark = lambda: Lost(lane, len(lane.started))  # type: ignore[method-assign]
    sender = DeviceTransfer(lambda: lane)
    sender.begin()
    memory = [torch.ones(1000) for _ in range(3)]
    there = [weakref.ref(tensor) for tensor in memory]
    for tensor in memory:
        sender.send(tensor)
    memory.clear()
    del tensor, sender
    assert [found() for found in there] == [None] * 3
    (record,) = caplog.records
    assert record.getMessage().endswith("CUDA error: device-side assert triggered")


def test_few_copies_are_under_way(cache: Filled) -> None:
    lane = LateLane()
    sender = DeviceTransfer(lambda: lane)
    sender.begin()
    for i in range(50):
        sender.send({"x": torch.tensor([i])})
        assert len(lane.started) - lane.done <= 8


def test_a_locked_buffer_is_one_that_is_kept() -> None:
    lane = LateLane()
    sender = DeviceTransfer(lambda: lane)
    sender.begin()
    pool = BufferPool(RECYCLE_BYTES, keep=2, allocate=sender.allocate)
    held = [pool.take() for _ in range(4)]
    assert len(lane.locked) == 2
    del held
    pool.take()
    pool.take(100)
    assert len(lane.locked) == 2


class Pair(NamedTuple):
    first: Any
    second: Any


def test_tensors_are_found_wherever_they_are() -> None:
    batch = {"a": torch.tensor(1), "b": [torch.tensor(2), "c"], "d": Pair(torch.tensor(3), 4)}
    twice = map_tensors(lambda tensor: tensor * 2, batch)
    assert twice == {"a": 2, "b": [4, "c"], "d": Pair(6, 4)}
    assert type(twice["d"]) is Pair
    assert [int(tensor) for tensor in tensors_of(twice)] == [2, 4, 6]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"as_tuple": ("x", "id")},
        {"drop_last": False},
        {"gather": "process"},
    ],
)
def test_batches_on_another_device(cache: Filled, more: dict[str, Any]) -> None:
    """Torch's device without memory: nothing is copied, but everything is asked for."""
    cache.add(0, 1)
    threads: list[str] = []

    def look(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        threads.append(batch["x"].device.type)
        return batch

    options = {"batch_size": 8, "min_samples": 1, "device": "meta", **more}
    with EpochLoader(cache.root, batch_transform=look, **options) as loader:
        batches = [
            b if isinstance(b, dict) else dict(zip("xi", b, strict=True)) for b in loader
        ]
        assert {t.device.type for batch in batches for t in batch.values()} == {"meta"}
        assert [len(b["x"]) for b in batches] == ([8, 8, 4] if "drop_last" in more else [8, 8])
        assert set(threads) == {"cpu"}
        assert loader.state_dict()["epoch"] == 1
    with pickle.loads(pickle.dumps(EpochLoader(cache.root, **options))) as again:
        assert all(t.is_meta for t in tensors_of(next(iter(again))))


def test_a_device_is_kept_from_epoch_to_epoch(cache: Filled) -> None:
    cache.add(0)
    with EpochLoader(cache.root, batch_size=5, min_samples=1, device="meta") as loader:
        for _ in range(3):
            assert [batch["x"].shape for batch in loader] == [(5, *LARGE)] * 2
        loader.close()
        assert len(list(loader)) == 2
    gc.collect()


def test_the_memory_of_the_process_is_no_device(cache: Filled) -> None:
    cache.add(0)
    with EpochLoader(cache.root, batch_size=8, min_samples=1, device="cpu") as loader:
        batch = next(iter(loader))
        assert batch["x"].device.type == "cpu"
        assert not batch["x"].is_pinned()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_a_gpu_that_is_not_there_is_refused_at_once(cache: Filled, device: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"device 'cuda(:1)?' is not there .*without CUDA|no GPU"
    ):
        EpochLoader(cache.root, batch_size=8, device=device)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", 1.5, "mps"])
def test_what_is_no_device_is_refused(cache: Filled, device: Any) -> None:
    with pytest.raises(ConfigError, match="device expected as") as caught:
        EpochLoader(cache.root, batch_size=8, device=device)
    assert "\n" not in str(caught.value)


def test_arrays_have_no_device(cache: Filled) -> None:
    with pytest.raises(ConfigError, match=r"found 'cuda'; growcache\.torch"):
        NumpyLoader(cache.root, batch_size=8, device="cuda")
