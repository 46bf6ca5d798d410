"""What is remembered of objects, and that those who ask at the same time ask once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from growcache.errors import TransientStoreError
from growcache.formats import open_format
from growcache.formats.base import ObjectFormat, Visit
from growcache.formats.byte_ranges import ReadAhead
from growcache.formats.memory import SingleFlightCache
from tests.formats.held import Held
from tests.formats.test_formats import npy


class Slow(Held):
    """Answers later, so that others can ask meanwhile."""

    async def read(self, start: int = 0, stop: int | None = None) -> bytes:
        found = await super().read(start, stop)
        await asyncio.sleep(0)
        return found


async def side_by_side(object_format: ObjectFormat, held: Held, parts: int) -> None:
    await asyncio.gather(
        *(object_format.read(held, Visit(n, parts, 0, 0)) for n in range(parts))
    )


def test_visits_side_by_side_read_a_header_once() -> None:
    held = Slow(npy(np.zeros((40_000, 4), "f4")))
    asyncio.run(side_by_side(open_format("npy", {"axis": 0}), held, 8))
    assert held.asked.count((0, 512)) == 1
    assert len(held.asked) == 9


def test_an_index_is_walked_once_for_all() -> None:
    tfrecord = pytest.importorskip("tests.formats.test_tfrecord")
    tar = pytest.importorskip("tests.formats.test_tar")
    for name, data in (
        ("tfrecord", tfrecord.file(tfrecord.rows(50, 20_000))),
        ("tar", tar.archive(tar.samples(50, 20_000))),
    ):
        held = Slow(data)
        object_format = open_format(name, {"decode": "none", "index": True})
        asyncio.run(side_by_side(object_format, held, 6))
        # The way begins at byte 0, and so does the first part.
        assert [start for start, _ in held.asked].count(0) == 2, name


def test_where_one_who_asks_fails_the_next_one_asks() -> None:
    asked = 0

    async def ask() -> tuple[str, int]:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        if asked < 3:
            raise TransientStoreError("not yet")
        return "found", 1

    async def run() -> list[str | BaseException]:
        known: SingleFlightCache[str, str] = SingleFlightCache(10)
        given_up = asyncio.create_task(known.get("k", ask))
        others = [asyncio.create_task(known.get("k", ask)) for _ in range(4)]
        await asyncio.sleep(0)
        given_up.cancel()
        return await asyncio.gather(*others, return_exceptions=True)

    first, *others = asyncio.run(run())
    assert isinstance(first, TransientStoreError)
    assert (others, asked) == (["found"] * 3, 3)


def test_what_is_ahead_is_the_longest_at_most_and_twice_the_average_at_most() -> None:
    ahead = ReadAhead(4096, 64, 1 << 20)
    assert ahead.step(10, 999) == 999
    ahead.learn([])
    assert ahead.nbytes == 4096
    ahead.learn([1000] * 24)
    assert ahead.nbytes == 1064
    ahead.learn([100] * 23 + [5000])
    assert ahead.nbytes == 2 * 7300 // 24 + 64
    for _ in range(50):  # the long one is forgotten
        ahead.learn([100] * 24)
    assert ahead.nbytes == 164
    ahead.learn([1 << 30])
    assert ahead.nbytes == (1 << 20) + 64
    assert ahead.step(10, 999) == 999
