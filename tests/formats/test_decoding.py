"""Visits decode as far as they fit together, and none waits for one that waits."""

from __future__ import annotations

import asyncio
import contextlib
import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import FormatError
from growcache.formats.compressed import read_unpacked
from growcache.formats.memory import (
    DecodeGate,
    correct_decoded,
    refuse_large_sample,
    reserve_decoded,
)
from tests.formats.held import Held

MOST = 100
STEPS = st.lists(st.integers(0, 250), min_size=1, max_size=3)


@given(st.lists(STEPS, min_size=1, max_size=12), st.sets(st.integers(0, 11)), st.booleans())
def test_all_end_and_only_one_is_beyond_the_bound(
    visits: list[list[int]], given_up: set[int], joined: bool
) -> None:
    held: dict[int, int] = {}

    async def one(number: int, sizes: list[int], gate: DecodeGate) -> None:
        async def step(nbytes: int) -> None:
            await reserve_decoded(nbytes)
            first = not held.get(number)
            held[number] = held.get(number, 0) + nbytes
            if first and sum(map(bool, held.values())) > 1:
                # Who holds some already is never held up.
                assert sum(held.values()) <= MOST or any(len(v) > 1 for v in visits)
            await asyncio.sleep(0)

        with gate.visit(None):
            try:
                if joined:
                    await asyncio.gather(*map(step, sizes))
                else:
                    for nbytes in sizes:
                        await step(nbytes)
            finally:
                held.pop(number, None)

    async def run() -> None:
        gate = DecodeGate(MOST)
        tasks = [asyncio.create_task(one(n, v, gate)) for n, v in enumerate(visits)]
        await asyncio.sleep(0)
        for number in given_up & set(range(len(tasks))):
            tasks[number].cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, 300)
        with gate.visit(None):  # and nothing was forgotten
            await asyncio.wait_for(reserve_decoded(MOST), 300)
            other = asyncio.create_task(one(99, [1], gate))
            await asyncio.sleep(0)
            assert not other.done()
            correct_decoded(0, MOST)
            await asyncio.wait_for(other, 300)

    asyncio.run(run())


def test_a_sample_is_refused_only_where_its_size_says_all() -> None:
    refuse_large_sample(10**12, "k")
    with DecodeGate().visit(None):
        refuse_large_sample(10**12, "k")
    with DecodeGate().visit(1000):
        refuse_large_sample(1000, "k")
        with pytest.raises(FormatError, match=r"k: a sample of 1,001 bytes"):
            refuse_large_sample(1001, "k")


@pytest.mark.parametrize("false_claim", [False, True])
def test_what_an_object_says_it_unpacks_to_decides_about_no_byte(false_claim: bool) -> None:
    whole = b"".join(b"%d\n" % n for n in range(1000)) * 40
    packed = gzip.compress(whole)
    if false_claim:  # two streams, the last of which claims little
        packed += gzip.compress(b"end")
        whole += b"end"

    async def read() -> bytes:
        with DecodeGate(1).visit(None):
            return bytes(await read_unpacked(Held(packed), "gzip"))

    assert asyncio.run(read()) == whole


def test_records_that_unpack_as_a_bomb_does() -> None:
    packed = gzip.compress(bytes(1 << 27), 1)
    with pytest.raises(
        FormatError, match=r"may be unpacked to at most [0-9,]+ bytes in memory, found more"
    ):
        asyncio.run(read_unpacked(Held(packed), "gzip"))
    found = asyncio.run(read_unpacked(Held(packed), "gzip", lambda head, packed: 1 << 27))
    assert memoryview(found).nbytes == 1 << 27
