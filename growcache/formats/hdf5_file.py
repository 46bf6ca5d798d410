"""Open remote HDF5 files with h5py, and fetch only the metadata that the library reads.

h5py reads an image of the file in memory. Reading missing bytes fails, and their range is
recorded. The range is then fetched without holding any lock, and the call is repeated. So no
thread waits for the network inside HDF5, which runs one call at a time.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from growcache.errors import FormatError, GrowcacheError
from growcache.formats.base import SMALL_OBJECT_BYTES, ObjectReader
from growcache.formats.memory import LruCache
from growcache.formats.signatures import SIGNATURE_BYTES, advice_on
from growcache.store.contract import Entry
from growcache.store.seekable_file import SeekableFile

if TYPE_CHECKING:
    from typing_extensions import Buffer


T = TypeVar("T")

METADATA_BLOCK_BYTES = 1 << 13  # bytes; metadata is fetched in whole blocks
FILE_HEAD_BYTES = SMALL_OBJECT_BYTES  # at the start; they contain all metadata of most files
MOST_DOUBLINGS = 7  # of the fetched size, if one question leads to the next
MOST_ATTEMPTS = 100  # consecutive requests for one question
MOST_READ_BYTES = 1 << 24  # of one read by the library
MOST_METADATA_BYTES = 1 << 26  # kept, of all files together
_SIGNATURE = b"\x89HDF"
MOST_OPEN_FILES = 64  # open at a time; the metadata of closed files is still kept


class _MissingBytesError(OSError):
    """HDF5 reads bytes that have not been fetched yet."""


class MetadataImage(SeekableFile):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.missing: list[tuple[int, int]] = []
        self._located: tuple[int, int] | None = None
        self._locating = False
        self._blocks: dict[int, memoryview] = {}

    @property
    def nbytes(self) -> int:
        return len(self._blocks) * METADATA_BLOCK_BYTES

    def readinto(self, buffer: Buffer) -> int:
        into = memoryview(buffer).cast("B")
        start, stop = self.position, self.position + len(into)
        if stop > self.size:
            raise OSError(f"bytes {start} to {stop} of {self.size}")
        if self._locating:  # the bytes are not used
            if self._located is not None:
                raise OSError("a chunk in more than one piece")
            self._located = (start, len(into))
            return len(into)
        if len(into) > MOST_READ_BYTES:
            raise OSError(f"{len(into)} bytes of metadata")
        if self.missing_blocks(start, stop):
            self.missing.append((start, stop))
            raise _MissingBytesError(f"bytes {start} to {stop}")
        for number in _block_numbers(start, stop):
            block, first = self._blocks[number], number * METADATA_BLOCK_BYTES
            low, high = max(start, first), min(stop, first + METADATA_BLOCK_BYTES)
            into[low - start : high - start] = block[low - first : high - first]
        self.position = stop
        return len(into)

    def locate(self, work: Callable[[], T]) -> tuple[T, tuple[int, int]]:
        """Return the result of ``work``, and offset and size of the range that it fails to read."""
        self._locating, self._located = True, None
        try:
            result = work()
        finally:
            self._locating = False
        found: tuple[int, int] | None = self._located  # set by `work`
        return result, found or (0, 0)

    def missing_blocks(self, start: int, stop: int) -> list[int]:
        return [number for number in _block_numbers(start, stop) if number not in self._blocks]

    def read_kept(self, start: int, stop: int) -> bytes | None:
        if stop > self.size or self.missing_blocks(start, stop):
            return None
        blocks = b"".join(self._blocks[number] for number in _block_numbers(start, stop))
        first = start // METADATA_BLOCK_BYTES * METADATA_BLOCK_BYTES
        return blocks[start - first : stop - first]

    def keep_blocks(self, number: int, data: memoryview) -> None:
        for at in range(0, len(data), METADATA_BLOCK_BYTES):
            block = data[at : at + METADATA_BLOCK_BYTES]
            self._blocks[number + at // METADATA_BLOCK_BYTES] = block


def _block_numbers(start: int, stop: int) -> range:
    return range(start // METADATA_BLOCK_BYTES, -(-stop // METADATA_BLOCK_BYTES))


_LIBRARY_LOCK = threading.RLock()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection, because it would close objects of HDF5 in this thread.

    h5py's lock is reentrant, and a call within another one confuses the library.
    """
    with _LIBRARY_LOCK:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


class _ImageFirstReader:
    def __init__(self, remote: ObjectReader, image: MetadataImage) -> None:
        self.entry, self.source, self.find = remote.entry, remote.source, remote.find
        self._remote = remote
        self._image = image

    async def read(self, start: int = 0, stop: int | None = None) -> Buffer:
        end = self.entry.size if stop is None else stop
        here = self._image.read_kept(start, end)
        return await self._remote.read(start, stop) if here is None else here


class HDF5File:
    """A remote HDF5 file and its fetched metadata.

    ``on_growth`` is called after each fetch of metadata.
    """

    def __init__(
        self, entry: Entry, thread: ThreadPoolExecutor, on_growth: Callable[[HDF5File], None]
    ) -> None:
        self.image = MetadataImage(entry.size)
        self.entry = entry
        self._thread = thread
        self._on_growth = on_growth
        self._file: Any = None
        self._coming: dict[int, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, reader: ObjectReader, work: Callable[[Any], T]) -> T:
        """Return the result of ``work`` on the open `h5py.File`.

        ``work`` may run several times.
        """
        loop = asyncio.get_running_loop()
        if not self.image.nbytes:
            await self._fetch(reader, [(0, min(FILE_HEAD_BYTES, self.image.size))], 0)
        for turn in range(MOST_ATTEMPTS):
            result, missing = await loop.run_in_executor(self._thread, self._attempt, work)
            if not missing:
                assert result is not None
                return result
            if self.image.nbytes > MOST_METADATA_BYTES:
                break
            await self._fetch(reader, missing, turn)
        raise FormatError(
            f"{self.entry.key}: its metadata is scattered over too much of the file",
            code="GC305",
        )

    def reader(self, reader: ObjectReader) -> ObjectReader:
        return _ImageFirstReader(reader, self.image)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with without_garbage_collection():
                file.close()

    @without_garbage_collection()
    def _attempt(self, work: Callable[[Any], T]) -> tuple[T | None, list[tuple[int, int]]]:
        import h5py

        self.image.missing = []
        try:
            if self._file is None:
                self._file = h5py.File(self.image, "r", rdcc_nbytes=0)
            result = work(self._file)
            if not self.image.missing:
                return result, []
        except GrowcacheError:
            if not self.image.missing:
                raise
        except Exception as error:  # a damaged file can make HDF5 raise anything
            if not self.image.missing:
                self.close()
                said = " ".join(str(error).split()) or type(error).__name__
                head = self.image.read_kept(0, min(SIGNATURE_BYTES, self.image.size)) or b""
                advice = "" if head.startswith(_SIGNATURE) else advice_on(head)
                raise FormatError(
                    f"{self.entry.key}: cannot be read as HDF5: {said[:200]}{advice}"
                ) from error
        self.close()  # HDF5 may remember that a read failed
        return None, self.image.missing

    async def _fetch(
        self, reader: ObjectReader, ranges: Sequence[tuple[int, int]], turn: int
    ) -> None:
        """Fetch the missing blocks, and more blocks after them in every round."""
        ahead = METADATA_BLOCK_BYTES << min(turn, MOST_DOUBLINGS)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._coming, self._loop = {}, loop
        waited: set[asyncio.Task[None]] = set()
        for start, stop in ranges:
            absent = self.image.missing_blocks(
                start, min(self.image.size, max(stop, start + ahead))
            )
            waited |= {self._coming[n] for n in absent if n in self._coming}
            for run in _consecutive(n for n in absent if n not in self._coming):
                task = loop.create_task(self._get(reader, run))
                self._coming |= dict.fromkeys(run, task)
                task.add_done_callback(_ignore_error)
                waited.add(task)
        await asyncio.gather(*map(asyncio.shield, waited))

    async def _get(self, reader: ObjectReader, run: range) -> None:
        try:
            stop = min(self.image.size, run.stop * METADATA_BLOCK_BYTES)
            data = await reader.read(run.start * METADATA_BLOCK_BYTES, stop)
            self.image.keep_blocks(run.start, memoryview(data).cast("B"))
            self._on_growth(self)
        finally:
            for number in run:
                self._coming.pop(number, None)


def _ignore_error(task: asyncio.Task[None]) -> None:
    """Retrieve the error of a fetch whose waiters were all cancelled."""
    if not task.cancelled():
        task.exception()


def _consecutive(numbers: Iterator[int]) -> list[range]:
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


class HDF5Files:
    def __init__(self) -> None:
        # One thread is enough, because HDF5 runs one call at a time.
        self._thread = ThreadPoolExecutor(1, "growcache-hdf5")
        self._files: LruCache[Entry, HDF5File] = LruCache(MOST_METADATA_BYTES, self._forget)
        self._open: LruCache[Entry, HDF5File] = LruCache(MOST_OPEN_FILES, self._close)
        # HDF5 closes open files when the process ends, which is too late for files in Python.
        weakref.finalize(self, _close_all, self._files)

    def __len__(self) -> int:
        return len(self._files)

    def get(self, entry: Entry) -> HDF5File:
        file = self._files.get(entry)
        if file is None:
            file = HDF5File(entry, self._thread, self._count)
            self._files.put(entry, file, METADATA_BLOCK_BYTES)
        self._open.put(entry, file, 1)
        return file

    def _count(self, file: HDF5File) -> None:
        if self._files.get(file.entry) is file:
            nbytes = METADATA_BLOCK_BYTES + file.image.nbytes
            self._files.put(file.entry, file, nbytes)

    def _forget(self, file: HDF5File) -> None:
        self._open.pop(file.entry)
        self._close(file)

    def _close(self, file: HDF5File) -> None:
        self._thread.submit(file.close)


def _close_all(files: Iterable[HDF5File]) -> None:
    for file in files:
        file.close()
