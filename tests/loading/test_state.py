"""A loader that loads the state of another delivers what that one would have delivered."""

from __future__ import annotations

import itertools
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from growcache.cache.index.reader import live_digests
from growcache.cache.lease_views import read_leases
from growcache.cache.reader_lease import Lease
from growcache.errors import CacheError, ConfigError
from growcache.loading import plan, resume_lease, saved_pass, snapshot
from growcache.loading.loader import Loader
from growcache.loading.options import LoaderOptions, Ranks
from growcache.loading.plan import PassPlan, PassPosition, PlannedShard
from growcache.loading.resume import Position, RemainingPass, remaining_pass, with_substitutes
from growcache.loading.resume_lease import ResumeRequest, resume_pass
from growcache.loading.snapshot import Snapshot
from growcache.schema import Origin, Sample
from tests.filled import Filled, open_leases
from tests.loading.conftest import full_of
from tests.loading.loaders import LOADERS, as_bytes
from tests.ragged import ragged_cache

Epochs = list[list[bytes]]


def noisy(sample: Sample, rng: np.random.Generator, origin: Origin) -> Sample:
    return {**sample, "noise": rng.random(3), "row": np.array(origin.start)}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Filled]]:
    """Caches of every kind that do not change: small samples and large, ragged, damaged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "WINDOW_BYTES", 500)  # else all of it is one window
        patch.setattr(saved_pass, "NAMED_SHARDS", 2)  # else each has a digest of its own
        yield from filled_caches(tmp_path_factory)


def filled_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Filled]]:
    root = tmp_path_factory.mktemp("caches")
    made = {
        "small": Filled(root / "small", full_of((4,))),
        "large": Filled(root / "large", full_of((130, 128))),
        "ragged": ragged_cache(root / "ragged", {"x": ["int16", 2, None], "s": "str"}),
        "damaged": Filled(root / "damaged", full_of((4,)), cache_format="npy"),
    }
    for number in range(13):
        for cache in made.values():
            cache.add(number, samples=9 + number % 3)
    for number in (2, 3, 7):
        made["damaged"].damage(number)
    for cache in made.values():
        cache.complete()
    yield made
    for cache in made.values():
        cache.close()


def run(loader: Loader, epochs: int, states: list[str] | None = None) -> Epochs:
    """The batches of epochs; into ``states`` goes the state after every batch and epoch."""
    found: Epochs = []
    for _ in range(epochs):
        found.append([])
        for batch in loader:
            found[-1].append(as_bytes(batch))
            if states is not None:
                states.append(json.dumps(loader.state_dict()))
        if states is not None:
            states.append(json.dumps(loader.state_dict()))
    return found


def rest_of_run(epochs: Epochs, events: int) -> Epochs:
    """The rest of epochs after a number of events: batches, and ends of epochs."""
    for index, epoch in enumerate(epochs):
        if events <= len(epoch):
            return [epoch[events:], *epochs[index + 1 :]]
        events -= len(epoch) + 1
    return []


def place(state: str) -> Any:
    """A state but for damaged shards of which no row is left."""
    values = json.loads(state)
    if values["pass"] is not None:
        del values["pass"]["corrupt"]
    return values


options_of_loaders = st.fixed_dictionaries(
    {
        "batch_size": st.sampled_from([3, 8, 20]),
        "seed": st.integers(0, 3),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
        "samples_per_epoch": st.sampled_from([None, None, 20, 43, 150]),
        "transform": st.sampled_from([None, noisy]),
        "verify": st.sampled_from(["first", "always"]),
    }
) | st.fixed_dictionaries({"batch_size": st.sampled_from([3, 8]), "fixed": st.just(True)})


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(["small", "large", "ragged", "damaged"]),
    framework=st.sampled_from(list(LOADERS)),
    options=options_of_loaders,
    data=st.data(),
)
def test_the_rest_of_a_run_is_that_of_the_uninterrupted_one(
    caches: dict[str, Filled], kind: str, framework: str, options: Any, data: Any
) -> None:
    make: Callable[[], Loader] = lambda: LOADERS[framework](  # noqa: E731
        caches[kind].root, **{"min_samples": 1, **options}
    )
    states: list[str] = []
    with make() as loader:
        states.append(json.dumps(loader.state_dict()))
        whole = run(loader, 3, states)
    for events in data.draw(st.sets(st.integers(0, len(states) - 1), min_size=1, max_size=3)):
        with make() as resumed:
            state = json.loads(states[events])
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            expected = rest_of_run(whole, events)
            again: list[str] = []
            assert run(resumed, len(expected), again) == expected
            assert [*map(place, again)] == [*map(place, states[events + 1 :])]


# --------------------------------------------------------------- shards that are gone


@pytest.fixture(params=list(LOADERS))
def loader(request: Any, cache: Any) -> Iterator[Callable[..., Loader]]:
    made: list[Loader] = []

    def make(**options: Any) -> Loader:
        options = {"batch_size": 5, "min_samples": 1, **options}
        made.append(LOADERS[request.param](cache.root, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ids(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch["id"]]


def first(loader: Loader, batches: int) -> tuple[list[int], dict[str, Any]]:
    """The first samples of the next epoch, and the state behind them; it goes no further."""
    found = ids(itertools.islice(loader, batches))
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    return found, state


def test_only_what_is_still_to_come_must_be_there(cache: Any, loader: Any) -> None:
    cache.add(*range(6))
    whole, _ = first(loader(shuffle=False), 100)
    delivered, state = first(loader(shuffle=False), 5)
    cache.retire(0, 1)  # all of both was delivered
    resumed = loader(shuffle=False)
    resumed.load_state_dict(state, missing="error")
    rest = iter(resumed)
    assert delivered + ids([next(rest)]) == whole[:30]
    leases = open_leases(cache.root)
    assert {lease.numbers for lease in leases} == {(2, 3, 4, 5)}
    assert len(leases) <= 2
    assert ids(rest) == whole[30:]


def test_a_shard_that_is_gone_is_an_error_where_it_must_not_be(cache: Any, loader: Any) -> None:
    cache.add(*range(6))
    _, state = first(loader(shuffle=False), 5)
    cache.retire(1, 3, 4)
    resumed = loader(shuffle=False)
    with pytest.raises(CacheError, match=r"2 of the 4 shards .* missing='substitute'"):
        resumed.load_state_dict(state, missing="error")
    with pytest.raises(ConfigError, match="missing must be one of refetch, substitute, error"):
        resumed.load_state_dict(state, missing="skip")


def test_a_shard_that_goes_before_it_is_leased_is_an_error(cache: Any, loader: Any) -> None:
    cache.add(*range(6))
    delivered, state = first(loader(drop_last=False), 2)
    resumed = loader(drop_last=False)
    resumed.load_state_dict(state, missing="error")
    cache.retire(1, 3, 4)
    for _ in range(2):  # it does not go on with the next epoch instead
        with pytest.raises(CacheError, match=r"\d of the 6 shards"):
            next(iter(resumed))
    resumed.load_state_dict(state, missing="substitute")
    there = {1000 * number + row for number in (0, 2, 5) for row in range(10)}
    assert sorted(ids(resumed)) == sorted(there - set(delivered))


def test_a_shard_that_retires_before_it_is_leased_is_wished_for(
    cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was live at the first look, and its lease would keep it from being deleted for ever."""
    cache.add(*range(3))
    with LOADERS["numpy"](cache.root, batch_size=5, min_samples=1) as one:
        next(iter(one))
        options, state = one.options, Position.from_dict(one.state_dict(), one.options)
    rest = remaining_pass(state, options)
    assert rest is not None
    made: list[Lease] = []

    class Late(Lease):
        @classmethod
        def create(cls, *arguments: Any, **keywords: Any) -> Lease:
            if not made:
                cache.retire(1)
            made.append(Lease.create(*arguments, **keywords))
            cache.poll()  # brings back what is wished for
            return made[-1]

    monkeypatch.setattr(resume_lease, "Lease", Late)
    stop = threading.Event()
    request = ResumeRequest(options, state.fingerprint, "refetch", stop, stop.is_set)
    found = resume_pass(request, rest)
    assert found is not None
    with found[0] as snapshot:
        assert {row.number for row in snapshot.shards} == {0, 1, 2}
    assert [set(lease.wishes) for lease in made] == [set(), {1}]
    assert made[0].closed


@pytest.mark.parametrize("missing", ["refetch", "error", "substitute"])
def test_what_is_on_its_way_out_is_there_while_another_holds_it(
    cache: Any, loader: Any, missing: Any
) -> None:
    """It is not drawn again, no reader waits, and it stays when the other has gone."""
    cache.add(*range(6))
    whole, _ = first(loader(shuffle=False), 100)
    other = loader(shuffle=False)
    batches = iter(other)
    delivered = ids([next(batches) for _ in range(2)])
    state = other.state_dict()
    cache.retire(1, 3, 4)
    resumed = loader(shuffle=False)
    resumed.load_state_dict(state, missing=missing)
    rest = iter(resumed)
    delivered += ids([next(rest)])
    batches.close()
    other.close()
    cache.poll()  # the evictor: shards without a lease go
    assert delivered + ids(rest) == whole


@pytest.mark.mutant(
    17,
    "growcache.loading.resume_lease:_leased_numbers",
    "lease.open and lease.settled",
    "lease.open",
)
def test_a_lease_proves_nothing_before_its_reader_has_looked_at_the_index_again(
    cache: Any, loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it may name shards that the evictor found without a lease."""
    cache.add(*range(6))
    _, state = first(loader(shuffle=False), 1)
    resumed, looked = loader(shuffle=False), []

    class Late(Lease):
        @classmethod
        def create(cls, *arguments: Any, **keywords: Any) -> Lease:
            cache.retire(3)  # its reader saw it live; the evictor reads the leases now
            return Lease.create(*arguments, **keywords)

    def looking(root: Path) -> Any:
        (lease,) = open_leases(root)
        assert 3 in lease.holding()
        with pytest.raises(CacheError, match=r"1 of the 6 shards"):
            resumed.load_state_dict(state, missing="error")
        looked.append(root)
        return live_digests(root)

    monkeypatch.setattr(snapshot, "Lease", Late)
    monkeypatch.setattr(snapshot, "live_digests", looking)
    Snapshot.take(cache.root).close()
    assert looked


def test_a_loader_that_resumes_relies_on_another_that_did(cache: Any, loader: Any) -> None:
    cache.add(*range(6))
    whole, _ = first(loader(shuffle=False), 100)
    delivered, state = first(loader(shuffle=False), 1)
    with Snapshot.take(cache.root):
        cache.retire(1, 3, 4)
        one = loader(shuffle=False)
        one.load_state_dict(state, missing="error")
        batches = iter(one)
        assert delivered + ids([next(batches)]) == whole[:10]
    cache.poll()
    other = loader(shuffle=False)
    other.load_state_dict(one.state_dict(), missing="error")
    rest = iter(other)
    delivered = whole[:10] + ids([next(rest)])
    batches.close()
    one.close()
    cache.poll()
    assert delivered + ids(rest) == whole


def test_others_stand_in_for_shards_that_are_gone(
    cache: Any, loader: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache.add(*range(6))
    whole, _ = first(loader(shuffle=False), 100)
    _, state = first(loader(shuffle=False), 5)
    cache.retire(2, 4)
    cache.add(6, samples=7)
    cache.add(7, samples=12)
    resumed = loader(shuffle=False, drop_last=False)
    with pytest.raises(ConfigError, match=r"drop_last \(saved True, here False\)"):
        resumed.load_state_dict(state)
    resumed = loader(shuffle=False)
    resumed.load_state_dict(state, missing="substitute")
    rest = ids(resumed)
    stand_ins = [7005, 7006, 7007, 7008, 7009, *whole[30:40], *range(6000, 6007)]
    assert rest == [*stand_ins, *whole[50:]][: len(rest)]
    assert len(rest) == 30
    assert "2 of the 4 shards" in caplog.text
    assert "2 others replace them" in caplog.text


def test_a_run_with_stand_ins_can_be_resumed_too(cache: Any, loader: Any) -> None:
    cache.add(*range(6))
    _, state = first(loader(), 3)
    cache.retire(*range(6))
    cache.add(*range(10, 16), samples=8)
    resumed = loader()
    resumed.load_state_dict(state, missing="substitute")
    batches = iter(resumed)
    ids([next(batches), next(batches)])
    state = resumed.state_dict()
    rest = ids(batches)
    again = loader()
    again.load_state_dict(state, missing="error")
    assert ids(again) == rest
    assert rest


def test_uses_are_counted_once(cache: Any, loader: Any) -> None:
    cache.add(*range(6))
    _, state = first(loader(shuffle=False, drop_last=False, batch_size=25), 1)
    cache.uses()
    resumed = loader(shuffle=False, drop_last=False, batch_size=25)
    resumed.load_state_dict(state)
    assert len(ids(resumed)) == 35
    resumed.close()
    uses = [list(lease.used()) for lease in read_leases(cache.root) if 0 not in lease.used()]
    assert uses.count([3, 4, 5]) == 1  # half of 2 was delivered, and counted, before


def test_a_shard_that_was_corrupt_stays_out_of_the_rest(cache: Any, loader: Any) -> None:
    cache.add(*range(4))
    cache.damage(2)
    seen = loader()
    whole = ids(seen)
    seen.close()
    _, state = first(loader(), 2)
    assert state["pass"]["corrupt"] == [2]
    cache.damage(2)  # flips the bit back; what the process knew of it went with its loaders
    resumed = loader()
    resumed.load_state_dict(state, missing="error")
    assert ids(resumed) == whole[10:]
    assert len(ids(resumed)) == 40


def test_bytes_that_one_digest_answers_for_are_compared(
    cache: Any, make_cache: Any, loader: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of another machine has other samples under the same numbers."""
    monkeypatch.setattr(plan, "WINDOW_BYTES", 500)
    monkeypatch.setattr(saved_pass, "NAMED_SHARDS", 1)
    there = make_cache("there", schema=cache.schema)
    cache.add(*range(12))
    there.add(*range(11))
    there.add(11, samples=9)
    options = {"shuffle": False, "drop_last": False}
    delivered, state = first(loader(**options), 1)
    assert state["pass"]["rest_digest"]
    other = type(loader())(there.root, batch_size=5, min_samples=1, **options)
    for missing in ("error", "refetch"):
        other.load_state_dict(state, missing=missing)
        with pytest.raises(CacheError, match=r"last \d shards of pass 0 have other bytes"):
            next(iter(other))
    other.load_state_dict(state, missing="substitute")
    assert len(delivered + ids(other)) == 119
    assert "have other bytes" in caplog.text
    other.close()


@pytest.mark.parametrize("named", [1, 256])
def test_another_machine_without_a_state_of_its_own_takes_the_counts(
    cache: Any, make_cache: Any, loader: Any, named: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shards stand in for those of the same numbers, which are others."""
    monkeypatch.setattr(plan, "WINDOW_BYTES", 500)
    monkeypatch.setattr(saved_pass, "NAMED_SHARDS", named)
    there = make_cache("there", schema=cache.schema)
    cache.add(*range(12))
    there.add(*range(2, 14), samples=11)
    options = {"drop_last": False}
    delivered, state = first(loader(**options), 2)
    other = type(loader())(there.root, batch_size=5, min_samples=1, **options)
    other.load_state_dict(state, missing="substitute")
    rest = ids(other)
    assert len(rest) == len(set(rest)) == 120 - len(delivered)
    assert {name // 1000 for name in rest} <= set(range(2, 14))
    assert other.state_dict()["global_step"] == 24
    other.close()


# ------------------------------------------------------------------ between epochs


def test_before_the_first_batch_there_is_nothing_but_arguments(
    tmp_path: Path, cache: Any, loader: Any
) -> None:
    state = loader(seed=3).state_dict()
    assert state["pass"] is None
    assert state["fingerprint"] is None
    cache.add(*range(4))
    resumed = loader(seed=3)
    resumed.load_state_dict(state, missing="error")
    assert ids(resumed) == ids(loader(seed=3))


def test_between_epochs_a_new_snapshot_follows_in_the_next_order(
    cache: Any, loader: Any
) -> None:
    cache.add(*range(4))
    through = loader()
    ids(through)
    state = through.state_dict()
    second = ids(through)
    resumed = loader()
    resumed.load_state_dict(state, missing="error")
    assert ids(resumed) == second
    cache.retire(0)
    cache.add(7, 8)
    resumed.load_state_dict(state, missing="error")
    assert {i // 1000 for i in ids(resumed)} == {1, 2, 3, 7, 8}


@pytest.mark.parametrize("length", [None, 40])
def test_a_loader_closed_behind_an_empty_rest_does_not_repeat_orders(
    cache: Any, loader: Any, length: int | None
) -> None:
    cache.add(*range(4))
    through = loader(samples_per_epoch=length)
    batches = len(list(through))
    second = ids(through)
    _, state = first(loader(samples_per_epoch=length), batches)
    resumed = loader(samples_per_epoch=length)
    resumed.load_state_dict(state)
    assert ids(resumed) == []
    resumed.close()
    assert ids(resumed) == second


@pytest.mark.parametrize("length", [None, 15])
def test_what_was_broken_off_is_gone_for_the_resumed_as_well(
    cache: Any, loader: Any, length: int | None
) -> None:
    cache.add(*range(4))
    through = loader(samples_per_epoch=length)
    next(iter(through))
    state = through.state_dict()  # in the middle of the epoch: its rest comes next
    delivered, third = ids(itertools.islice(through, 1)), ids(through)
    behind = through.state_dict()
    resumed = loader(samples_per_epoch=length)
    resumed.load_state_dict(state)
    assert [len(ids(resumed)), ids(resumed)[:5]] == [35 if length is None else 10, delivered]
    assert ids(resumed) == third
    # It delivered more batches.
    assert resumed.state_dict() | {"global_step": behind["global_step"]} == behind


def test_iterating_anew_before_the_first_batch_loses_nothing(cache: Any, loader: Any) -> None:
    cache.add(*range(4))
    whole = ids(loader())
    _, state = first(loader(), 3)
    resumed = loader()
    resumed.load_state_dict(state)
    iter(resumed)
    assert ids(resumed) == whole[15:]


def test_loading_ends_the_iteration_that_runs(cache: Any, loader: Any) -> None:
    cache.add(*range(4))
    one = loader()
    batches = iter(one)
    start = ids([next(batches)])
    state = one.state_dict()
    following = ids([next(batches)])
    one.load_state_dict(state)
    with pytest.raises(RuntimeError, match="closed, or a new iteration began"):
        list(batches)
    assert ids(one)[:5] == following != start


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "other",
    [
        {"batch_size": 6},
        {"seed": 1},
        {"shuffle": False},
        {"drop_last": False},
        {"samples_per_epoch": 10},
        {"fixed": True},
    ],
)
def test_other_arguments_are_named(cache: Any, loader: Any, other: dict[str, Any]) -> None:
    cache.add(*range(4))
    _, state = first(loader(), 1)
    ((name, value),) = other.items()
    with pytest.raises(ConfigError, match=rf"other arguments: {name} \(saved .*{value!r}\);"):
        loader(**other).load_state_dict(state)
    loader(fields=["id"], job="x", min_samples=3, verify="always").load_state_dict(state)


def test_another_cache_is_refused(cache: Any, loader: Any, make_cache: Any) -> None:
    cache.add(*range(4))
    _, state = first(loader(), 1)
    state["fingerprint"] = "0" * 32
    with pytest.raises(ConfigError, match=f"fingerprint {'0' * 32}, but .* has {'f' * 32}"):
        loader().load_state_dict(state)


def change(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state["pass"].update(values)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.clear(),
        lambda state: state.update(version=99),
        lambda state: state.pop("options"),
        lambda state: state.update(epoch="x"),
        lambda state: state.update(form=[]),
        change(digests="0"),
        change(digests="AAAA"),
        change(samples="1eJwDAAAAAAE="),
        change(samples="3AAAA"),
        change(order="1eJwDAAAAAAE="),
        change(position=41),
        change(gaps=None),
    ],
)
def test_what_is_no_state_is_refused(cache: Any, loader: Any, damage: Any) -> None:
    cache.add(*range(4))
    _, state = first(loader(), 1)
    damage(state)
    with pytest.raises(ConfigError, match=r"expected what state_dict|is damaged"):
        loader().load_state_dict(state)
    with pytest.raises(ConfigError, match="found 'state'"):
        loader().load_state_dict("state")


# ----------------------------------------------------------------------- the value


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_behind_the_last_step_of_all_ranks_nothing_is_left(ranks: int) -> None:
    here = Ranks(1, ranks, 1, ranks) if ranks > 1 else Ranks()
    options = LoaderOptions("cache", batch_size=64, ranks=here)
    step = 64 * ranks
    plan_of_pass = PassPlan(0, (PlannedShard(0, 10 * step - 1, "0" * 32),), 10 * step)
    states = [
        Position(mark=PassPosition(0, steps * step), plan=plan_of_pass) for steps in (8, 9)
    ]
    last, over = (remaining_pass(state, options) for state in states)
    assert last is not None
    assert over is None
    kept = remaining_pass(states[1], replace(options, drop_last=False))
    assert kept is not None


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=30)


@settings(deadline=None)
@given(sizes=sizes, seed=st.integers(0, 5), share=st.floats(0, 1), window=st.integers(1, 60))
def test_what_is_needed_is_what_still_comes(
    sizes: list[int], seed: int, share: float, window: int
) -> None:
    options = LoaderOptions("cache", batch_size=1, seed=seed)
    shards = tuple(PlannedShard(n, size, f"{n:032x}") for n, size in enumerate(sizes))
    whole = PassPlan(0, shards, window)
    position = round(share * len(whole))
    rows = [
        (w.numbers[place], row)
        for w in whole.windows(options)
        for place, row in zip(
            *(a.tolist() for a in plan.locate_samples(w.order(), w.starts())), strict=True
        )
    ]
    rest = RemainingPass(whole, whole.windows(options), PassPosition(0, position))
    before, after = {n for n, _ in rows[:position]}, {n for n, _ in rows[position:]}
    assert rest.needed() == after
    assert rest.started_shards() == before & after
    filled = replace(rest, whole_window=True)
    if rest.first is not None:
        around = set(rest.windows[rest.first].numbers)
        assert filled.needed() == after | around
        assert filled.started_shards() == before & around


@settings(deadline=None)
@given(
    sizes=sizes,
    others=st.lists(st.integers(1, 9), max_size=20),
    gone=st.sets(st.integers(0, 29)),
)
def test_stand_ins_hold_as_many_samples_where_they_can(
    sizes: list[int], others: list[int], gone: set[int]
) -> None:
    shards = tuple(PlannedShard(n, size, "a" * 32) for n, size in enumerate(sizes))
    there = [PlannedShard(100 + n, size, "b" * 32) for n, size in enumerate(others)]
    before = PassPlan(0, shards, 10)
    after = with_substitutes(before, {}, there, gone)
    assert [s.samples for s in after.shards] == sizes
    changed = [
        (old.number, new.number)
        for old, new in zip(before.shards, after.shards, strict=True)
        if old != new
    ]
    wanted = gone & set(range(len(sizes)))
    assert {old for old, _ in changed} <= wanted
    assert len({new for _, new in changed}) == len(changed) == min(len(wanted), len(others))
    enough = sorted(others, reverse=True)
    needed = sorted((sizes[n] for n in wanted), reverse=True)
    if all(have >= want for have, want in zip(enough, needed, strict=False)):
        by_number = dict(zip(range(100, 100 + len(others)), others, strict=True))
        replaced = sorted((sizes[old] for old, _ in changed), reverse=True)
        assert all(by_number[new] >= sizes[old] for old, new in changed)
        assert replaced == needed[: len(others)]


# ------------------------------------------------------------------------ snapshots


def test_a_snapshot_can_be_taken_again_by_its_list(cache: Any) -> None:
    cache.add(*range(4))
    with Snapshot.take(cache.root) as one:
        cache.add(5)
        listed = {row.number: row.digest for row in one.shards if row.number != 2}
        with Snapshot.take(cache.root, only=listed) as same:
            assert [row.number for row in same.shards] == [0, 1, 3]
            assert same.lease.numbers == (0, 1, 3)
    with pytest.raises(CacheError, match="1 of 3 requested shards are no longer in"):
        Snapshot.take(cache.root, only={**listed, 3: "0" * 32})
    cache.retire(0)
    with pytest.raises(CacheError, match="1 of 3 requested shards"):
        Snapshot.take(cache.root, only=listed)
    assert not any(lease.open for lease in read_leases(cache.root))


def test_a_snapshot_travels_as_what_to_take(cache: Any) -> None:
    cache.add(*range(4))
    with Snapshot.take(cache.root, job="mine") as one:
        data = pickle.dumps(one)
        cache.add(5)
        with pickle.loads(data) as other:
            assert other.shards == one.shards
            assert int(other[13]["id"]) == 1003
            assert [lease.job for lease in read_leases(cache.root)] == ["mine", "mine"]
    with pytest.raises(TypeError, match="closed snapshot"):
        pickle.dumps(one)
    cache.retire(1)
    with pytest.raises(CacheError, match="1 of 4 requested shards"):
        pickle.loads(data)
