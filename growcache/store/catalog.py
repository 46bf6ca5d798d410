"""The local, append-only file of listed objects, in which a key keeps its ordinal.

A file is a sequence of frames. A frame is a fixed head and a block of up to 64 entries. Keys,
ETags, times and stores of a block are zlib-packed JSON by column. ETags that are MD5 sums are
bytes before it. Sizes and the running digest are not packed, so opening a million entries
unpacks none. The CRC32C of a torn frame does not match, and the frame is cut away.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import threading
import zlib
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, Self

import google_crc32c
import numpy as np
import numpy.typing as npt
import orjson

from growcache.errors import CacheError, CacheFullError
from growcache.modes import FILE_MODE, share_if_folder_is
from growcache.seeding import hash64
from growcache.store.contract import Entry, paginate
from growcache.store.key_set import KeySet

BLOCK_ENTRIES = 64  # entries
DIGEST_BYTES = 16
MD5_BYTES = 16
SIZE_WIDTHS = (1, 2, 4, 8)  # bytes of a size
_MOST_UNPACKED_BYTES = 1 << 24  # bytes of a block with the 64 longest keys
_MD5_ETAG = re.compile(r'"[0-9a-f]{32}"')
# Types of the values, by column.
_COLUMN_TYPES: tuple[frozenset[type], ...] = (
    frozenset({str}),
    frozenset({str, type(None)}),
    frozenset({float, int, type(None)}),
    frozenset({int}),
)

BlockColumns = list[Any]  # keys, ETags, times and stores, each by place in the block


def unpack_block(sums: bytes, packed: bytes, count: int) -> BlockColumns | None:
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, _MOST_UNPACKED_BYTES)
        columns = orjson.loads(data) if unpacker.eof else None
    except (zlib.error, orjson.JSONDecodeError):
        return None
    if type(columns) is not list or len(columns) != len(_COLUMN_TYPES):
        return None
    lengths = [count, 0 if sums else count, count, count]
    for column, kinds, length in zip(columns, _COLUMN_TYPES, lengths, strict=True):
        if type(column) is not list or len(column) != length:
            return None
        if not kinds.issuperset(map(type, column)):
            return None
    if sums:
        columns[1] = _Md5Etags(sums)
    return columns


def _md5_sums(entries: Sequence[Entry]) -> bytes:
    """Return the ETags as bytes if all are quoted MD5 sums, because hex digits compress badly."""
    etags = [entry.etag or "" for entry in entries]
    if not all(map(_MD5_ETAG.fullmatch, etags)):
        return b""
    return bytes.fromhex("".join(etag[1:-1] for etag in etags))


class _Md5Etags:
    """MD5 sums as ETags, formatted one at a time, because most lookups need one of a block."""

    def __init__(self, sums: bytes) -> None:
        self._sums = sums

    def __getitem__(self, i: int) -> str:
        return f'"{self._sums[i * MD5_BYTES : (i + 1) * MD5_BYTES].hex()}"'


def advance_digest(digest: bytes, entry: Entry) -> bytes:
    # The time counts only without an ETag, because copies of a bucket have other times.
    version = entry.etag if entry.etag is not None else entry.mtime
    line = orjson.dumps([entry.store, entry.key, entry.size, version])
    return blake2b(digest + line, digest_size=DIGEST_BYTES).digest()


_MAGIC = b"GCCAT\x00\x00\x01"
_BLOCKS_IN_MEMORY = 1024  # about 12 KB each
_FRAME_HEAD = struct.Struct("<II")  # number of bytes after the head, and their CRC32C
# Kind, flag, entries, bytes per size, and the digest after the block.
_FRAME_FIELDS = struct.Struct(f"<BBHB{DIGEST_BYTES}s")
_ENTRIES_FRAME, _COMPLETE_FRAME = 1, 2
_DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


class Catalog:
    """The first N keys of a store, by ordinal.

    One process appends. All methods may be called from several threads.
    """

    def __init__(
        self, path: Path, descriptor: int, key_hash: Callable[[str], int], *, readonly: bool
    ) -> None:
        self.path = path
        self._descriptor = descriptor
        self._writable = not readonly
        self._lock = threading.RLock()
        # Of each block: offset and length of its body, and how many of these bytes are MD5
        # sums. Plain arrays, because there may be millions of blocks.
        self._offsets, self._lengths, self._sums = array("q"), array("I"), array("H")
        # Entries and digest before each block, and after the last one.
        self._firsts = array("q", [0])
        self._digests = bytearray(DIGEST_BYTES)
        self._sizes = np.zeros(BLOCK_ENTRIES, np.int64)
        self._count = 0
        self._buffered: list[Entry] = []
        self._unpacked: OrderedDict[int, BlockColumns] = OrderedDict()
        self._key_set: KeySet | None = None
        self._key_hash = key_hash
        self._end = 0
        self._synced_bytes = 0  # bytes of the file that have been synced
        # After a failed sync the rest may be missing, and a second sync would not notice it.
        self._sync_failed = False
        self._complete = False

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        readonly: bool = False,
        key_hash: Callable[[str], int] = hash64,
    ) -> Self:
        """Open or create the catalog at ``path``.

        Raises:
            CacheError: The file is not a catalog.
        """
        path = Path(path)
        flags = os.O_RDONLY if readonly else os.O_RDWR | os.O_CREAT
        descriptor = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
        catalog = cls(path, descriptor, key_hash, readonly=readonly)
        try:
            if not readonly:
                share_if_folder_is(descriptor, path.parent)
            catalog._recover()
            catalog._synced_bytes = catalog._end
        except BaseException:
            catalog.close()
            raise
        return catalog

    def append(self, entries: Sequence[Entry]) -> int:
        """Add the entries with new keys, in order, and return their number.

        A known key keeps its ordinal, size and version. A partial block is buffered until
        `flush`. After a CacheFullError or CacheError all entries are buffered, and the next
        `append` or `flush` writes them.
        """
        seen = self._known()
        with self._lock:
            keys = [_store_and_key(entry.store, entry.key) for entry in entries]
            new = [entries[place] for place in seen.add(keys, self._count, self._identities_of)]
            self._put_sizes(self._count, [entry.size for entry in new])
            self._buffered += new
            self._count += len(new)
            self._write_pending(at_least=BLOCK_ENTRIES)
            return len(new)

    def new_entries(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries that `append` would add.

        Only hashes are compared, so a new key may be missed.
        """
        seen = self._known()
        with self._lock:
            places = seen.new_places(
                [_store_and_key(entry.store, entry.key) for entry in entries]
            )
            return [entries[place] for place in places]

    def flush(self) -> None:
        """Write and sync the buffered entries.

        After a CacheFullError the rest is still buffered.
        """
        with self._lock:
            self._write_pending(at_least=1)
            self._sync()

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                if self._sync_failed:  # written bytes may be readable without being on the disk
                    with suppress(OSError):
                        os.ftruncate(self._descriptor, self._synced_bytes)
                os.close(self._descriptor)
                self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self._count

    def entry(self, ordinal: int) -> Entry:
        return self.entries([ordinal])[0]

    def entries(self, ordinals: npt.NDArray[np.int64] | Sequence[int]) -> list[Entry]:
        asked = np.asarray(ordinals, np.int64)
        in_order = np.unique(asked)
        found: dict[int, Entry] = {}
        with self._lock:
            unknown = in_order[(in_order < 0) | (in_order >= len(self))]
            if len(unknown):
                raise IndexError(f"the catalog has {len(self)} entries, no number {unknown[0]}")
            by_block: dict[int, list[tuple[int, int]]] = {}
            sizes = self._sizes[in_order].tolist()
            for ordinal, size in zip(in_order.tolist(), sizes, strict=True):
                block = bisect_right(self._firsts, ordinal) - 1
                by_block.setdefault(block, []).append((ordinal, size))
            # Blocks in memory first, because reading other blocks may push them out.
            for block in sorted(by_block, key=lambda block: block not in self._unpacked):
                self._add_entries(block, by_block[block], found)
        return [found[ordinal] for ordinal in asked.tolist()]

    def _add_entries(
        self, block: int, wanted: list[tuple[int, int]], found: dict[int, Entry]
    ) -> None:
        first = self._firsts[block]
        if block == len(self._firsts) - 1:
            found.update((ordinal, self._buffered[ordinal - first]) for ordinal, _ in wanted)
            return
        keys, etags, mtimes, stores = self._columns(block)
        for ordinal, size in wanted:
            at = ordinal - first
            found[ordinal] = Entry(keys[at], size, etags[at], mtimes[at], stores[at])

    def stores_and_keys(self, start: int, stop: int) -> Iterator[tuple[list[int], list[str]]]:
        """Yield stores and keys of ordinals [start, stop) in chunks, because that is faster."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"the catalog has {len(self)} entries, not {start} to {stop}")
        while start < stop:
            with self._lock:
                block = bisect_right(self._firsts, start) - 1
                first = self._firsts[block]
                if block == len(self._firsts) - 1:
                    stores = [entry.store for entry in self._buffered]
                    keys = [entry.key for entry in self._buffered]
                else:
                    keys, _, _, stores = self._read_columns(block)
            chunk = slice(start - first, stop - first)
            yield stores[chunk], keys[chunk]
            start = first + len(keys)

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        view = self._sizes[: len(self)]
        view.flags.writeable = False
        return view

    def digest(self, count: int) -> str:
        """Return 128 bits of digest, in hex, of the first ``count`` entries.

        The digest does not depend on the division into blocks.
        """
        with self._lock:
            if not 0 <= count <= len(self):
                raise IndexError(f"the catalog has {len(self)} entries, not {count}")
            block = bisect_right(self._firsts, count) - 1
            running = bytes(self._digests[block * DIGEST_BYTES :][:DIGEST_BYTES])
            for entry in self.entries(range(self._firsts[block], count)):
                running = advance_digest(running, entry)
            return running.hex()

    @property
    def complete(self) -> bool:
        """Whether the listing reached its end; stored in the file."""
        return self._complete

    @complete.setter
    def complete(self, value: bool) -> None:
        with self._lock:
            self._write_pending(at_least=1)
            if value != self._complete:
                self._write_frame((_COMPLETE_FRAME, value, 0, 0, self._last_digest()), b"")
                self._complete = value
            self._sync()
            if value:
                self._key_set = None  # only a listing needs it

    @property
    def whole_bytes(self) -> int:
        """Bytes of the file up to the end of its last complete frame."""
        return self._end

    @property
    def torn_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size - self._end

    @property
    def allocated_bytes(self) -> int:
        return os.fstat(self._descriptor).st_blocks * 512

    def _write_pending(self, *, at_least: int) -> None:
        written = 0
        try:
            while len(self._buffered) - written >= at_least:
                block = self._buffered[written : written + BLOCK_ENTRIES]
                self._write_block(block)
                written += len(block)
        finally:
            del self._buffered[:written]

    def _write_block(self, entries: Sequence[Entry]) -> None:
        digest = self._last_digest()
        for entry in entries:
            digest = advance_digest(digest, entry)
        sizes = np.array([entry.size for entry in entries], np.uint64)
        largest = int(sizes.max())
        width = next(width for width in SIZE_WIDTHS if largest < 1 << (8 * width))
        sums = _md5_sums(entries)
        columns = [
            [entry.key for entry in entries],
            [] if sums else [entry.etag for entry in entries],
            [entry.mtime for entry in entries],
            [entry.store for entry in entries],
        ]
        body = sums + zlib.compress(orjson.dumps(columns), 6)
        fields = (_ENTRIES_FRAME, bool(sums), len(entries), width, digest)
        self._write_frame(fields, sizes.astype(f"<u{width}").tobytes() + body)
        self._add_block(self._end - len(body), len(body), len(sums), len(entries), digest)

    def _write_frame(self, fields: tuple[object, ...], body: bytes) -> None:
        if not self._writable:
            raise CacheError(f"{self.path} was opened for reading")
        self._require_synced()
        content = _FRAME_FIELDS.pack(*fields) + body
        frame = _FRAME_HEAD.pack(len(content), google_crc32c.value(content)) + content
        rest, at = memoryview(frame), self._end
        with self._named_failure():
            try:
                while rest:  # a disk that fills up writes a part before it refuses
                    written = os.pwrite(self._descriptor, rest, at)
                    rest, at = rest[written:], at + written
            except OSError:
                os.ftruncate(self._descriptor, self._end)
                raise
        self._end += len(frame)

    def _sync(self) -> None:
        self._require_synced()
        self._sync_failed = True
        with self._named_failure():
            os.fsync(self._descriptor)
        self._synced_bytes, self._sync_failed = self._end, False

    def _require_synced(self) -> None:
        if self._sync_failed:
            raise CacheError(
                f"cannot continue the listing {self.path}, because the disk failed to keep "
                "written data; start again on a working disk",
                code="GC413",
            )

    @contextmanager
    def _named_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"the listing {self.path}: {error.strerror}"
            if error.errno in _DISK_FULL_ERRNOS:
                raise CacheFullError(
                    f"no room on the disk for {what}; free some space, and start again"
                ) from error
            raise CacheError(
                f"cannot write {what}; move it to a working disk", code="GC413"
            ) from error

    def _add_block(
        self, offset: int, length: int, sums: int, count: int, digest: bytes
    ) -> None:
        self._offsets.append(offset)
        self._lengths.append(length)
        self._sums.append(sums)
        self._firsts.append(self._firsts[-1] + count)
        self._digests += digest

    def _last_digest(self) -> bytes:
        return bytes(self._digests[-DIGEST_BYTES:])

    def _columns(self, block: int) -> BlockColumns:
        if block in self._unpacked:
            self._unpacked.move_to_end(block)
            return self._unpacked[block]
        columns = self._unpacked[block] = self._read_columns(block)
        if len(self._unpacked) > _BLOCKS_IN_MEMORY:
            self._unpacked.popitem(last=False)
        return columns

    def _read_columns(self, block: int) -> BlockColumns:
        offset, sums = self._offsets[block], self._sums[block]
        data = os.pread(self._descriptor, self._lengths[block], offset)
        count = self._firsts[block + 1] - self._firsts[block]
        columns = unpack_block(data[:sums], data[sums:], count)
        if columns is None:
            raise CacheError(
                f"{self.path} is damaged; move it away and list again", code="GC416"
            )
        return columns

    def _put_sizes(self, first: int, sizes: Sequence[int] | npt.NDArray[np.int64]) -> None:
        stop = first + len(sizes)
        if stop > len(self._sizes):
            # A new array, so that views returned earlier keep their content.
            grown = np.zeros(max(stop, 2 * len(self._sizes)), np.int64)
            grown[: len(self._sizes)] = self._sizes
            self._sizes = grown
        self._sizes[first:stop] = sizes

    def _known(self) -> KeySet:
        if self._key_set is None:
            # Without the lock, because a million keys take seconds, and blocks never change.
            seen, first = KeySet(self._key_hash), 0
            listed = self.stores_and_keys(0, len(self))
            identities = chain.from_iterable(map(_store_and_key, *names) for names in listed)
            for page in paginate(identities):
                seen.add(page, first, self._identities_of)
                first += len(page)
            self._key_set = seen
        return self._key_set

    def _identities_of(self, ordinals: Sequence[int]) -> list[str]:
        return [_store_and_key(entry.store, entry.key) for entry in self.entries(ordinals)]

    def _recover(self) -> None:
        head = os.pread(self._descriptor, len(_MAGIC), 0)
        if self._writable and _MAGIC.startswith(head) and head != _MAGIC:
            os.pwrite(self._descriptor, _MAGIC, 0)  # new, or a crash during the first write
        elif head != _MAGIC:
            raise CacheError(
                f"{self.path} is not a catalog of this version; to list again, remove it with: "
                f"growcache check {self.path.parent} --repair"
            )
        self._end = len(_MAGIC)
        self._scan()
        if self._writable:
            os.ftruncate(self._descriptor, self._end)

    def _scan(self) -> None:
        size = os.fstat(self._descriptor).st_size
        data = memoryview(os.pread(self._descriptor, size - self._end, self._end))
        at = 0
        while at + _FRAME_HEAD.size + _FRAME_FIELDS.size <= len(data):
            length, crc = _FRAME_HEAD.unpack_from(data, at)
            content = data[at + _FRAME_HEAD.size : at + _FRAME_HEAD.size + length]
            if len(content) < max(length, _FRAME_FIELDS.size):
                break
            if google_crc32c.value(bytes(content)) != crc:
                break
            self._take_frame(content, self._end + at + _FRAME_HEAD.size)
            at += _FRAME_HEAD.size + length
        self._end += at

    def _take_frame(self, content: memoryview, offset: int) -> None:
        kind, flag, count, width, digest = _FRAME_FIELDS.unpack_from(content)
        if kind == _COMPLETE_FRAME:
            self._complete = bool(flag)
            return
        packed = _FRAME_FIELDS.size + count * width
        if not (
            kind == _ENTRIES_FRAME
            and flag in (0, 1)
            and 0 < count <= BLOCK_ENTRIES
            and width in SIZE_WIDTHS
            and packed + count * MD5_BYTES * flag <= len(content)
        ):
            raise CacheError(
                f"{self.path} is damaged; move it away and list again", code="GC416"
            )
        sizes = np.frombuffer(content[_FRAME_FIELDS.size : packed], f"<u{width}")
        self._put_sizes(self._firsts[-1], sizes.astype(np.int64))
        sums = count * MD5_BYTES * flag
        self._add_block(offset + packed, len(content) - packed, sums, count, digest)
        self._count += count


def _store_and_key(store: int, key: str) -> str:
    # Two URLs of a source may name two buckets with the same keys.
    return f"{store}\x00{key}"
