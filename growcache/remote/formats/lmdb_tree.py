"""Values out of LMDB's trees, by reading only the pages on the way to them.

A tree does not say how many values lie below a page. So a part of an object is a stretch of
*positions*: every page has those from 0 to 1, and divides them among what is below it, in
order. Each value has one position, and is in exactly one part, whatever else is in the file.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from growcache.errors import FormatError
from growcache.remote.formats.kept import Asked, Kept
from growcache.remote.formats.lmdb_pages import (
    BIG,
    BRANCH,
    HEADER,
    LEAF,
    LEAF2,
    META_BYTES,
    OVERFLOW,
    SEVERAL,
    TREE,
    USUAL_PAGE,
    Page,
    Tree,
    meta_bytes,
    parse_meta,
    parse_tree,
)
from growcache.remote.formats.objects import Reader
from growcache.remote.formats.ranges import read_ranges
from growcache.remote.store import Entry

MOST_BRANCHES = 64  # pages of one level that are read to see what lies below them
MOST_DATABASES = 64  # that are listed
_KEPT_PAGES = 1 << 25  # bytes of pages that are kept, of all objects together
_KEPT_TOPS = 1 << 25  # bytes of upper ends of trees
_FEW = 64  # pages of one visit that are worth keeping: more are read once
_SMALL = 512  # bytes, that an object's upper end takes beside its list


@dataclass(frozen=True, slots=True)
class Found:
    """A value.

    Attributes:
        key: of it.
        start: where it lies in the object: of its node; of itself on pages of its own.
        stop: one past its last byte.
        data: the value; None: on pages of its own, not read yet.
    """

    key: bytes
    start: int
    stop: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Top:
    """The upper end of a database's tree, which every visit needs.

    Attributes:
        page_bytes: of every page.
        entries: values in all.
        pages: all pages of one level, in order; few enough, but as many as could be had.
        levels: from these down to the leaves, both counted; 0: the database is empty.
    """

    page_bytes: int
    entries: int
    pages: Sequence[int]
    levels: int


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Positions of what is below one page."""

    page: int
    start: Fraction
    stop: Fraction


class Trees:
    """Reads values of databases; what it keeps of objects is bounded.

    Args:
        database: its name; None: the unnamed one.
    """

    def __init__(self, database: str | None) -> None:
        self._database = database
        self._pages: Kept[tuple[Entry, int], Page] = Kept(_KEPT_PAGES)
        self._tops: Asked[Entry, Top] = Asked(_KEPT_TOPS)

    async def top(self, reader: Reader) -> Top:
        """Return the upper end of the tree.

        Raises:
            FormatError: no LMDB file, or none with that database.
        """
        return await self._tops.get(reader.entry, lambda: self._read_top(reader))

    async def _read_top(self, reader: Reader) -> tuple[Top, int]:
        walk = await self._begun(reader)
        tree = walk.main
        if self._database is not None:
            tree = await walk.named(self._database.encode())
        top = await walk.top(tree)
        return top, _SMALL + 8 * len(top.pages)

    async def _begun(self, reader: Reader) -> Walk:
        name = reader.entry.key
        head = bytes(memoryview(await reader.read(0, USUAL_PAGE + META_BYTES)))
        if (needed := meta_bytes(head, name)) > len(head):
            head = bytes(memoryview(await reader.read(0, needed)))
        meta = parse_meta(head, name)
        return Walk(reader, meta.page_bytes, self._pages, meta.main)

    async def databases(self, reader: Reader) -> dict[str, int]:
        """Return the named databases with their values, where there is nothing beside them.

        Raises:
            FormatError: no LMDB file.
        """
        walk = await self._begun(reader)
        if not 0 < walk.main.entries <= MOST_DATABASES:
            return {}
        leaves = await walk.leaves(walk.main)
        for leaf in leaves:
            leaf.must_be(LEAF)
        if not all(map(_is_of_names, leaves)):
            return {}
        nodes = [(page, page.node(i)) for page in leaves for i in range(page.count)]
        return {
            node.key.decode("utf-8", "replace"): parse_tree(
                page.value(node), 0, walk.name
            ).entries
            for page, node in nodes
        }

    def walk(self, reader: Reader, top: Top) -> Walk:
        """Return what begins a visit's way from the upper end on."""
        return Walk(reader, top.page_bytes, self._pages)

    async def find(self, reader: Reader, top: Top, part: int, parts: int) -> list[Found]:
        """Return the values of a part; those on pages of their own without their bytes."""
        if not top.levels:
            return []
        walk = self.walk(reader, top)
        count = len(top.pages)
        start, stop = Fraction(part * count, parts), Fraction((part + 1) * count, parts)
        below = _divided(top.pages, start, stop)
        for _ in range(top.levels - 1):
            pages = await walk.read(stretch.page for stretch in below)
            below = [
                one
                for page, stretch in zip(pages, below, strict=True)
                for one in walk.below(page, stretch)
            ]
        leaves = await walk.read(stretch.page for stretch in below)
        found: list[Found] = []
        for page, stretch in zip(leaves, below, strict=True):
            page.must_be(LEAF)
            first, last = stretch.start * page.count, stretch.stop * page.count
            for index in range(math.ceil(first), math.ceil(last)):
                found += await walk.values(page, index)
        if not found:
            refuse_names(walk, leaves)
        return found

    async def fetch(self, reader: Reader, found: Sequence[Found]) -> list[bytes]:
        """Return the bytes of values."""
        far = [one for one in found if one.data is None]
        ranges = [(one.start - HEADER, one.stop) for one in far]
        read = dict(zip(ranges, await read_ranges(reader, ranges), strict=True))
        values = []
        for one in found:
            if one.data is not None:
                values.append(one.data)
                continue
            data = read[one.start - HEADER, one.stop]
            page = Page(data, one.start - HEADER, reader.entry.key)
            if not page.flags & OVERFLOW:
                raise page.damaged("is no overflow page, which was expected there")
            values.append(data[HEADER:])
        return values


class Walk:
    """One visit's way through a file."""

    def __init__(
        self,
        reader: Reader,
        page_bytes: int,
        kept: Kept[tuple[Entry, int], Page],
        main: Tree | None = None,
    ) -> None:
        self._reader = reader
        self.name = reader.entry.key
        self._page_bytes = page_bytes
        self._kept = kept
        # Pages lead to others, and damaged ones in circles; of sound ones each is met once.
        self._left = reader.entry.size // page_bytes
        self._main = main

    @property
    def main(self) -> Tree:
        """The unnamed database."""
        assert self._main is not None
        return self._main

    async def read(self, numbers: Iterable[int]) -> list[Page]:
        """Return pages, from what is kept where they are there."""
        wanted = list(numbers)
        self._left -= len(wanted)
        if self._left < 0:
            raise FormatError(f"{self.name}: damaged LMDB file: its pages form a circle")
        entry, size = self._reader.entry, self._page_bytes
        found = {n: page for n in wanted if (page := self._kept.get((entry, n))) is not None}
        missing = [number for number in dict.fromkeys(wanted) if number not in found]
        for number in missing:
            if not 0 < number < entry.size // size:
                raise FormatError(
                    f"{self.name}: damaged LMDB file: it refers to page {number} of "
                    f"{entry.size // size}; was it cut off?"
                )
        read = await read_ranges(self._reader, [(n * size, (n + 1) * size) for n in missing])
        for number, data in zip(missing, read, strict=True):
            page = found[number] = Page(data, number * size, self.name, number)
            if len(missing) <= _FEW:
                self._kept.put((entry, number), page, size + 200)
        return [found[number] for number in wanted]

    async def top(self, tree: Tree) -> Top:
        """Return the upper end of a tree: as many levels as few requests tell of."""
        if tree.entries > self._reader.entry.size:
            raise FormatError(
                f"{self.name}: damaged LMDB file: it claims {tree.entries:,} values in "
                f"{self._reader.entry.size:,} bytes"
            )
        pages: Sequence[int] = [tree.root]
        levels = tree.depth
        while levels > 1 and len(pages) <= MOST_BRANCHES:
            above = await self.read(pages)
            for page in above:
                page.must_be(BRANCH)
            pages = array("Q", (page.child(i) for page in above for i in range(page.count)))
            levels -= 1
        return Top(self._page_bytes, tree.entries, pages, levels)

    async def named(self, name: bytes) -> Tree:
        """Return a named database.

        Raises:
            FormatError: there is none of that name.
        """
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
                if node.flags & TREE and not node.flags & SEVERAL:
                    if node.key == name:
                        return parse_tree(page.value(node), 0, self.name)
                    names.append(ascii(node.key.decode("utf-8", "replace")))
        near = f"found {', '.join(names[:5])}" if names else "it has no named ones there"
        raise FormatError(f"{self.name}: expected a database {name.decode()!r}; {near}")

    def below(self, page: Page, stretch: _Stretch) -> list[_Stretch]:
        """Return the pages below a branch that have some of its positions."""
        page.must_be(BRANCH)
        first, last = stretch.start * page.count, stretch.stop * page.count
        indices = range(math.floor(first), math.ceil(last))
        return _divided({i: page.child(i) for i in indices}, first, last)

    async def values(self, page: Page, index: int) -> list[Found]:
        """Return what a node of a leaf holds: mostly one value."""
        node = page.node(index)
        if node.flags & TREE:
            if not node.flags & SEVERAL:
                return []  # a named database
            tree = parse_tree(page.value(node), 0, self.name)
            return [one for leaf in await self.leaves(tree) for one in _several(leaf, node.key)]
        if node.flags & SEVERAL:
            inner = Page(page.value(node), page.at + node.data, self.name)
            return _several(inner, node.key)
        if node.flags & BIG:
            start = node.data * self._page_bytes + HEADER
            if not node.size or start + node.size > self._reader.entry.size:
                raise page.damaged("refers to a value beyond the end; was the file cut off?")
            return [Found(node.key, start, start + node.size, None)]
        stop = page.at + node.data + node.size
        return [Found(node.key, page.at + node.start, stop, page.value(node))]

    async def leaves(self, tree: Tree) -> list[Page]:
        """Return all leaves of a tree."""
        numbers: list[int] = [tree.root]
        for _ in range(tree.depth - 1):
            above = await self.read(numbers)
            for page in above:
                page.must_be(BRANCH)
            numbers = [page.child(i) for page in above for i in range(page.count)]
        return await self.read(numbers) if tree.depth else []


def _divided(
    pages: Sequence[int] | dict[int, int], start: Fraction, stop: Fraction
) -> list[_Stretch]:
    """Return which pages lie from one position to another, each page being one long."""
    return [
        _Stretch(pages[i], max(start - i, Fraction(0)), min(stop - i, Fraction(1)))
        for i in range(math.floor(start), math.ceil(stop))
    ]


def refuse_names(walk: Walk, leaves: Sequence[Page]) -> None:
    """Refuse leaves that list databases, and nothing else.

    Raises:
        FormatError: they do.
    """
    if leaves and all(map(_is_of_names, leaves)):
        raise FormatError(
            f"{walk.name}: expected values, found names of databases only; choose one with "
            "source.options.database"
        )


def _is_of_names(page: Page) -> bool:
    """Whether a leaf lists databases, and nothing else."""
    flags = [page.node(i).flags for i in range(page.count)]
    return all(found & TREE and not found & SEVERAL for found in flags)


def _several(page: Page, key: bytes) -> list[Found]:
    """Return the values of one key, which stand as keys on a page of their own."""
    page.must_be(LEAF)
    if page.flags & LEAF2:
        if not page.pad:
            raise page.damaged("has values of no length")
        pairs = [page.fixed(i) for i in range(page.count)]
        return [Found(key, page.at + at, page.at + at + page.pad, value) for at, value in pairs]
    nodes = map(page.node, range(page.count))
    return [
        Found(key, page.at + n.start, page.at + n.start + 8 + len(n.key), n.key) for n in nodes
    ]
