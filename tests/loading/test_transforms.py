"""A transform sees each row once, with a generator that depends on where it stands."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from growcache.errors import ConfigError, FormatError
from growcache.loading.transform import BlockTransform, function_arguments
from growcache.schema import Origin, Sample, Schema

ROWS = 40
ARRAYS = {"x": np.arange(ROWS * 3, dtype="<f4").reshape(ROWS, 3), "y": np.arange(ROWS)}
PLACES = [(2, 100 + i) for i in range(ROWS)]


@pytest.fixture
def run() -> Iterator[Any]:
    made: list[BlockTransform] = []

    def call(function: Any, seed: int = 0, origins: list[Origin] | None = None) -> Sample:
        made.append(
            BlockTransform(
                function, seed, ROWS, Schema.from_sample({k: v[0] for k, v in ARRAYS.items()})
            )
        )
        return made[-1].run({k: v.copy() for k, v in ARRAYS.items()}, PLACES, origins)

    yield call
    for transform in made:
        transform.close()


def test_every_row_is_transformed_in_its_place(run: Any) -> None:
    found = run(lambda s: {"x": s["x"].sum(dtype="<f4"), "twice": s["y"] * 2})
    np.testing.assert_allclose(found["x"], ARRAYS["x"].sum(1))
    np.testing.assert_array_equal(found["twice"], ARRAYS["y"] * 2)


def test_samples_may_be_changed_in_place(run: Any) -> None:
    def negate(sample: Sample) -> Sample:
        sample["x"] *= -1
        return sample

    np.testing.assert_array_equal(run(negate)["x"], -ARRAYS["x"])


def noisy(sample: Sample, rng: np.random.Generator) -> Sample:
    return {"x": rng.random(4)}


def test_noise_depends_on_seed_and_place_alone(run: Any) -> None:
    first, again, other = run(noisy), run(noisy), run(noisy, seed=1)
    np.testing.assert_array_equal(first["x"], again["x"])
    assert not np.any(first["x"] == other["x"])
    assert len(np.unique(first["x"][:, 0])) == ROWS


def test_origins_go_by_name(run: Any) -> None:
    origins = [Origin(f"k{i}", None, i, i + 1) for i in range(ROWS)]

    def label(sample: Sample, *, origin: Origin) -> Sample:
        return {"start": np.array(origin.start + int(origin.key[1:]))}

    np.testing.assert_array_equal(run(label, origins=origins)["start"], 2 * np.arange(ROWS))


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (lambda anything: anything, set()),
        (lambda sample, origin: sample, {"origin"}),
        (lambda sample, rng=None, scale=2: sample, {"rng"}),
        (lambda sample, **keywords: sample, {"rng", "origin"}),
    ],
)
def test_arguments_that_are_given(function: Any, takes: set[str]) -> None:
    assert function_arguments(function) == takes


@pytest.mark.parametrize("function", [lambda: 1, lambda sample, labels: sample])
def test_arguments_that_nobody_can_give(function: Any) -> None:
    with pytest.raises(ConfigError, match="rng and origin"):
        function_arguments(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda s: {"x": s["x"][: 1 + int(s["y"] == 7)]},
        lambda s: {"x": s["x"].astype("f8" if s["y"] == 7 else "f4")},
        lambda s: {"z" if s["y"] == 7 else "x": s["x"]},
    ],
    ids=["shape", "dtype", "names"],
)
def test_results_that_make_no_batch_are_refused(run: Any, function: Any) -> None:
    with pytest.raises(FormatError, match="transform returned"):
        run(function)


@pytest.mark.parametrize("result", [None, {}, 3])
def test_results_that_are_no_sample_are_refused(run: Any, result: Any) -> None:
    with pytest.raises(FormatError, match=f"transform must return .* found {result}"):
        run(lambda s: result)


def test_errors_of_the_user_reach_the_user(run: Any) -> None:
    def bad(sample: Sample) -> Sample:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(bad)
