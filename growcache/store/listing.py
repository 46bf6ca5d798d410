"""List a store's keys: a sorted store in rounds of concurrent requests, others folder by folder.

Each round requests the next page of every key range. While there are fewer ranges than
`MOST_RANGES`, ranges are split at guessed names, which differ from the known keys in one
character. A guess costs one request. There are never more ranges than pages found so far, plus
one, because some servers read a whole folder to start anywhere in it.

Example: the first page of data/ ends with data/a9. Round 2 requests the page after data/a9 and,
as a guess, the page after data/b. Both have keys, so three pages are found, and round 3 splits
both ranges again. Rounds 4 and 5 have up to eight and sixteen ranges.

The next round depends only on the answers and never on their timing. Therefore every machine
lists the same objects in the same order, and draws the same shards.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from operator import itemgetter
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from growcache.errors import StoreError, TransientStoreError
from growcache.store.contract import paginate
from growcache.store.store_errors import is_client_error, read_fsspec_error
from growcache.store.urls import MatchSeeker, is_unsupported_key, key_before
from growcache.threads import ConcurrentCalls
from growcache.usercode import short_key

if TYPE_CHECKING:
    from growcache.store.contract import Backend, Entry, Page
    from growcache.store.retries import RetryPolicy
    from growcache.store.urls import Location

logger = logging.getLogger(__name__)

_LEAST_PAGES = 2.0  # estimated rest of a range that makes a split worth a request
_UNKNOWN_PAGES = 1e9  # pages; ranges without a known end are split first
_CODE_SPACE = 1 << 256


@dataclass(slots=True, eq=False)
class KeyRange:
    """A part of one URL that has yet to be listed: the keys in (after, up_to]."""

    section: UrlListing
    fixed: int = 0  # number of characters that all its keys share
    after: str = ""
    up_to: str | None = None
    first: str = ""  # first key of the last page
    pages: Iterator[Page] | None = None

    def next_page(self, retries: RetryPolicy) -> Page | None:
        def attempt() -> Page | None:
            if self.pages is None:
                section = self.section
                pages = section.backend.listing(section.location, self.after or None)
                self.pages = _refuse_repeated_pages(pages)
            try:
                return next(self.pages, None)
            except TransientStoreError:
                self.pages = None
                raise

        return retries.run(attempt)

    def split(self, places: Sequence[str]) -> list[KeyRange]:
        up_to, last = self.up_to, self
        behind: list[KeyRange] = []
        for place in places:
            start = self.section.seeker.seek(place)
            last.up_to = place
            if start is None:
                break
            if up_to is None or start <= up_to:
                after = max(place, key_before(start) or "")
                last = KeyRange(self.section, self.fixed, after, up_to)
                behind.append(last)
        return behind

    def advance(self, page: Page | None) -> tuple[list[Entry], bool]:
        if page is None:
            return [], False
        # Folder markers are sorted with their slash, and listed without it.
        keys = [entry.key for entry in page if entry.size]
        if keys and (keys[0] <= self.after or keys != sorted(keys)):
            raise UnsortedError(keys[0])
        up_to = self.up_to
        inside = page if up_to is None else [entry for entry in page if entry.key <= up_to]
        if not inside:
            return [], not page and not page.last
        self.first, self.after = inside[0].key, inside[-1].key
        over = self.section.seeker.seek(self.after)
        if len(inside) < len(page) or page.last or over is None:
            return inside, False
        if up_to is not None and over > up_to:
            return inside, False
        if (jump := key_before(over) or "") > self.after:
            self.after, self.pages = jump, None
        return inside, True


def _refuse_repeated_pages(pages: Iterator[Page]) -> Iterator[Page]:
    """Yield pages; raise StoreError if one is repeated, because such a listing would never end."""
    seen: set[int] = set()
    for page in pages:
        if page:
            number = hash((page[0], page[-1], len(page)))
            if number in seen:
                raise StoreError(
                    f"the store's listing repeats its page of {len(page)} objects that ends with "
                    f"{short_key(page[-1].key)}; it cannot be listed to its end",
                    code="GC214",
                )
            seen.add(number)
        yield page


class UnsortedError(Exception):
    """A store does not list in the order of keys, or not from the requested place."""


def split_points(ranges: Sequence[KeyRange], free: int, coder: KeyCoder) -> list[list[str]]:
    counts = _splits_per_range([_pages_left(one, coder) for one in ranges], free)
    return [
        _split_points_of(one, count, coder) for one, count in zip(ranges, counts, strict=True)
    ]


def _splits_per_range(pages: Sequence[float], free: int) -> list[int]:
    counts = [0] * len(pages)
    for _ in range(free if pages else 0):
        most = max(range(len(pages)), key=lambda i: pages[i] / (counts[i] + 1))
        if pages[most] / (counts[most] + 1) < _LEAST_PAGES:
            break
        counts[most] += 1
    return counts


def _pages_left(one: KeyRange, coder: KeyCoder) -> float:
    if one.up_to is None:
        return _UNKNOWN_PAGES
    at = _common_length(one.first, one.up_to)
    first, after, up_to = (coder.encode(text, at) for text in (one.first, one.after, one.up_to))
    return min((up_to - after) / max(1, after - first), _UNKNOWN_PAGES)


def _split_points_of(one: KeyRange, count: int, coder: KeyCoder) -> list[str]:
    if not count or one.up_to is not None:
        return _even_split_points(one, count, coder)
    # Half of the cuts skip all keys that share a prefix of the last key, one cut per character.
    # They find the prefix of all keys. The other cuts look for its siblings.
    end = min(len(one.after), one.fixed + (count + 1) // 2)
    siblings = (one.after[:i] + _next_character(one.after[i]) for i in range(one.fixed, end))
    skipped = [cut for cut in siblings if cut > one.after and not is_unsupported_key(cut)]
    spaced = _even_split_points(one, count - len(skipped), coder)
    return sorted({*skipped, *spaced})


def _next_character(character: str) -> str:
    # A name must not be "." or end with "/"; the previous cut covers such names.
    if character in "-./":
        return "0"
    if ord(character) + 1 in (0x7F, 0xD800, 0x110000):
        return "\ue000" if character == "\ud7ff" else "\u00a1" if character == "~" else ""
    return chr(ord(character) + 1)


def _even_split_points(one: KeyRange, count: int, coder: KeyCoder) -> list[str]:
    at = one.fixed if one.up_to is None else _common_length(one.after, one.up_to)
    low = coder.encode(one.after, at)
    high = _CODE_SPACE if one.up_to is None else coder.encode(one.up_to, at)
    found: list[str] = []
    for part in range(1, count + 1):
        text = coder.decode(low + (high - low) * part // (count + 1), one.after[:at])
        cut = _shortest_name(one, text)
        if cut is not None and (not found or cut > found[-1]):
            found.append(cut)
    return found


def _shortest_name(one: KeyRange, text: str) -> str | None:
    for length in range(1, len(text) + 1):
        cut = text[:length]
        if (
            cut > one.after
            and (one.up_to is None or cut < one.up_to)
            and not is_unsupported_key(cut)
        ):
            return cut
    return None


class KeyCoder:
    """Learns which kinds of characters follow each other in keys, and ranks texts by that.

    A text is a number in [0, 1), and a greater text never has a smaller number. The interval of
    a text is divided among the likely next characters. So guesses between class_07/ and
    class_08/ are spent on digits and slashes.
    """

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()
        self._seen: dict[str, set[str]] = {}  # characters of each kind
        self._kinds: dict[str, set[str]] = {}  # kinds by the context before them
        self._likely: dict[str, list[str]] = {}

    def learn(self, keys: Iterable[str]) -> None:
        pairs = {pair for key in keys for pair in pairwise(" " + key)} - self._known
        if not pairs:
            return
        self._known |= pairs
        for before, after in pairs:
            kind = _character_kind(after)
            self._seen.setdefault(kind, set()).add(after)
            self._kinds.setdefault(_character_context(before), set()).add(kind)
        self._likely = {
            before: sorted(chain.from_iterable(self._seen[kind] for kind in kinds))
            for before, kinds in self._kinds.items()
        }

    def _after(self, before: str) -> list[str]:
        return self._likely.get(_character_context(before), [])

    def encode(self, text: str, at: int) -> int:
        """Return the rank of a text among all texts with its first ``at`` characters.

        The rank is below `_CODE_SPACE`.
        """
        low, width, before = 0, _CODE_SPACE, text[at - 1 : at] or " "
        for character in text[at:]:
            known = self._after(before)
            place = bisect_left(known, character)
            # One part is for the text that ends here, and one for all after the known
            # characters.
            width //= len(known) + 2
            low += width * (place + 1)
            if not width or place == len(known) or known[place] != character:
                break  # between two known characters, so the rest cannot be ranked
            before = character
        return low

    def decode(self, number: int, beginning: str) -> str:
        found, width, before = [], _CODE_SPACE, beginning[-1:] or " "
        while width and (known := self._after(before)):
            width //= len(known) + 2
            place, number = divmod(number, max(1, width))
            if not place:
                break
            found.append(before := known[min(place, len(known)) - 1])
        return beginning + "".join(found)


def _character_kind(character: str) -> str:
    if character.isdigit():
        return "0"
    if not character.isascii():
        return "é"
    return "a" if character.islower() else "A" if character.isupper() else character


def _character_context(character: str) -> str:
    is_letter = character.isascii() and not character.isdigit()
    return character if is_letter else _character_kind(character)


def _common_length(one: str, other: str) -> int:
    return len(commonprefix([one, other]))  # noqa: RUF071 - by characters is meant


# Most pages per round. It decides the order of a listing, so it is not a setting.
MOST_RANGES = 16
_KEYS_LEARNED_PER_PAGE = 8  # keys per page from which characters are learned
# ListingRounds that are mixed and yielded together, because the first objects decide the
# schema. They have at most 1, 2, 4, 8 and 16 pages. More rounds would delay the first sample;
# fewer would see only one end of the keys.
_SURVEY_ROUNDS = 5
_SURVEY_SINGLES = 64  # objects of the survey that are yielded one by one
_SURVEY_RUN = 16  # objects in a row, after the first ones


@dataclass(slots=True)
class UrlListing:
    number: int
    location: Location
    backend: Backend
    is_new: Callable[[str, int], bool]
    kept: Callable[[list[Entry]], list[Entry]] = lambda found: found
    seeker: MatchSeeker = field(init=False)

    def __post_init__(self) -> None:
        pattern = self.location.pattern
        self.seeker = MatchSeeker(pattern, is_glob=self.location.is_glob)

    def whole_range(self) -> KeyRange:
        fixed = self.seeker.fixed
        # If only a folder is fixed, the request's prefix is enough.
        after = "" if fixed == self.location.prefix else key_before(fixed) or ""
        return KeyRange(self, len(fixed), after)

    def pages(self, retries: RetryPolicy) -> Iterator[list[Entry]]:
        part = KeyRange(self)
        while (page := part.next_page(retries)) is not None:
            if page:
                part.after = page[-1].key
                yield self.matching(page)

    def matching(self, page: list[Entry]) -> list[Entry]:
        found = [
            entry
            for entry in page
            if self.location.matches(entry.key) and self.is_new(entry.key, self.number)
        ]
        found = self.kept(found)
        return [replace(entry, store=self.number) for entry in found] if self.number else found


class ListingRounds:
    def __init__(
        self, sections: Sequence[UrlListing], retries: RetryPolicy, most_requests: int
    ) -> None:
        self._waiting = deque(sections)
        self._retries = retries
        self._most = most_requests
        self._parts: list[KeyRange] = []
        self._coder = KeyCoder()
        self._found = 0  # pages with an entry in their range

    def pages(self) -> Iterator[list[Entry]]:
        """Yield the matching entries. After an UnsortedError the listing may have gaps."""
        asked = self._ask()
        survey: list[Entry] = []
        for _ in range(_SURVEY_ROUNDS):
            survey += chain.from_iterable(self._take(asked))
            asked = self._ask()
        yield from paginate(spread_evenly(survey))
        while asked is not None:
            found = self._take(asked)
            # First, so that it is answered while the last pages are processed.
            asked = self._ask()
            yield from found

    def _ask(self) -> ConcurrentCalls[Page | None] | None:
        self._widen()
        if not self._parts:
            return None
        return ConcurrentCalls(
            [partial(part.next_page, self._retries) for part in self._parts], self._most
        )

    def _widen(self) -> None:
        while self._waiting and len(self._parts) < MOST_RANGES:
            self._parts.append(self._waiting.popleft().whole_range())
        known = [part for part in self._parts if part.first]
        more = max(0, min(MOST_RANGES, 1 + self._found) - len(self._parts))
        found = split_points(known, more, self._coder)
        for part, places in zip(known, found, strict=True):
            at = self._parts.index(part) + 1
            self._parts[at:at] = part.split(places)

    def _take(self, asked: ConcurrentCalls[Page | None] | None) -> list[list[Entry]]:
        if asked is None:
            return []
        found, left = [], []
        for part, page in zip(self._parts, asked.results(), strict=True):
            inside, goes_on = part.advance(page)
            # All of the first page, and then a few of each.
            step = max(1, len(inside) // _KEYS_LEARNED_PER_PAGE) if self._found else 1
            self._coder.learn(entry.key for entry in inside[::step])
            self._found += bool(inside)
            if kept := part.section.matching(inside):
                found.append(kept)
            if goes_on:
                left.append(part)
        self._parts = left
        return found


def spread_evenly(found: Sequence[Entry]) -> list[Entry]:
    """Order entries so that the first few come from all folders, whose objects may be alike."""
    rows = sorted(found, key=lambda entry: (entry.store, entry.key))
    count = min(len(rows), _SURVEY_SINGLES)
    single = [place * len(rows) // count for place in _bit_reversed(count)]
    left = sorted({*range(len(rows))} - {*single})
    runs = (
        left[run * _SURVEY_RUN : (run + 1) * _SURVEY_RUN]
        for run in _bit_reversed(-(-len(left) // _SURVEY_RUN))
    )
    return [rows[place] for place in chain(single, *runs)]


def _bit_reversed(count: int) -> list[int]:
    """Return the numbers below count, ordered so that the first few are spread over all.

    >>> _bit_reversed(8), _bit_reversed(5)
    ([0, 4, 2, 6, 1, 5, 3, 7], [0, 4, 2, 1, 3])
    """
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: f"{number:0{bits}b}"[::-1])


def walk_folders(
    fs: Any, top: str, depth: int | None, after: str | None = None
) -> Iterator[Mapping[str, Any]]:
    """Yield fsspec's entries of the files below a folder, in the order of their names.

    fsspec's own walk silently skips sub-folders that it fails to list. This one raises, and the
    listing resumes after the last name. A deleted sub-folder counts as empty. A forbidden one
    is skipped with a warning.
    """

    def walk(
        folder: str, found: list[Mapping[str, Any]], depth: int | None
    ) -> Iterator[Mapping[str, Any]]:
        named = ((_sort_name(info), info) for info in found if info["name"])
        for name, info in sorted(named, key=itemgetter(0)):
            is_folder = info["type"] == "directory"
            if name.rstrip("/") == folder.rstrip("/") and is_folder:
                continue  # some stores list a folder in its own content
            if not is_folder:
                if after is None or name > after:
                    yield info
                continue
            is_listed = after is not None and name < after and not after.startswith(name)
            if (depth is None or depth > 1) and not is_listed:
                yield from walk(name, list_folder(folder_path(name)), depth and depth - 1)

    def list_folder(folder: str) -> list[Mapping[str, Any]]:
        try:
            found: list[Mapping[str, Any]] = fs.ls(folder, detail=True)
        except Exception as error:
            answer = read_fsspec_error(error) if is_client_error(error) else None
            if answer is None or answer.status not in (403, 404, 410):
                raise
            fs.ls(top, detail=True)  # raises if everything is refused by now
            if answer.status == 403:
                logger.warning(
                    "listing leaves out %s: no permission to read it",
                    short_key(folder.rstrip("/")),
                )
            return []
        return found

    yield from walk(top, fs.ls(top, detail=True), depth)


def _sort_name(info: Mapping[str, Any]) -> str:
    name = str(info["name"])
    return name.rstrip("/") + "/" if info["type"] == "directory" else name


def folder_path(name: str) -> str:
    """Return a folder's path for a request. Web servers need the slash at its end."""
    return name if name.startswith(("http://", "https://")) else name.rstrip("/")
