"""How much is read behind a block, so that its last line, or record, comes with the same request."""

from __future__ import annotations

from collections.abc import Sequence


class Ahead:
    """Learns it from those that were read; no result depends on it.

    A block ends anywhere within its last item, so what is missing of that is half an item on
    average, and a whole one at most. More than the longest one is never of use; and where few
    are that long, it is cheaper to read on now and then than to read so much each time.

    Args:
        first: bytes, as long as nothing is learnt.
        head: bytes that must be seen of what follows.
        most: bytes of one item that are worth it.
    """

    def __init__(self, first: int, head: int, most: int) -> None:
        self.nbytes = first
        self._head = head
        self._most = most
        self._longest = 0

    def learn(self, sizes: Sequence[int]) -> None:
        """Take note of the sizes of items that follow one another, in bytes."""
        if sizes:
            self._longest = max(max(sizes), self._longest * 7 // 8)
            likely = 2 * sum(sizes) // len(sizes)
            self.nbytes = min(self._most, likely, self._longest) + self._head

    def step(self, least: int, most: int) -> int:
        """Return by how much to read on where that was too little."""
        return min(most, max(least, 2 * self.nbytes)) if self._longest else most
