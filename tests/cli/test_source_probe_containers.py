"""What is proposed for containers, by what an object holds."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from growcache.cli.cli import main
from growcache.cli.detect_format import detect_format
from growcache.cli.init_choices import InitOptions
from growcache.cli.init_questions import ask_for_choices
from growcache.cli.prove_candidate import ProbedSource
from growcache.cli.source_probe import probe_source
from growcache.config_source import SourceConfig
from growcache.config_text import load_config
from tests.formats.test_tar import archive
from tests.formats.test_tfrecord import example, file

h5py = pytest.importorskip("h5py")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
zarr = pytest.importorskip("zarr")

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = 5000


def proposed(url: object) -> ProbedSource:
    return probe_source(SourceConfig(url=(str(url),)))


def runs(tmp_path: Path, url: object) -> None:
    """What is proposed is written, and the service takes it."""
    config, cache = tmp_path / "c.yaml", tmp_path / "cache"
    words = ["init", str(config), "--yes", "--force", "--url", str(url), "--cache", str(cache)]
    assert main(words) == 0
    assert main(["run", str(config), "--samples", "4"]) == 0


def written(path: Path, **datasets: Any) -> Path:
    with h5py.File(path, "w") as opened:
        for name, values in datasets.items():
            opened[name.replace("__", "/")] = values
    return path


def test_datasets_of_equal_length_are_fields_of_one_sample(tmp_path: Path) -> None:
    x, y = np.zeros((ROWS, 64, 8), "f4"), np.zeros(ROWS, "i8")
    path = written(tmp_path / "a.h5", eeg__x=x, eeg__y=y, eeg__z=y[:5], other=y)
    found = proposed(path)
    assert found.format == "hdf5"
    assert found.options == {"datasets": ["eeg/x", "eeg/y"], "axis": 0}
    assert (found.samples, found.sample_bytes) == (ROWS, 64 * 8 * 4 + 8)
    for name in ("eeg/x float32[5000, 64, 8]", "eeg/z int64[5]", "other int64[5000]"):
        assert name in found.findings[0]
    runs(tmp_path, path)


def test_a_recording_is_cut_into_windows_and_a_small_one_is_not(tmp_path: Path) -> None:
    long = written(tmp_path / "a.h5", signal=np.zeros((400_000, 4), "f4"))
    assert proposed(long).options == {"datasets": ["signal"], "window": 4096}
    small = written(tmp_path / "b.h5", image=np.zeros((64, 64), "u1"), label=3, name="é")
    assert proposed(small).options == {"datasets": ["image", "label", "name"]}


def test_texts_are_samples_and_a_broken_file_stays_bytes(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5", words=["a", "b"])
    found = proposed(path)
    assert (found.format, found.options) == ("hdf5", {"datasets": ["words"], "axis": 0})
    runs(tmp_path, path)
    (tmp_path / "b.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(5000))
    broken = proposed(tmp_path / "b.h5")
    assert broken.format == "bytes"
    assert "cannot be read as hdf5" in broken.findings[0]


def test_without_the_library_the_datasets_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "a.h5", x=np.zeros((ROWS, 64, 8), "f4"))
    monkeypatch.setitem(sys.modules, "h5py", None)
    asked = []

    def answer(question: str, default: str = "", **_: Any) -> str:
        asked.append((question, default))
        return "{datasets: [x], axis: 0}" if question.startswith("Options") else default

    found = ask_for_choices(InitOptions(url=str(path)), answer)
    assert (found.format, found.options) == ("hdf5", {"datasets": ["x"], "axis": 0})
    assert ("Options of the format", "{}") in asked
    said = " ".join(capsys.readouterr().err.split())
    assert "Name its datasets in options, as {datasets: [x, y], axis: 0}" in said
    assert "pip install 'growcache[hdf5]'" in said
    config = tmp_path / "c.yaml"
    assert main(["init", str(config), "--yes", "--url", str(path)]) == 0
    assert load_config(config).sources[0].format == "hdf5"
    assert "pip install 'growcache[hdf5]'" in capsys.readouterr().err


def test_arrays_of_records_text_and_bfloat16(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    records = np.zeros(20, [("t", "<M8[ms]"), ("name", "<U4")])
    for name, array, options, said in (
        ("records", records, {"axis": 0}, "20 records of t, name"),
        ("text", np.array(["a", "b"] * 10), {"axis": 0}, "20 records of text"),
        ("small", np.zeros((100, 4096), ml_dtypes.bfloat16), {"axis": 0, "dtype": "bfloat16"}, "bfloat16[100, 4096]"),
    ):  # fmt: skip
        np.save(tmp_path / f"{name}.npy", array)
        found = proposed(tmp_path / f"{name}.npy")
        assert (found.format, dict(found.options)) == ("npy", options)
        assert said in found.findings[0]


def test_a_table(tmp_path: Path) -> None:
    table = pa.table({"x": np.arange(ROWS), "text": ["é"] * ROWS})
    pq.write_table(table, tmp_path / "a.parquet")
    found = proposed(tmp_path / "a.parquet")
    assert (found.format, found.options, found.samples) == ("parquet", {}, ROWS)
    assert "5,000 rows with x, text" in found.findings[0]


def test_a_table_with_columns_that_cannot_be_read(tmp_path: Path) -> None:
    rows = [{"a": "text" * 200, "b": [b"%d" % n]} for n in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = proposed(tmp_path / "a.parquet")
    assert found.options == {"columns": ["a"]}
    assert "1 other left out: column 'b' has type list" in found.findings[1]
    runs(tmp_path, tmp_path / "a.parquet")


@pytest.mark.parametrize("version", [2, 3])
def test_arrays_of_zarr(tmp_path: Path, version: int) -> None:
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=version)
    for name, shape, chunks in (("x", (3000, 16), (96, 16)), ("y", (3000,), (500,))):
        group.create_array(name, shape=shape, chunks=chunks, dtype="f4")[:] = 1
    found = proposed(f"{tmp_path}/a.zarr/**")
    assert (found.format, found.options) == ("zarr", {"window": 96, "beside": ["y"]})
    assert found.url == f"{tmp_path}/a.zarr/x/**"
    assert 28 <= found.samples <= 33
    assert "Other arrays: y float32[3000]" in " ".join(found.findings)
    only = f"{tmp_path}/a.zarr/x/**"
    assert proposed(only).options == {"window": 96}
    if version == 3:
        runs(tmp_path, only)
    files = "zarr.json" if version == 3 else ".z*"
    nothing = proposed(f"{tmp_path}/a.zarr/x/{files}")
    assert nothing.format == "zarr"
    assert "source.url must match the chunks" in nothing.findings[1]


def test_databases_of_an_lmdb_file(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "d"), max_dbs=2, map_size=1 << 24) as env:
        for name, count in ((b"labels", 3), (b"images", 200)):
            with env.begin(write=True, db=env.open_db(name)) as txn:
                for n in range(count):
                    txn.put(b"%d" % n, b"v" * 100)
    found = proposed(f"{tmp_path}/d/*")  # a lock file is among them
    assert (found.format, found.options, found.samples) == ("lmdb", {"database": "images"}, 200)
    assert "images (200), labels (3)" in found.findings[1]
    assert found.url == f"{tmp_path}/d/data.mdb"
    runs(tmp_path, tmp_path / "d" / "data.mdb")


LINES = b"".join(b'{"a": %d, "b": "text"}\n' % n for n in range(5_000))
PACKED = {
    "a.jsonl.gz": (gzip.compress(LINES), "jsonl", "gzip"),
    "a.tgz": (gzip.compress(archive([("0.txt", b"1"), ("1.txt", b"2")])), "tar", "gzip"),
    "a.tfrecord.gz": (
        gzip.compress(file([example({"x": [1.0] * 500})] * 9)),
        "tfrecord",
        "gzip",
    ),
    "a.jsonl.zst": (b"\x28\xb5\x2f\xfd" + bytes(9), "jsonl", "zstd"),  # too little to see
}


@pytest.mark.parametrize("name", PACKED)
def test_compressed_objects(tmp_path: Path, name: str) -> None:
    data, form, kind = PACKED[name]
    assert detect_format(name, data[:10_000]) == (form, kind)
    if kind == "zstd":
        return
    (tmp_path / name).write_bytes(data)
    found = proposed(tmp_path / name)
    assert (found.format, found.options) == (form, {})  # the name says how it is compressed
    assert f"Compressed by {kind}" in found.findings[0]
    if form == "jsonl":
        assert found.samples == 5_000
        runs(tmp_path, tmp_path / name)


def test_others_stay_bytes() -> None:
    for name, data in (
        ("a.npy.gz", gzip.compress(b"\x93NUMPY")),
        ("a.gz", gzip.compress(gzip.compress(LINES))),
    ):
        assert detect_format(name, data) == ("", "")
