"""What ``growcache init`` writes for some forty kinds of source, and that the service runs what it wrote."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import growcache
from growcache.cli.cli import main
from growcache.cli.source_probe import probe_source
from growcache.config_source import SourceConfig
from tests.cli.kinds import KINDS, SLOW

for library in ("h5py", "pyarrow", "zarr", "PIL", "lmdb"):
    pytest.importorskip(library)

pytestmark = pytest.mark.filterwarnings("ignore")

CELLS = {"datasets": {"x": "X", "cell_type": "obs/cell_type/codes"}, "axis": 0}
# What is written as source.format and source.options, and words that the comments have. A url that begins with
# "+" is what follows the given one.
EXPECTED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "npy: arrays, each a sample": ("npy", {}, "", "The whole array is one sample"),
    "npy: rows": ("npy", {"axis": 0}, "", "Each of its 60 rows [28, 28] is a sample"),
    "npy: channels x time": ("npy", {"axis": 1, "window": 2048}, "", "it is taken for time"),
    "npy: time x channels": ("npy", {"window": 2048}, "", "Windows of 2048 rows"),
    "npy: Fortran order": ("npy", {"window": 2048}, "", "in Fortran order"),
    "npz": ("npz", {"axis": 0}, "", "Row i of each array is a sample"),
    "raw: .dat, int16": ("raw", {"dtype": "<i2", "window": 16384}, "", "A guess"),
    "raw: .bin, big-endian float32": ("raw", {"dtype": ">f4", "window": 4096}, "", "big-endian"),
    "raw: .f32": ("raw", {"dtype": "<f4", "window": 4096}, "", "ending of the name says"),
    "hdf5: one dataset": ("hdf5", {"datasets": ["signal"], "window": 2048}, "", "Windows"),
    "hdf5: several datasets": (
        "hdf5", {"datasets": ["images", "labels"], "axis": 0}, "", "mean float32[16, 16]",
    ),
    "hdf5: a group for each sample": ("hdf5", {"group": "data/*"}, "", "Each group of data/*"),
    "MATLAB v7.3": ("hdf5", {"datasets": ["eeg"], "window": 512}, "", "eeg is [16, 20000] in MATLAB"),
    "MATLAB v5": ("growcache.readers:mat", {}, "", "scipy.io.loadmat reads it"),
    "NetCDF-4, packed": ("hdf5", {"datasets": ["t2m", "time"], "axis": 0, "scale": "cf"}, "", "NetCDF-4"),
    "NetCDF-3": ("growcache.readers:netcdf3", {}, "", "nccopy -k nc4"),
    "NWB": (
        "hdf5",
        {
            "datasets": {"ElectricalSeries": "acquisition/ElectricalSeries/data"},
            "window": 4096, "scale": "cf",
        },
        "", "An NWB file",
    ),
    "AnnData, dense": ("hdf5", CELLS, "", "obs/NAME/categories"),
    "AnnData, sparse": ("hdf5", CELLS, "", "sparse: ragged keeps sparse rows"),
    "AnnData, sparse, Zarr": ("zarr", CELLS, "+/**", "AnnData in Zarr"),
    "Zarr v2: a store": ("zarr", {"window": 100, "beside": ["y"]}, "+/x/**", "part of each sample (`beside`)"),
    "Zarr v3: a store": ("zarr", {"window": 100, "beside": ["y"]}, "+/x/**", "part of each sample (`beside`)"),
    "OME-Zarr": ("zarr", {"window": [1, 1, 1, 32, 32]}, "+/s0/**", "Blocks [1, 1, 1, 32, 32]"),
    "Parquet": ("parquet", {}, "", "each row is a sample"),
    "Parquet: hive folders": ("parquet", {}, "+/**", "each row is a sample"),
    "Parquet: Spark's output": ("parquet", {}, "+/**/*.parquet", "2 .crc"),
    "JSON Lines": ("jsonl", {}, "", "Each line is a sample"),
    "JSON Lines, gzip": ("jsonl", {}, "", "Compressed by gzip"),
    "CSV: recordings": ("bytes", {}, "", "numpy reads it"),
    "TSV: a table": ("bytes", {}, "", "source.labels to this table"),
    "text with a byte order mark": ("jsonl", {"raw": True}, "", "byte order mark"),
    "TFRecord": ("tfrecord", {}, "", "Each record is a sample"),
    "TFRecord, gzip": ("tfrecord", {"compression": "gzip"}, "", "Compressed by gzip"),
    "TFRecord, zlib": ("tfrecord", {"compression": "zlib"}, "", "Compressed by zlib"),
    "WebDataset": ("tar", {}, "", "equal up to the first dot"),
    "LMDB: a folder": ("lmdb", {}, "+/**/data.mdb", "1 lock.mdb"),
    "images in class folders": (
        "image", {"classes": ["cat", "dog"]}, "+/**", "number of its folder",
    ),
    "images in one folder": ("image", {"label": "none"}, "", "there is no label"),
    "TIFF": ("tiff", {}, "", "The whole image is one sample"),
    "EDF": ("edf", {"window": "2s"}, "", "Windows of 2 s of 4 signals at 250 Hz"),
    "BDF": ("edf", {"window": "2s"}, "", "Windows of 2 s of 4 signals at 250 Hz"),
    "NIfTI": ("nifti", {}, "", "The whole volume is one sample"),
    "NIfTI, gzip": ("nifti", {}, "", "The whole volume is one sample"),
    "DICOM": ("dicom", {}, "", "The stored pixels are a sample"),
    "FITS": ("fits", {}, "", "The first image is one sample"),
    "WAV": ("audio", {"window": "1s", "rate": 16000}, "", "one second at 16000 Hz"),
    "FLAC": ("audio", {"window": "1s", "rate": 16000}, "", "one second at 16000 Hz"),
}  # fmt: skip
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW), id=name) for name in EXPECTED
]


def test_the_table_has_every_kind() -> None:
    assert list(EXPECTED) == list(KINDS)
    assert len(EXPECTED) >= 40


@pytest.mark.parametrize("name", NAMES)
def test_what_is_proposed_for_a_kind_of_source(name: str, tmp_path: Path) -> None:
    form, options, url, words = EXPECTED[name]
    given = KINDS[name](tmp_path)
    found = probe_source(SourceConfig(url=(given,)))
    assert (found.format, found.options) == (form, options)
    assert found.url == (given + url[1:] if url else "")
    assert words in " ".join(found.findings)
    assert "cannot be read this way" not in " ".join(found.findings)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_the_service_runs_what_was_written(name: str, tmp_path: Path) -> None:
    data, config, cache = tmp_path / "data", tmp_path / "growcache.yaml", tmp_path / "cache"
    data.mkdir()
    url = KINDS[name](data)
    words = ["init", str(config), "--yes", "--url", url, "--cache", str(cache)]
    assert main(words) == 0
    assert yaml.safe_load(config.read_text())["source"]["format"] == EXPECTED[name][0]
    assert main(["run", str(config), "--until-full"]) == 0
    with growcache.Snapshot.take(cache) as snapshot:
        assert len(snapshot)


@pytest.mark.slow
def test_the_function_in_the_comments_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    url = KINDS["CSV: recordings"](tmp_path / "data")
    config = tmp_path / "growcache.yaml"
    words = ["init", str(config), "--yes", "--url", url, "--cache", str(tmp_path / "cache")]
    assert main(words) == 0
    code = config.read_text().split("  #   # my_reader.py\n")[1].split("  format:")[0]
    (tmp_path / "my_reader.py").write_text(re.sub("^  #(   )?", "", code, flags=re.M))
    monkeypatch.chdir(tmp_path)
    decode = 'source.options={decode: "my_reader:read"}'
    assert main(["run", str(config), "--until-full", "--set", decode]) == 0
    with growcache.Snapshot.take(tmp_path / "cache") as snapshot:
        shapes = {field: value.shape for field, value in snapshot[0].items()}
    assert shapes == {"time": (100,), "x": (100,), "y": (100,)}
