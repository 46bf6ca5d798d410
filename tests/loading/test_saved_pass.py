"""A pass in a state: a few kilobytes where it is regular, and the same pass when it is read."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.loading import saved_pass
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import PassPlan, PassPosition, PlannedShard, shard_order
from growcache.loading.resume import Position
from growcache.loading.saved_pass import (
    NAME_BYTES,
    pack_numbers,
    pass_from_dict,
    pass_to_dict,
    rest_digest,
    unpack_numbers,
)

MIXER = 0x9E3779B97F4A7C15F39CC0605CEDC835
OPTIONS = LoaderOptions("cache", batch_size=64)


def planned(
    sizes: dict[int, int], window: int, options: LoaderOptions = OPTIONS, number: int = 3
) -> PassPlan:
    order = shard_order(
        sizes.items(), seed=options.seed, pass_number=number, shuffle=options.is_shuffled
    )
    shards = tuple(
        PlannedShard(n, size, f"{(n + 1) * MIXER % (1 << 128):032x}") for n, size in order
    )
    return PassPlan(number, shards, window)


@given(st.lists(st.integers(0, 2**62), max_size=20))
def test_numbers_come_back(numbers: list[int]) -> None:
    assert unpack_numbers(pack_numbers(np.array(numbers, np.int64))).tolist() == numbers


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.dictionaries(st.integers(0, 10**6), st.integers(1, 9), min_size=1, max_size=30),
    window=st.integers(1, 60),
    share=st.floats(0, 1),
    shuffle=st.booleans(),
    swap=st.booleans(),
    named=st.integers(0, 12),
)
def test_a_pass_is_the_same_when_it_is_read(
    sizes: dict[int, int], window: int, share: float, shuffle: bool, swap: bool, named: int
) -> None:
    options = LoaderOptions("cache", batch_size=1, shuffle=shuffle)
    plan = planned(sizes, window, options)
    if swap:  # another order than the seed's, as with stand-ins
        plan = PassPlan(plan.number, plan.shards[::-1], window)
    mark = PassPosition(plan.number, round(share * len(plan)), (7,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_pass, "NAMED_SHARDS", named)
        said = pass_to_dict(plan, mark, options)
        assert said is not None
        read, at = pass_from_dict(json.loads(json.dumps(said)), options)
        assert pass_to_dict(read, at, options) == said
    assert at == mark
    assert [shard[:2] for shard in read.shards] == [shard[:2] for shard in plan.shards]
    assert read.windows(options) == plan.windows(options)
    rest = read.rest
    assert rest is not None
    assert rest.digest == rest_digest(plan.shards[rest.first :])
    left = [w for w in plan.windows(options) if mark.position < w.first + len(w)]
    needed = {number for w in left for number in w.numbers}
    of_its_own = {number for w in left[:1] for number in w.numbers}
    for place, (was, now) in enumerate(zip(plan.shards, read.shards, strict=True)):
        assert now.digest == (was.digest[: 2 * NAME_BYTES] if now.digest else "")
        assert now.digest or was.number not in of_its_own
        assert now.digest or was.number not in needed or place >= rest.first


def state_bytes(sizes: dict[int, int]) -> int:
    plan = planned(sizes, 64_000)
    state = Position(mark=PassPosition(plan.number, len(plan) // 3), plan=plan)
    return len(json.dumps(state.to_dict(OPTIONS)))


SHARDS = 100_000


def test_a_hundred_thousand_shards_in_a_row_take_less_than_four_kilobytes() -> None:
    ramp = {10**6 + n: min(1000, 1 << n) for n in range(40)}
    row = {10**6 + n: 1000 for n in range(40, SHARDS) if n % 20_000}  # five are missing
    assert state_bytes({**ramp, **row}) <= 4096


def test_others_take_less_than_sixteen_bytes_each() -> None:
    """Every gap and every size is another one, as with random eviction, and others stand in."""
    chance, shards = random.Random(0), SHARDS // 5
    numbers = chance.sample(range(10 * shards), shards)
    plan = planned({n: chance.randrange(1, 2000) for n in numbers}, 64_000)
    stand_ins = list(plan.shards)
    chance.shuffle(stand_ins)
    state = Position(
        mark=PassPosition(plan.number, 0), plan=PassPlan(plan.number, tuple(stand_ins), 64_000)
    )
    assert len(json.dumps(state.to_dict(OPTIONS))) <= 16 * shards


def test_one_digest_over_all_is_not_known_where_one_of_them_is_not() -> None:
    shards = planned({1: 5, 2: 5}, 5).shards
    assert len(rest_digest(shards)) == 32
    assert rest_digest([*shards, PlannedShard(3, 5, "")]) == rest_digest([]) == ""


def version_2(plan: PassPlan, mark: PassPosition) -> dict[str, Any]:
    """What an earlier growcache said."""
    return {
        "number": plan.number,
        "position": mark.position,
        "corrupt": list(mark.corrupt),
        "window_samples": plan.window_samples,
        "numbers": [shard.number for shard in plan.shards],
        "samples": [shard.samples for shard in plan.shards],
        "digests": "".join(shard.digest for shard in plan.shards),
    }


def test_a_state_of_the_version_before_is_read() -> None:
    plan = planned(dict.fromkeys(range(20), 10), 50)
    mark = PassPosition(plan.number, 70, (4,))
    state = Position(epoch=2, step=5, next_epoch=3, next_pass=4, mark=mark, plan=plan)
    said = state.to_dict(OPTIONS)
    old = {**said, "version": 2, "pass": version_2(plan, mark)}
    old["options"] = {**said["options"], "world_size": 2}
    del old["global_step"]
    assert Position.from_dict(json.loads(json.dumps(old)), OPTIONS) == state
