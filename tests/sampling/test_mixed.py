"""Several sources in one cache: in the proportion of their weights, whatever their objects hold."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.cache.side_files import read_identity
from growcache.cache.status import read_status
from growcache.cli.redraw_sample import refetch_sample
from growcache.config_text import load_config
from growcache.errors import ConfigError
from growcache.formats.base import Measure
from growcache.loading.snapshot import Snapshot
from growcache.sampling.objects import Objects
from growcache.sampling.population import Population
from growcache.sampling.run_service import run_service
from growcache.sampling.sizing import (
    MeasuredSource,
    Partitioning,
    Sizing,
    measure_sizing,
    sizing_values,
    stored_sizing,
)
from growcache.sampling.sources import first_urls, open_listings, source_of_url
from growcache.schema import Field, Schema
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry
from tests.sampling.services import run

# ------------------------------------------------------------------------- shares


def sizing_of(*sources: tuple[int, bool, float], **sampling: Any) -> Sizing:
    """Sizes for sources of (samples together, ranged, samples per object) and equal weights."""
    config = load_config(
        {
            "source": [{"url": f"s3://b/{n}/*"} for n in range(len(sources))],
            "sampling": sampling,
        }
    )
    measured = [
        MeasuredSource(Measure(4000.0, 0, round(samples), together), samples, ranged)
        for together, ranged, samples in sources
    ]
    schema = Schema((Field("x", "<f4", (1000,)),))
    return measure_sizing(config, measured, schema)


def test_visits_of_each_source_are_as_large_as_are_worth_their_request() -> None:
    sizing = sizing_of((1, True, 100.0), (50, True, 1000.0), (1, False, 7.5))
    assert [cut.samples_per_object for cut in sizing.cuts] == [1, 50, 8]
    assert [cut.whole for cut in sizing.cuts] == [False, False, True]
    assert sizing.cuts[2].samples_per_whole == 7.5
    assert sizing.samples_per_object == round(3 / (1 + 1 / 50 + 1 / 7.5))
    assert stored_sizing(json.loads(json.dumps(sizing_values(sizing)))) == sizing


def test_by_objects_each_independent_visit_takes_as_many() -> None:
    sources = ((4, True, 100.0), (50, True, 1000.0))
    sizing = sizing_of(*sources, weight_by="objects", order="replacement")
    assert {cut.samples_per_object for cut in sizing.cuts} == {4} == {sizing.samples_per_object}
    assert all(cut.whole for cut in sizing.cuts)


def test_objects_that_take_turns_are_cut_as_those_that_do_not() -> None:
    sources = ((4, True, 100.0), (50, True, 1000.0))
    assert sizing_of(*sources, weight_by="objects") == sizing_of(*sources)


def test_a_visit_is_counted_by_what_objects_hold(tmp_path: Path) -> None:
    cuts = (
        Partitioning(4, 100.0, 0, whole=False),
        Partitioning(1, 1.0, 0, whole=True, samples_per_whole=2.5),
    )
    sizing = Sizing(2, 0.0, 0, whole=False, shard_samples=8, cuts=cuts)
    # Five samples in two visits, and an object that is read whole, again and again.
    entries = [Entry(str(n), 500, None, None, n % 2) for n in range(20)]
    with Catalog.open(tmp_path / "catalog") as catalog:
        catalog.append(entries)
        objects = Objects(catalog, firsts=(0, 1))
        population = Population(catalog, objects, sizing)
        assert population.parts(20) == 10 * 2 + 10
        assert population.sources(20) == [(10, 50.0), (10, 25.0)]
        assert population.per_visit(20).tolist() == [2.5, 2.5]
        assert objects.counts(7).tolist() == [4, 3]
        assert objects.numbers(1, 1, 3).tolist() == [3, 5]


# ---------------------------------------------------------------------- the listing


def test_listings_come_by_turns_and_urls_are_numbered_through(tmp_path: Path) -> None:
    for name, count in (("a", 2500), ("b", 30), ("c", 30)):
        (tmp_path / name).mkdir()
        for n in range(count):
            (tmp_path / name / f"{n:04d}.npy").write_bytes(b"1")
    sources = load_config(
        {"source": [{"url": f"{tmp_path}/a/*"}, {"url": [f"{tmp_path}/{n}/*" for n in "bc"]}]}
    ).sources
    pages = open_listings(sources, timeout_seconds=5, on_retry=lambda error: None)
    stores = [{entry.store for entry in page} for page in pages.pages()]
    assert stores == [{0}, {1, 2}, {0}, {0}]
    assert first_urls(sources) == [0, 1]
    assert [source_of_url(first_urls(sources), store) for store in (0, 1, 2)] == [0, 1, 1]


# ---------------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"source": []}, "source: name at least one"),
        ({"source": [{"url": "a/*"}, {"form": "npy"}]}, "unknown key source.1.form; did you mean format"),
        ({"source": [{"url": "a/*"}, {}]}, "source.1.url is missing"),
        ({"source": [{"url": "a/*", "weight": 0}]}, "source.0.weight: expected greater than 0"),
        ({"source": {"url": "a/*", "weight": 2}}, "unknown key source.weight"),
        (
            {"source": [{"url": "a/*"}], "sampling": {"strata": {"by": "label"}}},
            "sampling.strata: sources are mixed by their own weights",
        ),
        (
            {"source": [{"url": "a/*", "on_missing": "skip"}, {"url": "b/*"}]},
            "source: expected the same on_missing in all",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_said_of_which_source(
    values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(values)
    assert said in str(raised.value)
    assert "several" not in str(raised.value)


def test_a_source_of_several_is_overridden_by_its_number(tmp_path: Path) -> None:
    values = {"source": [{"url": "a/*"}, {"url": "b/*"}]}
    config = load_config(
        values,
        ["source.1.url=c/*"],
        {"GROWCACHE_SOURCE__0__WEIGHT": "3"},
    )
    assert [source.url for source in config.sources] == [("a/*",), ("c/*",)]
    assert config.weights == (3.0, 1.0)
    assert values["source"][1]["url"] == "b/*"
    with pytest.raises(ConfigError, match=r"source\.2\.url: expected a number from 0 to 1"):
        load_config(values, ["source.2.url=c/*"])


def test_secrets_of_every_source_are_hidden() -> None:
    secret = "sAmple-0f-a-Secret"
    with pytest.raises(ConfigError) as raised:
        load_config(
            {
                "source": [
                    {"url": "a/*"},
                    {"url": "b/*", "storage_options": {"secret": secret}, "format": [secret]},
                ]
            }
        )
    assert secret not in str(raised.value)


# --------------------------------------------------------------------------- services


def one_row_each(folder: Path, count: int) -> dict[str, Any]:
    """Objects of one sample; ``x`` tells the source."""
    folder.mkdir()
    for n in range(count):
        np.save(folder / f"{n:03d}.npy", np.array([0.0, n], "<f4"))
    return {"url": f"{folder}/*.npy"}


def rows(folder: Path, count: int) -> dict[str, Any]:
    """Objects of 30 rows."""
    folder.mkdir()
    for n in range(count):
        values = np.ones((30, 2), "<f4")
        values[:, 1] = np.arange(30) + 30 * n
        np.save(folder / f"{n:03d}.npy", values)
    return {"url": f"{folder}/*.npy", "options": {"axis": 0}}


def lines(folder: Path, count: int) -> dict[str, Any]:
    """Packed objects of 8 lines, that are read whole."""
    import gzip

    folder.mkdir()
    for n in range(count):
        text = "".join(json.dumps({"x": [2.0, 8 * n + k]}) + "\n" for k in range(8))
        (folder / f"{n:03d}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    options = {"fields": {"x": "float32"}}
    return {"url": f"{folder}/*.jsonl.gz", "format": "jsonl", "options": options}


def write(folder: Path, sources: list[dict[str, Any]], **sampling: Any) -> Path:
    path = folder / "c.yaml"
    values = {
        "source": sources,
        "sampling": {"workers": 1, "shard_samples": 64, "timeout_seconds": 10, **sampling},
        "cache": {"path": str(folder / "c"), "max_bytes": "20MB", "min_free": 0},
    }
    path.write_text(yaml.safe_dump(values))
    return path


def drawn(cache: Path) -> list[tuple[int, int]]:
    """Source and number of every sample in the cache, in the order they were drawn in."""
    with Snapshot.take(cache) as snapshot:
        return [
            (int(x[0]), int(x[1])) for x in (snapshot[i]["x"] for i in range(len(snapshot)))
        ]


def test_three_formats_are_mixed_by_their_weights(tmp_path: Path) -> None:
    sources = [
        one_row_each(tmp_path / "a", 300) | {"weight": 1},
        rows(tmp_path / "b", 40) | {"weight": 2},
        lines(tmp_path / "d", 40) | {"weight": 1},
    ]
    config = write(tmp_path, sources)
    assert run(config, "--until-full") == (0, "")
    found = drawn(tmp_path / "c")
    shares = Counter(source for source, _ in found)
    # Visits of eight samples are dealt at random: four standard errors of 500 visits.
    for source, share in enumerate((0.25, 0.5, 0.25)):
        assert abs(shares[source] / len(found) - share) < 0.08, shares
    often = Counter(found)
    for source, count in enumerate((300, 1200, 320)):
        times = [often[source, n] for n in range(count)]
        assert max(times) - min(times) <= 1  # no sample twice before all of the source came
    status = read_status(tmp_path / "c")
    assert status.population_samples == 300 + 1200 + 320
    shown = [(one.share, one.objects, one.samples) for one in status.sources]
    assert shown == [(0.25, 300, 300), (0.5, 40, 1200), (0.25, 40, 320)]
    for source, one in enumerate(status.sources):
        assert abs(one.rounds - shares[source] / one.samples) < 0.1
        assert one.url == sources[source]["url"]
    identity = read_identity(tmp_path / "c")
    assert identity is not None
    assert identity.parts["source.1.weight"] == 2
    for shard in range(8):
        assert refetch_sample(tmp_path / "c", f"{shard}:0", None, json=False) == 0
    code, errors = run(write(tmp_path, [*sources[:2], sources[2] | {"weight": 5}]))
    assert code == 2
    assert "source.2.weight (1.0 → 5.0)" in errors


def test_pairs_and_labels_of_one_source_beside_another(tmp_path: Path) -> None:
    for name in ("p", "q"):
        (tmp_path / name).mkdir()
    for n in range(12):
        np.save(tmp_path / "p" / f"x_{n}.npy", np.full((5, 2), n, "<f4"))
        np.save(tmp_path / "p" / f"y_{n}.npy", np.full(5, n % 3, "<i8"))
    for n in range(40):
        np.save(tmp_path / "q" / f"{n}.npy", np.full(2, 100 + n, "<f4"))
    table = "".join(f"{n}.npy,{n % 3}\n" for n in range(40))
    (tmp_path / "labels.csv").write_text("name,y\n" + table)
    labels = {"url": f"{tmp_path}/labels.csv", "key": "name", "columns": "y", "match": "name"}
    config = write(
        tmp_path,
        [
            {
                "fields": {name: f"{tmp_path}/p/{name}_{{k}}.npy" for name in "xy"},
                "options": {"axis": 0},
            },
            {"url": f"{tmp_path}/q/*.npy", "labels": labels},
        ],
        shard_samples=8,
    )
    assert run(config, "--until-full") == (0, "")
    with Snapshot.take(tmp_path / "c") as snapshot:
        samples = [snapshot[i] for i in range(len(snapshot))]
    for sample in samples:
        assert int(sample["y"]) == int(sample["x"][0]) % 100 % 3
    paired = sum(sample["x"][0] < 100 for sample in samples)
    assert 0.4 < paired / len(samples) < 0.6
    assert read_status(tmp_path / "c").objects == 52
    assert refetch_sample(tmp_path / "c", "0:0", None, json=False) == 0


def test_a_split_holds_in_every_source(tmp_path: Path) -> None:
    sources = [one_row_each(tmp_path / "a", 60), rows(tmp_path / "b", 40)]
    config = write(tmp_path, sources, shard_samples=8)
    values = yaml.safe_load(config.read_text())
    values["split"] = {"fractions": {"train": 0.7, "val": 0.3}, "use": "val"}
    config.write_text(yaml.safe_dump(values))
    assert run(config, "--until-full") == (0, "")
    with Snapshot.take(tmp_path / "c") as snapshot:
        keys = {snapshot.origin(i).key for i in range(len(snapshot))}
    assert 10 <= len(keys) <= 60
    subsets = {one.name: one for one in read_status(tmp_path / "c").subsets}
    assert subsets["val"].objects == len(keys)
    assert subsets["train"].objects + subsets["val"].objects == 100


@pytest.mark.slow
def test_what_is_wrong_with_a_source_is_said_of_which(tmp_path: Path) -> None:
    good = one_row_each(tmp_path / "a", 20)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "0.npy").write_bytes(b"no array")
    three = tmp_path / "t"
    three.mkdir()
    np.save(three / "0.npy", np.zeros((2, 3), "<i2"))
    config = write(tmp_path, [good, {"url": "x/*.npy", "format": "npz2"}])
    with pytest.raises(ConfigError, match=r"source\.1\.format: unknown format"):
        run_service(load_config(config))
    for source, code, said in (
        ({"url": f"{tmp_path}/e/*.jpg"}, 2, "check bucket, prefix and glob in source.1.url"),
        ({"url": f"{tmp_path}/none/*.npy"}, 2, "expected the one that source.1.url"),
        ({"url": "s3://b/*", "storage_options": {"key": "k"}}, 2, "source.1.storage_options"),
        ({"url": f"{tmp_path}/e/*.npy"}, 1, "yields a sample with source.1.format npy"),
        ({"url": f"{three}/*.npy"}, 1, "the sources differ: samples with"),
    ):
        config = write(tmp_path, [good, source])
        found, errors = run(config)
        assert found in (code, 2), errors
        assert said in errors
        assert "Traceback" not in errors


def test_a_source_that_is_left_out_leaves_no_object_behind(tmp_path: Path) -> None:
    sources = [one_row_each(tmp_path / "a", 30), rows(tmp_path / "b", 3)]
    # The bound is refused when all is listed and measured, and no sample drawn yet.
    found, errors = run(write(tmp_path, sources, shard_samples=10**6))
    assert (found, "cache.max_bytes" in errors) == (2, True), errors
    assert run(write(tmp_path, sources[:1]), "--until-full") == (0, "")
    assert {source for source, _ in drawn(tmp_path / "c")} == {0}
    assert read_status(tmp_path / "c").objects == 30


def test_a_cache_of_more_sources_is_refused_before_anything_is_listed(tmp_path: Path) -> None:
    sources = [one_row_each(tmp_path / "a", 30), rows(tmp_path / "b", 3)]
    assert run(write(tmp_path, sources), "--until-full") == (0, "")
    catalog = (tmp_path / "c" / "catalog.bin").read_bytes()
    np.save(tmp_path / "a" / "new.npy", np.zeros(2, "<f4"))
    found, errors = run(write(tmp_path, sources[:1]), "--until-full", "--refresh")
    assert (found, "source.1.url" in errors) == (2, True), errors
    assert (tmp_path / "c" / "catalog.bin").read_bytes() == catalog


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_every_url_has_one_owner(counts: list[int]) -> None:
    sources = load_config({"source": [{"url": ["a"] * count} for count in counts]}).sources
    owners = [source_of_url(first_urls(sources), store) for store in range(sum(counts))]
    assert owners == np.repeat(np.arange(len(counts)), counts).tolist()
