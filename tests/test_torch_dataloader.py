"""`EpochDataLoader`: a DataLoader as trainers know them, over the same epochs."""

from __future__ import annotations

import gc
import inspect
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from growcache.errors import ConfigError  # noqa: E402
from growcache.loading.options import Ranks, rank_share  # noqa: E402
from growcache.torch import EpochDataLoader, EpochLoader  # noqa: E402
from tests.filled import Filled  # noqa: E402
from tests.loading.conftest import full_of  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    with Filled(tmp_path_factory.mktemp("data") / "cache", full_of((4,))) as filled:
        filled.add(*range(10))
        filled.complete()
        yield filled


@pytest.fixture
def loader(cache: Filled) -> Iterator[Callable[..., EpochDataLoader]]:
    made: list[EpochDataLoader] = []

    def make(**options: Any) -> EpochDataLoader:
        if "fixed" not in options:
            options = {"samples_per_epoch": 24, **options}
        options = {"batch_size": 8, "min_samples": 1, **options}
        made.append(EpochDataLoader(cache.root, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def remade(loader: Any, **other: Any) -> DataLoader[Any]:
    """What a trainer makes of the attributes of a loader."""
    options = {"batch_size": loader.batch_size, "drop_last": loader.drop_last, **other}
    return DataLoader(loader.dataset, collate_fn=loader.collate_fn, **options)


def test_it_is_a_dataloader_and_delivers_what_the_epoch_loader_does(
    cache: Filled, loader: Any
) -> None:
    train = loader(seed=3)
    for one, kind in ((train, DataLoader), (train.dataset, IterableDataset)):
        assert isinstance(one, kind)
    assert (len(train), len(train.dataset), train.batch_size) == (3, 24, 8)
    assert (train.drop_last, train.num_workers, train.pin_memory) == (True, 0, False)
    assert train.batch_sampler.batch_size == 8
    with EpochLoader(
        cache.root, batch_size=8, min_samples=1, samples_per_epoch=24, seed=3
    ) as same:
        for _ in range(3):
            assert ids(train) == ids(same)
    assert train.report.samples == 24


def test_it_needs_a_length(cache: Filled) -> None:
    with pytest.raises(ConfigError, match="needs samples_per_epoch, or fixed=True"):
        EpochDataLoader(cache.root, batch_size=8)


def test_it_takes_the_arguments_of_the_epoch_loader() -> None:
    mine = inspect.signature(EpochDataLoader).parameters
    theirs = inspect.signature(EpochLoader).parameters
    assert list(mine)[: len(theirs)] == list(theirs)
    assert list(mine)[len(theirs) :] == ["dataset", "sampler", "batch_sampler"]


@pytest.mark.parametrize("samples", [24, 29])
def test_a_trainer_may_make_it_anew(loader: Any, samples: int) -> None:
    train = loader(samples_per_epoch=samples, drop_last=False, seed=1)
    expected = ids(train)
    with loader(samples_per_epoch=samples, drop_last=False, seed=1) as other:
        again = remade(other)
        assert len(again) == len(train) == len(expected)
        assert ids(again) == expected
    # As Lightning does to predict: from the attributes, over the same epochs.
    found = {"dataset": train.dataset, "sampler": None, "batch_sampler": None}
    anew = type(train)(train.path, batch_size=8, **found)
    assert anew.loader is train.loader
    assert len(list(anew)) == len(train)
    assert train.report.samples == samples


def test_the_dataset_is_the_samples_of_an_epoch(loader: Any) -> None:
    train = loader(samples_per_epoch=29, drop_last=False)
    rows = list(train.dataset)
    assert len(rows) == len(train.dataset) == 29
    assert len({int(row.batch["id"][row.row]) for row in rows}) == 29


def test_the_rows_of_the_rest_of_an_epoch(loader: Any) -> None:
    """Of one that is gone on with, its last batch smaller, and of one behind a broken one."""
    options = {"samples_per_epoch": 29, "drop_last": False}
    one, other = loader(**options), loader(**options)
    batches = iter(one)
    next(batches)
    other.load_state_dict(one.state_dict())
    rest = list(other.dataset)
    assert len(rest) == 21
    assert [int(row.batch["id"][row.row]) for row in rest] == list(chain(*ids(batches)))
    next(iter(other.dataset))
    assert len(list(other.dataset)) == 29


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_batches_that_are_not_its_own_are_refused(loader: Any) -> None:
    with pytest.raises(ConfigError, match="needs its batch_size and drop_last"):
        next(iter(remade(loader(), batch_size=12)))
    with pytest.raises(ConfigError, match="expected num_workers=0"):
        next(iter(remade(loader(), num_workers=1)))
    gc.collect()  # torch waits there for its worker, in whatever thread collects


def test_a_fixed_set_has_its_length(loader: Any) -> None:
    validation = loader(fixed=True)
    assert (len(validation), len(validation.dataset), validation.drop_last) == (13, 100, False)
    first, second = ids(validation), ids(remade(validation))
    assert first == second
    assert [len(batch) for batch in first] == [8] * 12 + [4]


@pytest.mark.parametrize("steps", [2, 3])
def test_it_goes_on_where_another_stood(loader: Any, steps: int) -> None:
    """Behind the last batch of an epoch the next one begins: a trainer calls it done."""
    one = loader()
    batches = iter(one)
    for _ in range(steps):
        next(batches)
    state = one.state_dict()
    expected = ids(batches) or ids(one)
    other = loader()
    other.load_state_dict(state)
    assert ids(other) == expected
    assert len(ids(other)) == 3


def test_a_fixed_set_goes_on_with_the_next_pass(loader: Any) -> None:
    one, other = loader(fixed=True), loader(fixed=True)
    batches = iter(one)
    for _ in range(13):
        next(batches)
    other.load_state_dict(one.state_dict())
    assert ids(other) == ids(one)


def test_an_epoch_ends_with_its_last_batch(loader: Any) -> None:
    """A trainer that counts does not ask for another one."""
    train = loader()
    for epoch in range(3):
        batches = iter(train)
        for _ in range(3):
            next(batches)
        assert train.report.samples == 24
        assert (train.state_dict()["epoch"], train.state_dict()["step"]) == (epoch + 1, 0)
        assert next(batches, None) is None


@pytest.mark.parametrize("kind", [EpochLoader, EpochDataLoader])
def test_an_older_iterator_does_not_move_the_loader(cache: Filled, kind: Any) -> None:
    options = {"batch_size": 4, "min_samples": 1, "samples_per_epoch": 40}
    with kind(cache.root, **options) as train:
        old = iter(train)
        next(old)
        new = iter(train)
        next(new)
        stands = train.state_dict()
        with pytest.raises(RuntimeError, match="a new iteration began"):
            next(old)
        assert train.state_dict() == stands
        assert len(list(new)) == 9


def test_it_pickles_as_its_arguments(loader: Any) -> None:
    train = loader(seed=5, as_tuple=("id",), device="cpu")
    expected = [batch.tolist() for (batch,) in train]
    with pickle.loads(pickle.dumps(train)) as again:
        assert (type(again), again.batch_size, len(again)) == (EpochDataLoader, 8, 3)
        assert [batch.tolist() for (batch,) in again] == expected


# Ranks


@pytest.mark.parametrize("samples", [1, 8, 29, 64])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("keeps_last", [True, False])
def test_what_a_rank_delivers_is_counted(samples: int, world: int, keeps_last: bool) -> None:
    for rank in range(world):
        share = rank_share(samples, 4, Ranks(rank, world, rank, world), keeps_last=keeps_last)
        mine = sum(stop - start for start, stop in share.mine(0, share.rows))
        assert share.delivered == mine + share.padding
        assert -(-share.delivered // 4) == share.steps


def test_ranks_that_were_not_known_yet_are_asked_for_again(
    loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers start the processes of a job after the loader was made."""
    early, peeked, told = loader(), loader(), loader(rank=0, world_size=1)
    next(iter(peeked))
    assert [len(one) for one in (early, peeked, told)] == [3, 3, 3]
    state = peeked.state_dict()
    early.load_state_dict(state)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert [len(one) for one in (peeked, told)] == [1, 3]
    assert len(ids(told)) == 3


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_a_fixed_set_goes_on_with_other_ranks(
    cache: Filled, loader: Any, first: int, second: int
) -> None:
    """The rest has another number of steps, and its last one is known as such."""
    ranks = [loader(fixed=True, rank=rank, world_size=first) for rank in range(first)]
    with ThreadPoolExecutor(first) as pool:  # they wait for one another
        begun = [iter(one) for one in ranks]
        for _ in range(3):
            list(pool.map(next, begun))
    left = 100 - 3 * 8 * first
    for rank in range(second):
        other = loader(fixed=True, rank=rank, world_size=second)
        other.load_state_dict(ranks[0].state_dict())
        rows = [int(row.batch["id"][row.row]) for row in other.dataset]
        assert len(rows) == -(-left // second)
        other.load_state_dict(ranks[0].state_dict())
        batches = iter(other)
        found = list(islice(batches, -(-left // (8 * second))))
        assert other.state_dict()["epoch"] == 1  # while the last one is trained on
        assert list(chain(*ids(found))) == rows
        assert next(batches, None) is None


def test_a_state_is_kept_where_the_ranks_turn_out_to_be_one(
    cache: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch_size": 8, "min_samples": 1, "samples_per_epoch": 24}
    with EpochLoader(cache.root, **options) as one, EpochLoader(cache.root, **options) as other:
        batches = iter(one)
        next(batches)
        other.load_state_dict(one.state_dict())
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert ids(other) == ids(batches)
