"""The sources that samples are drawn from, mostly one: whose an object is, and how it is read.

Where several are mixed, URLs are numbered through all of them, in their order; so an entry's
``store`` tells whose it is, and the store and the format of that source only know of their own.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, zip_longest
from typing import Any, TypeVar

from growcache.config import SourceConfig
from growcache.errors import GrowcacheError, TransientStoreError
from growcache.remote.formats import ObjectFormat, open_source
from growcache.remote.store import PAGE, Entry, RemoteStore, Store, StoreReader, open_store

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Opened:
    """One source.

    Attributes:
        store: where its objects are.
        format: what they hold.
    """

    store: Store
    format: ObjectFormat


class Sources:
    """All of them; see `open_sources`.

    Args:
        opened: in their order.
    """

    def __init__(self, opened: Sequence[Opened]) -> None:
        self._opened = opened
        self._firsts = firsts(one.store.source for one in opened)

    @property
    def formats(self) -> list[ObjectFormat]:
        """What the objects of each hold."""
        return [one.format for one in self._opened]

    @property
    def listed(self) -> bool:
        """Whether samples come from listed objects; see `ObjectFormat.listed`."""
        return all(form.listed for form in self.formats)

    @property
    def code_digest(self) -> str | None:
        """Of the user's code that the formats run."""
        digests = [form.code_digest for form in self.formats]
        if len(digests) == 1 or not any(digests):
            return digests[0]
        return hashlib.sha256("\n".join(found or "" for found in digests).encode()).hexdigest()

    def format_of(self, entry: Entry) -> ObjectFormat:
        """Return what an object holds."""
        return self._opened[owner(self._firsts, entry.store)].format

    def reader(self, entry: Entry, partners: Sequence[Entry] = ()) -> StoreReader:
        """Return an object as its format reads it.

        Args:
            entry: as it was listed.
            partners: the objects of the other fields.
        """
        number = owner(self._firsts, entry.store)
        first = self._firsts[number]
        own = [replace(e, store=e.store - first) if first else e for e in (entry, *partners)]
        return StoreReader(self._opened[number].store, own[0], tuple(own[1:]))

    def adopt(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Go by other ``storage_options`` from now on. Blocks.

        Args:
            options: of each source.

        Raises:
            CredentialsError: no client can be made with them now; the next read tries again.
        """
        for store, storage in zip(self._stores, options, strict=True):
            store.adopt(storage)

    def others_answered(self, entry: Entry, since: float) -> bool:
        """Return whether another key of the object's store could be read since then.

        Args:
            entry: an object that could not, as it was listed.
            since: monotonic seconds.
        """
        number = owner(self._firsts, entry.store)
        own = replace(entry, store=entry.store - self._firsts[number])
        return self._stores[number].others_answered(own, since)

    @property
    def _stores(self) -> list[RemoteStore]:
        return [one.store for one in self._opened if isinstance(one.store, RemoteStore)]

    async def fails_alone(
        self, entry: Entry, since: float, others: Sequence[Entry] = ()
    ) -> bool:
        """Whether an object keeps failing while others answer; see `Store.fails_alone`."""
        number = owner(self._firsts, entry.store)
        own = [self._own(e) for e in others if owner(self._firsts, e.store) == number]
        return await self._opened[number].store.fails_alone(self._own(entry), since, own)

    def given_up(self, entry: Entry, since: float = 0.0) -> bool:
        """Whether an object was given up lately; see `Store.given_up`."""
        store = self._opened[owner(self._firsts, entry.store)].store
        return store.given_up(self._own(entry), since)

    async def renewed(self, entry: Entry) -> Entry:
        """Return the entry of the version of an object that is there now."""
        store = self._opened[owner(self._firsts, entry.store)].store
        return replace(await store.renewed(self._own(entry)), store=entry.store)

    def _own(self, entry: Entry) -> Entry:
        """Return an entry as the store of its source knows it."""
        first = self._firsts[owner(self._firsts, entry.store)]
        return replace(entry, store=entry.store - first) if first else entry

    async def close(self) -> None:
        """Give connections and threads back."""
        for one in self._opened:
            await one.store.close()


def firsts(sources: Iterable[SourceConfig]) -> list[int]:
    """Return the number of the first URL of each source."""
    counts = [len(source.url) for source in sources]
    return [0, *accumulate(counts)][: len(counts)]


def owner(firsts: Sequence[int], store: int) -> int:
    """Return the source that a URL is of.

    >>> [owner([0, 2], store) for store in range(3)]
    [0, 0, 1]
    """
    return bisect_right(firsts, store) - 1


def open_sources(
    sources: Sequence[SourceConfig],
    *,
    concurrency: int = 16,
    timeout_seconds: float = 60,
    on_retry: Callable[[BaseException], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
    lazily: bool = False,
) -> Sources:
    """Return the sources, ready to be read from; see `open_store`.

    Raises:
        ConfigError: a source cannot be meant so; where there are several, it is said of which.
        AccessError: no credentials are to be found.
    """

    def opened(source: SourceConfig) -> Opened:
        store = open_store(
            source,
            concurrency=concurrency,
            timeout_seconds=timeout_seconds,
            on_retry=on_retry,
            on_bytes=on_bytes,
            lazily=lazily,
        )
        return Opened(store, open_source(source))

    return Sources(each(sources, opened))


def each(sources: Sequence[SourceConfig], make: Callable[[SourceConfig], _Made]) -> list[_Made]:
    """Return what is made of each source; of several, what is wrong names the one."""
    made = []
    for number, source in enumerate(sources):
        with _said_of(number, len(sources)):
            made.append(make(source))
    return made


@contextmanager
def _said_of(number: int, count: int) -> Iterator[None]:
    """Let what goes wrong name the source, where there are several."""
    try:
        yield
    except GrowcacheError as error:
        error.args = tuple(numbered(str(said), number, count) for said in error.args)
        raise


def numbered(text: str, number: int, count: int) -> str:
    """Return a message about ``source`` as one about this of several.

    >>> numbered("source.format: unknown", 1, 2), numbered("source.format: unknown", 0, 1)
    ('source.1.format: unknown', 'source.format: unknown')
    >>> numbered("s3://b/source.npy is gone; check source.url", 1, 2)
    's3://b/source.npy is gone; check source.1.url'
    """
    return _SETTING.sub(f"source.{number}.", text) if count > 1 else text


_SETTING = re.compile(rf"(?<![\w/.-])source\.(?=(?:{'|'.join(SourceConfig.model_fields)})\b)")


class Pages:
    """The listings of all sources, by turns, so that all are there early.

    Args:
        stores: of the sources.
    """

    def __init__(self, stores: Sequence[RemoteStore]) -> None:
        self._stores = stores

    def adopt(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Go by other ``storage_options`` from now on; see `Sources.adopt`."""
        for store, storage in zip(self._stores, options, strict=True):
            store.adopt(storage)

    def pages(self) -> Iterator[list[Entry]]:
        """Yield the listing page by page, as `Store.pages` does."""
        if len(self._stores) == 1:
            yield from self._stores[0].pages()
            return
        places = firsts(store.source for store in self._stores)
        turns = zip_longest(*map(self._moved, range(len(places)), places))
        yield from (page for pages in turns for page in pages if page)

    def _moved(self, number: int, first: int) -> Iterator[list[Entry]]:
        """Yield pages of one length: where a store ends its own may be a matter of time."""
        entries = chain.from_iterable(self._stores[number].pages())
        with _said_of(number, len(self._stores)):
            while page := [replace(e, store=e.store + first) for e in islice(entries, PAGE)]:
                yield page


def open_pages(
    sources: Sequence[SourceConfig],
    *,
    timeout_seconds: float,
    on_retry: Callable[[BaseException], None],
    endless: Callable[[TransientStoreError], bool] | None = None,
) -> Pages:
    """Return the listing of all sources; see `open_store`."""

    def opened(source: SourceConfig) -> RemoteStore:
        return open_store(
            source,
            timeout_seconds=timeout_seconds,
            on_retry=on_retry,
            lazily=True,
            endless=endless,
        )

    return Pages(each(sources, opened))
