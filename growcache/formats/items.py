"""Formats whose objects are sequences of items: lines, records, members or values.

A part is a byte range, and owns the items that start in it. The user's functions are
synchronous, and run in threads next to the sampler's event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from growcache.errors import (
    ConfigError,
    FormatError,
    GrowcacheError,
    StoreError,
    TransientStoreError,
)
from growcache.formats.base import (
    Measure,
    ObjectFormat,
    ObjectReader,
    PartlyReadError,
    SamplesWithOrigins,
    Visit,
    refuse_many_samples,
    take_some,
)
from growcache.formats.byte_ranges import MOST_RECORD_BYTES, FetchedObject
from growcache.formats.compressed import UnpackLimit, limit_of_records, read_unpacked
from growcache.schema import Sample
from growcache.seeding import generator_at
from growcache.store.contract import Entry
from growcache.usercode import UserCode, load_code

RANDOM_RANGE_BYTES = 1 << 20  # read where a few items of many are taken


class Item(Protocol):
    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


T = TypeVar("T")
ItemT = TypeVar("ItemT", bound=Item)


MOST_THREADS = 64  # visits in flight beyond this number wait for a thread


_this_thread = threading.local()  # the call that a pool thread is running


class UserCall:
    def __init__(self) -> None:
        # Failure of a read. The call must then fail, too, even if the user's code handled the
        # failure, because a retry could give another result.
        self.failure: TransientStoreError | None = None
        self._loop = asyncio.get_running_loop()
        self._given_up = False

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a read in the event loop and wait for it.

        It fails after the call has ended, because the user's code may keep a file open.
        """
        running: UserCall = getattr(_this_thread, "call", self)
        try:
            running.check()
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except TransientStoreError as error:
            running.failure = error
            raise
        finally:
            work.close()

    def check(self) -> None:
        if self._given_up:
            raise StoreError("this read was given up")

    def give_up(self) -> None:
        self._given_up = True

    def run(self, work: Callable[[UserCall], T]) -> T:
        _this_thread.call = self
        return work(self)


class UserThreads:
    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[UserCall], T]) -> T:
        """Return the result of ``work``.

        A read's transient failure is raised even if the user's code handled it.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(MOST_THREADS, "growcache-user")
        call = UserCall()
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._pool, call.run, work)
        except asyncio.CancelledError:
            call.give_up()
            raise
        except GrowcacheError:
            if call.failure is not None:
                raise call.failure from None
            raise
        if call.failure is not None:
            raise call.failure
        return result


class ItemsFormat(ObjectFormat):
    """Base class of formats of items. Compressed objects are read whole."""

    # A visit is worth its requests with `visit_least` samples and `visit_bytes`, unless these
    # exceed `visit_most_bytes`. Each visit reads about two extra items.
    visit_least: ClassVar[int] = 24
    visit_bytes: ClassVar[int]
    visit_most_bytes: ClassVar[int] = 1 << 25
    inline_bytes: ClassVar[int] = 0  # of items that are decoded in the event loop itself

    def __init__(self, code: UserCode | None = None, compression: str = "none") -> None:
        self._code = code
        self._threads = UserThreads()
        self._compression = compression
        self.ranged = compression == "none"
        self.code_digest = code.digest if code else None

    def measure_of(self, entry: Entry, count: int, stride: float | None = None) -> Measure:
        """Return the measure of an object.

        ``stride`` is in bytes, and given if visits read ranges.
        """
        if stride is None:
            return Measure(entry.size / max(1, count), 0, count)
        stride = max(1.0, stride)
        worth = max(self.visit_least, int(self.visit_bytes / stride))
        worth = max(1, min(worth, int(self.visit_most_bytes / stride)))
        return Measure(stride, 0, count, worth)

    async def unpacked(self, reader: ObjectReader) -> FetchedObject:
        limit = self.unpack_limit(reader.entry)
        return FetchedObject(reader, await read_unpacked(reader, self._compression, limit))

    def unpack_limit(self, _: Entry) -> UnpackLimit:
        return limit_of_records

    async def samples_of(
        self,
        key: str,
        items: Sequence[ItemT],
        decode: Callable[[ItemT], Sample | None],
        label: Callable[[ItemT], str],
        errors: Sequence[FormatError] = (),
    ) -> SamplesWithOrigins:
        """Decode items. Those that fail do not affect the others.

        Raises:
            PartlyReadError: The first of ``errors``, or the first failure of an item.
        """
        work = partial(_decode_items, key, items, decode, label, errors)
        if self._code is not None:
            return await self._threads.run(lambda call: work(call.check))
        if items and items[-1].stop - items[0].start > self.inline_bytes:
            return await asyncio.to_thread(work)
        return work()

    def by_user(self, object_key: str, data: object, key: str | bytes) -> Sample | None:
        assert self._code is not None
        result = self._code(object_key, {"data": data, "key": key})
        return None if result is None else self._code.sample(object_key, result)


def _decode_items(
    key: str,
    items: Sequence[ItemT],
    decode: Callable[[ItemT], Sample | None],
    label: Callable[[ItemT], str],
    errors: Sequence[FormatError],
    before_each: Callable[[], None] = lambda: None,
) -> SamplesWithOrigins:
    refuse_many_samples(key, len(items))
    samples: SamplesWithOrigins = []
    wrong = [str(error) for error in errors]
    for item in items:
        before_each()
        try:
            sample = decode(item)
        except FormatError as error:
            wrong.append(f"{key}: {label(item)}: {error}")
            continue
        if sample is not None:
            samples.append((sample, item.start, item.stop))
    if wrong:
        more = f" (and {len(wrong) - 1:,} more)" if len(wrong) > 1 else ""
        raise PartlyReadError(wrong[0] + more, samples)
    return samples


async def items_of_part(
    reader: ObjectReader,
    visit: Visit,
    items_in: Callable[[int, int], Awaitable[Sequence[T]]],
    *,
    range_bytes: int,
    most_ranges: int,
    least_bytes: int = 0,
) -> list[T]:
    """Return the items of a part. ``items_in`` returns those that start in [start, stop).

    In parts of more than ``least_bytes``, random ranges are read until they have enough items.
    """
    size, key = reader.entry.size, reader.entry.key
    start, stop = visit.part * size // visit.parts, (visit.part + 1) * size // visit.parts
    if visit.take is None or stop - start <= least_bytes:
        if stop - start > MOST_RECORD_BYTES:
            raise FormatError(
                f"{key}: one visit may read at most {MOST_RECORD_BYTES:,} bytes, found "
                f"{stop - start:,}; lower sampling.samples_per_object",
                code="GC305",
            )
        return take_some(await items_in(start, stop), visit, key)
    found: dict[int, Sequence[T]] = {}
    for first, last in _random_ranges(visit, key, start, stop, range_bytes, most_ranges):
        found[first] = await items_in(first, last)
        if sum(map(len, found.values())) >= visit.take:
            break
    return take_some([item for at in sorted(found) for item in found[at]], visit, key)


def _random_ranges(
    visit: Visit, key: str, start: int, stop: int, nbytes: int, most: int
) -> Iterator[tuple[int, int]]:
    rng = generator_at("stretch", visit.seed, visit.round, key, visit.part)
    count = max(1, -(-(stop - start) // nbytes))
    seen: set[int] = set()
    while len(seen) < min(count, most):
        number = int(rng.integers(count))
        if number not in seen:
            seen.add(number)
            at = start + number * nbytes
            yield at, min(stop, at + nbytes)


def decode_option(
    options: Mapping[str, Any], choices: tuple[str, ...] = ("none",)
) -> tuple[str, UserCode | None]:
    """Return the choice of the option decode, or the user's code.

    The first choice is the default.
    """
    decode = str(options.get("decode", choices[0]) or "none")  # also for YAML's null
    if decode in choices:
        return decode, None
    if len(choices) > 1 and ":" not in decode:
        raise ConfigError(
            f"source.options.decode: expected {', '.join(choices)} or package.module:function, "
            f"found {options['decode']!r}"
        )
    code = load_code(decode, {}, ("data", "key"), ("source.options.decode", "source.options"))
    if "data" not in code.parameters:
        raise ConfigError(
            f"source.options.decode: {decode} must take data, and may take key", code="GC108"
        )
    return decode, code
