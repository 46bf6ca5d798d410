"""Labels: which row belongs to an object, what samples get of it, and what has none."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from growcache.cache.status import read_status
from growcache.cli.redraw_sample import refetch_sample
from growcache.config import SplitConfig
from growcache.config_source import LabelsConfig, SourceConfig
from growcache.errors import ConfigError, FingerprintError, FormatError
from growcache.loading.snapshot import Snapshot
from growcache.sampling.fill import with_labels
from growcache.sampling.label_table import NO_ROW, parse_table, read_table
from growcache.sampling.labels import Labels
from growcache.sampling.messages import LabelValues, PartVisit, pack, unpack
from growcache.sampling.objects import Objects, Split
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry
from tests.sampling.services import run, service, wait_until, write_config


def labels(
    keys: list[str], match: str = "exact", url: str | tuple[str, ...] = "s3://b/rec/*/*.npy"
) -> Labels:
    """Labels whose ``n`` is the number of the row."""
    lines = "".join(f"{key},{n},g{n % 5}\n" for n, key in enumerate(keys))
    table = parse_table(f"path,n,group\n{lines}".encode(), "csv", "path", ("n", "group"))
    wanted = LabelsConfig(url="t.csv", key="path", columns=("n", "group"), match=match)
    urls = (url,) if isinstance(url, str) else url
    return Labels([SourceConfig(url=urls, labels=wanted)], [table])


@pytest.mark.parametrize(
    ("match", "row", "url", "key"),
    [
        ("exact", "rec/s1/a.npy", "s3://b/rec/*/*.npy", "rec/s1/a.npy"),
        ("exact", "s1/a.npy", "s3://b/rec/*/*.npy", "rec/s1/a.npy"),
        ("exact", "s3://b/rec/s1/a.npy", "s3://b/rec/*/*.npy", "rec/s1/a.npy"),
        ("exact", "s1/a.npy", "/data/rec/**/*.npy", "/data/rec/s1/a.npy"),
        ("exact", "/data/rec/s1/a.npy", "/data/rec/**/*.npy", "/data/rec/s1/a.npy"),
        ("exact", "rec/s1/a.npy", "rec/**/*.npy", "{cwd}/rec/s1/a.npy"),
        ("exact", "file:///data/a.npy", "file:///data/*.npy", "/data/a.npy"),
        ("exact", "https://h/x/a.npy", "https://me:word@h/x/a.npy", "x/a.npy"),
        ("name", "a.npy", "s3://b/rec/*/*.npy", "rec/s1/a.npy"),
        ("stem", "a.b", "s3://b/rec/*/*.npy", "rec/s1/a.b.npy"),
        ("stem", "README", "s3://b/rec/*/*", "rec/s1/README"),
        ("/(?P<key>[^/]+)/[^/]+$", "s1", "s3://b/rec/*/*.npy", "rec/s1/a.npy"),
    ],
)
def test_a_row_belongs_to_an_object(match: str, row: str, url: str, key: str) -> None:
    made = labels(["other", row], match, url)
    key = key.replace("{cwd}", str(Path.cwd()))
    assert made.joined([0], [key]) == [{"n": 1, "group": "g1"}]
    assert made.rows([0, 0], [f"{key}x/y", "rec/z/q.npy"]).tolist() == [NO_ROW, NO_ROW]


def test_keys_below_the_prefix_are_those_of_the_url_they_came_by() -> None:
    made = labels(["a.npy", "b.npy"], url=("s3://b/one/*.npy", "s3://b/two/*.npy"))
    rows = made.rows([0, 1, 0], ["one/a.npy", "two/b.npy", "two/b.npy"])
    assert rows.tolist()[2] == NO_ROW
    assert [made.joined([s], [k])[0]["n"] for s, k in ((0, "one/a.npy"), (1, "two/b.npy"))] == [
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("keys", "match", "words"),
    [
        (["a", "b"], "exact", "Set source.labels.match: stem, which finds all of these"),
        (["a.npy", "x"], "exact", "Set source.labels.match: name, which finds 1 of these"),
        (["s1/a.npy", "s1/b.npy"], "stem", "match: exact, which finds all of these"),
        (["x", "y"], "exact", "Correct the table, or source.labels.match, or leave"),
    ],
)
def test_what_would_match_is_said(keys: list[str], match: str, words: str) -> None:
    missing = [(0, "rec/s1/a.npy"), (0, "rec/s1/b.npy")]
    message = labels(keys, match).complaint(missing, 2, 7)
    assert words in message
    assert f"2 of 7 objects have no row in t.csv, whose column path has '{keys[0]}'" in message


def listed(folder: Path, count: int) -> Catalog:
    catalog = Catalog.open(folder / "catalog")
    keys = [f"rec/s{n % 7}/{n:04d}.npy" for n in range(count)]
    catalog.append([Entry(key, n + 1, None, 0.0) for n, key in enumerate(keys)])
    return catalog


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.sets(st.integers(0, 199), min_size=1),
    steps=st.lists(st.integers(0, 200), max_size=5),
    by=st.sampled_from([None, "(?P<group>s[0-9])", {"label": "group"}]),
)
def test_skipped_objects_have_no_number_however_the_listing_came(
    tmp_path_factory: pytest.TempPathFactory,
    rows: set[int],
    steps: list[int],
    by: Any,
) -> None:
    made = labels([f"{n:04d}" for n in sorted(rows)], "stem")
    split = SplitConfig(group=by, fractions={"a": 0.5, "b": 0.5}, use="a") if by else None
    with listed(tmp_path_factory.mktemp("c"), 200) as catalog:
        subsets = Split(split) if split is not None else None
        objects = Objects(catalog, subsets, skips=True)
        objects.labels = made
        for step in sorted(steps):
            objects.look(step)
        count = objects.among(200)
        visits = objects.visits(np.arange(count))
    numbers = [int(visit.entry.key[-8:-4]) for visit in visits]
    assert numbers == sorted(set(numbers) & rows)
    order = sorted(rows)
    assert [visit.joined["n"] for visit in visits] == [order.index(n) for n in numbers]
    if split is None:
        assert (count, objects.unmatched) == (len(rows), 200 - len(rows))
    else:
        used = next(one for one in objects.subsets() if one.used)
        assert used.objects == count
    if by == {"label": "group"} and subsets is not None:
        groups = [str(visit.joined["group"]) for visit in visits]
        assert set(subsets.places(groups).tolist()) <= {0}
        assert objects.unmatched == 200 - len(rows)


def test_an_object_without_a_row_is_an_error_at_its_page(tmp_path: Path) -> None:
    with listed(tmp_path, 64) as catalog:
        objects = Objects(catalog)
        objects.labels = labels([f"{n:04d}" for n in range(50)], "stem")
        assert objects.among(50) == 50
        with pytest.raises(ConfigError, match="14 of 64 objects have no row") as caught:
            objects.look(64)
    assert str(caught.value).count(".npy") == 10


def test_an_object_of_another_subset_needs_no_labels(tmp_path: Path) -> None:
    split = SplitConfig(group="(?P<group>s[0-9])", fractions={"a": 0.5, "b": 0.5}, use="a")
    subsets = Split(split)
    with listed(tmp_path, 64) as catalog:
        keys = [key for _, keys in catalog.stores_and_keys(0, 64) for key in keys]
        mine = [key for key, place in zip(keys, subsets.places(subsets.groups(keys)), strict=True) if place == 0]  # fmt: skip
        objects = Objects(catalog, subsets)
        objects.labels = labels(mine)
        assert objects.among(64) == len(mine)


def test_values_cross_the_pipe_as_they_are() -> None:
    values: LabelValues = {
        "a": 1,
        "b": 1.0,
        "c": "x",
        "n": float("nan"),
        "i": float("-inf"),
        "z": 2**62,
    }
    visit = PartVisit(Entry("k\udcff", 1, None, None), 1, 2, joined=values)
    found = PartVisit.from_values(unpack(pack({"visit": visit.to_values()}))["visit"])
    assert (found.entry, found.part, found.parts) == (visit.entry, 1, 2)
    assert repr(found.joined) == repr(values)


def test_what_is_joined_are_plain_values() -> None:
    sample = with_labels({"x": np.zeros(2)}, {"a": 1, "b": 1.5, "c": "x"}, "k")
    assert [sample["a"].dtype.str, sample["b"].dtype.str, sample["c"]] == ["<i8", "<f8", "x"]
    assert sample["a"].shape == ()
    with pytest.raises(FormatError, match="k: its samples have a field 'x' of their own"):
        with_labels({"x": np.zeros(2)}, {"x": 1}, "k")


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"source.labels: .*nowhere.csv"):
        read_table(str(tmp_path / "nowhere.csv"), "k", ("x",), SourceConfig(url=("x",)), 1)
    with pytest.raises(ConfigError, match=r"expected one table at .*, found 0"):
        read_table(str(tmp_path / "*.csv"), "k", ("x",), SourceConfig(url=("x",)), 1)


def recordings(folder: Path, count: int = 40) -> str:
    for n in range(count):
        path = folder / f"sub-{n % 4}" / f"{n:03d}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.full(8, n, "<f4"))
    return f"{folder}/**/*.npy"


def lines(count: int = 40) -> str:
    rows = [f"sub-{n % 4}/{n:03d}.npy,sub-{n % 4},{n * 2}" for n in range(count)]
    return "\n".join(["path,subject,twice", *rows, ""])


TWICE = {"key": "path", "columns": ["subject", "twice"]}


def test_samples_have_their_labels_before_the_transform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, table = recordings(tmp_path / "data"), tmp_path / "labels.csv"
    table.write_text(lines(30))
    (tmp_path / "halves.py").write_text(
        "def half(sample):\n    sample['once'] = sample.pop('twice') // 2\n    return sample\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = write_config(
        tmp_path / "c.yaml",
        url,
        source={"labels": {"url": str(table), **TWICE}, "on_missing": "skip"},
        split={"group": {"label": "subject"}, "fractions": {"a": 0.5, "b": 0.5}, "use": "a"},
        sampling={"transform": "halves:half"},
    )
    assert run(config, "--until-full") == (0, "")
    with Snapshot.take(tmp_path / "c") as snapshot:
        for i in range(len(snapshot)):
            sample, key = snapshot[i], snapshot.origin(i).key
            assert sample["once"] == sample["x"][0] == int(key[-7:-4])
            assert sample["subject"] == key.split("/")[-2]
        subjects = {snapshot[i]["subject"] for i in range(len(snapshot))}
    found = read_status(tmp_path / "c")
    assert (found.complete, found.unmatched) == (True, 10)
    counts = {one.name: (one.objects, one.groups) for one in found.subsets}
    assert counts["a"] == (found.samples, len(subjects))
    assert sum(objects for objects, _ in counts.values()) == 30

    assert refetch_sample(tmp_path / "c", "0:0", config, json=False) == 0
    assert "is equal" in capsys.readouterr().out
    table.write_text(lines(30).replace(",0\n", ",2\n"))
    with pytest.raises(FingerprintError, match=r"labels\.csv has changed since"):
        refetch_sample(tmp_path / "c", "0:0", config, json=False)
    code, errors = run(config, "--until-full")
    assert code == 2
    assert "holds samples of another configuration: the rows of source.labels ('" in errors


def test_the_service_ends_where_labels_are_missing(tmp_path: Path) -> None:
    url, table = recordings(tmp_path / "data"), tmp_path / "labels.csv"
    table.write_text(lines(39))
    source = {"labels": {"url": str(table), **TWICE}}
    code, errors = run(write_config(tmp_path / "c.yaml", url, source=source), "--until-full")
    assert code == 2
    assert "1 of 40 objects have no row in" in errors
    assert "sub-3/039.npy" in errors


@pytest.fixture
def held_table() -> Iterator[tuple[str, threading.Event]]:
    """The URL of a table that comes when the event is set."""
    may_come = threading.Event()
    body = lines().encode()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()

        def do_GET(self) -> None:
            may_come.wait(300)
            self.do_HEAD()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/labels.csv", may_come
    finally:
        may_come.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_service_waits_for_the_labels(
    tmp_path: Path, held_table: tuple[str, threading.Event]
) -> None:
    table, may_come = held_table
    url = recordings(tmp_path / "data")
    source = {"labels": {"url": table, **TWICE}}
    config = write_config(tmp_path / "c.yaml", url, source=source)
    with service(config, "--until-full") as process:
        wait_until(lambda: _waits_for(tmp_path / "c") == "the labels")
        may_come.set()
        _, errors = process.communicate(timeout=300)
        assert (process.returncode, errors) == (0, "")
    assert read_status(tmp_path / "c").samples == 40


def _waits_for(cache: Path) -> str | None:
    try:
        return read_status(cache).waiting_for
    except OSError:
        return None
