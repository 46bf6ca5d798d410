"""A manifest: a table of keys and sizes that replaces a store's listing."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from os.path import normpath
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

from growcache.config_source import ManifestConfig, SourceConfig, manifest_kind
from growcache.errors import ConfigError, TransientStoreError
from growcache.store.contract import PAGE_ENTRIES, Entry, Store, logger, storable_entries
from growcache.store.manifest_tables import (
    ManifestRow,
    buffered,
    inventory_files,
    manifest_rows,
    read_all,
)
from growcache.store.opening import open_store
from growcache.store.retries import RetryPolicy
from growcache.store.seekable_file import SeekableFile
from growcache.store.store import RemoteStore
from growcache.store.table_rows import errors_of_setting
from growcache.store.urls import (
    BUCKET_SCHEMES,
    LOCAL_SCHEMES,
    S3_SCHEMES,
    Location,
    parse_url,
    redact,
)
from growcache.usercode import short_key

MOST_INVENTORY_BYTES = 100_000_000  # of a manifest.json, which lists files
_S3_ETAG = re.compile(r"[0-9a-f]{32}(-[0-9]+)?")


class ManifestListing:
    """The objects of a source that its manifest names, in the form of a listing."""

    def __init__(
        self,
        store: RemoteStore,
        timeout_seconds: float,
        on_retry: Callable[[BaseException], None] | None = None,
        retries_forever: Callable[[TransientStoreError], bool] | None = None,
    ) -> None:
        assert store.source.manifest is not None
        self._store = store
        self._wanted: ManifestConfig = store.source.manifest
        self._timeout_seconds = timeout_seconds
        self._retries = RetryPolicy(timeout_seconds, on_retry, retries_forever)
        self._missing = 0

    @property
    def source(self) -> SourceConfig:
        return self._store.source

    def set_options(self, options: Mapping[str, Any]) -> None:
        self._store.set_options(options)

    def pages(self) -> Iterator[list[Entry]]:
        count, first, some = 0, "", False
        with errors_of_setting("source.manifest", self._wanted.url):
            rows = self._rows()
            while named := list(islice(rows, PAGE_ENTRIES)):
                first = first or named[0].name
                count += len(named)
                found = [entry for row in named for entry in self._meant(row)]
                if page := storable_entries(self._sized(found)):
                    some = True
                    yield page
            if not some:
                raise ConfigError(self._nothing_found(count, first), code="GC219")

    def _rows(self) -> Iterator[ManifestRow]:
        kind, url = manifest_kind(self._wanted.url), self._wanted.url
        if kind != "inventory":
            yield from self._rows_of(url, kind, self._wanted)
            return
        with self._opened(url) as stream:
            files = inventory_files(read_all(stream, MOST_INVENTORY_BYTES), self._wanted)
        for file in files:
            yield from self._rows_of(_url_in_inventory(url, file.key), file.kind, file.wanted)

    def _rows_of(self, url: str, kind: str, wanted: ManifestConfig) -> Iterator[ManifestRow]:
        with self._opened(url) as stream:
            yield from manifest_rows(stream, kind, wanted)

    @contextmanager
    def _opened(self, url: str) -> Iterator[IO[bytes]]:
        store, entry = self._retries.run(partial(self._found, url))
        with asyncio.Runner() as runner:
            try:
                yield buffered(_RemoteFile(store, entry, runner, self._retries))
            finally:
                runner.run(store.close())

    def _found(self, url: str) -> tuple[Store, Entry]:
        client = "auto" if parse_url(url).scheme in LOCAL_SCHEMES else self.source.client
        own: dict[str, Any] = {"url": (url,), "fields": {}, "manifest": None, "client": client}
        store = open_store(
            self.source.model_copy(update=own), timeout_seconds=self._timeout_seconds
        )
        listed = [entry for page in store.pages() for entry in page]
        if len(listed) != 1:
            raise ConfigError(
                f"expected one file at {redact(url)}, found {len(listed)}", code="GC219"
            )
        return store, listed[0]

    @property
    def left_out(self) -> Counter[str]:
        return self._store.left_out

    def _meant(self, row: ManifestRow) -> Iterator[Entry]:
        """Yield the objects of a row. Of an inventory, leave out files that are not data."""
        for entry in self._entries(row):
            if not row.of_bucket:
                yield entry
            elif not entry.key.endswith("/"):
                yield from self._store.kept(entry.store, [entry])

    def _entries(self, row: ManifestRow) -> Iterator[Entry]:
        """Yield the objects that a row names: at most one, or one per matching field."""
        for number, location in enumerate(self._store.locations):
            key = key_below(location, row.name, of_bucket=row.of_bucket)
            if key is not None and location.matches(key):
                etag = row.etag
                if etag and location.scheme in S3_SCHEMES and _S3_ETAG.fullmatch(etag):
                    etag = f'"{etag}"'
                yield Entry(key, -1 if row.size is None else row.size, etag, None, number)
                if not self.source.fields:
                    return

    def _sized(self, entries: list[Entry]) -> list[Entry]:
        """Request missing sizes, and also times if only they tell versions apart."""
        asked = [place for place, entry in enumerate(entries) if self._is_asked(entry)]
        answers = self._store.heads([entries[place] for place in asked]) if asked else []
        found = dict(zip(asked, answers, strict=True))
        self._note_missing([entries[place].key for place, one in found.items() if one is None])
        complete = [found.get(place, entry) for place, entry in enumerate(entries)]
        return [entry for entry in complete if entry is not None]

    def _note_missing(self, keys: list[str]) -> None:
        if keys and not self._missing:
            logger.warning(
                "manifest %s names objects that do not exist, such as %s; they are left out",
                redact(self._wanted.url),
                short_key(keys[0]),
            )
        self._missing += len(keys)

    def _is_asked(self, entry: Entry) -> bool:
        return entry.size < 0 or self._store.locations[entry.store].scheme not in BUCKET_SCHEMES

    def _nothing_found(self, count: int, first: str) -> str:
        urls = ", ".join(redact(url) for url in self.source.url)
        if not count:
            return "it has no rows"
        return (
            f"none of its {count:,} keys is an object that source.url names ({urls}); the "
            f"first is {first!r:.200}. A key must match the glob of source.url, and is either "
            "complete or relative to the folder before the glob"
        )


def key_below(location: Location, name: str, *, of_bucket: bool) -> str | None:
    """Return the key that a manifest's name means at a URL, or None if it is elsewhere.

    >>> place = parse_url("s3://b/rec/**/*.npy")
    >>> [key_below(place, name, of_bucket=False) for name in ("a.npy", "rec/a.npy", "s3://b/a.npy")]
    ['rec/a.npy', 'rec/a.npy', 'a.npy']
    """
    scheme, separator, rest = name.partition("://")
    if separator:
        return _key_of_url(location, scheme, rest)
    if of_bucket:
        return name
    name = name.removeprefix("./")  # as in the output of `find .`
    is_local = location.scheme in LOCAL_SCHEMES
    below = name.startswith(location.prefix) or (is_local and name.startswith("/"))
    key = name if below else location.prefix + name
    # Otherwise one file could have several keys, and `..` would lead out of the URL's folder.
    return normpath(key) if is_local else key


def _key_of_url(location: Location, scheme: str, rest: str) -> str | None:
    if location.scheme in LOCAL_SCHEMES:
        return normpath(unquote(rest)) if scheme in LOCAL_SCHEMES else None
    same = scheme == location.scheme or {scheme, location.scheme} <= S3_SCHEMES
    bucket, _, key = rest.partition("/")
    return key if same and bucket == location.bucket else None


def _url_in_inventory(manifest: str, key: str) -> str:
    """Return the URL of an inventory file from its key in manifest.json."""
    location = parse_url(manifest)
    if location.scheme not in LOCAL_SCHEMES:
        return location.root + key
    folder, name = Path(location.pattern).parent, key.rpartition("/")[2]
    copies = (folder / name, folder.parent / "data" / name)
    return str(next((path for path in copies if path.exists()), copies[1]))


class _RemoteFile(SeekableFile):
    """An object that one thread reads in pieces.

    Each piece is retried like a page of a listing.
    """

    def __init__(
        self, store: Store, entry: Entry, runner: asyncio.Runner, retries: RetryPolicy
    ) -> None:
        super().__init__(entry.size)
        self._store, self._entry = store, entry
        self._runner, self._retries = runner, retries

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self.size, self.position + view.nbytes)
        if stop <= self.position:
            return 0

        def attempt() -> Any:
            return self._runner.run(self._store.read(self._entry, self.position, stop))

        data = memoryview(self._retries.run(attempt)).cast("B")
        view[: data.nbytes] = data
        self.position += data.nbytes
        return data.nbytes
