"""Listing a sorted store in rounds: several pages at once, told in an order of its own.

Each round asks for the next page of every range that is being listed, and cuts ranges while there
are too few of them (see ranges.py). There are no more of them than pages found so far, and one: a
server that reads a whole folder to begin anywhere in it, as gateways to file systems do, is not made
to read a short one sixteen times. What the next round asks for depends on the answers alone,
never on how long they took: whoever lists the same objects tells them in the same order. That
order decides about shards, and another machine shall draw the same ones.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Generic, TypeVar

from growcache.errors import TransientStoreError
from growcache.remote.leaps import Leaps, just_before
from growcache.remote.ranges import Range, Spelling, cuts

if TYPE_CHECKING:
    from growcache.remote.retry import Patience
    from growcache.remote.store import Backend, Entry, Page
    from growcache.remote.urls import Location

T = TypeVar("T")

# Pages asked for in a round, at most; it decides the order, so it is nobody's to choose.
WIDTH = 16
_PAGE = 1000  # entries told together
_LOOKS = 8  # at keys of a page, for their spelling
# Rounds that are told together, mixed: the first objects say what samples are. At most 1, 2, 4, 8
# and 16 pages: more rounds would hold up the first sample, fewer would see one end of the keys.
_SURVEY = 5
_SINGLE, _RUN = 64, 16  # objects of the survey that are told one by one; then so many in a row


class UnsortedError(Exception):
    """A store does not list in the order of keys, or not from where it was asked to."""


@dataclass(slots=True, eq=False)
class _Part(Range):
    """A range of one URL, and the answer to its next page."""

    section: Section
    pages: Iterator[Page] | None = None

    def next_page(self, patience: Patience) -> Page | None:
        """Return the page after `after`; None where the listing is at its end."""

        def attempt() -> Page | None:
            if self.pages is None:
                section = self.section
                self.pages = section.backend.listing(section.location, self.after or None)
            try:
                return next(self.pages, None)
            except TransientStoreError:
                self.pages = None
                raise

        return patience.call(attempt)


@dataclass(slots=True)
class Section:
    """One URL of a source, on a store that lists in the order of keys.

    Attributes:
        number: of the URL.
        location: what it means.
        backend: that lists.
        is_new: whether a key is not one of an earlier URL's.
    """

    number: int
    location: Location
    backend: Backend
    is_new: Callable[[str, int], bool]
    leaps: Leaps = field(init=False)

    def __post_init__(self) -> None:
        pattern = self.location.pattern
        self.leaps = Leaps(pattern, is_glob=self.location.is_glob)

    def begin(self) -> _Part:
        """Return the range of all its keys."""
        fixed = self.leaps.fixed
        # Where a folder is all that is fixed, the request's prefix says it.
        after = "" if fixed == self.location.prefix else just_before(fixed) or ""
        return _Part(len(fixed), "", after, None, self)

    def kept(self, page: list[Entry]) -> list[Entry]:
        """Return what of a page matches."""
        found = [
            entry
            for entry in page
            if self.location.matches(entry.key) and self.is_new(entry.key, self.number)
        ]
        return [replace(entry, store=self.number) for entry in found] if self.number else found


class Rounds:
    """One listing of several URLs; see the head of this file.

    Args:
        sections: the URLs, in order.
        patience: with failures.
        most: requests at once; less than `WIDTH` takes longer, and changes nothing else.
    """

    def __init__(self, sections: Sequence[Section], patience: Patience, most: int) -> None:
        self._waiting = deque(sections)
        self._patience = patience
        self._most = most
        self._parts: list[_Part] = []
        self._spelling = Spelling()
        self._found = 0  # pages with an entry in their range

    def pages(self) -> Iterator[list[Entry]]:
        """Yield what is listed and matches; blocks.

        Raises:
            UnsortedError: as it says; what is listed until then may have gaps.
        """
        asked = self._ask()
        survey: list[Entry] = []
        for _ in range(_SURVEY):
            survey += chain.from_iterable(self._take(asked))
            asked = self._ask()
        yield from _paged(spread(survey))
        while asked is not None:
            found = self._take(asked)
            asked = self._ask()  # first: it is answered while these are dealt with
            yield from found

    def _ask(self) -> Together[Page | None] | None:
        self._widen()
        if not self._parts:
            return None
        return Together([self._asking(part) for part in self._parts], self._most)

    def _asking(self, part: _Part) -> Callable[[], Page | None]:
        return lambda: part.next_page(self._patience)

    def _widen(self) -> None:
        while self._waiting and len(self._parts) < WIDTH:
            self._parts.append(self._waiting.popleft().begin())
        known = [part for part in self._parts if part.first]
        more = max(0, min(WIDTH, 1 + self._found) - len(self._parts))
        found = cuts(known, more, self._spelling)
        for part, places in zip(known, found, strict=True):
            at = self._parts.index(part) + 1
            self._parts[at:at] = _cut(part, places)

    def _take(self, asked: Together[Page | None] | None) -> list[list[Entry]]:
        """Return the answers, in the order of keys, and go on behind them."""
        if asked is None:
            return []
        found, left = [], []
        for part, page in zip(self._parts, asked.results(), strict=True):
            inside, goes_on = _advance(part, page)
            self._learn(inside)
            if kept := part.section.kept(inside):
                found.append(kept)
            if goes_on:
                left.append(part)
        self._parts = left
        return found

    def _learn(self, page: list[Entry]) -> None:
        # All of the first page, then a few of each.
        step = max(1, len(page) // _LOOKS) if self._found else 1
        self._spelling.learn(entry.key for entry in page[::step])
        self._found += bool(page)


def _cut(part: _Part, places: Sequence[str]) -> list[_Part]:
    """Return the ranges behind cuts, in order; what begins with no match is left out."""
    upto, last = part.upto, part
    behind: list[_Part] = []
    for place in places:
        start = part.section.leaps.over(place)
        last.upto = place
        if start is None:
            break
        if upto is None or start <= upto:
            after = max(place, just_before(start) or "")
            last = _Part(part.fixed, "", after, upto, part.section)
            behind.append(last)
    return behind


def _advance(part: _Part, page: Page | None) -> tuple[list[Entry], bool]:
    """Move a range behind a page; return what of it lies inside, and whether there is more."""
    if page is None:
        return [], False
    _check_order(part, page)
    upto = part.upto
    inside = page if upto is None else [entry for entry in page if entry.key <= upto]
    if not inside:
        return [], not page and not page.last
    part.first, part.after = inside[0].key, inside[-1].key
    over = part.section.leaps.over(part.after)
    if (
        len(inside) < len(page)
        or page.last
        or over is None
        or (upto is not None and over > upto)
    ):
        return inside, False
    if (leap := just_before(over) or "") > part.after:
        part.after, part.pages = leap, None
    return inside, True


def _check_order(part: _Part, page: Page) -> None:
    # Markers of folders are listed where their slash has them, without which they are told.
    keys = [entry.key for entry in page if entry.size]
    if keys and (keys[0] <= part.after or keys != sorted(keys)):
        raise UnsortedError(keys[0])


def spread(found: Sequence[Entry]) -> list[Entry]:
    """Return the entries in an order of which each beginning is from everywhere.

    What lies in one folder may be alike, and a listing begins with one.
    """
    rows = sorted(found, key=lambda entry: (entry.store, entry.key))
    count = min(len(rows), _SINGLE)
    single = [place * len(rows) // count for place in _mixed(count)]
    left = sorted({*range(len(rows))} - {*single})
    runs = (left[run * _RUN : (run + 1) * _RUN] for run in _mixed(-(-len(left) // _RUN)))
    return [rows[place] for place in chain(single, *runs)]


def _mixed(count: int) -> list[int]:
    """Return the numbers below count, each beginning of which is spread over all of them.

    >>> _mixed(8), _mixed(5)
    ([0, 4, 2, 6, 1, 5, 3, 7], [0, 4, 2, 1, 3])
    """
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: f"{number:0{bits}b}"[::-1])


def _paged(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    for at in range(0, len(entries), _PAGE):
        yield list(entries[at : at + _PAGE])


class Together(Generic[T]):
    """Calls made at once, by threads that keep no process from its end.

    Args:
        calls: what is called.
        most: threads.
    """

    def __init__(self, calls: Sequence[Callable[[], T]], most: int) -> None:
        self._todo = deque(enumerate(calls))
        self._results: dict[int, T] = {}
        self._errors: dict[int, BaseException] = {}
        self._threads = [
            threading.Thread(target=self._work, name="listing-page", daemon=True)
            for _ in range(min(most, len(calls)))
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while self._todo and not self._errors:
            try:
                number, call = self._todo.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                self._results[number] = call()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                self._errors[number] = error

    def results(self) -> list[T]:
        """Wait, and return what each call returned.

        Raises:
            BaseException: what the first of those that failed raised.
        """
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._results[number] for number in sorted(self._results)]
