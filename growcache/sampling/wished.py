"""Which groups are drawn again, or before their turn, because readers wish for their shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from growcache.cache.cache import Cache
from growcache.cache.wishes import by_age, named, too_large
from growcache.remote.catalog import Catalog
from growcache.sampling.book import Book
from growcache.sampling.drawing import Drawing
from growcache.sampling.draws import Draw

MOST_AHEAD = 100_000  # groups that a wish may skip; they are all drawn afterwards
LISTING = "the listing to end: shards of a checkpoint were never drawn here"
NO_SUCH = "shard {} does not exist here: the source, or its fixed set, ends before it"
TOO_FAR = "shard {} lies more than {:,} groups ahead of what was ever drawn here"
NO_ROOM = (
    "{:,} bytes of shards are wished for, with what else their lease holds {:,}, but "
    "cache.max_bytes leaves {:,} for shards; raise it"
)


@dataclass(frozen=True, slots=True)
class Task:
    """What one permit for a wish is about.

    Attributes:
        draw: of the group.
        missing: its shards that were never committed, ascending.
        wished: its shards that are wished for, ascending.
        shards: how many it has in all.
    """

    draw: Draw
    missing: tuple[int, ...]
    wished: tuple[int, ...]
    shards: int

    @property
    def write(self) -> tuple[int, ...]:
        """The shards to be written, ascending."""
        return tuple(sorted({*self.missing, *self.wished}))

    @property
    def again(self) -> bool:
        """Whether all of the group was committed before."""
        return not self.missing


def groups_of(numbers: Iterable[int], group_shards: int) -> dict[int, tuple[int, ...]]:
    """Return the groups of shards in the order of their first, each with those of its shards.

    >>> groups_of([9, 2, 8, 3], 4)
    {2: (8, 9), 0: (2, 3)}
    """
    found: dict[int, list[int]] = {}
    for number in numbers:
        found.setdefault(number // group_shards, []).append(number)
    return {group: tuple(sorted(mine)) for group, mine in found.items()}


class Wished:
    """Follows the cache's wishes, in the book, and refuses what can never be granted.

    Args:
        cache: that has the wishes.
        catalog: the listing.
        drawing: the draws.
        book: of the groups.
        group_shards: shards in a group.
    """

    def __init__(
        self, cache: Cache, catalog: Catalog, drawing: Drawing, book: Book, group_shards: int
    ) -> None:
        self._cache = cache
        self._catalog = catalog
        self._drawing = drawing
        self._book = book
        self._group_shards = group_shards
        self._seen: Mapping[int, str] = {}
        self._weighed: object = None
        self._groups: dict[int, tuple[int, ...]] = {}
        self._draw: Draw | None = None

    def follow(self, shard_bytes: Callable[[int, int], int], capacity: int) -> None:
        """Take up what is wished for now.

        Args:
            shard_bytes: tells what a shard takes on disk of which only the number is known,
                and the capacity.
            capacity: bytes that the bound leaves for shards.
        """
        self._refuse_too_large(shard_bytes, capacity)
        if self._cache.wishes == self._seen:
            return
        self._refuse_too_far()
        self._seen = dict(self._cache.wishes)
        self._groups = groups_of(self._seen, self._group_shards)
        self._book.wish(self._groups)

    def _refuse_too_large(self, shard_bytes: Callable[[int, int], int], capacity: int) -> None:
        leases = by_age(self._cache.leases)
        # Again, too, as shards come and their sizes are known: a few times in all.
        weighed = ({le.name for le in leases}, len(self._cache.wishes).bit_length(), capacity)
        if weighed == self._weighed:
            return
        self._weighed = weighed
        for lease in leases:
            held = lease.holding()
            known = self._cache.sizes(held)
            sizes = {n: known.get(n) or shard_bytes(n, capacity) for n in held}
            if found := too_large(lease, sizes, capacity):
                reason = NO_ROOM.format(*found, capacity)
                self._cache.refuse_wishes(dict.fromkeys(lease.wishing, reason))

    def _refuse_too_far(self) -> None:
        stop = (self._book.next_new + MOST_AHEAD) * self._group_shards
        far = [number for number in self._cache.wishes if not 0 <= number < stop]
        if far:
            self._cache.refuse_wishes({n: TOO_FAR.format(n, MOST_AHEAD) for n in far})

    def of(self, shards: Iterable[int]) -> tuple[int, ...]:
        """Return those of the shards that are wished for now."""
        return tuple(number for number in shards if number in self._cache.wishes)

    @property
    def listing_awaited(self) -> bool:
        """Whether a wish can only be granted once the listing has ended."""
        return not self._catalog.complete and any(
            group >= self._book.next_new for group in self._groups
        )

    def next(self, now: float) -> Task | None:
        """Return what is to be drawn for the wish whose turn it is.

        None where none is due, or the listing has to end first.
        """
        listed = self._catalog.complete
        while (group := self._book.due_wish(now, issued=not listed)) is not None:
            draw = self._drawn(group)
            if draw is not None:
                first = group * self._group_shards
                numbers = range(first, first + self._group_shards)
                missing = tuple(self._cache.never_committed(numbers))
                return Task(draw, missing, self.of(numbers), self._group_shards)
            self.refuse(group, NO_SUCH.format(named(self._groups[group])))
        return None

    def _drawn(self, group: int) -> Draw | None:
        if self._draw is None or self._draw.group != group:
            try:
                self._draw = (
                    self._drawing.ahead(group, self._book.next_new)
                    if group >= self._book.next_new
                    else self._drawing.again(group)
                )
            except LookupError:  # no part for this node
                self._draw = None
        return self._draw

    def refuse(self, group: int, reason: str) -> None:
        """Refuse all wishes for shards of a group."""
        self._cache.refuse_wishes(dict.fromkeys(self._groups.get(group, ()), reason))
        self._seen = dict(self._cache.wishes)
        self._groups = groups_of(self._seen, self._group_shards)
        self._book.wish(self._groups)
