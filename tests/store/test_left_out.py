"""Files that no one meant: which a listing leaves out, and how they are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from growcache.cache.status import read_status
from growcache.config_source import SourceConfig
from growcache.store.left_out import left_out_by
from growcache.store.opening import open_store
from growcache.store.urls import parse_url
from tests.sampling.services import run, write_config

JUNK = {
    "a.npy": None,
    "_metadata": None,
    "x/.DS_Store": ".DS_Store",
    "._a.npy": "._*",
    "Thumbs.db": "Thumbs.db",
    "_SUCCESS": "_SUCCESS",
    "_committed_12": "_committed_*",
    "a.npy.crc": "*.crc",
    ".a.npy.crc": "*.crc",
    ".a.npy": "hidden",
    ".git/a.npy": "hidden",
    "x/_temporary/0/a.npy": "_temporary",
    "__MACOSX/a.npy": "__MACOSX",
    "x/../a.npy": None,
}


@pytest.mark.parametrize("name", JUNK)
def test_names_that_no_one_meant(name: str) -> None:
    for url in ("s3://b/.home/**", "s3://b/.home/"):
        assert left_out_by(parse_url(url), "npy")(f".home/{name}", 9) == JUNK[name]


@pytest.mark.parametrize(
    ("url", "form", "meant", "left_out"),
    [
        ("s3://b/**/*.crc", "npy", ["a.crc", "x.crc"], [".x", ".a.crc"]),
        ("s3://b/.*", "npy", [".a", "._a", ".DS_Store"], ["Thumbs.db"]),
        ("s3://b/.cache/*", "npy", [".cache/a"], [".cache/.a"]),
        ("s3://b/*/.cache/*", "npy", ["x/.cache/a"], []),
        ("s3://b/_S*", "npy", ["_SUCCESS"], []),
        ("s3://b/**", "zarr", [".zarray", "c/0", "x/.zattrs"], [".DS_Store", "._c"]),
        ("s3://b/**", "my:read", ["a"], [".a"]),
        ("s3://b/**", "parquet", ["a"], ["_metadata", "x/_common_metadata", "_delta_log/a"]),
        ("s3://b/_delta_log/*", "jsonl", ["_delta_log/a"], []),
    ],
)
def test_what_a_glob_spells_is_meant(
    url: str, form: str, meant: list[str], left_out: list[str]
) -> None:
    why = left_out_by(parse_url(url), form)
    assert [why(name, 1) for name in meant] == [None] * len(meant)
    assert all(why(name, 1) for name in left_out)


@pytest.mark.parametrize(
    ("form", "kept"),
    [("npy", False), ("jsonl", False), ("bytes", True), ("my:read", True), ("zarr", True)],
)
def test_empty_objects(form: str, kept: bool) -> None:
    assert left_out_by(parse_url("s3://b/*"), form)("a", 0) == (None if kept else "empty")


def test_a_service_counts_them_and_takes_what_is_named(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for n in range(9):
        np.save(tmp_path / "d" / f"{n}.npy", np.full(4, n, "<f4"))
    for name in (".DS_Store", "._1.npy", "empty"):
        (tmp_path / "d" / name).write_bytes(b"" if name == "empty" else b"junk")
    config = write_config(tmp_path / "c.yaml", f"{tmp_path}/d/*")
    code, errors = run(config, "--until-full")
    assert (code, errors.strip()) == (
        0,
        "listing leaves out: 3 (.DS_Store 1, ._* 1, empty 1)",
    )
    for _ in range(2):
        found = read_status(tmp_path / "c")
        assert (found.objects, found.holes) == (9, 0)
        assert found.left_out == {".DS_Store": 1, "._*": 1, "empty": 1}
        assert run(config, "--until-full") == (0, "")  # without a listing
    named = SourceConfig.model_validate({"url": f"{tmp_path}/d/.DS_Store"})
    assert [entry.size for page in open_store(named).pages() for entry in page] == [4]
