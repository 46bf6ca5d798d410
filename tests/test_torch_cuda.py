"""The way to a GPU, over a stand-in for torch's CUDA: which GPU each thread asks, and for what."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch import device as Device  # noqa: E402

from growcache.errors import ConfigError  # noqa: E402
from growcache.loading.buffers import PAGE, RECYCLE_BYTES  # noqa: E402
from growcache.loading.framework import Bytes  # noqa: E402
from growcache.torch import EpochLoader, transfer  # noqa: E402
from growcache.torch.transfer import (  # noqa: E402
    CudaCopies,
    DeviceTransfer,
    call_loaded,
)

pytestmark = pytest.mark.torch


class Cuda:
    """Torch's CUDA, with two GPUs: every thread has a current one, at first 0, and a stream.

    Attributes:
        asked: (what, of which GPU): what would open a context there.
        refuses: what `cudaHostRegister` answers.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self.asked: list[tuple[str, int]] = []
        self.refuses = 0

    def ask(self, what: str) -> int:
        self.asked.append((what, self.current_device()))
        return 0

    def current_device(self) -> int:
        return getattr(self._here, "device", 0)

    def set_device(self, device: int) -> None:
        self._here.device = device

    def current_stream(self, device: Any = None) -> Any:
        return getattr(self._here, "stream", None) or Stream(self, torch.device("cuda", 0))

    def set_stream(self, stream: Stream) -> None:
        self._here.device, self._here.stream = stream.device.index, stream

    def device(self, device: Any) -> AbstractContextManager[None]:
        @contextmanager
        def there() -> Any:
            before = self.current_device()
            self._here.device = device.index
            yield
            self._here.device = before

        return there()

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, where: int, nbytes: int, flags: int) -> int:
        self.ask("lock")
        return self.refuses

    def cudaHostUnregister(self, where: int) -> int:
        return self.ask("unlock")

    def stream(self, of: Device) -> Stream:
        return Stream(self, of)


class Stream:
    """A stream, which is its own event."""

    def __init__(self, made: Cuda, of: Device) -> None:
        self.made, self.device = made, of
        self.waited: list[Any] = []

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        self.made.ask("query")
        return False

    def synchronize(self) -> None:
        self.made.ask("synchronize")

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


class Travelling(Tensor):
    """A tensor that notes which stream it was copied in, and which one it is kept for."""

    copied_in: Any = None
    kept_for: Any = None

    def to(self, there: Device, *, non_blocking: bool) -> Travelling:  # type: ignore[override]
        torch.cuda.cudart().ask("copy")
        self.copied_in = torch.cuda.current_stream(there)
        return self

    def record_stream(self, stream: Any) -> None:
        self.kept_for = stream


def travelling() -> Travelling:
    made: Travelling = torch.zeros(3).as_subclass(Travelling)
    return made


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    names = ("current_device", "current_stream", "set_stream", "device", "cudart")
    for name in names:
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "Stream", made.stream)
    return made


def elsewhere(function: Callable[[], object]) -> None:
    """Call it in a new thread, whose current GPU is the first one."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_no_thread_asks_for_another_gpu(gpus: Cuda, device: str) -> None:
    """Rank 1: a context on the first GPU takes memory that rank 0 needs."""
    gpus.set_device(1 if device == "cuda" else 0)
    senders = [DeviceTransfer(lambda: CudaCopies(torch.device(device)))]
    senders[0].begin()
    kept: list[Bytes] = []

    def make() -> None:
        kept.append(senders[0].allocate(RECYCLE_BYTES, kept))
        for _ in range(10):
            senders[0].send(travelling())

    elsewhere(make)
    elsewhere(kept.clear)
    elsewhere(senders.clear)
    assert {what for what, _ in gpus.asked} == {
        "lock",
        "copy",
        "query",
        "synchronize",
        "unlock",
    }
    assert {found for _, found in gpus.asked} == {1}
    assert gpus.current_device() == (1 if device == "cuda" else 0)


def test_what_the_making_thread_computes_is_in_the_stream_of_copies(gpus: Cuda) -> None:
    """So the mark is behind it, and it does not wait for the loop's step."""
    loop = Stream(gpus, torch.device("cuda", 1))
    gpus.set_stream(loop)
    sender = DeviceTransfer(lambda: CudaCopies(torch.device("cuda")))
    sender.begin()
    tensor, streams = travelling(), []

    def make() -> None:
        sender.enter()  # before the user's function is called
        streams.append(gpus.current_stream())
        sent.append(sender.send(tensor))

    sent: list[Any] = []
    elsewhere(make)
    assert streams == [tensor.copied_in]
    assert streams[0].waited == [loop]  # what the function refers to may have been made there
    assert sender.receive(sent[0]) is tensor
    assert loop.waited == streams
    assert tensor.kept_for is loop


def test_copies_are_before_the_mark_wherever_the_function_left_its_thread(gpus: Cuda) -> None:
    """A `batch_transform` with a stream of its own need not go back from it."""
    sender = DeviceTransfer(lambda: CudaCopies(torch.device("cuda", 1)))
    sender.begin()
    tensors = [travelling(), travelling()]

    def make() -> None:
        for tensor in tensors:
            sender.send(tensor)
            gpus.set_stream(Stream(gpus, torch.device("cuda", 0)))

    elsewhere(make)
    assert tensors[0].copied_in is tensors[1].copied_in
    assert gpus.asked == [("copy", 1), ("query", 1), ("copy", 1)]


def test_memory_that_cannot_be_locked_is_said_once(
    gpus: Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA keeps the error, and the next kernel of that thread would raise it."""
    forgot: list[tuple[str, int]] = []
    monkeypatch.setattr(
        transfer, "call_loaded", lambda _, name: forgot.append((name, threading.get_ident()))
    )
    gpus.refuses = 712
    sender = DeviceTransfer(lambda: CudaCopies(torch.device("cuda")))
    sender.begin()
    with caplog.at_level(logging.WARNING):
        buffers = [sender.allocate(RECYCLE_BYTES, []) for _ in range(3)]
    assert [what for what, _ in gpus.asked] == ["lock"]
    assert ("cudaGetLastError", threading.get_ident()) in forgot
    (record,) = caplog.records
    assert "bytes (CUDA error 712)" in record.getMessage()
    for buffer in buffers:
        buffer[:] = 1
    del buffers
    assert [what for what, _ in gpus.asked] == ["lock"]


def test_a_function_of_a_loaded_library_is_called() -> None:
    call_loaded("c", "srand", 7)
    call_loaded("c", "no_such_function")
    call_loaded("no-such-library", "srand", 7)


def test_locked_buffers_share_no_page(gpus: Cuda) -> None:
    """CUDA locks whole pages, and refuses one that is locked."""
    sender = DeviceTransfer(lambda: CudaCopies(torch.device("cuda")))
    sender.begin()
    buffers: list[Bytes] = []

    def make() -> None:
        del [np.empty(8_000_000, np.uint8)][:]  # from now on malloc maps only what is larger
        buffers.extend(sender.allocate(RECYCLE_BYTES + 100, buffers) for _ in range(8))

    elsewhere(make)
    ranges = sorted((b.ctypes.data, b.ctypes.data + b.nbytes - 1) for b in buffers)
    pages = [(first // PAGE, last // PAGE) for first, last in ranges]
    assert all(one[1] < other[0] for one, other in itertools.pairwise(pages))
    assert len(buffers) == 8


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_unlocks_nothing(gpus: Cuda) -> None:
    kept: list[Bytes] = []
    senders = [DeviceTransfer(lambda: CudaCopies(torch.device("cuda")))]
    senders[0].begin()
    kept.append(senders[0].allocate(RECYCLE_BYTES, kept))
    senders[0].send(travelling())
    gpus.asked.clear()
    if (child := os.fork()) == 0:
        try:
            kept.clear()
            senders.clear()
        finally:
            os._exit(len(gpus.asked))
    assert os.waitpid(child, 0)[1] == 0
    kept.clear()
    assert gpus.asked == [("unlock", 0)]


def test_whether_a_gpu_is_there_is_asked_without_starting_cuda(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts() -> bool:
        raise AssertionError("this initializes CUDA, and no process may be forked any more")

    monkeypatch.setattr(torch.cuda, "is_available", starts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    EpochLoader(tmp_path / "cache", batch_size=8, device="cuda:1").close()
    with pytest.raises(ConfigError, match="device 'cuda:2' is not there"):
        EpochLoader(tmp_path / "cache", batch_size=8, device="cuda:2")
