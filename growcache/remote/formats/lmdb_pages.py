"""The pages of an LMDB data file (format 1 of 64-bit machines), as bytes of a stranger.

A file is pages of one size. The first two describe it; the one with the newer transaction
counts. A tree has branch pages, which name pages below them, and leaf pages, whose nodes hold
a key and a value, or say on which overflow pages the value lies. Where a key has several
values, these are a small page inside its node, or a tree of their own.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from growcache.errors import FormatError

HEADER = 16  # bytes of every page
META_BYTES = 152  # of what a meta page holds
PAGE_SIZES = tuple(1 << n for n in range(9, 17))
USUAL_PAGE = 4096
MOST_DEPTH = 32  # LMDB's own

BRANCH, LEAF, OVERFLOW, META, LEAF2 = 0x01, 0x02, 0x04, 0x08, 0x20
BIG, TREE, SEVERAL = 0x01, 0x02, 0x04  # a node's value: elsewhere, a tree, one of several

_MAGIC = 0xBEEFC0DE
_PAGE = struct.Struct("<QHHHH")
_META = struct.Struct("<II16x")
_TREE = struct.Struct("<IHHQQQQQ")
_NODE = struct.Struct("<HHHH")
_NONE = (1 << 64) - 1  # the root of an empty tree


@dataclass(frozen=True, slots=True)
class Tree:
    """A database, or the values of one key.

    Attributes:
        depth: levels of pages; 0: empty.
        entries: values in all.
        root: its uppermost page.
    """

    depth: int
    entries: int
    root: int


@dataclass(frozen=True, slots=True)
class Meta:
    """What a data file says of itself.

    Attributes:
        page_bytes: of every page.
        main: the unnamed database, in which named ones are listed.
    """

    page_bytes: int
    main: Tree


@dataclass(frozen=True, slots=True)
class Node:
    """A key and its value in a leaf page, by their places in that page.

    Attributes:
        flags: `BIG`, `TREE`, `SEVERAL`.
        key: of it.
        start: where the node begins.
        data: where its value begins, or the number of the page where that lies.
        size: of the value, bytes.
    """

    flags: int
    key: bytes
    start: int
    data: int
    size: int


class Page:
    """A page, or a small one within another; every place that it names is checked.

    Args:
        data: all of it.
        at: where it begins in the object.
        name: of the object, for errors.
        number: that it must have; None for one within another.
    """

    __slots__ = ("at", "count", "data", "flags", "name", "pad")

    def __init__(self, data: bytes, at: int, name: str, number: int | None = None) -> None:
        self.data, self.at, self.name = data, at, name
        if len(data) < HEADER:
            raise self.damaged("is cut off")
        found, self.pad, self.flags, lower, _ = _PAGE.unpack_from(data)
        if number is not None and found != number:
            raise self.damaged(f"says that it is page {found}")
        self.count = 0 if self.flags & OVERFLOW else (lower - HEADER) >> 1  # there: pages
        if not self.flags & OVERFLOW and not HEADER <= lower <= len(data):
            raise self.damaged("has no such number of nodes")

    def damaged(self, what: str) -> FormatError:
        """Return the error that says so of this page."""
        return FormatError(f"{self.name}: damaged LMDB file: the page at {self.at:,} {what}")

    def must_be(self, kind: int) -> None:
        """Check of which kind it is.

        Raises:
            FormatError: of another one, or without nodes.
        """
        if not self.flags & kind or self.count < 1:
            wanted = {BRANCH: "branch", LEAF: "leaf"}[kind]
            raise self.damaged(f"is no {wanted} page, which was expected there")

    def child(self, index: int) -> int:
        """Return the number of the page below a node of a branch."""
        low, high, highest, _ = _NODE.unpack_from(self.data, self._place(index))
        return int(low | high << 16 | highest << 32)

    def branch_key(self, index: int) -> bytes:
        """Return the key from which on a branch's node counts."""
        start = self._place(index)
        size = _NODE.unpack_from(self.data, start)[3]
        return self._cut(start + _NODE.size, size)

    def node(self, index: int) -> Node:
        """Return a node of a leaf."""
        start = self._place(index)
        low, high, flags, key_size = _NODE.unpack_from(self.data, start)
        size, at = low | high << 16, start + _NODE.size
        key = self._cut(at, key_size)
        at += key_size
        if flags & BIG:
            return Node(flags, key, start, int.from_bytes(self._cut(at, 8), "little"), size)
        if at + size > len(self.data):
            raise self.damaged("holds a value that reaches beyond it")
        return Node(flags, key, start, at, size)

    def fixed(self, index: int) -> tuple[int, bytes]:
        """Return where a value of a page of equally long ones lies, and the value."""
        at = HEADER + index * self.pad
        return at, self._cut(at, self.pad)

    def value(self, node: Node) -> bytes:
        """Return the value of a node that lies in this page."""
        return self._cut(node.data, node.size)

    def _place(self, index: int) -> int:
        (start,) = struct.unpack_from("<H", self.data, HEADER + 2 * index)
        if not HEADER + 2 * self.count <= start <= len(self.data) - _NODE.size:
            raise self.damaged("has a node beyond its end")
        return int(start)

    def _cut(self, at: int, size: int) -> bytes:
        if at + size > len(self.data):
            raise self.damaged("has a node that reaches beyond it")
        return self.data[at : at + size]


def meta_bytes(head: bytes, name: str) -> int:
    """Return how many bytes from the start on hold both descriptions.

    Args:
        head: at least `META_BYTES` from the start of the object.
        name: of the object.

    Raises:
        FormatError: no LMDB data file of format 1.
    """
    return _page_bytes(head, name) + META_BYTES


def parse_meta(head: bytes, name: str) -> Meta:
    """Return the description with the newer transaction.

    Args:
        head: at least `meta_bytes` from the start of the object.
        name: of the object.

    Raises:
        FormatError: it is damaged.
    """
    size = _page_bytes(head, name)
    if _page_bytes(head[size:], name) != size:
        raise FormatError(f"{name}: damaged LMDB file: its first two pages differ in size")
    times = [struct.unpack_from("<Q", head, at + 144)[0] for at in (0, size)]
    return Meta(size, parse_tree(head, (size if times[1] > times[0] else 0) + 88, name))


def parse_tree(data: bytes, at: int, name: str) -> Tree:
    """Return the tree that 48 bytes describe.

    Raises:
        FormatError: it is damaged.
    """
    if at + _TREE.size > len(data):
        raise FormatError(f"{name}: damaged LMDB file: a database's description is cut off")
    _, _, depth, _, _, _, entries, root = _TREE.unpack_from(data, at)
    if root == _NONE:
        return Tree(0, 0, 0)
    if not 0 < depth <= MOST_DEPTH:
        raise FormatError(f"{name}: damaged LMDB file: it claims a tree of {depth} levels")
    return Tree(depth, entries, root)


def _page_bytes(head: bytes, name: str) -> int:
    if len(head) < META_BYTES or not _PAGE.unpack_from(head)[2] & META:
        raise _other(head, name)
    magic, version = struct.unpack_from("<II", head, HEADER)
    if magic != _MAGIC:
        raise _other(head, name)
    (size,) = struct.unpack_from("<I", head, 40)
    if version != 1 or size not in PAGE_SIZES:
        raise FormatError(
            f"{name}: expected an LMDB file of format 1, found format {version} with pages "
            f"of {size} bytes; copy it with mdb_copy of LMDB 0.9"
        )
    return int(size)


def _other(head: bytes, name: str) -> FormatError:
    mark = _MAGIC.to_bytes(4, "little")
    if head.startswith(mark):
        what = "an LMDB lock file; let source.url match the data files only, as */data.mdb"
    elif head[12:16] == mark:
        what = "one of a 32-bit machine; copy it there by mdb_dump, and here by mdb_load"
    else:
        what = repr(head[:8])
    return FormatError(f"{name}: expected an LMDB data file, found {what}")
