"""Several objects as one: which belong together, what number they get, what samples they yield."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from growcache.cache.status import read_status
from growcache.cli.peek import sample_at
from growcache.cli.redraw_sample import refetch_sample
from growcache.config import Config, SplitConfig
from growcache.config_source import SourceConfig
from growcache.config_text import load_config
from growcache.errors import ConfigError, FormatError
from growcache.formats import open_source
from growcache.formats.base import SamplesWithOrigins, Visit
from growcache.loading.snapshot import Snapshot
from growcache.sampling.lanes import owned_lanes
from growcache.sampling.messages import PartVisit, pack, unpack
from growcache.sampling.objects import FieldJoin, Objects, Split
from growcache.sampling.population import Population
from growcache.sampling.sizing import Sizing
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry
from growcache.store.opening import open_store
from growcache.store.urls import UrlTemplate
from tests.formats.held import Held
from tests.sampling.services import run, write_config

XY = {"x": "s3://b/d/x_{k}.npy", "y": "s3://b/d/y_{k}.npy"}


def source(fields: dict[str, Any], **more: Any) -> SourceConfig:
    return SourceConfig.model_validate({"fields": fields, **more})


def pairs(fields: dict[str, Any]) -> FieldJoin:
    return FieldJoin([source(fields)])


@pytest.mark.parametrize(
    ("url", "key", "values"),
    [
        ("s3://b/d/x_{k}.npy", "d/x_7.npy", ("7",)),
        ("s3://b/d/x_{k}.npy", "d/x_.npy", None),
        ("s3://b/d/x_{k}.npy", "d/x_7/8.npy", None),
        ("s3://b/{s}/{s}_{r}.npy", "a/a_1.npy", ("1", "a")),
        ("s3://b/{s}/{s}_{r}.npy", "a/b_1.npy", None),
        ("/data/{s}_{r}.n+y", "/data/a_b_c.n+y", ("c", "a_b")),
    ],
)
def test_a_key_gives_the_values_and_they_the_key(
    url: str, key: str, values: tuple[str, ...] | None
) -> None:
    template = UrlTemplate.from_url(url)
    assert template.values(key) in (values, None if values is None else values[::-1])
    if (found := template.values(key)) is not None:
        assert key.endswith(template.render(found))


LISTING = [(n % 2, f"d/{'xy'[n % 2]}_{n // 2:03d}.npy") for n in range(80)]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    listed=st.permutations(LISTING),
    gone=st.sets(st.integers(0, 79), max_size=10),
    steps=st.lists(st.integers(0, 80), max_size=4),
    use=st.sampled_from([None, "a", "b"]),
)
def test_numbers_follow_from_the_order_of_the_catalog_alone(
    tmp_path_factory: pytest.TempPathFactory,
    listed: list[tuple[int, str]],
    gone: set[int],
    steps: list[int],
    use: str | None,
) -> None:
    kept = [one for n, one in enumerate(listed) if n not in gone]
    by_k: dict[str, dict[int, int]] = {}
    whole: list[tuple[str, int]] = []  # k, and after how many entries it is whole
    for n, (store, key) in enumerate(kept):
        by_k.setdefault(key[4:7], {})[store] = n
        if len(by_k[key[4:7]]) == 2:
            whole.append((key[4:7], n + 1))
    split = SplitConfig(fractions={"a": 0.5, "b": 0.5}, use=use) if use else None
    subsets = Split(split) if split else None
    if subsets is not None:
        whole = [
            one for one in whole if subsets.places([f"d/x_{one[0]}.npy"])[0] == subsets.used
        ]
    with Catalog.open(tmp_path_factory.mktemp("c") / "catalog") as catalog:
        entries = [Entry(k, n + 1, None, 0.0, store) for n, (store, k) in enumerate(kept)]
        catalog.append(entries)
        objects = Objects(catalog, subsets, pairs(XY), skips=True)
        for step in [*sorted(steps), len(kept)]:
            step = min(step, len(kept))
            assert objects.among(step) == sum(at <= step for _, at in whole)
        count = objects.among(len(kept))
        objects.finish()
        visits = objects.visits(np.arange(count))
        assert [visit.entry.key for visit in visits] == [f"d/x_{k}.npy" for k, _ in whole]
        assert [visit.partners[0].key for visit in visits] == [f"d/y_{k}.npy" for k, _ in whole]
        assert [visit.partners[0].store for visit in visits] == [1] * count
        assert list(objects.keys(0, count)) == [visit.entry.key for visit in visits]
        assert objects.sizes(0, count).tolist() == [visit.entry.size for visit in visits]
        assert objects.unmatched == sum(len(members) == 1 for members in by_k.values())
        if subsets is not None:
            used = next(one for one in objects.subsets() if one.used)
            assert (used.objects, sorted(used.sizes)) == (
                count,
                sorted(s.entry.size for s in visits),
            )


def test_nodes_share_out_pairs(tmp_path: Path) -> None:
    sizing = Sizing(1, 100.0, 0, whole=False, shard_samples=8)
    with Catalog.open(tmp_path / "catalog") as catalog:
        catalog.append([Entry(key, 300, None, 0.0, store) for store, key in LISTING])
        drawn = []
        for node in range(2):
            population = Population(catalog, Objects(catalog, None, pairs(XY)), sizing)
            owned = population.owned(80, owned_lanes(node, 2))
            assert owned is not None
            drawn.append(set(np.flatnonzero(owned(np.arange(population.parts(80)))).tolist()))
    assert len(drawn[0] | drawn[1]) == 120
    assert not drawn[0] & drawn[1]


def taken(
    fields: dict[str, Any], listed: Sequence[tuple[int, str]]
) -> tuple[FieldJoin, list[str]]:
    made = pairs(fields)
    whole = made.add(0, [store for store, _ in listed], [key for _, key in listed])
    return made, whole.keys


def test_a_key_that_two_fields_match_is_of_the_one_that_fixes_more() -> None:
    fields = {"image": "s3://b/d/{k}.png", "mask": "s3://b/d/{k}_mask.png"}
    keys = ["d/a.png", "d/a_mask.png", "d/b_mask.png"]
    made, whole = taken(fields, [(0, key) for key in keys] + [(1, key) for key in keys[1:]])
    assert whole == ["d/a.png"]
    assert "1 of the objects lack a field: d/b_mask.png (no image)" in made.complaint(10)


def test_three_fields_in_three_folders() -> None:
    fields = {n: f"s3://b/{n}/{{s}}/{{r}}.npy" for n in "xyz"}
    listed = [(n, f"{f}/s{i}/1.npy") for n, f in enumerate("xyz") for i in range(3)]
    made, whole = taken(fields, listed[:-1])
    assert whole == ["x/s0/1.npy", "x/s1/1.npy"]
    assert "x/s2/1.npy (no z)" in made.complaint(10)
    assert made.unmatched == 2


def test_what_has_no_partner_is_an_error_once_all_is_listed(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "catalog") as catalog:
        catalog.append([Entry(key, 3, None, 0.0, store) for store, key in LISTING[:61]])
        objects = Objects(catalog, None, pairs(XY))
        assert objects.among(61) == 30
        with pytest.raises(
            ConfigError, match=r"1 of the objects lack a field: d/x_030.npy \(no y\)"
        ):
            objects.finish()


def test_partners_cross_the_pipe() -> None:
    visit = PartVisit(Entry("a", 1, '"e"', 2.0), 1, 2, partners=(Entry("b", 3, None, None, 1),))
    assert PartVisit.from_values(unpack(pack({"visit": visit.to_values()}))["visit"]) == visit


# ------------------------------------------------------------------------------ samples


def raw(rows: int, scale: int = 1) -> bytes:
    return (np.arange(rows) * scale).astype("<i4").tobytes()


def read(made: SourceConfig, members: Sequence[bytes], visit: Visit) -> SamplesWithOrigins:
    first, *others = [Held(data, f"k{n}") for n, data in enumerate(members)]
    first.others = others
    return asyncio.run(open_source(made).read(first, visit))


WINDOWS = {"dtype": "<i4", "window": 5, "stride": 7}


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    parts=st.integers(1, 4),
    take=st.sampled_from([None, 2]),
    rows=st.integers(5, 60),
)
def test_members_are_visited_alike(seed: int, parts: int, take: int | None, rows: int) -> None:
    made = source(XY, format="raw", options=WINDOWS)
    for part in range(parts):
        visit = Visit(part, parts, 1, seed, take)
        for sample, start, stop in read(made, [raw(rows), raw(rows, 10)], visit):
            np.testing.assert_array_equal(sample["x"], np.arange(start, stop))
            np.testing.assert_array_equal(sample["y"], 10 * sample["x"])


@pytest.mark.parametrize("parts", [1, 3, 20])
def test_members_of_different_length_are_no_samples(parts: int) -> None:
    made = source(XY, format="raw", options={"dtype": "<i4"})
    for part in range(parts):
        with pytest.raises(FormatError, match="k0: x has 100 samples, y has 99 samples"):
            read(made, [raw(100), raw(99)], Visit(part, parts, 0, 0))


def test_a_field_may_be_of_another_format_and_dtype() -> None:
    fields = {"x": XY["x"], "y": {"url": XY["y"], "options": {"dtype": "<i2"}}}
    made = source(fields, format="raw", options={"dtype": "<i4"})
    labels = np.arange(4, dtype="<i2").tobytes()
    found = read(made, [raw(4), labels], Visit(0, 1, 0, 0))
    assert [(int(s["x"]), s["y"].dtype.str, start) for s, start, _ in found] == [
        (n, "<i2", n) for n in range(4)
    ]


def test_members_with_several_fields_name_them_after_theirs(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs growcache[image]")
    (tmp_path / "cat").mkdir()
    image.new("RGB", (2, 2)).save(tmp_path / "cat" / "a.png")
    photo = (tmp_path / "cat" / "a.png").read_bytes()
    fields = {
        "photo": {"url": "s3://b/cat/{k}.png", "format": "image"},
        "note": {"url": "s3://b/cat/{k}.txt", "format": "bytes"},
    }
    first = Held(photo, "cat/a.png")
    first.others = [Held(b"hello", "cat/a.txt")]
    ((sample, _, _),) = asyncio.run(open_source(source(fields)).read(first, Visit(0, 1, 0, 0)))
    assert sample == {"photo_image": photo, "photo_label": "cat", "note": b"hello"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"x": "s3://b/x.npy"}, r"fields.x.url: expected placeholders such as {k}"),
        ({"x": "s3://b/{k}/*.npy"}, r"fields.x.url: .* no wildcards"),
        ({"x": "s3://{k}/x.npy"}, r"fields.x.url: expected placeholders in the key"),
        ({"x": "s3://b/{k.npy"}, r"fields.x.url: expected placeholders such as"),
        ({"x": "a/{k}", "y": "b/{k}_{r}"}, r"fields: .* found {k} and {k}, {r}"),
        ({"x": {"url": "a/{k}", "fromat": "npy"}}, r"unknown key source.fields.x.fromat; did"),
        ({"x": 3}, r"fields.x: expected a mapping"),
    ],
)
def test_fields_that_cannot_be_meant(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({"source": {"fields": fields}})


def test_fields_are_not_beside_a_url_and_come_through_messages() -> None:
    with pytest.raises(
        ConfigError, match=r"(?m)^config: source: name url or fields, not both$"
    ):
        load_config({"source": {"fields": XY, "url": "s3://b/*"}})
    config = load_config({"source": {"fields": XY}})
    assert config.sources[0].url == ("s3://b/d/x_*.npy", "s3://b/d/y_*.npy")
    assert Config.model_validate(config.model_dump(mode="json")) == config
    assert list(config.sources[0].fields) == ["x", "y"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"format": "jsonl"}, "source.fields.x: objects of format jsonl are cut by bytes"),
        ({"fields": {**XY, "z": {"url": "s3://b/{k}", "options": {"axis": 0}}}}, "x, y to be read whole"),
    ],
)  # fmt: skip
def test_formats_that_do_not_go_together(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_source(SourceConfig.model_validate({"fields": XY, **more}))


def test_a_field_called_token_is_no_secret() -> None:
    load_config({"source": {"fields": {"token": "s3://bucket/tokens_{k}.npy"}}})
    message = "no object matches s3://bucket/tokens_{k}.npy"
    assert str(ConfigError(message)) == message


# ------------------------------------------------------------------------------ services


def chunks(folder: Path, count: int = 6, rows: int = 12) -> dict[str, str]:
    """Chunks of a series and their targets, as ``train_x_0.npy`` and ``train_y_0.npy``."""
    folder.mkdir()
    for k in range(count):
        n = np.arange(k * rows, (k + 1) * rows)
        np.save(folder / f"train_x_{k}.npy", np.repeat(n[:, None], 3, 1).astype("<f4"))
        np.save(folder / f"train_y_{k}.npy", n)
    return {name: f"{folder}/train_{name}_{{k}}.npy" for name in "xy"}


def test_partners_are_listed_soon_after_one_another(tmp_path: Path) -> None:
    fields = {}
    for name in "xy":
        (tmp_path / name).mkdir()
        for k in range(3000):
            (tmp_path / name / f"{k:04d}.npy").touch()
        fields[name] = f"{tmp_path}/{name}/{{k}}.npy"
    store = open_store(source(fields))
    stores = [entry.store for page in store.pages() for entry in page]
    assert len(stores) == 6000
    assert abs(np.cumsum(np.array(stores) * 2 - 1)).max() <= 2000


def of_fields(path: Path, fields: dict[str, str], **sections: dict[str, Any]) -> Path:
    """Write a config without a URL."""
    own = {"fields": fields, "options": {"axis": 0}, **sections.pop("source", {})}
    config = write_config(path, "", source=own, **sections)
    config.write_text(config.read_text().replace("  url: ''\n", ""))
    return config


def test_rows_and_their_targets_are_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = chunks(tmp_path / "data")
    config = of_fields(tmp_path / "c.yaml", fields)
    (tmp_path / "data" / "train_x_9.npy").touch()
    code, errors = run(config, "--until-full")
    assert code == 2
    assert "source.fields: 1 of the objects lack a field: " in errors
    assert "train_x_9.npy (no y)" in errors
    assert run(config, "--until-full", "--set=source.on_missing=skip") == (0, "")
    with Snapshot.take(tmp_path / "c") as snapshot:
        samples = [snapshot[i] for i in range(len(snapshot))]
        keys = {snapshot.origin(i).key.rpartition("/")[2] for i in range(len(snapshot))}
    assert sorted(int(sample["y"]) for sample in samples) == list(range(72))
    assert all((sample["x"] == sample["y"]).all() for sample in samples)
    assert keys == {f"train_x_{k}.npy" for k in range(6)}
    found = read_status(tmp_path / "c")
    assert (found.complete, found.holes) == (True, 0)
    assert (found.objects, found.unmatched) == (7, 1)
    assert refetched(tmp_path, capsys)[:2] == (0, "equal")
    partner = Path(sample_at(tmp_path / "c", "0:0").origin.key.replace("_x_", "_y_"))
    os.utime(partner, (0, 0))  # as with the first member, whatever it holds now
    code, verdict, reason = refetched(tmp_path, capsys)
    assert (code, verdict) == (1, "changed")
    assert f"{partner} was rewritten since it was listed" in reason
    partner.unlink()
    assert refetched(tmp_path, capsys) == (1, "gone", f"{partner} does not exist")


def refetched(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    code = refetch_sample(folder / "c", "0:0", None, json=True)
    said = json.loads(capsys.readouterr().out)
    return code, said["refetched"], said["why"]


def test_labels_strata_and_a_split_by_a_label_are_those_of_the_first_field(
    tmp_path: Path,
) -> None:
    """Of twelve chunks of three subjects every fourth is of a rare kind, and the last unknown."""
    fields = chunks(tmp_path / "data", count=13)
    rows = [
        f"train_x_{k}.npy,s{k // 4},{'rare' if k % 4 == 3 else 'common'}" for k in range(12)
    ]
    (tmp_path / "labels.csv").write_text("\n".join(["path,subject,kind", *rows]))
    split = {"group": {"label": "subject"}, "fractions": {"a": 0.6, "b": 0.4}, "use": "a"}
    table = {"url": f"{tmp_path}/labels.csv", "key": "path", "columns": ["subject", "kind"]}
    config = of_fields(
        tmp_path / "c.yaml",
        fields,
        source={"labels": table, "on_missing": "skip"},
        split=split,
        sampling={"strata": {"by": "kind", "weights": "balanced"}},
    )
    assert run(config, "--until-full") == (0, "")
    with Snapshot.take(tmp_path / "c") as snapshot:
        samples = [snapshot[i] for i in range(len(snapshot))]
        keys = [snapshot.origin(i).key for i in range(len(snapshot))]
    numbers = [int(key.rpartition("_")[2].removesuffix(".npy")) for key in keys]
    for k, sample in zip(numbers, samples, strict=True):
        assert sample.keys() == {"x", "y", "subject", "kind", "_weight"}
        assert (sample["x"] == sample["y"]).all()
        assert int(sample["y"]) // 12 == k
        rare = k % 4 == 3
        assert (sample["subject"], sample["kind"]) == (f"s{k // 4}", ["common", "rare"][rare])
        assert float(sample["_weight"]) == pytest.approx(0.5 if rare else 1.5)
    subsets = Split(SplitConfig.model_validate(split))
    mine = {f"s{n}" for n, place in enumerate(subsets.places(["s0", "s1", "s2"])) if place == 0}
    assert {str(sample["subject"]) for sample in samples} == mine
    assert 0 < len(mine) < 3
    found = read_status(tmp_path / "c")
    assert (found.complete, found.holes, found.unmatched) == (True, 0, 1)
    assert refetch_sample(tmp_path / "c", "0:0", None, json=False) == 0
