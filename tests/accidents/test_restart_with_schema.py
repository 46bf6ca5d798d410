"""A service can restart with any configuration that YAML can express."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.accidents.commands import growcache, status, write_config, write_objects

CODE = """
import datetime
import math



class Noted:
    def __init__(self, fill, names, since, at, allowed, key, huge, nothing, shape):
        assert math.isnan(fill["x"]) and fill["y"] == -math.inf
        assert names == {0: "cat", 1: "dog", "1": "text", None: "none", 2.5: "half"}
        assert since == datetime.date(2020, 2, 29)
        assert at == datetime.datetime(2020, 2, 29, 12, 30)
        assert allowed == {1, 2, 3} and type(allowed) is set
        assert key == b"bytes" and huge == 1 << 80 and nothing is None
        assert shape == [4, None]

    def __call__(self, sample):
        return {"x": sample["x"], "note": "seen"}


def anything(sample, options):
    return sample
"""
OPTIONS = """
fill: {x: .nan, y: -.inf}
names: {0: cat, 1: dog, "1": text, null: none, 2.5: half}
since: 2020-02-29
at: 2020-02-29 12:30:00
allowed: !!set {1, 2, 3}
key: !!binary Ynl0ZXM=
huge: 1208925819614629174706176
nothing: null
shape: [4, null]
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    write_objects(folder / "in", count=6, rows=4)
    (folder / "mine.py").write_text(textwrap.dedent(CODE))
    return folder


def source(work: Path) -> dict[str, Any]:
    return {"url": f"{work}/in/*.npy", "format": "npy", "options": {"axis": 0}}


def run_twice(work: Path, config: Path) -> None:
    """Fill the cache and start the service again, which must neither add samples nor fail."""
    for _ in range(2):
        done = growcache("run", config, "--until-full", cwd=work)
        assert done.returncode == 0, done.stderr
    assert status(config.with_suffix(""))["samples"] == 24


@pytest.mark.slow
def test_a_declared_schema(work: Path) -> None:
    config = write_config(
        work / "schema.yaml",
        source(work),
        sampling={"schema": {"x": ["float32", None]}},
        cache={"max_bytes": "8MB"},
    )
    run_twice(work, config)


@pytest.mark.slow
def test_options_that_json_does_not_know_reach_the_transform(work: Path) -> None:
    wanted = {"transform": "mine:Noted", "transform_options": yaml.safe_load(OPTIONS)}
    config = write_config(work / "options.yaml", source(work), sampling=wanted)
    run_twice(work, config)


@pytest.mark.slow
def test_another_value_is_noticed_and_told(work: Path) -> None:
    """Values that JSON would make equal differ: their samples must not share a cache."""
    config = work / "other.yaml"
    for value in (float("nan"), None):
        options = {"options": {"fill": value}}
        wanted = {"transform": "mine:anything", "transform_options": options}
        write_config(config, source(work), sampling=wanted)
        done = growcache("run", config, "--until-full", cwd=work)
    assert done.returncode == 2
    assert "sampling.transform_options" in done.stderr
    assert "Traceback" not in done.stderr


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.dates(),
    st.datetimes(),
    st.binary(max_size=8),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8),
)
values = st.recursive(
    scalars | st.sets(st.integers() | st.text("abc!", max_size=3), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.integers() | st.text("abc!", max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@example({"!map": [["a", 1]]})
@given(values)
def test_any_option_that_yaml_can_say(work: Path, value: Any) -> None:
    config = work / "any.yaml"
    wanted = {"transform": "mine:anything", "transform_options": {"options": value}}
    write_config(config, source(work), sampling=wanted)
    growcache("clear", config.with_suffix(""), "--yes", cwd=work)
    run_twice(work, config)


@pytest.mark.slow
def test_what_yaml_cannot_say_is_refused_in_a_line(work: Path) -> None:
    script = work / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import growcache, numpy

        options = {{"options": numpy.zeros(3)}}
        sampling = {{"transform": "mine:anything", "transform_options": options}}
        source = {source(work)!r}
        try:
            with growcache.serve({{"source": source, "sampling": sampling}}):
                pass
        except growcache.GrowcacheError as error:
            print(error)
        """)
    )

    done = subprocess.run(
        [sys.executable, str(script)], cwd=work, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "found ndarray" in done.stdout
