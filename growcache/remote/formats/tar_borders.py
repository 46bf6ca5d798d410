"""Where the first member of a block of a tar archive begins, found without what is before the block.

Its header is known by the checksum. But headers about a member, with long names or attributes,
may stand before that of the member, and so in the block before; then the member begins there.
"""

from __future__ import annotations

from growcache.remote.formats.records import Window
from growcache.remote.formats.tar_headers import (
    BLOCK,
    NOTES,
    Header,
    is_header,
    padded,
    parse_header,
)
from growcache.remote.formats.tar_members import MOST_NOTES, member_at
from growcache.remote.store import Entry

BEHIND = 1 << 12  # bytes before a block that hold nearly all headers that go on in it


class Following:
    """Fetches what comes next, and some more, into a window.

    Args:
        window: of the object.
        more: bytes.
    """

    def __init__(self, window: Window, more: int) -> None:
        self._window = window
        self._more = more

    async def __call__(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), fewer where the object ends."""
        if stop > self._window.stop:
            await self._window.reach(stop + self._more)
        begin = self._window.start
        return bytes(self._window.view[start - begin : stop - begin])


def back_from(start: int, nbytes: int) -> int:
    """Return so many bytes before the block of the archive that a place is in; at least 0."""
    return max(0, start // BLOCK * BLOCK - nbytes)


async def first_member(window: Window, entry: Entry, start: int, stop: int) -> int | None:
    """Return where the first member in [start, stop) begins: its first header, if it has several.

    Args:
        window: from ``back_from(start, BEHIND)`` on, to ``stop`` at least; it may grow.
        entry: of the object.
        start: of the block.
        stop: of the block.

    Raises:
        ChainError: it begins before, and does not end well.
    """
    for at in range(padded(start), stop, BLOCK):
        if is_header(window.view, at - window.start):
            begin = await _begin(window, at, back_from(start, MOST_NOTES))
            if begin >= start:
                return begin
            # What was found is the end of its headers, whose beginning is in the block before.
            member = await member_at(Following(window, BLOCK), entry, begin, certain=False)
            following = entry.size if member is None else member.stop
            return following if following < stop else None
    return None


async def _begin(window: Window, at: int, least: int) -> int:
    """Return where the headers begin whose last one, or one of them, is here."""
    while (noted := await _noted(window, at, least)) is not None:
        at = noted
    return at


async def _noted(window: Window, at: int, least: int) -> int | None:
    """Return where a header lies that is about the one here, not before ``least``."""
    found = _nearest(window, at)
    if found is None and least < window.start and _may_be_noted(window, at):
        await window.reach_back(least)
        found = _nearest(window, at)
    if found is None:
        return None
    start, header = found
    ends = start + BLOCK + padded(header.size) == at
    return start if header.kind in NOTES and ends else None


def _nearest(window: Window, at: int) -> tuple[int, Header] | None:
    """Return the last header before a place, and where it is."""
    view, begin = window.view, window.start
    for start in range(at - BLOCK, max(begin, at - MOST_NOTES) - 1, -BLOCK):
        if is_header(view, start - begin):
            header = parse_header(bytes(view[start - begin : start - begin + BLOCK]))
            return None if header is None else (start, header)
    return None


def _may_be_noted(window: Window, at: int) -> bool:
    """Whether what is known before a place, without a header, can be the end of a note.

    A long name has no zeros but those behind it, and attributes are lines. Content of members
    mostly has zeros and ends otherwise; then nothing more must be read to know.
    """
    if at - window.start >= MOST_NOTES:
        return False
    text = bytes(window.view[: at - window.start]).rstrip(b"\0")
    return b"\0" not in text or text.endswith(b"\n")
