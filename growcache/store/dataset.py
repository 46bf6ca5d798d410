"""The indices of a Dataset as the objects of a store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from growcache.config_source import SourceConfig
from growcache.errors import ObjectMissingError, StoreError
from growcache.store.contract import Entry, paginate

if TYPE_CHECKING:
    from typing_extensions import Buffer

INDEX_SIZE = 1  # a placeholder, because the size of a value is unknown


MOST_ASKED = 4  # indices that are called to find out whether any returns


class DatasetCaller(Protocol):
    @property
    def answered_at(self) -> float:
        """Time at which a call of the Dataset last ended by itself, in monotonic seconds."""

    async def answers(self, index: int) -> bool:
        """Call the Dataset; return whether the call ends by itself, with a value or an error."""


class DatasetStore:
    """A store whose objects are the indices of a Dataset.

    The key of an object is its index in decimal. It has no bytes, because the format calls the
    Dataset.
    """

    def __init__(
        self, source: SourceConfig, length: int, answers: DatasetCaller | None = None
    ) -> None:
        self._source = source
        self.length = length
        self._answers = answers
        self._given_up: dict[str, float] = {}

    @property
    def source(self) -> SourceConfig:
        return self._source

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Do nothing, because a Dataset has its own client."""

    def pages(self) -> Iterator[list[Entry]]:
        yield from filter(None, paginate(map(_entry, range(self.length))))

    async def find(self, key: str) -> Entry:
        if not key.isdecimal() or int(key) >= self.length:
            raise ObjectMissingError(
                f"{self._source.dataset}: expected an index below {self.length:,}, found {key}"
            )
        return _entry(int(key))

    async def current_entry(self, entry: Entry) -> Entry:
        return await self.find(entry.key)

    async def read(self, entry: Entry, start: int = 0, stop: int | None = None) -> Buffer:
        raise StoreError(f"{self._source.dataset}: index {entry.key} has no bytes to read")

    async def fails_alone(
        self, entry: Entry, since: float, others: Sequence[Entry] = ()
    ) -> bool:
        """Whether a call for another index has ended since this one started, or ends now."""
        if not await self._one_answers(since, others):
            return False
        self._given_up[entry.key] = time.monotonic()
        return True

    async def _one_answers(self, since: float, others: Sequence[Entry]) -> bool:
        if self._answers is None:
            return False
        if self._answers.answered_at >= since:
            return True
        for other in others[:MOST_ASKED]:
            if await self._answers.answers(int(other.key)):
                return True
        return False

    def given_up(self, entry: Entry, since: float = 0.0) -> bool:
        return self._given_up.get(entry.key, -1.0) >= since

    def is_named_by_url(self, entry: Entry) -> bool:
        return False

    async def close(self) -> None:
        """Do nothing, because the threads end with their process."""


def _entry(index: int) -> Entry:
    return Entry(str(index), INDEX_SIZE, None, None)
