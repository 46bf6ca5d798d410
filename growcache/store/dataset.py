"""The indices of a Dataset, as a store's objects."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from growcache.config_source import SourceConfig
from growcache.errors import ObjectMissingError, StoreError
from growcache.store.contract import Entry, paginate

if TYPE_CHECKING:
    from typing_extensions import Buffer

INDEX_SIZE = 1  # bytes, because nobody knows how many a value has


MOST_ASKED = 4  # indices that are called to see whether any answers


class DatasetCaller(Protocol):
    @property
    def answered_at(self) -> float:
        """When a call of the Dataset last ended by itself, monotonic seconds."""

    async def answers(self, index: int) -> bool:
        """Call the Dataset; whether that ends by itself, with a value or an error."""


class DatasetStore:
    """An object is an index, its key the index in decimal. It has no bytes: the format calls the Dataset."""

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
        """Do nothing: a Dataset has its own client of the store."""

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
        """Whether another index answered since this one was called, or does now."""
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
        """Do nothing: threads end with their process."""


def _entry(index: int) -> Entry:
    return Entry(str(index), INDEX_SIZE, None, None)
