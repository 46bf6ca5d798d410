"""Objects in memory, read as formats read them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from growcache.config_source import SourceConfig
from growcache.errors import ObjectMissingError, StoreError
from growcache.formats.base import ObjectFormat, Visit
from growcache.schema import Sample
from growcache.store.contract import Entry

Row = tuple[Sample, int, int]
SOURCE = SourceConfig(url=("s3://held/",), storage_options={"anon": True})


class Held:
    """An object that counts what is asked of it, next to others of its source.

    Args:
        data: its bytes.
        key: its name.
        neighbours: bytes of the others, by key.
        size: what the listing says, if it is not the truth.
        failures: raised by the first reads, one each.
    """

    def __init__(
        self,
        data: bytes,
        key: str = "k",
        neighbours: Mapping[str, bytes] | None = None,
        *,
        size: int | None = None,
        failures: list[StoreError] | None = None,
    ) -> None:
        self.entry = Entry(key, len(data) if size is None else size, f'"{key}"', None)
        self.source = SOURCE
        self.data = data
        self.asked: list[tuple[int, int | None]] = []
        self.found: list[str] = []
        self.others: list[Held] = []
        self._neighbours = neighbours or {}
        self._failures = failures or []

    async def read(self, start: int = 0, stop: int | None = None) -> bytes:
        self.asked.append((start, stop))
        if self._failures:
            raise self._failures.pop(0)
        return self.data[start:stop]

    @property
    def partners(self) -> Sequence[Held]:
        return self.others

    async def find(self, key: str) -> Held:
        self.found.append(key)
        if key not in self._neighbours:
            raise ObjectMissingError(f"{key} does not exist")
        return Held(self._neighbours[key], key, self._neighbours)


def visited(
    object_format: ObjectFormat, held: Held, part: int = 0, parts: int = 1, **more: Any
) -> list[Row]:
    visit = Visit(
        part, parts, more.pop("round", 0), more.pop("seed", 0), more.pop("take", None)
    )
    return asyncio.run(object_format.read(held, visit))
