"""LMDB files page by page: of page sizes that no machine at hand has, or with false claims in them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

Nodes = Sequence[tuple[int, bytes, bytes]]  # flags, key, value


def tree(root: int, depth: int, entries: int, pad: int = 0) -> bytes:
    return struct.pack("<IHHQQQQQ", pad, 0, depth, 0, 0, 0, entries, root)


def meta(number: int, size: int, main: bytes, time: int = 1) -> bytes:
    page = struct.pack("<QHHHH", number, 0, 8, 0, 0)
    page += struct.pack("<IIQQ", 0xBEEFC0DE, 1, 0, 1 << 30)
    page += tree((1 << 64) - 1, 0, 0, size) + main + struct.pack("<QQ", 9, time)
    return page.ljust(size, b"\0")


def leaf(number: int, size: int, nodes: Nodes, flags: int = 2, large: int = 0) -> bytes:
    """A page of keys and values.

    Args:
        number: of it.
        size: of it, bytes.
        nodes: what it holds.
        flags: of it.
        large: what values on pages of their own claim to have, bytes.
    """
    packed = []
    for kind, key, value in nodes:
        claimed = large if kind & 1 else len(value)
        node = struct.pack("<HHHH", claimed & 0xFFFF, claimed >> 16, kind, len(key))
        packed.append((node + key + value).ljust((8 + len(key + value) + 1) // 2 * 2, b"\0"))
    return _page(number, size, packed, flags)


def branch(number: int, size: int, children: Sequence[tuple[bytes, int]]) -> bytes:
    packed = [
        struct.pack("<HHHH", n & 0xFFFF, n >> 16 & 0xFFFF, n >> 32, len(key)) + key
        for key, n in children
    ]
    return _page(number, size, packed, 1)


def overflow(number: int, size: int, value: bytes) -> bytes:
    pages = -(-(16 + len(value)) // size)
    page = struct.pack("<QHHI", number, 0, 4, pages) + value
    return page.ljust(pages * size, b"\0")


def _page(number: int, size: int, nodes: Sequence[bytes], flags: int) -> bytes:
    places, at, body = [], size, b""
    for node in nodes:
        at -= len(node)
        places.append(at)
        body = node + body
    lower = 16 + 2 * len(nodes)
    head = struct.pack("<QHHHH", number, 0, flags, lower, at) + struct.pack(
        f"<{len(nodes)}H", *places
    )
    return head.ljust(at, b"\0") + body


def small(size: int = 512) -> bytes:
    """Two leaves below a branch: values inside, one on pages of its own, several of one key."""
    several = leaf(4, 64, [(0, b"one", b""), (0, b"two", b"")], 0x42)
    pages = [
        meta(0, size, tree(2, 2, 6)),
        meta(1, size, tree((1 << 64) - 1, 0, 0), 0),
        branch(2, size, [(b"", 3), (b"m", 4)]),
        leaf(3, size, [(0, b"a", b"first"), (0, b"b", b""), (1, b"c", struct.pack("<Q", 5))],
             large=700),
        leaf(4, size, [(4, b"m", several), (0, b"z", b"last")]),
        overflow(5, size, b"v" * 700),
    ]  # fmt: skip
    return b"".join(pages)
