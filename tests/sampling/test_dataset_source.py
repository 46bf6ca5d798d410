"""``source.dataset``: a map-style Dataset becomes a growing cache."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml

import growcache
from growcache.cli.cli import main
from growcache.config_text import load_config
from growcache.errors import CacheError, ConfigError, FormatError
from growcache.formats.dataset import DatasetFormat, as_array, as_fields, open_dataset
from growcache.numpy import EpochLoader
from growcache.usercode import Maker
from tests.sampling.services import run, service, status, wait_until

MODULE = """
import os
import time
from pathlib import Path

import numpy as np


class Recordings:
    def __init__(self, count=120, bad=None, hangs=None):
        self.count, self.bad, self.hangs = count, bad, hangs

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError("a bad trailer")
        if index == self.hangs and not Path(os.environ["RELEASED"]).exists():
            time.sleep(600)
        return np.full((4, 3), index, np.float32), index % 5


def make(count=120, **more):
    return Recordings(count, **more)


def named(count=60):
    return [{"image": np.zeros((2 + i % 3, 2), "u1"), "text": f"no {i}", "n": i} for i in range(count)]


def breaks():
    raise OSError("no such bucket")


def no_dataset():
    return iter([1, 2])


def targets(count=20):
    return [
        {"id": i, "boxes": [[i] * 4] * (i % 3), "labels": [1, 2, 3] * ((i + 1) % 2)}
        for i in range(count)
    ]


rows = [[i, 2.5] for i in range(30)]
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_dataset.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path.cwd())]))
    monkeypatch.setenv("RELEASED", str(tmp_path / "released"))


def written(
    tmp_path: Path, dataset: str = "my_dataset:make", name: str = "c", **sections: Any
) -> Path:
    values: dict[str, dict[str, Any]] = {
        "source": {"dataset": dataset, **sections.pop("source", {})},
        "sampling": {"workers": 1, "shard_samples": 8, **sections.pop("sampling", {})},
        "cache": {
            "path": str(tmp_path / name),
            "max_bytes": "20MB",
            "min_free": 0,
            **sections.pop("cache", {}),
        },
        **sections,
    }
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def cached(path: Path, **options: Any) -> dict[str, Any]:
    """All that is cached, as one batch."""
    count = status(path).samples
    with EpochLoader(
        path, batch_size=count, min_samples=count, shuffle=False, **options
    ) as loader:
        (batch,) = loader
        return dict(batch)


def test_every_index_is_a_sample_of_a_growing_cache(tmp_path: Path) -> None:
    assert run(written(tmp_path), "--until-full") == (0, "")
    found = status(tmp_path / "c")
    assert (found.population, found.samples, found.holes) == (120, 120, 0)
    assert (found.complete, found.coverage) == (True, 1.0)
    batch = cached(tmp_path / "c")
    first = batch["0"][:, 0, 0]
    assert sorted(first.tolist()) == list(range(120))
    assert first.tolist() != list(range(120))
    assert batch["0"].dtype == np.float32
    assert batch["0"].shape == (120, 4, 3)
    assert np.array_equal(batch["1"], first % 5)


def test_a_bad_index_is_a_hole_that_names_index_type_and_line(tmp_path: Path) -> None:
    config = written(tmp_path, source={"options": {"bad": 7}}, sampling={"max_skipped": 0.5})
    assert run(config, "--until-full")[0] == 0
    found = status(tmp_path / "c")
    assert (found.population, found.samples, found.holes) == (120, 119, 1)
    holes = [path.read_text() for path in (tmp_path / "c/shards").glob("*.json")]
    line = MODULE.split("a bad trailer")[0].count("\n") + 1
    words = (
        f"my_dataset:make raised ValueError: a bad trailer at my_dataset.py:{line} on index 7"
    )
    assert sum(words in text for text in holes) == 1


@pytest.mark.slow
def test_a_bad_first_index_does_not_stop_the_others(tmp_path: Path) -> None:
    config = written(tmp_path, source={"options": {"bad": 0}}, sampling={"max_skipped": 0.5})
    assert run(config, "--until-full")[0] == 0
    assert status(tmp_path / "c").samples == 119


@pytest.mark.slow
def test_a_hanging_index_is_set_aside_and_the_others_come(tmp_path: Path) -> None:
    config = written(
        tmp_path, source={"options": {"hangs": 50}}, sampling={"timeout_seconds": 2}
    )
    with service(config) as process:
        wait_until(lambda: status_samples(tmp_path / "c") == 119)
        (tmp_path / "released").touch()
        wait_until(lambda: status_samples(tmp_path / "c") == 120)
        assert process.poll() is None
    assert status(tmp_path / "c").holes == 0


def status_samples(path: Path) -> int:
    try:
        return status(path).samples
    except CacheError:
        return 0


def test_dicts_texts_and_values_of_different_shapes(tmp_path: Path) -> None:
    assert run(written(tmp_path, "my_dataset:named"), "--until-full") == (0, "")
    batch = cached(tmp_path / "c", ragged="list")
    rows = zip(batch["image"], batch["text"], batch["n"].tolist(), strict=True)
    assert all(x.shape == (2 + n % 3, 2) and text == f"no {n}" for x, text, n in rows)


def test_a_sequence_of_a_module_with_names(tmp_path: Path) -> None:
    config = written(tmp_path, "my_dataset:rows", source={"names": ["n", "half"]})
    assert run(config, "--until-full") == (0, "")
    batch = cached(tmp_path / "c")
    assert sorted(batch["n"].tolist()) == list(range(30))
    assert set(batch["half"].tolist()) == {2.5}


def test_empty_lists_are_values_of_ragged_fields(tmp_path: Path) -> None:
    assert run(written(tmp_path, "my_dataset:targets"), "--until-full") == (0, "")
    assert (status(tmp_path / "c").samples, status(tmp_path / "c").holes) == (20, 0)
    batch = cached(tmp_path / "c", ragged="list")
    for i, boxes, labels in zip(batch["id"], batch["boxes"], batch["labels"], strict=True):
        assert (boxes.dtype, boxes.shape) == (np.int64, (i % 3, 4))
        assert (labels.dtype, labels.shape) == (np.int64, ((i + 1) % 2 * 3,))


def test_values_of_dicts_in_dicts_have_names_with_dots() -> None:
    target = {"boxes": [[1, 2]], "info": {"id": 7}}
    assert as_fields((5, target), None) == {"0": 5, "1.boxes": [[1, 2]], "1.info.id": 7}
    assert list(as_fields({"target": target}, ["target"])) == ["target.boxes", "target.info.id"]
    with pytest.raises(ValueError, match=r"two values have the name 'a\.b'"):
        as_fields({"a": {"b": 1}, "a.b": 2}, None)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("dtype", "as_dtype"),
    [("bfloat16", "float32"), ("float8_e4m3fn", "float16"), ("float8_e5m2", "float16")],
)
def test_tensors_of_narrow_floats_are_widened(dtype: str, as_dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1.5, -0.25, 448.0, float("inf")]).to(getattr(torch, dtype))
    array = as_array(tensor)
    assert array.dtype == as_dtype
    assert np.array_equal(array, tensor.float().numpy(), equal_nan=True)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"x": 1.0, "path": None}, "'path' is None,"),
        ({"x": 1.0, "words": ["a", "b"]}, "'words' is an array of str,"),
        ({"x": 1.0, "when": np.datetime64("2026-01-01")}, "'when' is a date,"),
        ((1.0, {1, 2}), "'1' is a set,"),
    ],
)
def test_a_value_that_no_cache_holds_is_named(value: object, found: str) -> None:
    dataset = DatasetFormat(Maker("my:rows", None, "", list), [value], None, 9.0)
    reader = cast("Any", SimpleNamespace(entry=SimpleNamespace(key="0")))
    with pytest.raises(
        FormatError, match=f"my:rows on index 0: {found} which cannot be cached"
    ):
        asyncio.run(dataset.read(reader, cast("Any", None)))


@pytest.mark.slow
def test_split_by_blocks_of_indices_strata_and_labels(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("index,subject\n" + "".join(f"{i},s{i // 60}\n" for i in range(120)))
    subsets = {}
    for use in ("train", "val"):
        split = {"group": {"block": 10}, "fractions": {"train": 0.7, "val": 0.3}, "use": use}
        source = {"labels": {"url": str(table), "key": "index", "columns": ["subject"]}}
        config = written(tmp_path, name=use, split=split, source=source)
        assert run(config, "--until-full") == (0, "")
        batch = cached(tmp_path / use)
        subsets[use] = batch["0"][:, 0, 0].astype(int)
        assert [int(s[1:]) for s in batch["subject"]] == (subsets[use] // 60).tolist()
    blocks = {use: set((found // 10).tolist()) for use, found in subsets.items()}
    assert not blocks["train"] & blocks["val"]
    assert blocks["train"]
    assert sorted(np.concatenate(list(subsets.values())).tolist()) == list(range(120))
    strata = {"by": "subject", "weights": "balanced"}
    config = written(tmp_path, name="strata", source=source, sampling={"strata": strata})
    assert run(config, "--samples", "60")[0] == 0
    assert "_weight" in cached(tmp_path / "strata")


@pytest.mark.slow
def test_a_sample_can_be_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    config = written(tmp_path)
    assert run(config, "--until-full") == (0, "")
    peek = ["peek", str(tmp_path / "c"), "--refetch", "--sample", "0:0"]
    assert main([*peek, "--config", str(config)]) == 0
    assert "is equal: " in capsys.readouterr().out
    assert main(peek) == 2
    assert "names code that would run here" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_can_be_replayed_also_after_the_cache_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    config, journal = written(tmp_path), tmp_path / "run.journal"
    assert run(config, "--until-full") == (0, "")
    with EpochLoader(tmp_path / "c", batch_size=16, min_samples=100, journal=journal) as loader:
        batches = [batch["0"] for batch in loader]
    for _ in range(2):
        again = growcache.replay(config, journal, 2).batch
        assert np.array_equal(again["0"], batches[2])
        assert main(["replay", str(config), str(journal), "--step", "2"]) == 0
        shutil.rmtree(tmp_path / "c", ignore_errors=True)


@pytest.mark.slow
def test_other_arguments_or_source_are_another_cache(tmp_path: Path) -> None:
    assert run(written(tmp_path), "--until-full") == (0, "")
    assert run(written(tmp_path), "--until-full") == (0, "")
    code, errors = run(written(tmp_path, source={"options": {"count": 121}}), "--until-full")
    assert (code, "source.options" in errors) == (2, True)
    text = MODULE.replace("index % 5", "index % 6")
    (tmp_path / "my_dataset.py").write_text(text)
    code, errors = run(written(tmp_path), "--until-full")
    assert (code, "another configuration" in errors or "source" in errors) == (2, True)


@pytest.mark.slow
def test_a_dataset_that_grew_is_listed_anew(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("40")
    counting = (
        MODULE + "\ndef grows():\n    return make(int(open(__file__[:-13] + 'count').read()))\n"
    )
    (tmp_path / "my_dataset.py").write_text(counting)
    config = written(tmp_path, "my_dataset:grows")
    assert run(config, "--until-full") == (0, "")
    (tmp_path / "count").write_text("50")
    assert run(config, "--until-full", "--refresh") == (0, "")
    assert sorted(cached(tmp_path / "c")["0"][:, 0, 0].tolist()) == list(range(50))


@pytest.mark.parametrize(
    ("dataset", "source", "words"),
    [
        ("my_dataset:mak", {}, "did you mean make?"),
        ("my_dataset", {}, "expected package.module:function"),
        ("my_dataset:named", {"options": {"size": 3}}, "source.options do not fit"),
        ("my_dataset:rows", {"options": {"size": 3}}, "takes no options"),
        ("my_dataset:breaks", {}, "raised OSError: no such bucket at my_dataset.py:"),
        ("my_dataset:no_dataset", {}, "expected a map-style Dataset"),
        ("my_dataset:make", {"options": {"count": 0}}, "is 0"),
        ("my_dataset:make", {"url": "a/*.npy"}, "dataset or url, not both"),
        ("my_dataset:make", {"fields": {"x": "a/{k}"}}, "need objects of a store"),
        ("pickled:mine", {}, "give from_dataset a function of a module"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dataset: str,
    source: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("my_dataset", None)
    with pytest.raises(ConfigError, match=re.escape(words)):
        open_dataset(load_config({"source": {"dataset": dataset, **source}}).sources[0])


def test_a_service_ends_with_the_line_of_a_maker_that_raises(tmp_path: Path) -> None:
    code, errors = run(written(tmp_path, "my_dataset:breaks"), "--until-full")
    assert (code, "no such bucket at my_dataset.py:" in errors) == (2, True), errors


def test_budgets_and_blocks_need_what_they_count() -> None:
    source = {"dataset": "my_dataset:make"}
    with pytest.raises(ConfigError, match="does not see the bytes"):
        load_config({"source": source, "sampling": {"max_egress": "1GB"}})
    split = {"group": {"block": 10}, "fractions": {"a": 1.0}, "use": "a"}
    with pytest.raises(ConfigError, match="counts the indices"):
        load_config({"source": {"url": "a/*.npy"}, "split": split})


@pytest.mark.slow
def test_a_dataset_is_mixed_with_a_source_of_objects(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    for i in range(40):
        np.save(folder / f"{i}.npy", np.full((4, 3), 1000 + i, np.float32))
    path = written(tmp_path)
    values = yaml.safe_load(path.read_text())
    values["source"] = [
        {"dataset": "my_dataset:Recordings", "names": ["x", "y"], "weight": 1},
        {"url": f"{folder}/*.npy", "format": "npy", "options": {}, "weight": 1},
    ]
    values["sampling"]["transform"] = "my_mixing:alike"
    (tmp_path / "my_mixing.py").write_text(
        "def alike(sample):\n    return {'x': sample['x']}\n"
    )
    path.write_text(yaml.safe_dump(values))
    assert run(path, "--samples", "60")[0] == 0
    values = cached(tmp_path / "c")["x"][:, 0, 0]
    assert 20 <= (values < 1000).sum() <= len(values) - 20


@pytest.mark.slow
def test_calls_overlap(tmp_path: Path) -> None:
    slow = MODULE.replace("return np.full", "time.sleep(0.1)\n        return np.full")
    (tmp_path / "my_dataset.py").write_text(slow)
    config = written(tmp_path, sampling={"concurrency": 16})
    began = time.monotonic()
    assert run(config, "--until-full") == (0, "")
    assert time.monotonic() - began < 12  # 12 s one after the other, 0.75 s in 16 threads


@pytest.mark.slow
def test_an_index_is_purged_for_good(tmp_path: Path) -> None:
    config = written(tmp_path)
    assert run(config, "--until-full") == (0, "")
    assert main(["purge", str(tmp_path / "c"), "7", "19"]) == 0
    assert run(config, "--until-full") == (0, "")
    found = set(cached(tmp_path / "c")["0"][:, 0, 0].tolist())
    assert found == set(range(120)) - {7, 19}


@pytest.mark.slow
def test_nodes_draw_indices_of_their_own(tmp_path: Path) -> None:
    found = []
    for node in range(2):
        nodes = {"node": node, "nodes": 2}
        config = written(tmp_path, name=f"c{node}", sampling=nodes)
        assert run(config, "--until-full") == (0, "")
        found.append(set(cached(tmp_path / f"c{node}")["0"][:, 0, 0].tolist()))
    assert found[0].isdisjoint(found[1])
    assert found[0] | found[1] == set(range(120))
    assert 30 < len(found[0]) < 90
