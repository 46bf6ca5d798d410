"""The user's own formats and transforms in a running service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.cache.index.reader import read_index
from tests.sampling.services import (
    digests,
    make_source,
    run,
    service,
    status,
    wait_until,
    write_config,
)

MODULE = """
import os
import time
from pathlib import Path

import numpy as np

def rows(object, rng, most=100):
    with object.open() as file:
        values = np.load(file)
    if values[0, 0] == 7:
        raise ValueError("a bad one")
    for row in rng.permutation(values)[:most]:
        yield {"x": row}

def draw(store, rng):
    with store.open(f"{rng.integers(20):05d}.npy") as file:
        values = np.load(file)
    return {"x": values[rng.integers(len(values))], "u": rng.random()}

def odd(sample, rng, origin):
    return sample if int(sample["x"][0, 0]) % 2 else None

def other(sample, origin):
    return {"x": sample["x"], "y": 1} if origin.key.endswith("7.npy") else sample

def holds(sample):
    Path(os.environ["REACHED"]).touch()
    time.sleep(60)

def forgets(sample):
    sample["x"] += 1
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_source(tmp_path_factory.mktemp("remote") / "objects", count=20, shape=(6, 8))


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_service_code.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path.cwd())]))


def config(path: Path, url: str, form: str = "npy", **sections: Any) -> Path:
    source = {"format": form, "options": sections.pop("options", {})}
    return write_config(path, url, source={"url": url, **source}, **sections)


def test_a_format_of_the_users_own_is_cached_whole_but_for_its_holes(
    tmp_path: Path, url: str
) -> None:
    made = config(
        tmp_path / "c.yaml", url, "user_service_code:rows", sampling={"max_skipped": 0.5}
    )
    assert run(made, "--until-full") == (0, "")
    found = status(tmp_path / "c")
    assert (found.population, found.samples, found.holes) == (20, 19 * 6, 1)
    assert (found.complete, found.coverage) == (True, 1.0)
    reasons = [path.read_text() for path in (tmp_path / "c/shards").glob("*.json")]
    words = "user_service_code:rows raised ValueError: a bad one at user_service_code.py:12 on"
    assert sum(words in text for text in reasons) == 1


@pytest.mark.slow
def test_other_options_or_another_source_are_another_cache(tmp_path: Path, url: str) -> None:
    name = "user_service_code:rows"
    sampling = {"max_skipped": 0.5}
    made = config(tmp_path / "c.yaml", url, name, sampling=sampling)
    assert run(made, "--until-full") == (0, "")
    code, errors = run(
        config(tmp_path / "c.yaml", url, name, sampling=sampling, options={"most": 2})
    )
    assert (code, "source.options ({}" in errors) == (2, True)
    made = config(tmp_path / "c.yaml", url, name, sampling=sampling)
    (tmp_path / "user_service_code.py").write_text(MODULE + "# a comment\n")
    assert run(made, "--until-full") == (0, "")
    (tmp_path / "user_service_code.py").write_text(MODULE + "changed = True\n")
    code, errors = run(made)
    assert (code, "the format's source" in errors) == (2, True)


@pytest.mark.slow
def test_samples_that_the_user_draws_have_no_known_number(tmp_path: Path, url: str) -> None:
    folder = url.removesuffix("*.npy")
    for workers in (1, 3):
        made = config(
            tmp_path / f"c{workers}.yaml",
            folder,
            "user_service_code:draw",
            sampling={"workers": workers},
        )
        assert run(made, "--samples", "200") == (0, "")
    found = status(tmp_path / "c1")
    assert found.samples >= 200
    assert (found.population, found.population_samples, found.coverage) == (None, None, None)
    assert (found.complete, found.holes, found.listing_complete) == (False, 0, True)
    assert (found.endless, found.objects) == (True, 0)
    one, three = digests(tmp_path / "c1"), digests(tmp_path / "c3")
    common = one.keys() & three.keys()
    assert len(common) > 10
    assert all(one[name] == three[name] for name in common)
    view = read_index(tmp_path / "c1")
    assert view.schema is not None
    assert str(view.schema) == "u: float64[], x: float32[8]"


def test_a_fixed_set_of_the_users_draws_is_complete(tmp_path: Path, url: str) -> None:
    made = config(
        tmp_path / "c.yaml",
        url.removesuffix("*.npy"),
        "user_service_code:draw",
        cache={"max_samples": 50, "eviction": "none"},
    )
    assert run(made, "--until-full") == (0, "")
    found = status(tmp_path / "c")
    assert (found.samples, found.complete) == (50, True)


def test_a_transform_may_pass_over_samples(tmp_path: Path, url: str) -> None:
    made = config(tmp_path / "c.yaml", url, sampling={"transform": "user_service_code:odd"})
    assert run(made, "--until-full") == (0, "")
    found = status(tmp_path / "c")
    assert (found.population, found.samples, found.holes) == (20, 10, 0)
    assert (found.complete, found.coverage) == (True, 1.0)


def test_another_schema_is_a_hole_that_names_object_and_function(
    tmp_path: Path, url: str
) -> None:
    made = config(
        tmp_path / "c.yaml",
        url,
        sampling={"transform": "user_service_code:other", "max_skipped": 0},
    )
    code, errors = run(made, "--until-full")
    assert code == 1
    assert "user_service_code:other on " in errors
    assert (
        "7.npy: expected a sample with x: float32[6, 8], found x: float32[6, 8], y:" in errors
    )
    assert len(errors.strip().splitlines()) <= 2


@pytest.mark.parametrize(
    ("form", "sampling", "code", "words"),
    [
        ("user_service_code:draw", {"weight_by": "objects"}, 2, "weight_by: objects needs"),
        ("user_service_code:rwos", {}, 2, "did you mean rows?"),
        ("user_service_cod:rows", {}, 2, "No module named 'user_service_cod'"),
        ("npy", {"transform": "user_service_code:forgets"}, 1, "returned None"),
        ("user_service_code:odd", {}, 2, "source.format: user_service_code:odd may take"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, url: str, form: str, sampling: dict[str, Any], code: int, words: str
) -> None:
    made = config(tmp_path / "c.yaml", url, form, sampling=sampling)
    ended, errors = run(made)
    assert (ended, words in errors) == (code, True), errors
    assert len(errors.strip().splitlines()) <= 2


def test_what_draws_itself_needs_no_objects_under_its_url(tmp_path: Path) -> None:
    (tmp_path / "pure.py").write_text(
        "def sample(store, rng):\n    return {'x': rng.random(3)}\n"
    )
    made = config(tmp_path / "c.yaml", f"{tmp_path}/nothing/", "pure:sample")
    assert run(made, "--samples", "20") == (0, "")
    assert status(tmp_path / "c").samples >= 20
    assert np.isfinite(status(tmp_path / "c").reuse)


def test_what_was_read_before_the_end_is_told(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = tmp_path / "reached"
    monkeypatch.setenv("REACHED", str(reached))
    made = config(tmp_path / "c.yaml", url, sampling={"transform": "user_service_code:holds"})
    with service(made) as process:
        wait_until(reached.exists)
        process.terminate()
        assert process.wait(20) == 0
    size = Path(url.replace("*", "00000")).stat().st_size
    assert status(tmp_path / "c").egress_bytes >= size
