"""The user's function in other processes: what it makes does not depend on where it runs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from growcache.errors import CacheError, ConfigError, FormatError
from growcache.loading.buffers import BufferBytes, allocate_private
from growcache.loading.consumer import Consumer
from growcache.loading.framework import NUMPY
from growcache.loading.options import Gather, LoaderOptions
from growcache.loading.transform import (
    MAX_THREADS,
    SlowCallWatch,
    ThreadExecutor,
    TransformCall,
    TransformRows,
    portable_error,
)
from growcache.numpy import EpochLoader
from growcache.threads import StoppedError
from tests.filled import Filled, open_leases
from tests.loading import functions
from tests.loading.leftovers import descriptors, held, more_than
from tests.loading.loaders import as_bytes
from tests.ragged import ragged_cache

BOTH = pytest.mark.parametrize(
    "gather", ["thread", pytest.param("process", marks=pytest.mark.slow)]
)


def children() -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    gc.collect()
    before, processes = held(), children()
    yield
    gc.collect()
    assert more_than(before) == {}
    assert not set(children()) - set(processes)


@pytest.fixture
def cache(make_cache: Callable[..., Filled]) -> Filled:
    made = make_cache(shape=(130, 128))
    made.add(*range(8))
    return made


def loader(cache: Filled, transform: Any, **options: Any) -> EpochLoader:
    options = {"batch_size": 7, "min_samples": 1, "num_workers": 2, **options}
    return EpochLoader(cache.root, transform=transform, **options)


def stream(cache: Filled, transform: Any, **options: Any) -> list[bytes]:
    with loader(cache, transform, **options) as made:
        return [as_bytes(batch) for _ in range(3) for batch in made]


@pytest.mark.parametrize("gather", ["thread", "process"])
def test_batches_are_those_of_threads(cache: Filled, gather: Gather) -> None:
    expected = stream(cache, functions.augment, num_workers=0, gather="thread")
    assert stream(cache, functions.augment, gather=gather) == expected


@BOTH
def test_ragged_fields_and_small_ones_as_well(tmp_path: Path, gather: Gather) -> None:
    declared = {"rows": ["float32", None, 3], "name": "str"}
    with ragged_cache(tmp_path / "c", declared) as cache:
        cache.add(*range(4))
        for style in ("offsets", "pad"):
            expected = stream(cache, functions.ragged, num_workers=0, ragged=style)
            assert stream(cache, functions.ragged, gather=gather, ragged=style) == expected


@pytest.mark.slow
def test_both_processes_work_and_neither_is_the_trainer(cache: Filled) -> None:
    with loader(cache, functions.where, num_workers=2) as made:
        seen = {int(pid) for _ in range(3) for batch in made for pid in batch["pid"]}
        assert seen <= {child.pid for child in children()}
        assert len(seen) == 2
        assert os.getpid() not in seen


def test_each_process_has_work_where_a_block_has_as_many_rows(cache: Filled) -> None:
    with loader(cache, functions.where, batch_size=2) as made:
        assert all(len(set(batch["pid"].tolist())) == 2 for batch in made)


@BOTH
def test_closing_waits_for_no_call_of_the_users_function(
    cache: Filled, tmp_path: Path, gather: Gather, caplog: pytest.LogCaptureFixture
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    made, before = loader(cache, functions.Lasting(str(fifo)), gather=gather), children()
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(list, made)
        with fifo.open():  # it is called
            made.close()
        assert children() == before
        assert open_leases(cache.root) == []
        with pytest.raises(RuntimeError, match="closed"):
            read.result()
    assert not caplog.text


def test_threads_begin_no_row_once_they_are_cancelled() -> None:
    called, cancelled = list[int](), threading.Event()

    def cancel(sample: Any) -> Any:
        called.append(sample["id"])
        cancelled.set()
        return sample

    def wait(sample: Any) -> Any:
        called.append(sample["id"])
        cancelled.wait()
        return sample

    executor = ThreadExecutor(
        TransformCall(lambda sample: (wait if sample["id"] else cancel)(sample), 0),
        cancelled.is_set,
    )
    try:
        rows = TransformRows({"id": np.arange(1000)}, [(0, i) for i in range(1000)], None)
        with pytest.raises(StoppedError):
            executor.run(rows, SlowCallWatch(60, lambda row, seconds: None))
    finally:
        executor.close()
    assert len(called) <= MAX_THREADS


def test_batches_that_are_kept_stay_as_they_were(cache: Filled) -> None:
    with loader(cache, functions.augment) as made:
        kept = [batch for _ in range(4) for batch in made]
        copies = [batch["large"].copy() for batch in kept]
        for batch in kept[::2]:
            batch["large"][:] = 0
        for _ in made:
            pass
        for i, batch in enumerate(kept):
            np.testing.assert_array_equal(batch["large"], copies[i] * (i % 2))


def test_batches_that_are_kept_hold_no_descriptors(cache: Filled) -> None:
    with loader(cache, functions.augment, batch_size=1) as made:
        batches = iter(made)
        kept = [next(batches) for _ in range(30)]
        before = descriptors().total()
        kept += batches
        assert len(kept) == 80
        assert descriptors().total() < before + 20  # an index may be open for a moment


class Locking:
    """A carrier that leaves batches where they are, and looks where that is.

    Attributes:
        locked: where memory is that was locked.
        sent: where batches were.
    """

    def __init__(self) -> None:
        self.locked: list[int] = []
        self.sent: list[int] = []

    def begin(self) -> None:
        """Do nothing."""

    def enter(self) -> None:
        """Do nothing."""

    def lock(self, buffer: BufferBytes) -> None:
        self.locked.append(buffer.ctypes.data)

    def allocate(self, nbytes: int, kept: list[BufferBytes] | None) -> BufferBytes:
        return allocate_private(nbytes, kept)

    def send(self, batch: Any, origin: object = None) -> Any:
        self.sent.append(batch["large"].ctypes.data)
        return batch

    def receive(self, sent: Any) -> Any:
        return sent


def test_what_is_sent_to_a_device_lies_in_memory_that_was_locked(cache: Filled) -> None:
    transfer = Locking()
    options = LoaderOptions(
        path=cache.root,
        batch_size=7,
        min_samples=1,
        transform=functions.augment,
        num_workers=1,
        gather="thread",
    )
    engine = Consumer(options, replace(NUMPY, transfer=transfer, allocate=transfer.allocate))
    try:
        assert sum(1 for _ in engine.epoch()) == 11
    finally:
        engine.close()
    assert len(transfer.sent) == 11
    assert set(transfer.sent) <= set(transfer.locked)


def test_the_function_may_keep_samples(cache: Filled) -> None:
    with loader(cache, functions.Keeping()) as made:
        for _ in range(4):
            assert sum(1 for _ in made) == 11


@BOTH
def test_errors_tell_what_they_tell_with_threads(cache: Filled, gather: Gather) -> None:
    with loader(cache, functions.failing, gather=gather) as made:
        with pytest.raises(ZeroDivisionError, match="user's code") as raised:
            list(made)
        notes = "\n".join(raised.value.__notes__)
        assert "in transform failing" in notes
        assert "functions.py" in notes
        assert "raise ZeroDivisionError" in notes  # the traceback, as the process had it
    with loader(cache, functions.growing) as made, pytest.raises(FormatError, match="earlier"):
        list(made)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_results_that_are_no_arrays_are_refused_by_name(
    cache: Filled, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    said = r"transform returned lock: a _thread\.lock, expected an array"
    with (
        loader(cache, functions.locked, num_workers=num_workers) as made,
        pytest.raises(FormatError, match=said) as raised,
    ):
        list(made)
    assert any(note.startswith("in transform locked") for note in raised.value.__notes__)
    assert not caplog.text


def test_what_ends_a_process_before_it_works_is_told(
    cache: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader(cache, functions.where) as made:
        (tmp_path / "orjson.py").write_text("raise RuntimeError('no such thing here')\n")
        monkeypatch.syspath_prepend(tmp_path)
        said = r"ended with 1: RuntimeError: no such thing here \(.*orjson.py:1\), 3 times"
        with pytest.raises(CacheError, match=said):
            list(made)


def test_errors_that_cannot_travel_are_told() -> None:
    class LocalError(ValueError):
        pass

    try:
        raise LocalError("in the user's code")
    except LocalError as error:
        found = portable_error(error, "another process")
    assert isinstance(found, CacheError)
    assert "LocalError: in the user's code" in str(found)
    assert "in another process:\nTraceback" in str(found)


def test_a_process_that_dies_is_replaced(
    cache: Filled, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deadly = functions.Deadly(str(tmp_path / "flag"), at=5003)
    with loader(cache, deadly, drop_last=False) as made:
        assert sum(len(batch["id"]) for batch in made) == 80
    assert caplog.text.count("was killed by SIGABRT; another one takes its place") == 1


def test_a_process_that_hears_no_more_is_replaced(
    cache: Filled, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deafening = functions.Deafening(str(tmp_path / "flag"))
    with loader(cache, deafening, drop_last=False) as made:
        assert sum(len(batch["id"]) for batch in made) == 80
    assert "ended with 1: growcache.errors.CacheError: cannot map" in caplog.text
    assert caplog.text.count("another one takes its place") == 1


def test_samples_that_end_every_process_are_an_error(cache: Filled) -> None:
    deadly, said = functions.Deadly("", at=5003), "was killed by SIGABRT, 3 times on the same"
    with loader(cache, deadly, drop_last=False) as made, pytest.raises(CacheError, match=said):
        list(made)


def test_what_cannot_be_sent_is_refused_at_once(cache: Filled) -> None:
    lock = threading.Lock()

    def locked(sample: Any) -> Any:
        with lock:
            return sample

    with pytest.raises(ConfigError, match=r"cannot be sent.*lock.*num_workers=0"):
        loader(cache, locked)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="num_workers must be"):
            loader(cache, None, num_workers=wrong)


@pytest.mark.slow
def test_a_module_that_only_the_trainer_has_is_named(
    cache: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fleeting.py").write_text("def same(sample):\n    return sample\n")
    monkeypatch.syspath_prepend(tmp_path)
    from fleeting import same  # type: ignore[import-not-found]

    monkeypatch.undo()
    with loader(cache, same) as made, pytest.raises(ModuleNotFoundError, match="fleeting") as e:
        next(iter(made))
    assert any("while the transform was loaded" in note for note in e.value.__notes__)


SCRIPT = """
    import os, sys
    import numpy as np
    from growcache.numpy import EpochLoader

    print("the script runs")
    SCALE = 3

    def triple(sample, rng):
        return {"id": sample["id"] * SCALE, "pid": np.array(os.getpid())}

    add = 1
    for function in (triple, lambda sample: {"id": sample["id"] + add, "pid": np.array(os.getpid())}):
        with EpochLoader(
            sys.argv[1], batch_size=8, min_samples=1, transform=function, num_workers=2, gather=sys.argv[2]
        ) as loader:
            batch = next(iter(loader))
            assert os.getpid() not in batch["pid"]
            print(sorted(batch["id"] % 3))
"""


@BOTH
def test_functions_of_a_script_need_no_guard(
    cache: Filled, tmp_path: Path, gather: Gather
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "error", str(script), str(cache.root), gather]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the script runs") == 1
    assert "[0, 0, 0, 0, 0, 0, 0, 0]" in done.stdout.replace("np.int64(0)", "0")


ENDING = """
    import sys, time
    from growcache.numpy import EpochLoader

    def slow(sample):
        time.sleep(0.05)
        return sample

    loader = EpochLoader(sys.argv[1], batch_size=8, min_samples=1, transform=slow, num_workers=2)
    batches = iter(loader)
    next(batches)
"""


def test_a_script_that_ends_in_an_epoch_starts_no_processes(cache: Filled) -> None:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(ENDING), str(cache.root)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert open_leases(cache.root) == []


def test_without_a_transform_no_process_starts(cache: Filled) -> None:
    before = children()  # servers of other tests
    with loader(cache, None, gather="thread") as made:
        next(iter(made))
        assert children() == before
