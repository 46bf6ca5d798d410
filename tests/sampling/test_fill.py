"""What a failed visit costs: a transient failure its group, for now; a permanent one a hole."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from growcache.config_source import SourceConfig
from growcache.errors import BudgetSpentError, FormatError, StoreError, TransientStoreError
from growcache.formats.base import ObjectFormat, PartlyReadError
from growcache.sampling.fill import GroupFiller, SampleTransform, load_transform
from growcache.sampling.messages import PartVisit, Permit
from growcache.sampling.sampler_memory import GroupLimits
from growcache.sampling.sources import OpenSource, Sources
from growcache.schema import Schema
from growcache.store.contract import Entry, Store

SCHEMA = Schema.from_sample({"x": np.zeros(2, "<f4")})


ERRORS = {
    "gone": StoreError("gone: expected an object, found 404"),
    "odd": FormatError("odd: expected an array, found text"),
    "busy": TransientStoreError("busy: 503 SlowDown"),
}


class Reading:
    """A format whose objects fail as their names say."""

    async def read(self, reader: Any, visit: Any) -> list[tuple[dict[str, Any], int, int]]:
        key = reader.entry.key
        if key in ERRORS:
            raise ERRORS[key]
        if key.startswith("partly"):
            found = [({"x": np.full(2, n, "<f4")}, n, n + 1) for n in range(3)]
            raise PartlyReadError("partly: line 3 is none", found)
        if key == "mixed":
            values = np.zeros(2, "<f4"), np.zeros(3, "<f4"), np.ones(2, "<f4"), np.zeros(2)
            return [({"x": x}, n, n + 1) for n, x in enumerate(values)]
        return [({"x": np.full(2, float(key), "<f4")}, 0, 1)]


class Held(Reading):
    """Objects that answer on command."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.answers: asyncio.Queue[None] = asyncio.Queue()

    async def read(self, reader: Any, visit: Any) -> list[tuple[dict[str, Any], int, int]]:
        self.started.append(reader.entry.key)
        await self.answers.get()
        return await super().read(reader, visit)


def permit(*keys: str) -> Permit:
    visits = tuple(PartVisit(Entry(key, 8, None, None), 0, 1) for key in keys)
    return Permit("p", 0, 0, 0, (0,), visits, None)


def filler(object_format: Reading, transform: SampleTransform | None = None) -> GroupFiller:
    store = SimpleNamespace(source=SourceConfig(url=("memory://x",)))
    sources = Sources([OpenSource(cast(Store, store), cast(ObjectFormat, object_format))])
    return GroupFiller(sources, transform, 0, 4)


def visit(*keys: str) -> list[Any]:
    work = filler(Reading()).visit_all(permit(*keys), SCHEMA, lambda: None)
    return list(asyncio.run(work))


@pytest.mark.mutant(
    6, "growcache.sampling.fill:GroupFiller.visit", "(StoreError, FormatError)", "FormatError"
)
def test_a_permanent_failure_is_a_hole_with_its_reason() -> None:
    found = visit("1", "gone", "odd", "2")
    assert [len(visited.samples) for visited in found] == [1, 0, 0, 1]
    assert [visited.hole is None for visited in found] == [True, False, False, True]
    assert "404" in found[1].hole
    assert "text" in found[2].hole


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": sample["x"] + rng.normal(size=2).astype("<f4")}


@pytest.mark.mutant(
    5,
    "growcache.sampling.fill:GroupFiller._transformed",
    "permit.round if visit.round is None else visit.round",
    "permit.round",
)
def test_a_part_that_comes_twice_in_a_group_has_other_noise() -> None:
    """Strata and mixtures visit a part in several rounds of theirs within one group."""
    entry = Entry("1", 8, None, None)
    visits = tuple(PartVisit(entry, round=round_) for round_ in (None, 0, 1, 2, 1))
    transform = load_transform(f"{__name__}:noisy", {}, 0)
    work = filler(Reading(), transform).visit_all(
        Permit("p", 0, 0, 0, (0,), visits), SCHEMA, lambda: None
    )
    noise = [tuple(found.samples[0]["x"]) for found in asyncio.run(work)]
    assert noise[0] == noise[1]
    assert noise[2] == noise[4]
    assert len(set(noise)) == 3


def test_what_can_be_read_of_a_visit_is_kept_beside_the_hole() -> None:
    partly, mixed = visit("partly", "mixed")
    assert (partly.origins, partly.hole) == (
        [(0, 1), (1, 2), (2, 3)],
        "partly: line 3 is none (GC301)",
    )
    assert mixed.origins == [(0, 1), (2, 3)]
    assert mixed.hole.startswith("mixed: expected a sample with x: float32[2], found x: float3")


@pytest.mark.mutant(6, "growcache.sampling.fill:GroupFiller.visit", "TransientStoreError", "()")
def test_a_transient_failure_fails_the_whole_group() -> None:
    with pytest.raises(TransientStoreError, match="503"):
        visit("1", "busy", "2")


def test_a_group_begins_when_all_visits_of_the_one_before_have_begun() -> None:
    async def both() -> list[list[str]]:
        object_format, seen = Held(), []
        one = filler(object_format)
        groups = [permit(*"123456"), permit(), permit("7", "8")]
        tasks = [asyncio.create_task(one.visit_all(g, SCHEMA, lambda: None)) for g in groups]
        for _ in range(4):
            for _ in range(20):
                await asyncio.sleep(0)
            seen.append(list(object_format.started))
            object_format.answers.put_nowait(None)
        for _ in range(4):
            object_format.answers.put_nowait(None)
        assert [len(found) for found in await asyncio.gather(*tasks)] == [6, 0, 2]
        return seen

    # Four at once; the next group waits for none of them to end.
    assert list(map("".join, asyncio.run(both()))) == ["1234", "12345", "12345678", "12345678"]


def test_a_group_that_fails_lets_the_next_begin() -> None:
    async def both() -> list[Any]:
        one = filler(Reading())
        groups = [permit("busy", *"123456"), permit("7")]
        work = [one.visit_all(group, SCHEMA, lambda: None) for group in groups]
        return await asyncio.gather(*work, return_exceptions=True)

    failed, found = asyncio.run(both())
    assert isinstance(failed, TransientStoreError)
    assert len(found) == 1


def test_a_spent_budget_ends_a_group_also_where_visits_wait_for_memory() -> None:
    class Spent(Held):
        async def read(self, reader: Any, visit: Any) -> list[tuple[dict[str, Any], int, int]]:
            found = await super().read(reader, visit)
            if reader.entry.key == "2":
                raise BudgetSpentError("sampling.max_egress is reached")
            return found

    async def work() -> list[str]:
        object_format, limits = Spent(), GroupLimits(24, 1000, 24)
        group = permit(*"1234567")
        filling = filler(object_format).visit_all(group, SCHEMA, lambda: None, limits)
        for _ in group.visits:
            object_format.answers.put_nowait(None)
        with pytest.raises(BudgetSpentError):
            await asyncio.wait_for(filling, 300)
        return object_format.started

    assert "7" not in asyncio.run(work())
