from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.eviction_policy import (
    ORDERS,
    Candidate,
    choose_early_retirements,
    choose_evictions,
    choose_for_lower_bound,
)
from growcache.cache.space import (
    LEAST_BUDGET_BYTES,
    MOST_BUDGET_BYTES,
    fixed_budget,
    minimum_bytes,
)

candidate_lists = st.lists(
    st.builds(
        Candidate,
        number=st.integers(0, 10**6),
        seq=st.integers(0, 10**6),
        allocated=st.integers(1, 1000).map(lambda blocks: blocks * 4096),
        uses=st.integers(0, 9),
        min_job_uses=st.integers(0, 3),
        leased=st.booleans(),
    ),
    max_size=20,
    unique_by=lambda c: c.number,
)
policies = st.sampled_from(sorted(ORDERS))


@given(policies, candidate_lists, st.integers(-5, 10**7), st.integers(0, 3), st.integers())
def test_enough_is_evicted_and_not_one_shard_too_many(
    policy: str, candidates: list[Candidate], need: int, min_uses: int, seed: int
) -> None:
    choice = choose_evictions(policy, candidates, need, min_uses, seed)
    chosen = [c for number in choice.evict for c in candidates if c.number == number]
    assert all(not c.leased and c.min_job_uses >= min_uses for c in chosen)
    freed = sum(c.allocated for c in chosen)
    assert choice.short_bytes == max(0, need - freed)
    if chosen:
        assert freed - chosen[-1].allocated < need
    may_go = [c for c in candidates if not c.leased and c.min_job_uses >= min_uses]
    if choice.short_bytes and policy != "none":
        assert len(chosen) == len(may_go)


@given(
    policies,
    candidate_lists,
    st.integers(-5, 10**7),
    st.integers(0, 10**6),
    st.integers(0, 3),
)
def test_a_lowered_bound_takes_what_it_needs_and_unread_shards_last(
    policy: str, candidates: list[Candidate], need: int, retired: int, min_uses: int
) -> None:
    evict, ahead = choose_for_lower_bound(policy, candidates, need, retired, min_uses)
    by_number = {c.number: c for c in candidates}
    gone, going = [by_number[n] for n in evict], [by_number[n] for n in ahead]
    assert not any(c.leased for c in gone)
    assert all(c.leased for c in going)
    ripe = [c.min_job_uses >= min_uses for c in gone]
    assert ripe == sorted(ripe, reverse=True), "an unread shard went before a read one"
    freed, coming = sum(c.allocated for c in gone), sum(c.allocated for c in going)
    if gone:
        assert freed - gone[-1].allocated < need
    if going:
        assert freed + retired + coming - going[-1].allocated < need
    if policy == "none":
        assert (evict, ahead) == ((), ())
    elif freed + retired + coming < need:
        assert len(gone) + len(going) == len(candidates), "more could have gone"


@pytest.mark.mutant(
    21,
    "growcache.cache.eviction_policy:choose_early_retirements",
    "budget < 0 and (chosen or retired_bytes)",
    "budget < 0",
)
@given(
    policies, candidate_lists, st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 3)
)
def test_a_fifth_is_retired_ahead_or_one_shard(
    policy: str, candidates: list[Candidate], max_bytes: int, retired: int, min_uses: int
) -> None:
    ahead = choose_early_retirements(policy, candidates, max_bytes, retired, min_uses)
    chosen = [c for c in candidates if c.number in ahead]
    assert all(c.min_job_uses >= min_uses for c in chosen)
    if retired + sum(c.allocated for c in chosen) > max_bytes / 5:
        assert len(chosen) <= (0 if retired else 1)
    ripe = [c for c in candidates if c.min_job_uses >= min_uses]
    if policy != "none" and ripe and not retired:
        assert chosen, "nothing would ever be refreshed"


def shards(count: int, **values: int) -> list[Candidate]:
    return [Candidate(n, n, 4096, n % 3, 1, leased=False, **values) for n in range(count)]


def test_the_oldest_and_the_most_used_go_first() -> None:
    assert choose_evictions("fifo", shards(9)[::-1], 3 * 4096, 1).evict == (0, 1, 2)
    assert choose_evictions("most_used", shards(9)[::-1], 4 * 4096, 1).evict == (2, 5, 8, 1)
    assert choose_evictions("none", shards(9), 4096, 0).evict == ()


def test_random_is_fair_over_decisions() -> None:
    """With one order for ever, what came last would go first: survivors never would."""
    gone: Counter[int] = Counter()
    for seed in range(3000):
        gone.update(choose_evictions("random", shards(10), 4096, 1, seed).evict)
    assert set(gone) == set(range(10))
    assert max(gone.values()) < 1.4 * min(gone.values())
    assert choose_evictions("random", shards(10), 4096, 1, 5) == choose_evictions(
        "random", shards(10), 4096, 1, 5
    )


@given(st.integers(0, 10**13))
def test_the_parts_of_the_budget_fit_into_it(max_bytes: int) -> None:
    budget = fixed_budget(max_bytes)
    assert LEAST_BUDGET_BYTES <= budget.total <= MOST_BUDGET_BYTES
    # The log may grow by one transaction, at most its own size, before it is cut.
    assert budget.ballast + 2 * budget.wal + budget.pages <= budget.total


@given(st.integers(1, 64), st.integers(4096, 10**9), st.integers(0, 10**8))
def test_the_least_bound_holds_what_it_must(workers: int, group: int, catalog: int) -> None:
    least = minimum_bytes(workers, group, catalog)
    need = (workers + 2) * group + catalog
    assert least - fixed_budget(least).total >= need
    assert least - need <= fixed_budget(least).total + 8


@pytest.mark.parametrize("policy", sorted(ORDERS))
def test_policies_do_not_change_what_they_are_given(policy: str) -> None:
    given_ = shards(5)
    choose_evictions(policy, given_, 4096, 0)
    assert given_ == shards(5)
