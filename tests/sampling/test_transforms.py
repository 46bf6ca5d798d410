"""The user's transform: found, called by name, repeatable, and blamed with file and line."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from growcache.errors import ConfigError, FormatError
from growcache.sampling.transforms import Transform, load_transform
from growcache.schema import Origin

ORIGIN = Origin("a/b.npy", None, 0, 1)
SAMPLE = {"x": np.arange(4, dtype=np.float32)}
WHERE = (0, "a/b.npy", 0, 0)

MODULE = """
import random
import numpy as np

def noise(sample, rng):
    return {"x": sample["x"] + rng.normal(size=4).astype("f4"), "y": np.int64(random.randrange(99))}

def careless(sample):
    sample["x"][:] = 0
    return sample

def fails(sample, origin):
    raise KeyError("no such channel")

def nonsense(sample):
    return 7

def wants(sample, other):
    return sample

class Scale:
    def __init__(self, by):
        self.by = by
    def __call__(self, sample):
        return {"x": sample["x"] * self.by}

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "user_transforms.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "user_transforms"
    sys.modules.pop("user_transforms", None)


def load(name: str, seed: int = 0, **options: object) -> Transform:
    found = load_transform(name, options, seed)
    assert found is not None
    return found


def test_no_name_is_no_transform() -> None:
    assert load_transform(None, {}, 0) is None


def test_randomness_depends_on_the_place_alone(module: str) -> None:
    noise = load(f"{module}:noise")
    first, again = noise(SAMPLE, ORIGIN, WHERE), noise(SAMPLE, ORIGIN, WHERE)
    random.seed(1)
    other = noise(SAMPLE, ORIGIN, (0, "a/b.npy", 0, 1))
    assert np.array_equal(first["x"], again["x"])
    assert first["y"] == again["y"]
    assert not np.array_equal(first["x"], other["x"])
    assert not np.array_equal(
        first["x"], load(f"{module}:noise", 1)(SAMPLE, ORIGIN, WHERE)["x"]
    )


def test_the_transform_may_write_on_what_it_is_given(module: str) -> None:
    load(f"{module}:careless")(SAMPLE, ORIGIN, WHERE)
    assert SAMPLE["x"].tolist() == [0, 1, 2, 3]


def test_a_class_is_made_once_with_the_options(module: str) -> None:
    assert load(f"{module}:Scale", by=3)(SAMPLE, ORIGIN, WHERE)["x"].tolist() == [0, 3, 6, 9]


def test_an_exception_names_object_file_and_line(module: str) -> None:
    line = MODULE.splitlines().index('    raise KeyError("no such channel")') + 1
    with pytest.raises(FormatError, match=rf"user_transforms.py:{line} on a/b.npy"):
        load(f"{module}:fails")(SAMPLE, ORIGIN, WHERE)


def test_nonsense_is_refused(module: str) -> None:
    with pytest.raises(FormatError, match="must return a dict"):
        load(f"{module}:nonsense")(SAMPLE, ORIGIN, WHERE)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("user_transforms", {}, "package.module:function"),
        ("no_such_module:f", {}, "cannot load"),
        ("user_transforms:absent", {}, "cannot load"),
        ("user_transforms:number", {}, "not callable"),
        ("user_transforms:wants", {}, "must take sample"),
        ("user_transforms:noise", {"a": 1}, "takes no options"),
        ("user_transforms:Scale", {"by": 1, "up": 2}, "do not fit"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    module: str, name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_transform(name, options, 0)


def test_the_digest_follows_the_source(module: str, tmp_path: Path) -> None:
    before = load(f"{module}:noise").digest
    sys.modules.pop(module)
    path = tmp_path / "user_transforms.py"
    path.write_text(MODULE + "\n# changed\n")
    assert load(f"{module}:noise").digest != before
