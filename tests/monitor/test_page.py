"""The page's answers and files, without a browser."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from starlette.testclient import TestClient

from growcache.cache.index.inspection import HoleRow
from growcache.monitor import page
from growcache.monitor.gallery import gallery_of
from growcache.monitor.hole_reasons import group_holes
from growcache.monitor.metric_tables import metric_tables
from growcache.monitor.page import WEB, read_shards
from growcache.monitor.sample_views import (
    MOST_TRACES,
    PICTURE_PIXELS,
    TRACE_BINS,
    encode_png,
    field_view,
)
from growcache.monitor.server import create_app
from growcache.monitor.shard_map import encode_runs, encode_steps
from growcache.schema import Field
from tests.filled import Filled
from tests.monitor.hostile import ALL, fill_hostile

OWN = sorted(
    path
    for path in WEB.iterdir()
    if path.suffix in (".js", ".css", ".html") and not path.name.startswith("uPlot")
)
SCRIPTS = [path for path in WEB.iterdir() if path.suffix == ".js"]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    with fill_hostile(tmp_path_factory.mktemp("page") / "hostile") as filled:
        yield filled


@pytest.fixture(scope="module")
def client(hostile: Filled, tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    empty = tmp_path_factory.mktemp("empty") / "val"
    app = create_app([hostile.root, empty], token=None, prefix="")
    return TestClient(app, base_url="http://localhost", follow_redirects=False)


# Files


def test_every_file_of_the_page_is_served_with_its_type(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for reference in re.findall(r'(?:src|href)="(web/[^"]+)"', page.text):
        assert client.get(f"/{reference}").status_code == 200, reference
    assert client.get("/web/page.js").headers["content-type"].startswith("text/javascript")
    assert client.get("/web/../page.py").status_code == 404
    assert client.get("/web/%2e%2e/page.py").status_code == 404


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_nothing_is_shown_as_markup_and_nothing_comes_from_elsewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    makes_markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function|srcdoc"
    assert not re.search(makes_markup, text)
    assert not re.search(r"https?://|//[a-z]+\.", text)
    assert not re.search(r"url\((?!#)", text)
    if path.suffix == ".html":
        assert not re.search(r"\son[a-z]+=|\sstyle=|<style|<script(?! src=)", text)
        assert all(
            not found.startswith("/") for found in re.findall(r'(?:src|href)="([^"]*)"', text)
        )


def test_the_vendored_library_is_whole_and_has_its_licence() -> None:
    assert "(v1.6.32)" in (WEB / "uPlot.iife.min.js").read_text(encoding="utf-8")[:80]
    assert "Permission is hereby granted" in (WEB / "LICENSE.uPlot.txt").read_text()
    assert not any("innerHTML" in path.read_text(encoding="utf-8") for path in SCRIPTS)


# Answers


def test_answers_in_words(client: TestClient) -> None:
    answers = client.get("/answers.json").json()
    assert set(answers) == {"fed", "growth", "awaited"}
    assert answers["awaited"]["level"] == "bad"
    assert answers["awaited"]["answer"].startswith("For the store to answer (<script>")
    missing = client.get("/answers.json?cache=val").json()
    assert "there is no cache at" in missing["growth"]["answer"]


def test_map(client: TestClient) -> None:
    found = client.get("/shards.json").json()
    assert found["count"] == 6
    assert found["numbers"] == [0, 1, 1, 5]
    assert found["samples"] == [10, 6]
    assert found["uses"] == [0, 6] == found["retired"]
    assert found["now"] - found["drawn_at"][0] < 600


def test_many_viewers_cost_one_map(hostile: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = iter([{"count": 1}])
    monkeypatch.setattr(page, "map_of", lambda *_: next(maps))
    client = TestClient(create_app([hostile.root]), base_url="http://localhost:8650")
    assert [client.get("/shards.json").json() for _ in range(3)] == [{"count": 1}] * 3


def test_samples_and_where_they_came_from(client: TestClient) -> None:
    found = client.get("/samples.json?count=4").json()
    assert [(one["shard"], one["i"]) for one in found["samples"]] == [
        (0, 0),
        (1, 0),
        (3, 0),
        (4, 0),
    ]
    assert found["cached"] == 60
    kinds = {field["name"]: field["kind"] for field in found["samples"][0]["fields"]}
    assert kinds == {
        "waves": "trace", "grid": "picture", "photo": "picture", "broken": "bytes", "raw": "bytes",
        "<img src=x onerror=window.ran=1>": "text", "text": "text", "y": "numbers",
    }  # fmt: skip


def test_samples_of_a_shard_turn(client: TestClient) -> None:
    places = [
        [
            one["i"]
            for one in client.get(f"/samples.json?shard=2&count=4&turn={turn}").json()[
                "samples"
            ]
        ]
        for turn in (0, 1, 2)
    ]
    assert places == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert client.get("/samples.json?shard=99").json()["samples"] == []


def test_control_characters_arrive_as_escapes(client: TestClient) -> None:
    for address in ("/samples.json?count=6", "/holes.json", "/answers.json"):
        text = "".join(_strings(client.get(address).json()))
        assert "\\u202e" in text
        assert not re.search("[\x00-\x09\x0b-\x1f\u200e\u200f\u2028-\u202e\u2066-\u2069]", text)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def test_holes_by_reason(client: TestClient) -> None:
    found = client.get("/holes.json").json()
    assert (found["total"], found["noted"]) == (12, 12)
    assert [group["count"] for group in found["groups"]] == [6, 6]
    assert found["groups"][0]["examples"][0]["shard"] == 5


def test_tables_of_counters(client: TestClient) -> None:
    found = client.get("/tables.json").json()
    assert [(row["rank"], row["batches"], row["below"]) for row in found["ranks"]] == [
        ("1", 10, [0.0001, None]),
        ("0", 4, [0.0001, 0.0001]),
    ]
    assert found["ranks"][0]["job"] == "<script>window.ran=1</script>"
    assert [row["name"] for row in found["stages"]] == [
        "fetch",
        "<script>window.ran=1</script>",
    ]
    assert found["requests"] == [{"name": "get ok", "amount": 7}]
    assert client.get("/tables.json?cache=val").json()["ranks"] == []
    assert metric_tables(None)["ranks"] == []


def test_a_damaged_sample_is_said_and_hides_no_other(tmp_path: Path) -> None:
    with Filled(tmp_path / "cache") as filled:
        filled.add(0, 1)
        filled.layout.sidecar(0).write_bytes(b"{}")
        client = TestClient(create_app([filled.root]), base_url="http://localhost")
        found = client.get("/samples.json").json()
    assert [one["shard"] for one in found["samples"]] == [1]
    assert "the sidecar of the shard is damaged" in found["damage"]


def test_samples_that_take_too_long_are_not_shown(tmp_path: Path) -> None:
    with Filled(tmp_path / "cache") as filled:
        filled.add(0, 1)
        shards = read_shards(filled.root)
        found = gallery_of(*shards, count=8, turn=0, shard=None, most_seconds=0.0)
        whole = gallery_of(*shards, count=8, turn=0, shard=None)
    assert (found["late"], len(found["samples"])) == (True, 1)
    assert {one["text"][:9] for one in found["samples"][0]["fields"]} == {"not shown"}
    assert (whole["late"], len(whole["samples"])) == (False, 2)


@pytest.mark.parametrize(
    ("address", "code", "said"),
    [
        ("/shards.json?cache=val", 503, "no cache at"),
        ("/samples.json?cache=other", 404, "there is hostile, val"),
        ("/samples.json?turn=-1", 400, "turn must be a number"),
        ("/samples.json?count=9999999999999999", 400, "count must be a number"),
        ("/samples.json?shard=1e3", 400, "shard must be a number"),
    ],
)
def test_errors_are_json(client: TestClient, address: str, code: int, said: str) -> None:
    answer = client.get(address)
    assert (answer.status_code, said in answer.json()["error"]) == (code, True)


# Pure parts


def test_holes_differ_by_more_than_object_and_numbers() -> None:
    holes = [
        HoleRow(1, "a.npy", 0, "a.npy: expected 128 bytes, found 3"),
        HoleRow(1, "b.npy", 1, "b.npy: expected 4,096 bytes, found 77"),
        HoleRow(2, "c.npy", 0, "c.npy: found b'\\x93NUM'"),
        HoleRow(2, "d.npy", 0, "d.npy: found b'ABC'"),
        HoleRow(2, "e.npy", 0, "e.npy: is empty"),
    ]
    groups = group_holes(holes)
    assert [(group.count, group.reason.partition(":")[0]) for group in groups] == [
        (2, "a.npy"), (2, "c.npy"), (1, "e.npy"),
    ]  # fmt: skip
    assert [one["key"] for one in groups[0].examples] == ["b.npy", "a.npy"]


@given(st.lists(st.integers(-(2**40), 2**40)))
def test_columns_come_back_from_their_runs(values: list[int]) -> None:
    column = np.array(values, np.int64)
    runs = encode_runs(column)
    assert [v for v, n in zip(runs[::2], runs[1::2], strict=True) for _ in range(n)] == values
    assert all(before != after for before, after in zip(runs[::2], runs[2::2], strict=False))
    steps = encode_steps(column)
    back = np.repeat(np.array(steps[::2], np.int64), np.array(steps[1::2], np.int64)).cumsum()
    assert back.tolist() == values


@given(
    arrays(
        st.sampled_from(["<f4", "<f8", "|u1", "<i2", "|b1", "<c8"]),
        array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=9) | st.sampled_from([(3, 700), (700, 3), (40, 30, 3), (3, 40, 30), (70, 60), (9, 9, 9, 900)]),
    )
)  # fmt: skip
def test_every_array_has_a_view(array: Any) -> None:
    view = field_view(Field("x", array.dtype.str, array.shape), array)
    assert view["kind"] in ("numbers", "trace", "picture")
    if view["kind"] == "trace":
        assert len(view["points"]) <= MOST_TRACES
        assert all(len(points) <= 2 * TRACE_BINS for points in view["points"])
        levels = [level for points in view["points"] for level in points if level is not None]
        assert all(0 <= level <= 1000 for level in levels)
    if view["kind"] == "picture":
        assert max(view["width"], view["height"]) <= PICTURE_PIXELS


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
def test_the_png_is_one(shape: tuple[int, ...]) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    assert (np.asarray(image.open(io.BytesIO(encode_png(pixels)))) == pixels).all()


def test_a_peak_is_not_lost_where_a_trace_is_long() -> None:
    trace = np.zeros(100_000, "<f4")
    trace[71_003] = 1.0
    view = field_view(Field("x", "<f4", (100_000,)), trace)
    assert max(view["points"][0]) == 1000
    assert (view["low"], view["high"]) == (0.0, 1.0)


def test_names_of_classes_are_shown() -> None:
    field = Field("y", "<i8", (), classes=("cat", "<b>"))
    assert field_view(field, np.array(1))["text"] == "1 (<b>)"
    assert field_view(field, np.array(7))["text"] == "7"


def test_long_text_is_cut() -> None:
    view = field_view(Field("t", "str", ()), ALL * 50)
    assert view["more"] > 0
    assert len(view["text"]) < 3000


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_every_script_is_javascript() -> None:
    """Only slow tests open the page, and one name declared twice leaves it empty."""
    for script in SCRIPTS:
        done = subprocess.run(
            ["node", "--input-type=module", "--check", "-"],
            input=script.read_bytes(),
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, f"{script.name}: {done.stderr.decode()}"
