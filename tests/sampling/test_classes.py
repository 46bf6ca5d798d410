"""Texts that become numbers: of a table's columns, and of the folders of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.cache.status import read_status
from growcache.cli.redraw_sample import refetch_sample
from growcache.config import Config
from growcache.config_source import LabelsConfig, SourceConfig
from growcache.errors import ConfigError
from growcache.loading.snapshot import Snapshot
from growcache.numpy import EpochLoader
from growcache.sampling.fingerprint import identify
from growcache.sampling.folder_labels import FolderLabels, TableAndFolderLabels
from growcache.sampling.label_table import NO_ROW, KeyedTable, parse_table
from growcache.sampling.labels import Labels
from growcache.sampling.sizing import Sizing
from growcache.schema import Schema
from tests.sampling.services import run, write_config

COLUMNS = ("state", "site", "age")
TABLE = """path,state,site,age
a,task,7,1.5
b,rest,10,2
c,,7,3
d,task,,4
"""


def table(text: str = TABLE) -> KeyedTable:
    return parse_table(text.encode(), "csv", "path", COLUMNS)


def labels(classes: Any, text: str = TABLE) -> Labels:
    wanted = LabelsConfig(url="t.csv", key="path", columns=COLUMNS, classes=classes)
    return Labels([SourceConfig(url=("s3://b/*",), labels=wanted)], [table(text)])


@pytest.mark.parametrize(
    ("classes", "names", "a", "unlabelled"),
    [
        (None, {}, {"state": "task", "site": 7.0, "age": 1.5}, ""),
        ("auto", {"state": ("rest", "task")}, {"state": 1, "site": 7.0, "age": 1.5}, "c"),
        ({"site": "auto"}, {"site": ("7", "10")}, {"state": "task", "site": 0, "age": 1.5}, "d"),
        ({"state": ["task"]}, {"state": ("task",)}, {"state": 0, "site": 7.0, "age": 1.5}, "bc"),
    ],
)  # fmt: skip
def test_cells_become_the_numbers_of_their_classes(
    classes: Any, names: Any, a: dict[str, Any], unlabelled: str
) -> None:
    made = labels(classes)
    assert made.classes == names
    assert made.joined([0], ["a"]) == [a]
    rows = made.rows([0] * 4, list("abcd"))
    assert [key for key, row in zip("abcd", rows, strict=True) if row == NO_ROW] == [
        *unlabelled
    ]
    assert made.texts("state", rows[:1]) == ["task"]
    if unlabelled == "bc":
        said = made.complaint([(0, "b"), (0, "c")], 2, 4)
        assert "in state expected one of task, found 'rest' (b), '' (c)" in said


def test_long_texts_are_no_classes() -> None:
    """Every shard's sidecar has the names."""
    rows = "".join(f"{n},{n}{'x' * 30_000},1,1\n" for n in range(100))
    with pytest.raises(ConfigError, match=r"100 different values of state have 3,000,190 char"):
        labels({"state": "auto"}, f"path,state,site,age\n{rows}")


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ({"age": "auto"}, "expected texts or integers in age, found 1.5"),
        (["rest", "task"], "name the column"),
        ({"stat": "auto"}, "'stat' is not one of the columns"),
        ({"state": [True, False]}, "yes and no in quotes"),
        ({"state": ["a", "a"]}, "no class twice"),
    ],
)
def test_classes_that_cannot_be_meant(classes: Any, words: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=words):
        labels(classes)


def test_mixed_sources_share_their_classes() -> None:
    def made(*classes: Any) -> Labels:
        wanted = [
            LabelsConfig(url="t.csv", key="path", columns=COLUMNS, classes=c) for c in classes
        ]
        sources = [SourceConfig(url=("s3://b/*",), labels=one) for one in wanted]
        return Labels(sources, [table(), table(TABLE.replace("rest", "sleep"))])

    assert made("auto", "auto").classes == {"state": ("rest", "sleep", "task")}
    for classes in (("auto", {"state": ["task"]}), ({"state": ["task"]}, {"state": ["rest"]})):
        with pytest.raises(ConfigError, match=r"name the same"):
            made(*classes)


def test_a_table_and_folders_label_together() -> None:
    folders = FolderLabels(("cat", "dog"))
    both = TableAndFolderLabels(labels(None), folders)  # type: ignore[arg-type]
    keys = ["b", "dog/a", "cat/a"]
    assert both.rows([0] * 3, keys).tolist() == [NO_ROW] * 3
    assert folders.rows([0] * 3, keys).tolist() == [NO_ROW, 1, 0]
    assert "not one of the classes of this cache" in both.complaint([(0, "ape/a")], 1, 2)


def test_a_column_of_classes_in_a_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    for n in range(12):
        np.save(tmp_path / "data" / f"{n}.npy", np.full(4, n, "<f4"))
    rows = "".join(f"{n}.npy,{'task' if n % 3 else 'rest'}\n" for n in range(12))
    (tmp_path / "t.csv").write_text(f"path,state\n{rows}")
    source = {"labels": {"url": str(tmp_path / "t.csv"), "key": "path", "columns": "state",
                         "classes": "auto"}}  # fmt: skip
    sampling = {"strata": {"by": "state", "weights": {"rest": 2, "task": 1}}}
    url = f"{tmp_path}/data/*.npy"
    config = write_config(tmp_path / "c.yaml", url, source=source, sampling=sampling)
    assert run(config, "--until-full") == (0, "")
    with Snapshot.take(tmp_path / "c") as snapshot:
        samples = [snapshot[i] for i in range(len(snapshot))]
        assert snapshot.schema.classes == {"state": ["rest", "task"]}
    assert all(one["state"] == (one["x"][0] % 3 > 0) for one in samples)
    assert EpochLoader(tmp_path / "c", batch_size=2).classes == {"state": ["rest", "task"]}
    assert refetch_sample(tmp_path / "c", "0:0", config, json=False) == 0
    assert refetch_sample(tmp_path / "c", "0:0", None, json=False) == 0
    assert capsys.readouterr().out.count("is equal") == 2


@pytest.mark.slow
def test_folders_become_classes_and_stay_so(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")

    def write(folder: str, number: int) -> None:
        (tmp_path / "d" / folder).mkdir(parents=True, exist_ok=True)
        pixels = image.fromarray(np.full((2, 2, 3), number, np.uint8))
        pixels.save(tmp_path / "d" / folder / f"{number}.png")

    for number, folder in enumerate(["dog", "cat", "dog", "ape"]):
        write(folder, number)
    source = {"format": "image", "options": {"classes": "auto"}, "on_missing": "skip"}
    config = write_config(tmp_path / "c.yaml", f"{tmp_path}/d/*/*.png", source=source)
    assert run(config, "--until-full") == (0, "")
    write("bee", 9)
    assert run(config, "--until-full", "--refresh") == (0, "")
    assert read_status(tmp_path / "c").unmatched == 1
    with Snapshot.take(tmp_path / "c") as snapshot:
        names = snapshot.schema["label"].classes
        for i in range(len(snapshot)):
            assert names[snapshot[i]["label"]] == snapshot.origin(i).key.split("/")[-2]
    assert names == ("ape", "cat", "dog")
    assert refetch_sample(tmp_path / "c", "0:0", None, json=False) == 0
    (tmp_path / "e.yaml").write_text(config.read_text().replace("skip", "error"))
    code, errors = run(tmp_path / "e.yaml", "--until-full", "--refresh")
    assert code == 2
    assert "a folder that is not one of the classes of this cache" in errors


def test_other_folders_are_another_fingerprint(tmp_path: Path) -> None:
    """Their numbers mean other classes: no state resumes there, and no shards are taken over."""
    config = Config.model_validate(
        {"source": {"url": "s3://b/*/*.png"}, "cache": {"path": "c"}}
    )
    schema, sizing = Schema.declared({"label": "int64"}), Sizing(1, 1.0, 0, True, 8)

    def fingerprint(**sizes: Any) -> str:
        return identify(config, schema, sizing, {}, sizes).fingerprint

    one = fingerprint(folder_classes=["cat", "dog"])
    assert one == fingerprint(folder_classes=["cat", "dog"])
    assert one != fingerprint(folder_classes=["ape", "cat", "dog"]) != fingerprint()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"format": "image", "options": {"classes": ["dog", "cat"]}}, "the same list in all"),
        (
            {"labels": {"url": "t.csv", "key": "path", "columns": "label"}},
            "rename the table's column",
        ),
    ],
)
def test_a_label_means_one_class_in_all_sources(other: dict[str, Any], words: str) -> None:
    """It was the number of the list in one source, and of the folders in the other."""
    auto = {"format": "image", "options": {"classes": "auto"}}
    sources = [SourceConfig.model_validate({"url": "s3://b/*", **one}) for one in (auto, other)]
    with pytest.raises(ConfigError, match=words):
        Labels(sources, [None, None])
