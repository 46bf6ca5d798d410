"""Where a sorted listing is cut, so that several of its pages can be asked for at once. Pure.

Nobody knows beforehand which keys there are. So the first cuts are guesses: names that differ
from those seen so far in one character. Each costs a request whose answer is a page of the
listing, or shows that there is nothing behind the cut; what is left is cut again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, takewhile

from growcache.remote.odd_keys import is_odd

LEAST_PAGES = 2.0  # that a range seems to hold yet, for a cut of it to be worth a request
_UNBOUNDED = 1e9  # pages: where nobody knows the end, that is to be found out first
_ONE = 1 << 256


@dataclass(slots=True, eq=False)
class Range:
    """What is still to be listed: the keys in (after, upto].

    Attributes:
        fixed: how many characters all keys of the listing have in common, for sure.
        first: of the last page.
        after: the last key of it, or where the range begins.
        upto: None: to the end.
    """

    fixed: int
    first: str
    after: str
    upto: str | None


def cuts(ranges: Sequence[Range], free: int, spelling: Spelling) -> list[list[str]]:
    """Return where each range is to be cut, in order.

    Args:
        ranges: that are listed now.
        free: how many more there may be.
        spelling: of the keys seen so far.
    """
    counts = _shares([_pages_left(one, spelling) for one in ranges], free)
    return [
        _between(one, count, spelling) if count else []
        for one, count in zip(ranges, counts, strict=True)
    ]


def _shares(pages: Sequence[float], free: int) -> list[int]:
    """Divide cuts so that the pieces are about alike."""
    counts = [0] * len(pages)
    for _ in range(free if pages else 0):
        most = max(range(len(pages)), key=lambda i: pages[i] / (counts[i] + 1))
        if pages[most] / (counts[most] + 1) < LEAST_PAGES:
            break
        counts[most] += 1
    return counts


def _pages_left(one: Range, spelling: Spelling) -> float:
    """Estimate the pages of a range, as if all were as dense as the last one was."""
    if one.upto is None:
        return _UNBOUNDED
    at = _common(one.first, one.upto)
    first, after, upto = (
        spelling.number(text, at) for text in (one.first, one.after, one.upto)
    )
    return min((upto - after) / max(1, after - first), _UNBOUNDED)


def _between(one: Range, count: int, spelling: Spelling) -> list[str]:
    if one.upto is not None:
        return _spaced(one, count, spelling)
    # Half of the cuts leave out all that begins as the last key does, at each of its first
    # characters: that shows what all keys begin with. The others look for its siblings.
    skipped = _siblings(one.after, one.fixed, -(-count // 2))
    spaced = _spaced(one, count - len(skipped), spelling)
    return sorted({*skipped, *spaced})


def _siblings(key: str, at: int, count: int) -> list[str]:
    found = (key[:i] + _following(key[i]) for i in range(at, min(len(key), at + count)))
    return [cut for cut in found if cut > key and not is_odd(cut)]


def _following(character: str) -> str:
    # No name may be "." or end with "/"; what begins with such is left to the cut before.
    if character in "-./":
        return "0"
    if ord(character) + 1 in (0x7F, 0xD800, 0x110000):
        return "\ue000" if character == "\ud7ff" else "\u00a1" if character == "~" else ""
    return chr(ord(character) + 1)


def _spaced(one: Range, count: int, spelling: Spelling) -> list[str]:
    """Return names that divide a range evenly, each as short as it can be."""
    at = one.fixed if one.upto is None else _common(one.after, one.upto)
    low = spelling.number(one.after, at)
    high = _ONE if one.upto is None else spelling.number(one.upto, at)
    found: list[str] = []
    for part in range(1, count + 1):
        text = spelling.text(low + (high - low) * part // (count + 1), one.after[:at])
        cut = _shortest(one, text)
        if cut is not None and (not found or cut > found[-1]):
            found.append(cut)
    return found


def _shortest(one: Range, text: str) -> str | None:
    """Return the shortest beginning of a text that lies inside of a range."""
    for length in range(1, len(text) + 1):
        cut = text[:length]
        if cut > one.after and (one.upto is None or cut < one.upto) and not is_odd(cut):
            return cut
    return None


class Spelling:
    """Which kinds of characters follow which in the keys seen so far.

    Texts are numbers in [0, 1), of which the greater text has never the lesser one: each
    character takes its part of those that are likely to follow the one before it. Between
    class_07/ and class_08/ there is nothing to guess then but digits, a slash, and so on.
    """

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()
        self._seen: dict[str, set[str]] = {}  # characters of each kind
        self._kinds: dict[str, set[str]] = {}  # by what they follow
        self._likely: dict[str, list[str]] = {}

    def learn(self, keys: Iterable[str]) -> None:
        """Take in what is seen in keys."""
        pairs = {pair for key in keys for pair in pairwise(" " + key)} - self._known
        if not pairs:
            return
        self._known |= pairs
        for before, after in pairs:
            kind = _kind(after)
            self._seen.setdefault(kind, set()).add(after)
            self._kinds.setdefault(_context(before), set()).add(kind)
        self._likely = {
            before: sorted(chain.from_iterable(self._seen[kind] for kind in kinds))
            for before, kinds in self._kinds.items()
        }

    def _after(self, before: str) -> list[str]:
        return self._likely.get(_context(before), [])

    def number(self, text: str, at: int) -> int:
        """Return where a text lies among all that have its first ``at`` characters, of `_ONE`."""
        low, width, before = 0, _ONE, text[at - 1 : at] or " "
        for character in text[at:]:
            known = self._after(before)
            place = bisect_left(known, character)
            # One part for the text that ends here, and one for what follows all that is known.
            width //= len(known) + 2
            low += width * (place + 1)
            if not width or place == len(known) or known[place] != character:
                break  # between two that are known: what follows cannot be told apart
            before = character
        return low

    def text(self, number: int, beginning: str) -> str:
        """Return a text with this beginning that lies about there."""
        found, width, before = [], _ONE, beginning[-1:] or " "
        while width and (known := self._after(before)):
            width //= len(known) + 2
            place, number = divmod(number, max(1, width))
            if not place:
                break
            found.append(before := known[min(place, len(known)) - 1])
        return beginning + "".join(found)


def _kind(character: str) -> str:
    if character.isdigit():
        return "0"
    if not character.isascii():
        return "é"
    return "a" if character.islower() else "A" if character.isupper() else character


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs: Iterable[tuple[str, str]] = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _context(character: str) -> str:
    return character if character.isascii() and not character.isdigit() else _kind(character)
