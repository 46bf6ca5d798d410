"""What all loaders share: fields, tuples, functions of a batch, errors in them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from growcache.errors import ConfigError
from growcache.loading.blocks import BLOCK_BATCHES
from growcache.loading.loader import Loader
from tests.loading.loaders import LOADERS, as_numpy


@pytest.fixture(params=list(LOADERS))
def loader(request: Any, cache: Any) -> Iterator[Callable[..., Loader]]:
    made: list[Loader] = []

    def make(**options: Any) -> Loader:
        options = {"batch_size": 8, "min_samples": 1, **options}
        made.append(LOADERS[request.param](cache.root, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_only_the_wanted_fields_come(cache: Any, loader: Any) -> None:
    cache.add(0, 1)
    for batch in loader(fields=["x"]):
        assert list(batch) == ["x"]
        assert as_numpy(batch["x"]).shape == (8, 4)
    (first, *_) = loader(fields=("x", "id"), as_tuple=("id",))
    assert len(first) == 1


def test_a_transform_gets_the_wanted_fields_alone(cache: Any, loader: Any) -> None:
    cache.add(0)
    found: list[set[str]] = []

    def look(sample: dict[str, Any]) -> dict[str, Any]:
        found.append(set(sample))
        return {"new": sample["id"]}

    (batch,) = loader(fields=["id"], transform=look)
    assert list(batch) == ["new"]
    assert all(names == {"id"} for names in found)


def test_an_unknown_field_is_refused_with_the_nearest(cache: Any, loader: Any) -> None:
    cache.add(0)
    with pytest.raises(ConfigError, match=r"fields: no field 'idx'.*did you mean 'id'"):
        next(iter(loader(fields=["idx"])))
    with pytest.raises(ConfigError, match="as_tuple: no field 'y'; there are id, x"):
        next(iter(loader(as_tuple=["y"])))
    with pytest.raises(ConfigError, match="sequence of names"):
        loader(fields="x")
    with pytest.raises(ConfigError, match="sequence of names"):
        loader(fields=[])


def test_a_function_of_the_batch_runs_beside_the_loop(cache: Any, loader: Any) -> None:
    cache.add(*range(4))
    threads = set()

    def double(batch: dict[str, Any]) -> dict[str, Any]:
        threads.add(threading.current_thread())
        assert list(batch) == ["id", "x"]
        return {**batch, "twice": batch["x"] * 2}

    seen = []
    for ids, twice in loader(batch_transform=double, as_tuple=("id", "twice")):
        assert type(ids) is type(twice)
        np.testing.assert_array_equal(as_numpy(twice)[:, 1], 2 * as_numpy(ids))
        seen += as_numpy(ids).tolist()
    assert len(set(seen)) == 40
    assert threading.main_thread() not in threads


def test_the_loop_does_not_wait_for_the_function(cache: Any, loader: Any) -> None:
    cache.add(*range(4))

    made = threading.Semaphore(0)

    def noted(batch: dict[str, Any]) -> dict[str, Any]:
        made.release()
        return batch

    batches = iter(loader(batch_transform=noted, samples_per_epoch=40))
    next(batches)
    assert made.acquire(timeout=300)
    for _ in range(4):
        # The next one is made while the loop does something else.
        assert made.acquire(timeout=300)
        next(batches)


@pytest.mark.parametrize("gather", ["thread", "process"])
def test_closing_does_not_wait_for_the_function_on_all_of_a_block(
    cache: Any, loader: Any, gather: str
) -> None:
    cache.add(0, samples=3 * BLOCK_BATCHES)
    calls, started = list[int](), threading.Event()

    def slow(batch: dict[str, Any]) -> dict[str, Any]:
        calls.append(1)
        if len(calls) > BLOCK_BATCHES:  # ahead of the loop, which has the first block
            started.set()
            time.sleep(0.02)
        return batch

    made = loader(batch_size=1, batch_transform=slow, gather=gather)
    next(iter(made))
    assert started.wait(300)
    made.close()
    assert len(calls) < 1.5 * BLOCK_BATCHES


def test_a_function_may_return_anything_but_for_tuples(cache: Any, loader: Any) -> None:
    cache.add(0)
    assert list(loader(batch_transform=lambda batch: len(batch["id"]))) == [8]
    with pytest.raises(ConfigError, match="batch_transform returned int"):
        list(loader(batch_transform=lambda batch: 8, as_tuple=("id",)))
    with pytest.raises(ConfigError, match="a function of a batch"):
        loader(batch_transform=3)


def broken(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"] / batch["nothing"]}


@pytest.mark.parametrize("argument", ["transform", "batch_transform"])
def test_an_error_names_the_function_and_the_line(
    cache: Any, loader: Any, argument: str
) -> None:
    cache.add(0)
    line = broken.__code__.co_firstlineno + 1
    for _ in range(2):
        with pytest.raises(KeyError, match="nothing") as caught:
            next(iter(loader(**{argument: broken})))
        (note,) = caught.value.__notes__
        assert note.startswith(f"in {argument} broken ({__file__}:{line})")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batch_size": 8.0}, "batch_size must be a whole number above 0, found 8.0"),
        ({"batch_size": True}, "batch_size must be a whole number above 0, found True"),
        ({"samples_per_epoch": "all"}, "samples_per_epoch must be a whole number above 0"),
        ({"seed": None}, "seed must be a whole number, found None"),
        ({"shuffle": "no"}, "shuffle must be True or False, found 'no'"),
        ({"fixed": 1}, "fixed must be True or False, found 1"),
        ({"job": ""}, "job must be a name, found ''"),
        ({"transform": "package.module:f"}, "transform must be a function, found"),
        ({"gather": "proc"}, "gather must be one of thread, process, auto"),
        ({"verify": "never"}, "verify must be 'first' or 'always'"),
        ({"ragged": "padd"}, "ragged must be one of offsets, pad, list"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused_at_once(
    loader: Any, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        loader(**wrong)


def test_what_cannot_become_a_cache_is_not_waited_for(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    for kind in LOADERS.values():
        with pytest.raises(
            ConfigError, match="found 's3://bucket/train'; the config says where"
        ):
            kind("s3://bucket/train", batch_size=8)
        with pytest.raises(ConfigError, match="found a file"):
            kind(tmp_path / "file", batch_size=8)
        with pytest.raises(ConfigError, match="too long for this system"):
            kind(tmp_path / ("x" * 300), batch_size=8)


def test_numbers_of_numpy_are_numbers(cache: Any, loader: Any) -> None:
    """A state is kept as JSON, which knows Python's alone."""
    cache.add(0, 1)
    one = loader(batch_size=np.int64(8), seed=np.uint8(3), shuffle=np.bool_(True))
    next(iter(one))
    json.dumps(one.state_dict())
    assert repr(one).endswith("cache', batch_size=8)")
