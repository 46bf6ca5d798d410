"""The pages and trees of an LMDB data file (format 1 of 64-bit machines), checked as untrusted.

A file consists of pages of one size. The first two describe it, and the one with the newer
transaction counts. Branch pages have the numbers of the pages below them. Leaf pages have keys
and values, or the numbers of a value's overflow pages. Several values of one key form a small
page inside its node, or a separate tree.

A tree does not record how many values are below a page. So a part of an object is a range of
*positions*: each page spans the positions 0 to 1 and divides them among its children, in order.
Every value has one position and is in exactly one part.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from growcache.errors import FormatError
from growcache.formats.base import ObjectReader
from growcache.formats.byte_ranges import read_ranges
from growcache.formats.memory import LruCache, SingleFlightCache
from growcache.store.contract import Entry

PAGE_HEADER_BYTES = 16  # bytes of every page
META_BYTES = 152  # of the content of a meta page
PAGE_SIZES = tuple(1 << n for n in range(9, 17))
USUAL_PAGE = 4096
MOST_DEPTH = 32  # LMDB's own limit

BRANCH, LEAF, OVERFLOW, META, LEAF2 = 0x01, 0x02, 0x04, 0x08, 0x20
# Flags of a node's value: on overflow pages, a tree, one of several.
ON_OVERFLOW_PAGES, IS_TREE, HAS_DUPLICATES = 0x01, 0x02, 0x04

_MAGIC = 0xBEEFC0DE
_PAGE = struct.Struct("<QHHHH")
_META = struct.Struct("<II16x")
_TREE = struct.Struct("<IHHQQQQQ")
_NODE = struct.Struct("<HHHH")
_NO_ROOT = (1 << 64) - 1  # root of an empty tree


@dataclass(frozen=True, slots=True)
class LmdbTree:
    depth: int  # levels of pages; 0: empty
    entries: int  # number of values
    root: int  # number of the root page


@dataclass(frozen=True, slots=True)
class LmdbMeta:
    page_bytes: int
    main: LmdbTree  # the unnamed database, which lists the named ones


@dataclass(frozen=True, slots=True)
class LeafNode:
    flags: int  # `ON_OVERFLOW_PAGES`, `IS_TREE`, `HAS_DUPLICATES`
    key: bytes
    start: int  # first byte of the node
    data: int  # first byte of its value, or the number of its overflow page
    size: int  # of the value, bytes


class LmdbPage:
    """A page of the tree. Every position in it is checked."""

    __slots__ = ("at", "count", "data", "flags", "name", "pad")

    def __init__(self, data: bytes, at: int, name: str, number: int | None = None) -> None:
        self.data, self.at, self.name = data, at, name
        if len(data) < PAGE_HEADER_BYTES:
            raise self.damaged("is cut off")
        found, self.pad, self.flags, lower, _ = _PAGE.unpack_from(data)
        if number is not None and found != number:
            raise self.damaged(f"says that it is page {found}")
        # An overflow page has its number of pages there instead.
        self.count = 0 if self.flags & OVERFLOW else (lower - PAGE_HEADER_BYTES) >> 1
        if not self.flags & OVERFLOW and not PAGE_HEADER_BYTES <= lower <= len(data):
            raise self.damaged("has an impossible number of nodes")

    def damaged(self, what: str) -> FormatError:
        return FormatError(
            f"{self.name}: damaged LMDB file: the page at {self.at:,} {what}", code="GC302"
        )

    def must_be(self, kind: int) -> None:
        if not self.flags & kind or self.count < 1:
            wanted = {BRANCH: "branch", LEAF: "leaf"}[kind]
            raise self.damaged(f"is not the {wanted} page that was expected there")

    def child(self, index: int) -> int:
        low, high, highest, _ = _NODE.unpack_from(self.data, self._place(index))
        return int(low | high << 16 | highest << 32)

    def branch_key(self, index: int) -> bytes:
        start = self._place(index)
        size = _NODE.unpack_from(self.data, start)[3]
        return self._cut(start + _NODE.size, size)

    def node(self, index: int) -> LeafNode:
        start = self._place(index)
        low, high, flags, key_size = _NODE.unpack_from(self.data, start)
        size, at = low | high << 16, start + _NODE.size
        key = self._cut(at, key_size)
        at += key_size
        if flags & ON_OVERFLOW_PAGES:
            return LeafNode(flags, key, start, int.from_bytes(self._cut(at, 8), "little"), size)
        if at + size > len(self.data):
            raise self.damaged("holds a value that reaches beyond it")
        return LeafNode(flags, key, start, at, size)

    def fixed(self, index: int) -> tuple[int, bytes]:
        """Return position and bytes of a value on a page of values of equal length."""
        at = PAGE_HEADER_BYTES + index * self.pad
        return at, self._cut(at, self.pad)

    def value(self, node: LeafNode) -> bytes:
        return self._cut(node.data, node.size)

    def _place(self, index: int) -> int:
        (start,) = struct.unpack_from("<H", self.data, PAGE_HEADER_BYTES + 2 * index)
        if not PAGE_HEADER_BYTES + 2 * self.count <= start <= len(self.data) - _NODE.size:
            raise self.damaged("has a node beyond its end")
        return int(start)

    def _cut(self, at: int, size: int) -> bytes:
        if at + size > len(self.data):
            raise self.damaged("has a node that reaches beyond it")
        return self.data[at : at + size]


def meta_bytes(head: bytes, name: str) -> int:
    """Return the bytes to read for both meta pages. ``head`` has `META_BYTES`."""
    return _page_bytes(head, name) + META_BYTES


def parse_lmdb_meta(head: bytes, name: str) -> LmdbMeta:
    """Return the meta page of the newer transaction. ``head`` has `meta_bytes`."""
    size = _page_bytes(head, name)
    if _page_bytes(head[size:], name) != size:
        raise FormatError(
            f"{name}: damaged LMDB file: its first two pages differ in size", code="GC302"
        )
    times = [struct.unpack_from("<Q", head, at + 144)[0] for at in (0, size)]
    return LmdbMeta(
        size, parse_lmdb_tree(head, (size if times[1] > times[0] else 0) + 88, name)
    )


def parse_lmdb_tree(data: bytes, at: int, name: str) -> LmdbTree:
    if at + _TREE.size > len(data):
        raise FormatError(
            f"{name}: damaged LMDB file: a database's description is cut off", code="GC302"
        )
    _, _, depth, _, _, _, entries, root = _TREE.unpack_from(data, at)
    if root == _NO_ROOT:
        return LmdbTree(0, 0, 0)
    if not 0 < depth <= MOST_DEPTH:
        raise FormatError(
            f"{name}: damaged LMDB file: it claims a tree of {depth} levels", code="GC302"
        )
    return LmdbTree(depth, entries, root)


def _page_bytes(head: bytes, name: str) -> int:
    if len(head) < META_BYTES or not _PAGE.unpack_from(head)[2] & META:
        raise _not_lmdb_error(head, name)
    magic, version = struct.unpack_from("<II", head, PAGE_HEADER_BYTES)
    if magic != _MAGIC:
        raise _not_lmdb_error(head, name)
    (size,) = struct.unpack_from("<I", head, 40)
    if version != 1 or size not in PAGE_SIZES:
        raise FormatError(
            f"{name}: expected an LMDB file of format 1, found format {version} with pages "
            f"of {size} bytes; copy it with mdb_copy of LMDB 0.9",
            code="GC304",
        )
    return int(size)


def _not_lmdb_error(head: bytes, name: str) -> FormatError:
    mark = _MAGIC.to_bytes(4, "little")
    if head.startswith(mark):
        what = "an LMDB lock file; let source.url match the data files only, as */data.mdb"
    elif head[12:16] == mark:
        what = "one of a 32-bit machine; copy it there by mdb_dump, and here by mdb_load"
    else:
        what = repr(head[:8])
    return FormatError(f"{name}: expected an LMDB data file, found {what}")


MOST_BRANCHES = 64  # pages of one level that are read to find the pages below
MOST_DATABASES = 64  # listed at most
_KEPT_PAGE_BYTES = 1 << 25  # of kept pages, of all objects together
_KEPT_TOP_BYTES = 1 << 25  # of kept upper levels of trees
# Pages of one visit that are worth keeping, because more are read only once.
_KEPT_VISIT_PAGES = 64
_TOP_BYTES = 512  # of an object's upper levels, without their list


@dataclass(frozen=True, slots=True)
class LmdbValue:
    key: bytes
    start: int  # of its node in the object, or of the value on overflow pages
    stop: int  # one past its last byte
    data: bytes | None  # None: on overflow pages that are not read yet


@dataclass(frozen=True, slots=True)
class TreeTop:
    page_bytes: int
    entries: int  # number of values
    pages: Sequence[int]  # all pages of one level, in order
    levels: int  # from these down to the leaves, both included; 0: the database is empty


@dataclass(frozen=True, slots=True)
class _PositionRange:
    page: int
    start: Fraction
    stop: Fraction


class TreeReader:
    def __init__(self, database: str | None) -> None:
        self._database = database
        self._pages: LruCache[tuple[Entry, int], LmdbPage] = LruCache(_KEPT_PAGE_BYTES)
        self._tops: SingleFlightCache[Entry, TreeTop] = SingleFlightCache(_KEPT_TOP_BYTES)

    async def top(self, reader: ObjectReader) -> TreeTop:
        return await self._tops.get(reader.entry, lambda: self._read_top(reader))

    async def _read_top(self, reader: ObjectReader) -> tuple[TreeTop, int]:
        walk = await self._begun(reader)
        tree = walk.main
        if self._database is not None:
            tree = await walk.named(self._database.encode())
        top = await walk.top(tree)
        return top, _TOP_BYTES + 8 * len(top.pages)

    async def _begun(self, reader: ObjectReader) -> TreeWalk:
        name = reader.entry.key
        head = bytes(memoryview(await reader.read(0, USUAL_PAGE + META_BYTES)))
        if (needed := meta_bytes(head, name)) > len(head):
            head = bytes(memoryview(await reader.read(0, needed)))
        meta = parse_lmdb_meta(head, name)
        return TreeWalk(reader, meta.page_bytes, self._pages, meta.main)

    async def databases(self, reader: ObjectReader) -> dict[str, int]:
        """Return the number of values by database, if the file contains only databases."""
        walk = await self._begun(reader)
        if not 0 < walk.main.entries <= MOST_DATABASES:
            return {}
        leaves = await walk.leaves(walk.main)
        for leaf in leaves:
            leaf.must_be(LEAF)
        if not all(map(_lists_databases, leaves)):
            return {}
        nodes = [(page, page.node(i)) for page in leaves for i in range(page.count)]
        return {
            node.key.decode("utf-8", "replace"): parse_lmdb_tree(
                page.value(node), 0, walk.name
            ).entries
            for page, node in nodes
        }

    def walk(self, reader: ObjectReader, top: TreeTop) -> TreeWalk:
        return TreeWalk(reader, top.page_bytes, self._pages)

    async def find(
        self, reader: ObjectReader, top: TreeTop, part: int, parts: int
    ) -> list[LmdbValue]:
        """Return the values of a part. Those on overflow pages come without their bytes."""
        if not top.levels:
            return []
        walk = self.walk(reader, top)
        count = len(top.pages)
        start, stop = Fraction(part * count, parts), Fraction((part + 1) * count, parts)
        below = _position_ranges(top.pages, start, stop)
        for _ in range(top.levels - 1):
            pages = await walk.read(stretch.page for stretch in below)
            below = [
                one
                for page, stretch in zip(pages, below, strict=True)
                for one in walk.below(page, stretch)
            ]
        leaves = await walk.read(stretch.page for stretch in below)
        found: list[LmdbValue] = []
        for page, stretch in zip(leaves, below, strict=True):
            page.must_be(LEAF)
            first, last = stretch.start * page.count, stretch.stop * page.count
            for index in range(math.ceil(first), math.ceil(last)):
                found += await walk.values(page, index)
        if not found:
            refuse_database_names(walk, leaves)
        return found

    async def fetch(self, reader: ObjectReader, found: Sequence[LmdbValue]) -> list[LmdbValue]:
        far = [one for one in found if one.data is None]
        ranges = [(one.start - PAGE_HEADER_BYTES, one.stop) for one in far]
        read = dict(zip(ranges, await read_ranges(reader, ranges), strict=True))
        values = []
        for one in found:
            if one.data is not None:
                values.append(one)
                continue
            data = bytes(read[one.start - PAGE_HEADER_BYTES, one.stop])
            page = LmdbPage(data, one.start - PAGE_HEADER_BYTES, reader.entry.key)
            if not page.flags & OVERFLOW:
                raise page.damaged("is not the overflow page that was expected there")
            values.append(replace(one, data=data[PAGE_HEADER_BYTES:]))
        return values


class TreeWalk:
    def __init__(
        self,
        reader: ObjectReader,
        page_bytes: int,
        kept: LruCache[tuple[Entry, int], LmdbPage],
        main: LmdbTree | None = None,
    ) -> None:
        self._reader = reader
        self.name = reader.entry.key
        self._page_bytes = page_bytes
        self._kept = kept
        # Damaged pages may lead in circles. A valid page is reached only once.
        self._left = reader.entry.size // page_bytes
        self._main = main

    @property
    def main(self) -> LmdbTree:
        assert self._main is not None
        return self._main

    async def read(self, numbers: Iterable[int]) -> list[LmdbPage]:
        wanted = list(numbers)
        self._left -= len(wanted)
        if self._left < 0:
            raise FormatError(
                f"{self.name}: damaged LMDB file: its pages form a circle", code="GC302"
            )
        entry, size = self._reader.entry, self._page_bytes
        found = {n: page for n in wanted if (page := self._kept.get((entry, n))) is not None}
        missing = [number for number in dict.fromkeys(wanted) if number not in found]
        for number in missing:
            if not 0 < number < entry.size // size:
                raise FormatError(
                    f"{self.name}: damaged LMDB file: it refers to page {number} of "
                    f"{entry.size // size}; was it cut off?",
                    code="GC302",
                )
        read = await read_ranges(self._reader, [(n * size, (n + 1) * size) for n in missing])
        for number, data in zip(missing, read, strict=True):
            page = found[number] = LmdbPage(bytes(data), number * size, self.name, number)
            if len(missing) <= _KEPT_VISIT_PAGES:
                self._kept.put((entry, number), page, size + 200)
        return [found[number] for number in wanted]

    async def top(self, tree: LmdbTree) -> TreeTop:
        """Return as many upper levels of a tree as a few requests can read."""
        if tree.entries > self._reader.entry.size:
            raise FormatError(
                f"{self.name}: damaged LMDB file: it claims {tree.entries:,} values in "
                f"{self._reader.entry.size:,} bytes",
                code="GC302",
            )
        pages: Sequence[int] = [tree.root]
        levels = tree.depth
        while levels > 1 and len(pages) <= MOST_BRANCHES:
            above = await self.read(pages)
            for page in above:
                page.must_be(BRANCH)
            pages = array("Q", (page.child(i) for page in above for i in range(page.count)))
            levels -= 1
        return TreeTop(self._page_bytes, tree.entries, pages, levels)

    async def named(self, name: bytes) -> LmdbTree:
        tree, number = self.main, self.main.root
        for _ in range(tree.depth - 1):
            (page,) = await self.read([number])
            page.must_be(BRANCH)
            at = sum(page.branch_key(i) <= name for i in range(1, page.count))
            number = page.child(at)
        names: list[str] = []
        if tree.depth:
            (page,) = await self.read([number])
            page.must_be(LEAF)
            for node in map(page.node, range(page.count)):
                if node.flags & IS_TREE and not node.flags & HAS_DUPLICATES:
                    if node.key == name:
                        return parse_lmdb_tree(page.value(node), 0, self.name)
                    names.append(ascii(node.key.decode("utf-8", "replace")))
        near = f"found {', '.join(names[:5])}" if names else "it has no named databases"
        raise FormatError(
            f"{self.name}: expected a database {name.decode()!r}; {near}", code="GC303"
        )

    def below(self, page: LmdbPage, stretch: _PositionRange) -> list[_PositionRange]:
        page.must_be(BRANCH)
        first, last = stretch.start * page.count, stretch.stop * page.count
        indices = range(math.floor(first), math.ceil(last))
        return _position_ranges({i: page.child(i) for i in indices}, first, last)

    async def values(self, page: LmdbPage, index: int) -> list[LmdbValue]:
        node = page.node(index)
        if node.flags & IS_TREE:
            if not node.flags & HAS_DUPLICATES:
                return []  # a named database
            tree = parse_lmdb_tree(page.value(node), 0, self.name)
            return [
                one
                for leaf in await self.leaves(tree)
                for one in _duplicate_values(leaf, node.key)
            ]
        if node.flags & HAS_DUPLICATES:
            inner = LmdbPage(page.value(node), page.at + node.data, self.name)
            return _duplicate_values(inner, node.key)
        if node.flags & ON_OVERFLOW_PAGES:
            start = node.data * self._page_bytes + PAGE_HEADER_BYTES
            if not node.size or start + node.size > self._reader.entry.size:
                raise page.damaged("refers to a value beyond the end; was the file cut off?")
            return [LmdbValue(node.key, start, start + node.size, None)]
        stop = page.at + node.data + node.size
        return [LmdbValue(node.key, page.at + node.start, stop, page.value(node))]

    async def leaves(self, tree: LmdbTree) -> list[LmdbPage]:
        numbers: list[int] = [tree.root]
        for _ in range(tree.depth - 1):
            above = await self.read(numbers)
            for page in above:
                page.must_be(BRANCH)
            numbers = [page.child(i) for page in above for i in range(page.count)]
        return await self.read(numbers) if tree.depth else []


def _position_ranges(
    pages: Sequence[int] | dict[int, int], start: Fraction, stop: Fraction
) -> list[_PositionRange]:
    """Return the ranges of pages that overlap [start, stop). Each page is one position wide."""
    return [
        _PositionRange(pages[i], max(start - i, Fraction(0)), min(stop - i, Fraction(1)))
        for i in range(math.floor(start), math.ceil(stop))
    ]


def refuse_database_names(walk: TreeWalk, leaves: Sequence[LmdbPage]) -> None:
    if leaves and all(map(_lists_databases, leaves)):
        raise FormatError(
            f"{walk.name}: expected values, found names of databases only; choose one with "
            "source.options.database",
            code="GC303",
        )


def _lists_databases(page: LmdbPage) -> bool:
    flags = [page.node(i).flags for i in range(page.count)]
    return all(found & IS_TREE and not found & HAS_DUPLICATES for found in flags)


def _duplicate_values(page: LmdbPage, key: bytes) -> list[LmdbValue]:
    page.must_be(LEAF)
    if page.flags & LEAF2:
        if not page.pad:
            raise page.damaged("has values of no length")
        pairs = [page.fixed(i) for i in range(page.count)]
        return [
            LmdbValue(key, page.at + at, page.at + at + page.pad, value) for at, value in pairs
        ]
    nodes = map(page.node, range(page.count))
    return [
        LmdbValue(key, page.at + n.start, page.at + n.start + 8 + len(n.key), n.key)
        for n in nodes
    ]
