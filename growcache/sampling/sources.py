"""The sources of samples: the store and the format of each object.

An entry's ``store`` numbers the URLs of all sources. A source's store and format know only
their own URLs.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from growcache.config_source import SourceConfig
from growcache.errors import GrowcacheError, TransientStoreError
from growcache.formats import open_source
from growcache.formats.base import ObjectFormat
from growcache.formats.dataset import open_dataset
from growcache.store.contract import PAGE_ENTRIES, Entry, Store, StoredObject
from growcache.store.dataset import DatasetStore
from growcache.store.manifest import ManifestListing
from growcache.store.opening import open_store
from growcache.store.read_slots import ReadMeter
from growcache.store.store import RemoteStore
from growcache.usercode import CodeDigest

if TYPE_CHECKING:
    from growcache.sampling.shared_listing import SharedListing
    from growcache.sampling.zarr_listing import ZarrListing

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class OpenSource:
    store: Store
    format: ObjectFormat


class Sources:
    def __init__(self, opened: Sequence[OpenSource]) -> None:
        self._opened = opened
        self._firsts = first_urls(one.store.source for one in opened)

    @property
    def formats(self) -> list[ObjectFormat]:
        return [one.format for one in self._opened]

    @property
    def listed(self) -> bool:
        return all(object_format.listed for object_format in self.formats)

    @property
    def code_digest(self) -> CodeDigest | None:
        """Digest of the user's code that the formats run."""
        digests = [object_format.code_digest for object_format in self.formats]
        return digests[0] if len(digests) == 1 else CodeDigest.combined(digests)

    @property
    def lengths(self) -> list[int | None]:
        """Length of each source's Dataset, with None for other sources."""
        stores = [one.store for one in self._opened]
        return [one.length if isinstance(one, DatasetStore) else None for one in stores]

    def format_of(self, entry: Entry) -> ObjectFormat:
        return self._opened[source_of_url(self._firsts, entry.store)].format

    def reader(self, entry: Entry, partners: Sequence[Entry] = ()) -> StoredObject:
        number = source_of_url(self._firsts, entry.store)
        first = self._firsts[number]
        own = [replace(e, store=e.store - first) if first else e for e in (entry, *partners)]
        return StoredObject(self._opened[number].store, own[0], tuple(own[1:]))

    def follow_fields(self, names: Collection[str]) -> None:
        """Let formats keep to the fields of an existing cache."""
        for one in self._opened:
            labels = one.store.source.labels
            joined = () if labels is None else labels.columns
            one.format.follow_fields([name for name in names if name not in joined])

    def set_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Use other options. Blocks. After a CredentialsError the next read tries again."""
        for one, storage in zip(self._opened, options, strict=True):
            if isinstance(one.store, RemoteStore):
                one.store.set_options(storage)

    def limit_reads(self, reads: Sequence[int]) -> None:
        """Set the number of reads of each source that may be in flight."""
        for one, limit in zip(self._opened, reads, strict=True):
            if isinstance(one.store, RemoteStore):
                one.store.limit_reads(limit)

    def take_answers(self) -> list[tuple[int, int]]:
        """Return the answers of each source; see `RemoteStore.take_answers`."""
        return [
            one.store.take_answers() if isinstance(one.store, RemoteStore) else (0, 0)
            for one in self._opened
        ]

    async def fails_alone(
        self, entry: Entry, since: float, others: Sequence[Entry] = ()
    ) -> bool:
        """See `Store.fails_alone`."""
        number = source_of_url(self._firsts, entry.store)
        own = [self._own(e) for e in others if source_of_url(self._firsts, e.store) == number]
        return await self._opened[number].store.fails_alone(self._own(entry), since, own)

    def given_up(self, entry: Entry, since: float = 0.0) -> bool:
        store = self._opened[source_of_url(self._firsts, entry.store)].store
        return store.given_up(self._own(entry), since)

    async def current_entry(self, entry: Entry) -> Entry:
        store = self._opened[source_of_url(self._firsts, entry.store)].store
        return replace(await store.current_entry(self._own(entry)), store=entry.store)

    def _own(self, entry: Entry) -> Entry:
        first = self._firsts[source_of_url(self._firsts, entry.store)]
        return replace(entry, store=entry.store - first) if first else entry

    async def close(self) -> None:
        for one in self._opened:
            await one.store.close()


def first_urls(sources: Iterable[SourceConfig]) -> list[int]:
    counts = [len(source.url) for source in sources]
    return [0, *accumulate(counts)][: len(counts)]


def source_of_url(firsts: Sequence[int], store: int) -> int:
    """Return the source of a URL.

    >>> [source_of_url([0, 2], store) for store in range(3)]
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
    without_credentials: bool = False,
    meter: ReadMeter | None = None,
) -> Sources:
    def opened(source: SourceConfig) -> OpenSource:
        if source.dataset is not None:
            dataset = open_dataset(source, timeout_seconds)
            return OpenSource(DatasetStore(source, dataset.length, dataset), dataset)
        store = open_store(
            source,
            concurrency=concurrency,
            timeout_seconds=timeout_seconds,
            on_retry=on_retry,
            on_bytes=on_bytes,
            without_credentials=without_credentials,
            meter=meter,
        )
        return OpenSource(store, open_source(source))

    return Sources(make_each(sources, opened))


def make_each(
    sources: Sequence[SourceConfig], make: Callable[[SourceConfig], _Made]
) -> list[_Made]:
    """Return the result for each source. With several sources, an error names its source."""
    made = []
    for number, source in enumerate(sources):
        with _naming_source(number, len(sources)):
            made.append(make(source))
    return made


@contextmanager
def _naming_source(number: int, count: int) -> Iterator[None]:
    try:
        yield
    except GrowcacheError as error:
        error.args = tuple(name_source(str(said), number, count) for said in error.args)
        raise


def name_source(text: str, number: int, count: int) -> str:
    """Return a message about ``source`` as one about source ``number`` of several.

    >>> name_source("source.format: unknown", 1, 2), name_source("source.format: unknown", 0, 1)
    ('source.1.format: unknown', 'source.format: unknown')
    >>> name_source("s3://b/source.npy is gone; check source.url", 1, 2)
    's3://b/source.npy is gone; check source.1.url'
    """
    return _SETTING.sub(f"source.{number}.", text) if count > 1 else text


_SETTING = re.compile(rf"(?<![\w/.-])source\.(?=(?:{'|'.join(SourceConfig.model_fields)})\b)")


ListedStore: TypeAlias = (
    "RemoteStore | DatasetStore | ManifestListing | ZarrListing | SharedListing"
)


class SourceListings:
    """The listings of all sources in turn, so that each yields objects early."""

    def __init__(self, stores: Sequence[ListedStore]) -> None:
        self._stores = stores

    def set_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        for store, storage in zip(self._stores, options, strict=True):
            store.set_options(storage)

    @property
    def left_out(self) -> Counter[str]:
        """The files that the listings left out so far because they are not data, by name."""
        counts = (one.left_out for one in self._stores if not isinstance(one, DatasetStore))
        return sum(counts, Counter())

    @property
    def catalogs(self) -> list[str]:
        """Where the objects of each shared catalog come from, in words."""
        words = (getattr(one, "said", "") for one in self._stores)
        return list(filter(None, words))

    def pages(self) -> Iterator[list[Entry]]:
        if len(self._stores) == 1:
            yield from self._stores[0].pages()
            return
        places = first_urls(store.source for store in self._stores)
        turns = zip_longest(*map(self._moved, range(len(places)), places))
        yield from (page for pages in turns for page in pages if page)

    def _moved(self, number: int, first: int) -> Iterator[list[Entry]]:
        """Yield pages of one length, because the length of a store's own pages may depend on timing."""
        entries = chain.from_iterable(self._stores[number].pages())
        with _naming_source(number, len(self._stores)):
            while page := [
                replace(e, store=e.store + first) for e in islice(entries, PAGE_ENTRIES)
            ]:
                yield page


def open_listings(
    sources: Sequence[SourceConfig],
    *,
    timeout_seconds: float,
    on_retry: Callable[[BaseException], None],
    retries_forever: Callable[[TransientStoreError], bool] | None = None,
    lengths: Sequence[int | None] = (),
    refresh: bool = False,
) -> SourceListings:
    """Open the listings of all sources.

    ``lengths`` has the lengths of Datasets by source, as samplers know them. With ``refresh``,
    an older shared catalog is listed anew.
    """
    known = iter(lengths)
    awaited: set[SharedListing] = set()

    def opened(source: SourceConfig) -> ListedStore:
        length = next(known, None)
        if length is not None:
            return DatasetStore(source, length)
        store = open_store(
            source,
            timeout_seconds=timeout_seconds,
            on_retry=on_retry,
            without_credentials=True,
            retries_forever=retries_forever,
        )
        if source.manifest is not None:
            return ManifestListing(store, timeout_seconds, on_retry, retries_forever)
        listed = _with_unwritten_chunks(store) if source.format == "zarr" else store
        if source.catalog is None:
            return listed
        from growcache.sampling.shared_listing import SharedListing

        return SharedListing(
            *(listed, store, timeout_seconds, on_retry), refresh=refresh, awaited=awaited
        )

    return SourceListings(make_each(sources, opened))


def _with_unwritten_chunks(store: RemoteStore) -> RemoteStore | ZarrListing:
    """Return a listing with the unwritten chunks at its end.

    Imported here, because a sampler imports only what it reads.
    """
    from growcache.formats.zarr import open_zarr
    from growcache.sampling.zarr_listing import ZarrListing

    census = open_zarr(store.source.options).census()
    return store if census is None else ZarrListing(store, census)
