"""Formats in user code: ``read(object, rng)`` or ``sample(store, rng)``."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from growcache.errors import (
    ConfigError,
    FormatError,
)
from growcache.formats.base import (
    ENDLESS_PARTS,
    MOST_VISIT_BYTES,
    Measure,
    ObjectFormat,
    ObjectReader,
    Visit,
    ordinals_of_part,
)
from growcache.formats.items import UserCall, UserThreads
from growcache.schema import Sample
from growcache.seeding import generator_at
from growcache.store.seekable_file import SeekableFile
from growcache.usercode import UserCode, load_code, short_key

if TYPE_CHECKING:
    from typing_extensions import Buffer


_FIRST_READ_AHEAD, _MOST_READ_AHEAD = 1 << 16, 1 << 23  # bytes read beyond the requested ones


class ObjectFile(SeekableFile):
    """A file of an object's bytes, for one thread at a time.

    Sequential reads fetch up to 8 MiB ahead.
    """

    def __init__(self, call: UserCall, reader: ObjectReader) -> None:
        super().__init__(reader.entry.size)
        self._call = call
        self._reader = reader
        self._held, self._start = memoryview(b""), 0
        self._ahead = _FIRST_READ_AHEAD

    @property
    def name(self) -> str:
        return self._reader.entry.key

    def readinto(self, buffer: Buffer) -> int:
        into = memoryview(buffer).cast("B")
        wanted = min(len(into), max(0, self.size - self.position))
        done = 0
        while done < wanted:
            found = self._window(wanted - done)
            into[done : done + len(found)] = found
            self.position += len(found)
            done += len(found)
        return done

    def _window(self, wanted: int) -> memoryview:
        """Return at least one and at most ``wanted`` bytes from the current position."""
        end = self._start + len(self._held)
        if not self._start <= self.position < end:
            follows = self.position == end
            self._ahead = (
                min(_MOST_READ_AHEAD, 2 * self._ahead) if follows else _FIRST_READ_AHEAD
            )
            stop = min(self.size, self.position + max(wanted, self._ahead))
            data = self._call.wait(self._reader.read(self.position, stop))
            self._held, self._start = memoryview(data).cast("B"), self.position
        begin = self.position - self._start
        return self._held[begin : begin + wanted]


PARAMETERS = ("object", "store", "rng")
# Of a sample besides its values, because a function may yield empty samples without end.
SAMPLE_BYTES = 512


_NOT_ITERABLES_OF_SAMPLES = (str, bytes, bytearray, memoryview, np.ndarray, Mapping)


class UserObject:
    """One remote object, as it is passed to the user's code.

    Attributes:
        key: Key without bucket or scheme.
        size: Size in bytes.
        etag: Version as the store names it; None if the store has no versions.
    """

    def __init__(self, call: UserCall, reader: ObjectReader) -> None:
        entry = reader.entry
        self.key, self.size, self.etag = entry.key, entry.size, entry.etag
        self._call = call
        self._reader = reader

    def __repr__(self) -> str:
        return f"<object {self.key}, {self.size} bytes>"

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of the object, by default all of them.

        They are of the listed version. Transient failures are retried. Several threads may read
        at the same time.

        Args:
            start: First byte.
            stop: One after the last byte; None means the end of the object.

        Raises:
            StoreError: The object was deleted or rewritten, the store refuses it, or there was
                no answer.
        """
        return bytes(memoryview(self._call.wait(self._reader.read(start, stop))))

    def open(self) -> BinaryIO:
        """Return a read-only, seekable file of the object's bytes, which reads ahead.

        Its ``name`` is the key, for libraries that look at a file's ending.
        """
        return cast(BinaryIO, io.BufferedReader(ObjectFile(self._call, self._reader)))


class UserStore:
    """The source, as it is passed to a function that draws its own samples.

    Attributes:
        url: URL of the source, or the first of several.
        urls: All URLs of the source.
        storage_options: Options of the source, for clients in the user's code.
    """

    def __init__(self, call: UserCall, reader: ObjectReader, found: _KnownObjects) -> None:
        self.urls = reader.source.url
        self.url = self.urls[0]
        self.storage_options = dict(reader.source.storage_options)
        self._call = call
        self._reader = reader
        self._found = found

    def object(self, key: str) -> UserObject:
        """Return the object with a key, in the bucket or on the host of `url`.

        On file systems, a key that does not start with ``/`` is relative to the folder of
        `url`.
        """
        return UserObject(self._call, self._found.reader(key, self._call, self._reader))

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of an object; see `UserObject.read`."""
        return self.object(key).read(start, stop)

    def open(self, key: str) -> BinaryIO:
        """Return a file of an object's bytes; see `UserObject.open`."""
        return self.object(key).open()


class _KnownObjects:
    _MOST = 4096  # about 300 bytes each

    def __init__(self) -> None:
        self._readers: dict[str, ObjectReader] = {}
        self._lock = threading.Lock()

    def reader(self, key: str, call: UserCall, near: ObjectReader) -> ObjectReader:
        with self._lock:
            known = self._readers.get(key)
        if known is None:
            known = call.wait(near.find(key))
            with self._lock:
                if len(self._readers) >= self._MOST:
                    self._readers.pop(next(iter(self._readers)))
                self._readers[key] = known
        return known


class UserReadFormat(ObjectFormat):
    """The format of a function ``read(object, rng)``. Each object is one part."""

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self._threads = UserThreads()
        self.code_digest = code.digest

    async def measure(self, reader: ObjectReader) -> Measure:
        found = await self.read(reader, Visit(0, 1, 0, 0))
        return Measure(reader.entry.size / max(1, len(found)), 0, len(found))

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        """Return the samples of an object.

        Their origins are their numbers in the order of yields.
        """
        key = reader.entry.key

        def work(call: UserCall) -> list[Sample]:
            rng = generator_at("read", visit.seed, visit.round, visit.chosen_by(key))
            values = {"object": UserObject(call, reader), "rng": rng}
            return self._collected(self._code(key, values), key, call)

        samples = await self._threads.run(work)
        chosen: Iterable[int] = range(len(samples))
        if visit.take is not None and visit.take < len(samples):
            rng = generator_at("take", visit.seed, visit.round, visit.chosen_by(key))
            picked = rng.choice(len(samples), visit.take, replace=False)
            chosen = np.sort(picked).tolist()
        return [(samples[i], i, i + 1) for i in chosen]

    def _collected(self, result: object, key: str, call: UserCall) -> list[Sample]:
        if isinstance(result, _NOT_ITERABLES_OF_SAMPLES) or not isinstance(result, Iterable):
            raise FormatError(
                f"{self._code.name} on {short_key(key)}: expected an iterable of samples (yield "
                f"them, or return a list), found {type(result).__name__}",
                code="GC309",
            )
        samples: list[Sample] = []
        held = 0
        for found in self._code.items(key, result):
            call.check()
            samples.append(self._code.sample(key, found))
            held += SAMPLE_BYTES + _nbytes(samples[-1])
            if held > MOST_VISIT_BYTES:
                raise FormatError(
                    f"{self._code.name} on {short_key(key)}: expected samples of at most "
                    f"{MOST_VISIT_BYTES:,} bytes, found more after {len(samples):,}; does it end?",
                    code="GC305",
                )
        return samples


class UserSampleFormat(ObjectFormat):
    """The format of a function ``sample(store, rng)``, which draws an unknown number of samples."""

    ranged = True
    listed = False

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self._threads = UserThreads()
        self._found = _KnownObjects()
        self.code_digest = code.digest

    async def measure(self, reader: ObjectReader) -> Measure:
        return Measure(1.0, 0, ENDLESS_PARTS)

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        """Return a drawn sample. Its origin is the number of the draw."""

        def work(call: UserCall) -> list[tuple[Sample, int, int]]:
            return [
                (sample, number, number + 1)
                for number in ordinals_of_part(ENDLESS_PARTS, visit)
                if (sample := self._sampled(number, visit, reader, call)) is not None
            ]

        return await self._threads.run(work)

    def _sampled(
        self, number: int, visit: Visit, reader: ObjectReader, call: UserCall
    ) -> Sample | None:
        call.check()
        rng = generator_at("sample", visit.seed, visit.round, number)
        store = UserStore(call, reader, self._found)
        where = f"draw {number}"
        result = self._code(where, {"store": store, "rng": rng})
        return None if result is None else self._code.sample(where, result)


def open_user(name: str, options: Mapping[str, Any]) -> UserReadFormat | UserSampleFormat:
    """Return the format of a user's function or class.

    It takes ``object`` and optionally ``rng``, and returns an iterable of samples. Or it takes
    ``store`` and optionally ``rng``, and returns one sample or None. A class is instantiated
    once per sampler.
    """
    code = load_code(name, options, PARAMETERS, ("source.format", "source.options"))
    takes = set(code.parameters) & {"object", "store"}
    if len(takes) != 1:
        raise ConfigError(
            f"source.format: {name} must take object (read(object, rng), which yields samples) "
            f"or store (sample(store, rng), which returns one), found "
            f"({', '.join(code.parameters)})",
            code="GC108",
        )
    return UserReadFormat(code) if takes == {"object"} else UserSampleFormat(code)


def _nbytes(sample: Sample) -> int:
    return sum(_value_bytes(value) for value in sample.values())


def _value_bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, np.ndarray) else len(value)
