"""Copies of many rows by one system call: the same bytes, in few turns of the GIL."""

import ctypes
import errno
import mmap
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import CorruptShardError
from growcache.loading import framework
from growcache.loading.framework import (
    MAX_IOVEC_ROWS,
    Bytes,
    Take,
    copy_rows,
    take_rows,
    take_slices,
)

MEMORY: Bytes = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8)


pytestmark = pytest.mark.skipif(
    not copy_rows(MEMORY[:1], np.array([0]), np.array([1]), np.zeros(1, np.uint8)),
    reason="this system has no such call, or does not allow it",
)


def copied(starts: list[int], lengths: list[int]) -> Bytes:
    out = np.zeros(sum(lengths), np.uint8)
    assert copy_rows(MEMORY, np.array(starts, np.int64), np.array(lengths, np.int64), out)
    return out


@given(st.lists(st.tuples(st.integers(0, 2 << 20), st.integers(0, 1 << 18)), max_size=20))
def test_rows_lie_one_behind_the_other(parts: list[tuple[int, int]]) -> None:
    starts, lengths = [start for start, _ in parts], [length for _, length in parts]
    expected = b"".join(MEMORY[start : start + length].tobytes() for start, length in parts)
    assert copied(starts, lengths).tobytes() == expected


def test_rows_are_more_than_one_call_takes() -> None:
    starts = np.random.default_rng(1).permutation(2 * MAX_IOVEC_ROWS + 7)
    out = np.zeros((len(starts), 100), np.uint8)
    lengths = np.full(len(starts), 100)
    assert copy_rows(MEMORY, starts, lengths, out.reshape(-1))
    assert (out == MEMORY[starts[:, None] + np.arange(100)]).all()


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=9), st.lists(st.integers(1, 2**14)))
def test_what_a_call_leaves_over_is_copied_by_the_next(
    lengths: list[int], least: list[int]
) -> None:
    """As of more than 2 GB: here calls end early, wherever it is in a row."""
    limits = iter(least)
    real = framework.process_vm_readv
    assert real is not None

    def short(pid: int, into: ctypes.Array[ctypes.c_size_t], *rest: int) -> int:
        asked, limit = into[1], next(limits, into[1])
        into[1] = min(asked, limit)
        return real(pid, into, *rest)

    starts = [7 * i for i in range(len(lengths))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framework, "process_vm_readv", short)
        found = copied(starts, lengths)
    expected = [MEMORY[s : s + n] for s, n in zip(starts, lengths, strict=True)]
    assert (found == np.concatenate(expected)).all()


@pytest.mark.parametrize("nbytes", [0, 99, 101])
def test_rows_must_be_as_long_as_what_they_are_copied_to(nbytes: int) -> None:
    out = np.zeros(nbytes, np.uint8)
    with pytest.raises(ValueError, match=f"rows of 100 bytes for {nbytes}"):
        copy_rows(MEMORY, np.array([0, 7]), np.array([60, 40]), out)


def test_rows_beyond_the_memory_are_refused() -> None:
    out = np.zeros(10, np.uint8)
    for start in (-1, len(MEMORY) - 9):
        with pytest.raises(IndexError):
            copy_rows(MEMORY, np.array([start]), np.array([10]), out)


def test_a_file_that_was_cut_short_is_an_error_and_no_end_of_the_process(
    tmp_path: Path,
) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(1 << 20))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        memory = np.frombuffer(mapped, np.uint8)
        file.truncate(1 << 19)
        out = np.empty((4, 1 << 16), np.uint8)
        take_rows(memory, np.array([0, 1 << 17, 1 << 16, 0]), out)
        with pytest.raises(CorruptShardError, match="cut short"):
            take_rows(memory, np.array([0, 1 << 17, 3 << 18, 0]), out)
        del memory


TURN_SECONDS = 0.1


def waits() -> int:
    """Return how often this thread gave up its processor to wait for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@pytest.fixture
def busy() -> Iterator[None]:
    """Another thread that is in Python all the time, and lets go of its lock only when it must."""
    before, over = sys.getswitchinterval(), False

    def work() -> None:
        while not over:
            pass

    thread = threading.Thread(target=work)
    sys.setswitchinterval(TURN_SECONDS)
    try:
        thread.start()
        yield
    finally:
        over = True
        thread.join()
        sys.setswitchinterval(before)


def takes() -> list[Take]:
    try:
        from growcache.torch import take_rows as torch_take
    except ImportError:
        return [take_rows]
    return [take_rows, torch_take]


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("take", takes())
@pytest.mark.parametrize(
    ("rows", "nbytes", "most"),
    [(64, 20_000, 5), (64, 64_000, 5), (64, 80_004, 5), (600, 80_004, 9), (1100, 20_000, 9)],
)
def test_rows_do_not_wait_for_a_busy_thread_one_by_one(
    take: Take, rows: int, nbytes: int, most: int
) -> None:
    """It is waited for once or twice, and some times more where rows take several calls."""
    starts = np.arange(rows) * 1000
    out = np.empty((rows, nbytes), np.uint8)
    before = waits()
    take(MEMORY, starts, out)
    assert (
        waits() - before < 2 * most
    )  # for each turn it sleeps once or twice; not by the clock
    assert (out[-1] == MEMORY[starts[-1] : starts[-1] + nbytes]).all()


@pytest.fixture(params=["unknown", "refused"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without the call, or one on which it is not allowed."""

    def refused(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(
        framework, "process_vm_readv", None if request.param == "unknown" else refused
    )


@pytest.mark.usefixtures("elsewhere")
def test_without_the_call_rows_are_copied_one_by_one() -> None:
    starts = np.array([5, 1 << 20, 0, 3])
    out = np.empty((4, 40_000), np.uint8)
    take_rows(MEMORY, starts, out)
    assert (out == MEMORY[starts[:, None] + np.arange(40_000)]).all()
    joined = np.empty(90_000, np.uint8)
    take_slices(MEMORY, np.array([0, 7]), np.array([50_000, 40_000]), joined)
    assert (joined == np.concatenate([MEMORY[:50_000], MEMORY[7:40_007]])).all()
