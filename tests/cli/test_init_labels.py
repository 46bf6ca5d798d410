"""Labels of a table that is found with the objects, and a split by the subjects that keys name."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import growcache
from growcache.cli.cli import main
from growcache.cli.init_choices import InitOptions
from growcache.cli.init_questions import ask_for_choices
from growcache.cli.propose_labels import propose_labels, propose_split
from growcache.cli.source_probe import probe_source
from growcache.cli.table_probe import parse_cells
from growcache.config_source import SourceConfig
from tests.servers import Bucket

SUBJECTS = [f"sub-{n:02d}" for n in range(6)]
KEYS = [f"data/{subject}/{subject}_eeg.npy" for subject in SUBJECTS]
SUBJECT = "(?P<key>sub-[0-9A-Za-z]+)"


def columns_of(*cells: str) -> dict[str, list[str]]:
    return {"id": list(cells), "state": ["rest", "task"] * 3, "age": [str(n) for n in range(6)]}


@pytest.mark.parametrize(
    ("cells", "match"),
    [
        (KEYS, None),
        ([key.removeprefix("data/") for key in KEYS], None),
        ([key.rpartition("/")[2] for key in KEYS], "name"),
        ([f"{subject}_eeg" for subject in SUBJECTS], "stem"),
        (SUBJECTS, SUBJECT),
    ],
)
def test_the_key_column_is_the_one_that_has_the_names_of_objects(
    cells: list[str], match: str | None
) -> None:
    found = propose_labels("t.csv", columns_of(*cells), KEYS, "data/")
    assert found is not None
    assert found.share == 1
    matching = {"match": match} if match else {}
    assert found.settings == {
        "url": "t.csv", "key": "id", "columns": ["state", "age"], **matching, "classes": "auto",
    }  # fmt: skip


def test_a_table_of_other_things_is_none_of_labels() -> None:
    assert propose_labels("t.csv", columns_of(*"abcdef"), KEYS) is None
    twice = columns_of(*(SUBJECTS[:5] + SUBJECTS[:1]))
    assert propose_labels("t.csv", twice, KEYS) is None
    assert propose_labels("t.csv", {"id": SUBJECTS}, KEYS) is None
    taken = ("state", "age")  # fields of the samples
    assert propose_labels("t.csv", columns_of(*SUBJECTS), KEYS, taken=taken) is None


def test_columns_with_gaps_or_free_text_are_no_labels() -> None:
    table = columns_of(*SUBJECTS)
    table |= {"sex": ["f", "m", "n/a", "f", "m", "f"], "note": list("abcdef")}
    found = propose_labels("t.tsv", table, KEYS)
    assert found is not None
    assert found.settings["columns"] == ["state", "age"]


def test_a_part_of_the_objects_may_have_rows() -> None:
    table = {"id": SUBJECTS[:4], "age": ["1", "2", "3", "4"]}
    found = propose_labels("t.csv", table, KEYS)
    assert found is not None
    assert "67% of the objects have a row in t.csv" in found.sentence
    assert "classes" not in found.settings


def test_a_split_needs_subjects_enough_in_every_key() -> None:
    found = propose_split(KEYS)
    assert found is not None
    assert (found.groups, found.settings["use"]) == (6, "train")
    assert propose_split(KEYS[:3]) is None
    assert propose_split([*KEYS, "data/README.npy"]) is None
    assert propose_split([f"a/{n}.npy" for n in range(9)]) is None


ROWS = [{"id": "a", "n": 1}, {"id": "b", "n": 2}]


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("csv", b"\xef\xbb\xbfid,n\na,1\nb,2\nbroken\n"),
        ("tsv", b"id\tn\na\t1\nb\t2\n"),
        ("csv.gz", gzip.compress(b"id,n\r\na,1\r\nb,2\r\n", mtime=0)),
        ("jsonl", b"\n".join(json.dumps(row).encode() for row in ROWS)),
    ],
)
def test_cells_of_a_table(kind: str, data: bytes) -> None:
    assert parse_cells(kind, data) == {"id": ["a", "b"], "n": ["1", "2"]}


def test_cells_of_parquet() -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = pa.table({"id": ["a", "b", None], "n": [1, 2, 3], "many": [[1], [2], [3]]})
    file = io.BytesIO()
    pq.write_table(rows, file)
    cells = parse_cells("parquet", file.getvalue())
    assert cells == {"id": ["a", "b", ""], "n": ["1", "2", "3"]}
    assert parse_cells("parquet", b"PAR1") is None


def test_nothing_is_no_table() -> None:
    assert parse_cells("csv", b"id,n\n") is None
    assert parse_cells("jsonl", b"[1]\n") is None


# ------------------------------------------------------------------ a dataset of BIDS


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Recordings of six subjects, and a table of them one folder above."""
    for subject in SUBJECTS:
        folder = tmp_path / "study" / "eeg" / subject
        folder.mkdir(parents=True)
        np.save(folder / f"{subject}_eeg.npy", np.zeros((64, 32, 32), "f4"))
    rows = "".join(f"{name}\t{('rest', 'task')[n % 2]}\n" for n, name in enumerate(SUBJECTS))
    (tmp_path / "study" / "participants.tsv").write_text(f"participant_id\tstate\n{rows}")
    return tmp_path / "study"


def test_a_table_is_looked_for_where_the_objects_are_and_above(recordings: Path) -> None:
    found = probe_source(SourceConfig(url=(f"{recordings}/eeg/**/*.npy",)))
    assert found.labels is not None
    assert found.labels.settings["url"] == f"{recordings}/participants.tsv"
    assert found.labels.settings["match"] == SUBJECT
    assert found.split is not None


def test_a_folder_of_a_bucket_and_a_table_above_it(bucket: Bucket) -> None:
    for name in ("dog", "cat"):
        bucket.put(f"pets/{name}.png", b"\x89PNG\r\n\x1a\n" + bytes(64))
    bucket.put("labels.csv", b"file,kind\ndog.png,1\ncat.png,2\n")
    source = SourceConfig(url=(bucket.url("pets"),), storage_options=bucket.storage_options)
    found = probe_source(source)
    assert found.url == bucket.url("pets/**")
    assert found.labels is not None
    assert found.labels.settings["url"] == bucket.url("labels.csv")
    assert found.timing is not None
    assert found.timing.seconds > 0


@pytest.mark.slow
def test_init_takes_labels_that_all_have_and_the_service_runs(
    recordings: Path, tmp_path: Path
) -> None:
    config, cache = tmp_path / "c.yaml", tmp_path / "cache"
    url = f"{recordings}/**/*.npy"
    assert main(["init", str(config), "--yes", "--url", url, "--cache", str(cache)]) == 0
    text = config.read_text()
    assert yaml.safe_load(text)["split"] is None
    offered = text.split("\n# split: ")[1].splitlines()[0]
    assert yaml.safe_load(offered)["group"] == "(?P<group>sub-[0-9A-Za-z]+)"
    assert main(["run", str(config), "--until-full"]) == 0
    with growcache.Snapshot.take(cache) as snapshot:
        assert snapshot.schema.classes == {"state": ["rest", "task"]}


def answers(**given: str) -> Callable[..., Any]:
    def answer(question: str, default: Any = None, **_: Any) -> Any:
        word = question.split()[0].lower()
        return given.get(word, default)

    return answer


def test_labels_and_a_split_are_asked_for(
    recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = InitOptions(url=f"{recordings}/**/*.npy")
    chosen = ask_for_choices(options, answers(hold="yes"))
    assert chosen.labels is not None
    assert chosen.split is not None
    said = " ".join(capsys.readouterr().err.split())
    assert "Keys name 6 subjects" in said
    assert "Every listed object has a row in" in said
    declined = ask_for_choices(options, answers(use="no"))
    assert (declined.labels, declined.split) == (None, None)


def test_dtype_channels_and_window_are_asked_for(tmp_path: Path) -> None:
    np.arange(200_000, dtype="<i2").tofile(tmp_path / "a.dat")
    asked = answers(type=">i2", values="8", window="500")
    chosen = ask_for_choices(InitOptions(url=f"{tmp_path}/*.dat"), asked)
    assert chosen.options == {"dtype": ">i2", "shape": [8], "window": 500}
    assert chosen.rate == ""  # that of other samples
    assert "The proposal was raw with" in chosen.findings[0]
