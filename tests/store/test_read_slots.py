"""A semaphore whose size changes while it is in use."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from growcache.store.read_slots import ReadSlots

steps = st.lists(
    st.one_of(
        st.just(("take", 0)),
        st.tuples(st.just("release"), st.integers(0, 20)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("resize"), st.integers(1, 8)),
    ),
    max_size=60,
)


@given(steps)
def test_never_more_than_its_size_and_none_waits_in_vain(work: list[tuple[str, int]]) -> None:
    asyncio.run(_follow(work))


async def _follow(work: list[tuple[str, int]]) -> None:
    slots, size = ReadSlots(3), 3
    waiting: list[asyncio.Task[None]] = []
    taken = 0
    for what, which in work:
        before = taken
        if what == "take":
            waiting.append(asyncio.create_task(slots.acquire()))
        elif what == "release" and taken:
            slots.release()
            taken -= 1
        elif what == "cancel" and waiting:
            waiting.pop(which % len(waiting)).cancel()
        elif what == "resize":
            size = which
            slots.resize(size)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        done = [task for task in waiting if task.done()]
        assert done == waiting[: len(done)]  # first come, first served
        waiting = waiting[len(done) :]
        taken += len(done)
        assert taken <= max(size, before)
        assert not waiting or taken >= size
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
